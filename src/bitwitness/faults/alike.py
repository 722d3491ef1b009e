"""Whether faults on several nodes leave the very same wrong bits, as far as their lines tell.

Whatever compares values between nodes believes the value that two of them hold. Two nodes with the same deterministic damage
therefore outvote a correct third, which may even be named for it (README, "Not caught"): nothing may be promised then.
Independent faults do not agree, since what they draw depends on their own lines; but a line that draws nothing (`index=5 ->
bit=24`, `all -> zero`, `largest -> sign`) does the same on every device that it stands for. What coincides by mere luck, such
as two draws in a tensor of a few elements, is not foreseen here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from bitwitness.faults.spec import MEMORY_TARGETS, Fault, Mutate
from bitwitness.faults.world import ARITHMETIC, World, makes_nonfinite, shown_as_nonfinite, window

EVERYWHERE = "every node has the same fault all the time, and equal wrong bits agree"
OUTVOTED = (
    "two nodes or more hold the very same wrong bits: what compares nodes cannot tell who is right, and a healthy one may be "
    "outvoted and named"
)

_WIDTHS = (8, 16, 32, 64)


def same_damage(faults: Sequence[Fault], world: World) -> str:
    """Why faults that several nodes have in common are not promised to be seen; empty where no two nodes have one in common.

    Args:
        faults: those of one run.
        world: that run.
    """
    if world.shape.ranks == 1:
        return ""
    for number, first in enumerate(faults):
        family = _family(first)
        if not family or (_is_nonfinite(first, family) and family != "memory" and not world.scaler):
            continue  # NaN is looked for in every step, and agreement on it is never health
        alike = [
            (other, fault)
            for other, fault in enumerate(faults)
            if other == number or (_family(fault) == family and _may_be_same(first, fault, world))
        ]
        places = {other: _places(fault, other, world) for other, fault in alike}
        if family == "arithmetic":
            places = _steady(dict(alike), places)
        ranks = frozenset[int | str]().union(*places.values())
        nodes = {world.node(rank) if isinstance(rank, int) else rank for rank in ranks}
        if len(ranks) >= world.shape.ranks:
            return EVERYWHERE
        # Where an all-reduce ended differently nobody is believed, nor are those who hold NaN.
        if len(nodes) > 1 and family != "reduced" and not _is_nonfinite(first, family):
            return OUTVOTED
    return ""


def _family(fault: Fault) -> str:
    """What compares such damage: only faults of one family can agree. Empty: nothing does between nodes, or NaN betrays it."""
    target, during = fault.where.target, fault.where.during
    if during == "save":
        return ""
    if during == "fingerprint" or (target == "digest" and during in (None, "train")):
        return "fingerprint"
    if target in MEMORY_TARGETS:
        return "memory"
    if target == "comm.post":
        return "reduced"
    # A one-shot fault is over when its work is repeated.
    repeated = fault.persist.kind != "once" and target in (*ARITHMETIC, "input", "digest")
    return "arithmetic" if repeated else ""


def _is_nonfinite(fault: Fault, family: str) -> bool:
    """Whether what is compared is certainly not finite. A fingerprint always is."""
    kinds = shown_as_nonfinite(fault) if family == "arithmetic" else ("nan", "inf")
    return family != "fingerprint" and makes_nonfinite(fault, kinds)


def _places(fault: Fault, number: int, world: World) -> frozenset[int | str]:
    """The ranks of a fault. One whose rank is drawn may be anywhere, so that it counts as somewhere else."""
    ranks = world.ranks(fault)
    return frozenset({f"drawn {number}"}) if ranks is None else frozenset(ranks)


def _steady(faults: Mapping[int, Fault], places: Mapping[int, frozenset[int | str]]) -> dict[int, frozenset[int | str]]:
    """The places where the same wrong value comes each time: in all work of a device, or at first and in its repeats."""
    works: dict[int | str, set[str | None]] = defaultdict(set)
    for number, ranks in places.items():
        for rank in ranks:
            works[rank].add(faults[number].where.during)
    steady = {rank for rank, own in works.items() if None in own or ("rerun" in own and len(own) > 1)}
    return {number: ranks & steady for number, ranks in places.items()}


# Whether two lines do the same ---------------------------------------------------------------------------------------


def _may_be_same(one: Fault, other: Fault, world: World) -> bool:
    """Whether two faults of one family may leave the same bits, as one line does on every rank that it stands for."""
    if one.where.target != other.where.target or not _may_meet(one.where.glob, other.where.glob):
        return False
    selected = _selected(one)
    if selected is None or selected != _selected(other) or not _may_mutate_alike(one.mutate, other.mutate):
        return False
    return bool(_compared_in(one, world) & _compared_in(other, world))


def _compared_in(fault: Fault, world: World) -> set[int]:
    """The steps in which its damage is compared: that of memory stays until the replicas are."""
    steps = window(fault, world)
    if _family(fault) != "memory":
        return set(steps)
    due = [step for step in range(world.shape.steps) if world.policy.replicas_due(step)]
    return {next((one for one in due if one >= step), -1) for step in steps}


def _may_meet(one: str, other: str) -> bool:
    """Whether two globs may match the same name."""
    if not one or not other or one == other:
        return True
    wild = [any(sign in glob for sign in "*?[") for glob in (one, other)]
    if all(wild):
        return True
    return fnmatchcase(one, other) if wild[1] else fnmatchcase(other, one) if wild[0] else False


def _selected(fault: Fault) -> tuple[object, ...] | None:
    """The elements that it selects without a draw; None where something is drawn."""
    select = fault.select
    if fault.where.target == "loss" and select.kind != "rate":
        return ("all",)  # it is one number
    whole = (
        select.kind == "all"
        or (select.kind == "rate" and select.rate >= 1.0)
        or (select.kind == "frac" and select.low >= 1.0)
        or (select.kind == "grid" and select.rows == 1 and select.count == select.columns)
    )
    if whole:
        return ("all",)
    if select.kind == "index":
        return ("index", select.channels_last, *sorted(select.indices))
    return ("largest",) if select.kind == "largest" else None


def _may_mutate_alike(one: Mutate, other: Mutate) -> bool:
    own, others = _mutated(one), _mutated(other)
    if own is None or others is None:
        return False
    if own == others:
        return True
    if not (isinstance(own, int) and isinstance(others, int)):
        return False
    stuck = {one.kind, other.kind} == {"stuck0", "stuck1"}
    return not stuck and abs(own - others) in (0, *_WIDTHS)  # counted from the other end, in some dtype


def _mutated(mutate: Mutate) -> int | tuple[str, float] | str | None:
    """What becomes of an element without a draw: a bit (-1: the sign), a factor, a value; None where something is drawn.

    Several words say the same: `sign`, `bit=-1` and `scale=-1`; `zero`, `set=0` and `add=-1`.
    """
    match mutate.kind:
        case "bit" | "stuck0" | "stuck1":
            return mutate.bit
        case "sign":
            return -1
        case "zero" | "nan" | "inf":
            return mutate.kind
        case "scale" | "add":
            factor = mutate.value if mutate.kind == "scale" else 1.0 + mutate.value
            return -1 if factor == -1.0 else "zero" if factor == 0.0 else ("scale", factor)
        case "set":
            value = mutate.value
            return "zero" if value == 0.0 else "nan" if value != value else ("set", value)  # noqa: PLR0124
        case _:
            return None
