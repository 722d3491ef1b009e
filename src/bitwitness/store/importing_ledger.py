"""The ledger as ranges that never overlap, from journals that say some steps twice: pure functions.

A rank's journal speaks of one step again in two cases. Within one start of the guard several pieces of work are accounted for
(two micro-batches of one step): then the worst word counts. After a restart the steps since the checkpoint are made again, and
what was verified of them before was verified of work that has been thrown away: from the step on with which the job goes on,
nothing counts that was said before, whether it is said again or not (`Undone`). So a rank-step is counted once, by its latest start;
that it had failed before is not lost, because the incident stays. What cannot be told is a restart whose journal lacks the record
of its start: its words are then weighed with those before.

Retention removes ranges and keeps their sums (`Sums`). Which steps they were of is then unknown, so whatever touches them takes
as much off as it may have to: what is left may be less than what was verified, and is never more.
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


@dataclass(frozen=True, slots=True)
class Undone:
    """The work from step `first` on was thrown away; `before`: only that of earlier starts than this one, 0: all of it."""

    first: int
    before: int = 0


def laid(ranges: Sequence[Range], new: Iterable[Range | Undone]) -> list[Range]:
    """The ranges with new ones laid over them, in order of their steps; `new` in the order of the journal."""
    found = list(ranges)
    for one in new:
        if isinstance(one, Undone):
            found = _without(found, one)
        elif not found or one.first > found[-1].last:
            _append(found, one)
        else:
            _insert(found, one)
    return found


def _without(ranges: Sequence[Range], gone: Undone) -> list[Range]:
    begin = bisect_left(ranges, gone.first, key=lambda each: each.last)
    kept = list(ranges[:begin])
    for one in ranges[begin:]:
        if gone.before and one.start >= gone.before:
            kept.append(one)
        elif one.first < gone.first:
            kept.append(replace(one, last=gone.first - 1))
    return kept


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


@dataclass(frozen=True, slots=True)
class Sums:
    """What is known of the steps of one check on one rank whose ranges were removed.

    Attributes:
        last: they are up to here; those after it have ranges.
        start: of the guard, up to which they were made.
        common: a step of them that passed, on every rank; -1 unknown.
        passed, unverified, failed: how many, at least.
    """

    last: int
    start: int
    common: int
    passed: int
    unverified: int
    failed: int

    @property
    def is_whole(self) -> bool:
        """Whether each of them passed."""
        return self.passed == self.last + 1

    def passed_up_to(self, step: int) -> int:
        """A step not after this one that passed, the last that is known; -1 if none is."""
        if self.is_whole:
            return min(step, self.last)
        return self.common if self.common <= step else -1

    def less(self, many: int, last: int) -> Sums:
        """Without so many of the steps, which may have been any of them; what remains is up to `last`."""
        sums = {each: max(0, getattr(self, each) - many) for each in OUTCOMES}
        known = self.common if self.common <= last else -1
        # Of steps that all passed it is known which are left.
        return replace(self, **sums, last=last, common=last if self.is_whole and last >= 0 else known)

    def to_json(self) -> list[int]:
        """A JSON value."""
        return [self.last, self.start, self.common, self.passed, self.unverified, self.failed]


def after_pruning(pruned: Sums | None, new: Iterable[Range | Undone]) -> tuple[Sums | None, list[Range | Undone]]:
    """What is left of the sums after new words, and those that speak of steps that still have ranges.

    A word on a step without a range counts as nothing, because nobody knows what it would be weighed against.
    """
    kept: list[Range | Undone] = []
    for one in new:
        if pruned is None or one.first > pruned.last:
            kept.append(one)
        elif isinstance(one, Undone):
            if not one.before or pruned.start < one.before:
                pruned = pruned.less(pruned.last + 1 - one.first, one.first - 1)
            kept.append(one)
        else:
            end = min(one.last, pruned.last)
            if one.outcome != "passed":
                lost = one.first <= pruned.common <= end
                left = max(0, pruned.passed - (end - one.first + 1))
                pruned = replace(pruned, passed=left, common=-1 if lost else pruned.common)
            if one.last > end:
                kept.append(replace(one, first=end + 1))
    return pruned, kept
