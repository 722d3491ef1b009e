"""Whether wrong elements repeat along the rows or columns of a matrix: what one lane or one of several units leaves behind.

Two questions, because a fault may begin anywhere each time it strikes. Within one tensor: are the coordinates at which wrong elements
begin gathered in few residues of a period? Across tensors: do more of them than chance allows have a wrong element in the same residue?
Neighbours count as one beginning, else a run of four would pass for four coordinates that agree.

Tensors of a step and of a run have rows and columns in common that can be hit at all (see `patterns_places`), so that none is evidence
beside the others as if it had been drawn anew: their probabilities are put together in a way that holds whatever they share, and the
coordinates that are hit most in all of them together must lie in one residue too, as no set of them does by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bitwitness.compare.patterns_places import CHANCE, Places
from bitwitness.compare.results import Period
from bitwitness.scan.chance import tail

_LONGEST = 256
_REPEATS = 3
"""Fewer repetitions than these are two accidents and the distance between them."""
_ONE_PLACE = 0.6
"""With more of them in one repetition than this it is one place that is bad, with a few accidents elsewhere."""
_LARGEST = 32
"""Tensors that are looked at one by one: those with most wrong elements."""
_SINGLE = 0.8
_SPARSE = 0.1
_SMALLEST = 0.9
"""A shorter period is preferred to one of its multiples that explains so little more."""

Axis = Literal["row", "column"]
_AXES: tuple[Axis, ...] = ("row", "column")


@dataclass(slots=True)
class _Seen:
    """What a period explains of some tensors: hits in its residues, of how many, and the share at random."""

    period: int
    phases: tuple[int, ...] = ()
    inside: int = 0
    hits: int = 0
    expected: float = 0.0

    @property
    def worth(self) -> float:
        """How much knowing it tells of where a wrong element is: its share in these residues, by how much that is more than chance."""
        share = self.inside / self.hits if self.hits else 0.0
        return share * math.log(share / self.expected) if share > self.expected > 0 else 0.0


def periods(looked: Sequence[Places]) -> tuple[Period, ...]:
    """Per axis the period that explains most, the smallest if several do alike."""
    by_shape: dict[tuple[int, ...], list[Places]] = {}
    for one in looked:
        by_shape.setdefault(one.shape, []).append(one)
    found = []
    for axis in _AXES:
        best: _Seen | None = None
        for group in by_shape.values():
            chosen = sorted(group, key=lambda one: -len(one.indices))[:_LARGEST]
            named = _best(
                [_each(axis, chosen, period) for period in _within(axis, chosen, len(by_shape))]
                + [_together(axis, group, period) for period in _across(axis, group, len(by_shape))]
            )
            if named is not None and (best is None or named.inside > best.inside):
                best = named
        if best is not None:
            found.append(Period(axis, best.period, best.phases, best.inside / best.hits, best.expected))
    return tuple(found)


def _best(made: Sequence[_Seen]) -> _Seen | None:
    """Of the periods that chance does not explain, the one to name."""
    some = [one for one in made if one.inside]
    most = max((one.worth for one in some), default=0.0)
    return min((one for one in some if one.worth >= _SMALLEST * most), key=lambda one: one.period, default=None)


def _each(axis: Axis, group: Sequence[Places], period: int) -> _Seen:
    """Of tensors in each of which the period may begin elsewhere; the phases are those of the one with most wrong elements."""
    seen = _Seen(period)
    for one in group:
        alone = _together(axis, [one], period)
        seen.phases = seen.phases or alone.phases
        seen.inside += alone.inside
        seen.hits += len(one.indices)
        seen.expected += alone.expected * alone.inside
    seen.expected /= max(1, seen.inside)
    return seen


def _together(axis: Axis, group: Sequence[Places], period: int) -> _Seen:
    """Its phases: the residues with more than twice as many hits as at random, and so many that they are not an accident."""
    coordinates = [value for one in group for value in _coordinates(axis, one)]
    extent = max(_extent(axis, one) for one in group)
    counts = Counter(value % period for value in coordinates)
    typical = max(counts.values())
    phases = []
    for residue, count in sorted(counts.items()):
        expected = len(coordinates) * _places(extent, period, residue) / extent
        # Of every second element no residue can have more than twice its share.
        if count > (2 if period > 2 else 1.5) * expected and 4 * count >= typical:
            phases.append(residue)
    chosen = set(phases)
    repeated = Counter(value // period for value in coordinates if value % period in chosen)
    if len(repeated) < _REPEATS or max(repeated.values()) > _ONE_PLACE * repeated.total():
        return _Seen(period, hits=len(coordinates))
    share = sum(_places(extent, period, residue) for residue in phases) / extent
    return _Seen(period, tuple(phases), sum(counts[residue] for residue in phases), len(coordinates), share)


def _coordinates(axis: Axis, one: Places) -> list[int]:
    columns = one.columns
    return [index % columns if axis == "column" else index // columns for index in one.indices]


def _extent(axis: Axis, one: Places) -> int:
    return one.columns if axis == "column" else one.rows


def _places(extent: int, period: int, residue: int) -> int:
    """How many coordinates have this residue."""
    return (extent - 1 - residue) // period + 1 if residue < extent else 0


def _to_try(extent: int) -> range:
    return range(2, min(_LONGEST, extent // _REPEATS) + 1)


def _within(axis: Axis, group: Sequence[Places], shapes: int) -> list[int]:
    """The periods at which the beginnings in one tensor gather, in one so clearly that it says so alone, or in all together.

    Probabilities are put together as Fisher does (Statistical Methods for Research Workers, section 21.1), as if tensors had nothing in
    common, and again so that it holds whatever they have.
    """
    extent = max(_extent(axis, one) for one in group)
    tried = _to_try(extent)
    chances: dict[int, list[float]] = {period: [] for period in tried}
    for one in group:
        for period, chance in _gathering(axis, one, tried):
            chances[period].append(chance)
    allowed = CHANCE / (2 * 3 * shapes * max(1, len(tried)))
    alone = [
        period for period, some in chances.items() if some and min(len(group) * min(some), _fisher(some)) <= allowed
    ]
    sets = [sorted(set(_coordinates(axis, one))) for one in group]
    found = []
    for period in alone:
        some = [_in_residues(one, extent, period) for one in sets]
        if min(len(some) * min(some), _averaged(some)) <= allowed:
            found.append(period)
    return found


def _in_residues(some: Sequence[int], extent: int, period: int) -> float:
    """How probable it is that a few residues have so many of these coordinates, if these could be any of all."""
    least, places, inside = 1.0, 0, 0
    counts = Counter(value % period for value in some).most_common()
    for number, (residue, count) in enumerate(counts, start=1):
        places, inside = places + _places(extent, period, residue), inside + count
        if places == extent or number > period // 2:
            break
        chance = _drawn(extent, places, len(some), inside)
        least = min(
            least,
            math.exp(min(0.0, _ways(period, number) + math.log(max(chance, 1e-300)) + math.log(number * (number + 1)))),
        )
    return least


def _fisher(chances: Sequence[float]) -> float:
    """P(chi-square of twice as many degrees of freedom >= -2 sum ln p), which for an even number is a sum of a few terms."""
    half = -math.fsum(math.log(max(chance, 1e-300)) for chance in chances)
    return min(
        1.0,
        math.fsum(
            math.exp(-half + number * math.log(half) - math.lgamma(number + 1)) if half else 1.0
            for number in range(len(chances))
        ),
    )


def _averaged(chances: Sequence[float]) -> float:
    """Of probabilities that depend on each other in any way: e times their geometric mean (Vovk and Wang, Biometrika 107, 2020)."""
    return min(1.0, math.exp(1 + math.fsum(math.log(max(chance, 1e-300)) for chance in chances) / len(chances)))


def _gathering(axis: Axis, one: Places, tried: range) -> list[tuple[int, float]]:
    """By period, how probable it is that so many beginnings share a residue by chance."""
    extent = _extent(axis, one)
    coordinates = sorted(set(_coordinates(axis, one)))
    here = set(coordinates)
    starts = [value for value in coordinates if value - 1 not in here]
    if len(starts) < _REPEATS:
        return []
    # Drawn without putting back where beginnings are nearly as good as coordinates; else neighbours bend the count, and the
    # distribution with the larger spread is the careful one.
    exact = len(starts) >= _SINGLE * len(coordinates) or len(starts) <= _SPARSE * extent
    found = []
    for period in tried:
        least = 1.0
        for residue, count in Counter(value % period for value in starts).items():
            there = _places(extent, period, residue)
            if count >= _REPEATS and count * extent > 2 * there * len(starts) * (0.75 if period == 2 else 1):
                chance = (
                    _drawn(extent, there, len(starts), count) if exact else tail(len(starts), count, there / extent)
                )
                least = min(least, period * chance)
        found.append((period, least))
    return found


def _across(axis: Axis, group: Sequence[Places], shapes: int) -> list[int]:
    """The periods of which one residue is hit in more tensors of a shape than if each had been hit anywhere."""
    extent = max(_extent(axis, one) for one in group)
    distinct = [sorted(set(_coordinates(axis, one))) for one in group]
    tried = _to_try(extent)
    found = []
    for period in tried:
        residues = [{value % period for value in values} for values in distinct]
        covered = sum(len(one) for one in residues)
        if covered > 0.75 * period * len(residues):  # they are hit everywhere: nothing can stand out
            continue
        allowed = CHANCE / (2 * 3 * len(tried) * shapes * period)
        for residue, count in Counter(value for one in residues for value in one).items():
            share = covered * _places(extent, period, residue) / extent / len(group)
            if (
                count >= _REPEATS
                and tail(len(group), count, min(1.0, share)) <= allowed
                and _most_hit(distinct, extent, period) <= allowed * period
            ):
                found.append(period)
                break
    return found


def _most_hit(distinct: Sequence[Sequence[int]], extent: int, period: int) -> float:
    """How probable it is that the coordinates that are hit most gather in residues as they do, if they could be any.

    Most: at least once, twice, four times and so on, the best of these; each is a set that chance would draw from all.
    """
    often = Counter(value for values in distinct for value in values)
    least, looks, times = 1.0, 0, 1
    while times <= max(often.values()):
        least = min(least, _in_residues([value for value, count in often.items() if count >= times], extent, period))
        looks, times = looks + 1, 2 * times
    return min(1.0, looks * least)


def _drawn(total: int, marked: int, drawn: int, least: int) -> float:
    """P(X >= least) of the marked among so many drawn without putting back (hypergeometric)."""
    if least <= 0:
        return 1.0
    most = min(marked, drawn)
    whole = _ways(total, drawn)
    return min(
        1.0,
        math.fsum(
            math.exp(_ways(marked, count) + _ways(total - marked, drawn - count) - whole)
            for count in range(least, most + 1)
            if drawn - count <= total - marked
        ),
    )


def _ways(of: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)
