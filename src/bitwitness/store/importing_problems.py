"""What could not be read, kept until it can be: a file that is skipped silently is taken for one that said nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from bitwitness.store.database import upsert
from bitwitness.store.importing_values import digest, text
from bitwitness.store.tables import problems


@dataclass(slots=True)
class Problems:
    """Of one round: what is wrong, by path, and which paths are fine again."""

    found: dict[str, tuple[str, int]] = field(default_factory=dict)
    fine: set[str] = field(default_factory=set)

    def note(self, path: str, what: str, lines: int = 0) -> None:
        """This file could not be read, wholly or in part."""
        self.found[path] = (what, lines)
        self.fine.discard(path)

    def clear(self, path: str) -> None:
        """This file was read."""
        if path not in self.found:
            self.fine.add(path)

    def skipped(self, path: str, lines: int) -> None:
        """This file was read, but for so many lines."""
        if lines:
            self.note(
                path,
                f"{lines} line{'s' * (lines > 1)} could not be used (torn, damaged, foreign, or of a newer version) and left out",
                lines,
            )
        else:
            self.clear(path)


def write(connection: sa.Connection, run: int | None, said: Problems, now: str) -> int:
    """Note problems, and drop those that are over; how many rows that changed. `since when` stays while the text stays."""
    known: dict[str, sa.Row[Any]] = {}
    keys = {digest(path): path for path in (*said.found, *said.fine)}
    for some in _chunks(list(keys)):
        chosen = sa.select(problems.c.place, problems.c.text, problems.c.lines).where(problems.c.place.in_(some))
        known |= {row.place: row for row in connection.execute(chosen)}
    over = [place for place, path in keys.items() if path in said.fine and place in known]
    for some in _chunks(over):
        connection.execute(sa.delete(problems).where(problems.c.place.in_(some)))
    rows = []
    for path, (what, lines) in said.found.items():
        place, short = digest(path), text(what, 1000)
        before = known.get(place)
        if before is None or (before.text, before.lines) != (short, lines):
            rows.append({"place": place, "run_id": run, "path": text(path), "text": short, "time": now, "lines": lines})
    upsert(connection, problems, rows, keys=("place",))
    return len(over) + len(rows)


def _chunks(values: list[str]) -> Iterable[list[str]]:
    return (values[at : at + 500] for at in range(0, len(values), 500))
