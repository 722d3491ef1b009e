"""Results of invented nodes without any training: what the judge would have said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from bitwitness.compare.nodes import GLOBS, INVENTED, TARGETS, Node
from bitwitness.compare.published import CELLS, Cell
from bitwitness.compare.records import Mode, Participant, Role
from bitwitness.compare.results import ModeResult, Point, Result, Row
from bitwitness.compare.study_tables import Figures, NodeResults, figures
from bitwitness.faults.statistics import wilson
from bitwitness.runfiles.answers import Device

STEPS, ELEMENTS = 600, 8192
NODES = {one.number: one for one in INVENTED}


def who(name: str, role: Role = "reference") -> Participant:
    return Participant(name, role, Device(0, name, "cpu", {}))


def mode(kind: Mode, steps: int = STEPS, **given: object) -> ModeResult:
    made = ModeResult(kind, steps, steps, 0, None, (), (), None)
    return replace(made, **given)  # type: ignore[arg-type]


def result(node: Node, only: ModeResult) -> Result:
    outcome = "differs" if only.first is not None else "nothing seen"
    references = (who("leader", "leader"), who("reference-1"))
    return Result(who(node.name, "suspect"), references, who("control", "control"), outcome, "", (only,), {})  # type: ignore[arg-type]


def row(cell: Cell, wrong: int, steps: int = STEPS, severity: float = 1e4) -> Row:
    way, part = cell
    of = ELEMENTS * steps
    return Row(
        GLOBS[part].replace("*", "0"),
        TARGETS[way],  # type: ignore[arg-type]
        "float32",
        "",
        steps,
        min(wrong, steps),
        wilson(wrong, of),
        severity if wrong else None,
        severity if wrong else None,
        bound=None if wrong else 3 / of,
    )


def free(losses: float | None, drift: float, first: int | None, steps: int = STEPS) -> ModeResult:
    """A free run that parted from the healthy one with a loss so far from its."""
    loss = None if losses is None else 2.0 + losses
    series = tuple(
        Point(step, 0, 1, 9, loss, 2.0, drift=drift if first is not None and step >= first else 0.0, weights=20.0)
        for step in range(steps)
    )
    return mode("free", steps, series=series, first=first, control=control(steps))


@cache
def control(steps: int = STEPS) -> tuple[Point, ...]:
    return tuple(Point(step, 0, 0, 0, 2.3, 2.0, drift=10.0, weights=20.0) for step in range(steps))


@cache
def as_planted(node: Node, steps: int = STEPS) -> NodeResults:
    """What a comparison of a node gives in which all is as it was planted, and the shape as it was published."""
    wrong = {cell: round((node.planted(cell, ELEMENTS, steps) or 0.0) * ELEMENTS * steps) for cell in CELLS}
    total = sum(wrong.values())
    late = min((part.start for part in node.parts), default=0)
    first = late if total and late < steps else None
    hits = [total] + [0] * (steps - 1)
    series = tuple(Point(step, count, 4 * ELEMENTS, 1) for step, count in enumerate(hits))
    destroyed = node.number == 6
    answers: Mapping[str, Mapping[str, float]] = {
        "leader": {"digits": 0.83, "divergence": 0.0},
        "reference-1": {"digits": 0.83, "divergence": 0.0},
        "control": {"digits": 0.84, "divergence": 0.08},
        node.name: {"digits": 0.0, "divergence": 1.0} if destroyed else {"digits": 0.83, "divergence": 0.05},
    }
    lock_step = mode(
        "lock-step",
        steps,
        rows=tuple(row(cell, count, steps) for cell, count in wrong.items()),
        first=first,
        series=series,
    )
    noise = (0.05 if node.number == 11 else 0.02) if total else 0.0
    return NodeResults(
        result(node, lock_step),
        result(node, mode("parameters", steps // 4, noise=noise)),
        result(node, free(0.01 if total else 0.0, 3.0 + node.number * 7 % 5 / 10 if total else 0.0, first, steps)),
        result(node, mode("free", 200, results=answers)),
    )


def study(changed: Mapping[int, NodeResults] | None = None, steps: int = STEPS) -> Figures:
    """Of all nodes, with some of them changed."""
    made = {number: as_planted(node, steps) for number, node in NODES.items()} | dict(changed or {})
    return figures(INVENTED, made, "digits")


def changed(number: int, part: str, **given: object) -> dict[int, NodeResults]:
    """One node whose result in a part has other figures."""
    before = as_planted(NODES[number])
    old: Result = getattr(before, part)
    new = replace(old, modes=(replace(old.modes[0], **given),))  # type: ignore[arg-type]
    outcome = "differs" if new.modes[0].first is not None else "nothing seen"
    return {number: replace(before, **{part: replace(new, outcome=outcome)})}  # type: ignore[arg-type]
