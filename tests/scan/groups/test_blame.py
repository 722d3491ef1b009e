"""Nobody is named who is not bad by itself, whatever mixture of faults there is; and every search ends."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.scan.groups.alone import alone, cleared, may_be_named
from bitwitness.scan.groups.designs import first_rounds
from bitwitness.scan.groups.model import Fault, Record, mask, possible_rates
from bitwitness.scan.groups.planning import Planner, Settings
from bitwitness.scan.groups.searching import WORDS
from bitwitness.scan.groups.simulated import FakeGroups

MANY = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))
RATES = possible_rates(None)


class Together(FakeGroups):
    """With sets of three nodes that are bad only together."""

    triples: tuple[tuple[int, ...], ...] = ()

    def test(self, nodes: list[int], repeats: int) -> tuple[int, bool, bool]:
        """As of the others; a group with all three always fails."""
        if any(set(nodes).issuperset(three) for three in self.triples):
            return 0, True, False
        return super().test(nodes, repeats)


def search(
    size: int, seed: int, fake: dict[str, Any], triples: tuple[tuple[int, ...], ...] = (), **asked: Any
) -> Planner:
    """A search to its end, which there must be without any number of tests being given."""
    groups = Together(seed=seed + 1, **fake)
    groups.triples = triples
    return groups.search(Planner(Settings(size, seed=seed, **asked)))


def named(planner: Planner) -> tuple[set[int], set[tuple[int, ...]]]:
    """Bad nodes and bad links."""
    groups = [(fault.pair, planner.nodes_of(fault.nodes)) for fault in planner.found]
    return {nodes[0] for pair, nodes in groups if not pair}, {tuple(nodes) for pair, nodes in groups if pair}


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """Nodes, some bad, some links bad, some bad only as three."""
    size = draw(st.integers(4, 12))
    node, rate = st.integers(0, size - 1), st.sampled_from([1.0, 1.0, 0.5, 0.3])
    some = st.lists(node, min_size=2, max_size=2, unique=True).map(lambda ends: tuple(sorted(ends)))
    three = st.lists(node, min_size=3, max_size=3, unique=True).map(tuple)
    return {
        "size": size,
        "seed": draw(st.integers(0, 1000)),
        "fake": {
            "bad": draw(st.dictionaries(node, rate, max_size=2)),
            "links": draw(st.dictionaries(some, rate, max_size=3)),
        },
        "triples": tuple(draw(st.lists(three, max_size=2))),
        "min_group": draw(st.sampled_from([1, 1, 1, 2])),
        "design": draw(st.sampled_from(["halving", "halving", "pairs", "grid"])),
        "trust_test": draw(st.booleans()),
    }


@settings(max_examples=300 if MANY else 12, deadline=None, derandomize=True)
@given(mixtures())
def test_nobody_is_named_who_is_not_bad_by_itself(mixture: dict[str, Any]) -> None:
    bad, links = named(search(**mixture))
    assert bad <= set(mixture["fake"]["bad"])
    assert links <= set(mixture["fake"]["links"])


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("links", [[(4, 8), (2, 8)], [(4, 8), (2, 9)], [(4, 8), (2, 9), (0, 1)]])
def test_several_links_are_found_and_none_of_their_ends_is_named(links: list[tuple[int, int]], trusted: bool) -> None:
    for seed in range(20 if MANY else 3):
        planner = search(16, seed, {"links": dict.fromkeys(links, 1.0)}, trust_test=trusted)
        assert (named(planner), planner.why) == ((set(), set(links)), "enough")
        assert planner.tests < 120


@pytest.mark.parametrize("asked", [{}, {"design": "pairs"}, {"trust_test": True}])
def test_three_nodes_that_are_bad_only_together_end_unsettled(asked: dict[str, Any]) -> None:
    planner = search(16, 1, {}, ((1, 5, 9),), **asked)
    assert (planner.why, planner.found) == ("unsettled", [])
    assert planner.suspected()


def test_groups_too_large_to_tell_a_node_from_its_company_end_unsettled() -> None:
    planner = search(16, 1, {"bad": {3: 1.0, 9: 1.0}}, min_group=8)
    assert (planner.why, planner.found) == ("unsettled", [])
    assert planner.suspected()


def test_the_number_of_tests_that_is_given_rules() -> None:
    planner = search(16, 1, {}, ((1, 5, 9),), max_tests=3000)
    assert (planner.why, planner.tests) == ("tests", 3000)


def test_failures_that_are_left_beside_who_is_named_are_said() -> None:
    """It may not be said of a test that it accuses nobody, beside a list of the accused."""
    seen = set()
    for seed in range(40 if MANY else 6):
        planner = search(16, seed, {"bad": {3: 1.0}, "by_itself": 0.15})
        seen.add(planner.why)
        assert planner.why != "by itself" or not planner.found
        assert planner.why is not None
        assert not planner.found or "accuses nobody" not in WORDS[planner.why]
    assert seen & {"unexplained", "by itself", "unsettled"}


@pytest.mark.parametrize(("design", "size"), [("pairs", 16), ("grid", 16), ("pairs", 7)])
@pytest.mark.parametrize("parallel", [1, 4])
def test_all_groups_of_a_design_are_tried(design: Any, size: int, parallel: int) -> None:
    planner = search(size, 0, {}, design=design, parallel=parallel)
    assert {group for groups in first_rounds(design, size) for group in groups} <= set(planner.record.groups)


def record_of(*tests: tuple[tuple[int, ...], int, int]) -> Record:
    """Of eight nodes; tests: nodes, how often passed, how often failed."""
    record = Record(8)
    for nodes, passed, failed in tests:
        record.add(mask(nodes), passed, failed)
    return record


def test_only_a_failure_alone_names() -> None:
    hub = record_of(((1, 2), 0, 5), ((1, 3), 0, 5), ((1,), 4, 0), ((2, 3), 5, 0))
    assert not may_be_named(hub, Fault(mask([1])), [], RATES, 1, 0.01)
    assert cleared(hub, mask([1]), [], RATES, 1, 0.01)
    bad = record_of(((1, 2), 0, 5), ((1,), 0, 1), ((2,), 5, 0))
    assert may_be_named(bad, Fault(mask([1])), [], RATES, 1, 0.01)
    assert not may_be_named(bad, Fault(mask([1, 2])), [], RATES, 1, 0.01)  # its end has not passed


def test_a_failure_alone_among_passes_alone_does_not_name_who_always_fails_beside_others() -> None:
    record = record_of(((1, 2), 0, 200), ((1,), 200, 1), ((2,), 50, 0))
    assert not may_be_named(record, Fault(mask([1])), [], RATES, 1, 0.01)


def test_company_must_be_five_times_another_one_that_passed() -> None:
    some = record_of(*(((1, other), 0, 5) for other in range(2, 6)), ((2, 3, 4, 5, 6), 5, 0))
    assert not alone(some, mask([1]), 2).shown
    some.add(mask([1, 6]), 0, 1)
    assert alone(some, mask([1]), 2).shown
