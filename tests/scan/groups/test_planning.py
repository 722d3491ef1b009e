"""A search on simulated nodes: who is bad is found, and nobody else is accused, whatever the workload does."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from bitwitness.scan.groups.planning import Group, Planner, Settings
from bitwitness.scan.groups.simulated import FakeGroups

MANY = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))


def search(size: int, seed: int = 0, fake: dict[str, Any] | None = None, **settings: Any) -> Planner:
    """A search on simulated nodes, to its end."""
    return FakeGroups(seed=seed + 1, **(fake or {})).search(Planner(Settings(size, seed=seed, **settings)))


def found(planner: Planner) -> tuple[set[int], set[tuple[int, ...]]]:
    """Bad nodes and bad links."""
    groups = [(fault.pair, planner.nodes_of(fault.nodes)) for fault in planner.found]
    return {nodes[0] for pair, nodes in groups if not pair}, {tuple(nodes) for pair, nodes in groups if pair}


def drawn(size: int, count: int, seed: int, *rates: float) -> dict[int, float]:
    """So many bad nodes."""
    rng = random.Random(f"{seed}/bad")
    return {node: rng.choice(rates) for node in rng.sample(range(size), count)}


@pytest.mark.parametrize("size", [2, 3, 4, 8, 1000])
def test_healthy_nodes_pass_as_often_as_the_certainty_asks_for(size: int) -> None:
    planner = search(size)
    assert (planner.why, planner.found, planner.tests) == ("enough", [], 44)


@pytest.mark.parametrize(("count", "given"), [(1, True), (1, False), (2, True), (3, False), (5, True)])
def test_bad_nodes_of_a_thousand_are_found(count: int, given: bool) -> None:
    for seed in range(20 if MANY else 1):
        bad = drawn(1000, count, seed, 1.0)
        planner = search(1000, seed, {"bad": bad}, max_bad=count if given else None)
        assert found(planner) == (set(bad), set())
        assert planner.why == ("found" if given else "enough")


@pytest.mark.parametrize(
    ("rate", "count"), [(0.5, 2), (0.1, 1), (0.001, 1), *([(0.001, 5), (0.01, 3)] if MANY else [])]
)
def test_nodes_that_fail_now_and_then_are_found(rate: float, count: int) -> None:
    bad = drawn(1000, count, 5, rate)
    planner = search(1000, 5, {"bad": bad}, rate=rate, max_bad=count)
    assert found(planner) == (set(bad), set())


def test_rates_may_differ() -> None:
    bad = drawn(100, 3, 1, 1.0, 0.3, 0.1)
    assert found(search(100, 1, {"bad": bad})) == (set(bad), set())


@pytest.mark.parametrize("size", [2, 3, 8, 100, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_a_bad_link_accuses_neither_end(size: int, seed: int) -> None:
    ends = tuple(sorted(random.Random(f"{seed}/link").sample(range(size), 2)))
    assert found(search(size, seed, {"links": {ends: 1.0}})) == (set(), {ends})


def test_a_link_beside_a_bad_node_is_found() -> None:
    assert found(search(100, 2, {"links": {(3, 50): 1.0}, "bad": {7: 1.0}})) == ({7}, {(3, 50)})


@pytest.mark.parametrize(
    ("rate", "size"),
    [(1.0, 8), (0.5, 8), (0.1, 8), (1.0, 1000), (0.9, 1000), (0.5, 1000), *([(0.1, 1000)] if MANY else [])],
)
def test_a_workload_that_fails_by_itself_accuses_nobody(rate: float, size: int) -> None:
    for seed in range(100 if MANY else 2):
        planner = search(size, seed, {"by_itself": rate})
        assert found(planner) == (set(), set())
        assert planner.why in ("by itself", "never passes")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_where_nothing_passes_nobody_can_be_told_from_it(size: int) -> None:
    planner = search(size, 1, {"bad": dict.fromkeys(range(size), 1.0)})
    assert (planner.why, planner.found) == ("never passes", [])


@pytest.mark.parametrize(("size", "count"), [(2, 1), (3, 2), (4, 1), (4, 3), (8, 1), (8, 3)])
def test_few_nodes(size: int, count: int) -> None:
    bad = drawn(size, count, 3, 1.0)
    assert found(search(size, 3, {"bad": bad})) == (set(bad), set())


@pytest.mark.parametrize("design", ["pairs", "grid"])
def test_designs_end_in_the_same_proof(design: str) -> None:
    bad = drawn(64, 2, 4, 1.0)
    assert found(search(64, 4, {"bad": bad}, design=design)) == (set(bad), set())
    assert found(search(12, 4, {"links": {(3, 9): 1.0}}, design=design)) == (set(), {(3, 9)})


def test_groups_are_never_smaller_than_asked_for() -> None:
    bad = drawn(64, 2, 6, 1.0)
    planner = search(64, 6, {"bad": bad}, min_group=2)
    assert found(planner) == (set(bad), set())
    assert min(group.bit_count() for group in planner.record.groups) == 2


def test_nodes_with_which_no_test_is_judged_are_named_and_not_accused() -> None:
    planner = search(100, 1, {"bad": {3: 1.0}, "crashing": frozenset({8, 70})})
    assert found(planner) == ({3}, set())
    assert {planner.nodes_of(1 << node)[0] for node in planner.not_judged} == {8, 70}


def test_a_command_that_never_ends_with_0_or_1_ends_the_search() -> None:
    planner = search(100, 1, {"crashing": frozenset(range(100))})
    assert (planner.why, planner.found) == ("not judged", [])


def test_a_search_gives_up_after_as_many_tests_as_are_allowed() -> None:
    planner = search(1000, 1, {"bad": {3: 1.0}}, max_tests=7)
    assert (planner.why, planner.tests, planner.found) == ("tests", 7, [])
    assert planner.suspected()


@pytest.mark.parametrize("design", ["halving", "pairs", "grid"])
def test_groups_of_a_round_have_no_node_in_common(design: str) -> None:
    planner = Planner(Settings(50, design=design))  # type: ignore[arg-type]
    fake = FakeGroups({3: 1.0, 20: 0.5, 41: 1.0})
    while groups := planner.next():
        everything = 0
        for group in groups:
            assert not everything & group.nodes
            everything |= group.nodes
            planner.told(group, *fake.test(planner.nodes_of(group.nodes), group.repeats))


def test_the_same_answers_make_the_same_plan() -> None:
    """Which is what a search that was killed relies on."""
    plans = []
    for _ in range(2):
        planner, fake = Planner(Settings(100, seed=3)), FakeGroups({3: 0.5, 20: 1.0}, seed=8)
        plan: list[list[Group]] = []
        while groups := planner.next():
            plan.append(groups)
            for group in groups:
                planner.told(group, *fake.test(planner.nodes_of(group.nodes), group.repeats))
        plans.append(plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("seed", range(30 if MANY else 4))
def test_company_is_not_accused_where_groups_must_have_two(seed: int) -> None:
    """A suspect that only ever failed beside one other node may be one end of a link to it."""
    ends = tuple(sorted(random.Random(f"{seed}/link").sample(range(16), 2)))
    nodes, links = found(search(16, seed, {"links": {ends: 1.0}}, min_group=2, max_tests=400))
    assert nodes == set()
    assert links <= {ends}


def test_a_link_gives_way_to_its_end() -> None:
    """One bad node that fails half of the time looks like a link for a while."""
    for seed in range(40 if MANY else 5):
        bad = drawn(30, 1, seed, 0.5)
        assert found(search(30, seed, {"bad": bad})) == (set(bad), set())


def test_where_the_test_is_trusted_one_failure_alone_is_enough() -> None:
    for seed in range(40 if MANY else 4):
        bad = drawn(1000, 1, seed, 1.0)
        planner = search(1000, seed, {"bad": bad}, max_bad=1, trust_test=True)
        assert found(planner) == (set(bad), set())
        assert planner.tests <= 14


def test_what_failed_with_a_found_node_is_not_searched_for_another() -> None:
    """Such a search never ended: none of its tests said anything."""
    bad = drawn(1000, 1, 91, 0.5)
    for seed in range(91, 95):
        assert found(search(1000, seed, {"bad": bad}, max_tests=1000)) == (set(bad), set())
