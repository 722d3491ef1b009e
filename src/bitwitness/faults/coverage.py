"""Which faults the checks of this version must catch, which they catch by chance, and which they cannot: rules, no runs.

A campaign that only counts what was caught can always be made to look well by choosing faults. So what must be caught is
said beforehand, here, from what each check compares (DESIGN section 3, README "Not caught", docs/attribution.md), and the
campaign then shows whether it was. A fault that no check covers stays in the table, with the reason in words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwitness.faults.job import Shape
from bitwitness.faults.spec import MEMORY_TARGETS, Fault
from bitwitness.policy import Policy

_ALIKE = "it is the same on every rank, and nothing compares a rank with anything but the others"
_FORWARD = ("fwd_in", "fwd_w", "fwd_out", "loss")
_BACKWARD = ("grad_out", "grad_in", "grad_w")
_INSIDE = ("replay", "arbiter", "rerun", "fingerprint")
"""Work of the guard's own: training is not touched by what goes wrong in it."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is promised of a fault.

    Attributes:
        covered: whether some check compares what it damages.
        certain: whether that comparison comes before a checkpoint can hold the damage, whenever it lands unmasked.
        check: the check or checks that must see it; empty where none does.
        words: why, or why not.
        probability: that it is caught, if it lands unmasked: 1 if certain, 0 if not covered.
        delay: how many steps a certain catch may come after the damage.
        sampled: whether its check looks at a share of the steps or micro-batches only, be it at this one or not.
    """

    covered: bool
    certain: bool
    check: str
    words: str
    probability: float
    delay: int = 0
    sampled: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "covered": self.covered,
            "certain": self.certain,
            "check": self.check,
            "words": self.words,
            "probability": self.probability,
            "delay": self.delay,
            "sampled": self.sampled,
        }


def covers(faults: Sequence[Fault], options: Mapping[str, Any], policy: Mapping[str, Any] | None) -> Coverage:
    """What is promised of faults that strike in one run.

    Args:
        faults: one or several.
        options: of the job: `ranks`, `ranks_per_node`, `steps`, `rebuild`, `checkpoint_every`; `accumulate`, `precision`, `compile`.
        policy: settings of `Policy`; None: unguarded.
    """
    if policy is None:
        return _no("the run is not guarded")
    if not faults:
        return _no("there is no fault")
    world = _World.of(options, policy)
    alike = _same_everywhere(faults, world)
    if alike:
        return _no(alike)
    each = [_one(fault, world) for fault in faults]
    if len(each) == 1:
        return each[0]
    covered = all(one.covered for one in each)
    words = [one.words for one in each if one.covered == covered]
    chance = 1.0 - math.prod(1.0 - one.probability for one in each)
    return Coverage(
        covered=covered,
        certain=covered and all(one.certain for one in each),
        check=" + ".join(dict.fromkeys(one.check for one in each if one.check)),
        words="; ".join(dict.fromkeys(words)),
        probability=chance,
        delay=max(one.delay for one in each),
        sampled=any(one.sampled for one in each),
    )


@dataclass(frozen=True, slots=True)
class _World:
    """What a fault meets. `level`: what audits compare, as far as options and policy tell."""

    shape: Shape
    policy: Policy
    micros: int
    scaler: bool
    level: Literal["gradients", "loss", "off"]

    @classmethod
    def of(cls, options: Mapping[str, Any], settings: Mapping[str, Any]) -> _World:
        shape, rest = Shape.split(options)
        # As a cell does: its saves are known beforehand.
        policy = Policy(**{"checkpoint_every": shape.checkpoint_every, **settings})
        level: Literal["gradients", "loss", "off"] = "gradients" if policy.audit == "auto" else policy.audit
        if rest.get("compile") and policy.audit == "auto":
            level = "off"
        return cls(shape, policy, int(rest.get("accumulate", 1)), rest.get("precision") == "fp16", level)

    @property
    def nodes(self) -> int:
        return math.ceil(self.shape.ranks / self.shape.ranks_per_node)

    def node(self, rank: int) -> int:
        return rank // self.shape.ranks_per_node

    def audits(self, step: int) -> bool:
        return self.level != "off" and (step == 0 or self.policy.audit_due(step))


def _no(words: str, check: str = "") -> Coverage:
    return Coverage(False, False, check, words, 0.0)


def _yes(check: str, words: str, delay: int = 0) -> Coverage:
    return Coverage(True, True, check, words, 1.0, delay)


# One fault -----------------------------------------------------------------------------------------------------------


def _one(fault: Fault, world: _World) -> Coverage:
    target, during = fault.where.target, fault.where.during
    if not _due(fault, world):
        return _no("it is not due in any step of the job")
    if target == "ckpt" or during == "save":
        return _saved(fault, world)
    if target == "digest" or during in _INSIDE:
        return _inside(fault, world)
    if target in ("comm.pre", "comm.reduce", "comm.post"):
        return _communication(fault, world)
    if target == "rng":
        return _no("the random state travels to the witness, which repeats what was drawn from it")
    if target == "buffer":
        return _buffer(fault, world)
    if target in MEMORY_TARGETS or during == "update":
        return _memory(fault, world)
    if target == "input":
        return _input(fault, world)
    return _computed(fault, world)


def _saved(fault: Fault, world: _World) -> Coverage:
    if not world.shape.checkpoint_every:
        return _no("the job saves nothing")
    if fault.where.target == "ckpt" and fault.where.during is None:
        return _yes("checkpoint", "the label holds the SHA-256 of every file; whoever resumes compares")
    return _yes(
        "checkpoint",
        "a rank on another node reads back what was written and compares fingerprints, before it is published",
    )


def _inside(fault: Fault, world: _World) -> Coverage:
    if fault.where.rank == "*" and (fault.where.target == "digest" or fault.where.during == "fingerprint"):
        return _no(f"a fingerprint that is wrong: {_ALIKE}. Training is not touched")
    if world.shape.ranks == 1:
        return _no("one process compares with nobody. Training is not touched")
    return _yes("any", "the guard's own work was wrong and training was not: what differs is the rank that did it")


def _communication(fault: Fault, world: _World) -> Coverage:
    target = fault.where.target
    if world.shape.ranks == 1:
        return _no("one process reduces nothing")
    if target == "comm.post" and fault.where.rank != "*":
        return _yes("numerics", "the fingerprint of the reduced gradient is compared across the ranks in every step")
    if _makes_nonfinite(fault, ("nan", "inf")):
        if world.scaler:
            return _no("a GradScaler skips a step whose reduced gradient is not finite, and no alarm is made of that")
        return _yes("numerics", "the reduced gradient is not finite, or no longer on all ranks")
    where = "on the wire, after the guard has seen the local gradient" if target == "comm.pre" else "in the result"
    return _no(f"a finite change {where}: {_ALIKE}. It takes the check allreduce, which does not exist yet")


def _buffer(fault: Fault, world: _World) -> Coverage:
    if world.policy.replica_buffers and fault.where.rank != "*" and world.shape.ranks > 1:
        return _compared(fault, world, "Policy(replica_buffers=True) compares buffers as it does parameters")
    if world.shape.ranks == 1:
        return _no("one process has nobody to compare its buffers with")
    if fault.where.rank == 0 or fault.where.rank is None or fault.where.rank == "*":
        return _no("DDP hands the buffers of rank 0 to all ranks before anything compares them")
    return _no("DDP overwrites it with the buffer of rank 0 in the next forward; nothing compares it before")


def _memory(fault: Fault, world: _World) -> Coverage:
    if world.shape.ranks == 1:
        return _no("no replica: it takes the check at_rest, which does not exist yet")
    if fault.where.rank == "*":
        check = "update" if fault.where.during == "update" else "at_rest"
        return _no(f"{_ALIKE}. It takes the check {check}, which does not exist yet")
    return _compared(fault, world, "parameters and optimizer state are compared across the replicas")


def _compared(fault: Fault, world: _World, words: str) -> Coverage:
    """By *replicas*: what has parted stays parted, so that only the next comparison matters."""
    due = _due(fault, world)
    following = [step for step in range(due[0], world.shape.steps) if world.policy.replicas_due(step)]
    if not following:
        return Coverage(True, False, "replicas", f"{words}, but not again before the job ends", 0.0)
    gap = min(world.policy.check_every, world.policy.checkpoint_every or world.policy.check_every)
    return _yes("replicas", words, gap - 1)


def _input(fault: Fault, world: _World) -> Coverage:
    if not world.shape.rebuild:
        return _no("without rebuild_batch the witness is sent the very batch in question")
    if world.shape.ranks == 1:
        return _no("one process has no witness")
    return _audited(fault, world, "input", "the witness makes the batch anew and compares it")


def _computed(fault: Fault, world: _World) -> Coverage:
    """Arithmetic on the way to the local gradient."""
    kinds: tuple[str, ...] = ("nan", "inf") if fault.where.target == "grad_w" else ("nan",)
    if _makes_nonfinite(fault, kinds) and not world.scaler:
        return _yes("numerics", "local gradients are looked at for NaN and Inf in every step")
    if world.level == "off":
        return _no(
            "audits are off: torch.compile's code is not replayed, or the policy says so; only non-finite numbers show"
        )
    if world.level == "loss":
        if fault.where.target in _BACKWARD:
            return _no("audits compare the loss only, and this changes nothing but gradients")
        return _no(
            "audits compare the loss only: seen where the loss changes, which not every wrong forward does", "replay"
        )
    if world.shape.ranks == 1:
        if fault.persist.kind == "permanent":
            return _no("one process can only repeat its own work, and this repeats as well")
        return _audited(fault, world, "replay", "one process repeats its own work: what does not repeat is found")
    return _audited(fault, world, "replay", "another node repeats the micro-batch and compares loss and gradients")


def _audited(fault: Fault, world: _World, check: str, words: str) -> Coverage:
    """Seen if its micro-batch is the audited one of a step that is audited."""
    due = _due(fault, world)
    hit = world.shape.ranks if fault.where.rank == "*" else 1
    if check == "replay" and due[0] == 0 and fault.persist.kind != "permanent" and 2 * hit >= world.shape.ranks > 1:
        return _no(
            "what differs on half of the ranks in the very first step is taken for a workload that does not repeat"
        )
    whole_step = fault.persist.kind == "permanent" and fault.when.micro is None
    if all(map(world.audits, due)) and (world.micros == 1 or whole_step):
        return Coverage(True, True, check, words, 1.0, sampled=world.policy.audit_every > 1 or world.micros > 1)
    chance = _chance(fault, world, due, whole_step)
    audited = f"every {world.policy.audit_every} steps"
    share = f", one of {world.micros} micro-batches of a step" if world.micros > 1 else ""
    return Coverage(True, False, check, f"{words}, {audited}{share}: caught by chance", chance, sampled=True)


def _chance(fault: Fault, world: _World, due: Sequence[int], whole_step: bool) -> float:
    """That an audit meets it: the sum over the steps it may strike in, for one that strikes once; else one minus no meeting.

    An intermittent fault is met as owner and as witness, hence 1 - (1 - p)^2 an audit (reference/faults.md section 6).
    """
    in_step = 1.0 if whole_step else 1.0 / world.micros
    p = fault.when.p
    if fault.persist.kind == "once":
        waiting, met = 1.0, 0.0
        for step in due:
            met += waiting * p * (in_step if world.audits(step) else 0.0)
            waiting *= 1.0 - p
        return met
    strikes = fault.persist.p if fault.persist.kind == "intermittent" else 1.0
    if fault.where.during is None:
        strikes = 1.0 - (1.0 - strikes) ** 2
    return 1.0 - math.prod(1.0 - p * strikes * in_step for step in due if world.audits(step))


# What faults have in common ------------------------------------------------------------------------------------------


def _due(fault: Fault, world: _World) -> list[int]:
    """The steps in which it may strike; of one that strikes once and surely, the first."""
    when, steps = fault.when, world.shape.steps
    stays = fault.persist.kind == "permanent" and when.last == when.first
    last = steps - 1 if when.last is None or stays else min(when.last, steps - 1)
    due = list(range(when.first, last + 1, when.every))
    return due[:1] if fault.persist.kind == "once" and when.p >= 1.0 else due


def _makes_nonfinite(fault: Fault, kinds: Sequence[str]) -> bool:
    mutate = fault.mutate
    return mutate.kind in kinds or (mutate.kind == "set" and not math.isfinite(mutate.value) and "inf" in kinds)


def _same_everywhere(faults: Sequence[Fault], world: _World) -> str:
    """Why faults of which every node has the same one, all the time, are not seen; empty where some node is healthy.

    One healthy node suffices: it witnesses, and is witnessed by, somebody who is not.
    """
    nodes: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for fault in faults:
        where = fault.where
        if fault.persist.kind == "once" or where.during is not None or where.target not in (*_FORWARD, *_BACKWARD):
            continue
        if _makes_nonfinite(fault, ("nan", "inf")):
            continue  # agreement on NaN is never health
        same = (where.target, where.glob, str(fault.select), str(fault.mutate), str(fault.persist))
        if where.rank == "*":
            nodes[same] |= set(range(world.nodes))
        elif isinstance(where.rank, int):
            nodes[same].add(world.node(where.rank))
    if world.shape.ranks > 1 and any(len(found) == world.nodes for found in nodes.values()):
        return "every node has the same fault all the time, and equal wrong bits agree"
    return ""
