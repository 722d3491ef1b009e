"""Loss and gradient norm, thinned to what can be drawn; what stands out stays, because it is what is looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import Series
from bitwitness.store.tables import steps

DRAWN = 1_000
"""Points of a chart; a screen has not many more columns."""
_MOST = 20_000
"""Rows of a run that are read; the importer keeps some 4096."""


def series_of(connection: sa.Connection, run: int) -> Series:
    """The series of a run."""
    query = sa.select(steps).where(steps.c.run_id == run).order_by(steps.c.first).limit(_MOST)
    return thinned(connection.execute(query).all())


def thinned(rows: Sequence[Any], drawn: int = DRAWN) -> Series:
    """Neighbours merged, as many as are needed: means weighted by steps, the least and the largest of all, sums of counts."""
    size = max(1, -(-len(rows) // drawn))
    buckets = [rows[start : start + size] for start in range(0, len(rows), size)]
    weights = [[max(1, one._mapping["count"]) for one in bucket] for bucket in buckets]

    def each(name: str, choose: Callable[[list[float], list[int]], float | None]) -> tuple[float | None, ...]:
        of = attrgetter(name)
        return tuple(choose([*map(of, bucket)], weight) for bucket, weight in zip(buckets, weights, strict=True))

    return Series(
        first=tuple(bucket[0].first for bucket in buckets),
        last=tuple(max(one.last for one in bucket) for bucket in buckets),
        loss=each("loss", _mean),
        loss_low=each("loss_low", _least),
        loss_high=each("loss_high", _largest),
        norm=each("norm", _mean),
        norm_low=each("norm_low", _least),
        norm_high=each("norm_high", _largest),
        nonfinite=tuple(sum(one.nonfinite for one in bucket) for bucket in buckets),
        seconds=each("seconds", _mean),
    )


def _mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """Of those that are known; each is divided first, because their sum may be more than a double holds."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    of = sum(weight for _, weight in known)
    return float(sum(value * (weight / of) for value, weight in known)) if known else None


def _least(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _largest(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    return max((value for value in values if value is not None), default=None)
