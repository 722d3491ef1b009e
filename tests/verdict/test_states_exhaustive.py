"""Every way in which one to three ranks can hold wrong values: replicas, reduced gradients and rebuilt inputs.

Ranks are alike up to the node that they sit on, and names of wrong values do not matter, so nothing else is left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from bitwitness.evidence import NONFINITE, Observation
from bitwitness.topology import Topology
from bitwitness.verdict import decide
from tests.verdict.simulator import HISTORY, STEP, report, ring

TOPOLOGIES = [(nodes, slots) for nodes in range(2, 9) for slots in (1, 2)]
WRONG = ("w0", "w1", "w2", NONFINITE)


def corruptions(topology: Topology) -> Iterator[dict[int, str]]:
    """One to three ranks, with every choice of equal and different wrong values."""
    for count in (1, 2, 3):
        for ranks in combinations(range(topology.world_size), count):
            for values in product(WRONG, repeat=count):
                finite = [value for value in dict.fromkeys(values) if value != NONFINITE]
                if finite == list(WRONG[: len(finite)]):  # names in order of appearance: one of each relabelling
                    yield dict(zip(ranks, values, strict=True))


def seen_by(topology: Topology, wrong: dict[int, str], check: str) -> list[Observation]:
    values = [wrong.get(rank, "right") for rank in range(topology.world_size)]
    if check == "replicas":
        return [Observation("replicas", STEP, rank, "state", value) for rank, value in enumerate(values)]
    return [Observation("numerics", STEP, rank, "reduced", value) for rank, value in enumerate(values)]


@pytest.mark.parametrize("agreed", [True, False])
def test_replicas(agreed: bool, seed: int) -> None:
    draw, tried, named = random.Random(seed), 0, 0
    history = replace(HISTORY, reductions_agreed=agreed)
    for nodes, slots in TOPOLOGIES:
        topology = ring(nodes, slots)
        for wrong in corruptions(topology):
            tried += 1
            seen = seen_by(topology, wrong, "replicas")
            found = decide(seen, topology, history, STEP)
            differ = len(wrong) < topology.world_size or len(set(wrong.values())) > 1
            assert (found.status != "clean") == differ
            healthy = topology.world_size - len(wrong)
            expected: tuple[int, ...] = ()
            if agreed and 2 * healthy > topology.world_size:
                right_nodes = {topology.node_of(rank) for rank in range(topology.world_size) if rank not in wrong}
                expected = tuple(r for r in sorted(wrong) if len(right_nodes - {topology.node_of(r)}) >= 2)
            # The same wrong value in a majority of the replicas is the unsolvable case: it is then the value.
            colluding = any(2 * list(wrong.values()).count(value) > topology.world_size for value in WRONG)
            if not colluding:
                assert found.ranks == expected, (nodes, slots, wrong)
            named += bool(found.ranks)
            if tried % 10 == 0:
                draw.shuffle(seen)
                assert decide(seen, topology, history, STEP) == found
    report(f"replicas, reductions agreed: {agreed}: {tried} combinations, {named} attributed")


def test_reduced_gradients(seed: int) -> None:
    """Only a rank that is non-finite alone, with two other nodes to tell, is ever named."""
    draw, tried, named = random.Random(seed), 0, 0
    for nodes, slots in TOPOLOGIES:
        topology = ring(nodes, slots)
        for wrong in corruptions(topology):
            tried += 1
            seen = seen_by(topology, wrong, "reduced")
            found = decide(seen, topology, HISTORY, STEP)
            values = [one.value for one in seen]
            assert (found.status == "clean") == (len(set(values)) == 1 and values[0] != NONFINITE)
            alone = values.count(NONFINITE) == 1 and len(set(values)) == 2 and nodes >= 3
            assert found.ranks == ((values.index(NONFINITE),) if alone else ()), (nodes, slots, wrong)
            if len(wrong) < topology.world_size:
                assert set(found.ranks) <= set(wrong)
            named += bool(found.ranks)
            if tried % 10 == 0:
                draw.shuffle(seen)
                assert decide(seen, topology, HISTORY, STEP) == found
    report(f"reduced gradients: {tried} combinations, {named} attributed")


def test_rebuilt_inputs() -> None:
    """Owner and two witnesses rebuild a batch: right, wrong in a way that repeats, or that changes, or only once."""
    tried = 0
    ways = {
        "right": ("r",) * 4,
        "same": ("w{}",) * 4,
        "changing": ("a{}", "b{}", "c{}", "d{}"),
        "once": ("w{}", "r", "r", "r"),
        "now and then": ("r", "w{}", "r", "r"),
    }
    for nodes, chosen in product(range(2, 9), product(ways, repeat=3)):
        topology = ring(nodes)
        ranks = [rank for rank in (0, topology.witness_of(0), topology.witness_of(0, 2)) if rank is not None]
        seen = []
        for rank, way in zip(ranks, chosen, strict=False):
            value, *repeats = (text.format(rank) for text in ways[way])
            place = Observation("input", STEP, rank, "witness" if rank else "original", value, tuple(repeats), 0, 0)
            seen.append(place)
        faulty = [rank for rank, way in zip(ranks, chosen, strict=False) if way != "right"]
        found = decide(seen, topology, HISTORY, STEP)
        tried += 1
        assert (found.status == "clean") == (not faulty)
        assert found.ranks == (tuple(faulty) if len(faulty) == 1 and nodes >= 3 else ()), (nodes, chosen)
        if found.ranks:
            assert (found.kind, found.check) == ("input", "input")
            assert found.persistence == ("transient" if chosen[ranks.index(faulty[0])] == "once" else "persistent")
    report(f"rebuilt inputs: {tried} combinations")
