"""Which incidents were drills, and what came of each injected fault: pure functions, the same for the console and the command line.

An incident counts as a drill only where injected faults explain all of it: they landed in the same start of the job, on everybody
whom it names, and in work that the check looked at. A replay looks at one step, so a fault in another one explains nothing of it, and
one that struck once does not explain a rank that was wrong again when it repeated its work. Memory is compared since the last step at
which it was equal, so there any step since then will do. Whoever is wrong here absolves a bad device, so nothing is guessed: an
incident that names a rank that no fault hit is as real as any other, and so is one of which nobody knows in which start of the job it
was found. A person may say otherwise (`judging`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

_LONGEST = 250


COMPUTE, AGAIN, STATE = "c", "a", "s"
"""Kinds of work in which a fault may land: training itself, work that is done again to compare it, and what only keeps state."""
_KINDS = {"train": COMPUTE, "replay": AGAIN, "arbiter": AGAIN, "rerun": AGAIN}
_OF_STATE = ("replicas", "at_rest", "update", "bounds")
"""Checks that look at what has become of memory since they had passed; all others look at the work of one step."""
_MOST = 5_000


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that landed.

    Attributes:
        rank, node: where.
        start: in which start of the job; "" unknown.
        landed: step -> the kinds of work in which it landed there, one letter each; at least one.
    """

    rank: int
    node: str
    start: str
    landed: Mapping[int, str]

    @property
    def first(self) -> int:
        """The first step at which it landed."""
        return min(self.landed)

    @property
    def last(self) -> int:
        """The last one."""
        return max(self.landed)


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
        check, persistence: of its verdict.
    """

    key: int | str
    step: int
    passed: int
    status: str
    named: frozenset[tuple[int, str]]
    start: str
    candidates: frozenset[int] = frozenset()
    check: str = ""
    persistence: str = "unknown"


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


def landing(landed: Mapping[int, str], step: int, work: str) -> dict[int, str]:
    """What a fault has landed in, with one more landing; of very many the newest."""
    return merged(landed, {step: _KINDS.get(work, STATE)})


def merged(one: Mapping[int, str], other: Mapping[int, str]) -> dict[int, str]:
    """What a fault has landed in, of two accounts of it; of very many steps the newest."""
    both = {step: "".join(sorted({*one.get(step, ""), *other.get(step, "")})) for step in {**one, **other}}
    return both if len(both) <= _MOST else {step: both[step] for step in sorted(both)[-_MOST:]}


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
    if struck.start == "" or found.start != struck.start:
        return False
    if found.check in _OF_STATE:
        return any(found.passed < step <= found.step for step in struck.landed)
    kinds = struck.landed.get(found.step, "")
    return AGAIN in kinds if found.persistence == "persistent" else COMPUTE in kinds or AGAIN in kinds
