"""Which incidents were drills, and what came of each injected fault: pure functions, the same for the console and the command line.

An incident counts as a drill only where injected faults explain all of it: they landed in the same start of the job, after the last
step at which the check had passed and not after the step of detection, and hit everybody whom it names. Whoever is wrong here
absolves a bad device, so nothing is guessed: an incident that names a rank that no fault hit is as real as any other, and so is
one of which nobody knows in which start of the job it was found. A person may say otherwise (`judging`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

_LONGEST = 250


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that landed: on which rank and node, in which start of the job ("": unknown), first and last at which step."""

    rank: int
    node: str
    start: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Found:
    """An incident.

    Attributes:
        key: tells one from another.
        step, passed: of detection, and the last at which its check had passed.
        status: of its verdict.
        named: ranks that it names, and their nodes.
        candidates: where it names nobody, ranks one of which was wrong; may be empty.
        start: of the job, in which it was found; "" unknown.
    """

    key: int | str
    step: int
    passed: int
    status: str
    named: frozenset[tuple[int, str]]
    start: str
    candidates: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fault.

    Attributes:
        outcome: as `store.pages.DrillRow.outcome`.
        incident, late: the first incident that it has to do with, and how many steps after it had struck first.
    """

    outcome: str
    incident: int | str | None = None
    late: int | None = None


def start_of(record: Mapping[str, Any]) -> str:
    """What names a start of the job and no other, of a record of any kind; "" where it does not say.

    Generations begin at 1 again in each session of `bitwitness run`, so only both together tell one start from another. Without a
    supervisor the guard draws an id.
    """
    session, generation = record.get("supervision"), record.get("generation")
    if isinstance(session, str) and session and type(generation) is int and generation > 0:
        return f"{session}/{generation}"[:_LONGEST]
    known = record.get("start_id")
    return known[:_LONGEST] if isinstance(known, str) else ""


def is_drill(found: Found, faults: Sequence[Struck]) -> bool:
    """Whether injected faults explain all of an incident."""
    return _is_drill(found, [one for one in faults if _explains(one, found)])


def settled(
    faults: Sequence[Struck], incidents: Sequence[Found], passed: Mapping[str, int]
) -> tuple[frozenset[int | str], list[Outcome]]:
    """Which incidents of a run were drills, by their keys, and what came of each of its faults.

    An incident that names nobody but ranks that other faults had hit is theirs, and says nothing of this one; one that names
    somebody whom no fault had hit has named wrongly, or is none of the fault's: it is no drill either way.

    Args:
        faults: that landed in the run.
        incidents: of the run.
        passed: the last step at which any check passed, by the start of the job.
    """
    of_start: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(faults):
        of_start[one.start].append(number)
    drills: set[int | str] = set()
    mine: list[list[Found]] = [[] for _ in faults]
    for found in sorted(incidents, key=lambda one: (one.step, str(one.key))):
        numbers = [number for number in of_start.get(found.start, ()) if _explains(faults[number], found)]
        drill = _is_drill(found, [faults[number] for number in numbers])
        if drill:
            drills.add(found.key)
        for number in numbers:
            if _concerns(faults[number], found, drill):
                mine[number].append(found)
    outcomes = [_outcome(one, each, drills, passed.get(one.start, -1)) for one, each in zip(faults, mine, strict=True)]
    return frozenset(drills), outcomes


def _outcome(struck: Struck, mine: Sequence[Found], drills: AbstractSet[int | str], passed: int) -> Outcome:
    if not mine:
        # It was looked at work that was done after it, and nothing was found; else nobody has looked yet.
        return Outcome("missed" if struck.start and passed > struck.last else "unclear")
    first = mine[0]
    if first.status != "attributed":
        outcome = "caught, unattributed"
    else:
        caught = (struck.rank, struck.node) in first.named and first.key in drills
        outcome = "caught" if caught else "named wrongly"
    return Outcome(outcome, first.key, max(0, first.step - max(struck.first, first.passed + 1)))


def _is_drill(found: Found, explaining: Sequence[Struck]) -> bool:
    hit = {(one.rank, one.node) for one in explaining}
    if found.status == "attributed":
        return bool(found.named) and found.named <= hit
    ranks = {rank for rank, _ in hit}
    return bool(ranks & found.candidates if found.candidates else ranks)


def _concerns(struck: Struck, found: Found, drill: bool) -> bool:
    if found.status != "attributed":
        return not found.candidates or struck.rank in found.candidates
    return (struck.rank, struck.node) in found.named or not drill


def _explains(struck: Struck, found: Found) -> bool:
    same = struck.start != "" and found.start == struck.start
    return same and struck.first <= found.step and struck.last > found.passed
