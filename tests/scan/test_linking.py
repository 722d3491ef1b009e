"""Who is wrong by what ranks received from each other: tables, worlds in which exactly one thing is wrong, and missing rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.runfiles.answers import Device
from bitwitness.scan.linking import LISTED, LinksJudged, judge_transfers
from bitwitness.scan.results import LinkResult
from bitwitness.scan.tournament import EVERY_PAIR, expected, rounds
from tests.scan.linked import judge_collectives, judge_links

ITEM = "comm/p2p/uint8/4099/random"
Ways = Mapping[tuple[int, int], int]
"""Wrong transfers by (sender, receiver)."""


def devices(world: int, per_node: int = 1) -> list[Device]:
    return [Device(rank, f"n{rank // per_node}", f"d{rank}", {"model": "x"}) for rank in range(world)]


def records(
    world: int, wrong: Ways, transfers: int = 60, missing: Iterable[tuple[int, int]] = ()
) -> list[dict[str, Any]]:
    """So many transfers each way of each pair, of which so many wrong."""
    gone = set(missing)
    return [
        {
            "kind": "link",
            "rank": receiver,
            "item": ITEM,
            "peer": sender,
            "right": transfers - wrong.get((sender, receiver), 0),
            "wrong": wrong.get((sender, receiver), 0),
            "example": {"what": "1 bit(s) differ"},
        }
        for sender, receiver in permutations(range(world), 2)
        if (sender, receiver) not in gone
    ]


def judged(
    world: int, wrong: Ways, transfers: int = 60, per_node: int = 1
) -> tuple[dict[tuple[int, int], LinkResult], dict[int, str]]:
    links, failed = judge_links(devices(world, per_node), records(world, wrong, transfers))
    return {link.ranks: link for link in links}, failed


def both_ways(pair: tuple[int, int], wrong: int) -> Ways:
    return {pair: wrong, (pair[1], pair[0]): wrong}


def of_rank(rank: int, world: int, wrong: int) -> dict[tuple[int, int], int]:
    return {pair: wrong for pair in permutations(range(world), 2) if rank in pair}


# One link ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(3, 9))
@pytest.mark.parametrize("wrong", [60, 8])
def test_one_bad_link_fails_and_nothing_else_does(world: int, wrong: int) -> None:
    for pair in combinations(range(world), 2):
        links, failed = judged(world, both_ways(pair, wrong))
        assert (list(links), failed) == ([pair], {})
        link = links[pair]
        assert (link.standing, link.transfers, link.wrong) == ("fail", 120, 2 * wrong)
        assert f"n{pair[0]} (rank {pair[0]}) and n{pair[1]} (rank {pair[1]}) are candidates" in link.reason


def test_the_direction_is_said() -> None:
    links, failed = judged(5, {(3, 1): 20})
    assert failed == {}
    assert "20 of 120 transfers were wrong, n3 (rank 3) -> n1 (rank 1) (20);" in links[1, 3].reason
    assert "n1 (rank 1) -> n3" not in links[1, 3].reason


def test_two_bad_links_fail_both() -> None:
    links, failed = judged(8, {(1, 2): 30, (5, 6): 40})
    assert ({pair: link.standing for pair, link in links.items()}, failed) == ({(1, 2): "fail", (5, 6): "fail"}, {})


def test_two_bad_links_of_one_rank_that_is_right_with_all_others_do_not_name_it() -> None:
    links, failed = judged(8, {(1, 2): 30, (1, 6): 30})
    assert ({pair: link.standing for pair, link in links.items()}, failed) == ({(1, 2): "fail", (1, 6): "fail"}, {})


@pytest.mark.parametrize("world", range(2, 9))
def test_a_single_wrong_transfer_is_a_strike_and_no_more(world: int) -> None:
    links, failed = judged(world, {(1, 0): 1})
    assert ({pair: link.standing for pair, link in links.items()}, failed) == ({(0, 1): "not judged"}, {})
    assert "too few" in links[0, 1].reason


def test_two_ranks_alone_cannot_tell_a_place() -> None:
    links, failed = judged(2, {(0, 1): 60, (1, 0): 60})
    assert (links[0, 1].standing, failed) == ("not judged", {})
    assert "no third rank" in links[0, 1].reason


def test_only_who_received_all_right_from_all_has_received_all_right() -> None:
    made = [*records(4, {(2, 1): 1}), {"kind": "no-link", "rank": 0, "peer": -1, "why": "over"}]
    assert judge_transfers(devices(4), made).right == {0: 180, 3: 180}
    assert judge_transfers(devices(4), []).right == {}
    made = records(4, {}, missing=[(2, 1)])
    assert judge_transfers(devices(4), made).right == {0: 180, 3: 180}


# One rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(3, 9))
@pytest.mark.parametrize("wrong", [60, 12])
def test_one_bad_rank_fails_and_no_link_of_it_does(world: int, wrong: int) -> None:
    for rank in range(world):
        links, failed = judged(world, of_rank(rank, world, wrong))
        assert list(failed) == [rank]
        assert "its device or its network card" in failed[rank]
        assert {link.standing for link in links.values()} == {"not judged"}
        assert all(f"rank {rank} fails, which explains it" in link.reason for link in links.values())


def test_a_rank_that_only_receives_wrongly_fails_as_well() -> None:
    _, failed = judged(6, {(sender, 4): 30 for sender in range(6) if sender != 4})
    assert list(failed) == [4]


def test_two_bad_ranks_fail_both() -> None:
    _, failed = judged(8, {**of_rank(1, 8, 20), **of_rank(6, 8, 20)})
    assert list(failed) == [1, 6]


def test_a_rank_needs_peers_on_two_other_nodes() -> None:
    """Three ranks on two nodes: what the pairs have in common is the way between the nodes."""
    kinds = devices(3)
    two = [kinds[0], Device(1, "n1", "d1", {}), Device(2, "n1", "d2", {})]
    _, failed = judge_links(two, records(3, of_rank(0, 3, 60)))
    assert failed == {}


def test_its_network_card_is_told_from_its_device_by_its_own_node() -> None:
    card = {pair: 40 for pair in permutations(range(8), 2) if 2 in pair and 3 not in pair}
    _, failed = judged(8, card, per_node=2)
    assert list(failed) == [2]
    assert "its network card, or what its node sends through" in failed[2]
    _, failed = judged(8, of_rank(2, 8, 40), per_node=2)
    assert list(failed) == [2]
    assert "its device, for transfers within its node are wrong as well" in failed[2]


def test_a_node_that_is_bad_over_all_its_ranks_is_a_candidate_and_no_rank_of_it_fails() -> None:
    crossing = {(a, b): 30 for a, b in permutations(range(12), 2) if (a in (4, 5)) != (b in (4, 5))}
    found = judge_transfers(devices(12, 2), records(12, crossing))
    assert (found.failed, {link.standing for link in found.links}) == ({}, {"not judged"})
    assert all("n2 is a candidate" in link.reason for link in found.links)
    (one,) = found.unjudged
    assert one.item == "comm/node/n2"
    assert "1200 of 2520 transfers from, to and within it were wrong, spread over 2 of its ranks" in one.reason
    assert {4, 5}.isdisjoint(found.right)


# Scattered, missing, broken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("wrong", [60, 20, 1])
def test_wrong_everywhere_accuses_nobody(world: int, wrong: int) -> None:
    links, failed = judged(world, dict.fromkeys(permutations(range(world), 2), wrong))
    assert failed == {}
    assert {link.standing for link in links.values()} == {"not judged"}
    assert len(links) == world * (world - 1) // 2


def test_scattered_events_accuse_nobody() -> None:
    links, failed = judged(8, {(0, 1): 1, (2, 3): 1, (4, 1): 1, (7, 6): 1, (3, 5): 1})
    assert ({link.standing for link in links.values()}, failed, len(links)) == ({"not judged"}, {}, 5)


def test_nothing_at_all_is_not_judged() -> None:
    links, failed = judge_links(devices(3), [])
    (link,) = links
    assert (link.ranks, link.standing, failed) == ((0, 1), "not judged", {})
    assert link.reason.startswith(
        "nothing was received between 3 pairs of ranks (rank(s) 0, 1, 2), of which this is one; nobody exchanged"
    )
    assert "rank(s) 0, 1, 2:" in link.reason


def test_a_missing_row_is_not_judged_and_says_which_way() -> None:
    links, failed = judge_links(devices(4), records(4, {}, missing=[(2, 1)]))
    (link,) = links
    assert (link.ranks, link.standing, failed) == ((1, 2), "not judged", {})
    assert link.reason.startswith("nothing was received n2 (rank 2) -> n1 (rank 1)")


def test_what_did_not_answer_is_said_and_accused_of_nothing() -> None:
    silent = {"kind": "no-link", "rank": 0, "peer": 2, "why": "no answer from rank 2: timed out"}
    gone = [pair for pair in permutations(range(3), 2) if 2 in pair]
    links, failed = judge_links(devices(3), [*records(3, {}, missing=gone), silent])
    (link,) = links
    assert (link.ranks, link.standing, failed) == ((0, 2), "not judged", {})
    assert "between 2 pairs of ranks" in link.reason
    assert link.reason.endswith(
        "nobody exchanged anything with rank(s) 2: rank 0 says: no answer from rank 2: timed out"
    )


def test_a_bad_rank_is_not_named_where_the_others_have_not_been_looked_at() -> None:
    gone = [pair for pair in permutations(range(5), 2) if 2 not in pair]
    _, failed = judge_links(devices(5), records(5, of_rank(2, 5, 60), missing=gone))
    assert failed == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 99},
        {"rank": None},
        {"rank": True},
        {"peer": "0"},
        {"peer": 77},
        {"peer": 1},
        {"right": -1},
        {"right": 10**400},
        {"wrong": 1 << 60},
        {"wrong": 5.0},
        {"wrong": True},
        {"wrong": "many"},
        {"wrong": None},
        {"kind": "answer"},
    ],
)
def test_a_record_that_is_none_counts_for_nothing(changed: dict[str, Any]) -> None:
    broken = {"kind": "link", "rank": 1, "peer": 0, "item": ITEM, "right": 0, "wrong": 500, **changed}
    assert judge_links(devices(4), [*records(4, {}), broken]) == ((), {})


# Exactly one thing is wrong, at random -------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data())
def test_a_fault_of_one_link_never_accuses_a_rank_or_another_link(data: st.DataObject) -> None:
    world = data.draw(st.integers(3, 8))
    transfers = data.draw(st.integers(1, 400))
    per_node = data.draw(st.integers(1, 3))
    pair = data.draw(st.sampled_from(list(combinations(range(world), 2))))
    ways = {way: data.draw(st.integers(0, transfers)) for way in (pair, (pair[1], pair[0]))}
    # And up to two strikes anywhere else, of something rare that all have in common.
    for _ in range(data.draw(st.integers(0, 2))):
        other = data.draw(st.sampled_from([way for way in permutations(range(world), 2) if set(way) != set(pair)]))
        ways[other] = 1
    gone = data.draw(st.sets(st.sampled_from(list(permutations(range(world), 2))), max_size=4))
    links, failed = judge_links(devices(world, per_node), records(world, ways, transfers, gone))
    assert failed == {}
    assert {link.ranks for link in links if link.standing == "fail"} <= {pair}


def accused(
    world: int, probability: Callable[[int, int], float], transfers: int, draws: random.Random
) -> tuple[set[int], set[tuple[int, int]]]:
    ways = {
        (a, b): sum(draws.random() < probability(a, b) for _ in range(transfers))
        for a, b in permutations(range(world), 2)
    }
    links, failed = judged(world, ways, transfers)
    return set(failed), {pair for pair, link in links.items() if link.standing == "fail"}


def test_worlds_with_one_bad_rank_or_link_or_neither(seed: int) -> None:
    """By chance, at most one in a thousand worlds may accuse somebody innocent; 450 of them, and at most 5 are let pass."""
    draws = random.Random(seed)
    innocent = found_ranks = found_links = 0
    for _ in range(150):
        world, transfers = draws.randint(3, 8), draws.choice([10, 40])
        p = draws.choice([0.01, 0.1, 0.5, 1.0])
        guilty = draws.randrange(world)
        ranks, links = accused(world, lambda a, b, g=guilty, q=p: q * (g in (a, b)), transfers, draws)  # type: ignore[misc]
        innocent += bool(ranks - {guilty} or links)
        found_ranks += guilty in ranks
        pair = set(draws.sample(range(world), 2))
        ranks, links = accused(world, lambda a, b, g=pair, q=p: q * (g == {a, b}), transfers, draws)  # type: ignore[misc]
        innocent += bool(ranks or links - {(min(pair), max(pair))})
        found_links += bool(links)
        ranks, links = accused(world, lambda a, b, q=p: q / 5, transfers, draws)  # type: ignore[misc]
        innocent += bool(ranks or links)
    assert innocent <= 5
    assert found_ranks >= 55
    assert found_links >= 50


# Levels: a rank, a pair, the path between two nodes, a node ------------------------------------------------------------


def in_world(
    world: int, per_node: int, probability: Callable[[int, int], float], draws: random.Random, transfers: int = 14
) -> LinksJudged:
    ways = {
        (a, b): sum(draws.random() < probability(a, b) for _ in range(transfers))
        for a, b in permutations(range(world), 2)
    }
    return judge_transfers(devices(world, per_node), records(world, ways, transfers))


@pytest.mark.parametrize("rates", [[0.05] * 4, [0.2, 0.1, 0.1, 0.05], [0.3] * 4, [1.0, 1.0, 0.0, 0.0]])
@pytest.mark.parametrize("inside", [True, False])
def test_a_race_on_the_receivers_of_one_node_names_no_rank(seed: int, rates: list[float], inside: bool) -> None:
    draws = random.Random(seed)
    for _ in range(15):
        found = in_world(16, 4, lambda a, b: rates[b] if b < 4 and (inside or a > 3) else 0.0, draws)
        assert found.failed == {}
        assert "fail" not in {link.standing for link in found.links}
        assert {one.item for one in found.unjudged} <= {"comm/node/n0"}


@pytest.mark.parametrize("rate", [0.05, 0.2, 1.0])
def test_a_bad_path_between_two_nodes_is_said_to_be_one_and_no_pair_of_ranks_is(seed: int, rate: float) -> None:
    draws, found_paths = random.Random(seed), 0
    for _ in range(10):
        found = in_world(16, 4, lambda a, b: rate if {a // 4, b // 4} == {1, 2} else 0.0, draws)
        failing = [link for link in found.links if link.standing == "fail"]
        assert found.failed == {}
        assert all((link.nodes, link.devices) == (("n1", "n2"), ("", "")) for link in failing)
        found_paths += len(failing)
    assert found_paths == (10 if rate > 0.1 else found_paths)
    assert "the path between n1 and n2" in failing[0].reason
    assert "both nodes are right with n0" in failing[0].reason
    assert failing[0].transfers == 16 * 28
    assert all("the path between n1 and n2 fails, which explains it" in one.reason for one in found.links[1:])


def test_a_bad_pair_of_ranks_fails_among_right_pairs_of_its_nodes() -> None:
    links, failed = judged(16, both_ways((3, 6), 20), per_node=4)
    assert ([(link.ranks, link.devices) for link in links.values()], failed) == ([((3, 6), ("d3", "d6"))], {})
    assert links[3, 6].standing == "fail"


def test_two_bad_ranks_of_one_node_are_no_proof_against_either() -> None:
    ways = {**of_rank(0, 16, 20), **of_rank(1, 16, 20)}
    links, failed = judged(16, ways, per_node=4)
    assert ({link.standing for link in links.values()}, failed) == ({"not judged"}, {})


@pytest.mark.parametrize("world", [64, 65, 200])
def test_two_wrong_transfers_fail_nobody_however_many_were_right(world: int) -> None:
    pairs = expected({rank: f"n{rank}" for rank in range(world)})
    made = received(pairs, lambda one: False)
    broken = [{**one, "wrong": 2} if one["rank"] == 9 and one["peer"] == pairs[-1][0] else one for one in made]
    broken[0] = {**broken[0], "wrong": 2}
    links, failed = judge_links(devices(world), broken)
    assert ({link.standing for link in links}, failed) == ({"not judged"}, {})


def test_a_pass_of_1024_ranks_half_of_which_was_seen_is_one_summary() -> None:
    who = devices(1024, 8)
    looked_at = expected({device.rank: device.node for device in who})
    found = judge_transfers(who, received(looked_at[: len(looked_at) // 2], lambda one: False))
    (link,) = found.links
    assert link.standing == "not judged"
    assert "pairs of nodes and" in link.reason
    assert 0 in found.right
    assert {1022, 1023}.isdisjoint(found.right)


def test_of_10000_ranks_that_sent_nothing_there_is_one_summary() -> None:
    found = judge_transfers(devices(10_000, 8), [])
    (link,) = found.links
    assert "780625 pairs of nodes and 35000 pairs of ranks within a node" in link.reason
    assert "and 9992 more" in link.reason


def test_what_is_too_much_to_list_is_counted() -> None:
    links, failed = judged(64, dict.fromkeys(permutations(range(64), 2), 1), transfers=2)
    assert (len(links), failed) == (LISTED + 1, {})
    assert f"one of {64 * 63 // 2 - LISTED} more pairs" in [*links.values()][-1].reason


def test_of_a_rank_that_fails_some_pairs_are_always_listed() -> None:
    ways = {**dict.fromkeys(permutations(range(64), 2), 2), **of_rank(5, 64, 1)}
    ways = {pair: 20 if 5 in pair else 0 for pair in ways} | {(0, 1): 1}
    links, failed = judged(64, ways)
    assert list(failed) == [5]
    assert len([pair for pair in links if 5 in pair]) >= 3


# Collectives ---------------------------------------------------------------------------------------------------------


def call(rank: int, number: str, digest: str, ranks: int = 4) -> dict[str, Any]:
    return {
        "kind": "collective",
        "rank": rank,
        "item": "comm/broadcast/int64/1024",
        "ranks": ranks,
        "right": 0,
        "wrong": 1,
        "call": number,
        "digest": digest,
    }


def test_agreement_on_wrong_bytes_is_no_correctness() -> None:
    (one,) = judge_collectives(devices(4), [call(rank, "0/1/2", "ab") for rank in range(4)])
    assert one.item == "comm/broadcast/int64/1024"
    assert "all ranks received the same wrong bytes: agreement is not correctness" in one.reason
    links, failed = judge_links(devices(4), [*records(4, {}), *(call(rank, "0/1/2", "ab") for rank in range(4))])
    assert ({link.standing for link in links}, len(links), failed) == ({"not judged"}, 6, {})


def test_who_alone_received_otherwise_is_a_candidate() -> None:
    (one,) = judge_collectives(devices(4), [call(2, "0/1/2", "ab"), call(2, "0/3/2", "cd")])
    assert one.reason.startswith("2 call(s) gave a wrong result; of one: rank 2 (n2, d2) alone received otherwise")


def test_several_with_different_bytes_name_nobody() -> None:
    (one,) = judge_collectives(devices(4), [call(1, "0/1/2", "ab"), call(2, "0/1/2", "cd")])
    assert "2 of 4 ranks received wrong bytes, 2 different ones" in one.reason


def test_a_rank_that_fails_explains_its_collectives() -> None:
    links, failed = judge_links(devices(5), [*records(5, of_rank(2, 5, 60)), call(2, "0/1/2", "ab", 5)])
    assert list(failed) == [2]
    assert {link.ranks for link in links} == {(0, 2), (1, 2), (2, 3), (2, 4)}


# Who meets whom ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [0, 1, 2, 3, 4, 7, 8, 15, 16, EVERY_PAIR])
def test_each_meets_each_once_and_nobody_two_at_a_time(world: int) -> None:
    played = rounds({rank: f"n{rank}" for rank in range(world)})
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in played)
    pairs = [pair for one in played for pair in one]
    assert sorted(pairs) == list(combinations(range(world), 2))
    assert len(played) == (0 if world < 2 else world - 1 + world % 2)


@pytest.mark.parametrize(("world", "per_node"), [(72, 8), (130, 2), (70, 1), (66, 66), (100, 7)])
def test_in_a_large_world_each_node_meets_each_and_each_rank_those_of_its_node(world: int, per_node: int) -> None:
    nodes = {rank: f"n{rank // per_node}" for rank in range(world)}
    played = rounds(nodes)
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in played)
    pairs = {pair for one in played for pair in one}
    within = {pair for pair in combinations(range(world), 2) if nodes[pair[0]] == nodes[pair[1]]}
    assert within <= pairs
    met = {frozenset((nodes[a], nodes[b])) for a, b in pairs - within}
    assert met == {frozenset(two) for two in combinations(set(nodes.values()), 2)}
    assert expected(nodes) == sorted(pairs)


def received(pairs: Iterable[tuple[int, int]], wrong: Callable[[tuple[int, int]], bool]) -> list[dict[str, Any]]:
    return [
        {"kind": "link", "rank": b, "peer": a, "item": ITEM, "right": 20 - bad, "wrong": bad}
        for one in pairs
        for a, b in (one, one[::-1])
        for bad in [20 * wrong(one)]
    ]


def test_a_large_world_is_judged_by_the_pairs_of_its_nodes() -> None:
    who = devices(72, 8)
    looked_at = expected({device.rank: device.node for device in who})
    links, failed = judge_links(who, received(looked_at, lambda one: 13 in one))
    assert list(failed) == [13]
    assert {rank for link in links for rank in link.ranks if rank != 13} == {
        peer for one in looked_at if 13 in one for peer in one if peer != 13
    }
    bad = next(one for one in looked_at if who[one[0]].node == "n2" and who[one[1]].node == "n5")
    links, failed = judge_links(who, received(looked_at, lambda one: one == bad))
    assert ([(link.ranks, link.standing) for link in links], failed) == ([(bad, "fail")], {})


def test_in_a_large_world_without_one_rank_only_what_that_would_have_received_is_open() -> None:
    """Others then meet other ranks of the same nodes than they would have met."""
    who = devices(72, 8)
    there = {device.rank: device.node for device in who if device.rank != 13}
    found = judge_transfers(who, received(expected(there), lambda one: False))
    (link,) = found.links
    assert (13 in link.ranks, link.standing, found.failed) == (True, "not judged", {})
    assert "0 pairs of nodes and 7 pairs of ranks within a node" in link.reason
    assert set(found.right) == {rank for rank in range(72) if not 8 <= rank < 16}
