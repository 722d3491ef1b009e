"""The devices of a comparison, asked to compute one operation: what each of them answers.

Every process asks the same questions in the same order and gets all answers, so that each can decide alone what is asked next, and no
rank must be told. Where devices fail to compute what they are asked, that is an answer too: a question may make no sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwitness.compare import cases, reproduce
from bitwitness.compare.cases import Case
from bitwitness.compare.exchange import Alone, Exchange
from bitwitness.compare.participant import Seat, on
from bitwitness.compare.records import Role
from bitwitness.compare.simulated import untouched

_MOST_KEPT = 8
"""Different answers of one device that are kept whole."""


@dataclass(slots=True)
class Answers:
    """What one device answered to one question.

    Attributes:
        role: what it is in the comparison.
        counts: by digest of the answer, how often it was given.
        outputs: by digest, the answer itself, where it was asked for.
        problem: why there is none, or none further.
    """

    role: Role
    counts: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    problem: str = ""

    @property
    def times(self) -> int:
        """How often it answered."""
        return sum(self.counts.values())


class Panel:
    """Those of a comparison's devices that are asked: all references, the leader among them, and one suspect.

    Args:
        seats: of this process.
        suspect: the name of the one that is suspected.
        exchange: with the other processes.
        step: the first that the comparison has not had: a device that is played is at a later step with each call.
    """

    def __init__(self, seats: Sequence[Seat], suspect: str, exchange: Exchange | None = None, step: int = 0) -> None:
        self._seats = [
            seat
            for seat in seats
            if seat.participant.role != "control" and _asked(seat.participant.role, seat, suspect)
        ]
        self._exchange: Exchange = Alone() if exchange is None else exchange
        self._step = step
        self.calls = 0
        """Of the suspect, all questions together: the same number in every process."""

    def references(self, case: Case, times: int = 2, *, keep: bool = False) -> dict[str, Answers]:
        """What all references answer, each asked so often. A collective."""
        return self._ask(case, times, ("leader", "reference"), "", keep)

    def suspect(self, case: Case, times: int, *, until_unlike: str = "", keep: bool = False) -> Answers:
        """What the suspect answers, asked so often, or until its answer is another one than this. A collective.

        Raises:
            ValueError: there is no suspect in any process.
        """
        found = self._ask(case, times, ("suspect",), until_unlike, keep)
        if not found:
            raise ValueError("no process has the suspect")
        answers = next(iter(found.values()))
        self.calls += max(1, answers.times)
        return answers

    def _ask(self, case: Case, times: int, roles: Sequence[Role], until_unlike: str, keep: bool) -> dict[str, Answers]:
        mine = {
            seat.participant.name: self._answers(seat, case, times, until_unlike, keep)
            for seat in self._seats
            if seat.participant.role in roles
        }
        gathered: list[dict[str, Answers]] = self._exchange.gather(mine)
        return {name: one for found in gathered for name, one in sorted(found.items())}

    def _answers(self, seat: Seat, case: Case, times: int, until_unlike: str, keep: bool) -> Answers:
        found = Answers(seat.participant.role)
        for _ in range(times):
            self._step += seat.fault is not None
            try:
                with on(seat.device), seat.fault.during(self._step) if seat.fault is not None else nullcontext():
                    outputs = reproduce.computed(case.operation, case.args, case.kwargs, seat.device)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
                found.problem = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                break
            with untouched():
                answer = cases.digest(outputs)
                found.counts[answer] = found.counts.get(answer, 0) + 1
                if keep and answer not in found.outputs and len(found.outputs) < _MOST_KEPT:
                    found.outputs[answer] = tuple(one.clone() for one in outputs)
            if until_unlike and answer != until_unlike:
                break
        return found


def _asked(role: Role, seat: Seat, suspect: str) -> bool:
    return role in ("leader", "reference") or seat.participant.name == suspect


def agreed(answers: Mapping[str, Answers]) -> str | None:
    """The one answer that all of at least two references gave each time; None: they disagree, and nobody is right. Pure."""
    if len(answers) < 2 or any(one.problem or not one.counts for one in answers.values()):
        return None
    given = {answer for one in answers.values() for answer in one.counts}
    return next(iter(given)) if len(given) == 1 else None


def makes_sense(case: Case) -> bool:
    """Whether an operation can be computed, asked of this processor before any device: on a GPU, an index out of range ends all.

    Where the processor cannot compute the original either, cases with indices are not made smaller.
    """
    indexed = any(not one.is_floating_point() and one.dtype != torch.bool for one in case.tensors())
    if not indexed:
        return True
    try:
        reproduce.computed(case.operation, case.args, case.kwargs, torch.device("cpu"))
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return False
    return True
