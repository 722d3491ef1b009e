"""`kill -9` by SageMaker itself, when it has done what it was asked for: the next controller brings that to the same end.

The contract of clusters ends a controller around every call, with an exception; here the processes are real ones.
They are forked from a process that has no threads; SageMaker and the scheduler live on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.fake import FakeCluster
from bitwitness.fleet.clusters.hyperpod import HyperPodCluster
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeNodes, FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Book
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from tests.fleet.hyperpod.pod import POLICY
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.rehearsal import HandClock

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([__name__])
MEMORY = ("xid:64", "memory", "strong", "no spare rows")


def live(folder: Path, url: dict[str, str], minute: int, node: str, found: Sequence[str], checks: list[str]) -> None:
    """Some rounds of a controller that begins so many minutes after the incident."""
    os.environ.update(url)
    clock = HandClock()
    clock.move(timedelta(minutes=minute))
    state = State(folder / "state", clock=clock)
    inner = FakeCluster((), folder / "cluster.json")
    cluster = HyperPodCluster(
        inner, SageMakerApi("pod", timeout=5), orchestrator="slurm", deep_health_check=checks, ticks=clock.ticks
    )
    code, kind, weight, reason = found or ("", "", "", "")
    heard = [Signal("kernel", code, f"GPU-{node}-0", stamp(NOW), kind, weight, reason, host=node)] if code else []  # type: ignore[arg-type]
    controller = Controller([folder / "run"], state, cluster, POLICY, read_signals=lambda _: heard)
    for _ in range(6):
        controller.round()
        clock.move(timedelta(minutes=1))
    os._exit(0)


class Night:
    """A cluster that outlives its controllers."""

    def __init__(self, folder: Path, fake: FakeSageMaker) -> None:
        self.folder, self.fake, self.minute = folder, fake, 0
        self.world = fake.world = World({"gpu": 4}, lambda: NOW + timedelta(minutes=self.minute), orchestrator="slurm")
        self.cluster = FakeNodes(self.world, folder / "cluster.json")
        names = [one.slurm for one in self.world.now()]
        self.node = names[1]
        where = topology(names, per_node=1)
        (folder / "run").mkdir()
        write(folder / "run", 1, verdict(where, (1,)), where, NOW)

    def controller(self, found: Sequence[str], checks: list[str], kill: Literal["", "before", "after"] = "") -> int:
        """A controller lives; how it ended."""
        process = server.Process(
            target=live, args=(self.folder, self.fake.environment(), self.minute, self.node, found, checks)
        )
        process.start()
        assert process.pid is not None
        if kill:
            self.world.kill_caller(kill, process.pid)
        process.join(30)
        self.minute += 6
        assert process.exitcode is not None
        return process.exitcode

    def status(self) -> str:
        state = State(self.folder / "state", clock=HandClock(NOW + timedelta(minutes=self.minute)))
        status = Book(state).proposals()[-1].status
        state.close()
        return status


@pytest.fixture
def night(tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi) -> Night:
    return Night(tmp_path, fake)


def test_a_replacement_happens_once_where_the_controller_is_killed_after_it_was_asked_for(night: Night) -> None:
    assert night.controller(MEMORY, [], "after") == -signal.SIGKILL
    assert night.controller(MEMORY, []) == 0
    assert night.status() == "done"
    assert night.cluster.look(night.node).service == "out"
    night.minute += 60
    assert len(night.world.now()) == 4
    assert max(one.id for one in night.world.now()) == f"i-{5:017x}"  # one was made, and only one


def test_a_deep_health_check_is_neither_lost_nor_repeated(night: Night) -> None:
    checks = ["InstanceStress"]
    assert night.controller((), checks, "after") == -signal.SIGKILL
    assert night.controller((), checks) == 0
    assert len(night.world.asked("StartClusterHealthCheck")) == 1
    assert "[deep health check asked for]" in night.cluster.look(night.node).reason
