"""What a fault did to training: from the curves of one run, of the same run without the fault, and of others without one.

Whether a fault harmed cannot be read off its own curve: training is noisy, and any changed bit ends in other weights. So
a run is judged by its distance from the very same run without the fault, in units of what two seeds differ by (sigma).

The labels are those of He et al. (ISCA 2023) with the modes of LLM-PRISM (arXiv 2604.10390); where they leave a rule open
the number is a setting here. Judged in this order:

crash, hang             the run ended otherwise than by its last step
masked-identical        every bit of the state after every update is that of the run without the fault
immediate-nonfinite     loss or gradient norm is NaN or Inf in the step of the fault, and the loss stays so to the end
short-term-nonfinite    the same, within `short` steps; `late-nonfinite`: later
sharp-degrade           the loss rose beyond `sigmas` sigma within `jump` steps and stayed where it was
sharp-slow-degrade      it rose like that, and a share `partial` of the rise or more was made good again, not all
slow-degrade            it rose beyond `sigmas` sigma in more than `jump` steps and is there at the end
spike-recover           it rose, and is back at the end
low-test-accuracy       it never rose, and the evaluation at the end is worse by more than `sigmas` sigma and `tolerance`
slight                  it never rose, and the evaluation is worse by more than `tolerance`
masked-drifted          none of all this, and other bits
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.faults.cells import CellResult

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
HARMLESS: tuple[Label, ...] = ("masked-identical", "masked-drifted")
_NEAR = 4
"""Sigma is averaged over so many widths of smoothing before and after a step."""
_FINALS = ("accuracy", "loss", "perplexity")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the borders are.

    Attributes:
        final: what is compared at the end: `accuracy`, `loss`, or `perplexity` (from the evaluation's loss).
        tolerance: how much worse is still the same: absolute for accuracy, a share of itself for the others.
        smooth: steps over which losses are averaged.
        sigmas: how many standard deviations of the difference of two seeds are noise.
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
        for name, most in (("tolerance", 1.0), ("sigmas", 100.0), ("partial", 1.0)):
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


def classify(run: Series, references: Sequence[Series], clean: Series, settings: Settings | None = None) -> Outcome:
    """What became of a run.

    Args:
        run: that was hit.
        references: of runs without a fault and with other seeds: what is noise. With fewer than two there is no sigma, and a
            share `tolerance` of the loss stands for three of them.
        clean: the run without the fault and with the same seed.
        settings: where the borders are.
    """
    settings = settings or Settings()
    if run.end in ("crash", "hang"):
        return Outcome("crash" if run.end == "crash" else "hang", onset=len(run.losses))
    if run.end != "finished":
        return Outcome("stopped", onset=len(run.losses))
    final = worse(run, clean, settings)
    if run.identical:
        return Outcome("masked-identical", final=final)
    struck = run.struck or 0
    if not run.losses or not math.isfinite(run.losses[-1]):
        return _nonfinite(run, clean, struck, settings, final)
    sigma = spread(references, clean, settings)
    rises = _rises(run, clean, settings, struck)
    beyond = [step for step, rise in rises.items() if rise > settings.sigmas * sigma[step]]
    largest = max((rise / sigma[step] for step, rise in rises.items()), default=0.0)
    if beyond:
        return Outcome(_kind(run, clean, rises, beyond, sigma, settings), beyond[0], largest, final)
    if final is not None and final > settings.tolerance:
        noise = _final_spread(references, clean, settings)
        label: Label = "low-test-accuracy" if final > settings.sigmas * noise else "slight"
        return Outcome(label, len(run.losses), largest, final)
    return Outcome("masked-drifted", None, largest, final)


def worse(run: Series, clean: Series, settings: Settings) -> float | None:
    """By how much the evaluation of a run is worse than another's: absolute for accuracy, else as a share; None: no evaluation."""
    name = "accuracy" if settings.final == "accuracy" else "loss"
    if name not in run.evaluation or name not in clean.evaluation:
        return None
    own, other = run.evaluation[name], clean.evaluation[name]
    if not math.isfinite(own):
        return math.inf
    if settings.final == "accuracy":
        return other - own
    if settings.final == "perplexity":
        return math.expm1(min(own - other, 700.0))
    return (own - other) / abs(other) if other else own - other


def spread(references: Sequence[Series], clean: Series, settings: Settings) -> list[float]:
    """Sigma by step: the standard deviation of the difference of two seeds' smoothed losses.

    That of one seed times the root of two, since a run that a fault has put on another path is compared with one path, not with
    the mean of all; averaged over neighbouring steps, because a handful of seeds says little about a single one.
    """
    curves = [smoothed(one.losses, settings.smooth) for one in (*references, clean) if one.end == "finished"]
    base = smoothed(clean.losses, settings.smooth)
    # Equal losses on all seeds are a toy; a sigma of zero would call the last bit a catastrophe.
    floor = [settings.tolerance * max(abs(value), 1e-12) / settings.sigmas for value in base]
    if len(curves) < 3:
        return floor
    raw = []
    for step in range(len(base)):
        values = [curve[step] for curve in curves if step < len(curve) and math.isfinite(curve[step])]
        raw.append(stdev(values) if len(values) >= 3 else floor[step])
    found = []
    for step in range(len(raw)):
        near = raw[max(0, step - _NEAR * settings.smooth) : step + _NEAR * settings.smooth + 1]
        found.append(max(math.sqrt(2.0 * fmean(value * value for value in near)), 1e-3 * floor[step]))
    return found


def smoothed(losses: Sequence[float], width: int) -> list[float]:
    """The mean of each value and those before it, `width` in all; over fewer where there are no more."""
    return [fmean(losses[max(0, step + 1 - width) : step + 1]) for step in range(len(losses))]


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
    """By step from the strike on, how far the smoothed loss lies above the clean one; what is not finite, as Inf."""
    steps = min(len(run.losses), len(clean.losses))
    finite = [run.losses[step] if math.isfinite(run.losses[step]) else math.inf for step in range(steps)]
    own, other = smoothed(finite, settings.smooth), smoothed(clean.losses[:steps], settings.smooth)
    return {step: own[step] - other[step] for step in range(struck, steps)}


def _kind(
    run: Series,
    clean: Series,
    rises: Mapping[int, float],
    beyond: Sequence[int],
    sigma: Sequence[float],
    settings: Settings,
) -> Label:
    """Of a loss that rose beyond the noise."""
    last = max(rises)
    end = rises[last]
    if end <= settings.sigmas * sigma[last]:
        return "spike-recover"
    # Smoothing makes a jump slow: how fast it rose is read off the losses themselves.
    first = max(min(rises), beyond[0] + 1 - settings.smooth)
    raw = {step: run.losses[step] - clean.losses[step] for step in rises}
    raw = {step: rise if math.isfinite(rise) else math.inf for step, rise in raw.items()}
    onset = next((step for step in range(first, last + 1) if raw[step] > settings.sigmas * sigma[step]), beyond[0])
    soon = max(raw[step] for step in range(onset, min(onset + settings.jump, last + 1)))
    peak = max(rises.values())
    if soon < 0.5 * min(peak, max(raw.values())):
        return "slow-degrade"
    peak = max(soon if math.isfinite(soon) else peak, end)
    return "sharp-slow-degrade" if end <= (1 - settings.partial) * peak else "sharp-degrade"


def _final_spread(references: Sequence[Series], clean: Series, settings: Settings) -> float:
    """Sigma of the evaluation over seeds, as `worse` counts; 0 where there are too few."""
    values = [worse(one, clean, settings) for one in references if one.end == "finished"]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.sqrt(2.0) * stdev([*known, 0.0]) if len(known) >= 2 else 0.0
