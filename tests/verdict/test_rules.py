"""Each rule of DESIGN section 3, "Attribution", as a small case with the verdict that must follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwitness.evidence import NONFINITE, CheckName, History, Observation, Place, Verdict
from bitwitness.topology import Topology
from bitwitness.verdict import ZERO, decide
from tests.verdict.simulator import HISTORY, ring

STEP = 20


def run(rank: int, value: str, *repeats: str, owner: int = 0, check: str = "replay", error: str = "") -> Observation:
    """One rank's runs of the owner's micro-batch."""
    name: CheckName = "input" if check == "input" else "replay"
    place: Place = "original" if rank == owner else "witness"
    return Observation(name, STEP, rank, place, value, repeats, owner=owner, micro=0, error=error)


def right(rank: int, owner: int = 0, check: str = "replay") -> Observation:
    return run(rank, "r", "r", "r", "r", owner=owner, check=check)


def local(rank: int) -> Observation:
    return Observation("numerics", STEP, rank, "local", NONFINITE)


def reduced(*values: str) -> list[Observation]:
    return [Observation("numerics", STEP, rank, "reduced", value) for rank, value in enumerate(values)]


def states(*values: str) -> list[Observation]:
    seen = (Observation("replicas", STEP, rank, "state", value) for rank, value in enumerate(values))
    return [replace(one, detail={"differs": ["layer.weight"]}) if one.value != "r" else one for one in seen]


def verdict(observations: list[Observation], nodes: int = 4, slots: int = 1, history: History = HISTORY) -> Verdict:
    return decide(observations, ring(nodes, slots), history, STEP)


def test_nothing_seen_and_agreement_are_clean() -> None:
    assert verdict([]).status == "clean"
    assert verdict([right(0), right(1)]).status == "clean"
    assert verdict(reduced(*"rrrr") + states(*"rrrr")).status == "clean"
    assert verdict([run(0, "r"), run(1, "r")]).status == "clean"


def test_rule_0_nonfinite_wherever_it_is_run_is_software_or_data() -> None:
    everywhere = [run(rank, NONFINITE, NONFINITE) for rank in (0, 1, 2)]
    found = verdict([local(0), *everywhere])
    assert (found.status, found.kind, found.check, found.candidates) == ("unattributed", "software", "numerics", (0,))
    assert "software or data" in found.reason


def test_rule_0_numerics_never_names_by_itself() -> None:
    found = verdict([local(2), local(1)])
    assert (found.status, found.kind, found.candidates) == ("unattributed", "numeric", (1, 2))
    assert "ranks 1, 2" in found.reason


def test_rule_0_a_nonfinite_rank_that_no_audit_covers_stays_in_sight() -> None:
    named = [run(1, NONFINITE, "r", "r", "r", owner=1), right(2, owner=1), right(3, owner=1)]
    found = verdict([local(1), local(2), *named])
    assert (found.ranks, found.candidates) == ((1,), (2,))


def test_rule_0_nonfinite_with_nobody_to_replay() -> None:
    found = verdict([run(0, NONFINITE, NONFINITE), run(1, "", error="out of memory")])
    assert (found.status, found.kind, found.candidates) == ("unattributed", "numeric", (0,))


def test_rule_0_nonfinite_on_one_device_only_names_it() -> None:
    found = verdict([local(0), run(0, NONFINITE, NONFINITE, NONFINITE, NONFINITE), right(1), right(2)])
    assert (found.ranks, found.kind, found.persistence, found.check) == ((0,), "numeric", "persistent", "numerics")


@pytest.mark.parametrize(
    ("value", "repeats", "persistence"),
    [
        ("w", ("r", "r", "r"), "transient"),
        ("w", ("w", "w", "w"), "persistent"),
        ("w", ("x", "y", "z"), "persistent"),
        ("w", ("r", "r", "x"), "persistent"),
        ("r", ("r", "w", "r"), "persistent"),
        ("r", ("w", "w", "w"), "persistent"),
        ("w", (), "unknown"),
        ("w", ("r",), "transient"),
        ("", ("w", "w", "w"), "persistent"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["owner", "first witness", "second witness"])
def test_rule_1_the_odd_one_of_three_nodes(value: str, repeats: tuple[str, ...], persistence: str, place: int) -> None:
    seen = [run(rank, value, *repeats) if rank == place else right(rank) for rank in (0, 1, 2)]
    found = verdict(seen)
    assert (found.status, found.ranks, found.persistence) == ("attributed", (place,), persistence)
    assert found.persistences == (persistence,)
    assert (found.nodes, found.devices, found.kind) == ((f"n{place}",), (f"gpu-{place}",), "compute")
    assert f"rank {place} on node n{place} (device gpu-{place}) alone differs" in found.reason
    assert found.window == (3, STEP)


def test_rule_1_anything_else_is_unattributed() -> None:
    all_differ = [run(0, "a", "a"), run(1, "b", "b"), run(2, "c", "c")]
    nobody_repeated = [run(0, "w"), run(1, "r"), run(2, "r")]
    one_backer = [run(0, "w", "w"), right(1), run(2, "r", "r", "x", "r")]
    for seen in (all_differ, nobody_repeated, one_backer):
        found = verdict(seen)
        assert (found.status, found.ranks, found.candidates) == ("unattributed", (), (0, 1, 2)), seen


def test_rule_1_disagreements_with_one_reason_are_one_sentence() -> None:
    seen = [run(rank, f"{rank}", f"{rank}", owner=owner) for owner in (0, 1, 2) for rank in (0, 1, 2)]
    assert verdict(seen).reason == (
        "the results of the micro-batches of ranks 0, 1, 2 differ between runs on ranks 0, 1, 2, and no value was produced "
        "on two nodes in every repeat: restart, and audit every step"
    )


def test_rule_1_two_values_that_are_backed_alike_name_nobody() -> None:
    seen = [right(0), right(1), run(2, "w", "w", "w"), run(3, "w", "w", "w"), run(4, "x", "x")]
    found = verdict(seen, nodes=5)
    assert (found.status, found.candidates) == ("unattributed", (0, 1, 2, 3, 4))


def test_rule_1_what_the_named_rank_does_not_explain_stays_in_sight() -> None:
    named = [run(0, "w", "w", "w", "w"), right(1), right(2)]
    other = [run(4, "a", "a", owner=4), run(5, "b", "b", owner=4), run(6, "c", "c", owner=4)]
    found = verdict(named + other, nodes=7)
    assert (found.ranks, found.candidates) == ((0,), (4, 5, 6))
    assert "of rank 4 differs between runs on ranks 4, 5, 6" in found.reason


def test_the_worst_persistence_of_several_is_the_verdict_s() -> None:
    topology, seen = ring(4, 2), list[Observation]()
    for bad, repeats in ((2, "rrr"), (3, "www")):
        seen += [run(bad, "w", *repeats, owner=bad)]
        seen += [right(witness, owner=bad) for witness in (bad + 2, (bad + 4) % 8)]
    found = decide(seen, topology, HISTORY, STEP)
    assert (found.persistences, found.persistence) == (("transient", "persistent"), "persistent")


def test_rule_1_agreement_on_nonfinite_is_no_reference() -> None:
    found = verdict([right(0), run(1, NONFINITE, NONFINITE), run(2, NONFINITE, NONFINITE)])
    assert (found.status, found.kind) == ("unattributed", "numeric")


def test_rule_1_no_witness_that_repeated_is_missing_from_the_backing() -> None:
    """A single run backs nothing, also where two others have settled what is right."""
    seen = [right(0), right(2), run(4, "r"), run(1, "w", "w", "w", "w")]
    found = decide(seen, ring(3, 2), HISTORY, STEP)  # 0 and 1 share a node; 4 is the third node but ran once
    assert found.status == "unattributed"


def test_rule_1_where_healthy_runs_do_not_repeat_it_is_software() -> None:
    same_case = [run(0, "a", "b", "c"), run(1, "d", "e", "f"), right(2)]
    two_cases = [right(0), right(1), run(2, "r", "r", "x")]
    two_cases += [right(3, owner=3), run(0, "y", "r", "z", owner=3), right(1, owner=3)]
    for seen in (same_case, two_cases):
        found = verdict(seen)
        assert (found.status, found.kind) == ("unattributed", "software")
        assert "not deterministic" in found.reason


def test_rule_1_now_and_then_wrong_while_another_node_is_unsteady_is_not_called_persistent() -> None:
    seen = [run(0, "w", "r", "r", "r"), right(1), right(2)]
    seen += [right(2, owner=2), run(3, "r", "r", "x", "r", owner=2), right(0, owner=2)]
    found = verdict(seen, nodes=4)
    assert found.ranks == (0,)  # 0, wrong itself, is no witness: against 3 there is only 2
    seen += [right(1, owner=1), run(3, "r", "r", "x", "r", owner=1), right(2, owner=1)]
    found = verdict(seen, nodes=4)
    assert dict(zip(found.ranks, found.persistences, strict=True)) == {0: "transient", 3: "unknown"}


def test_who_was_wrong_is_no_witness() -> None:
    """Ranks 1 and 2 fail alike and outvote 0 in the case that the three share; the cases around it expose them."""
    alike = [right(0), run(1, "w", "w", "w", "w"), run(2, "w", "w", "w", "w")]
    assert verdict(alike).ranks == (0,)  # the one unsolvable case, see test_unsolvable
    exposed = [run(2, "w", "w", "w", owner=2), right(3, owner=2), right(0, owner=2)]
    assert verdict(alike + exposed).ranks == ()


@pytest.mark.parametrize("nodes", [1, 2])
def test_rule_6_two_nodes_or_one_name_nobody(nodes: int) -> None:
    topology = ring(nodes, 3)
    ranks = range(3) if nodes == 1 else (0, 3, 1)
    seen = [run(rank, "w", "w", "w") if rank == 0 else right(rank) for rank in ranks]
    found = decide(seen, topology, HISTORY, STEP)
    assert (found.status, found.candidates) == ("unattributed", tuple(sorted(ranks)))
    assert f"on {nodes} node{'s' * (nodes > 1)}: three are needed" in found.reason


def test_rule_6_a_healed_rank_is_a_hint() -> None:
    found = verdict([run(0, "w", "r", "r", "r"), right(1)], nodes=2)
    assert (found.status, found.ranks) == ("unattributed", ())
    assert "rank 0's too: perhaps a transient" in found.reason


def test_rule_6_one_rank_that_does_not_repeat() -> None:
    found = verdict([run(0, "w", "r", "r", "r")], nodes=1)
    assert (found.status, found.kind) == ("unattributed", "software")


def test_an_error_blames_nobody_and_hides_no_disagreement() -> None:
    assert verdict([right(0), run(1, "", error="out of memory")]).status == "clean"
    found = verdict([run(0, "w", "w", "w", "w"), run(1, "r", error="out of memory"), right(2)])
    assert (found.status, found.candidates) == ("unattributed", (0, 1, 2))
    found = verdict([run(0, "w", "w", error="out of memory"), right(1), right(2)])
    assert (found.status, found.ranks) == ("unattributed", ())
    found = verdict([run(0, "w", "w"), right(1), right(2), run(3, "", error="out of memory")])
    assert found.ranks == (0,)


def test_a_replica_that_could_not_be_compared_names_nobody() -> None:
    seen = states(*"rrrw")
    found = verdict([*seen[:3], replace(seen[3], error="holds other tensors")])
    assert (found.status, found.kind) == ("unattributed", "software")
    assert "holds other tensors" in found.reason


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_observations_are_no_evidence(missing: int) -> None:
    seen = [run(0, "w", "w", "w", "w"), right(1), right(2)]
    found = verdict([one for one in seen if one.rank != missing])
    assert found.ranks == ()
    assert found.status == ("clean" if missing == 0 else "unattributed")


def test_what_arrives_twice_counts_once() -> None:
    once = [run(0, "w"), run(1, "r"), run(2, "r")]
    assert verdict(once * 2) == verdict(once)
    assert verdict(once * 2).status == "unattributed"


def test_values_of_different_steps_are_not_compared() -> None:
    later = replace(right(1), step=STEP + 1, value="w", repeats=("w", "w", "w"))
    assert verdict([right(0), later, right(2)]).status == "clean"
    assert verdict(states(*"rrrr") + [replace(one, step=STEP + 1) for one in states(*"ww")]).status == "clean"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_rule_4_rebuilt_inputs(place: int) -> None:
    good = [right(rank, check="input") for rank in (0, 1, 2) if rank != place]
    found = verdict([*good, run(place, "w", "w", "w", "w", check="input")])
    assert (found.ranks, found.kind, found.check) == ((place,), "input", "input")
    assert "rebuilt input of micro-batch 0 of rank 0" in found.reason
    assert "storage" in found.reason
    found = verdict([good[0], run(place, "w", "w", check="input")])
    assert (found.status, found.kind) == ("unattributed", "input")


def test_rule_5_several_ranks_of_one_node_point_to_the_node() -> None:
    topology = ring(4, 2)
    seen: list[Observation] = []
    for bad in (2, 3):
        seen += [run(bad, "w", "w", "w", "w", owner=bad)]
        seen += [right(witness, owner=bad) for witness in (bad + 2, (bad + 4) % 8)]
    found = decide(seen, topology, HISTORY, STEP)
    assert (found.ranks, found.nodes) == ((2, 3), ("n1",))
    assert "suspect the node" in found.reason


def test_unlike_devices_are_no_reference() -> None:
    def of(*models: str) -> Topology:
        return Topology(tuple(replace(it, model=m) for it, m in zip(ring(len(models)).placements, models, strict=True)))

    seen = [run(0, "w", "w", "w", "w"), right(1), right(2)]
    found = decide(seen, of("B", "A", "A"), HISTORY, STEP)
    assert (found.status, found.kind) == ("unattributed", "software")
    assert "device models or software differ" in found.reason
    assert decide(seen, of("A", "A", "A", "B"), HISTORY, STEP).ranks == (0,)
    assert decide(states(*"wrrr"), of(*"BAAA"), HISTORY, STEP).ranks == ()


def test_unsolvable_the_same_wrong_bits_on_two_nodes() -> None:
    """The one case that no vote can solve, and that the documentation states: two nodes that fail in the same way, in
    nothing but this one micro-batch, outvote the healthy third. It takes a common cause; independent devices that are
    wrong in their own ways never agree.
    """
    found = verdict([right(0), run(1, "w", "w", "w", "w"), run(2, "w", "w", "w", "w")], nodes=3)
    assert found.ranks == (0,)


def test_reduced_nonfinite_on_one_rank_alone_names_it_and_its_link() -> None:
    found = verdict(reduced("r", NONFINITE, "r", "r"))
    assert (found.ranks, found.kind, found.persistence) == ((1,), "collective", "unknown")
    assert "link into it" in found.reason


@pytest.mark.parametrize(
    "seen",
    [
        reduced("r", NONFINITE, NONFINITE, "r"),
        reduced("r", NONFINITE, "x", "r"),
        reduced("r", NONFINITE, "r"),  # rank 3 is not heard of
        reduced("r", "r", "r", "w"),
        reduced("a", "a", "b", "b"),
        reduced(NONFINITE, NONFINITE, NONFINITE, "r"),
    ],
)
def test_reduced_gradients_that_differ_otherwise_name_nobody(seen: list[Observation]) -> None:
    found = verdict(seen)
    assert (found.status, found.kind) == ("unattributed", "collective")
    assert found.candidates


def test_reduced_gradients_that_agree_on_nonfinite_or_zero_are_no_health() -> None:
    assert verdict(reduced(*[NONFINITE] * 4)).kind == "collective"
    overflow = replace(HISTORY, sum_may_overflow=True)
    assert verdict(reduced(*[NONFINITE] * 4), history=overflow).kind == "software"
    found = verdict(reduced(*[ZERO] * 4))
    assert (found.status, found.kind) == ("unattributed", "collective")


@pytest.mark.parametrize("seen", [reduced("r", NONFINITE, "r", "r"), reduced(*"rrrw"), states(*"rrrw")])
def test_rule_3_the_first_comparison_is_configuration(seen: list[Observation]) -> None:
    found = verdict(seen, history=History())
    assert (found.status, found.kind, found.window) == ("unattributed", "software", (-1, STEP))
    assert "configuration" in found.reason


def test_rule_3_replicas() -> None:
    found = verdict(states(*"rrrw"))
    assert (found.ranks, found.kind, found.persistence) == ((3,), "memory", "unknown")
    assert "layer.weight" in found.reason
    no_majority = verdict(states(*"rrww"))
    assert (no_majority.status, no_majority.kind, no_majority.candidates) == ("unattributed", "memory", (0, 1, 2, 3))
    parted = verdict(states(*"rrrw"), history=replace(HISTORY, reductions_agreed=False))
    assert (parted.status, parted.kind, parted.candidates) == ("unattributed", "collective", (3,))
    this_step = verdict(states(*"rrrw") + reduced(*"rrrw"))
    assert (this_step.status, this_step.kind) == ("unattributed", "collective")
    silent = verdict(states(*"rrw"), nodes=5)  # two of five are no majority
    assert silent.status == "unattributed"
    nonfinite = verdict(states(NONFINITE, NONFINITE, NONFINITE, "r"))
    assert nonfinite.status == "unattributed"


def test_rule_3_the_majority_must_hold_on_two_other_nodes() -> None:
    found = decide(states(*"rrrw"), ring(2, 2), HISTORY, STEP)
    assert (found.status, found.candidates) == ("unattributed", (3,))
    assert decide(states(*"rrrrrw"), ring(3, 2), HISTORY, STEP).ranks == (5,)


@pytest.mark.parametrize("told", [None, "layer", {"a": 1}, [1, None], 7])
def test_a_strange_detail_breaks_nothing(told: object) -> None:
    seen = [replace(one, detail={"differs": told, "other": {1: 2}}) for one in states(*"rrrw")]
    assert verdict(seen).ranks == (3,)


def test_findings_are_put_together() -> None:
    audit = [run(0, "w", "w", "w", "w"), right(1), right(2)]
    found = verdict(audit + states(*"rrrw"))
    assert (found.ranks, found.persistences) == ((0, 3), ("persistent", "unknown"))
    assert (found.persistence, found.kind, found.check) == ("persistent", "compute", "replay")
