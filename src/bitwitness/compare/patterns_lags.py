"""Distances at which wrong elements lie: strides, told from what chance and the rows and columns that can be hit explain.

A distance is a pattern if its pairs are more than chance brings, given how many wrong elements each row has; and if it is that of more
pairs of columns than it would be in another order of columns. Each two columns count once, however many rows and steps have both:
where only some columns can be hit, the accidental distances between them are seen again in all of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bitwitness.compare.patterns_places import CHANCE, Places, beyond_steps, by_shape
from bitwitness.compare.results import Lag
from bitwitness.scan.chance import tail

LAGS = (*range(1, 33), 64, 128)
"""Neighbours, the strides that faults.md section 4 asks for, and two widths of vectors."""
_LEAST = 3
_MOST_BITS = 1 << 29
"""Of tables of pairs; a matrix that is so wide has no two rows with the same columns by chance."""


@dataclass(slots=True)
class _Expected:
    """Pairs at a distance: by chance, given how many each row has; and pairs of lines: seen, and in any order of them."""

    pairs: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LAGS, 0.0))
    lines: dict[int, float] = field(default_factory=lambda: dict.fromkeys(LAGS, 0.0))
    seen: dict[int, int] = field(default_factory=lambda: dict.fromkeys(LAGS, 0))


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
    ordered, across = _Expected(), beyond_steps(looked, LAGS)
    for group in by_shape(looked):
        _of_group(group, ordered)
    return tuple(
        Lag(
            lag,
            len(pairs[lag]),
            mean := max(expected[lag], ordered.pairs[lag], across[lag]),
            len(pairs[lag]) >= _LEAST
            and _more(possible, len(pairs[lag]), mean)
            and _more(possible, ordered.seen[lag], ordered.lines[lag]),
        )
        for lag in LAGS
    )


def _more(possible: int, seen: int, expected: float) -> bool:
    possible = max(possible, seen, 1)
    return expected < possible and len(LAGS) * tail(possible, seen, expected / possible) <= CHANCE


def _of_group(group: Sequence[Places], into: _Expected) -> None:
    """Of tensors of one shape: pairs in rows that lie q apart, for each q that a distance needs, and pairs in one column."""
    width, height = group[0].columns, max(one.rows for one in group)
    lines = [_lines(one.indices, width) for one in group]
    by_rows: dict[int, _Pairs] = {}
    for apart in sorted({lag // width + more for lag in LAGS for more in (0, 1)}):
        if width > 1 and apart < height:
            by_rows[apart] = _Pairs.of(
                ((row, rows.get(number + apart, ())) for rows, _ in lines for number, row in rows.items()), width
            )
    columns = _Pairs.of(((column, column) for _, some in lines for column in some.values()), height)
    for lag in LAGS:
        apart, rest = divmod(lag, width)
        if rest:
            for where, distance in ((apart, rest), (apart + 1, rest - width)):
                if where in by_rows:
                    _add(into, lag, by_rows[where], distance, width)
        elif apart < height:
            _add(into, lag, columns, apart, height)


def _add(into: _Expected, lag: int, pairs: _Pairs, distance: int, length: int) -> None:
    """Ordered pairs of different lines of so many: the share (length - |distance|) / (length (length - 1)) has a distance."""
    share = (length - abs(distance)) / (length * (length - 1))
    into.pairs[lag] += pairs.all * share
    into.lines[lag] += pairs.different * share
    into.seen[lag] += pairs.at(distance)


def _lines(indices: Sequence[int], width: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The columns that are hit by row, and the rows by column."""
    rows: dict[int, list[int]] = {}
    columns: dict[int, list[int]] = {}
    for index in indices:
        row, column = divmod(index, width)
        rows.setdefault(row, []).append(column)
        columns.setdefault(column, []).append(row)
    return rows, columns


@dataclass(slots=True)
class _Pairs:
    """Ordered pairs of two lines in which something is wrong: all, how many different ones, and how many of these by distance."""

    all: int = 0
    different: int = 0
    distances: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, lists: Iterable[tuple[Sequence[int], Sequence[int]]], length: int) -> _Pairs:
        """Of each element of the one list with each of the other, of lists of lines of so many; none with itself."""
        found = cls()
        some = [(one, other) for one, other in lists if one and other and (one is not other or len(one) > 1)]
        wide = sum(len(one) for one, _ in some) * length > _MOST_BITS
        table: dict[int, int] = {}
        near = [*LAGS, *(-lag for lag in LAGS)]
        for one, other in some:
            same = len(one) if one is other else len(set(one).intersection(other))
            found.all += len(one) * len(other) - same
            if wide:
                there = set(other)
                for distance in near:
                    found.distances[distance] += sum(line + distance in there for line in one)
                continue
            mask = sum(1 << line for line in other)
            for line in one:
                table[line] = table.get(line, 0) | mask
        if wide:
            found.different = found.all
            return found
        for line, mask in table.items():
            found.different += (mask & ~(1 << line)).bit_count()
        found._count(table, length)
        return found

    def _count(self, table: dict[int, int], length: int) -> None:
        """Short distances, and those that lead from the end of one row to the beginning of the next."""
        reach, window = LAGS[-1], (1 << 2 * LAGS[-1] + 1) - 1
        wanted = (
            {lag % length for lag in LAGS} | {lag % length - length for lag in LAGS} | {lag // length for lag in LAGS}
        )
        near = [distance for distance in wanted if distance and abs(distance) <= reach]
        back = [distance for distance in wanted if distance < -reach]
        for line, mask in table.items():
            first = max(0, line - reach)
            around = mask >> first & window
            for distance in near:
                if line + distance >= 0 and around >> line + distance - first & 1:
                    self.distances[distance] += 1
            if back and line >= length - reach:
                beginning = mask & window
                for distance in back:
                    if line + distance >= 0 and beginning >> line + distance & 1:
                        self.distances[distance] += 1

    def at(self, distance: int) -> int:
        """Different pairs of which the second line lies so far behind the first."""
        return self.distances[distance]


def stride(found: Sequence[Lag]) -> int | None:
    """The distance of which all others that were found are multiples, if it is not 1: then elements are neighbours."""
    steps = [one.lag for one in found if one.found]
    if not steps or steps[0] == 1 or any(step % steps[0] for step in steps):
        return None
    return steps[0]
