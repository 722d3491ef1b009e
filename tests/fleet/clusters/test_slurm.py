"""Slurm keeps the contract of clusters: by its commands, through slurmrestd, and as HyperPod's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.slurm import SlurmCluster
from bitwitness.fleet.clusters.slurm_rest import SlurmRest
from tests.fleet.clusters.bench import JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.clusters.scripted_slurm import VERSION, ScriptedSlurm

NODES = ("n0", "n1", "n2")


class SlurmBench:
    """A Slurm in memory; with an address, through slurmrestd."""

    nodes: tuple[str, ...] = NODES
    once = frozenset({"reboot", "Action:Reboot", "Action:Replace"})

    def __init__(self, world: ScriptedSlurm, *, hyperpod: bool = False, where: str = "") -> None:
        self._world, self._hyperpod, self._where = world, hyperpod, where

    def reset(self) -> None:
        self._world.reset()

    def client(self) -> Cluster:
        if self._where:
            return SlurmRest(self._where, version=VERSION, hyperpod=self._hyperpod, timeout=5, runner=self._world)
        return SlurmCluster(self._world, hyperpod=self._hyperpod)

    def take_out(self, node: str) -> None:
        found = self._world.nodes[node]
        found.flags.add("DRAIN")
        found.reason, found.by = "bad fan", "anna"

    def take_in(self, node: str) -> None:
        found = self._world.nodes[node]
        found.flags = {"IDLE"}
        found.reason = ""

    def refuse(self, on: bool) -> None:
        self._world.refuses = on

    def unreachable(self, on: bool) -> None:
        self._world.silent = on

    def traffic(self) -> int:
        return self._world.asked

    def changes(self) -> Sequence[tuple[str, str]]:
        return self._world.changed

    def shown(self, node: str) -> Any:
        found = self._world.nodes[node]
        return (sorted(found.flags), found.reason, found.by, found.boots, found.machine)

    def finish(self) -> None:
        self._world.finish()

    def job(self, phase: JobPhase) -> str | None:
        if phase != "absent":
            state, code = ("RUNNING", "0:0") if phase == "running" else ("FAILED", "160:0")
            self._world.jobs["7"] = {"state": state, "exit": code, "nodes": NODES[1]}
            return "7"
        return "8"


class TestByCommands(Contract):
    @pytest.fixture
    def bench(self) -> SlurmBench:
        return SlurmBench(ScriptedSlurm(NODES))


class TestAsHyperPod(Contract):
    @pytest.fixture
    def bench(self) -> SlurmBench:
        return SlurmBench(ScriptedSlurm(NODES), hyperpod=True)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedSlurm, str]]:
    world = ScriptedSlurm(NODES)
    with world.served() as where:
        yield world, where


class TestThroughSlurmrestd(Contract):
    @pytest.fixture
    def bench(self, served: tuple[ScriptedSlurm, str]) -> SlurmBench:
        world, where = served
        world.reset()
        return SlurmBench(world, hyperpod=True, where=where)
