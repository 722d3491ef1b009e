"""Where wrong elements lie: strides, runs, tiles and rows, told from what chance does. Pure, and neither torch nor numpy.

All tests ask the same: had the wrong elements of each tensor been scattered at random over it, as many as there are, how probable
would be what is seen? Two things must not be taken for a pattern. A few bad positions that are wrong again in every step repeat any
accidental distance between them as often as there are steps, so such positions are looked at once, all together. And looking at many
distances finds something by chance alone, so that each has a part of what one look may be wrong with (Bonferroni).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bitwitness.compare.results import Lag
from bitwitness.scan.chance import tail

CHANCE = 1e-3
"""In wrong elements that are scattered at random, each kind of pattern is found with at most this probability."""
LAGS = (*range(1, 33), 64, 128)
"""Neighbours, the strides that faults.md section 4 asks for, and two widths of vectors."""

_MOST_PLACES = 60_000
_LEAST = 3
_RECUR = 0.5
"""Of all that chance leaves to recur, so much does."""
_SHAPES = 200


@dataclass(frozen=True, slots=True)
class Places:
    """Wrong elements of one tensor in one step, or of a number of them that are wrong at the same places.

    Attributes:
        shape: of the tensor. indices: in logical order, ascending.
        elements: among how many they lie: all of the tensor, or those up to the last that was kept.
        whole: all wrong elements are here.
    """

    shape: tuple[int, ...]
    indices: tuple[int, ...]
    elements: int
    whole: bool = True

    @property
    def columns(self) -> int:
        """The length of the last axis; all others together are the rows of a matrix, as a matrix product sees them."""
        return max(1, self.shape[-1]) if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows that have one of `elements`."""
        return -(-self.elements // self.columns)


def places(shape: tuple[int, ...], indices: Iterable[int], mismatches: int) -> Places:
    """Of one tensor in one step; `mismatches` says whether there were more than those that were kept."""
    kept = tuple(sorted(set(indices)))
    size = math.prod(shape)
    whole = len(kept) >= mismatches
    return Places(shape, kept, size if whole or not kept else kept[-1] + 1, whole)


def to_look_at(found: Sequence[Places]) -> tuple[list[Places], int]:
    """The tensors to look at, not too many, with positions that recur put together; and how many elements recur."""
    by_shape: dict[tuple[int, ...], list[Places]] = {}
    for one in _some(found):
        by_shape.setdefault(one.shape, []).append(one)
    looked: list[Places] = []
    recurring = 0
    for group in by_shape.values():
        hit = Counter(index for one in group for index in one.indices)
        bad = _bad_places(group, hit)
        recurring += sum(hit[index] for index in bad)
        looked += _apart(group, bad)
    return looked, recurring


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
    yield Places(group[0].shape, tuple(sorted(bad)), among, whole)
    for one in group:
        fresh = tuple(index for index in one.indices if index not in bad)
        if fresh:
            yield Places(one.shape, fresh, one.elements, one.whole)


# Distances -----------------------------------------------------------------------------------------------------------


def lags(looked: Sequence[Places]) -> tuple[Lag, ...]:
    """How often two wrong elements lie so far apart, for each of `LAGS`.

    Among k of n at random, (n - d) k (k - 1) / (n (n - 1)) pairs are expected at the distance d. Two places are one pair however many
    tensors have both: what strikes several tensors of a step alike repeats its accidental distances in each of them.
    """
    pairs: dict[int, set[int]] = {lag: set() for lag in LAGS}
    expected = dict.fromkeys(LAGS, 0.0)
    possible = 0
    for one in looked:
        here, hits, size = set(one.indices), len(one.indices), one.elements
        if hits < 2:
            continue
        share = hits * (hits - 1) / (size * (size - 1))
        possible += hits * (hits - 1) // 2
        for lag in LAGS:
            if lag < size:
                expected[lag] += (size - lag) * share
                pairs[lag] |= here.intersection([index + lag for index in one.indices])
    return tuple(
        Lag(
            lag,
            len(pairs[lag]),
            expected[lag],
            len(pairs[lag]) >= _LEAST
            and len(LAGS) * _pairs_by_chance(possible, len(pairs[lag]), expected[lag]) <= CHANCE,
        )
        for lag in LAGS
    )


def _pairs_by_chance(possible: int, seen: int, expected: float) -> float:
    return tail(max(possible, seen), seen, expected / max(possible, seen, 1))


def stride(found: Sequence[Lag]) -> int | None:
    """The distance of which all others that were found are multiples, if it is not 1: then elements are neighbours."""
    steps = [one.lag for one in found if one.found]
    if not steps or steps[0] == 1 or any(step % steps[0] for step in steps):
        return None
    return steps[0]


# Blocks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of neighbours of one size.

    Attributes:
        rows, columns: of the block. count: so many. found: more than chance allows.
        width, height: of the matrices that they are in, 0 where these differ.
    """

    rows: int
    columns: int
    count: int
    found: bool
    height: int
    width: int


def tiles(looked: Sequence[Places]) -> tuple[Tile, ...]:
    """Blocks of wrong elements, all of whose elements are wrong and none around them, from two elements on; the commonest first."""
    counts: Counter[tuple[int, int]] = Counter()
    sizes: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for one in looked:
        for block in _blocks(one):
            counts[block] += 1
            sizes.setdefault(block, set()).add((one.rows, one.columns))
    total = sum(one.elements for one in looked)
    found = []
    for (rows, columns), count in counts.most_common(_SHAPES):
        area = rows * columns
        expected = math.fsum(one.elements * _all_hit(one, area) for one in looked)
        chance = tail(total, count, expected / total) if total else 1.0
        where = sizes[rows, columns]
        height, width = next(iter(where)) if len(where) == 1 else (0, 0)
        known = _SHAPES * chance <= CHANCE
        found.append(Tile(rows, columns, count, known, height, width))
    return tuple(sorted(found, key=lambda tile: (-tile.count * tile.rows * tile.columns, tile.rows, tile.columns)))


def _all_hit(one: Places, area: int) -> float:
    """The probability that so many given elements are all hit."""
    hits, size = len(one.indices), one.elements
    if area > hits:
        return 0.0
    if area > 64:  # a bound will do
        return math.exp(area * math.log(hits / size))
    return math.prod((hits - number) / (size - number) for number in range(area))


def _blocks(one: Places) -> list[tuple[int, int]]:
    """Rows and columns of each full rectangle that is connected to nothing else."""
    columns = one.columns
    left = set(one.indices)
    found = []
    for first in one.indices:
        if first not in left:
            continue
        left.discard(first)
        size, waiting = 1, [first]
        top = bottom = first // columns
        west = east = first % columns
        while waiting:
            here = waiting.pop()
            row, column = divmod(here, columns)
            for step in (-1, 0, 1):
                for aside in (-1, 0, 1):
                    other = here + step * columns + aside
                    if 0 <= column + aside < columns and other in left:
                        left.discard(other)
                        waiting.append(other)
                        size += 1
            top, bottom, west, east = min(top, row), max(bottom, row), min(west, column), max(east, column)
        block = (bottom - top + 1, east - west + 1)
        if 1 < size == block[0] * block[1]:
            found.append(block)
    return found
