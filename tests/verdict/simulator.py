"""The audit protocol, simulated on values instead of tensors, so that every combination of faults can be tried.

Everyone is the owner of one micro-batch. Its right result is the same string on every device; a faulty run yields
another one. A rank runs, in this order: its own micro-batch, the one that it witnesses first, the one that it witnesses
second, then three repeats of each: 12 runs, and a fault is the set of runs that it corrupts, with the way in which it
does so. The second witness and the repeats exist only once an owner and its first witness differ anywhere.

The ring of nodes is symmetric: what matters is where faults lie relative to each other. So one fault is put on rank 0
and the others wherever that gives another picture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal

from bitwitness.evidence import NONFINITE, History, Observation
from bitwitness.topology import Placement, Topology

STEP = 7
RIGHT = "right"
HISTORY = History(last_passed={"replay": 3}, compared_before=frozenset({"numerics", "replay", "input", "replicas"}))

ROLES = (0, 1, 2)  # owner, first witness, second witness
REPEATS = {role: range(3 + 3 * role, 6 + 3 * role) for role in ROLES}
RUNS = range(12)

How = Literal["same", "changing", "nan"]
HOWS: tuple[How, ...] = ("same", "changing", "nan")


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """The runs of one rank that are wrong, and how: the same wrong bits, other ones in each run, or NaN."""

    runs: tuple[int, ...]
    how: How

    @property
    def can_be_noticed(self) -> bool:
        """Whether it touches a run that happens before anybody knows of a disagreement."""
        return self.runs[0] in (0, 1)

    @property
    def persistence(self) -> str:
        """What an onlooker must conclude who sees every run: a wrong repeat is more than a single transient."""
        return "persistent" if self.runs[-1] >= 3 else "transient"


@cache
def all_faults() -> tuple[Fault, ...]:
    """One run; every set of repeats in one role; every run from some run on. Each with every kind of wrong bits."""
    sets: set[tuple[int, ...]] = {(run,) for run in RUNS}
    sets |= {some for role in ROLES for size in (2, 3) for some in combinations(REPEATS[role], size)}
    sets |= {tuple(RUNS[start:]) for start in RUNS}
    return _with_hows(sets)


@cache
def faults_up_to_order() -> tuple[Fault, ...]:
    """`all_faults`, but of the sets that differ only in the order of a role's repeats just one."""
    chosen: dict[tuple[object, ...], tuple[int, ...]] = {}
    for fault in all_faults():
        per_role = tuple((role in fault.runs, len(set(REPEATS[role]) & set(fault.runs))) for role in ROLES)
        chosen.setdefault(per_role, fault.runs)
    return _with_hows(set(chosen.values()))


@cache
def typical_faults() -> tuple[Fault, ...]:
    """One of each kind of picture: for three faults on many nodes, where all of `all_faults` would take minutes."""
    return _with_hows({(0,), (1,), (11,), tuple(REPEATS[0]), tuple(RUNS), tuple(RUNS[1:])})


def _with_hows(sets: set[tuple[int, ...]]) -> tuple[Fault, ...]:
    # In a single run, bits that repeat and bits that change are the same thing.
    return tuple(Fault(runs, how) for runs in sorted(sets) for how in HOWS if len(runs) > 1 or how != "changing")


@cache
def ring(nodes: int, slots: int = 1) -> Topology:
    """Nodes that are alike; ranks in order of node."""
    ranks = range(nodes * slots)
    return Topology(tuple(Placement(r, f"n{r // slots}", f"gpu-{r}", r % slots) for r in ranks))


def placements(nodes: int, faults: int) -> Iterator[tuple[int, ...]]:
    """Ranks for some faults on a ring of single-rank nodes, one of each orbit under rotation; always with rank 0."""
    found: set[tuple[int, ...]] = set()
    for ranks in combinations(range(nodes), faults):
        turned = {tuple(sorted((rank - start) % nodes for rank in ranks)) for start in ranks}
        if not found & turned:
            found.add(ranks)
            yield ranks


def is_least_turn(ranks: tuple[int, ...], faults: tuple[Fault, ...], nodes: int) -> bool:
    """False for all but one of those assignments of faults to ranks that are rotations of each other."""
    here = dict(zip(ranks, faults, strict=True))
    for start in ranks[1:]:
        turned = sorted((rank - start) % nodes for rank in ranks)
        if tuple(turned) == ranks and tuple(here[(rank + start) % nodes] for rank in ranks) < faults:
            return False
    return True


@cache
def _observation(topology: Topology, rank: int, role: int, values: tuple[str, ...]) -> Observation | None:
    owners = (rank,) if role == 0 else topology.owners_of(rank, role)
    if not owners:
        return None
    (owner,) = owners
    place: Literal["original", "witness"] = "witness" if role else "original"
    first, *repeats = values
    return Observation("replay", STEP, rank, place, first, tuple(repeats), owner=owner, micro=0)


@cache
def _of_rank(topology: Topology, rank: int, faults: tuple[Fault, ...]) -> tuple[tuple[Observation, ...], str, str]:
    """The observations of a rank, and the results of its first two runs."""
    results = [RIGHT] * len(RUNS)
    for number, fault in enumerate(faults):
        for run in fault.runs:
            wrong = {"same": f"{rank}:{number}", "changing": f"{rank}:{number}:{run}", "nan": NONFINITE}
            results[run] = wrong[fault.how]
    roles = [
        _observation(topology, rank, role, (results[role], *(results[r] for r in REPEATS[role]))) for role in ROLES
    ]
    return tuple(seen for seen in roles if seen is not None), results[0], results[1]


def audit(topology: Topology, faults: Mapping[int, Sequence[Fault]]) -> list[Observation] | None:
    """What all ranks see of one audited step; None where no first witness differs from its owner."""
    ranks = [_of_rank(topology, rank, tuple(faults.get(rank, ()))) for rank in range(topology.world_size)]
    noticed = False
    for owner in faults:
        for one, other in ((owner, topology.witness_of(owner)), *((of, owner) for of in topology.owners_of(owner))):
            noticed |= other is not None and ranks[one][1] != ranks[other][2]
    return [seen for observations, _, _ in ranks for seen in observations] if noticed else None


def report(line: str) -> None:
    """Print how much was tried; pytest shows it with -s."""
    sys.stdout.write(f"\n{line}\n")
