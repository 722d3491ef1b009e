"""Checkpoints that somebody breaks: each is refused by name, the one before is taken, and the end is that of a run never hit."""

from __future__ import annotations

import pytest

from tests.guard.harness import Launch, Scenario, launch
from tests.guard.saving import DAMAGE, NAMES, OTHERS, Copies, damaged, forbidden, mismatched, none_left, two_saves

pytestmark = pytest.mark.timeout(300)

SOURCE = "two saves"
FOLDER = "two_saves"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    scenarios = [
        Scenario(SOURCE, two_saves),
        Scenario("damaged", damaged, Copies(FOLDER, tuple(DAMAGE))),
        Scenario("none left", none_left, FOLDER),
        Scenario("forbidden", forbidden, FOLDER),
        Scenario("mismatched", mismatched, FOLDER),
    ]
    return launch(scenarios, 3, tmp_path_factory.mktemp("checkpoints"), deadline=200, collective_timeout=20)


def test_saves_change_nothing(done: Launch) -> None:
    for seen in done.seen(SOURCE):
        assert seen["final"] == seen["expected"]
        assert seen["visible"] == ["step-00000002", "step-00000004"]
        newest, oldest = seen["labels"]
        assert (newest["step"], oldest["step"]) == (4, 2)
        assert sorted(newest["files"]) == [f"rank-0000{rank}.pt" for rank in range(3)] + ["shared.pt"]
        assert newest["read_back"] == "each file by a rank on another node; the weights by rank 1 on n1"
        assert newest["passed"]["replicas"] == newest["passed"]["numerics"] == 3
        assert newest["passed"]["replay"] == 0, "only the first step was audited"
        assert newest["failed"] == {}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_refused_by_name(done: Launch, name: str) -> None:
    for rank, of_rank in enumerate(done.seen("damaged")):
        seen = of_rank[name]
        assert seen["from"] == 2
        assert seen["right"], "training from the checkpoint before it ends elsewhere"
        (event,) = seen["journal"]
        ((refused, reason),) = event["refused"]
        assert (event["step"], refused) == (2, "step-00000004")
        assert all(word in reason for word in NAMES[name]), reason
        told = [line for line in seen["logged"] if "step-00000004 is refused" in line]
        assert [reason in line for line in told] == ([True] if rank == 0 else [])


def test_none_left(done: Launch) -> None:
    for seen in done.seen("none left"):
        error = seen["error"]
        assert error["type"] == "CheckpointError"
        assert all(
            words in error["message"]
            for words in ("none of the 2 checkpoints", "step-00000004: shared.pt differs", "step-00000002", "no label")
        )
        assert (seen["untouched"], seen["unchanged"], seen["trained"]) == (True, True, True)


def test_an_incident_forbids_what_it_casts_doubt_on(done: Launch) -> None:
    for rank, seen in enumerate(done.seen("forbidden")):
        assert seen["from"] == 2
        if rank == 0:
            assert any("step-00000004 is refused: incident" in line and "(replay)" in line for line in seen["logged"])
        assert seen["saved"] == "step-00000004", "the distrusted one makes way"
        assert seen["visible"] == ["step-00000002", "step-00000004"]
        assert seen["again"] == 4
        assert seen["right"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_job_is_told_so(done: Launch, name: str) -> None:
    for seen in done.seen("mismatched"):
        error = seen[name]["error"]
        assert error is not None, "was accepted"
        assert error["type"] == "ConfigurationError", error["message"]
        assert all(word in error["message"] for word in OTHERS[name][2]), error["message"]
        assert seen[name]["unchanged"]


def test_another_number_of_ranks(done: Launch) -> None:
    for seen in done.seen("mismatched"):
        error = seen["world"]["error"]
        assert error["type"] == "ConfigurationError"
        assert "saved by 4 ranks, this job has 3" in error["message"]
