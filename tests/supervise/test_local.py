"""`bitwitness run` on one machine, with every kind of end, on workers without torch."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitwitness.runfiles import RunFiles, read_incident
from tests.supervise import drive
from tests.supervise.drive import Place, until

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
LONG = "2000"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with drive.place(tmp_path) as place:
        yield place


def nodes_of(place: Place) -> list[list[str]]:
    return [event["nodes"] for event in place.events("started")]


def sorted_incidents(place: Place) -> list[Path]:
    """Oldest first, also those of one second."""
    return sorted(RunFiles(place.run_dir).incidents(), key=lambda path: read_incident(path).record["generation"])


def test_a_job_that_finishes(here: Place) -> None:
    done = here.run("3", nproc_per_node=2)
    assert done.wait() == 0, done.output
    summary = json.loads(next(line for line in done.output.splitlines() if line.startswith("{")))
    assert (summary["outcome"], summary["generations"], summary["recoveries"]) == ("finished", 1, [])
    assert here.processes() == {}


def test_persistent_corruption_moves_to_a_spare(here: Place) -> None:
    done = here.run("4", "persistent@*:2:1", nodes=3, nproc_per_node=2, spares=1)
    assert done.wait() == 0, done.output
    assert nodes_of(here) == [["node-0", "node-1", "node-2"], ["node-0", "node-1", "node-3"]]
    quarantine = RunFiles(here.run_dir).quarantine.read()
    assert list(quarantine.denied_devices) == ["node-2/cpu-0"]
    (incident,) = RunFiles(here.run_dir).incidents()
    acts = [act["action"] for act in RunFiles(here.run_dir).actions(incident.name)]
    assert acts == ["quarantined", "restarted"]
    denied, started = here.events("quarantine")[0]["time"], here.events("started")[1]["time"]
    assert denied <= started
    # The same command again: the device stays out, and the spare is taken from the start.
    again = here.run("3", nodes=3, nproc_per_node=2, spares=1)
    assert again.wait() == 0, again.output
    assert nodes_of(here)[-1] == ["node-0", "node-1", "node-3"]
    # Without a spare nobody waits in a rendezvous: it is said who is refused, and nothing is started.
    short = here.run("3", nodes=3, nproc_per_node=2)
    assert short.wait() == 2, short.output
    assert "node-2 is refused (device node-2/cpu-0 is in quarantine since" in here.events("ended")[-1]["text"]
    assert len(nodes_of(here)) == 3


def test_what_moves_with_the_number_of_a_rank_denies_one_device_and_no_more(here: Place) -> None:
    """The spare is named in turn: a program that treats one rank apart looks like that."""
    done = here.run("3", "persistent@*:1:1", "moved@*:1:2", nodes=3, nproc_per_node=2, spares=2)
    assert done.wait() == 3, done.output
    assert nodes_of(here) == [["node-0", "node-1", "node-2"], ["node-0", "node-1", "node-3"]]
    assert list(RunFiles(here.run_dir).quarantine.read().denied_devices) == ["node-2/cpu-0"]
    assert "what stays with the number of a rank is software" in here.events("ended")[-1]["text"]


def test_transient_corruption_is_a_strike_until_there_are_too_many(here: Place) -> None:
    done = here.run("3", "transient@*:1:*", nodes=3, nproc_per_node=2, strikes=2)
    assert done.wait() == 160, done.output
    assert nodes_of(here) == [["node-0", "node-1", "node-2"]] * 2
    quarantine = RunFiles(here.run_dir).quarantine.read()
    assert quarantine.denied_devices["node-2/cpu-0"].reason == "2 strikes within 7 days"
    first, second = (
        [act["action"] for act in RunFiles(here.run_dir).actions(path.name)] for path in sorted_incidents(here)
    )
    assert (first, second) == (["strike", "restarted"], ["strike", "quarantined", "stopped"])  # no spare was left


@pytest.mark.parametrize(("reaction", "strikes"), [("retry", 1), ("record", 0)])
def test_what_a_guard_got_over_is_a_strike_unless_it_only_watches(here: Place, reaction: str, strikes: int) -> None:
    done = here.run("3", f"{reaction}@*:1:*", nodes=3, nproc_per_node=2)
    assert done.wait() == 0, done.output
    assert len(sorted_incidents(here)) == 1
    assert RunFiles(here.run_dir).quarantine.read().strikes_within("node-2/cpu-0", 3600) == strikes


def test_unattributed_corruption_is_tried_once_more_with_every_step_audited(here: Place) -> None:
    done = here.run("3", "unattributed@*:1:*", nodes=3, nproc_per_node=2)
    assert done.wait() == 3, done.output
    assert [event["suspicion"] for event in here.events("started")] == [False, True]
    assert {line.split()[3] for line in here.steps() if line.split()[1] == "2"} == {"1"}
    assert RunFiles(here.run_dir).quarantine.read().names() == []


FAILURES: list[tuple[str, int, str]] = [
    ("raise@1:1:*", 1, "rank 1 on node-0 ended with exit code 1: ValueError: the data set is gone"),
    ("die@2:1:*", 137, "rank 2 on node-1 was killed by SIGKILL"),
    ("vanish@1:1:*", 1, "rank 1 ended with exit code 0 without a mark"),
    ("lose@*:1:*", 4, "the guard failed, which says nothing about the numbers: rank"),
]


@pytest.mark.parametrize(("plan", "code", "said"), FAILURES, ids=[one[0] for one in FAILURES])
def test_other_failures_are_shown_and_never_called_corruption(here: Place, plan: str, code: int, said: str) -> None:
    done = here.run(LONG, plan, nproc_per_node=2)
    assert done.wait() == code, done.output
    outcome = here.events("outcome")[0]
    assert said in outcome["text"]
    assert "corruption" not in " ".join(event["text"] for event in here.events())
    if plan.startswith("raise"):
        assert any("ValueError: the data set is gone" in line for line in outcome["details"])


def test_a_run_dir_that_cannot_be_written_any_more_is_named_and_what_the_workers_said(here: Place) -> None:
    done = here.run(LONG, "spoil@0:1:1", "raise@0:2:1", nodes=1, lost_after=1.0)
    assert done.wait() == 1, done.output
    first, *_, last = [line for line in done.output.splitlines() if line.startswith(("[storage]", "Error:"))]
    why = f"{here.run_dir}/supervise/session.json could not be written: Is a directory"
    known = "rank 0 on node-0 ended with exit code 1: ValueError: the data set is gone"
    assert first == f"[storage] the run directory fails, which is borne for 1 s: {why}"
    assert last == f"Error: the run directory has failed for 1 s: {why}; {known}"
    assert f"[storage] known, and not to be written: {known}" in done.output
    assert "is lost" not in done.output


def test_the_cause_is_named_and_not_who_lost_it(here: Place) -> None:
    done = here.run(LONG, "lose@0:1:*", "lose@2:1:*", "slowly@3:1:*", nproc_per_node=2, settle=5.0)
    assert done.wait() == 1, done.output
    assert "rank 3 on node-1 ended with exit code 1: RuntimeError: the real reason" in here.events("outcome")[0]["text"]


def test_a_hang_names_the_ranks_that_are_behind(here: Place) -> None:
    done = here.run(LONG, "hang@1:2:*", "hang@0:5:*", hang_timeout=1.5)
    assert done.wait() == 124, done.output
    outcome = here.events("outcome")[0]
    assert outcome["outcome"] == "hang"
    assert outcome["details"][0].startswith("rank 1 on node-1 is at step 2, in forward, since")
    assert "rank 0" not in outcome["details"][0] + outcome["details"][1]
    log = next((here.run_dir / "logs").glob("*/*/node-1/*/*/0/stderr.log"))
    assert "job.py" in log.read_text()  # the stacks


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_each_rank_leaves_its_loop(here: Place, number: int, code: int) -> None:
    driven = here.start(LONG, nproc_per_node=2)
    until(lambda: len({line.split()[0] for line in here.steps()}) == 4)
    # Slurm sends SIGUSR1 to every process of a step.
    for pid in here.processes() if number == signal.SIGUSR1 else [driven.process.pid]:
        os.kill(pid, number)
    assert driven.wait() == code, driven.output
    assert "every rank left its loop by itself" in here.events("outcome")[0]["text"]


def test_who_does_not_leave_is_ended_after_the_grace_or_a_second_signal(here: Place) -> None:
    driven = here.start(LONG, "deaf@1:0:*", grace=0.5)
    until(lambda: len(here.steps()) > 6)
    os.kill(driven.process.pid, signal.SIGTERM)
    assert driven.wait() == 143, driven.output
    assert "ended before they left their loop: rank 1" in here.events("outcome")[0]["text"]
    impatient = here.start(LONG, "deaf@*:0:*", grace=600.0)
    before = len(here.steps())
    until(lambda: len(here.steps()) > before + 6)
    os.kill(impatient.process.pid, signal.SIGINT)
    until(lambda: here.events("stopping")[1:])
    os.kill(impatient.process.pid, signal.SIGINT)
    assert impatient.wait() == 130, impatient.output


def test_stopped_by_a_signal_that_only_the_workers_got(here: Place) -> None:
    driven = here.start(LONG)
    until(lambda: len({line.split()[0] for line in here.steps()}) == 2)
    for pid in here.processes("-m bitwitness.supervise.worker"):
        if "plain_agent" not in here.processes()[pid]:
            os.kill(pid, signal.SIGTERM)
    assert driven.wait() == 143, driven.output


def victims(here: Place, who: str, driven: drive.Driven) -> list[int]:
    if who == "leader":
        return [driven.process.pid]
    if who == "everything":
        return list(here.processes())
    words = {
        "wrapper": "-m bitwitness.supervise.wrapper",
        "agent": "-m bitwitness.supervise.plain_agent",
        "worker": "supervise.worker",
    }
    found = here.processes(words[who])
    return [pid for pid, command in found.items() if who != "worker" or "plain_agent" not in command]


@pytest.mark.parametrize("who", ["agent", "wrapper", "everything", *(["worker", "leader"] if EXHAUSTIVE else [])])
def test_killed_at_a_random_instant_nobody_stays_and_the_same_command_works(here: Place, who: str, seed: int) -> None:
    draw = random.Random(f"{seed} {who}")
    driven = here.start("40", "child@*:1:*", nproc_per_node=2)
    wanted = draw.randrange(1, 60)
    until(lambda: len(here.steps()) >= wanted or driven.process.poll() is not None)
    found = until(lambda: victims(here, who, driven))
    for pid in found if who == "everything" else [draw.choice(found)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pytest.skip("it was gone already")
    assert driven.wait() not in (0, 160, 3)
    if who == "everything":  # nobody is left to sweep up a child that has left the chain of parents
        until(lambda: not here.processes("supervise"))
        here.kill_all()
    until(lambda: not here.processes())
    again = here.run("3", nproc_per_node=2)
    assert again.wait() == 0, again.output


def test_a_lost_wrapper_is_replaced_where_restarts_are_allowed(here: Place) -> None:
    driven = here.start("30", max_restarts=2, spares=1)
    until(lambda: len(here.steps()) > 4)
    os.kill(next(pid for pid, member in _members(here).items() if member == "node-1"), signal.SIGKILL)
    until(lambda: len(here.events("started")) == 2)  # the spare has the place
    until(lambda: any(line.split()[1] == "2" for line in here.steps()))
    os.kill(next(pid for pid, member in _members(here).items() if member == "node-0"), signal.SIGKILL)
    assert driven.wait() == 0, driven.output
    assert nodes_of(here) == [["node-0", "node-1"], ["node-0", "node-2"], ["node-1", "node-2"]] or nodes_of(here)[
        2
    ] == [
        "node-0",
        "node-2",
    ]


def _members(here: Place) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in here.events("joined"):
        words: Any = event["text"].split("process ")[1].rstrip(")")
        found[int(words)] = event["node"]
    return {pid: node for pid, node in found.items() if pid in here.processes()}


def test_a_second_run_in_the_same_place_is_refused(here: Place) -> None:
    first = here.start(LONG)
    until(here.steps)
    second = here.run("3")
    assert second.wait() == 2, second.output
    assert "is at work in" in second.output
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait() == 143


def test_an_incident_that_a_dead_supervisor_left_is_acted_upon(here: Place) -> None:
    driven = here.start(LONG, "persistent@0:1:1", "hang@1:0:1", "hang@2:0:1", nodes=3, nproc_per_node=2)
    until(lambda: RunFiles(here.run_dir).incidents() if here.run_dir.exists() else [])
    os.kill(driven.process.pid, signal.SIGKILL)
    driven.wait()
    until(lambda: not here.processes())
    if here.events("quarantine"):
        pytest.skip("it had acted already")
    again = here.run("3", nodes=3, nproc_per_node=2)
    assert again.wait() == 2, again.output
    assert list(RunFiles(here.run_dir).quarantine.read().denied_devices) == ["node-2/cpu-0"]
