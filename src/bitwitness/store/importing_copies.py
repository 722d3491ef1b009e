"""Runs that are there twice: one directory that is reached by two paths, one that was moved, one that was copied.

All of them have the same id in run.json, and are one run: counted twice, a single corruption would be two strikes against a device. The
one with the most on record that is there is counted, the others refer to it. What an incident or a drill is counted by follows
from its name, so that a copy that went its own way counts for what it has besides, and for nothing that it was copied with.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.runfiles.reading import JOURNALS, Folder, identity
from bitwitness.store import importing_problems
from bitwitness.store.database import changed
from bitwitness.store.importing_problems import Problems
from bitwitness.store.tables import drills, incidents, problems, runs, sources

_COMPARED = 4
"""Journals of two runs that are compared: ranks train together, so copies differ in all of them."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A run that others have the id of.

    Attributes:
        key: of it.
        path: its directory.
        there: whether it is there now.
        size: bytes of its journals that were read.
        main: the run that was counted instead of it until now; None: it was counted itself.
        apart: whether it was known to have gone its own way.
    """

    key: int
    path: str
    there: bool
    size: int
    main: int | None = None
    apart: bool = False


def in_order(group: Sequence[Copy], before: Mapping[int, int]) -> list[Copy]:
    """The one that is counted first, then the others. Pure.

    It stays the same while it is there, unless another has had more a round ago: two paths of one directory are read one after the
    other, and the one that was read last is always a little ahead.

    Args:
        group: runs of one id.
        before: by key, the size of each in the round before; of one that is missing here, nothing can be said.
    """
    best = sorted(group, key=lambda one: (not one.there, -one.size, one.key))
    counted = [one for one in group if one.main is None and one.there]
    if len(counted) == 1:
        (now,) = counted
        if all(before.get(one.key, 0) <= now.size or not one.there for one in best):
            best.remove(now)
            best.insert(0, now)
    return best


def settle(connection: sa.Connection, before: Mapping[int, int], now: str) -> dict[int, int]:
    """Write which runs are copies of which, and which of their incidents and drills are counted elsewhere.

    Returns:
        The sizes of all of these runs, for the next round.
    """
    sizes: dict[int, int] = {}
    moved = False
    for group in _groups(connection):
        sizes |= {one.key: one.size for one in group}
        main, *others = in_order(group, before)
        apart = {one.key: _apart(connection, main, one) for one in others}
        moved |= _write(connection, main, None, apart=False)
        for one in others:
            moved |= _write(connection, one, main.key, apart=apart[one.key])
        for table, columns in (
            (incidents, (incidents.c.name,)),
            (drills, (drills.c.rank, drills.c.start, drills.c.fault, drills.c.step, drills.c.spec)),
        ):
            moved |= _mark(connection, table, columns, [one.key for one in (main, *others)])
        moved |= _tell(connection, main, [one for one in others if apart[one.key]], group, now)
    if moved:
        changed(connection)
    return sizes


def _groups(connection: sa.Connection) -> list[list[Copy]]:
    many = sa.select(runs.c.run).where(runs.c.run != "").group_by(runs.c.run).having(sa.func.count() > 1)
    columns = (runs.c.id, runs.c.run, runs.c.path, runs.c.current, runs.c.missing, runs.c.copy_of, runs.c.apart)
    alike = sa.or_(runs.c.run.in_(many), runs.c.copy_of.is_not(None))
    found = connection.execute(sa.select(*columns).where(alike).order_by(runs.c.id)).all()
    total = sa.select(sources.c.run_id, sa.func.sum(sources.c.offset)).where(
        sources.c.run_id.in_([row.id for row in found]), sources.c.path.startswith(f"{JOURNALS}/")
    )
    size = {key: int(of) for key, of in connection.execute(total.group_by(sources.c.run_id))}
    groups: dict[str, list[Copy]] = defaultdict(list)
    for row in found:
        there = row.current and not row.missing
        groups[row.run].append(Copy(row.id, row.path, there, size.get(row.id, 0), row.copy_of, row.apart))
    return list(groups.values())


def _write(connection: sa.Connection, one: Copy, main: int | None, *, apart: bool) -> bool:
    if (one.main, one.apart) == (main, apart):
        return False
    connection.execute(sa.update(runs).where(runs.c.id == one.key).values(copy_of=main, apart=apart))
    return True


def _mark(connection: sa.Connection, table: sa.Table, columns: Sequence[sa.Column[Any]], keys: Sequence[int]) -> bool:
    """Mark what one of the runs before in this order has as well."""
    known: set[tuple[Any, ...]] = set()
    moved = False
    for key in keys:
        rows = connection.execute(sa.select(table.c.id, table.c.copied, *columns).where(table.c.run_id == key)).all()
        for wrong in (True, False):
            ids = [row.id for row in rows if (tuple(row[2:]) in known) is wrong and row.copied is not wrong]
            for at in range(0, len(ids), 500):
                here = table.c.id.in_(ids[at : at + 500])
                connection.execute(sa.update(table).where(here).values(copied=wrong))
            moved |= bool(ids)
        known |= {tuple(row[2:]) for row in rows}
    return moved


def _tell(connection: sa.Connection, main: Copy, apart: Sequence[Copy], group: Sequence[Copy], now: str) -> bool:
    """Say on both pages that two runs of one id are not the same."""
    other = {main.key: apart[0].path} if apart else {}
    other |= {one.key: main.path for one in apart}
    moved = 0
    for one in group:
        said, where = Problems(), f"{one.path}/{JOURNALS}"
        if one.key in other:
            said.note(
                where,
                f"another run with the same id went on by itself from a copy: {other[one.key]}. Both are shown, and what they "
                "share is counted once",
            )
        elif where in _known(connection, one.key):
            said.clear(where)
        else:
            continue
        wrote = importing_problems.write(connection, one.key, said, now)
        if wrote:
            count = sa.select(sa.func.count()).where(problems.c.run_id == one.key).scalar_subquery()
            connection.execute(sa.update(runs).where(runs.c.id == one.key).values(problems=count))
        moved += wrote
    return moved > 0


def _known(connection: sa.Connection, run: int) -> set[str]:
    return set(connection.scalars(sa.select(problems.c.path).where(problems.c.run_id == run)))


def _apart(connection: sa.Connection, main: Copy, copy: Copy) -> bool:
    """Whether a copy holds what the other has not, and the other way round; as before, where that cannot be told now."""
    columns = (sources.c.run_id, sources.c.path, sources.c.offset, sources.c.identity)
    here = sa.and_(sources.c.path.startswith(f"{JOURNALS}/"), sources.c.offset > 0)
    each: dict[str, dict[int, Any]] = defaultdict(dict)
    for row in connection.execute(sa.select(*columns).where(here, sources.c.run_id.in_((main.key, copy.key)))):
        each[row.path][row.run_id] = row
    told = []
    for path in sorted(path for path, both in each.items() if len(both) == 2)[:_COMPARED]:
        ours, theirs = each[path][main.key], each[path][copy.key]
        long, short, folder = (ours, theirs, main) if ours.offset >= theirs.offset else (theirs, ours, copy)
        told.append(_differs(folder.path, path, long, short))
    known = [one for one in told if one is not None]
    return any(known) if known else copy.apart


def _differs(folder: str, path: str, long: Any, short: Any) -> bool | None:
    """Whether a journal does not begin with the other one; None where it cannot be read from here."""
    if long.offset == short.offset:
        return bool(long.identity != short.identity)
    with suppress(OSError), Folder(Path(folder)) as opened:
        descriptor = opened.open(path)
        try:
            if os.fstat(descriptor).st_size >= short.offset:
                return identity(descriptor, short.offset) != str(short.identity)
        finally:
            os.close(descriptor)
    return None
