"""By which chance an audit meets a fault, where audits look at a share of the steps or micro-batches only.

What a campaign measures is a share *of the faults that landed*, so what is predicted must mean the same: the probability that
an audit meets it, divided by the probability that it lands at all. A fault that strikes now and then in a short run
often does neither.

One step of the model, for a fault that does not strike once only: the fault is at work in it with probability `when.p`; it
then draws at each micro-batch, and its device, if the step is audited, draws again as the witness of another's. The
audited micro-batch is drawn, alike on all ranks. Hence 1 - (1 - p)^2 an audit (reference/faults.md section 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwitness.faults.spec import Fault
from bitwitness.faults.world import ARITHMETIC, World, due_steps, none_of


@dataclass(frozen=True, slots=True)
class Chance:
    """Two probabilities.

    Attributes:
        met: that an audit meets it.
        lands: that it changes something at all; what was met has landed.
    """

    met: float
    lands: float

    @property
    def if_landed(self) -> float:
        """That an audit meets it, if it lands."""
        return min(1.0, self.met / self.lands) if self.lands else 0.0


def chance(fault: Fault, world: World) -> Chance:
    """Of a fault in what is computed or in the batch, or (only `lands`) of any other."""
    return _over(fault, world, due_steps(fault, world))


def lands_by(fault: Fault, world: World, last: int) -> float:
    """The probability that it lands in this step or before, if it lands in any."""
    due = due_steps(fault, world)
    ever = _over(fault, world, due).lands
    return min(1.0, _over(fault, world, [step for step in due if step <= last]).lands / ever) if ever else 0.0


def _over(fault: Fault, world: World, due: list[int]) -> Chance:
    if fault.persist.kind == "once":
        return _once(fault, world, due)
    met, lands = zip(*(_step(fault, world, world.audits(step)) for step in due), strict=True) if due else ((), ())
    return Chance(1.0 - none_of(met), 1.0 - none_of(lands))


def is_least(fault: Fault, world: World) -> bool:
    """Whether it draws more often than is known here, so that what `chance` says is a lower bound.

    It draws at each name that matches (`each`), and again where activation checkpointing runs a forward anew.
    """
    if fault.persist.kind != "intermittent":
        return False
    return fault.where.each or (world.recomputes and fault.where.target.startswith("fwd_"))


def _once(fault: Fault, world: World, due: list[int]) -> Chance:
    waiting, met, p = 1.0, 0.0, fault.when.p
    for step in due:
        met += waiting * p * (1.0 / world.micros if world.audits(step) else 0.0)
        waiting *= 1.0 - p
    return Chance(met, 1.0 - waiting)


def _step(fault: Fault, world: World, audited: bool) -> tuple[float, float]:
    """Of one step: that an audit meets it, and that it lands."""
    when, each = fault.when, fault.persist.p if fault.persist.kind == "intermittent" else 1.0
    one_micro = when.micro is not None  # of training; a replay is a micro-batch of its own
    computed = fault.where.target in (*ARITHMETIC, "input")  # and not stored: that is hit once a step
    as_owner = each / world.micros if one_micro else each
    as_witness = each if audited and computed and fault.where.during is None else 0.0
    in_training = 1.0 - (1.0 - each) ** (world.micros if computed and not one_micro else 1)
    met = 1.0 - none_of((as_owner, as_witness)) if audited else 0.0
    return when.p * met, when.p * (1.0 - none_of((in_training, as_witness)))
