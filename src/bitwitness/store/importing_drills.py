"""Which incidents were drills, and what came of each injected fault: pure functions.

An incident counts as a drill only where a fault that was injected explains it: one that landed in the same start of the job,
after the last step at which the check had passed and not after the step of detection. An incident of a run into which faults
were injected earlier or later is as real as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that landed: on which rank, in which start of the job (from 1), first and last at which step."""

    rank: int
    start: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Found:
    """An incident: its key and step, the last step at which its check had passed, whom it names, in which start (0: unknown)."""

    key: int
    step: int
    passed: int
    status: str
    named: frozenset[int]
    start: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fault.

    Attributes:
        outcome: as `pages.DrillRow.outcome`.
        incident, late: the first incident that it explains, and how many steps after it had struck first.
        explains: all incidents that it explains.
    """

    outcome: str
    incident: int | None
    late: int | None
    explains: frozenset[int]


def judged(struck: Struck, incidents: Sequence[Found], passed: int, others: Sequence[Struck] = ()) -> Outcome:
    """What came of a fault.

    An incident that names nobody but ranks that other faults had hit is theirs, and says nothing of this one; one that names
    somebody whom no fault had hit is wrong, whoever else it names.

    Args:
        struck: the fault.
        incidents: of its run.
        passed: the last step at which any check passed on any rank.
        others: all faults of the run.
    """
    explained = [one for one in incidents if _explains(struck, one)]
    hit = {one.key: {other.rank for other in (struck, *others) if _explains(other, one)} for one in explained}
    mine = [
        one
        for one in explained
        if one.status != "attributed" or struck.rank in one.named or not one.named <= hit[one.key]
    ]
    if not mine:
        # It was looked at work that was done after it, and nothing was found; else nobody has looked yet.
        return Outcome("missed" if passed > struck.last else "unclear", None, None, frozenset())
    first = min(mine, key=lambda one: (one.step, one.key))
    if first.status != "attributed":
        outcome = "caught, unattributed"
    else:
        outcome = "caught" if struck.rank in first.named <= hit[first.key] else "named wrongly"
    late = max(0, first.step - max(struck.first, first.passed + 1))
    return Outcome(outcome, first.key, late, frozenset(one.key for one in mine))


def _explains(struck: Struck, found: Found) -> bool:
    same = found.start in (0, struck.start)
    return same and struck.first <= found.step and struck.last > found.passed
