"""Figures of one mode: by module and phase, over all of forward and backward, and step by step. Of what counts, see `judging_steps`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from bitwitness.compare.intervals import rate
from bitwitness.compare.judging_steps import Seen, Steps
from bitwitness.compare.records import PHASES, Account, Difference, Phase, Site
from bitwitness.compare.results import Point, Row
from bitwitness.faults.statistics import highest_rate

_SHAPES = 3
_FORWARD: tuple[Phase, ...] = ("fwd_out",)
_BACKWARD: tuple[Phase, ...] = ("grad_in", "grad_w")
BETWEEN: tuple[Phase, ...] = ("fwd_in", "grad_out", "loss")
"""What the code between the chosen modules computes."""
NOT_COMPUTED: tuple[Phase, ...] = ("batch", "memory")
"""Compared, and no trial: a rate over what nobody computed would say less than it seems to."""

_SUM = " sum"
"""Ends the name of what `hooks` has added up of parts that are compared by themselves."""


def is_trial(site: Site) -> bool:
    """Whether the device computed it, and it is counted nowhere else."""
    return site.phase not in NOT_COMPUTED and not site.tensor.endswith(_SUM)


_Key = TypeVar("_Key", bound=Hashable)
RowPhase = Phase | Literal["", "forward", "backward"]


@dataclass(slots=True)
class _Sum:
    """What is known of a group of sites over all steps."""

    dtypes: set[str] = field(default_factory=set)
    shapes: dict[tuple[int, ...], None] = field(default_factory=dict)
    steps: dict[int, list[int]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def has(self, sites: Sequence[Site]) -> None:
        """These are among it."""
        self.dtypes.update(site.dtype for site in sites)
        self.shapes.update(dict.fromkeys(site.shape for site in sites))

    def differed(self, step: int, one: Difference) -> None:
        self.steps[step][0] += one.mismatches
        self.differences.append(one)

    def row(self, group: str, phase: RowPhase, confidence: float) -> Row:
        some = self.differences
        severe = sum(one.severity_of for one in some)
        hit = sum(wrong > 0 for wrong, _ in self.steps.values())
        counts = [(min(wrong, of), of) for wrong, of in self.steps.values()]
        mismatches = rate(counts, confidence)
        return Row(
            group=group,
            phase=phase,
            dtype=", ".join(sorted(self.dtypes)),
            shapes=_shapes(self.shapes),
            steps=len(self.steps),
            steps_hit=hit,
            mismatches=mismatches,
            severity=_sum(one.severity_sum for one in some) / severe if severe else None,
            severity_largest=max((one.severity_largest for one in some if one.severity_of), default=None),
            zeros=sum(one.zeros for one in some),
            zero_largest=max((one.zero_largest for one in some), default=0.0),
            nonfinite=sum(one.nonfinite for one in some),
            ulp_largest=max((one.ulp_largest for one in some), default=0),
            noise=max((_noise(one) for one in some), default=None),
            bound=None if some else highest_rate(mismatches.of, confidence),
            step_bound=None if hit else highest_rate(len(self.steps), confidence),
        )


def rows(counted: Sequence[Seen], confidence: float) -> tuple[tuple[Row, ...], tuple[Row, ...], Row | None]:
    """By module, phase and dtype; by module over all of forward and of backward; and over all that was computed.

    In `forward` there are outputs, in `backward` the gradients that a module makes, of its inputs and its parameters. What arrives at
    a module, and whatever follows the gradients, has rows of its own and is in the total.
    """
    single = _summed(counted, lambda site: (site.module, site.phase, site.dtype))
    groups = _summed(counted, lambda site: (site.module, way) if site.module and (way := _way(site)) else None)
    total = _summed(counted, lambda _: "")
    order = {phase: number for number, phase in enumerate(PHASES)}
    modules = {module: number for number, module in enumerate(dict.fromkeys(module for module, _, _ in single))}
    keys = sorted(single, key=lambda key: (modules[key[0]], order[key[1]], key[2]))
    return (
        tuple(single[key].row(key[0], key[1], confidence) for key in keys),
        tuple(one.row(module, way, confidence) for (module, way), one in groups.items()),
        total[""].row("", "", confidence) if total else None,
    )


def _way(site: Site) -> Literal["forward", "backward"] | None:
    if site.phase in _FORWARD:
        return "forward"
    return "backward" if site.phase in _BACKWARD else None


def _summed(counted: Sequence[Seen], key_of: Callable[[Site], _Key | None]) -> dict[_Key, _Sum]:
    """By key. Steps have a few layouts among them, so that a layout is taken apart once."""
    found: dict[_Key, _Sum] = {}
    apart: dict[int, dict[_Key, int]] = {}
    for seen in counted:
        layout, number = seen.step.layout, seen.step.step
        if layout not in apart:
            groups: dict[_Key, list[Site]] = {}
            for site in seen.sites:
                key = key_of(site) if is_trial(site) else None
                if key is not None:
                    groups.setdefault(key, []).append(site)
            for key, sites in groups.items():
                found.setdefault(key, _Sum()).has(sites)
            apart[layout] = {key: sum(site.elements for site in sites) for key, sites in groups.items()}
        for key, elements in apart[layout].items():
            found[key].steps[number] = [0, elements]
        for site, one in seen.differing.items():
            key = key_of(site) if is_trial(site) else None
            if key is not None and key in found and number in found[key].steps:
                found[key].differed(number, one)
    return found


def _shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    """As text, not too long."""
    some = ["×".join(str(size) for size in shape) or "scalar" for shape in shapes]
    more = f" and {len(some) - _SHAPES} more" if len(some) > _SHAPES else ""
    return ", ".join(some[:_SHAPES]) + more


def _sum(numbers: Iterable[float]) -> float:
    """Infinite where one is, or where it is too large."""
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


def _noise(one: Difference) -> float:
    """‖ŷ - y‖ / ‖y‖ of one tensor."""
    if one.noise == 0:
        return 0.0
    if one.signal == 0 or math.isinf(one.noise):
        return math.inf
    return math.sqrt(one.noise / one.signal)


# Step by step --------------------------------------------------------------------------------------------------------


def series(steps: Steps) -> tuple[Point, ...]:
    """All steps that the suspect has done, those that do not count included."""
    made, sizes = [], dict[int, int]()
    for number in sorted(steps.seen):
        one, leader = steps.seen[number], steps.leader.get(number)
        step, differing = one.step, {site: found for site, found in one.differing.items() if site.phase != "batch"}
        if step.layout not in sizes:
            sizes[step.layout] = sum(site.elements for site in one.sites if site.phase != "batch")
        made.append(
            Point(
                step=number,
                mismatches=sum(found.mismatches for found in differing.values()),
                elements=sizes[step.layout],
                sites=len(differing),
                loss=step.loss,
                reference_loss=None if leader is None else leader.loss,
                noise=step.gradient_noise,
                drift=step.drift,
                weights=step.weights,
                temperature=step.temperature,
                clock=step.clock,
                seconds=step.seconds,
                void=steps.reading[number] != "counts",
            )
        )
    return tuple(made)


def control_series(account: Account | None, steps: Steps) -> tuple[Point, ...]:
    """The way of the healthy one with another seed, of which nothing is compared but where it goes."""
    if account is None:
        return ()
    return tuple(
        Point(
            step=one.step,
            mismatches=0,
            elements=0,
            sites=0,
            loss=one.loss,
            reference_loss=None if one.step not in steps.leader else steps.leader[one.step].loss,
            drift=one.drift,
            weights=one.weights,
            temperature=one.temperature,
            clock=one.clock,
            seconds=one.seconds,
        )
        for one in account.steps
    )
