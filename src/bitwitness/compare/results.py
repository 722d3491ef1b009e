"""What a comparison concludes, as data: made by `judging`, shown by the report, the command line and the study. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bitwitness.compare.records import Mode, Participant, Phase
from bitwitness.faults.statistics import Share

Outcome = Literal["nothing seen", "differs", "not characterised"]
"""Of the suspect: equal in all that was compared, with a bound; wrong, with figures; or nothing can be said, e.g. because healthy
references differ among themselves."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of result over all steps: a module and phase, or a group of them.

    Attributes:
        group: name of the module ("" outside), or of a group of modules.
        phase: what of it; "" for all of the forward or backward together (`forward`, `backward` in `group` rows say which).
        dtype, shapes: of its tensors, as text.
        steps, steps_hit: in how many it was compared, and differed.
        mismatches: elements that differ, of how many, with the interval that allows for mismatches that come together.
        severity, severity_largest: mean and maximum of |ŷ - y| / |y| over mismatches where it is defined; None where there are none.
        zeros, zero_largest, nonfinite, ulp_largest: as in `records.Difference`.
        noise: largest ‖ŷ - y‖ / ‖y‖ of one tensor in one step; None where nothing was wrong.
        bound: the highest rate of an element that nothing seen leaves possible; None where something was seen.
        step_bound: likewise of a step.
    """

    group: str
    phase: Phase | Literal["", "forward", "backward"]
    dtype: str
    shapes: str
    steps: int
    steps_hit: int
    mismatches: Share
    severity: float | None = None
    severity_largest: float | None = None
    zeros: int = 0
    zero_largest: float = 0.0
    nonfinite: int = 0
    ulp_largest: int = 0
    noise: float | None = None
    bound: float | None = None
    step_bound: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One step in a series.

    Attributes:
        step: which. mismatches, elements: differing, of how many compared. sites: how many tensors differ.
        loss, reference_loss: the suspect's and the leader's. noise: of the gradient. drift, weights: ‖ŵ - w‖ and ‖w‖.
        temperature, clock, seconds: of the suspect.
        void: the step does not count (see `judging_steps`), nor do its mismatches.
    """

    step: int
    mismatches: int
    elements: int
    sites: int
    loss: float | None = None
    reference_loss: float | None = None
    noise: float | None = None
    drift: float | None = None
    weights: float | None = None
    temperature: float | None = None
    clock: float | None = None
    seconds: float = 0.0
    void: bool = False


@dataclass(frozen=True, slots=True)
class Lag:
    """How often two wrong elements of one tensor lie so far apart.

    Attributes:
        lag: elements in logical order. pairs: seen. expected: if wrong elements were scattered at random.
        found: pairs are more than chance allows (after correction for the number of lags).
    """

    lag: int
    pairs: int
    expected: float
    found: bool


@dataclass(frozen=True, slots=True)
class Period:
    """Wrong elements that repeat along an axis of their matrix.

    Attributes:
        axis: `row` or `column`: which coordinate repeats. period: in elements. phases: residues that are hit, ascending.
        share: of wrong elements in these residues. expected: share at random.
    """

    axis: Literal["row", "column"]
    period: int
    phases: tuple[int, ...]
    share: float
    expected: float


@dataclass(frozen=True, slots=True)
class Patterns:
    """What wrong elements have in common. Of one dtype each, since a bit has no meaning across dtypes.

    Attributes:
        dtype: whose bits. records: elements looked at. truncated: there were more than were kept.
        masks: (expected XOR observed, count), the commonest first, at most 50. mask_kinds: how many different ones there were.
        bits: of each bit from 0: (flips 0 to 1, flips 1 to 0).
        lags: for 2 to 32 and what else was asked. tiles: (rows, columns, count) of blocks of neighbours. periods: found.
        classes: by `records.WordClass`. ranges: (lower end, elements seen, mismatches) by magnitude of the right value.
        findings: what is remarkable, in sentences: a mask in more than 5 % of records (SOSP'23), one-directional flips, strides, periods.
    """

    dtype: str
    records: int
    truncated: bool
    masks: tuple[tuple[int, int], ...] = ()
    mask_kinds: int = 0
    bits: tuple[tuple[int, int], ...] = ()
    lags: tuple[Lag, ...] = ()
    tiles: tuple[tuple[int, int, int], ...] = ()
    periods: tuple[Period, ...] = ()
    classes: Mapping[str, int] = field(default_factory=dict)
    ranges: tuple[tuple[float, int, int], ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What one mode showed of one suspect.

    Attributes:
        mode: which. steps: that the suspect has done and that were judged; asked: how many were asked for; void: left out: references
            differed, or none confirmed the leader, or the batch was another.
        first: the first step with a mismatch; None: none.
        rows: by module and phase. groups: by module over all of forward or backward. total: everything that was computed.
        noise, noise_step: the largest ‖ĝ - g‖ / ‖g‖ and where; gradient_lost: steps in which the gradient was not finite.
        series: by step. control: by step, of the reseeded healthy one (`free` only).
        patterns: by dtype; of `lock-step` only, where errors do not spread.
        correlation: of mismatches a step with temperature and with clock, Spearman's; by name, None where it cannot be said.
        results: by participant's name, what the task gave: accuracy and the like (numbers), and `divergence` of the answers from the
            leader's (0..1).
        ended: `done`, or why the suspect did not come to the end.
    """

    mode: Mode
    steps: int
    asked: int
    void: int
    first: int | None
    rows: tuple[Row, ...]
    groups: tuple[Row, ...]
    total: Row | None
    noise: float | None = None
    noise_step: int | None = None
    gradient_lost: int = 0
    series: tuple[Point, ...] = ()
    control: tuple[Point, ...] = ()
    patterns: tuple[Patterns, ...] = ()
    correlation: Mapping[str, float | None] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    ended: str = "done"


@dataclass(frozen=True, slots=True)
class Result:
    """All of one suspect.

    Attributes:
        suspect: who. references: the leader first. control: or None.
        outcome: see `Outcome`. sentence: why, for people; notes: what else they must know (references that differ, modes cut short).
        modes: in order of `MODES`, those that were run.
        asked: settings as in compare.json. confidence: of all intervals and bounds.
    """

    suspect: Participant
    references: tuple[Participant, ...]
    control: Participant | None
    outcome: Outcome
    sentence: str
    modes: tuple[ModeResult, ...]
    asked: Mapping[str, Any]
    confidence: float = 0.95
    notes: tuple[str, ...] = ()
