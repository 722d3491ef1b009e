"""The figures of the study of invented nodes: what was measured of each, beside what was planted and what was published.

Pure, and without torch: made of the results that the judge gives, so that a table can be tested without training anything.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Of a planted rate with the interval of the measured one. `none expected`: none seen, and fewer than three wrong elements, or steps in
which the fault strikes at all, were to be expected: then chance leaves out all of them one time in twenty and more."""


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often elements of one cell were wrong.

    Attributes:
        cell: direction and submodule.
        measured: of all elements compared, with its interval.
        planted: the share that was to be wrong; None: cannot be said beforehand. published: of the node of this number; None: not known.
        strikes: in how many steps something was to strike.
        bound: the highest rate that nothing seen leaves possible; None where something was seen.
        severity, severity_largest: mean and largest of |ŷ - y| / |y|.
    """

    cell: Cell
    measured: Share
    planted: float | None
    published: float | None
    strikes: float = 0.0
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
        if not self.measured.count and min(self.planted * self.measured.of, self.strikes) < 3:
            return "none expected"
        return "within" if self.measured.low <= self.planted <= self.measured.high else "outside"


@dataclass(frozen=True, slots=True)
class Pretraining:
    """What a free run did.

    Attributes:
        parted: the first step in which it was not the leader's any more; None: never.
        drift, weights: ‖ŵ - w‖ and ‖w‖ at the end; drifts: (step, drift) as measured.
        loss: mean over the last steps; gap: mean of |its loss - the leader's| over them; None where one was not finite.
        most: tensors that were wrong in one step, at most. lost: why it did not come to the end.
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
        frequencies: by cell, as in `CELLS`.
        spread: tensors that were wrong in lock-step though nothing was planted there.
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
        healthy, control, reference: of fine-tuning: the leader, the reseeded one, the other reference.
        reseeded: the reseeded one in pretraining. task: name of the answers of the fine-tuning.
        void: steps of all nodes and modes that do not count, e.g. because references differ. short: who did not come to the end, and why.
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
    void: int = 0
    short: tuple[str, ...] = ()


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
    of_task = {name: _tuned(any_tuned, name, task) for name in any_tuned.results}
    leader, *others = (one.name for one in results[nodes[0].number].tuning.references)
    control = results[nodes[0].number].tuning.control
    nothing = FineTuning(None, None)
    return Figures(
        nodes=tuple(_node(node, results[node.number], task) for node in nodes),
        steps=_only(results[nodes[0].number].lock_step).asked,
        noise_steps=_only(results[nodes[0].number].parameters).asked,
        tuning_steps=any_tuned.asked,
        healthy=of_task.get(leader, nothing),
        control=of_task.get(control.name, nothing) if control is not None else nothing,
        reference=of_task.get(others[0], nothing) if others else nothing,
        reseeded=pretraining(any_free.control, None),
        task=task,
        void=sum(_only(result).void for one in results.values() for result in _all(one)),
        short=tuple(
            f"{result.suspect.name} ({_only(result).mode}): {_only(result).ended}"
            for one in results.values()
            for result in _all(one)
            if _only(result).ended != "done"
        ),
    )


def _all(one: NodeResults) -> tuple[Result, ...]:
    return one.lock_step, one.parameters, one.free, one.tuning


def _only(result: Result) -> ModeResult:
    (mode,) = result.modes
    return mode


def _node(node: Node, results: NodeResults, task: str) -> NodeFigures:
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
        tuned=_tuned(tuning, name, task),
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
        node.strikes(cell, mode.steps),
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


def _tuned(mode: ModeResult, name: str, task: str) -> FineTuning:
    found = mode.results.get(name, {})
    return FineTuning(found.get(task), found.get("divergence"), mode.first)
