"""Which faults the checks of this version must catch, which they catch by chance, and which they cannot: rules, no runs.

A campaign that only counts what was caught can always be made to look well by choosing faults. So what must be caught is
said beforehand, here, from what each check compares (DESIGN section 3, README "Not caught", docs/attribution.md), and the
campaign then shows whether it was. A fault that no check covers stays in the table, with the reason in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bitwitness.faults.alike import same_damage
from bitwitness.faults.chance import chance, is_least, lands_by
from bitwitness.faults.spec import MEMORY_TARGETS, Fault
from bitwitness.faults.world import (
    ARITHMETIC,
    INSIDE,
    World,
    due_steps,
    makes_nonfinite,
    none_of,
    shown_as_nonfinite,
    window,
)

_ALIKE = "it is the same on every rank, and nothing compares a rank with anything but the others"
_BACKWARD = ("grad_out", "grad_in", "grad_w")


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
        lands: the probability that it strikes at all.
        at_least: whether `probability` is a lower bound, because how often it draws is not known here.
    """

    covered: bool
    certain: bool
    check: str
    words: str
    probability: float
    delay: int = 0
    sampled: bool = False
    lands: float = 1.0
    at_least: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return asdict(self)


def covers(faults: Sequence[Fault], options: Mapping[str, Any], policy: Mapping[str, Any] | None) -> Coverage:
    """What is promised of faults that strike in one run.

    Args:
        faults: one or several.
        options: of the job: `ranks`, `ranks_per_node`, `steps`, `rebuild`, `checkpoint_every`; `accumulate`, `precision`, `compile`,
            `checkpointing`.
        policy: settings of `Policy`; None: unguarded.
    """
    if policy is None:
        return _no("the run is not guarded")
    if not faults:
        return _no("there is no fault")
    world = World.of(options, policy)
    # What is wrong in the work after a disagreement hides none: whether there is one is for the other faults to say.
    first = [fault for fault in faults if fault.where.during not in ("arbiter", "rerun")] or list(faults)
    beginners = _beginners(first, world)
    found = _together([_one(fault, world, beginners) for fault in first])
    alike = same_damage(faults, world) if found.covered else ""
    return _no(alike) if alike else found


def _together(each: Sequence[Coverage]) -> Coverage:
    """What is promised of several: what the least covered of them is; each may be the one that is caught."""
    if len(each) == 1:
        return each[0]
    covered = all(one.covered for one in each)
    lands = 1.0 - none_of(one.lands for one in each)
    caught = 1.0 - none_of(one.probability * one.lands for one in each)
    words = [one.words for one in each if one.covered == covered]
    return Coverage(
        covered=covered,
        certain=covered and all(one.certain for one in each),
        check=" + ".join(dict.fromkeys(one.check for one in each if one.check)),
        words="; ".join(dict.fromkeys(words)),
        probability=min(1.0, caught / lands) if covered and lands else 0.0,
        delay=max(one.delay for one in each),
        sampled=any(one.sampled for one in each),
        lands=lands,
        at_least=any(one.at_least for one in each),
    )


def _no(words: str, check: str = "") -> Coverage:
    return Coverage(False, False, check, words, 0.0)


def _yes(check: str, words: str, delay: int = 0) -> Coverage:
    return Coverage(True, True, check, words, 1.0, delay)


# One fault -----------------------------------------------------------------------------------------------------------


def _one(fault: Fault, world: World, beginners: int) -> Coverage:
    if not window(fault, world):
        return _no("it is not due in any step of the job")
    found = _rule(fault, world, beginners)
    return replace(found, lands=chance(fault, world).lands)


def _rule(fault: Fault, world: World, beginners: int) -> Coverage:
    """The rule for its target and for the work that it is in; `beginners`: see `_beginners`."""
    target, during = fault.where.target, fault.where.during
    if target == "ckpt" or during == "save":
        return _saved(fault, world)
    if target == "digest" or during in INSIDE:
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
        return _input(fault, world, beginners)
    return _computed(fault, world, beginners)


def _ever(does: Callable[[int], bool], fault: Fault, world: World) -> bool:
    """Whether the work in which it strikes comes in any step in which it may."""
    return any(map(does, window(fault, world)))


def _saved(fault: Fault, world: World) -> Coverage:
    target, during = fault.where.target, fault.where.during
    if not world.shape.checkpoint_every:
        return _no("the job saves nothing")
    if not _ever(world.saves, fault, world):
        return _no("the job saves nothing after a step in which it may strike")
    if target == "ckpt" and during is None:
        return _yes("checkpoint", "the label holds the SHA-256 of every file; whoever resumes compares")
    if target == "buffer":
        return _no("a buffer may differ between ranks, so what is read back is compared only with what was written")
    return _yes(
        "checkpoint",
        "a rank on another node reads back what was written and compares fingerprints, before it is published",
    )


def _inside(fault: Fault, world: World) -> Coverage:
    """The guard's own work: training is not touched, and the promise holds only where that work comes at all."""
    during = fault.where.during
    if world.on_all(fault) and (fault.where.target == "digest" or during == "fingerprint"):
        return _no(f"a fingerprint that is wrong: {_ALIKE}. Training is not touched")
    if world.shape.ranks == 1:
        return _no("one process compares with nobody. Training is not touched")
    if during in ("arbiter", "rerun"):
        return _no("that work comes only after a disagreement, and this fault makes none. Training is not touched")
    why_not = _no_replay(fault, world) if during == "replay" else _no_fingerprint(fault, world)
    if why_not:
        return _no(f"{why_not}. Training is not touched")
    return _yes("any", "the guard's own work was wrong and training was not: what differs is the rank that did it")


def _no_replay(fault: Fault, world: World) -> str:
    """Why no replay goes wrong by it in a way that shows; empty if one does."""
    if world.level == "off":
        return "audits are off, so that nothing is replayed"
    if world.level == "loss":
        return "audits compare the loss only, which it need not change"
    return "" if _ever(world.audits, fault, world) else "nothing is replayed in a step in which it may strike"


def _no_fingerprint(fault: Fault, world: World) -> str:
    """Why no fingerprint that is compared goes wrong by it; empty if one does."""
    target = fault.where.target
    if target == "digest":
        if fault.persist.kind == "permanent" or world.level == "off":
            return ""  # that of the reduced gradient is compared in every step
        every = world.micros == 1 and all(map(world.audits, window(fault, world)))
        return "" if every else "the first fingerprint of a step is that of its batch, which only an audit compares"
    if target == "buffer" and not world.policy.replica_buffers:
        return "no fingerprint is taken of a buffer, but with Policy(replica_buffers=True)"

    def hashed(step: int) -> bool:
        return world.policy.replicas_due(step) or (target == "param" and world.audits(step))

    return "" if _ever(hashed, fault, world) else "it is not fingerprinted in a step in which it may strike"


def _communication(fault: Fault, world: World) -> Coverage:
    target = fault.where.target
    if world.shape.ranks == 1:
        return _no("one process reduces nothing")
    if target == "comm.post" and not world.on_all(fault):
        return _yes("numerics", "the fingerprint of the reduced gradient is compared across the ranks in every step")
    if makes_nonfinite(fault, ("nan", "inf")):
        if world.scaler:
            return _no("a GradScaler skips a step whose reduced gradient is not finite, and no alarm is made of that")
        return _yes("numerics", "the reduced gradient is not finite, or no longer on all ranks")
    where = "on the wire, after the guard has seen the local gradient" if target == "comm.pre" else "in the result"
    return _no(f"a finite change {where}: {_ALIKE}. It takes the check allreduce, which does not exist yet")


def _buffer(fault: Fault, world: World) -> Coverage:
    if world.policy.replica_buffers and not world.on_all(fault) and world.shape.ranks > 1:
        return _compared(fault, world, "Policy(replica_buffers=True) compares buffers as it does parameters")
    if world.shape.ranks == 1:
        return _no("one process has nobody to compare its buffers with")
    ranks = world.ranks(fault)
    if ranks is None or 0 in ranks:
        return _no("DDP hands the buffers of rank 0 to all ranks before anything compares them")
    return _no("DDP overwrites it with the buffer of rank 0 in the next forward; nothing compares it before")


def _memory(fault: Fault, world: World) -> Coverage:
    if world.shape.ranks == 1:
        return _no("no replica: it takes the check at_rest, which does not exist yet")
    if world.on_all(fault):
        check = "update" if fault.where.during == "update" else "at_rest"
        return _no(f"{_ALIKE}. It takes the check {check}, which does not exist yet")
    return _compared(fault, world, "parameters and optimizer state are compared across the replicas")


def _compared(fault: Fault, world: World, words: str) -> Coverage:
    """By *replicas* at the next comparison. What is bit for bit the same again by then has healed, and is masked."""
    due = due_steps(fault, world)
    compared = [step for step in range(world.shape.steps) if world.policy.replicas_due(step)]
    last = compared[-1] if compared else -1
    lasts = fault.persist.kind == "permanent" and fault.when.p >= 1.0
    if last < (due[0] if lasts else window(fault, world)[-1]):
        never = last < due[0]
        told = f"{words}, but {'not' if never else 'perhaps not'} again before the job ends"
        return Coverage(True, False, "replicas", told, lands_by(fault, world, last))
    gap = min(world.policy.check_every, world.policy.checkpoint_every or world.policy.check_every)
    return _yes("replicas", words, gap - 1)


def _input(fault: Fault, world: World, beginners: int) -> Coverage:
    if not world.shape.rebuild:
        return _no("without rebuild_batch the witness is sent the very batch in question")
    if world.shape.ranks == 1:
        return _no("one process has no witness")
    return _audited(fault, world, "input", "the witness makes the batch anew and compares it", beginners)


def _computed(fault: Fault, world: World, beginners: int) -> Coverage:
    """Arithmetic on the way to the local gradient."""
    if makes_nonfinite(fault, shown_as_nonfinite(fault)) and not world.scaler:
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
        return _audited(fault, world, "replay", "one process repeats its own work: what does not repeat is found", 0)
    words = "another node repeats the micro-batch and compares loss and gradients"
    return _audited(fault, world, "replay", words, beginners)


def _beginners(faults: Sequence[Fault], world: World) -> int:
    """How many ranks are hit in the very first step by arithmetic that does not go wrong each time."""
    hit: set[int | str] = set()
    for number, fault in enumerate(faults):
        in_training = fault.where.target in ARITHMETIC and fault.where.during in (None, "train")
        if in_training and fault.persist.kind != "permanent" and window(fault, world)[:1] == [0]:
            ranks = world.ranks(fault)
            hit |= {f"drawn {number}"} if ranks is None else ranks
    return len(hit)


def _audited(fault: Fault, world: World, check: str, words: str, beginners: int) -> Coverage:
    """Seen if its micro-batch is the audited one of a step that is audited."""
    if check == "replay" and window(fault, world)[0] == 0 and 2 * beginners >= world.shape.ranks > 1:
        return _no(
            "what differs on half of the ranks in the very first step is taken for a workload that does not repeat"
        )
    met = chance(fault, world).if_landed
    least = is_least(fault, world)
    # A device that is always wrong is so as a witness as well, whichever micro-batch it has of its own.
    always = fault.persist.kind == "permanent" and (fault.when.micro is None or fault.where.during is None)
    if all(map(world.audits, window(fault, world))) and (world.micros == 1 or always):
        return Coverage(True, True, check, words, 1.0, sampled=world.policy.audit_every > 1 or world.micros > 1)
    audited = f"every {world.policy.audit_every} steps"
    share = f", one of {world.micros} micro-batches of a step" if world.micros > 1 else ""
    more = ", at least as often as this says, for how often it draws is not known" if least else ""
    told = f"{words}, {audited}{share}: caught by chance{more}"
    return Coverage(True, False, check, told, met, sampled=True, at_least=least)
