"""Where wrong elements lie, and what chance is asked for. Pure, and neither torch nor numpy.

All tests of places ask two things. Had the wrong elements of each tensor been scattered at random over it, as many as there are, how
probable would be what is seen? And: would it be as probable if the columns of all tensors of a shape had been numbered in another
order, or the rows? For not all elements of a tensor can be wrong: the gradient of an embedding is 0 but in the rows of the tokens that
came, an activation in the columns of dead units. That makes distances and residues which recur, but in no order of rows or columns
more than in another, as what a broken lane does. Only what neither explains is a pattern.

Two more things must not be taken for one. A few bad positions that are wrong again in every step repeat any accidental distance between
them as often as there are steps, so such positions are looked at once, all together. And looking at many distances finds something by
chance alone, so that each has a part of what one look may be wrong with (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bitwitness.scan.chance import tail

CHANCE = 1e-3
"""In wrong elements that are scattered at random, each kind of pattern is found with at most this probability."""
_MOST_PLACES = 60_000
_LEAST = 3
_RECUR = 0.5
"""Of all that chance leaves to recur, so much does."""


@dataclass(frozen=True, slots=True)
class Places:
    """Wrong elements of one tensor in one step, or of a number of them that are wrong at the same places.

    Attributes:
        shape: of the tensor. indices: in logical order, ascending.
        elements: among how many they lie: all of the tensor, or those up to the last that was kept.
        whole: all wrong elements are here.
        step: in which they were wrong; None of those that are wrong in several.
    """

    shape: tuple[int, ...]
    indices: tuple[int, ...]
    elements: int
    whole: bool = True
    step: int | None = 0

    @property
    def columns(self) -> int:
        """The length of the last axis; all others together are the rows of a matrix, as a matrix product sees them."""
        return max(1, self.shape[-1]) if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows that have one of `elements`."""
        return -(-self.elements // self.columns)


def places(shape: tuple[int, ...], indices: Iterable[int], mismatches: int, step: int = 0) -> Places:
    """Of one tensor in one step; `mismatches` says whether there were more than those that were kept."""
    kept = tuple(sorted(set(indices)))
    size = math.prod(shape)
    whole = len(kept) >= mismatches
    return Places(shape, kept, size if whole or not kept else kept[-1] + 1, whole, step)


def to_look_at(found: Sequence[Places]) -> list[Places]:
    """The tensors to look at, not too many, with positions that recur put together."""
    looked: list[Places] = []
    for group in by_shape(_some(found)):
        bad = _bad_places(group, Counter(index for one in group for index in one.indices))
        looked += _apart(group, bad)
    return looked


def by_shape(found: Iterable[Places]) -> list[list[Places]]:
    """Groups of one shape each."""
    groups: dict[tuple[int, ...], list[Places]] = {}
    for one in found:
        groups.setdefault(one.shape, []).append(one)
    return list(groups.values())


def recurring(found: Sequence[Places]) -> int:
    """How many wrong elements lie at positions that are wrong in one step after another, in whichever tensors of a shape.

    What strikes several tensors of a step alike is one event and no recurrence.
    """
    count = 0
    for group in by_shape(_some(found)):
        steps = [
            Places(some[0].shape, tuple(sorted({index for one in some for index in one.indices})), some[0].elements)
            for some in _by_step(group)
        ]
        bad = _bad_places(steps, Counter(index for one in steps for index in one.indices))
        count += sum(index in bad for one in group for index in one.indices) if bad else 0
    return count


def alike(found: Sequence[Places]) -> int:
    """How many wrong elements lie where another tensor of that shape was wrong in the same step; 0 if chance may have done it."""
    total = seen = 0
    by_chance = 0.0
    for group in by_shape(_some(found)):
        for some in _by_step(group):
            hit = Counter(index for one in some for index in one.indices)
            total += hit.total()
            seen += sum(count for count in hit.values() if count > 1)
            by_chance += math.fsum(
                len(one.indices)
                * (1 - math.prod(1 - len(other.indices) / other.elements for other in some if other is not one))
                for one in some
            )
    if (
        seen < _LEAST
        or seen - by_chance < _RECUR * (total - by_chance)
        or tail(total, seen, by_chance / total) > CHANCE
    ):
        return 0
    return seen


def _by_step(group: Sequence[Places]) -> list[list[Places]]:
    steps: dict[int | None, list[Places]] = {}
    for one in group:
        steps.setdefault(one.step, []).append(one)
    return list(steps.values())


def _some(found: Sequence[Places]) -> list[Places]:
    """Evenly over the run, so that what was late is looked at too."""
    total = sum(len(one.indices) for one in found)
    every = max(1, math.ceil(total / _MOST_PLACES))
    return [one for one in found[::every] if one.indices]


def _bad_places(group: Sequence[Places], hit: Counter[int]) -> set[int]:
    """The positions that are wrong again and again.

    With many steps one position says so alone. With few, it is that nearly all positions recur; then each that does is one.
    """
    if len(group) < 2:
        return set()
    among, total = max(one.elements for one in group), hit.total()
    share = max(len(one.indices) / one.elements for one in group)
    mean = math.fsum(len(one.indices) / one.elements for one in group)
    often = next(
        (
            count
            for count in range(2, len(group) + 1)
            if count > mean and among * tail(len(group), count, mean / len(group)) <= CHANCE
        ),
        None,
    )
    if often is not None and share < 1:
        bad = {index for index, count in hit.items() if count >= often}
        if bad:
            return bad
    repeats = total - len(hit)
    missed = math.prod(1 - len(one.indices) / among for one in group)
    expected = max(0.0, total - among * (1 - missed))
    if (
        repeats >= _LEAST
        and repeats - expected >= _RECUR * (total - expected)
        and tail(total, repeats, expected / total) <= CHANCE
    ):
        return {index for index, count in hit.items() if count > 1}
    return set()


def _apart(group: Sequence[Places], bad: set[int]) -> Iterator[Places]:
    """The bad positions as one, and of each tensor what is wrong elsewhere."""
    if not bad:
        yield from group
        return
    among, whole = max(one.elements for one in group), all(one.whole for one in group)
    yield Places(group[0].shape, tuple(sorted(bad)), among, whole, None)
    for one in group:
        fresh = tuple(index for index in one.indices if index not in bad)
        if fresh:
            yield Places(one.shape, fresh, one.elements, one.whole, one.step)


def beyond_steps(looked: Sequence[Places], lags: Iterable[int]) -> dict[int, float]:
    """By distance, how many pairs within tensors there would be if wrong elements of different steps paired no less often.

    Whatever makes some places of a tensor more probable in every step, as a mask that leaves half of a matrix 0, does so across steps.
    """
    expected = dict.fromkeys(lags, 0.0)
    for group in by_shape(one for one in looked if one.step is not None):
        steps = [Counter(index for one in some for index in one.indices) for some in _by_step(group)]
        if len(steps) < 2:
            continue
        hit: Counter[int] = Counter()
        for step in steps:
            hit.update(step)
        across = (hit.total() ** 2 - sum(step.total() ** 2 for step in steps)) / 2
        within = sum(len(one.indices) * (len(one.indices) - 1) for one in group) / 2
        for lag in expected:
            pairs = _at(hit, lag) - sum(_at(step, lag) for step in steps)
            expected[lag] += pairs * within / across
    return expected


def _at(hit: Counter[int], lag: int) -> int:
    return sum(count * hit[index + lag] for index, count in hit.items() if index + lag in hit)
