"""From timed steps to what guarding costs: shares of a step, ratios of replays, and what was promised of them.

Everything is the median over steps, of the clock and, beside it, of processor time, which other programs on the machine
change less. Kept apart from the training that is timed, so that how a number comes about can be read on one page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from bitwitness.examples.meters import CAPTURES, HOOK, NORM, ORDER, TRAINING, Seconds
from bitwitness.policy import Policy

DEFAULTS = Policy()
"""Amortised shares are at these intervals."""

ALWAYS = ("numerics", HOOK, CAPTURES, ORDER)
"""What every step pays."""


@dataclass(frozen=True)
class Cost:
    """A check, or several.

    `share` is of the unguarded step, amortised over `every` steps, in percent; `processor_share` the same in processor
    time, which other programs on the machine change less. `target` is the promise for `share`, if there is one; `peak`
    the most memory of its own at once, in MiB, None where it cannot be measured.
    """

    name: str
    every: int
    milliseconds: float
    share: float
    processor_share: float
    target: float | None = None
    met: bool | None = None
    peak: float | None = None


@dataclass(frozen=True)
class ReplayCost:
    """A replay: all of its audit on one rank, but collectives, against what it recomputes. `parts` in milliseconds."""

    name: str
    every: int
    against: str
    milliseconds: float
    against_milliseconds: float
    ratio: float
    processor_ratio: float
    target: float
    met: bool
    share: float
    processor_share: float
    peak: float | None
    against_peak: float | None
    parts: dict[str, float]


@dataclass
class Report:
    """All of it, as the command prints it. Milliseconds are medians over steps."""

    machine: dict[str, Any]
    model: dict[str, Any]
    steps: dict[str, int]
    seconds: float
    step: dict[str, float]
    checks: list[Cost]
    replays: list[ReplayCost]
    whole_steps: dict[str, float]
    equal_bits: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return asdict(self)


@dataclass
class Sample:
    """A run of something: the whole of it, and its parts."""

    whole: Seconds
    parts: Mapping[str, Seconds] = field(default_factory=dict)


class Account:
    """From samples to what is reported."""

    def __init__(
        self, samples: Mapping[str, Sequence[Sample]], peaks: Mapping[str, Mapping[str, float]] | None
    ) -> None:
        self._samples = samples
        self._peaks = peaks
        self._plain = samples["plain"]
        self._audited = [*samples["loss"], *samples["gradients"]]
        self._step = _typical([sample.whole for sample in samples["unguarded"]])

    def step_milliseconds(self) -> dict[str, float]:
        """The unguarded step, and the norm in it."""
        wholes = [sample.whole.wall for sample in self._samples["unguarded"]]
        return {
            "median": 1e3 * self._step.wall,
            "least": 1e3 * min(wholes),
            "processor": 1e3 * self._step.processor,
            "norm": 1e3 * self._part(self._plain, NORM).wall,
        }

    def checks(self) -> list[Cost]:
        """One by one, and the sums that are promised."""
        always = {label: self._part(self._plain, label) for label in ALWAYS}
        replicas = self._part(self._audited, "replicas")
        amortised = Seconds(replicas.wall / DEFAULTS.check_every, replicas.processor / DEFAULTS.check_every)
        numerics = _sum([always["numerics"], amortised])
        names = {CAPTURES: "captures for replays", ORDER: "order, journal", HOOK: "DDP hook"}
        return [
            self._cost("numerics", 1, always["numerics"], ["numerics"]),
            self._cost("replicas", DEFAULTS.check_every, replicas, ["replicas"]),
            self._cost("numerics + replicas", 1, numerics, ["numerics", "replicas"], 0.7),
            *(self._cost(names[label], 1, always[label], [label]) for label in (CAPTURES, HOOK, ORDER)),
            self._cost("all but replays", 1, _sum([*always.values(), amortised]), [*ALWAYS, "replicas"], 0.7),
        ]

    def replay(self, level: str, against: str, target: float) -> ReplayCost:
        """The audits at this level."""
        audits = self._samples[level]
        labels = sorted({label for sample in audits for label in sample.parts if label.startswith("replay")})
        whole = _typical(
            [_sum([sample.parts[label] for label in labels if label in sample.parts]) for sample in audits]
        )
        base = _typical([sample.whole for sample in self._samples[against]])
        ratio = whole.wall / base.wall
        return ReplayCost(
            name="loss replay" if level == "loss" else "gradient replay",
            every=DEFAULTS.audit_every,
            against=against,
            milliseconds=1e3 * whole.wall,
            against_milliseconds=1e3 * base.wall,
            ratio=ratio,
            processor_ratio=whole.processor / base.processor,
            target=target,
            met=ratio <= target,
            share=100 * whole.wall / DEFAULTS.audit_every / self._step.wall,
            processor_share=100 * whole.processor / DEFAULTS.audit_every / self._step.processor,
            peak=self._peak([level], labels),
            against_peak=self._peak([against], [TRAINING]),
            parts={label: 1e3 * self._part(audits, label).wall for label in labels},
        )

    def whole_steps(self) -> dict[str, float]:
        """Steps without an audit less the unguarded ones beside them, against the sum of the parts."""
        pairs = list(zip(self._samples["unguarded"][::2], self._samples["plain"], strict=True))
        wall = [1e3 * (guarded.whole.wall - bare.whole.wall) for bare, guarded in pairs]
        low, middle, high = quantiles(wall, n=4) if len(wall) > 1 else wall * 3
        parts = _sum([self._part(self._plain, label) for label in ALWAYS])
        return {
            "difference": middle,
            "lower_quartile": low,
            "upper_quartile": high,
            "processor_difference": median(1e3 * (one.whole.processor - bare.whole.processor) for bare, one in pairs),
            "sum_of_parts": 1e3 * parts.wall,
            "processor_sum_of_parts": 1e3 * parts.processor,
        }

    def _cost(self, name: str, every: int, due: Seconds, labels: Sequence[str], target: float | None = None) -> Cost:
        share = 100 * due.wall / every / self._step.wall
        processor = 100 * due.processor / every / self._step.processor
        met = None if target is None else share <= target
        peak = self._peak(["plain", "loss", "gradients"], labels)
        return Cost(name, every, 1e3 * due.wall, share, processor, target, met, peak)

    def _part(self, samples: Sequence[Sample], label: str) -> Seconds:
        return _typical([sample.parts.get(label, Seconds()) for sample in samples])

    def _peak(self, kinds: Sequence[str], labels: Sequence[str]) -> float | None:
        if self._peaks is None:
            return None
        return max(self._peaks[kind].get(label, 0.0) for kind in kinds for label in labels)


def _typical(found: Sequence[Seconds]) -> Seconds:
    return Seconds(median(one.wall for one in found), median(one.processor for one in found))


def _sum(found: Sequence[Seconds]) -> Seconds:
    return Seconds(sum(one.wall for one in found), sum(one.processor for one in found))
