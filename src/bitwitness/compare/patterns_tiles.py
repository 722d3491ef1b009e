"""Blocks of neighbours in which all is wrong: runs, tiles, whole rows and columns; told from what chance leaves behind.

A block counts if there are more of its size than chance brings, also given how many wrong elements each row and each column has, and
how much more often neighbours are hit at all. Whole rows and columns are named by their own right: no order changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bitwitness.compare.patterns_places import CHANCE, Places, beyond_steps, by_shape
from bitwitness.scan.chance import tail

_SHAPES = 200
_SHAPES_BY_CHANCE = 8
"""Sizes of blocks that chance brings at all, once what is needed of chance alone has been asked of all sizes."""


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


@dataclass(slots=True)
class _Block:
    """Blocks of one size: how many, in matrices of which sizes, and at which first elements, first rows and columns of which shapes.

    What strikes tensors of several shapes at the same places in logical order is one block, as is one distance.
    """

    count: int = 0
    sizes: set[tuple[int, int]] = field(default_factory=set)
    starts: set[int] = field(default_factory=set)
    tops: set[tuple[tuple[int, ...], int]] = field(default_factory=set)
    wests: set[tuple[tuple[int, ...], int]] = field(default_factory=set)


def tiles(looked: Sequence[Places]) -> tuple[Tile, ...]:
    """Blocks of wrong elements, all of whose elements are wrong and none around them, from two elements on; the commonest first."""
    blocks: dict[tuple[int, int], _Block] = {}
    for one in looked:
        for top, west, rows, columns in _blocks(one):
            block = blocks.setdefault((rows, columns), _Block())
            block.count += 1
            block.sizes.add((one.rows, one.columns))
            block.starts.add(top * one.columns + west)
            block.tops.add((one.shape, top))
            block.wests.add((one.shape, west))
    total = sum(one.elements for one in looked)
    denser = _denser(looked)
    found = []
    for (rows, columns), block in sorted(blocks.items(), key=lambda item: -item[1].count)[:_SHAPES]:
        area = rows * columns
        expected = math.fsum(one.elements * _all_hit(one, area) for one in looked)
        height, width = next(iter(block.sizes)) if len(block.sizes) == 1 else (0, 0)
        known = (
            _SHAPES * _chance(total, len(block.starts), expected) <= CHANCE
            and _SHAPES_BY_CHANCE * _chance(total, len(block.starts), expected * denser ** min(area - 1, 1000))
            <= CHANCE
            and (
                columns == width
                or _not_in_any_order(looked, min(len(block.wests), len(block.starts)), rows, columns, across=True)
            )
            and (
                rows == height
                or _not_in_any_order(looked, min(len(block.tops), len(block.starts)), columns, rows, across=False)
            )
        )
        found.append(Tile(rows, columns, block.count, known, height, width))
    return tuple(sorted(found, key=lambda tile: (-tile.count * tile.rows * tile.columns, tile.rows, tile.columns)))


def _chance(total: int, count: int, expected: float) -> float:
    return tail(total, count, expected / total) if 0 <= expected < total else 1.0


def _denser(looked: Sequence[Places]) -> float:
    """How many times as often as by chance neighbours are hit in different steps: then so are they in one."""
    most = 1.0
    for distance in {1, *(one.columns for one in looked)} if len({one.columns for one in looked}) == 1 else {1}:
        by_chance = math.fsum(
            max(0, one.elements - distance)
            * len(one.indices)
            * (len(one.indices) - 1)
            / (one.elements * (one.elements - 1))
            for one in looked
            if one.elements > 1
        )
        if by_chance > 0:
            most = max(most, beyond_steps(looked, [distance])[distance] / by_chance)
    return most


def _not_in_any_order(looked: Sequence[Places], starts: int, lines: int, length: int, *, across: bool) -> bool:
    """Whether these are more than there would be if the columns were numbered in any order (across), or else the rows.

    In `length` columns of so many, k of which are hit in a row, all are hit with the probability of drawing them. Lines that are hit
    at the same places are one, as blocks at the same columns are.
    """
    if length == 1:
        return True
    expected, possible = 0.0, 0
    for group in by_shape(looked):
        extent, others = group[0].columns, max(one.rows for one in group)
        if not across:
            extent, others = others, extent
        different: set[tuple[tuple[int, ...], ...]] = set()
        for one in group:
            hit: dict[int, list[int]] = {}
            for index in one.indices:
                row, column = divmod(index, one.columns)
                hit.setdefault(row if across else column, []).append(column if across else row)
            longest = {line: tuple(places) for line, places in hit.items() if len(places) >= length}
            for line in longest:
                some = [longest.get(line + number) for number in range(lines)]
                if all(some):
                    different.add(tuple(places for places in some if places))
        possible += extent * max(1, others)
        expected += math.fsum(
            (extent - length + 1)
            * math.prod(
                math.exp(
                    math.lgamma(len(places) + 1)
                    - math.lgamma(len(places) - length + 1)
                    - math.lgamma(extent + 1)
                    + math.lgamma(extent - length + 1)
                )
                for places in some
            )
            for some in different
        )
    return _SHAPES_BY_CHANCE * _chance(possible, starts, expected) <= CHANCE


def _all_hit(one: Places, area: int) -> float:
    """The probability that so many given elements are all hit."""
    hits, size = len(one.indices), one.elements
    if area > hits:
        return 0.0
    if area > 64:  # a bound will do
        return math.exp(area * math.log(hits / size))
    return math.prod((hits - number) / (size - number) for number in range(area))


def _blocks(one: Places) -> list[tuple[int, int, int, int]]:
    """First row, first column, rows and columns of each full rectangle that is connected to nothing else."""
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
            found.append((top, west, *block))
    return found
