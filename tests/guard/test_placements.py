"""Fewer than three nodes: what is wrong is still caught, nobody is named, and the limits are stated.

By default each fault is tried on two nodes and on one in turn; `BITWITNESS_EXHAUSTIVE=1` tries each on both.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.training import Plan, run

pytestmark = pytest.mark.timeout(200)

STEP = 2
PLAN = Plan(steps=STEP + 1)
REBUILT = replace(PLAN, rebuild=True)
FAULTS = [
    (Fault("matmul", 1, STEP), PLAN),
    (Fault("matmul", 1, STEP, True), PLAN),
    (Fault("layer norm", 1, STEP, True), PLAN),
    (Fault("nan gradient", 1, STEP), PLAN),
    (Fault("token", 1, STEP), REBUILT),
    (Fault("inf after the all-reduce", 1, STEP), PLAN),
    (Fault("weight sign", 1, STEP), PLAN),
    (Fault("matmul", 1, STEP, True, "replays"), PLAN),
]
EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
PLACED = [
    (nodes, fault, plan)
    for nodes in (1, 2)
    for number, (fault, plan) in enumerate(FAULTS)
    if EXHAUSTIVE or nodes == 2 - number % 2
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Four ranks, on two nodes and on one."""
    scenarios = [
        Scenario(f"{nodes} nodes {fault.name}", run, plan.with_faults(fault), per_node=4 // nodes)
        for nodes, fault, plan in PLACED
    ]
    scenarios += [Scenario(f"{nodes} nodes clean", run, PLAN, per_node=4 // nodes) for nodes in (1, 2)]
    return launch(scenarios, 4, tmp_path_factory.mktemp("four"))


ALONE = {
    "clean": PLAN,
    "plain": replace(PLAN, guarded=False),
    "nan": PLAN.with_faults(Fault("nan gradient", 0, STEP)),
    "persistent nan": PLAN.with_faults(Fault("nan gradient", 0, STEP, True)),
    "matmul": PLAN.with_faults(Fault("matmul", 0, STEP)),
    "persistent matmul": PLAN.with_faults(Fault("matmul", 0, STEP, True)),
    "scaler": replace(PLAN, scaler={"init_scale": 256.0}),
    "accumulated": replace(PLAN, accumulate=2),
    "no audits": replace(PLAN, policy={"audit": "off"}).with_faults(Fault("nan gradient", 0, STEP)),
}


@pytest.fixture(scope="module", params=["no process group", "DDP of one rank"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One process."""
    scenarios = [Scenario(name, run, plan) for name, plan in ALONE.items()]
    return launch(scenarios, 1, tmp_path_factory.mktemp("alone"), process_group=request.param != "no process group")


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [(nodes, fault) for nodes, fault, _ in PLACED],
    ids=[f"{nodes} nodes {fault.name}" for nodes, fault, _ in PLACED],
)
def test_caught_and_nobody_named(four: Launch, nodes: int, fault: Fault) -> None:
    seen = four.seen(f"{nodes} nodes {fault.name}")
    errors = [of_rank["error"] for of_rank in seen]
    assert [error and error["type"] for error in errors] == ["CorruptionDetected"] * 4
    verdict = errors[0]["verdict"]
    assert all(error["verdict"] == verdict and error["readable"] for error in errors)
    assert (verdict["status"], verdict["ranks"], verdict["step"]) == ("unattributed", [], STEP)
    assert 1 in verdict["candidates"]
    assert seen[1]["struck"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_limits_of_a_placement_are_stated(four: Launch, nodes: int) -> None:
    for rank, seen in enumerate(four.seen(f"{nodes} nodes clean")):
        assert seen["error"] is None
        (limit,) = [limit for limit in seen["limits"] if "node" in limit]
        assert limit.startswith("one node: " if nodes == 1 else "two nodes: ")
        assert "nobody can be named" in limit or "names nobody" in limit
        assert (limit in seen["logged"]) == (rank == 0)


def test_one_process_says_what_it_cannot_do(alone: Launch) -> None:
    (seen,) = alone.seen("clean")
    assert seen["error"] is None
    assert seen["states"] == alone.seen("plain")[0]["states"]
    (limit,) = [limit for limit in seen["limits"] if limit.startswith("one process: ")]
    assert limit in seen["logged"]


@pytest.mark.parametrize("name", ["nan", "persistent nan", "no audits"])
def test_one_process_catches_nan(alone: Launch, name: str) -> None:
    (seen,) = alone.seen(name)
    assert seen["error"]["type"] == "CorruptionDetected"
    verdict = seen["error"]["verdict"]
    assert (verdict["status"], verdict["check"], verdict["step"]) == ("unattributed", "numerics", STEP)
    assert "no other rank could replay it" in verdict["reason"] or "no replay could tell" in verdict["reason"]
    assert seen["error"]["readable"]


@pytest.mark.parametrize("name", ["matmul", "persistent matmul"])
def test_one_process_blames_nobody(alone: Launch, name: str) -> None:
    """What repeats differently on the same device is seen; what is wrong every time is not, and that is said."""
    (seen,) = alone.seen(name)
    assert seen["struck"]
    if name == "matmul":
        assert seen["error"]["verdict"]["status"] == "unattributed"
    else:
        assert seen["error"] is None


@pytest.mark.parametrize("name", ["scaler", "accumulated"])
def test_one_process_trains(alone: Launch, name: str) -> None:
    (seen,) = alone.seen(name)
    assert seen["error"] is None
    assert seen["updated"] == [True] * PLAN.steps
