"""Loss and gradient norm, thinned to what can be drawn; what stands out stays, because it is what is looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def means(name: str) -> tuple[float | None, ...]:
        return tuple(_mean(bucket, name) for bucket in buckets)

    def ends(name: str, choose: Callable[[list[float]], float]) -> tuple[float | None, ...]:
        values = [[value for one in bucket if (value := getattr(one, name)) is not None] for bucket in buckets]
        return tuple(choose(each) if each else None for each in values)

    return Series(
        first=tuple(bucket[0].first for bucket in buckets),
        last=tuple(max(one.last for one in bucket) for bucket in buckets),
        loss=means("loss"),
        loss_low=ends("loss_low", min),
        loss_high=ends("loss_high", max),
        norm=means("norm"),
        norm_low=ends("norm_low", min),
        norm_high=ends("norm_high", max),
        nonfinite=tuple(sum(one.nonfinite for one in bucket) for bucket in buckets),
        seconds=means("seconds"),
    )


def _mean(rows: Sequence[Any], name: str) -> float | None:
    known = [(getattr(one, name), max(1, one._mapping["count"])) for one in rows if getattr(one, name) is not None]
    if not known:
        return None
    of = sum(weight for _, weight in known)
    return float(sum(value * (weight / of) for value, weight in known))
