"""What a fault meets in one run, as far as the run's options and its policy tell: nodes, audits, saves, and when it is due.

Apart from the rules that promise something of it, because these ask the same questions from three sides: what a check
compares, what several nodes have in common, and by which chance a sample meets a fault. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwitness.faults.job import Shape, node_of
from bitwitness.faults.spec import MODULE_TARGETS, Fault
from bitwitness.policy import Policy

ARITHMETIC = (*MODULE_TARGETS, "grad_w", "loss")
"""Numbers on the way to the local gradient: what a replay computes again."""

INSIDE = ("replay", "arbiter", "rerun", "fingerprint")
"""Work of the guard's own: training is not touched by what goes wrong in it."""


@dataclass(frozen=True, slots=True)
class World:
    """A run.

    Attributes:
        shape: ranks, nodes, steps and saves.
        policy: how it is guarded; it knows of the saves, as in a cell.
        micros: micro-batches of a step.
        scaler: whether there is a GradScaler.
        recomputes: whether the backward runs forwards again (activation checkpointing).
        level: what audits compare.
    """

    shape: Shape
    policy: Policy
    micros: int
    scaler: bool
    recomputes: bool
    level: Literal["gradients", "loss", "off"]

    @classmethod
    def of(cls, options: Mapping[str, Any], settings: Mapping[str, Any]) -> World:
        """From a job's options and the settings of a policy."""
        shape, rest = Shape.split(options)
        policy = policy_of(shape, settings)
        level: Literal["gradients", "loss", "off"] = "gradients" if policy.audit == "auto" else policy.audit
        if rest.get("compile") and policy.audit == "auto":
            level = "off"
        return cls(
            shape=shape,
            policy=policy,
            micros=int(rest.get("accumulate", 1)),
            scaler=rest.get("precision") == "fp16",
            recomputes=bool(rest.get("checkpointing")),
            level=level,
        )

    def node(self, rank: int) -> str:
        """On which node a rank is."""
        return node_of(self.shape, rank)

    def audits(self, step: int) -> bool:
        """Whether a step is audited."""
        return self.level != "off" and (step == 0 or self.policy.audit_due(step))

    def saves(self, step: int) -> bool:
        """Whether the job saves after a step."""
        every = self.shape.checkpoint_every
        return every > 0 and (step + 1) % every == 0

    def ranks(self, fault: Fault) -> frozenset[int] | None:
        """The ranks that a fault is on; None where one is drawn."""
        where, every = fault.where, range(self.shape.ranks)
        if where.node:
            return frozenset(r for r in every if self.node(r) == where.node and where.rank in (None, "*", r))
        if where.rank == "*" or where.target == "comm.reduce":
            return frozenset(every)
        return None if where.rank is None else frozenset({where.rank})

    def on_all(self, fault: Fault) -> bool:
        """Whether a fault is on all ranks alike."""
        ranks = self.ranks(fault)
        return ranks is not None and len(ranks) == self.shape.ranks


def policy_of(shape: Shape, settings: Mapping[str, Any]) -> Policy:
    """The policy of a cell, which knows of its saves beforehand."""
    return Policy(**{"checkpoint_every": shape.checkpoint_every, **settings})


def window(fault: Fault, world: World) -> list[int]:
    """All steps in which a fault may strike."""
    when, steps = fault.when, world.shape.steps
    stays = fault.persist.kind != "once" and when.last == when.first
    last = steps - 1 if when.last is None or stays else min(when.last, steps - 1)
    return list(range(when.first, last + 1, when.every))


def due_steps(fault: Fault, world: World) -> list[int]:
    """The same, but of a fault that strikes once and surely the first alone: in later ones only if it changed no bit there."""
    found = window(fault, world)
    return found[:1] if fault.persist.kind == "once" and fault.when.p >= 1.0 else found


def makes_nonfinite(fault: Fault, kinds: Sequence[str]) -> bool:
    """Whether what it leaves is one of these: `nan`, `inf`."""
    mutate = fault.mutate
    return mutate.kind in kinds or (mutate.kind == "set" and not math.isfinite(mutate.value) and "inf" in kinds)


def shown_as_nonfinite(fault: Fault) -> tuple[str, ...]:
    """What of a fault in arithmetic is certainly not finite in the local gradient: a softmax makes an Inf finite again."""
    return ("nan", "inf") if fault.where.target == "grad_w" else ("nan",)


def none_of(chances: Iterable[float]) -> float:
    """The probability that nothing of this happens."""
    return math.prod(1.0 - chance for chance in chances)
