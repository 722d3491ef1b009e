"""How unusual a gradient norm is, and why that says nothing: the negative result of AWS (2026), to be had again on any job.

A threshold on the gradient norm is what everybody tries first. It fails not because faults do not raise the norm but
because fault-free training does: the score here is measured on both, so that whoever wants such a threshold can see where
it would have to lie. Pure, no torch.

The score of a step is |norm - median| / MAD, median and median absolute deviation being those of the steps before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bitwitness.faults.cells import CellResult, CellSpec

WINDOW = 100
"""Steps before a step with which it is compared; a step with fewer before it has no score."""


@dataclass(frozen=True, slots=True)
class Strays:
    """How far norms stray from their median, in median absolute deviations.

    Attributes:
        job: whose.
        calm_steps, calm_runs: of fault-free training that were scored; calm: the highest score among them.
        faults: runs with a finite fault that were scored; highest, middle: of the scores in the step in which each struck.
        above: how many of the faults score higher than all fault-free steps.
    """

    job: str
    calm_runs: int
    calm_steps: int
    calm: float
    faults: int
    highest: float
    middle: float
    above: int

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def scores(norms: Sequence[float], window: int = WINDOW) -> dict[int, float]:
    """The score of each step that has `window` steps before it, all of them finite; by step."""
    found = {}
    for step in range(window, len(norms)):
        before = norms[step - window : step]
        if math.isfinite(norms[step]) and all(map(math.isfinite, before)):
            middle = median(before)
            spread = median(abs(norm - middle) for norm in before)
            if spread > 0:
                found[step] = abs(norms[step] - middle) / spread
    return found


def strays(results: Iterable[tuple[CellSpec, CellResult]]) -> tuple[Strays, ...]:
    """For each job whose unguarded runs are long enough, both with and without faults."""
    calm: dict[str, list[Mapping[int, float]]] = {}
    struck: dict[str, list[float]] = {}
    for spec, result in results:
        if spec.policy is not None:
            continue
        scored = scores([float(norm) for norm in result.norms])
        if spec.role in ("clean", "reference"):
            calm.setdefault(spec.job, []).append(scored)
        elif result.first_step in scored:
            struck.setdefault(spec.job, []).append(scored[result.first_step])
    return tuple(
        _strays(job, [one for one in calm.get(job, ()) if one], found) for job, found in struck.items() if calm.get(job)
    )


def _strays(job: str, calm: Sequence[Mapping[int, float]], struck: Sequence[float]) -> Strays:
    highest = max((score for one in calm for score in one.values()), default=math.nan)
    return Strays(
        job=job,
        calm_runs=len(calm),
        calm_steps=sum(map(len, calm)),
        calm=highest,
        faults=len(struck),
        highest=max(struck),
        middle=median(struck),
        above=sum(score > highest for score in struck),
    )
