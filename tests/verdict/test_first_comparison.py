"""The first comparison cannot tell a device from a program that treats one rank apart, so it names no such rank."""

from __future__ import annotations

from dataclasses import replace

from bitwitness.evidence import NONFINITE, History, Observation
from tests.verdict.simulator import HISTORY
from tests.verdict.test_rules import local, right, run, verdict

NEW = replace(HISTORY, compared_before=frozenset({"replicas"}))


def audit(*wrong: str) -> list[Observation]:
    """Rank 0 alone differs: its runs are `wrong`, in the case that it owns and in that which it witnesses."""
    return [run(0, *wrong), right(1), right(2), run(0, *wrong, owner=3), right(3, owner=3), right(1, owner=3)]


def test_a_rank_that_is_always_wrong_in_the_same_way_is_not_named_at_the_first_comparison() -> None:
    seen = audit("w", "w", "w", "w")
    found = verdict(seen, history=NEW)
    assert (found.status, found.kind, found.candidates, found.check) == ("unattributed", "software", (0,), "replay")
    assert "very first comparison" in found.reason
    assert "another node" in found.reason  # what tells software from a device
    assert verdict(seen).ranks == (0,)


def test_no_program_is_wrong_once_or_in_changing_ways_so_these_are_named_at_once() -> None:
    once = verdict([run(0, "w", "r", "r", "r"), right(1), right(2)], history=NEW)
    assert (once.ranks, once.persistence) == ((0,), "transient")
    changing = verdict([run(0, "w", "x", "y", "z"), right(1), right(2)], history=NEW)
    assert (changing.ranks, changing.persistence) == ((0,), "persistent")


def test_nonfinite_on_one_rank_in_every_run_is_not_blamed_at_the_first_comparison_either() -> None:
    seen = [local(0), run(0, *[NONFINITE] * 4), right(1), right(2)]
    assert verdict(seen, history=NEW).status == "unattributed"
    assert verdict(seen).ranks == (0,)


def test_inputs_that_were_never_rebuilt_right_are_software() -> None:
    seen = [run(0, "w", "r", "r", "r", check="input"), right(1, check="input"), right(2, check="input")]
    found = verdict(seen, history=History(compared_before=frozenset({"replay", "replicas"})))
    assert (found.status, found.kind, found.candidates) == ("unattributed", "software", (0,))
    assert "rebuild_batch" in found.reason
    assert verdict(seen).ranks == (0,)


def test_inputs_that_differ_on_several_nodes_at_once_are_software() -> None:
    """A new epoch that `rebuild_batch` does not know of: every rank is fed something else than is rebuilt."""
    seen: list[Observation] = []
    for owner in range(4):
        others = [right((owner + offset) % 4, owner, "input") for offset in (1, 2)]
        seen += [run(owner, f"w{owner}", "r", "r", "r", owner=owner, check="input"), *others]
    found = verdict(seen)
    assert (found.status, found.kind, found.candidates) == ("unattributed", "software", (0, 1, 2, 3))
