"""Whom the judge accuses, and whom it must not: tables of answers, and any number of worlds in which nobody is guilty."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.answers import Device, Sheet
from bitwitness.scan.items import Item
from bitwitness.scan.judging import Known, bound, judge, wrong_items
from bitwitness.scan.results import Judgement

ITEM, OTHER = "ops/matmul/float32/8x8x8", "ops/exp/float32/64"
KIND = {"model": "H100", "torch": "2.13"}
KIND_NAME = "model H100; torch 2.13"

Answers = Mapping[str, Mapping[str, int]]


def sheet(rank: int, answers: Answers, *, node: str = "", ended: str = "done", kind: Mapping[str, str] = KIND) -> Sheet:
    device = Device(rank, node or f"n{rank}", f"GPU-{rank}", kind)
    return Sheet(device, {item: dict(found) for item, found in answers.items()}, ended)


def right(calls: int = 100, items: tuple[str, ...] = (ITEM,), digest: str = "aa") -> dict[str, dict[str, int]]:
    return {item: {digest: calls} for item in items}


def standings(judged: Judgement) -> list[str]:
    return [one.standing for one in judged.devices]


def test_who_answers_as_all_others_passes_with_its_bound() -> None:
    judged = judge([sheet(rank, right(1000)) for rank in range(3)])
    assert standings(judged) == ["pass"] * 3
    assert judged.standing == "pass"
    assert judged.devices[0].bound == pytest.approx(3e-3, rel=0.01)
    assert judged.devices[0].calls_by_kind == {"ops/matmul/float32": 1000}


def test_who_is_wrong_now_and_then_fails() -> None:
    sheets = [sheet(rank, right(5000)) for rank in range(15)] + [sheet(15, {ITEM: {"aa": 4995, "x1": 3, "x2": 2}})]
    judged = judge(sheets)
    assert standings(judged) == ["pass"] * 15 + ["fail"]
    assert judged.devices[15].wrong == 5
    assert judged.failed_nodes == ("n15",)
    assert wrong_items(sheets) == {ITEM: "aa"}


def test_one_wrong_answer_accuses_nobody() -> None:
    judged = judge([*(sheet(rank, right(5000)) for rank in range(15)), sheet(15, {ITEM: {"aa": 4999, "xx": 1}})])
    assert standings(judged) == ["pass"] * 15 + ["not judged"]
    assert judged.standing == "not judged"
    assert "rare fault of software" in judged.devices[15].reason


def test_wrong_answers_that_scatter_accuse_nobody() -> None:
    answers = [{ITEM: {"aa": 999, "xx": 1}} if rank % 2 else right(1000) for rank in range(16)]
    judged = judge([sheet(rank, one) for rank, one in enumerate(answers)])
    assert "fail" not in standings(judged)
    assert [one.item for one in judged.unjudged] == [ITEM]


def test_who_is_always_wrong_fails_where_it_cannot_be_its_node() -> None:
    wrong = {ITEM: {"xx": 100}}
    three_nodes = judge([sheet(0, right()), sheet(1, right()), sheet(2, wrong)])
    assert standings(three_nodes) == ["pass", "pass", "fail"]
    beside = judge([sheet(rank, wrong if rank == 3 else right(), node="n0") for rank in range(8)])
    assert standings(beside)[3] == "fail"
    # Alone on its node, all that agree on one other: it may be how that node is set up.
    elsewhere = judge([*(sheet(rank, right(), node="n0") for rank in range(8)), sheet(8, wrong, node="n1")])
    assert standings(elsewhere) == ["pass"] * 8 + ["not judged"]


def test_a_node_that_is_set_up_otherwise_is_not_accused() -> None:
    sheets = [sheet(rank, {ITEM: {"xx" if rank < 8 else "aa": 100}}, node=f"n{rank // 8}") for rank in range(16)]
    judged = judge(sheets)
    assert set(standings(judged)) == {"not judged"}
    assert "divided" in judged.unjudged[0].reason


def test_work_that_does_not_repeat_accuses_nobody() -> None:
    chance = random.Random(1)
    sheets = [sheet(rank, {ITEM: {f"{chance.random()}": 1 for _ in range(20)}}) for rank in range(8)]
    judged = judge(sheets)
    assert set(standings(judged)) == {"not judged"}
    assert "does not repeat" in judged.unjudged[0].reason


def test_fewer_than_three_of_a_kind_are_not_judged() -> None:
    other = {"model": "A100", "torch": "2.13"}
    judged = judge([sheet(0, right()), sheet(1, right()), *(sheet(rank, right(), kind=other) for rank in (2, 3, 4))])
    assert standings(judged) == ["not judged"] * 2 + ["pass"] * 3
    assert "three" in judged.devices[0].reason
    assert standings(judge([sheet(0, right())])) == ["not judged"]


def test_devices_of_two_kinds_are_not_compared() -> None:
    other = {"model": "A100", "torch": "2.13"}
    sheets = [sheet(rank, right()) for rank in range(3)]
    sheets += [sheet(rank, right(digest="bb"), kind=other) for rank in range(3, 6)]
    assert standings(judge(sheets)) == ["pass"] * 6


def test_who_did_not_come_to_its_end_is_not_judged() -> None:
    sheets = [sheet(rank, right()) for rank in range(3)]
    assert standings(judge([*sheets, sheet(3, right(), ended="ended by signal 11 in x")]))[3] == "not judged"
    assert standings(judge([*sheets, sheet(3, right(), ended="")]))[3] == "not judged"
    assert standings(judge([*sheets, sheet(3, right(), ended="")], running=True))[3] == "pass"
    assert standings(judge([*sheets, sheet(3, {})]))[3] == "not judged"


def test_who_was_wrong_often_fails_although_it_died() -> None:
    sheets = [*(sheet(rank, right()) for rank in range(3)), sheet(3, {ITEM: {"aa": 50, "xx": 50}}, ended="signal 11")]
    assert standings(judge(sheets))[3] == "fail"


# Golden answers ------------------------------------------------------------------------------------------------------

ITEMS = tuple(f"ops/exp/float32/{size}" for size in range(8, 16))
GOLDEN = {KIND_NAME: {item: Known("aa", 3, 3000) for item in ITEMS}}


def test_golden_answers_judge_a_device_that_is_alone() -> None:
    judged = judge([sheet(0, right(items=ITEMS))], GOLDEN)
    assert standings(judged) == ["pass"]
    assert standings(judge([sheet(0, right(items=ITEMS) | {ITEMS[3]: {"xx": 100}})], GOLDEN)) == ["fail"]
    assert standings(judge([sheet(0, right(items=ITEMS) | {ITEMS[3]: {"aa": 99, "xx": 1}})], GOLDEN)) == ["not judged"]


def test_golden_answers_of_another_configuration_accuse_nobody() -> None:
    alone = judge([sheet(0, right(items=ITEMS, digest="bb"))], GOLDEN)
    assert standings(alone) == ["not judged"]
    assert "configuration" in alone.devices[0].reason
    other = {"model A100; torch 2.13": GOLDEN[KIND_NAME]}
    assert standings(judge([sheet(0, right(items=ITEMS))], other)) == ["not judged"]


def test_a_golden_answer_against_all_devices_accuses_nobody() -> None:
    judged = judge([sheet(rank, right(items=ITEMS, digest="bb")) for rank in range(4)], GOLDEN)
    assert set(standings(judged)) == {"not judged"}
    assert "golden" in judged.unjudged[0].reason


# In general ----------------------------------------------------------------------------------------------------------


@settings(derandomize=True)  # about one run in a thousand would accuse somebody: that is what CHANCE allows
@given(
    devices=st.integers(1, 12),
    per_node=st.integers(1, 4),
    rate=st.sampled_from([0.0, 1e-3, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_software_that_errs_alike_on_all_accuses_nobody(devices: int, per_node: int, rate: float, seed: int) -> None:
    """Each answer is wrong with one probability, whoever gives it: the judge's own bound on the chance of an accusation holds."""
    chance = random.Random(seed)
    accused = 0
    for _ in range(5):
        sheets = []
        for rank in range(devices):
            wrong = sum(chance.random() < rate for _ in range(50))
            answers = {ITEM: {digest: count for digest, count in (("aa", 50 - wrong), (f"x{rank}", wrong)) if count}}
            sheets.append(sheet(rank, answers, node=f"n{rank // per_node}"))
        accused += "fail" in standings(judge(sheets))
    assert accused == 0


@given(
    devices=st.integers(3, 12),
    bad=st.integers(0, 11),
    wrong=st.integers(12, 400),
    each=st.booleans(),
    pad=st.integers(0, 50),
)
def test_only_the_one_that_is_bad_is_accused(devices: int, bad: int, wrong: int, each: bool, pad: int) -> None:
    bad %= devices
    sheets = [sheet(rank, right(400, (ITEM, OTHER))) for rank in range(devices)]
    wrongs = {f"x{number}": 1 for number in range(wrong)} if each else {"xx": wrong}
    sheets[bad] = sheet(bad, {OTHER: {"aa": 400}, ITEM: wrongs | ({"aa": pad} if pad else {})})
    judged = judge(sheets)
    assert [rank for rank, standing in enumerate(standings(judged)) if standing == "fail"] == [bad]
    assert standings(judged).count("pass") == devices - 1


def test_the_order_of_ranks_and_items_says_nothing() -> None:
    sheets = [sheet(rank, right(50, (ITEM, OTHER))) for rank in range(5)] + [
        sheet(5, {ITEM: {"xx": 50}, OTHER: {"aa": 50}})
    ]
    shuffled = [Sheet(one.device, dict(reversed(one.answers.items())), one.ended) for one in reversed(sheets)]
    assert judge(sheets) == judge(shuffled)


def test_the_bound_is_the_rule_of_three() -> None:
    assert bound(1000, 0.95) == pytest.approx(0.0029957, rel=1e-4)
    assert bound(0, 0.95) == 1.0
    assert bound(1, 0.99) == 1.0


@pytest.mark.parametrize(
    "item",
    [
        Item("ops", "matmul", "float32", (8, 8, 8)),
        Item("ops", "matmul", "bfloat16", (8, 8), 1e3, 1e-3, "transposed"),
        Item("train", "transformer", "float32", (2,), 1.0, 2.5e-38),
    ],
)
def test_an_item_is_its_name(item: Item) -> None:
    assert Item.parse(item.id) == item
    assert Item.from_json(item.to_json()) == item


@pytest.mark.parametrize(
    "text", ["", "ops", "ops/matmul/float32", "else/a/b/1", "ops/mat mul/float32/1", "ops/a/b/1x", "ops/a/b/1/../x/y"]
)
def test_what_names_no_item_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="item"):
        Item.parse(text)
