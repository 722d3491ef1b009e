"""What pages say where no database is needed: bounds against their definition, parts of lists, states of nodes, thinned series."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from bitwitness.store.queries.bound import false_alarm_bound
from bitwitness.store.queries.node_states import Facts, state_of_node
from bitwitness.store.queries.paging import LARGEST, part, searched
from bitwitness.store.queries.series import thinned
from bitwitness.store.queries.strikes import Held

SEED = 20261130


# The bound of false alarms --------------------------------------------------------------------------------------------


def at_most(alarms: int, trials: int, p: float) -> float:
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(alarms + 1))


@pytest.mark.parametrize(("alarms", "trials"), [(1, 2), (1, 10), (3, 40), (9, 10), (20, 300), (5, 900)])
def test_with_alarms_the_bound_is_that_at_which_so_few_are_seen_in_one_of_twenty(alarms: int, trials: int) -> None:
    bound = false_alarm_bound(alarms, trials)
    assert bound is not None
    assert at_most(alarms, trials, bound) == pytest.approx(0.05, rel=1e-9)
    assert bound > alarms / trials


def test_without_an_alarm_it_is_the_rule_of_three_which_is_never_below_the_exact_bound() -> None:
    for trials in (1, 2, 3, 10, 1000, 10**12):
        bound = false_alarm_bound(0, trials)
        assert bound == min(1.0, 3 / trials)
        assert bound is not None
        assert bound >= -math.expm1(math.log(0.05) / trials)
    assert false_alarm_bound(0, 0) is None
    assert false_alarm_bound(4, 4) == 1.0


def test_of_very_many_trials_the_bound_is_that_of_poisson() -> None:
    """4.7439 is the upper 95 % bound of a count of one (Garwood 1936), whatever the number of trials."""
    for trials in (10**8, 10**12, 10**15):
        bound = false_alarm_bound(1, trials)
        assert bound is not None
        assert bound * trials == pytest.approx(4.743865, rel=1e-5)


@pytest.mark.parametrize(("alarms", "trials"), [(-1, 4), (5, 4), (1, 0)])
def test_more_alarms_than_trials_is_a_mistake(alarms: int, trials: int) -> None:
    with pytest.raises(ValueError, match="false alarms"):
        false_alarm_bound(alarms, trials)


# Parts of a list ------------------------------------------------------------------------------------------------------


def test_a_page_that_does_not_exist_is_the_one_nearest_to_it() -> None:
    assert (part(101, 3, 50).page, part(101, 3, 50).offset) == (3, 100)
    for page in (4, 10**30):
        assert part(101, page, 50).page == 3
    for page in (0, -5, -(10**30)):
        assert part(101, page, 50).offset == 0
    assert (part(0, 7, 50).page, part(0, 7, 50).pages) == (1, 1)
    assert part(10, 1, 10**9).size == LARGEST
    assert part(10, 1, -3).size == 1


def test_what_is_searched_for_is_what_a_database_takes() -> None:
    assert searched("  a\0b ") == "ab"
    assert searched("\ud800x").encode()
    assert len(searched("x" * 10**6)) == 200


# States of nodes ------------------------------------------------------------------------------------------------------


def proposal(status: str, **more: Any) -> SimpleNamespace:
    base = {"act": "drain", "action": "drain", "hold": "", "why": "", "reason": "", "waits": False, "final": False}
    return SimpleNamespace(**(base | {"status": status, "updated": "2026-11-29"} | more))


NAMED: dict[str, Any] = {"held": [Held("GPU-1", "node-a", "node-a", frozenset({(1, "i-1")}))]}
CASES: list[tuple[dict[str, Any], list[SimpleNamespace], str]] = [
    ({}, [], "unknown"),
    ({"involved": 7}, [], "unknown"),
    ({"training": 1}, [], "in service"),
    ({"training": 1, "involved": 3}, [], "in service"),
    ({"returned": "2026-11-30"}, [], "in service"),
    (NAMED, [], "suspected"),
    (NAMED | {"training": 1}, [], "suspected"),
    (NAMED | {"denied": 1}, [], "suspected"),
    ({"denied": 1}, [], "held"),
    (NAMED, [proposal("held", hold="approval", waits=True)], "waits for approval"),
    (NAMED, [proposal("held", hold="budget")], "held"),
    (NAMED, [proposal("failed")], "held"),
    (NAMED, [proposal("proposed")], "held"),
    (NAMED, [proposal("acting")], "acting"),
    (NAMED, [proposal("unclear")], "unclear"),
    (NAMED, [proposal("observed")], "suspected"),
    (NAMED, [proposal("nothing", act="", action="watch")], "suspected"),
    ({}, [proposal("nothing", act="", action="watch")], "unknown"),
    (NAMED, [proposal("expired", final=True)], "held"),
    (NAMED, [proposal("done", final=True)], "out"),
    (NAMED, [proposal("already out", final=True)], "out"),
    ({"training": 1}, [proposal("done", final=True)], "out"),
    ({"returned": "2026-11-30"}, [proposal("done", final=True)], "in service"),
    ({"returned": "2026-11-28"}, [proposal("done", final=True)], "out"),
    ({}, [proposal("cleared", final=True)], "unknown"),
    # What the controller looks at no more, and nobody has answered.
    (NAMED, [proposal("held", hold="not-ours", final=True)], "held"),
    ({}, [proposal("held", hold="protected", final=True)], "held"),
    (NAMED, [proposal("nothing", act="", action="watch"), proposal("held", hold="not-ours", final=True)], "held"),
    (NAMED, [proposal("done", final=True), proposal("held", hold="not-ours", final=True)], "out"),
    ({"returned": "2026-11-30"}, [proposal("held", hold="protected", final=True)], "in service"),
    (NAMED, [proposal("rejected", final=True)], "suspected"),
    # What is not at its end comes before what was done last, and what waits for a person before all.
    (NAMED, [proposal("done", final=True), proposal("held")], "held"),
    (NAMED, [proposal("acting"), proposal("held", waits=True)], "waits for approval"),
    (NAMED, [proposal("held"), proposal("unclear")], "unclear"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_state_of_a_node(case: int) -> None:
    facts, proposals, state = CASES[case]
    found, text = state_of_node(Facts("node-a", proposals=list(proposals), **facts))
    assert found == state
    assert text.endswith(".")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("held", "node-a was taken out by dave, not by bitwitness"),
        ("rejected", "kim has rejected the drain: a fan"),
        ("cleared", "judged a drill by kim: ours"),
    ],
)
def test_what_became_of_a_proposal_is_told_with_its_reason(status: str, why: str) -> None:
    _, text = state_of_node(Facts("node-a", proposals=[proposal(status, final=True, why=why)], **NAMED))
    assert why in text
    assert "nothing is proposed" not in text


def test_a_node_that_was_only_involved_is_told_so_without_blame() -> None:
    state, text = state_of_node(Facts("node-a", involved=2, training=1))
    assert state == "in service"
    assert "involved in 2 unattributed incidents, which name nobody" in text


# Series ---------------------------------------------------------------------------------------------------------------


class Step(SimpleNamespace):
    @property
    def _mapping(self) -> dict[str, int]:
        return {"count": self.steps}


def test_thinning_keeps_what_stands_out_and_the_mean_of_all_steps() -> None:
    draw = random.Random(SEED)
    rows = []
    for place in range(4096):
        low, high = sorted((draw.random(), draw.random()))
        loss = None if place % 50 == 3 else (low + high) / 2
        rows.append(
            Step(
                first=place * 3, last=place * 3 + 2, steps=draw.randint(1, 3), loss=loss, loss_low=low, loss_high=high,
                norm=None, norm_low=None, norm_high=None, nonfinite=int(place == 1234), seconds=0.5,
            )
        )  # fmt: skip
    rows[2222].loss_high = 1e9
    found = thinned(rows, 100)
    assert len(found.first) <= 100
    assert (found.first[0], found.last[-1]) == (0, 4096 * 3 - 1)
    assert all(last + 1 == first for last, first in zip(found.last, found.first[1:], strict=False))
    assert max(one for one in found.loss_high if one is not None) == 1e9
    assert sum(found.nonfinite) == 1
    assert set(found.norm) == {None}
    known = [row for row in rows[:41] if row.loss is not None]
    mean = sum(row.loss * row.steps for row in known) / sum(row.steps for row in known)
    assert found.loss[0] == pytest.approx(mean)
    assert thinned([]) == type(found)()
