"""The page of a comparison: one file that needs nothing else, to be kept or sent to a vendor.

What it shows is worked out here from the record, what it looks like is in the template beside this file; the template engine escapes
whatever comes from a run. Tables show the worst and count the rest, which `report.json` has in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from bitwitness.compare import figures
from bitwitness.compare import report_words as words

Record = Mapping[str, Any]

TEMPLATE = "report.html.jinja"

_MODULES = 30
_ROWS = 60
_CLEAN = 20
_MASKS = 10
_STRETCHES = 24
_PATTERN_SHARE = 0.05
"""Of records with one mask: above, it is a pattern (Wang et al., SOSP 2023)."""


def render(record: Record) -> str:
    """The page as text."""
    return _template().render(**context(record))


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "rate": words.rate,
        "figure": words.figure,
        "whole": words.count,
        "percent": words.percent,
        "interval": words.interval,
        "module": words.module,
        "range_name": figures.range_name,
    }
    source = resources.files("bitwitness.compare").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source)


def context(record: Record) -> dict[str, Any]:
    """What the template shows."""
    return {
        "record": record,
        "confidence": record["confidence"],
        "headline": words.headline(record),
        "drill": words.drill(record),
        "bad": record["outcome"] == "differs",
        "doubtful": record["outcome"] != "nothing seen" or not record["finished"],
        "shows": words.shows(record),
        "does_not_show": words.does_not_show(record),
        "steps": _nested(words.next_steps(record)),
        "unseen": words.unseen(record),
        "modes": [_mode(mode, record) for mode in record["modes"]],
        "participants": [record["suspect"], *record["references"], *([record["control"]] if record["control"] else [])],
        "results": _results(record),
        "settings": [(name, _setting(value)) for name, value in sorted(record["asked"].items())],
        "phases": words.PHASES,
        "classes": words.CLASS_WORDS,
        "between": words.BETWEEN,
    }


def _nested(steps: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Each step with the lines that belong to it."""
    found: list[tuple[str, list[str]]] = []
    for step in steps:
        if step.startswith("  ") and found:
            found[-1][1].append(step.strip())
        else:
            found.append((step, []))
    return found


def _setting(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# A mode --------------------------------------------------------------------------------------------------------------


def _mode(mode: Record, record: Record) -> dict[str, Any]:
    confidence = record["confidence"]
    rows = words.worst_first(mode["rows"])
    hit, clean = [row for row in rows if row["mismatches"]["count"]], words.clean(mode["rows"])
    curves = (
        figures.frequencies_by_step(mode),
        figures.readings(mode, "temperature", "Temperature", "°C"),
        figures.readings(mode, "clock", "Clock", "MHz"),
        figures.losses(mode),
        figures.noises(mode),
        figures.drifts(mode),
    )
    return {
        "name": mode["mode"],
        "about": words.MODE_WORDS.get(mode["mode"], ""),
        "line": words.mode_line(mode, record),
        "again": words.again(mode, confidence),
        "record": mode,
        "grid": _grid(mode["rows"]),
        "spreads": mode["mode"] != "lock-step",
        "frequencies": figures.frequencies(mode, confidence) if mode["mode"] == "lock-step" else None,
        "rows": hit[:_ROWS],
        "rows_hidden": len(hit) - len(hit[:_ROWS]),
        "groups": [row for row in words.worst_first(mode["groups"]) if row["mismatches"]["count"]][:_ROWS],
        "clean": clean[:_CLEAN],
        "clean_of": len(clean),
        "curves": [curve for curve in curves if curve is not None],
        "stretches": _stretches(mode),
        "patterns": [_patterns(one) for one in mode["patterns"] if one["records"]],
        "correlation": sorted((name, value) for name, value in mode["correlation"].items() if value is not None),
        "drift": next((point["drift"] for point in reversed(mode["series"]) if point["drift"] is not None), None),
        "control_drift": next((p["drift"] for p in reversed(mode["control"]) if p["drift"] is not None), None),
    }


def _grid(rows: Sequence[Record]) -> dict[str, Any]:
    """Modules by phases: in each cell the worst share that differs, or the loosest bound where nothing was seen."""
    phases = [phase for phase in words.PHASES if any(row["phase"] == phase for row in rows)]
    cells: dict[str, dict[str, Record]] = {}
    for row in words.worst_first(rows):  # the worst comes first, so others of its cell are left
        cells.setdefault(row["group"], {}).setdefault(row["phase"], row)
    shares = [row["mismatches"]["share"] for row in rows if row["mismatches"]["share"]]
    scale = figures.Decades.over(shares, 0.08, 0.5)  # opacity: text must stay readable
    lines = []
    for group, found in list(cells.items())[:_MODULES]:
        line = []
        for phase in phases:
            one = found.get(phase)
            share = one["mismatches"]["share"] if one is not None else None
            line.append({"row": one, "share": share, "shade": f"{scale(share):.2f}" if share else "0"})
        lines.append({"name": words.module({"group": group}), "cells": line})
    return {"phases": [words.PHASES[phase] for phase in phases], "lines": lines, "hidden": len(cells) - len(lines)}


def _stretches(mode: Record) -> list[dict[str, Any]]:
    """The series in words: at most some stretches of steps, counts summed, the largest of what is no count."""
    points = mode["series"]
    parts = min(_STRETCHES, len(points))
    made = []
    for number in range(parts):
        some = points[number * len(points) // parts : (number + 1) * len(points) // parts]
        judged = [point for point in some if not point["void"]]
        largest = {
            name: max((point[name] for point in some if point[name] is not None), default=None)
            for name in ("loss", "reference_loss", "noise", "drift", "temperature", "clock")
        }
        made.append(
            {
                "first": some[0]["step"],
                "last": some[-1]["step"],
                "void": len(some) - len(judged),
                "hit": sum(point["mismatches"] > 0 for point in judged),
                "mismatches": sum(point["mismatches"] for point in judged),
                "elements": sum(point["elements"] for point in judged),
                **largest,
            }
        )
    return made


def _patterns(patterns: Record) -> dict[str, Any]:
    records = patterns["records"]
    digits = (len(patterns["bits"]) + 3) // 4
    masks = [
        {
            "mask": f"0x{mask:0{digits}x}",
            "bits": ", ".join(str(bit) for bit in range(mask.bit_length()) if mask >> bit & 1),
            "count": number,
            "share": number / records,
            "pattern": number > _PATTERN_SHARE * records,
        }
        for mask, number in patterns["masks"]
        if mask >= 0
    ]
    classes = {name: number for name, number in patterns["classes"].items() if number}
    return {
        "record": patterns,
        "masks": masks[:_MASKS],
        "more_masks": masks[_MASKS:],
        "classes": sorted(classes.items(), key=lambda one: -one[1]),
        "classified": sum(classes.values()),
        "bits": figures.bits(patterns),
        "lags": figures.lags(patterns),
        "ranges": figures.ranges(patterns),
    }


def _results(record: Record) -> list[dict[str, Any]]:
    """What the task gave, by mode: a row a participant, the suspect first."""
    made = []
    for mode in record["modes"]:
        names = list(dict.fromkeys(name for given in mode["results"].values() for name in given))
        order = [record["suspect"]["name"], *(one["name"] for one in record["references"])]
        known = [name for name in order if name in mode["results"]]
        rows = [
            {"name": name, "values": [mode["results"][name].get(one) for one in names]}
            for name in [*known, *(other for other in mode["results"] if other not in known)]
        ]
        if names:
            made.append({"mode": mode["mode"], "names": names, "rows": rows})
    return made
