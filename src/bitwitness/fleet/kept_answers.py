"""What people are asked before an act, and what they have said: the only place that knows these rows.

A question is asked of exactly one act on one machine because of one incident, as it was worded then. An answer is given to a question and
not to a proposal, so that nothing is ever done by an approval of something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwitness.fleet.clusters.base import ActKind, Call
from bitwitness.fleet.kept import Kept
from bitwitness.fleet.state import State

Said = Literal["approved", "rejected"]

_ROW = "number, proposal, incident, node, act, machine, digest, calls, asked, said, who, why, answered, lapsed"
_SINCE = 3
"""The schema from which on there are answers; a file of an older one that may not be written has none."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked, and the answer.

    Attributes:
        number: of its row.
        proposal: key of the proposal.
        incident, node, act, machine: because of what, which node is asked about, what would be done to it, and which machine it was then.
        digest: of all that was shown.
        calls: what would have been called when it was asked.
        asked: when.
        said: the answer; "" while there is none.
        who, why, answered: by whom, for which reason and when; "".
        lapsed: why it counts no more; "" where it does.
    """

    number: int
    proposal: int
    incident: str
    node: str
    act: ActKind
    machine: str
    digest: str
    calls: tuple[str, ...]
    asked: str
    said: Said | Literal[""]
    who: str
    why: str
    answered: str
    lapsed: str

    @property
    def name(self) -> str:
        """By which it is answered: the proposal, and what was shown of it."""
        return f"{self.proposal}-{self.digest}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        names = ("proposal", "incident", "node", "act", "machine", "asked", "said", "who", "why", "answered", "lapsed")
        return {"name": self.name, **{name: getattr(self, name) for name in names}, "calls": list(self.calls)}


def digest_of(kept: Kept, act: str, machine: str) -> str:
    """What stands for all that is shown of a proposal. Pure."""
    shown = [kept.key, kept.number, kept.proposal.to_json(), act, machine]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:8]


class Questions:
    """The questions of a state."""

    def __init__(self, state: State) -> None:
        self._state = state

    def ask(self, kept: Kept, act: ActKind, machine: str, calls: Sequence[Call], why: str) -> Question:
        """Ask, inside `State.change`; what was asked or answered about the proposal before counts no more, which is why."""
        self._state.write(
            "UPDATE approvals SET lapsed = ? WHERE proposal = ? AND lapsed IS NULL",
            (why or "it is asked anew", kept.key),
        )
        row = (kept.key, kept.proposal.incident, kept.proposal.node, act, machine, digest_of(kept, act, machine))
        words = json.dumps([str(call) for call in calls])
        self._state.write(
            "INSERT INTO approvals (proposal, incident, node, act, machine, digest, calls, asked) VALUES (?,?,?,?,?,?,?,?)",
            (*row, words, self._state.stamp()),
        )
        (asked,) = self._read("proposal = ? AND lapsed IS NULL", kept.key)
        return asked

    def of(self, proposal: int) -> Question | None:
        """The question about a proposal that counts."""
        return next(iter(self._read("proposal = ? AND lapsed IS NULL", proposal)), None)

    def all_of(self, proposal: int) -> list[Question]:
        """Everything that was asked about a proposal, oldest first."""
        return self._read("proposal = ?", proposal)

    def waiting(self) -> list[Question]:
        """Questions that nobody has answered, about what is not over, oldest first."""
        return self._read(f"said IS NULL AND {_OPEN}")

    def pending(self) -> list[Question]:
        """Questions about what is not over, answered or not, oldest first."""
        return self._read(_OPEN)

    def about(self, name: str) -> list[Question]:
        """Questions that count and are about a node or an incident of this name, oldest first."""
        return self._read("lapsed IS NULL AND (node = ? OR incident = ?)", name, name)

    def answer(self, number: int, said: Said, who: str, why: str) -> bool:
        """Answer it, inside `State.change`; False where it was answered already, or counts no more."""
        changed = self._state.write(
            "UPDATE approvals SET said = ?, who = ?, why = ?, answered = ? WHERE number = ? AND said IS NULL AND lapsed IS NULL",
            (said, who, why, self._state.stamp(), number),
        )
        return changed > 0

    def withdraw(self, question: Question, why: str) -> None:
        """Have an answer count no more, inside `State.change`, and ask the same again."""
        self._state.write("UPDATE approvals SET lapsed = ? WHERE number = ?", (why, question.number))
        self._state.write(
            "INSERT INTO approvals (proposal, incident, node, act, machine, digest, calls, asked) "
            "SELECT proposal, incident, node, act, machine, digest, calls, ? FROM approvals WHERE number = ?",
            (self._state.stamp(), question.number),
        )

    def _read(self, which: str, *values: Any) -> list[Question]:
        if self._state.schema < _SINCE:
            return []
        rows = self._state.read(f"SELECT {_ROW} FROM approvals WHERE {which} ORDER BY number", values)  # noqa: S608
        return [_question(row) for row in rows]


_OPEN = "lapsed IS NULL AND proposal IN (SELECT key FROM proposals WHERE final = 0)"


def _question(row: tuple[Any, ...]) -> Question:
    (number, proposal, incident, node, act, machine, digest, calls, asked, said, who, why, answered, lapsed) = row
    words = tuple(json.loads(calls))
    about = (incident, node, act, machine, digest, words, asked)
    return Question(number, proposal, *about, said or "", who, why, answered or "", lapsed or "")
