"""The guard's own mishaps: nobody hangs, everybody else is told who it was, and none of it is called corruption.

Both ways to lose a rank in the comparison of replicas are tried with `BITWITNESS_EXHAUSTIVE=1`.
"""

from __future__ import annotations

import os

import pytest

from bitwitness.runfiles import RunFiles
from tests.guard.failures import Mishap, disk_refuses, run_mishap
from tests.guard.faults import Fault
from tests.guard.harness import Launch, Scenario, Seen, launch

pytestmark = pytest.mark.timeout(300)

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
PATIENCE = 25.0
"""Seconds beyond the time-out: what is left of a second's slice, the guard's grace of 5 s, and a busy machine."""

RAISE = [
    Mishap("raise", "numerics"),
    Mishap("raise", "replay"),
    Mishap("raise", "replicas", rank=0),
    Mishap("raise", "repeats", rank=2, faults=(Fault("matmul", 1),)),
]
SLEEP = [
    Mishap("sleep", "replay", rank=1),
    Mishap("sleep", "between", rank=2),
    Mishap("sleep", "numerics", rank=0, seconds=4.0),  # back before the others have told what they miss
]
KILL = [
    Mishap("kill", "replay", rank=1),
    Mishap("kill", "replay", rank=0),
    Mishap("kill", "backward", rank=1),
    Mishap("kill", "incident", rank=0, faults=(Fault("matmul", 1),)),
]
if EXHAUSTIVE:
    SLEEP.append(Mishap("sleep", "replicas", rank=0))
    KILL.append(Mishap("kill", "replicas", rank=2))


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Mishaps that every rank survives."""
    scenarios = [Scenario(mishap.name, run_mishap, mishap) for mishap in (*RAISE, *SLEEP)]
    scenarios.append(Scenario("disk refuses", disk_refuses, ""))
    scenarios.append(Scenario("afterwards", run_mishap, Mishap("raise", "replay", step=99)))
    return launch(scenarios, 3, tmp_path_factory.mktemp("survived"), deadline=180)


@pytest.fixture(scope="module", params=KILL, ids=lambda mishap: mishap.name)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Mishap, Launch]:
    """A launch of its own for each rank that dies."""
    mishap: Mishap = request.param
    scenario = Scenario(mishap.name, run_mishap, mishap)
    return mishap, launch([scenario], 3, tmp_path_factory.mktemp("killed"), deadline=90, collective_timeout=15)


def is_failure_of_the_guard(error: Seen) -> bool:
    return "GuardFailure" in error["family"] and "CorruptionDetected" not in error["family"]


@pytest.mark.parametrize("mishap", RAISE, ids=lambda mishap: mishap.name)
def test_a_check_that_raises_is_named_everywhere(survived: Launch, mishap: Mishap) -> None:
    for seen in survived.seen(mishap.name):
        error = seen["error"]
        assert error["type"] == "CheckFailed"
        assert is_failure_of_the_guard(error)
        assert error["step"] == mishap.step
        assert f"rank {mishap.rank}: ArithmeticError: this check misfires" in error["message"]
        assert f"(node n{mishap.rank})" in error["message"]
        assert "says nothing about the numbers" in error["message"]
        assert ("a replay had disagreed" in error["message"]) == (mishap.where == "repeats")
    assert not RunFiles(survived.folder(mishap.name) / "run").incidents()


@pytest.mark.parametrize("mishap", SLEEP, ids=lambda mishap: mishap.name)
def test_a_rank_that_is_too_slow_is_named(survived: Launch, mishap: Mishap) -> None:
    for rank, seen in enumerate(survived.seen(mishap.name)):
        error = seen["error"]
        assert error["type"] == "RankLost"
        assert is_failure_of_the_guard(error)
        assert error["step"] == mishap.step
        named = f"rank {mishap.rank} (node n{mishap.rank}), "
        if rank == mishap.rank or mishap.seconds < mishap.timeout + 2:
            assert f"Too late: {named}" in error["message"]
        else:
            assert f"Did not answer: {named}last heard" in error["message"]
            assert mishap.timeout - 1 <= seen["waited"] <= mishap.timeout + PATIENCE
    assert len({seen["weights"] for seen in survived.seen(mishap.name)}) == 1


def test_a_rank_that_dies_is_named_in_time(killed: tuple[Mishap, Launch]) -> None:
    mishap, done = killed
    assert not done.timed_out
    assert done.exit_codes[mishap.rank] == -9
    survivors = done.survivors(mishap.name)
    assert sorted(survivors) == sorted({0, 1, 2} - {mishap.rank}), done.output(0) + done.output(2)
    for seen in survivors.values():
        error = seen["error"]
        told = " ".join([error["message"], *error["notes"]])
        assert error["step"] == mishap.step
        assert seen["waited"] <= mishap.timeout + PATIENCE
        if mishap.where == "backward":  # the job's own collective and error: nobody is known to have failed, or accused
            assert error["type"] == "RuntimeError"
            assert "a collective of the job failed at step 2. No rank has told that it failed" in told
            continue
        if mishap.rank == 0:  # the store died with it
            assert "started with rank 0, node n0" in told
        else:
            place = f"rank {mishap.rank} (node n{mishap.rank})"
            # On a busy machine the store may leave with rank 0 before this rank has asked it when the lost one was last heard.
            assert f"{place}, last heard" in told or f"Did not answer before rank 0 left: {place}." in told
        if mishap.where == "incident":  # what was known by then is told all the same
            assert error["type"] == "CorruptionDetected"
            assert (error["verdict"]["ranks"], error["incident"]) == ([1], None)
        else:
            assert error["type"] == "RankLost"
            assert is_failure_of_the_guard(error)


def test_journals_of_the_dead_are_readable(killed: tuple[Mishap, Launch]) -> None:
    mishap, done = killed
    files = RunFiles(done.folder(mishap.name) / "run")
    for rank in range(3):
        assert next(files.read_journal(rank))["kind"] == "start"
    passed = [one for one in files.read_journal(mishap.rank) if one.get("outcome") == "passed"]
    if mishap.where == "incident":  # every number was finite, and that is on record before the replay that failed
        passed = [one for one in passed if one["check"] != "numerics"]
    assert all(one["last"] < mishap.step for one in passed), "a step that never ended is called verified"


def test_corruption_is_told_even_if_the_disk_refuses(survived: Launch) -> None:
    for seen in survived.seen("disk refuses"):
        error = seen["error"]
        assert error["type"] == "CorruptionDetected"
        assert error["verdict"]["ranks"] == [1]
        assert error["incident"] is None
        assert "could not be" in error["message"]


def test_the_job_can_be_guarded_anew_after_all_that(survived: Launch) -> None:
    assert [seen["error"] for seen in survived.seen("afterwards")] == [None] * 3
