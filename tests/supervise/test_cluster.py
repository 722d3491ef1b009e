"""One wrapper a node, as a scheduler starts them: who joins whom, who is refused, and what an absent leader means."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import Session, SupervisionFiles
from tests.supervise import drive
from tests.supervise.drive import Driven, Place, until

LONG = "2000"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with drive.place(tmp_path) as place:
        yield place


def wrapper(here: Place, index: int, *plan: str, name: str = "", devices: str = "", **changes: object) -> Driven:
    env = {"BITWITNESS_NODE": name or f"host-{index}"}
    return here.start(*plan, index=index, env=env | ({"BITWITNESS_DEVICES": devices} if devices else {}), **changes)


def nodes_of(here: Place) -> list[list[str]]:
    return [event["nodes"] for event in here.events("started")]


def test_what_a_dead_leader_left_is_not_joined_and_all_end_alike(here: Place) -> None:
    files = SupervisionFiles(here.run_dir)
    files.create("old")
    stale = Session("old", "elsewhere", 1, beat=7, job={}, preparing=1, generation=1)
    files.write_session(stale)
    others = [wrapper(here, index, "4") for index in (1, 2)]
    until(lambda: len(here.processes("drive")) == 2)
    first = wrapper(here, 0, "4")  # it waits until it is clear that nobody leads, then does
    assert [driven.wait() for driven in (first, *others)] == [0, 0, 0], first.output
    assert files.read_members("old") == []
    assert nodes_of(here) == [["host-0", "host-1"]]  # host-2 was a spare
    assert "host-2 has joined" in first.output


def test_a_denied_device_is_refused_under_another_name_and_rank(here: Place) -> None:
    RunFiles(here.run_dir).create()
    RunFiles(here.run_dir).quarantine.deny_devices(["GPU-bad"], node="host-7", reason="persistent corruption")
    zero = wrapper(here, 0, "3", devices="GPU-bad", name="renamed")
    others = [wrapper(here, index, "3", devices=f"GPU-{index}") for index in (1, 2)]
    assert [driven.wait() for driven in (zero, *others)] == [0, 0, 0], zero.output
    assert nodes_of(here) == [["host-2", "host-1"]]  # led by the one that takes no part
    assert "renamed does not take part: device GPU-bad (then on node host-7) is in quarantine" in zero.output


def test_a_signal_to_one_stops_all(here: Place) -> None:
    both = [wrapper(here, index, LONG) for index in (0, 1)]
    until(lambda: len({line.split()[0] for line in here.steps()}) == 2)
    os.kill(both[1].process.pid, signal.SIGTERM)
    assert [driven.wait() for driven in both] == [143, 143], both[0].output
    assert "every rank left its loop by itself" in here.events("outcome")[0]["text"]


def test_a_leader_that_died_is_replaced_and_the_job_goes_on(here: Place) -> None:
    zero, one = (wrapper(here, index, "30", "hang@0:20:1") for index in (0, 1))
    until(lambda: len({line.split()[0] for line in here.steps()}) == 2)
    os.kill(zero.process.pid, signal.SIGKILL)
    zero.wait()
    until(lambda: "host-1: nothing heard of the leader" in one.output)
    until(lambda: not here.processes("-m bitwitness.supervise.plain_agent"))
    again = wrapper(here, 0, "30", "hang@0:20:1")  # the same command: whose generation 1 hangs again at 20
    until(lambda: len(here.events("started")) == 2)
    os.kill(again.process.pid, signal.SIGTERM)
    assert [again.wait(), one.wait()] == [143, 143], one.output


def test_a_node_that_falls_silent_is_lost_and_a_spare_takes_its_place(here: Place) -> None:
    zero, one, two = (wrapper(here, index, "40", max_restarts=1) for index in (0, 1, 2))
    until(lambda: len({line.split()[0] for line in here.steps()}) == 2)
    os.kill(one.process.pid, signal.SIGKILL)
    assert [zero.wait(), two.wait()] == [0, 0], zero.output
    assert nodes_of(here) == [["host-0", "host-1"], ["host-0", "host-2"]]
    assert "nothing was heard of its wrapper on" in here.events("lost")[0]["why"]


def test_waiting_for_another_node_when_none_is_left(here: Place) -> None:
    names = {"NAMES": "host-0,host-1,host-2"}
    plan = ("3", "persistent@*:1:1")

    def start(index: int) -> Driven:
        env = {"BITWITNESS_NODE": f"host-{index}", **names}
        return here.start(*plan, index=index, env=env, nodes=3, nproc_per_node=2, when_short="wait")

    first = [start(index) for index in range(3)]
    until(lambda: here.events("refused"))
    last = start(3)
    assert [driven.wait() for driven in (*first, last)] == [0, 0, 0, 0], first[0].output
    assert nodes_of(here) == [["host-0", "host-1", "host-2"], ["host-0", "host-1", "host-3"]]


def test_without_a_leader_a_wrapper_gives_up(here: Place) -> None:
    alone = wrapper(here, 1, "3", join_timeout=0.5)
    assert alone.wait() == 137
    assert "the wrapper with node rank 0 leads; is it running" in alone.output


def test_too_few_wrappers(here: Place) -> None:
    alone = wrapper(here, 0, "3", join_timeout=1.0)
    assert alone.wait() == 2
    assert (
        "too few nodes: 2 nodes are needed: host-0 is ready (waited 1 s, --join-timeout); nothing was started"
        in alone.output
    )


def test_wrappers_that_disagree_or_share_a_name_are_told(here: Place) -> None:
    zero = wrapper(here, 0, "3", join_timeout=8.0)
    until(lambda: here.events("joined"))
    other = wrapper(here, 1, "4")
    namesake = wrapper(here, 1, "3", name="host-0")
    assert other.wait() == 2
    assert "started with something else than the leader" in other.output
    assert "args ['4'] here, ['3'] there" in other.output
    assert namesake.wait() == 2
    assert "two wrappers call themselves node 'host-0'" in namesake.output
    os.kill(zero.process.pid, signal.SIGTERM)
    assert zero.wait() == 143
