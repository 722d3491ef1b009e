"""What a fault did to training: from the curves of one run, of the same run without the fault, and of others without one.

Whether a fault harmed cannot be read off its own curve: training is noisy, and any changed bit ends in other weights. So
a run is judged by its distance from the very same run without the fault, in units of what two seeds differ by (sigma).

Who looks at hundreds of steps finds three sigma somewhere in every seventh run: the limit that must be crossed is one that
noise crosses in a share `chance` of whole runs, and never below `sigmas`.

The labels are those of He et al. (ISCA 2023) with the modes of LLM-PRISM (arXiv 2604.10390); where they leave a rule open
the number is a setting here. Judged in this order:

crash, hang             the run ended otherwise than by its last step
masked-identical        every bit of the state after every update is that of the run without the fault
immediate-nonfinite     loss or gradient norm is NaN or Inf in the step of the fault, and the loss stays so to the end
short-term-nonfinite    the same, within `short` steps; `late-nonfinite`: later
sharp-degrade           the loss rose beyond the limit within `jump` steps and stayed where it was
sharp-slow-degrade      it rose like that, and a share `partial` of the rise or more was made good again, not all
slow-degrade            it rose beyond the limit in more than `jump` steps and is there at the end
spike-recover           it rose, and is back at the end
low-test-accuracy       it never rose, and the evaluation at the end is worse by more than `sigmas` sigma and `tolerance`
slight                  it never rose, and the evaluation is worse by more than `tolerance` and than noise, but for `chance`, makes it
masked-drifted          none of all this, and other bits

There is no outcome where the fault is not the cause: nothing was hit, or the run without the fault went wrong as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import NormalDist, fmean, median_low
from typing import Any, Literal, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.faults.cells import CellResult
from bitwitness.faults.statistics import reach

Label = Literal[
    "masked-identical",
    "masked-drifted",
    "slight",
    "immediate-nonfinite",
    "short-term-nonfinite",
    "late-nonfinite",
    "spike-recover",
    "slow-degrade",
    "sharp-degrade",
    "sharp-slow-degrade",
    "low-test-accuracy",
    "hang",
    "crash",
    "stopped",
]
LABELS: tuple[Label, ...] = get_args(Label)
_NEAR = 4
"""Sigma is averaged over so many widths of smoothing before and after a step."""
_HIGH = 4.0
"""About how many sigma the limit lies at, for how often noise crosses it."""
_FINALS = ("accuracy", "loss", "perplexity")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the borders are.

    Attributes:
        final: what is compared at the end: `accuracy`, `loss`, or `perplexity` (from the evaluation's loss).
        tolerance: how much worse is still the same: absolute for accuracy, a share of itself for the others.
        smooth: steps over which losses are averaged.
        sigmas: how many standard deviations of the difference of two seeds are noise, at the least.
        chance: the share of runs that may count as harmed though only noise harmed them: the noise of all steps together.
        short: steps after the fault within which NaN is short-term.
        jump: steps within which a rise is sharp.
        partial: the share of a sharp rise that must be made good to make it sharp-slow.

    Raises:
        ConfigurationError: a value is impossible.
    """

    final: str = "loss"
    tolerance: float = 0.02
    smooth: int = 5
    sigmas: float = 3.0
    chance: float = 0.01
    short: int = 2
    jump: int = 5
    partial: float = 0.3

    def __post_init__(self) -> None:
        if self.final not in _FINALS:
            raise ConfigurationError(f"final must be one of {', '.join(_FINALS)}, not {self.final!r}")
        for name, least in (("smooth", 1), ("short", 0), ("jump", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} must be a whole number of steps, at least {least}, not {value!r}")
        for name, most in (("tolerance", 1.0), ("sigmas", 100.0), ("chance", 0.25), ("partial", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                raise ConfigurationError(f"{name} must be a number above 0 and at most {most:g}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Series:
    """What a run showed from outside.

    Attributes:
        losses, norms: by step; of the loss and of the gradient.
        evaluation: at the end.
        end: how it ended.
        identical: whether all its bits are those of the clean run; None: not known.
        struck: the step of the first strike; None: there was none.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...] = ()
    evaluation: Mapping[str, float] = field(default_factory=dict)
    end: str = "finished"
    identical: bool | None = None
    struck: int | None = None

    @classmethod
    def of(cls, result: CellResult, identical: bool | None = None) -> Series:
        """That of a result, in which NaN and Inf are text."""
        return cls(
            tuple(float(loss) for loss in result.losses),
            tuple(float(norm) for norm in result.norms),
            {name: float(value) for name, value in result.evaluation.items()},
            result.end,
            identical,
            result.first_step,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the fault did.

    Attributes:
        label: see the head of this module; `stopped` where a guard ended the run.
        onset: the step at which it first showed; None where it never did.
        largest: the largest distance from the clean run, in sigmas; Inf where the loss was not finite.
        final: by how much the end is worse than the clean run's (negative: better), as `tolerance` counts; None: not known.
    """

    label: Label
    onset: int | None = None
    largest: float = 0.0
    final: float | None = None

    @property
    def better(self) -> bool:
        """Whether it ended better than without the fault."""
        return self.final is not None and self.final < 0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        largest = self.largest if math.isfinite(self.largest) else str(self.largest)
        final = self.final if self.final is None or math.isfinite(self.final) else str(self.final)
        return {"label": self.label, "onset": self.onset, "largest": largest, "final": final}


def classify(
    run: Series, references: Sequence[Series], clean: Series, settings: Settings | None = None
) -> Outcome | None:
    """What became of a run; None where that cannot be said, and `unclear` says why.

    Args:
        run: that was hit.
        references: of runs without a fault and with other seeds: what is noise. With fewer than two there is no sigma, and a
            share `tolerance` of the loss stands for `sigmas` of them.
        clean: the run without the fault and with the same seed.
        settings: where the borders are.
    """
    settings = settings or Settings()
    if unclear(run, clean):
        return None
    if run.end in ("crash", "hang"):
        return Outcome("crash" if run.end == "crash" else "hang", onset=len(run.losses))
    if run.end != "finished":
        return Outcome("stopped", onset=len(run.losses))
    final = worse(run, clean, settings)
    if run.identical:
        return Outcome("masked-identical", final=final)
    struck = run.struck or 0
    if not math.isfinite(run.losses[-1]):
        return _nonfinite(run, clean, struck, settings, final)
    noise = Noise.of(references, clean, settings, max(1, len(run.losses) - struck))
    rises = _rises(run, clean, settings, struck)
    beyond = [step for step, rise in rises.items() if rise > noise.limit[step] * noise.sigma[step]]
    largest = max((rise / noise.sigma[step] for step, rise in rises.items()), default=0.0)
    if beyond:
        return Outcome(_kind(run, clean, rises, beyond[0], noise, settings), beyond[0], largest, final)
    label = _final_label(final, references, clean, settings)
    return Outcome(label, None if label == "masked-drifted" else len(run.losses), largest, final)


def unclear(run: Series, clean: Series) -> str:
    """Why nothing can be said of what a fault did in a run; empty if something can."""
    if run.struck is None:
        return "nothing was hit"
    if run.end == "refused":
        return "the run was refused"
    if clean.end != "finished":
        return f"the run without the fault did not finish either ({clean.end})"
    if run.end != "finished" or run.identical:
        return ""
    if not run.losses or not clean.losses:
        return "there are no losses"
    if not math.isfinite(clean.losses[-1]):
        return "the loss is not finite without the fault either"
    return ""


def worse(run: Series, clean: Series, settings: Settings) -> float | None:
    """By how much the evaluation of a run is worse than another's: absolute for accuracy, else as a share; None: no evaluation,
    or one that is no number without the fault either.
    """
    name = "accuracy" if settings.final == "accuracy" else "loss"
    if name not in run.evaluation or name not in clean.evaluation:
        return None
    own, other = run.evaluation[name], clean.evaluation[name]
    if not math.isfinite(other):
        return None
    if not math.isfinite(own):
        return math.inf
    if settings.final == "accuracy":
        return other - own
    if settings.final == "perplexity":
        return math.expm1(min(own - other, 700.0))
    return (own - other) / abs(other) if other else own - other


@dataclass(frozen=True, slots=True)
class Noise:
    """What training does by itself.

    Attributes:
        sigma: by step, the standard deviation of the difference of two seeds' smoothed losses.
        limit: by step, how many of them chance does not reach in any step of a run, but for a share `chance` of all runs.
    """

    sigma: Sequence[float]
    limit: Sequence[float]

    @classmethod
    def of(cls, references: Sequence[Series], clean: Series, settings: Settings, looked_at: int) -> Noise:
        """That of some seeds, of which the clean run's is one, for so many steps that are looked at.

        Sigma is the spread of one seed times the root of two, since a run that a fault has put on another path is compared with
        one path, not with the mean of all; averaged over neighbouring steps, because a handful of seeds says little about a
        single one. The limit allows for three things: that a run has many steps, and the largest of many draws is large; that
        sigma is an estimate from few seeds, whose losses of neighbouring steps may be nearly the same draw; and that losses need
        not be normal, so that no limit is below what the seeds show among themselves.
        """
        base = smoothed(clean.losses, settings.smooth)
        # Equal losses on all seeds are a toy; a sigma of zero would call the last bit a catastrophe.
        floor = [settings.tolerance * max(abs(value), 1e-12) / settings.sigmas for value in base]
        curves = [smoothed(one.losses, settings.smooth) for one in (clean, *references) if one.end == "finished"]
        curves = [curve for curve in curves if len(curve) >= len(base)]
        if len(curves) < 3:
            return cls(floor, [settings.sigmas] * len(base))
        raw = [
            _deviation(values) if all(map(math.isfinite, values)) else math.nan for values in zip(*curves, strict=False)
        ]
        raw = raw[: len(base)]
        half = _NEAR * settings.smooth
        sigma, width = [], []
        for step in range(len(raw)):
            near = [value for value in raw[max(0, step - half) : step + half + 1] if math.isfinite(value)]
            mean = fmean(value * value for value in near) if near else floor[step] ** 2
            sigma.append(max(math.sqrt(2.0 * mean), 1e-3 * floor[step]))
            width.append(len(near))
        scaled = [[value / one for value, one in zip(curve, sigma, strict=False)] for curve in curves]
        alike = _alike(scaled, half)
        # Of a smooth curve, the crossings of a level are as many as independent draws would have (Rice, 1944).
        turns = math.acos(min(1.0, max(-1.0, alike[1] if len(alike) > 1 else 0.0)))
        looks = 1 + min(looked_at, looked_at * turns * _HIGH / math.sqrt(2 * math.pi))
        pieces = max(1, round(looked_at / (2 * half + 1)))
        least = max(settings.sigmas, _farthest(scaled))
        limits: dict[int, float] = {}
        for span in set(width):
            same = (
                1 + 2 * sum((1 - lag / span) * alike[lag] ** 2 for lag in range(1, min(span, len(alike))))
                if span
                else 1
            )
            freedom = (len(curves) - 1) * max(1.0, span / same)
            # Rounded, so that runs which differ little share what takes long to find.
            chance = reach(float(f"{freedom:.1e}"), float(f"{looks / pieces:.1e}"), settings.chance / pieces)
            limits[span] = max(least, chance)
        return cls(sigma, [limits[span] for span in width])


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; that of the standard library is exact, and takes a hundred times as long."""
    middle = fmean(values)
    return math.sqrt(sum((value - middle) * (value - middle) for value in values) / (len(values) - 1))


def _alike(curves: Sequence[Sequence[float]], lags: int) -> list[float]:
    """The correlation of what differs between seeds with itself so many steps later, from no step on."""
    rows = [values for values in zip(*curves, strict=False) if all(map(math.isfinite, values))]
    middles = [fmean(values) for values in rows]
    apart = [[row[one] - middle for row, middle in zip(rows, middles, strict=True)] for one in range(len(curves))]
    found = []
    for lag in range(min(lags, len(rows) - 1) + 1):
        products = [sum(map(mul, one, one[lag:])) for one in apart]
        found.append(sum(products) / (len(rows) - lag))
    return [value / found[0] if found[0] else 0.0 for value in found] if found else []


def _farthest(curves: Sequence[Sequence[float]]) -> float:
    """How far the highest lies above the lowest in any step."""
    rows = [values for values in zip(*curves, strict=False) if all(map(math.isfinite, values))]
    return max((max(values) - min(values) for values in rows), default=0.0)


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those before it, `width` in all; over fewer where there are no more."""
    near = [losses[max(0, step + 1 - width) : step + 1] for step in range(len(losses))]
    return [sum(values) / len(values) for values in near]


def _nonfinite(run: Series, clean: Series, struck: int, settings: Settings, final: float | None) -> Outcome:
    """The loss is not finite at the end: since when?"""
    # Under a GradScaler a norm that overflows is ordinary.
    norms = run.norms if all(map(math.isfinite, clean.norms)) else ()
    steps = [step for values in (run.losses, norms) for step, value in enumerate(values) if not math.isfinite(value)]
    onset = min((step for step in steps if step >= struck), default=len(run.losses))
    if onset <= struck:
        label: Label = "immediate-nonfinite"
    else:
        label = "short-term-nonfinite" if onset - struck <= settings.short else "late-nonfinite"
    return Outcome(label, onset, math.inf, final)


def _rises(run: Series, clean: Series, settings: Settings, struck: int) -> dict[int, float]:
    """By step from the strike on, how far the smoothed loss lies above the clean one; what is not finite, as Inf.

    Steps in which the clean loss is not finite say nothing.
    """
    own = smoothed(_finite_or_inf(run, clean), settings.smooth)
    other = smoothed(clean.losses[: len(own)], settings.smooth)
    return {step: own[step] - other[step] for step in range(struck, len(own)) if math.isfinite(other[step])}


def _finite_or_inf(run: Series, clean: Series) -> list[float]:
    """The losses of a run, as far as those of the clean one go, with Inf for whatever is not finite."""
    steps = min(len(run.losses), len(clean.losses))
    return [loss if math.isfinite(loss) else math.inf for loss in run.losses[:steps]]


def _kind(
    run: Series, clean: Series, rises: Mapping[int, float], beyond: int, noise: Noise, settings: Settings
) -> Label:
    """Of a loss that rose beyond the noise, first seen at a step."""
    own, last = _finite_or_inf(run, clean), max(rises)
    raw = {step: own[step] - clean.losses[step] for step in rises if math.isfinite(clean.losses[step])}
    # Smoothing makes a jump slow: how fast it rose is read off the losses themselves.
    after = [step for step in raw if step > beyond - settings.smooth]
    onset = next((step for step in after if raw[step] > noise.limit[step] * noise.sigma[step]), beyond)
    since = [raw[step] for step in raw if step >= onset]
    # A mean over the last steps remembers a spike among them, and knows a jump among them only in part.
    calm = settings.sigmas * noise.sigma[last]
    if rises[last] <= calm or median_low(since[-settings.smooth :]) <= calm:
        return "spike-recover"
    if max(since[: settings.jump]) < 0.5 * min(max(rises.values()), max(since)):
        return "slow-degrade"
    width = min(settings.smooth, len(since))
    levels = [fmean(since[end - width : end]) for end in range(width, len(since) + 1)]
    # After a step without a number the peak is the highest that is one.
    peak, end = max(filter(math.isfinite, levels), default=math.inf), levels[-1]
    made_good = peak - end > max(settings.partial * peak, noise.limit[last] * noise.sigma[last])
    return "sharp-slow-degrade" if made_good else "sharp-degrade"


def _final_label(final: float | None, references: Sequence[Series], clean: Series, settings: Settings) -> Label:
    """Of a loss that never rose: what the evaluation at the end says."""
    if final is None or final <= settings.tolerance:
        return "masked-drifted"
    values = [worse(one, clean, settings) for one in references if one.end == "finished"]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return "low-test-accuracy"
    noise, freedom = math.sqrt(2.0) * _deviation([*known, 0.0]), len(known)
    if final <= reach(freedom, 1, settings.chance) * noise:
        return "masked-drifted"
    rare = min(settings.chance, 1 - NormalDist().cdf(settings.sigmas))
    return "low-test-accuracy" if final > reach(freedom, 1, rare) * noise else "slight"
