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


def test_one_wrong_answer_accuses_nobody_whatever_was_learned() -> None:
    much = {KIND_NAME: {item: Known("aa", 1000, 10**9) for item in ITEMS}}
    for calls in (1, 2):
        wrong = right(items=ITEMS) | {ITEMS[3]: {"aa": 100_000, "xx": calls}}
        assert standings(judge([sheet(0, wrong)], much)) == ["not judged"]
    several = [sheet(rank, right(1000) | ({ITEM: {"aa": 999, "x": 1}} if rank % 20 == 5 else {})) for rank in range(64)]
    assert "fail" not in standings(judge(several, {KIND_NAME: {ITEM: Known("aa", 8, 10**9)}}))


# What is no pass, although nobody is accused --------------------------------------------------------------------------


def test_who_answers_otherwise_and_is_not_accused_has_not_passed() -> None:
    many = tuple(f"ops/exp/float32/{size}" for size in range(8, 108))
    answers = [right(items=many), right(items=many), right(items=many) | {many[0]: {"xx": 100}}]
    judged = judge([sheet(rank, one, node="n0" if rank < 2 else "n1") for rank, one in enumerate(answers)])
    assert standings(judged) == ["pass", "pass", "not judged"]
    assert many[0] in judged.devices[2].reason


def test_who_got_an_item_wrong_that_many_get_wrong_has_not_passed() -> None:
    answers = [right(items=ITEMS) | ({ITEMS[0]: {"aa": 90, "xx": 10}} if rank in (1, 4) else {}) for rank in range(7)]
    judged = judge([sheet(rank, one) for rank, one in enumerate(answers)])
    assert [rank for rank, one in enumerate(standings(judged)) if one == "not judged"] == [1, 4]
    assert "fail" not in standings(judged)


def test_who_contradicts_golden_answers_has_not_passed() -> None:
    known = {KIND_NAME: GOLDEN[KIND_NAME] | {ITEMS[0]: Known("bb", 3, 3000)}}
    judged = judge([sheet(rank, right(items=ITEMS)) for rank in range(4)], known)
    assert set(standings(judged)) == {"not judged"}
    assert ITEMS[0] in judged.devices[0].reason


def test_few_items_that_judge_do_not_speak_for_the_others() -> None:
    chance = random.Random(2)
    noise = [{item: {f"{chance.random()}": 1 for _ in range(5)} for item in ITEMS} for _ in range(4)]
    judged = judge([sheet(rank, one | right(1000)) for rank, one in enumerate(noise)])
    assert set(standings(judged)) == {"not judged"}
    assert set(standings(judge([sheet(rank, right(2)) for rank in range(4)]))) == {"not judged"}


def test_one_device_is_one_voice() -> None:
    one = [Sheet(Device(rank, "n0", "GPU-0", KIND), right(), "done") for rank in range(3)]
    assert set(standings(judge(one))) == {"not judged"}
    outvoted = [*one[:2], sheet(2, {ITEM: {"bb": 100}}, node="n0")]
    assert "fail" not in standings(judge(outvoted))
    assert "same device" in judge(outvoted).devices[0].reason


# What looks like a device and is none --------------------------------------------------------------------------------


def batched(rank: int, came: Mapping[tuple[str, ...], tuple[int, int]], *, node: str = "") -> Sheet:
    """A sheet of one item: by the answers that came of a set of operands, how many sets and calls of each answer."""
    found = sheet(rank, {}, node=node)
    for digests, (sets, calls) in came.items():
        record = (
            {"answers": dict.fromkeys(digests, calls)} if len(digests) > 1 else {"digest": digests[0], "count": calls}
        )
        found.take({"kind": "answer", "item": ITEM, "batches": sets, "seconds": 0.1, **record})
    return found


def test_answers_of_one_damaged_set_of_operands_are_one_event() -> None:
    healthy = [batched(rank, {("aa",): (100, 5000)}) for rank in range(15)]
    judged = judge([*healthy, batched(15, {("aa",): (99, 4950), ("xx",): (1, 50)})])
    assert standings(judged)[15] == "not judged"
    assert (judged.devices[15].wrong, judged.devices[15].findings[0].events) == (50, 1)
    assert standings(judge([*healthy, batched(15, {("aa",): (90, 4500), ("xx",): (10, 500)})]))[15] == "fail"


def test_several_answers_of_one_set_are_one_event() -> None:
    healthy = [batched(rank, {("aa",): (100, 5000)}) for rank in range(15)]
    mixed = batched(15, {("aa",): (99, 4950), ("aa", *(f"x{number}" for number in range(40))): (1, 1)})
    assert standings(judge([*healthy, mixed]))[15] == "not judged"


def races(
    chance: random.Random, calls: Mapping[int, int], rate: float, per_node: int, racing: set[str] | None = None
) -> list[Sheet]:
    """Devices whose software errs at a rate, all or those of some nodes, and that are right in other items."""
    sheets = []
    for rank, count in calls.items():
        node = f"n{rank // per_node}"
        wrong = sum(chance.random() < rate for _ in range(count)) if racing is None or node in racing else 0
        answers = (
            {ITEM: {digest: many for digest, many in (("aa", count - wrong), ("xx", wrong)) if many}} if count else {}
        )
        sheets.append(sheet(rank, right(1000, (OTHER,)) | answers, node=node))
    return sheets


@pytest.mark.parametrize(
    ("calls", "rate", "per_node", "racing"),
    [
        (dict.fromkeys(range(64), 0) | dict.fromkeys((3, 20, 40), 1000), 0.003, 1, None),
        (dict.fromkeys(range(16), 100) | {0: 1000}, 0.002, 1, None),
        (dict.fromkeys(range(64), 200), 0.02, 8, {"n2"}),
        (dict.fromkeys(range(128), 200), 0.005, 8, {"n2"}),
    ],
    ids=["an item of few", "one computes more", "on one node", "rarely on one node"],
)
def test_a_race_accuses_nobody_wherever_it_is(
    calls: dict[int, int], rate: float, per_node: int, racing: set[str] | None
) -> None:
    chance = random.Random(12)  # about one in a thousand would accuse somebody: that is what CHANCE allows
    judged = [judge(races(chance, calls, rate, per_node, racing)) for _ in range(60)]
    assert sum("fail" in standings(one) for one in judged) == 0


@pytest.mark.parametrize(("devices", "per_node", "each"), [(8, 1, 5), (8, 8, 5), (16, 1, 4), (64, 1, 3), (64, 8, 5)])
def test_a_race_that_strikes_another_item_each_time_accuses_nobody(devices: int, per_node: int, each: int) -> None:
    """All devices are wrong as often, each in items of its own: what was wrong elsewhere counts as well."""
    items = [f"ops/exp/float32/{size}" for size in range(8, 8 + devices * each)]
    sheets = []
    for rank in range(devices):
        own = items[rank * each : (rank + 1) * each]
        answers = {item: {"aa": 11, "xx": 1} if item in own else {"aa": 12} for item in items}
        sheets.append(sheet(rank, answers, node=f"n{rank // per_node}"))
    assert "fail" not in standings(judge(sheets))


@pytest.mark.parametrize("per_node", [1, 8])
def test_races_of_many_items_accuse_nobody_and_hide_nobody(per_node: int) -> None:
    chance = random.Random(21)
    items = [f"ops/exp/float32/{size}" for size in range(8, 208)]
    accused = 0
    for _ in range(20):
        answers: list[dict[str, dict[str, int]]] = [right(12, tuple(items)) for _ in range(8)]
        for _ in range(chance.randrange(5, 40)):
            answers[chance.randrange(8)][chance.choice(items)] = {"aa": 11, "xx": 1}
        sheets = [sheet(rank, one, node=f"n{rank // per_node}") for rank, one in enumerate(answers)]
        accused += "fail" in standings(judge(sheets))
        answers[3] |= {item: {"aa": 6, "xx": 6} for item in chance.sample(items, 40)}
        beside = [sheet(rank, one, node=f"n{rank // per_node}") for rank, one in enumerate(answers)]
        assert [rank for rank, one in enumerate(standings(judge(beside))) if one == "fail"] == [3]
    assert accused == 0


def test_a_node_of_which_all_devices_are_set_up_otherwise_is_no_device() -> None:
    answers = [right() if rank // 8 != 5 else {ITEM: {"bb": 100}} for rank in range(128)]
    judged = judge([sheet(rank, one, node=f"n{rank // 8}") for rank, one in enumerate(answers)])
    assert {rank for rank, one in enumerate(standings(judged)) if one == "not judged"} == set(range(40, 48))
    assert "node n5" in judged.devices[40].reason
    assert "fail" not in standings(judged)


def test_a_worse_device_does_not_hide_another() -> None:
    wrong = {6: 200, 1: 22}
    sheets = [
        sheet(rank, {ITEM: {"aa": 1144 - wrong.get(rank, 0)} | ({"xx": wrong[rank]} if rank in wrong else {})})
        for rank in range(8)
    ]
    assert [rank for rank, one in enumerate(standings(judge(sheets))) if one == "fail"] == [1, 6]


def test_what_no_rank_has_written_counts_for_nothing() -> None:
    records: tuple[dict[str, object], ...] = (
        {"digest": "aa", "count": True},
        {"digest": "aa", "count": 10**13},
        {"digest": "aa", "count": -1},
        {"digest": 3, "count": 1},
        {"answers": {"aa": "1"}},
        {"answers": {}},
    )
    for record in records:
        taken = sheet(0, {})
        taken.take({"kind": "answer", "item": ITEM, **record})
        assert taken.answers == {}
    for seconds in (float("nan"), float("inf"), -1.0, 10**400, "1"):
        taken = sheet(0, {})
        taken.take({"kind": "answer", "item": ITEM, "digest": "aa", "count": 1, "seconds": seconds})
        assert taken.seconds == 0.0
    assert judge([sheet(rank, right() | {"no item": {"aa": 5}}) for rank in range(3)]).standing == "pass"


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
