"""The fake cluster keeps the contract of clusters, in one step and in several."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.fake import FakeCluster, When
from tests.fleet.clusters.bench import JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.clusters.kills import Scene

NODES = ("n0", "n1", "n2")


class FakeBench:
    """A fake cluster in a file."""

    nodes: tuple[str, ...] = NODES
    once = frozenset({"drain", "reboot", "replace"})

    def __init__(self, file: Path, steps: int) -> None:
        self._file, self._steps = file, steps
        self.reset()

    def reset(self) -> None:
        self._file.unlink(missing_ok=True)
        self._world = FakeCluster(NODES, self._file, steps=self._steps)

    def client(self) -> Cluster:
        return FakeCluster((), self._file, steps=self._steps)

    def take_out(self, node: str) -> None:
        self._world.take_out(node, "bad fan", "anna")

    def take_in(self, node: str) -> None:
        self._world.take_in(node)

    def refuse(self, on: bool) -> None:
        self._world.refuse(1_000_000 if on else 0)

    def unreachable(self, on: bool) -> None:
        self._world.unreachable(on)

    def traffic(self) -> int:
        return self._world.looks() + len(self._world.calls())

    def changes(self) -> Sequence[tuple[str, str]]:
        return self._world.granted()

    def shown(self, node: str) -> Any:
        return {
            key: value for key, value in json.loads(self._file.read_text())["nodes"][node].items() if key != "before"
        }

    def finish(self) -> None:
        pass

    def job(self, phase: JobPhase) -> str | None:
        if phase != "absent":
            self._world.add_job("7", [NODES[1]], state=phase, exit_code=160 if phase == "ended" else None)
            return "7"
        return "8"


class TestInOneStep(Contract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> FakeBench:
        return FakeBench(tmp_path / "cluster.json", 1)


class TestInThreeSteps(Contract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> FakeBench:
        return FakeBench(tmp_path / "cluster.json", 3)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_real_process_that_is_killed(tmp_path: Path, when: When, call: int) -> None:
    """What the contract does with an exception, done once with SIGKILL."""
    bench = FakeBench(tmp_path / "cluster.json", 3)
    with Scene(bench, tmp_path) as scene:
        scene.incident("n0")
    FakeCluster((), tmp_path / "cluster.json").kill_caller(when, call)
    process = multiprocessing.get_context("fork").Process(target=_live, args=(bench, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with Scene(bench, tmp_path) as scene:
        scene.later()
        assert scene.stands() == [("done", "")], scene.why()
    assert bench.changes() == [("drain", "n0"), ("mark", "n0"), ("mark", "n0")]
    assert bench.shown("n0")["marks"] == ["2", "3"]


def _live(bench: FakeBench, folder: Path) -> None:
    with Scene(bench, folder) as scene:
        scene.rounds(4)
    os._exit(0)
