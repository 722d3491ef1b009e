"""Results of comparisons as judging makes them, written by hand: of a suspect that differs, one that does not, and worse."""

from __future__ import annotations

import math
import random
from typing import Any

from bitwitness.compare.records import DECADES, Mode, Participant
from bitwitness.compare.results import Lag, ModeResult, Patterns, Period, Point, Result, Row
from bitwitness.faults.statistics import Share, highest_rate, wilson
from bitwitness.runfiles.answers import Device

KIND = {"device": "Simulated GPU 80GB", "torch": "2.13.0", "driver": "590.1", "settings": "deterministic"}


def participant(name: str, role: Any, rank: int, simulated: str = "", device: str = "") -> Participant:
    return Participant(name, role, Device(rank, f"node-{rank:02d}", device or f"GPU-{rank:08d}-aaaa", KIND), simulated)


def row(group: str, phase: Any, wrong: int, of: int, steps: int = 200, hit: int | None = None, **more: Any) -> Row:
    share = wilson(wrong, of) if of else Share(0, 0, 0.0, 1.0)
    hit = min(wrong, steps) if hit is None else hit
    bounds: dict[str, Any] = {} if wrong else {"bound": highest_rate(of), "step_bound": highest_rate(steps)}
    severity: dict[str, Any] = (
        {"severity": 0.31, "severity_largest": 1.2e12, "noise": 0.02, "ulp_largest": 31_000} if wrong else {}
    )
    return Row(group, phase, more.pop("dtype", "bfloat16"), "4x32x32", steps, hit, share, **bounds, **severity, **more)


def points(steps: int, seed: int = 3, every: int = 7, scale: float = 1.0) -> tuple[Point, ...]:
    draw = random.Random(seed)
    made = []
    for step in range(steps):
        wrong = int(draw.expovariate(1 / 30)) if step >= steps // 4 and step % every == 0 else 0
        loss = 4.2 * math.exp(-step / steps) + 0.02 * draw.random()
        made.append(
            Point(
                step,
                wrong,
                400_000,
                min(wrong, 9),
                loss=loss + 1e-4 * step / steps,
                reference_loss=loss,
                noise=0.04 * draw.random() if wrong else 0.0,
                drift=scale * 1e-3 * step,
                weights=81.0,
                temperature=60 + 8 * math.sin(step / 20) if step % 3 else None,
                clock=1980.0 - (step % 5),
                seconds=0.2,
                void=steps // 2 <= step < steps // 2 + 3,
            )
        )
    return tuple(made)


def patterns() -> Patterns:
    flips = [(0, 0)] * 16
    flips[13], flips[2], flips[15] = (812, 3), (40, 38), (2, 9)
    lags = tuple(Lag(lag, 340 if lag == 8 else 20 + lag % 5, 22.0, lag == 8) for lag in [*range(2, 33), 64, 128])
    return Patterns(
        "bfloat16",
        904,
        truncated=True,
        masks=((0x2000, 815), (0x0004, 60), *((0x8001 + 16 * number, 3 - number // 5) for number in range(12))),
        mask_kinds=14,
        bits=tuple(flips),
        lags=lags,
        tiles=((3, 3, 12), (1, 4, 7)),
        periods=(Period("column", 8, (0, 1, 2, 3), 0.94, 0.5),),
        classes={"zero": 120, "special": 9, "sign": 0, "other": 775},
        ranges=tuple((low, 1000 * (number + 1), number * number) for number, low in enumerate(DECADES)),
        findings=("mask 0x2000 in 90 % of wrong elements", "wrong elements lie 8 apart far more often than by chance"),
    )


def mode(name: Mode = "lock-step", steps: int = 200, modules: int = 12, clean: bool = False, **more: Any) -> ModeResult:
    phases = ("fwd_out", "grad_in", "grad_w", "fwd_in")
    rows = []
    for number in range(modules):
        for at, phase in enumerate(phases):
            wrong = 0 if clean or (number + at) % 3 else 11 ** (number % 5) + at
            rows.append(
                row(f"blocks.{number // 2}.{'attention' if number % 2 else 'ffn'}", phase, wrong, 40_960_000, steps)
            )
    count, of = sum(one.mismatches.count for one in rows), sum(one.mismatches.of for one in rows)
    total = row("", "", count, of, steps, 0 if clean else steps // 3)
    groups = tuple(
        row(f"blocks.{number}", "forward", 0 if clean else 900 * number, 9_000_000, steps) for number in range(3)
    )
    series = points(steps)
    given: dict[str, Any] = {
        "first": None if clean else steps // 4,
        "rows": tuple(rows),
        "groups": groups,
        "total": total,
        "noise": None if clean else 0.037,
        "noise_step": None if clean else 77,
        "series": tuple(Point(one.step, 0, one.elements, 0, one.loss, one.reference_loss) for one in series)
        if clean
        else series,
        "correlation": {"temperature": 0.41, "clock": None},
    }
    return ModeResult(name, steps, steps, 0 if clean else 3, **(given | more))


def result(
    outcome: Any = "differs", simulated: str = "", modes: tuple[ModeResult, ...] | None = None, **more: Any
) -> Result:
    clean = outcome == "nothing seen"
    if modes is None:
        control = points(200, 5, 10**9, 1.3)
        scores = {
            "suspect": {"accuracy": 0.91, "divergence": 0.05},
            "reference-0": {"accuracy": 0.92, "divergence": 0.0},
            "control": {"accuracy": 0.905, "divergence": 0.067},
        }
        modes = (
            mode("lock-step", clean=clean, patterns=() if clean else (patterns(),)),
            mode("parameters", clean=clean, modules=3),
            mode("free", clean=clean, modules=3, control=control, results=scores),
        )
    asked = {
        "id": "compare-2026-11-30",
        "workload": "gpt",
        "options": {"width": "32"},
        "modes": ["lock-step", "parameters", "free"],
        "globs": ["blocks.*"],
        "steps": 200,
        "seed": 0,
        "time": "2026-11-30T13:00:00.000Z",
    }
    given: dict[str, Any] = {
        "sentence": {
            "differs": "suspect computes other bits than 2 references that agree with each other",
            "nothing seen": "suspect gave the same bits as 2 references in all 200 steps",
        }.get(outcome, "references differ from each other in every step: none of them can be the measure"),
        "notes": ("reference-1 differed in 3 steps, which are left out",) if outcome != "nothing seen" else (),
        "asked": asked,
    }
    given |= {
        "references": (participant("reference-0", "leader", 0), participant("reference-1", "reference", 1)),
        "control": participant("control", "control", 3),
    }
    suspect = participant("suspect", "suspect", 2, simulated)
    return Result(suspect=suspect, outcome=outcome, modes=modes, **(given | more))
