"""The chart of a run: loss and gradient norm, what was checked, and what happened, all on the one axis of steps.

Places along the steps are in percent, so that text keeps its size on every screen. A value that was not finite is a break in the line
and a mark of its own: drawn through, a NaN would look like a quiet stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bitwitness.store.pages import Cell, LedgerMap, Mark, RunPage
from bitwitness.web.drawing.scales import WIDE, Steps, Tick, grouped, part_of, quantile, round_values, widened

HEIGHT = 100.0
"""Of a panel; 0 is its top."""
_NEAR = 1.6
"""Marks that are closer than this percent would hide each other, and become one that tells of all."""
_HIGHEST = 4.0
"""Values beyond this multiple of what 98 % stay below are drawn at the top: one that explodes must not flatten all others."""
_LANES = {
    "attributed": "incidents", "unattributed": "incidents", "drill": "incidents", "false alarm": "incidents", "guard_failure": "incidents",
    "checkpoint": "checkpoints",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve with the band from the least to the largest of each bucket.

    Attributes:
        name: what it is.
        lines, band: commands of paths; x in percent of the axis, y from 0 (top) to `HEIGHT`.
        ticks: of the vertical axis.
        breaks: where values were not finite, in percent.
        clipped: how many buckets lie above the top.
        low, high: values at the bottom and the top.
    """

    name: str
    lines: str
    band: str
    ticks: tuple[Tick, ...]
    breaks: tuple[float, ...]
    clipped: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a lane or of a row: what, from where, how wide (percent), and which steps these are."""

    cell: Cell
    x: float
    width: float
    first: int
    last: int
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    """What one check saw of all ranks together, step by step."""

    check: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """One mark, or several that would hide each other: where, what the gravest of them is, and all texts."""

    x: float
    step: int
    kind: str
    text: str
    link: str
    count: int


@dataclass(frozen=True, slots=True)
class Chart:
    """All of it; `rows` are the marks by kind."""

    steps: Steps
    ticks: tuple[Tick, ...]
    panels: tuple[Panel, ...]
    lanes: tuple[Lane, ...]
    rows: tuple[tuple[str, tuple[Flag, ...]], ...]
    empty: bool


def axis(page: RunPage) -> Steps:
    """The axis of steps of a run's page: from its first step on record to its last.

    Marks do not make it longer where there is anything else: a checkpoint bears the number of the step that would come next.
    """
    found = [page.run.step, *page.series.first, *page.series.last]
    for one in page.maps:
        found += [step for column in one.columns for step in column]
    if max(found, default=-1) < 0:
        found = [mark.step for mark in page.marks]
    return Steps.over(found)


def chart(page: RunPage) -> Chart:
    """The chart of a run."""
    steps, series = axis(page), page.series
    curves = (
        ("loss", series.loss, series.loss_low, series.loss_high),
        ("gradient norm", series.norm, series.norm_low, series.norm_high),
    )
    panels = tuple(_panel(name, steps, page, curve) for name, *curve in curves)
    lanes = tuple(Lane(one.check, tuple(_lane(one, steps))) for one in page.maps)
    by_row: dict[str, list[Mark]] = {"incidents": [], "checkpoints": [], "starts": []}
    for mark in page.marks:
        by_row[_LANES.get(mark.kind, "starts")].append(mark)
    rows = tuple((name, tuple(_flags(marks, steps))) for name, marks in by_row.items())
    return Chart(steps, steps.ticks(), panels, lanes, rows, not series.first)


def _panel(name: str, steps: Steps, page: RunPage, curve: Sequence[Sequence[float | None]]) -> Panel:
    mean, least, largest = curve
    series = page.series
    known = [value for values in curve for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Panel(name, "", "", (), _breaks(page, steps), 0, 0.0, 0.0)
    low, high = (
        min(known),
        min(max(known), _top([value for value in mean if value is not None and math.isfinite(value)] or known)),
    )
    low, high = widened(low, high)

    def y(value: float) -> float:
        return round(HEIGHT * (1 - part_of(value, low, high)), 3)

    middle = [steps.at((first + last + 1) / 2) for first, last in zip(series.first, series.last, strict=False)]
    ticks = tuple(Tick(y(value), grouped(value)) for value in round_values(low, high, 5))
    clipped = sum(value is not None and math.isfinite(value) and value > high for value in largest)
    return Panel(
        name, _line(middle, mean, y), _band(middle, least, largest, y), ticks, _breaks(page, steps), clipped, low, high
    )


def _top(values: Sequence[float]) -> float:
    usual = quantile(values, 0.98)
    return usual * _HIGHEST if usual > 0 else math.inf


def _breaks(page: RunPage, steps: Steps) -> tuple[float, ...]:
    return tuple(
        steps.at(first) for first, count in zip(page.series.first, page.series.nonfinite, strict=False) if count > 0
    )


def _stretches(*curves: Sequence[float | None]) -> Iterator[list[int]]:
    """Runs of neighbours at which all curves have a finite value."""
    held: list[int] = []
    for index, values in enumerate(zip(*curves, strict=False)):
        if all(value is not None and math.isfinite(value) for value in values):
            held.append(index)
        elif held:
            yield held
            held = []
    if held:
        yield held


def _line(x: Sequence[float], values: Sequence[float | None], y: Callable[[float], float]) -> str:
    parts = []
    for stretch in _stretches(values, x):
        points = [f"{x[index]:g} {y(values[index] or 0.0):g}" for index in stretch]
        parts.append(f"M{' L'.join(points)}" + ("h0" if len(points) == 1 else ""))
    return "".join(parts)


def _band(
    x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None], y: Callable[[float], float]
) -> str:
    parts = []
    for stretch in _stretches(low, high, x):
        over = [f"{x[index]:g} {y(high[index] or 0.0):g}" for index in stretch]
        under = [f"{x[index]:g} {y(low[index] or 0.0):g}" for index in reversed(stretch)]
        parts.append(f"M{' L'.join(over + under)}Z")
    return "".join(parts)


def _lane(one: LedgerMap, steps: Steps) -> Iterator[Piece]:
    """What a check saw of all ranks: the gravest wins, and `passed` is only said where every rank had passed."""
    held: tuple[Cell, int, int] | None = None
    for index, (first, last) in enumerate(one.columns):
        cell = _gravest({row[index] if index < len(row) else "gap" for row in one.cells} or {"gap"})
        if held is not None and held[0] == cell and held[2] + 1 == first:
            held = (cell, held[1], last)
            continue
        if held is not None:
            yield _piece(one.check, *held, steps)
        held = (cell, first, last)
    if held is not None:
        yield _piece(one.check, *held, steps)


def _gravest(cells: set[Cell]) -> Cell:
    if "failed" in cells:
        return "failed"
    if len(cells) == 1:
        return next(iter(cells))
    return "partly" if cells & {"passed", "partly"} else "unverified"


def _piece(check: str, cell: Cell, first: int, last: int, steps: Steps) -> Piece:
    text = f"{check}, steps {grouped(first)} to {grouped(last)}: {cell}"
    return Piece(cell, steps.at(first), steps.width(first, last), first, last, text)


_GRAVEST = (
    "attributed",
    "unattributed",
    "guard_failure",
    "false alarm",
    "drill",
    "restart",
    "resume",
    "start",
    "checkpoint",
)


def _flags(marks: Sequence[Mark], steps: Steps) -> Iterator[Flag]:
    """Marks in their order along the axis, those that would hide each other put together."""
    held: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.step, mark.time)):
        if held and (steps.at(mark.step) - steps.at(held[0].step) > _NEAR):
            yield _flag(held, steps)
            held = []
        held.append(mark)
    if held:
        yield _flag(held, steps)


def _flag(marks: Sequence[Mark], steps: Steps) -> Flag:
    first = min(marks, key=lambda mark: _GRAVEST.index(mark.kind) if mark.kind in _GRAVEST else len(_GRAVEST))
    more = f" (and {len(marks) - 1} more close by)" if len(marks) > 1 else ""
    text = f"step {grouped(max(first.step, 0))}: {first.text}{more}"
    return Flag(
        min(max(steps.at(first.step + 0.5), 0.6), WIDE - 0.6), first.step, first.kind, text, first.link, len(marks)
    )
