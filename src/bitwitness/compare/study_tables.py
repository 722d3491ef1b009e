"""The figures of the study of invented nodes: what was measured of each, beside what was planted and what was published.

Pure, and without torch: made of the results that the judge gives, so that a table can be tested without training anything.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bitwitness.compare.nodes import GLOBS, TARGETS, Node
from bitwitness.compare.published import CELLS, NODES, Cell, PublishedNode
from bitwitness.compare.results import ModeResult, Outcome, Point, Result
from bitwitness.faults.statistics import Share

LAST = 0.1
"""Of all steps: the last ones, over which losses are averaged."""

SPIKES = 0.1
"""Of all steps: those with the most mismatches."""

Agreement = Literal["within", "outside", "none expected", "none planted", "not predicted"]
"""Of a planted rate with the interval of the measured one. `none expected`: fewer than three in all that was compared, and none seen."""


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often elements of one cell were wrong.

    Attributes:
        cell: direction and submodule.
        measured: of all elements compared, with its interval.
        planted: the share that was to be wrong; None: cannot be said beforehand. published: of the node of this number; None: not known.
        bound: the highest rate that nothing seen leaves possible; None where something was seen.
        severity, severity_largest: mean and largest of |ŷ - y| / |y|.
    """

    cell: Cell
    measured: Share
    planted: float | None
    published: float | None
    bound: float | None = None
    severity: float | None = None
    severity_largest: float | None = None

    @property
    def agreement(self) -> Agreement:
        """Whether what was planted was found."""
        if self.planted is None:
            return "not predicted"
        if self.planted == 0.0:
            return "none planted" if not self.measured.count else "outside"
        if not self.measured.count and self.planted * self.measured.of < 3:
            return "none expected"
        return "within" if self.measured.low <= self.planted <= self.measured.high else "outside"


@dataclass(frozen=True, slots=True)
class Pretraining:
    """What a free run did.

    Attributes:
        parted: the first step in which it was not the leader's any more; None: never.
        drift, weights: ‖ŵ - w‖ and ‖w‖ at the end; drifts: (step, drift) as measured.
        loss: mean over the last steps; gap: mean of |its loss - the leader's| over them; None where one was not finite.
        first_wrong_tensors: tensors that differ in the first step that does, and most: in any step.
    """

    parted: int | None
    drift: float | None
    weights: float | None
    drifts: tuple[tuple[int, float], ...]
    loss: float | None
    gap: float | None
    most: int = 0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What became of the task: accuracy 0..1, and the share of answers that are not the healthy one's; None where it gave none."""

    accuracy: float | None
    divergence: float | None
    parted: int | None = None


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """All of one invented node.

    Attributes:
        node: which. published: of the node of this number.
        outcome: of its lock-step run. first: the first step of it with a mismatch.
        frequencies: by cell, as in `CELLS`. total: over all that was compared in lock-step.
        tensors: tensors that were wrong at least once in lock-step, and outside of the submodules that were hit: `spread`.
        spiky: share of all mismatches that fell into the tenth of steps with the most; None: there were none.
        noise: largest ‖ĝ - g‖ / ‖g‖ of a step, with parameters made equal after each; lost: steps with a gradient that is not finite.
        free, tuned: see there.
    """

    node: Node
    published: PublishedNode
    outcome: Outcome
    first: int | None
    frequencies: tuple[Frequency, ...]
    spread: tuple[str, ...]
    spiky: float | None
    noise: float | None
    lost: int
    free: Pretraining
    tuned: FineTuning

    @property
    def wrong(self) -> int:
        """Mismatches in lock-step, in the four cells."""
        return sum(one.measured.count for one in self.frequencies)

    @property
    def highest(self) -> float:
        """The highest share of wrong elements of a cell."""
        return max((one.measured.share or 0.0 for one in self.frequencies), default=0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """All of a study.

    Attributes:
        nodes: by number. steps: of lock-step and free run; noise_steps: of the one with parameters made equal; tuning_steps.
        elements: of one tensor, by cell, that were compared over all steps.
        healthy, control, reference: of fine-tuning: the leader, the reseeded one, the other reference.
        drift: of the reseeded one in pretraining.
        untouched: notes of the judge on references that differ; () where they all agree.
    """

    nodes: tuple[NodeFigures, ...]
    steps: int
    noise_steps: int
    tuning_steps: int
    healthy: FineTuning
    control: FineTuning
    reference: FineTuning
    reseeded: Pretraining
    task: str = ""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class NodeResults:
    """What the judge says of one node, by part of the study."""

    lock_step: Result
    parameters: Result
    free: Result
    tuning: Result


def figures(nodes: Sequence[Node], results: Mapping[int, NodeResults], task: str) -> Figures:
    """All figures of all nodes; `task`: name of the answers of the fine-tuning."""
    any_free = _only(results[nodes[0].number].free)
    any_tuned = _only(results[nodes[0].number].tuning)
    of_task = {name: _tuned(any_tuned, name) for name in any_tuned.results}
    leader, *others = (one.name for one in results[nodes[0].number].tuning.references)
    control = results[nodes[0].number].tuning.control
    nothing = FineTuning(None, None)
    return Figures(
        nodes=tuple(_node(node, results[node.number]) for node in nodes),
        steps=_only(results[nodes[0].number].lock_step).asked,
        noise_steps=_only(results[nodes[0].number].parameters).asked,
        tuning_steps=any_tuned.asked,
        healthy=of_task.get(leader, nothing),
        control=of_task.get(control.name, nothing) if control is not None else nothing,
        reference=of_task.get(others[0], nothing) if others else nothing,
        reseeded=pretraining(any_free.control, None),
        task=task,
        notes=tuple(sorted({note for one in results.values() for note in _notes(one)})),
    )


def _notes(one: NodeResults) -> tuple[str, ...]:
    return (*one.lock_step.notes, *one.parameters.notes, *one.free.notes, *one.tuning.notes)


def _only(result: Result) -> ModeResult:
    (mode,) = result.modes
    return mode


def _node(node: Node, results: NodeResults) -> NodeFigures:
    lock_step, noise = _only(results.lock_step), _only(results.parameters)
    free, tuning = _only(results.free), _only(results.tuning)
    name = results.tuning.suspect.name
    return NodeFigures(
        node=node,
        published=NODES.get(node.number, PublishedNode()),
        outcome=results.lock_step.outcome,
        first=lock_step.first,
        frequencies=tuple(frequency(node, cell, lock_step) for cell in CELLS),
        spread=_spread(node, lock_step),
        spiky=spiky([point.mismatches for point in lock_step.series if not point.void]),
        noise=noise.noise,
        lost=noise.gradient_lost,
        free=pretraining(free.series, free.first, free.ended),
        tuned=_tuned(tuning, name),
    )


def frequency(node: Node, cell: Cell, mode: ModeResult) -> Frequency:
    """Of the rows of one cell: the submodules have one instance each in this study, so that each cell is one row."""
    way, part = cell
    rows = [row for row in mode.rows if row.phase == TARGETS[way] and fnmatch.fnmatchcase(row.group, GLOBS[part])]
    published = NODES.get(node.number, PublishedNode()).frequencies.get(cell)
    if len(rows) != 1:
        return Frequency(cell, Share(0, 0, 0.0, 1.0), None, published)
    (row,) = rows
    elements = row.mismatches.of // row.steps if row.steps else 0
    return Frequency(
        cell,
        row.mismatches,
        node.planted(cell, elements, mode.steps),
        published,
        row.bound,
        row.severity,
        row.severity_largest,
    )


def _spread(node: Node, mode: ModeResult) -> tuple[str, ...]:
    """What was wrong in lock-step though nothing was planted there."""
    hit = {(GLOBS[cell[1]], TARGETS[cell[0]]) for cell in (part.cell for part in node.parts)}
    return tuple(
        f"{row.group} {row.phase}"
        for row in mode.rows
        if row.steps_hit and not any(row.phase == phase and fnmatch.fnmatchcase(row.group, glob) for glob, phase in hit)
    )


def spiky(counts: Sequence[int]) -> float | None:
    """The share of all mismatches in the tenth of the steps that has the most; None where there are none."""
    total = sum(counts)
    most = sorted(counts, reverse=True)[: max(1, math.ceil(SPIKES * len(counts)))]
    return sum(most) / total if total else None


def pretraining(series: Sequence[Point], first: int | None, ended: str = "done") -> Pretraining:
    """Of a free run, step by step."""
    drifts = tuple((point.step, point.drift) for point in series if point.drift is not None)
    last = series[-max(1, math.ceil(LAST * len(series))) :] if series else ()
    losses = [point.loss for point in last if point.loss is not None]
    gaps = [
        abs(point.loss - point.reference_loss)
        for point in last
        if point.loss is not None and point.reference_loss is not None
    ]
    whole = bool(last) and len(gaps) == len(last)
    return Pretraining(
        parted=first,
        drift=drifts[-1][1] if drifts else None,
        weights=next((point.weights for point in reversed(series) if point.weights is not None), None),
        drifts=drifts,
        loss=math.fsum(losses) / len(losses) if whole else None,
        gap=math.fsum(gaps) / len(gaps) if whole else None,
        most=max((point.sites for point in series), default=0),
        lost="" if ended == "done" else ended,
    )


def _tuned(mode: ModeResult, name: str) -> FineTuning:
    found = mode.results.get(name, {})
    accuracy = next((value for key, value in found.items() if key.endswith("accuracy")), None)
    divergence = next((value for key, value in found.items() if key.endswith("divergence")), None)
    return FineTuning(accuracy, divergence, mode.first)
