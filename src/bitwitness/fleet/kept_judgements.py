"""What incidents were judged to be, as far as the controller has heard of it: the only place that knows these rows.

The word itself stands beside the incident (`runfiles.judging`), where anybody can say it with or without a controller. What is kept here
is what the controller goes by, so that it is the same after a restart, and where the directory of the run is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwitness.fleet.state import State

AWAY = ("false alarm", "drill")
"""Judgements by which nothing was wrong with the hardware: nobody is acted upon because of such an incident, and it is no strike."""
_SINCE = 3
"""The schema from which on there are judgements; a file of an older one that may not be written has none."""
_A = {"false alarm": "a false alarm", "drill": "a drill", "confirmed": "confirmed"}
JUDGED_AWAY = "incident IN (SELECT incident FROM judgements WHERE judgement IN ('false alarm', 'drill'))"
"""A condition on rows that have an incident."""


@dataclass(frozen=True, slots=True)
class Word:
    """What an incident was judged to be.

    Attributes:
        incident: its id.
        judgement: `false alarm`, `drill` or `confirmed`.
        who: said so; "" where it follows from records of injected faults.
        why: how that is known.
        time: when it was said.
    """

    incident: str
    judgement: str
    who: str
    why: str
    time: str

    @property
    def is_away(self) -> bool:
        """Whether nothing is to be done because of the incident."""
        return self.judgement in AWAY

    @property
    def text(self) -> str:
        """The same as a part of a sentence."""
        if not self.who:
            return f"{_A[self.judgement]}, because {self.why}"
        when = f" at {self.time}" if self.time else ""
        return f"judged {_A[self.judgement]} by {self.who}{when}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


class Words:
    """The judgements that a state has."""

    def __init__(self, state: State) -> None:
        self._state = state

    def put(self, word: Word) -> None:
        """This is what counts from now on, inside `State.change`."""
        row = (word.incident, word.judgement, word.who, word.why, word.time)
        self._state.write("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?, ?, ?)", row)

    def of(self, incident: str) -> Word | None:
        """What counts of an incident."""
        return next(iter(self._read("incident = ?", incident)), None)

    def all(self) -> dict[str, Word]:
        """Every incident of which something was said."""
        return {one.incident: one for one in self._read("1")}

    def away(self) -> set[str]:
        """Incidents because of which nothing is to be done."""
        return {one.incident for one in self._read("judgement IN ('false alarm', 'drill')")}

    def out(self) -> list[tuple[str, Word]]:
        """Nodes that were taken out because of such incidents, and of none that counts, and that nobody has returned since."""
        if self._state.schema < _SINCE:
            return []
        rows = self._state.read(
            "SELECT p.node, p.incident FROM proposals p WHERE p.status IN ('done', 'already out') "  # noqa: S608
            "AND p.updated > COALESCE((SELECT c.time FROM clears c WHERE c.node = p.node AND c.device = ''), '') "
            "AND p.node IN (SELECT node FROM proposals WHERE status IN ('done', 'already out') AND "
            f"{JUDGED_AWAY}) ORDER BY p.key"
        )
        by_node: dict[str, list[str]] = {}
        for node, incident in rows:
            by_node.setdefault(str(node), []).append(str(incident))
        words = self.all()
        away = {name: word for name, word in words.items() if word.is_away}
        return [(node, away[names[-1]]) for node, names in by_node.items() if set(names) <= away.keys()]

    def _read(self, which: str, *values: Any) -> list[Word]:
        if self._state.schema < _SINCE:
            return []
        query = f"SELECT incident, judgement, who, why, time FROM judgements WHERE {which}"  # noqa: S608
        return [Word(*row) for row in self._state.read(query, values)]
