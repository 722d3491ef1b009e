"""Loss and gradient norm along the steps, bounded however long a run trains: pure functions.

A record is what rank 0 said of a stretch of steps. Stretches that are made again after a restart replace what was said of the
same steps before. When there are too many, neighbours become one: of aligned stretches of steps whose width doubles, so that a
run that trains for a year has as many rows as one that trains for a day, and a spike stays visible in `low` and `high`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

MOST, FEWEST = 4096, 2048
"""Rows of a run beyond which it is thinned, and about how many are left then."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Means, least and largest over `count` steps between `first` and `last`; `seconds` of one step; None: not known."""

    first: int
    last: int
    count: int
    loss: float | None = None
    loss_low: float | None = None
    loss_high: float | None = None
    norm: float | None = None
    norm_low: float | None = None
    norm_high: float | None = None
    nonfinite: int = 0
    seconds: float | None = None


def laid(stretches: Sequence[Stretch], new: Iterable[Stretch]) -> list[Stretch]:
    """The stretches with new ones laid over them, in order of their steps, and thinned where they are too many."""
    found = list(stretches)
    for one in new:
        if found and one.first <= found[-1].last:
            found = _without(found, one.first, one.last)
            found.append(one)
            found.sort(key=lambda each: each.first)
        else:
            found.append(one)
        if len(found) > 2 * MOST:
            found = thinned(found)
    return thinned(found) if len(found) > MOST else found


def _without(stretches: Iterable[Stretch], first: int, last: int) -> list[Stretch]:
    """Without these steps. Of a stretch that is cut, the means stay: they are the best that is known of the rest."""
    kept: list[Stretch] = []
    for one in stretches:
        if one.last < first or one.first > last:
            kept.append(one)
            continue
        if one.first < first:
            kept.append(_cut(one, one.first, first - 1))
        if one.last > last:
            kept.append(_cut(one, last + 1, one.last))
    return kept


def _cut(one: Stretch, first: int, last: int) -> Stretch:
    share = (last - first + 1) / (one.last - one.first + 1)
    return replace(
        one,
        first=first,
        last=last,
        count=max(1, round(one.count * share)),
        nonfinite=min(last - first + 1, round(one.nonfinite * share)),
    )


def thinned(stretches: Sequence[Stretch]) -> list[Stretch]:
    """About half of the most that are kept, or fewer; nothing is left out, neighbours become one."""
    found = list(stretches)
    width = 1
    while (found[-1].last - found[0].first + 1) // width > FEWEST:
        width *= 2
    while len(found) > FEWEST:
        found = _by_width(found, width)
        width *= 2
    return found


def _by_width(stretches: Sequence[Stretch], width: int) -> list[Stretch]:
    return [merged(list(group)) for _, group in groupby(stretches, key=lambda one: one.first // width)]


def merged(stretches: Sequence[Stretch]) -> Stretch:
    """One of several that follow on one another."""
    return Stretch(
        first=stretches[0].first,
        last=stretches[-1].last,
        count=sum(one.count for one in stretches),
        loss=_mean([(one.loss, one.count) for one in stretches]),
        loss_low=_least(one.loss_low for one in stretches),
        loss_high=_largest(one.loss_high for one in stretches),
        norm=_mean([(one.norm, one.count) for one in stretches]),
        norm_low=_least(one.norm_low for one in stretches),
        norm_high=_largest(one.norm_high for one in stretches),
        nonfinite=sum(one.nonfinite for one in stretches),
        seconds=_mean([(one.seconds, one.count) for one in stretches]),
    )


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * (weight / total) for value, weight in known) if total else None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
