"""Slurm keeps the contract of clusters: by its commands, through slurmrestd, and as HyperPod's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Act, ActKind, Check, Cluster, NodeState
from bitwitness.fleet.clusters.slurm import SlurmCluster
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.clusters.slurm_rest import SlurmRest
from tests.fleet.clusters.bench import INCIDENT, JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.clusters.scripted_slurm import VERSION, ScriptedSlurm

NODES = ("n0", "n1", "n2")


class SlurmBench:
    """A Slurm in memory; with an address, through slurmrestd."""

    nodes: tuple[str, ...] = NODES
    once = frozenset({"DRAIN", "reboot", "Action:Reboot", "Action:Replace"})

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


# Beforehand -----------------------------------------------------------------------------------------------------------


def checks(world: ScriptedSlurm, kind: ActKind = "drain", *, hyperpod: bool = False) -> dict[str, Check]:
    cluster = SlurmCluster(world, hyperpod=hyperpod)
    act, state = Act(kind, "n0", INCIDENT, "wrong numbers"), cluster.look("n0")
    return {one.what: one for one in cluster.check(act, state, cluster.plan(act, state))}


@pytest.mark.parametrize(
    ("uid", "answer", "outcome", "words"),
    [
        (0, Answer(0, "None\n"), "good", "root"),
        (64030, Answer(0, "None\n"), "good", "the user of Slurm"),
        (12345, Answer(0, "Administrator\n"), "good", "administrator"),
        (12345, Answer(0, "Operator\n"), "bad", "AdminLevel is Operator"),
        (12345, Answer(0, "None\n"), "bad", "AdminLevel is None"),
        (12345, Answer(0, ""), "bad", "AdminLevel is not set"),
        (12345, Answer(1, "", "Connection refused"), "unknown", "Connection refused"),
    ],
)
def test_who_we_are_to_slurm(
    monkeypatch: pytest.MonkeyPatch, uid: int, answer: Answer, outcome: str, words: str
) -> None:
    world = ScriptedSlurm(NODES)
    world.level = answer
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    found = checks(world)["right to drain"]
    assert found.outcome == outcome
    assert words in found.text
    assert ("sacctmgr modify user" in found.remedy) == (outcome != "good")
    assert world.changed == []


def test_what_slurm_is_not_set_up_for() -> None:
    world = ScriptedSlurm(NODES)
    assert checks(world, "reboot")["reboots nodes"].outcome == "good"
    world.config["RebootProgram"] = "(null)"
    assert checks(world, "reboot")["reboots nodes"].outcome == "bad"
    assert checks(world, "replace", hyperpod=True)["HyperPod does replace"].outcome == "unknown"
    world.silent = True
    cluster = SlurmCluster(world)
    (only,) = cluster.check(Act("drain", "n0", INCIDENT, "x"), NodeState("n0", "in", "IDLE"), ())
    assert (only.what, only.outcome) == ("slurmctld answers", "bad")


def test_whether_a_job_would_go_on() -> None:
    world = ScriptedSlurm(NODES)
    world.jobs["7"] = {"state": "RUNNING", "exit": "0:0", "nodes": "n[0-1]"}
    cluster = SlurmCluster(world)
    found = {one.what: one for one in cluster.check_job("7")}
    assert {one.outcome for one in found.values()} == {"good"}
    assert found["another node for it"].text.startswith("1 idle now, e.g. n2")
    world.nodes["n2"].flags.add("DRAIN")
    world.config["MinJobAge"] = "2 sec"
    outcomes = {one.what: one.outcome for one in cluster.check_job("7")}
    assert (outcomes["another node for it"], outcomes["remembers ended jobs"]) == ("unknown", "bad")
