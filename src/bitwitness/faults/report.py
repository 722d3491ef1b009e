"""The report of a campaign: a page for people, a table for spreadsheets, JSON for programs.

All three hold the same rows; what they look like is in the template beside this file, where the template engine escapes
whatever comes from a run. Numbers and geometry are worked out here.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from bitwitness._version import __version__
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.rows import COLUMNS, Row
from bitwitness.faults.table import PROBLEMS, REMARKS, Shares, Table
from bitwitness.runfiles import utc_now
from bitwitness.runfiles.files import write_bytes

if TYPE_CHECKING:
    from bitwitness.faults.campaign import Campaign

TEMPLATE = "report.html.jinja"
PAGE, SHEET, RECORD = "report.html", "table.csv", "table.json"

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 30
_ROW = 22
_NAMES = 190
_HIGHEST = 3.0
"""Losses beyond this multiple of the highest without a fault are drawn at the top: one that explodes must not hide the rest."""
_EXAMPLES = 7
_ROWS_SHOWN = 5000
_BAD = ("missed", "guard failure", "refused")

Pairs = Sequence[tuple[CellSpec, CellResult]]


def write(folder: Path, campaign: Campaign, table: Table, results: Pairs) -> None:
    """Write the page, the sheet and the record into a folder.

    Raises:
        RunFilesError: one cannot be written.
    """
    write_bytes(folder / RECORD, (json.dumps(record(campaign, table), indent=1, allow_nan=False) + "\n").encode())
    write_bytes(folder / SHEET, sheet(table.rows).encode())
    write_bytes(folder / PAGE, render(campaign, table, results).encode())


def record(campaign: Campaign, table: Table) -> dict[str, Any]:
    """Everything as JSON values."""
    about = {"campaign": campaign.name, "description": campaign.description, "version": __version__, "made": utc_now()}
    return {**about, **table.to_json(), "rows": [_finite(row.to_json()) for row in table.rows]}


def sheet(rows: Sequence[Row]) -> str:
    """The rows as CSV, lists joined by spaces."""
    out = io.StringIO()
    names = [*COLUMNS, "onset", "largest", "final"]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = {
            name: " ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in row.to_json().items()
        }
        outcome = row.outcome.to_json() if row.outcome is not None else {}
        told = {name: outcome.get(name) for name in ("onset", "largest", "final")}
        writer.writerow({**flat, **told, "outcome": outcome.get("label")})
    return out.getvalue()


def render(campaign: Campaign, table: Table, results: Pairs) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("bitwitness.faults").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(**context(campaign, table, results))


def context(campaign: Campaign, table: Table, results: Pairs) -> dict[str, Any]:
    """What the template shows."""
    columns = table.columns
    return {
        "campaign": campaign,
        "summary": table.summary,
        "problems": [(name, getattr(table.summary, name)) for name in PROBLEMS if getattr(table.summary, name)],
        "remarks": [(name, getattr(table.summary, name)) for name in REMARKS if getattr(table.summary, name)],
        "table": table,
        "columns": columns,
        "matrix": [
            {"label": label, "cells": [row.get(name, 0) for name in columns], "most": sum(row.values())}
            for label, row in table.matrix.items()
        ],
        "figures": [_figure(shares) for shares in table.shares],
        "curves": list(_curves(table.rows, results)),
        "uncovered": _uncovered(table),
        "rows": [_shown(row) for row in table.rows[:_ROWS_SHOWN]],
        "hidden": max(0, len(table.rows) - _ROWS_SHOWN),
        "made": utc_now(),
        "version": __version__,
        "names": _NAMES,
        "width": _WIDTH,
        "row": _ROW,
    }


def _finite(value: Any) -> Any:
    """JSON has no number for Inf and NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _uncovered(table: Table) -> list[dict[str, Any]]:
    """The reasons why faults are not covered, with the faults."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in table.summary.not_covered:
        found[one["why"]].append(one)
    return [{"why": why, "faults": faults} for why, faults in found.items()]


def _shown(row: Row) -> dict[str, Any]:
    told = row.to_json()
    least = "at least " if row.coverage.at_least else ""
    promised = "certain" if row.coverage.certain else f"{least}{100 * row.coverage.probability:.1f} %"
    return {
        **told,
        "outcome": row.outcome.label if row.outcome is not None else "",
        "error": "" if row.status == "caught" else row.result.error,  # the verdict stands in columns of its own
        "promise": f"{row.coverage.check}, {promised}" if row.coverage.covered else "not covered",
        "is_late": row.is_late,
        "bad": row.status in _BAD or row.named == "wrong" or row.is_late or row.is_guarded_hang,
        "unproved": row.is_unproved,
    }


# Figures -------------------------------------------------------------------------------------------------------------


def _figure(shares: Shares) -> dict[str, Any]:
    """Outcomes of one kind of fault: a dot at the share, a line over its interval."""
    scale = _WIDTH - _NAMES - 70
    bars = []
    for number, (name, share) in enumerate(shares.shares.items()):
        at = share.share or 0.0
        bars.append(
            {
                "name": name,
                "y": 14 + number * _ROW,
                "low": round(_NAMES + scale * share.low, 1),
                "at": round(_NAMES + scale * at, 1),
                "high": round(_NAMES + scale * share.high, 1),
                "text": f"{100 * at:.1f} %",
                "title": f"{name}: {share}",
            }
        )
    title = f"{shares.label} in {shares.job}"
    return {
        "title": title,
        "bars": bars,
        "height": len(bars) * _ROW + 8,
        "better": str(shares.better),
        "of": shares.better.of,
    }


def _curves(rows: Sequence[Row], results: Pairs) -> Iterator[dict[str, Any]]:
    """For each job the clean curve of a seed, and of each outcome the first run of that seed."""
    clean = {(spec.job, spec.seed): result for spec, result in results if spec.role == "clean"}
    for (job, seed), usual in clean.items():
        examples: dict[str, Row] = {}
        for row in rows:
            if (row.spec.job, row.spec.seed) == (job, seed) and row.outcome is not None and row.result.losses:
                examples.setdefault(row.outcome.label, row)
        if not examples or not usual.losses:
            continue
        chosen = list(examples.items())[:_EXAMPLES]
        lines = [("without a fault", "", _numbers(usual.losses))]
        lines += [(label, row.fault, _numbers(row.result.losses)) for label, row in chosen]
        yield _chart(f"{job}, seed {seed}", lines)


def _chart(title: str, lines: Sequence[tuple[str, str, list[float]]]) -> dict[str, Any]:
    usual = [loss for loss in lines[0][2] if math.isfinite(loss)] or [1.0]
    every = [loss for _, _, losses in lines for loss in losses if math.isfinite(loss)] or usual
    low, high = min(every), min(max(every), _HIGHEST * max(usual))
    steps = max(2, *(len(losses) for _, _, losses in lines))

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / (steps - 1), 1)

    def y(loss: float) -> float:
        share = (min(max(loss, low), high) - low) / ((high - low) or 1.0)
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share, 1)

    drawn = []
    for number, (name, fault, losses) in enumerate(lines):
        points = [[]] if not losses else _pieces(losses)
        segments = [" ".join(f"{x(step)},{y(loss)}" for step, loss in piece) for piece in points if piece]
        missing = [x(step) for step, loss in enumerate(losses) if not math.isfinite(loss)]
        drawn.append({"number": number, "name": name, "fault": fault, "segments": segments, "missing": missing[:1]})
    return {
        "title": title,
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "lines": drawn,
        "x_ticks": [{"at": x(step), "label": f"{step:g}"} for step in ticks(0, steps - 1, 8)],
        "y_ticks": [{"at": y(loss), "label": f"{loss:g}"} for loss in ticks(low, high, 5)],
        "description": "; ".join(
            f"{name}: from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
            for name, _, losses in lines
            if losses
        ),
    }


def _pieces(losses: Sequence[float]) -> list[list[tuple[int, float]]]:
    """A line through what is finite, broken where something is not."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, loss in enumerate(losses):
        if math.isfinite(loss):
            pieces[-1].append((step, loss))
        else:
            pieces.append([])
    return pieces


def _numbers(losses: Iterable[float | str]) -> list[float]:
    return [float(loss) for loss in losses]


def ticks(lowest: float, highest: float, most: int) -> list[float]:
    """Round numbers between two values, at most so many."""
    span = highest - lowest
    if not (span > 0 and math.isfinite(span)):
        return [lowest]
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if span / (unit * factor) <= most - 1)
    first = math.ceil(lowest / step)
    return [round(step * number, 10) for number in range(first, math.floor(highest / step + 1e-9) + 1)]
