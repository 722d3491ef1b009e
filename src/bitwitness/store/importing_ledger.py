"""The ledger as ranges that never overlap, from journals that say some steps twice: pure functions.

A rank's journal speaks of one step again in two cases. Within one start of the guard several pieces of work are accounted for
(two micro-batches of one step): then the worst word counts. After a restart the steps since the checkpoint are made again, and
what was verified of them before was verified of work that has been thrown away: then the word of the later start counts. So a
rank-step is counted once, by its latest start; that it had failed before is not lost, because the incident stays. What cannot
be told is a restart whose journal lacks the record of its start: its words are then weighed with those before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

_SEVERITY = {"passed": 0, "unverified": 1, "failed": 2}
OUTCOMES = tuple(_SEVERITY)


@dataclass(frozen=True, slots=True)
class Range:
    """What one check said of steps `first` to `last` on one rank, in which start of the guard."""

    first: int
    last: int
    outcome: str
    reason: str
    detail: Any
    start: int

    @property
    def words(self) -> tuple[Any, ...]:
        """What must be equal for two neighbours to be one."""
        return self.outcome, self.reason, self.detail, self.start

    def gives_way_to(self, other: Range) -> bool:
        """Whether the other's word counts where both speak; the other came later in the journal."""
        return other.start > self.start or (
            other.start == self.start and _SEVERITY[other.outcome] > _SEVERITY[self.outcome]
        )


def laid(ranges: Sequence[Range], new: Iterable[Range]) -> list[Range]:
    """The ranges with new ones laid over them, in order of their steps; `new` in the order of the journal."""
    found = list(ranges)
    for one in new:
        if not found or one.first > found[-1].last:
            _append(found, one)
        else:
            _insert(found, one)
    return found


def _append(found: list[Range], one: Range) -> None:
    if found and found[-1].last + 1 == one.first and found[-1].words == one.words:
        found[-1] = replace(found[-1], last=one.last)
    else:
        found.append(one)


def _insert(found: list[Range], one: Range) -> None:
    begin = bisect_left(found, one.first, key=lambda each: each.last)
    end = begin
    while end < len(found) and found[end].first <= one.last:
        end += 1
    pieces: list[Range] = []
    at = one.first
    for old in found[begin:end]:
        if old.first < one.first:
            pieces.append(replace(old, last=one.first - 1))
        low, high = max(old.first, one.first), min(old.last, one.last)
        if at < low:
            pieces.append(replace(one, first=at, last=low - 1))
        pieces.append(replace(one if old.gives_way_to(one) else old, first=low, last=high))
        at = high + 1
        if old.last > one.last:
            pieces.append(replace(old, first=one.last + 1))
    if at <= one.last:
        pieces.append(replace(one, first=at))
    # With the neighbours, because the first and the last piece may say the same as they.
    low, high = max(0, begin - 1), min(len(found), end + 1)
    joined: list[Range] = []
    for piece in [*found[low:begin], *sorted(pieces, key=lambda each: each.first), *found[end:high]]:
        _append(joined, piece)
    found[low:high] = joined


def tally(ranges: Iterable[Range]) -> Counter[str]:
    """Steps by outcome."""
    found: Counter[str] = Counter()
    for one in ranges:
        found[one.outcome] += one.last - one.first + 1
    return found
