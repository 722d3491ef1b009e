"""The demo's report for a browser: one page that needs nothing else, to be kept or sent to somebody.

Numbers are worked out here, what they look like is in the template beside this file. Whatever comes from a run, the name of a
node or a message, is escaped by the template engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from bitwitness._version import __version__
from bitwitness.evidence import NONFINITE, Observation
from bitwitness.examples.plan import Expected, expected
from bitwitness.examples.report import Report
from bitwitness.faults.report import ticks
from bitwitness.runfiles import Incident, read_incident, write_bytes

TEMPLATE = "report.html.jinja"

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 62, 40
_DIGITS = 12
_NAMES_SHOWN = 3
_HIGHEST = 2.0
"""Losses beyond this multiple of the highest without a fault are drawn at the top: one that explodes must not hide the rest."""


def write_page(report: Report) -> None:
    """Write it into the demo's directory.

    Raises:
        RunFilesError: it cannot be written.
    """
    write_bytes(report.page, render(report).encode())


def render(report: Report) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("bitwitness.examples").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(**context(report))


def context(report: Report) -> dict[str, Any]:
    """What the template shows."""
    recovery = report.recovery
    return {
        "report": report,
        "settings": report.settings,
        "recovery": recovery,
        "expected": expected(report.settings),
        "verdict": report.verdict,
        "injected": report.injected,
        "version": __version__,
        "titles": report.settings.titles,
        "chart": chart(report),
        "incident": report.incident.name if report.incident is not None else "",
        "evidence": list(evidence(read_incident(report.incident))) if report.incident is not None else [],
        "actions": [_action(one) for one in recovery.actions],
        "moments": moments(report),
        "proof": list(_proof(report)),
        "outlook": outlook(expected(report.settings)),
    }


def outlook(should: Expected) -> str:
    """What should have come of it, in a sentence."""
    if should.generations == 1:
        return "Nothing should be found, and the job should finish."
    if should.exit_code:
        return (
            "With fewer than three nodes nobody can be named: one restart with every step audited, and if it happens again a "
            f"person must look, exit code {should.exit_code}."
        )
    if should.quarantined:
        return "The device should be named and put into quarantine, and the job finish on the spare as if nothing had happened."
    if should.ranks:
        return "The rank should be named, and the job finish on the same nodes: a fault that strikes once proves no broken device."
    return "With fewer than three nodes nobody can be named: one restart with every step audited, which should finish."


def moments(report: Report) -> list[tuple[str, str]]:
    """The timeline: seconds since the fault struck, or since the first that is told, and what happened."""
    recovery = report.recovery
    return [(f"{moment.time - recovery.since:+.1f} s", moment.what) for moment in recovery.timeline]


def _action(record: Mapping[str, Any]) -> dict[str, str]:
    told = {key: value for key, value in record.items() if key not in ("schema", "time", "action", "supervision")}
    words = [
        f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in told.items()
    ]
    return {"time": str(record.get("time", "")), "action": str(record["action"]), "about": "; ".join(words)}


def _proof(report: Report) -> Iterator[dict[str, Any]]:
    """Digests of each rank's final weights, side by side."""
    clean, guarded = report.reported["clean"].ends, report.reported["guarded"].ends
    for rank in range(report.settings.world_size):
        never, after = (str(ends[rank]["digest"]) if rank in ends else "" for ends in (clean, guarded))
        yield {"rank": rank, "clean": never, "guarded": after, "equal": bool(never) and never == after}


# What disagreed with what --------------------------------------------------------------------------------------------


def evidence(incident: Incident) -> Iterator[dict[str, Any]]:
    """Tables of who computed what: each micro-batch on which runs differ, and what the ranks held."""
    replays: dict[tuple[int, int, str], list[Observation]] = {}
    places: dict[tuple[str, str], list[Observation]] = {}
    for seen in incident.observations:
        if seen.owner is None:
            places.setdefault((seen.check, seen.place), []).append(seen)
        else:
            replays.setdefault((seen.owner, seen.micro or 0, seen.check), []).append(seen)
    for (check, place), group in sorted(places.items()):
        values = {seen.value for seen in group}
        if len(values) > 1 or NONFINITE in values:
            yield _table(incident, f"{check}: {_PLACES.get(place, place)}", group)
    agreed = 0
    for (owner, micro, check), group in sorted(replays.items()):
        runs = {value for seen in group for value in seen.runs}
        if len(runs) < 2 and NONFINITE not in runs:
            agreed += 1
            continue
        what = "input" if check == "input" else "result"
        yield _table(incident, f"{check}: {what} of micro-batch {micro} of rank {owner}", group)
    if agreed:
        yield {"title": f"On {agreed} further micro-batches all runs agreed bit for bit.", "rows": []}


_PLACES = {
    "local": "gradient of each rank, before the all-reduce",
    "reduced": "gradient on each rank, after the all-reduce",
    "state": "parameters and optimizer state of each rank",
}


def _table(incident: Incident, title: str, group: Sequence[Observation]) -> dict[str, Any]:
    rows = []
    for seen in sorted(group, key=lambda one: (one.place != "original", one.rank)):
        role = {"original": "owner", "witness": "witness"}.get(seen.place, "")
        repeats = "" if not seen.repeats else f"{len(seen.repeats)} times "
        same = set(seen.repeats) == {seen.value}
        rows.append(
            {
                "rank": seen.rank,
                "node": incident.topology.node_of(seen.rank),
                "role": role,
                "value": seen.value[:_DIGITS],
                "repeats": repeats
                + ("the same" if same else ", ".join(sorted({one[:_DIGITS] for one in seen.repeats}))),
                "about": _about(seen),
                "named": seen.rank in incident.verdict.ranks,
            }
        )
    return {"title": title, "rows": rows}


def _about(seen: Observation) -> str:
    """What a person needs to see: the first names in which a run differs from training, or whatever the check told."""
    if seen.error:
        return seen.error
    names = [str(name) for name in seen.detail.get("differs", ())]
    if not names:
        return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in seen.detail.items())
    count = max(len(names), *(int(seen.detail.get(key) or 0) for key in ("differing", "gradients_differing")))
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {count - _NAMES_SHOWN} more" if count > _NAMES_SHOWN else "")


# The curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a step and a loss lie in the drawing."""

    steps: int
    lowest: float
    highest: float

    def x(self, step: float) -> float:
        """From the left."""
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, self.steps - 1), 1)

    def y(self, loss: float) -> float:
        """From the top; what is too high to be drawn lies at the top."""
        share = (min(max(loss, self.lowest), self.highest) - self.lowest) / ((self.highest - self.lowest) or 1.0)
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share, 1)


def chart(report: Report) -> dict[str, Any]:
    """The geometry of the loss curves: lines, axes, marks."""
    usual = [loss for loss in report.losses["clean"] if math.isfinite(loss)] or [1.0]
    every = [loss for losses in report.losses.values() for loss in losses if math.isfinite(loss)] or usual
    scale = Scale(report.settings.steps, min(every), min(max(every), _HIGHEST * max(usual)))
    lines = []
    for name, of in report.reported.items():
        segments: list[str] = []
        missing: list[float] = []
        for generation in sorted(of.attempts):
            found, lost = _segments(scale, of.attempts[generation])
            segments, missing = segments + found, missing + lost
        lines.append({"name": name, "title": report.settings.titles[name], "segments": segments, "missing": missing})
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "top": _TOP,
        "bottom": _HEIGHT - _BOTTOM,
        "lines": lines,
        "x_ticks": [{"at": scale.x(step), "label": f"{step:g}"} for step in ticks(0, report.settings.steps - 1, 8)],
        "y_ticks": [{"at": scale.y(loss), "label": f"{loss:g}"} for loss in ticks(scale.lowest, scale.highest, 6)],
        "marks": list(_marks(report, scale)),
        "cut": f"{scale.highest:.1f}" if max(every) > scale.highest else "",
        "description": _description(report),
    }


def _segments(scale: Scale, losses: Mapping[int, float]) -> tuple[list[str], list[float]]:
    """A line through what is finite, as points, broken where something is not; and where that is."""
    segments: list[list[str]] = [[]]
    missing = []
    for step in sorted(losses):
        if math.isfinite(losses[step]):
            segments[-1].append(f"{scale.x(step)},{scale.y(losses[step])}")
        else:
            missing.append(scale.x(step))
            segments.append([])
    return [" ".join(points) for points in segments if points], missing


def _marks(report: Report, scale: Scale) -> Iterator[dict[str, Any]]:
    """Where the fault struck, was detected, and from where the job went on: one above the other, since they may coincide."""
    told = []
    if report.injected is not None:
        told.append(("fault", int(report.injected["step"]), f"fault strikes: step {report.injected['step']}"))
    if report.verdict is not None:
        told.append(("detection", report.verdict.step, f"detected: step {report.verdict.step}"))
    resumed = report.recovery.resumed_from
    if resumed is not None:
        told.append(("resume", resumed, f"resumed: step {resumed}"))
    for row, (kind, step, label) in enumerate(told):
        at = scale.x(min(step, report.settings.steps - 1))
        late = at > _WIDTH / 2
        yield {
            "kind": kind,
            "at": at,
            "row": 14 + 15 * row,
            "label": label,
            "anchor": "end" if late else "start",
            "text": at - 5 if late else at + 5,
        }


def _description(report: Report) -> str:
    """The curves in words, for whoever cannot see them."""
    said = []
    for name, losses in report.losses.items():
        if losses:
            said.append(
                f"{report.settings.titles[name]}: from {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
            )
    return "; ".join(said) + "."
