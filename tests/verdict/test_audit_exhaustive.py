"""Every combination of one, two and three faults in an audited step, on two to eight nodes.

Left out is only what a symmetry makes equal: rotations of the ring of nodes and, for three faults, the order of the
repeats within a role (one and two faults run without the latter). Three faults on more than three nodes take minutes,
so there the suite runs the typical faults, and on three nodes a third of all, drawn by the seed; BITWITNESS_EXHAUSTIVE=1
runs all of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest

from bitwitness.evidence import Verdict
from bitwitness.topology import Topology
from bitwitness.verdict import decide
from tests.verdict.simulator import (
    HISTORY,
    STEP,
    Fault,
    all_faults,
    audit,
    faults_up_to_order,
    is_least_turn,
    placements,
    report,
    ring,
    typical_faults,
)

NODES = range(2, 9)
EVERYTHING = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))


class Tally:
    """Judges one combination after another by what must hold for all of them, and counts."""

    def __init__(self, seed: int) -> None:
        self.count: Counter[str] = Counter()
        self._random = random.Random(seed)

    def judge(self, topology: Topology, faults: Mapping[int, Sequence[Fault]]) -> Verdict | None:
        self.count["combinations"] += 1
        observations = audit(topology, faults)
        if observations is None:
            self.count["unnoticed"] += 1
            return None
        verdict = decide(observations, topology, HISTORY, STEP)
        wrongly = set(verdict.ranks) - set(faults)
        assert not wrongly, f"healthy ranks {wrongly} were named: {faults}\n{verdict}"
        assert verdict.status != "clean", faults
        assert verdict.window == (HISTORY.last_passed.get(str(verdict.check), -1), STEP)
        if len(topology.nodes) < 3:
            assert not verdict.ranks, faults
        if self.count["combinations"] % 20 == 1:
            self._random.shuffle(observations)
            assert decide(observations, topology, HISTORY, STEP) == verdict, "depends on the order of observations"
            self.count["also shuffled"] += 1
        self.count["all faulty ranks named" if set(verdict.ranks) == set(faults) else verdict.status] += 1
        return verdict

    def report(self, what: str) -> None:
        report(f"{what}: " + ", ".join(f"{count} {name}" for name, count in sorted(self.count.items())))


@pytest.mark.parametrize("slots", [1, 2])
def test_one_fault_is_named_with_its_persistence(slots: int, seed: int) -> None:
    tally = Tally(seed)
    for nodes, fault in product(NODES, all_faults()):
        topology = ring(nodes, slots)
        for rank in range(topology.world_size) if nodes < 4 else (0, topology.world_size - 1):
            verdict = tally.judge(topology, {rank: [fault]})
            assert (verdict is not None) == fault.can_be_noticed
            if verdict is not None and nodes >= 3:
                assert verdict.ranks == (rank,), (nodes, fault, verdict)
                assert verdict.persistences == (fault.persistence,), (nodes, fault, verdict)
                assert verdict.persistence == fault.persistence
                assert verdict.nodes == (topology.node_of(rank),)
                assert verdict.devices == (topology.device_of(rank),)
                assert verdict.kind == ("numeric" if fault.how == "nan" else "compute")
                assert verdict.candidates == ()
    tally.report(f"one fault, {slots} rank(s) a node")


def test_two_faults_on_two_ranks(seed: int) -> None:
    tally = Tally(seed)
    for nodes in NODES:
        for ranks in placements(nodes, 2):
            for faults in product(all_faults(), repeat=2):
                if any(fault.can_be_noticed for fault in faults) and is_least_turn(ranks, faults, nodes):
                    tally.judge(ring(nodes), {rank: [fault] for rank, fault in zip(ranks, faults, strict=True)})
    tally.report("two faults on two ranks")


def test_two_faults_on_one_rank(seed: int) -> None:
    tally = Tally(seed)
    for nodes in NODES:
        for faults in combinations(all_faults(), 2):
            if any(fault.can_be_noticed for fault in faults):
                verdict = tally.judge(ring(nodes), {0: faults})
                assert verdict is None or nodes < 3 or verdict.ranks == (0,), (nodes, faults)
    tally.report("two faults on one rank")


def test_two_faults_where_nodes_have_two_ranks(seed: int) -> None:
    """The first fault on rank 0, the second on any other rank: both slots and all nodes are alike."""
    tally = Tally(seed)
    kinds = all_faults() if EVERYTHING else faults_up_to_order()
    for nodes in (2, 3, 4, 5):
        topology = ring(nodes, 2)
        for other, faults in product(range(1, topology.world_size), product(kinds, repeat=2)):
            if any(fault.can_be_noticed for fault in faults):
                tally.judge(topology, {0: [faults[0]], other: [faults[1]]})
    tally.report("two faults, two ranks a node")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", NODES if EVERYTHING else range(2, 6))
def test_three_faults(nodes: int, seed: int) -> None:
    """On three ranks, and on two of which one has two."""
    tally = Tally(seed)
    kinds = faults_up_to_order() if EVERYTHING or nodes <= 3 else typical_faults()
    drawn = random.Random(seed)
    for faults in product(kinds, repeat=3):
        if nodes == 3 and not EVERYTHING and drawn.randrange(3):
            continue
        if not any(fault.can_be_noticed for fault in faults):
            continue
        for ranks in placements(nodes, 3):
            if is_least_turn(ranks, faults, nodes):
                tally.judge(ring(nodes), {rank: [fault] for rank, fault in zip(ranks, faults, strict=True)})
    for (one, two), three in product(combinations(typical_faults(), 2), kinds):
        if any(fault.can_be_noticed for fault in (one, two, three)):
            for other in range(1, nodes):
                tally.judge(ring(nodes), {0: [one, two], other: [three]})
    tally.report(f"three faults on {nodes} nodes")
