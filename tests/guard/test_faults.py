"""Each class of fault on a rank of three nodes, of one rank or two: stopped in time, on every rank, and rightly named.

By default each is tried on one rank, on the first, a middle and the last in turn, once or staying, and on nodes of one rank with every
fourth on nodes of two; `BITWITNESS_EXHAUSTIVE=1` tries it on all three ranks, on nodes of two, and most of them both once and staying.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

import bitwitness
from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, Seen, launch
from tests.guard.training import Plan, run

pytestmark = pytest.mark.timeout(400)

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
RANKS = {1: (0, 1, 2), 2: (0, 2, 5)}
"""On nodes of one rank and of two: where faults are put."""
STEP = 2
PLAN = Plan(steps=STEP + 1, policy={"audit": "gradients"})
HOOKED = replace(PLAN, faulty_hook=True)
REBUILT = replace(PLAN, rebuild=True)

# What goes wrong, how often, in which job, and what the verdict must say.
BEFORE_UPDATE = [
    ("matmul", False, PLAN, "compute"),
    ("matmul", True, PLAN, "compute"),
    ("random matmul", True, PLAN, "compute"),
    ("backward matmul", False, PLAN, "compute"),
    ("backward matmul", True, PLAN, "compute"),
    ("layer norm", False, PLAN, "compute"),
    ("layer norm", True, PLAN, "compute"),
    ("gradient x 4", False, PLAN, "compute"),
    ("gradient x 4", True, PLAN, "compute"),
    ("gradient sign", False, PLAN, "compute"),
    ("gradient sign", True, PLAN, "compute"),
    ("nan gradient", False, PLAN, "numeric"),
    ("nan gradient", True, PLAN, "numeric"),
    ("token", False, REBUILT, "input"),
    ("token", True, REBUILT, "input"),
    ("inf after the all-reduce", False, PLAN, "collective"),
    ("inf in the all-reduce", False, HOOKED, "collective"),
]
if not EXHAUSTIVE:
    BEFORE_UPDATE = [
        ("matmul", False, PLAN, "compute"),
        ("random matmul", True, PLAN, "compute"),
        ("layer norm", True, PLAN, "compute"),
        ("gradient x 4", False, PLAN, "compute"),
        ("backward matmul", True, PLAN, "compute"),
        ("gradient sign", True, PLAN, "compute"),
        ("nan gradient", False, PLAN, "numeric"),
        ("token", True, REBUILT, "input"),
        *(case for case in BEFORE_UPDATE if case[3] == "collective"),
    ]
AFTER_UPDATE = [
    ("weight sign", False, PLAN, "memory"),
    ("weight last bit", False, PLAN, "memory"),
    ("moment x 16", False, PLAN, "memory"),
]


def _param(fault: Fault, per_node: int, *rest: object) -> ParameterSet:
    return pytest.param(fault, per_node, *rest, id=fault.name + ("" if per_node == 2 else " of one a node"))


def _turn(number: int) -> tuple[int, tuple[int, ...]]:
    """How many ranks a node has for this case, and which of them are hit."""
    per_node = 2 if EXHAUSTIVE or number % 4 == 0 else 1
    return per_node, RANKS[per_node] if EXHAUSTIVE else (RANKS[per_node][number % 3],)


CASES = [
    _param(Fault(what, rank, STEP, persistent), per_node, plan, kind)
    for number, (what, persistent, plan, kind) in enumerate(BEFORE_UPDATE + AFTER_UPDATE)
    for per_node, ranks in [_turn(number)]
    for rank in ranks
]
IN_REPLAYS = [
    _param(Fault(what, rank, STEP, persistent, "replays"), per_node)
    for which, what in enumerate(("matmul", "gradient x 4", "nan gradient"))
    for persistent, number in ((False, 4), (True, 5))
    if EXHAUSTIVE or persistent == (which == 1)
    for per_node, ranks in [_turn(number)]
    for rank in (ranks[1:] if EXHAUSTIVE else ranks)
]
SEVERAL = {
    "a witness that fails in repeats": (Fault("matmul", 2, STEP), Fault("gradient sign", 4, STEP, True, "repeats")),
    "two of three nodes": (Fault("matmul", 0, STEP, True), Fault("random matmul", 3, STEP, True)),
    "two ranks of one node": (Fault("matmul", 2, STEP, True), Fault("layer norm", 3, STEP, False)),
    "two owners": (Fault("gradient x 4", 1, STEP), Fault("layer norm", 4, STEP)),
}


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launch]:
    """One launch of three nodes for each number of ranks that they have."""
    scenarios: dict[int, list[Scenario]] = {}
    for per_node in RANKS:
        clean = (("clean", PLAN), ("clean hooked", HOOKED)) if per_node == 2 or not EXHAUSTIVE else ()
        scenarios[per_node] = [Scenario(name, run, plan, per_node) for name, plan in clean]
    for case in CASES:
        given: Any = case.values
        fault, per_node, plan, _ = given
        plain = plan.with_faults(fault, guarded=False, steps=STEP + 1)
        scenarios[per_node].append(Scenario(fault.name, run, plan.with_faults(fault), per_node))
        scenarios[per_node].append(Scenario(f"plain {fault.name}", run, plain, per_node))
    for case in IN_REPLAYS:
        given = case.values
        fault, per_node = given
        scenarios[per_node].append(Scenario(fault.name, run, PLAN.with_faults(fault), per_node))
    scenarios[2] += [Scenario(name, run, PLAN.with_faults(*faults), 2) for name, faults in SEVERAL.items()]
    return {
        per_node: launch(some, 3 * per_node, tmp_path_factory.mktemp(f"faults-{per_node}"), deadline=300)
        for per_node, some in scenarios.items()
        if some
    }


@pytest.fixture
def done(launches: dict[int, Launch]) -> Launch:
    """The one of nodes with two ranks."""
    return launches[2]


def detections(seen: list[Seen]) -> list[Seen]:
    """What every rank raised: corruption, at the same step, with the same verdict and incident."""
    errors = [of_rank["error"] for of_rank in seen]
    assert [error and error["type"] for error in errors] == ["CorruptionDetected"] * len(seen)
    assert all(error["verdict"] == errors[0]["verdict"] for error in errors)
    assert all(error["step"] == errors[0]["step"] == error["verdict"]["step"] for error in errors)
    assert all(error["incident"] == errors[0]["incident"] and error["readable"] for error in errors)
    return errors


@pytest.mark.parametrize(("fault", "per_node", "plan", "kind"), CASES)
def test_caught_and_named(launches: dict[int, Launch], fault: Fault, per_node: int, plan: Plan, kind: str) -> None:
    seen = launches[per_node].seen(fault.name)
    (first, *_) = detections(seen)
    verdict = first["verdict"]
    assert (verdict["status"], verdict["ranks"], verdict["nodes"]) == (
        "attributed",
        [fault.rank],
        [f"n{fault.rank // per_node}"],
    )
    expected = "persistent" if fault.persistent else "transient"
    assert verdict["persistence"] == (expected if kind not in ("collective", "memory") else "unknown")
    assert verdict["kind"] == kind
    assert verdict["step"] == STEP
    assert verdict["window"] == [STEP - 1, STEP]
    assert f"rank {fault.rank} on node n{fault.rank // per_node}" in verdict["reason"]
    if kind == "memory":
        assert "memory or update" in verdict["reason"]
    if kind == "collective":
        assert "or the link into it" in verdict["reason"]


@pytest.mark.parametrize(("fault", "per_node", "plan", "kind"), CASES)
def test_stopped_before_the_next_update(
    launches: dict[int, Launch], fault: Fault, per_node: int, plan: Plan, kind: str
) -> None:
    """Every rank ends with the weights of the clean run; after the update, all but the one that was hit."""
    done = launches[per_node]
    clean = done.seen("clean hooked" if plan.faulty_hook else "clean")
    seen = done.seen(fault.name)
    good = STEP + 1 if kind == "memory" else STEP
    for rank, (own, reference) in enumerate(zip(seen, clean, strict=True)):
        assert own["states"] == reference["states"][: STEP + 1]
        assert own["gradients cleared"]
        hit = kind == "memory" and rank == fault.rank
        assert (own["final"] == reference["states"][good]) != hit
    assert seen[fault.rank]["struck"]


@pytest.mark.parametrize(("fault", "per_node", "plan", "kind"), CASES)
def test_the_fault_lands(launches: dict[int, Launch], fault: Fault, per_node: int, plan: Plan, kind: str) -> None:
    """Without a guard nothing stops it: the step ends in other bits, everywhere or on the rank that was hit."""
    done = launches[per_node]
    clean = done.seen("clean hooked" if plan.faulty_hook else "clean")
    seen = done.seen(f"plain {fault.name}")
    everyone = list(range(3 * per_node))
    changed = [rank for rank in everyone if seen[rank]["states"][STEP + 1] != clean[rank]["states"][STEP + 1]]
    assert changed == ([fault.rank] if kind in ("memory", "collective") else everyone)
    assert [of_rank["states"][: STEP + 1] for of_rank in seen] == [of_rank["states"][: STEP + 1] for of_rank in clean]
    assert [of_rank["struck"] > 0 for of_rank in seen] == [rank == fault.rank for rank in everyone]


@pytest.mark.parametrize(("fault", "per_node"), IN_REPLAYS)
def test_a_fault_in_a_witness_names_the_witness(launches: dict[int, Launch], fault: Fault, per_node: int) -> None:
    verdict = detections(launches[per_node].seen(fault.name))[0]["verdict"]
    assert (verdict["ranks"], verdict["nodes"]) == ([fault.rank], [f"n{fault.rank // per_node}"])
    assert verdict["kind"] == ("numeric" if fault.what == "nan gradient" else "compute")
    assert verdict["persistence"] == ("persistent" if fault.persistent else "transient")


@pytest.mark.parametrize("name", SEVERAL)
def test_several_faults_name_no_healthy_rank(done: Launch, name: str) -> None:
    faulty = {fault.rank for fault in SEVERAL[name]}
    seen = done.seen(name)
    verdict = detections(seen)[0]["verdict"]
    assert set(verdict["ranks"]) <= faulty
    assert verdict["step"] == STEP
    assert all(seen[rank]["struck"] for rank in faulty)


def test_two_ranks_of_one_node_name_the_node(done: Launch) -> None:
    verdict = detections(done.seen("two ranks of one node"))[0]["verdict"]
    assert (verdict["ranks"], verdict["nodes"]) == ([2, 3], ["n1"])
    assert verdict["persistences"] == ["persistent", "transient"]
    assert "suspect the node" in verdict["reason"]


def test_two_owners_are_both_named(done: Launch) -> None:
    assert detections(done.seen("two owners"))[0]["verdict"]["ranks"] == [1, 4]


def test_incidents_are_readable(done: Launch) -> None:
    """With the whole evidence: original and witnesses, and who stood where."""
    found = detections(done.seen(Fault("backward matmul", 2, STEP, True).name))[0]
    incident = bitwitness.read_incident(found["incident"])
    assert incident.verdict.to_json() | {} == bitwitness.Verdict.from_json(found["verdict"]).to_json()
    assert incident.topology.node_of(5) == "n2"
    places = {(seen.owner, seen.rank, seen.place) for seen in incident.observations}
    assert {(2, 2, "original"), (2, 4, "witness"), (2, 0, "witness")} <= places
    blamed = next(seen for seen in incident.observations if (seen.owner, seen.rank) == (2, 2))
    healthy = next(seen for seen in incident.observations if (seen.owner, seen.rank) == (2, 4))
    assert len(blamed.runs) == len(healthy.runs) == 4
    assert len(set(healthy.runs)) == 1 != len({*blamed.runs, *healthy.runs})


def test_clean_runs_are_clean(launches: dict[int, Launch]) -> None:
    for done in launches.values():
        for name in ("clean", "clean hooked"):
            assert [of_rank["error"] for of_rank in done.seen(name)] == [None] * done.spec.world_size
