"""The strongest test: hit, caught, moved to another node, resumed in the midst of an epoch; the end is that of a run never hit.

By default each kind of fault is tried once on the first placement and one on the second, on the first, a middle and the last node in
turn, and a loader with workers and what is accumulated and scaled among the ways in which a job can be made; `BITWITNESS_EXHAUSTIVE=1`
tries all of them on all three placements, with a loader with a worker.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, launch
from tests.guard.recovery import Course, never_hit, recovered

pytestmark = pytest.mark.timeout(400)

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
PLACEMENTS = {"3 x 1": (3, 1), "3 x 2": (3, 2), "4 x 2": (4, 2)}
"""Nodes and ranks on each."""
WORKERS = 1 if EXHAUSTIVE else 0
if not EXHAUSTIVE:
    del PLACEMENTS["4 x 2"]

FAULTS = {"matmul": (4, True), "weight sign": (4, False), "gradient x 4": (7, True)}
"""When it begins, and whether it stays. A weight is changed once, after the update."""

VARIANTS = {
    "no workers": Course(workers=0),
    "two workers": Course(workers=2),
    "accumulated": Course(accumulate=2),
    "scaler": Course(scaler=True),
    "third epoch": Course(steps=19, every=8),
    "end of an epoch": Course(steps=17, every=7),
}
if not EXHAUSTIVE:
    VARIANTS = {
        "two workers": VARIANTS["two workers"],
        "accumulated, scaler": Course(accumulate=2, scaler=True, workers=0),
    }


def _cases() -> list[tuple[str, str, int]]:
    """Placement, fault and node, as the top of this file says."""
    cases = []
    for which, (placement, (nodes, _)) in enumerate(PLACEMENTS.items()):
        for index, fault in enumerate(FAULTS):
            for position, node in enumerate((0, nodes // 2, nodes - 1)):
                if EXHAUSTIVE or (position == index and which in (0, index)):
                    cases.append((placement, fault, node))
    return cases


def _course(placement: str, fault: str, node: int) -> Course:
    step, persistent = FAULTS[fault]
    per_node = PLACEMENTS[placement][1]
    hit = Fault(fault, node * per_node + per_node - 1, step, persistent)
    return Course(per_node=per_node, workers=WORKERS, fault=hit)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    done = {}
    for placement, (nodes, per_node) in PLACEMENTS.items():
        scenarios = [Scenario("never hit", never_hit, Course(per_node=per_node, workers=WORKERS), per_node)]
        scenarios += [
            Scenario(f"{fault} on node {node}", recovered, _course(of, fault, node), per_node)
            for of, fault, node in _cases()
            if of == placement
        ]
        folder = tmp_path_factory.mktemp(placement.replace(" ", ""))
        done[placement] = launch(scenarios, nodes * per_node, folder, deadline=350 if EXHAUSTIVE else 120)
    return done


@pytest.mark.parametrize(("placement", "fault", "node"), _cases())
def test_recovered_is_never_hit(launches: dict[str, Launch], placement: str, fault: str, node: int) -> None:
    course = _course(placement, fault, node)
    assert course.fault is not None
    hit, begin = course.fault.rank, course.fault.step
    reference = launches[placement].seen("never hit")
    for rank, seen in enumerate(launches[placement].seen(f"{fault} on node {node}")):
        first, second = seen["hit"], seen["resumed"]
        assert (first["struck"] > 0) == (rank == hit)
        assert first["error"]["type"] == "CorruptionDetected"
        assert first["error"]["step"] == begin
        assert first["error"]["verdict"]["ranks"] == [hit]
        assert second["error"] is None
        assert second["from"] == begin // 3 * 3, "the newest checkpoint before the fault"
        assert second["losses"] == reference[rank]["losses"][second["from"] :]
        assert second["final"] == reference[rank]["final"]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    scenarios = []
    for name, course in VARIANTS.items():
        scenarios.append(Scenario(f"{name}, never hit", never_hit, course))
        scenarios.append(Scenario(name, recovered, replace(course, fault=_late(course))))
    return launch(scenarios, 3, tmp_path_factory.mktemp("variants"), deadline=120)


def _late(course: Course) -> Fault:
    """In the second stretch after the last save."""
    return Fault("matmul", 1, (course.steps - 1) // course.every * course.every + 1, persistent=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_however_the_job_is_made(variants: Launch, name: str) -> None:
    course = VARIANTS[name]
    reference = variants.seen(f"{name}, never hit")
    for rank, seen in enumerate(variants.seen(name)):
        assert seen["hit"]["error"]["verdict"]["ranks"] == [1]
        assert seen["resumed"]["from"] == (course.steps - 1) // course.every * course.every
        assert seen["resumed"]["losses"] == reference[rank]["losses"][-len(seen["resumed"]["losses"]) :]
        assert seen["resumed"]["final"] == reference[rank]["final"]


def test_the_reference_trains(launches: dict[str, Launch]) -> None:
    for done in launches.values():
        losses = [loss for seen in done.seen("never hit") for loss in seen["losses"]]
        assert len(set(losses)) == len(losses)
