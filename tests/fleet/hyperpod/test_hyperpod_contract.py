"""HyperPod keeps the contract of clusters, on EKS and on Slurm, behind the real botocore client."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.hyperpod import HyperPodCluster
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeNodes, FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from tests.fleet.clusters.bench import JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.incidents import NOW


class HyperPodBench:
    """Three machines, in SageMaker and in a scheduler."""

    once = frozenset({"reboot", "replace"})

    def __init__(self, fake: FakeSageMaker, api: SageMakerApi, orchestrator: Any, steps: int) -> None:
        self._fake, self._api, self._orchestrator, self._steps = fake, api, orchestrator, steps
        self.reset()
        self.nodes: tuple[str, ...] = tuple(self._inner.name_of(one) for one in self._world.now())
        self._names = {one.id: self._inner.name_of(one) for one in self._world.now()}

    def reset(self) -> None:
        self._passed = timedelta(0)
        self._world = World({"gpu": 3}, lambda: NOW + self._passed, orchestrator=self._orchestrator)
        self._fake.world = self._world
        self._inner = FakeNodes(self._world, steps=self._steps)

    def client(self) -> Cluster:
        return HyperPodCluster(self._inner, self._api, orchestrator=self._orchestrator)

    def take_out(self, node: str) -> None:
        self._inner.take_out(node, "bad fan", "anna")

    def take_in(self, node: str) -> None:
        self._inner.take_in(node)

    def refuse(self, on: bool) -> None:
        self._inner.refuse(1_000_000 if on else 0)
        acts = {"sagemaker:BatchReplaceClusterNodes", "sagemaker:BatchRebootClusterNodes"}
        self._world.denied = acts if on else set()

    def unreachable(self, on: bool) -> None:
        self._inner.unreachable(on)
        self._world.is_away = on

    def traffic(self) -> int:
        return self._inner.looks() + len(self._inner.calls()) + self._world.requests

    def changes(self) -> Sequence[tuple[str, str]]:
        return [*self._inner.granted(), *((kind, self._names[machine]) for kind, machine in self._world.done)]

    def shown(self, node: str) -> Any:
        self._world.now()
        with self._inner._changing() as cluster:
            seen = cluster["nodes"].get(node)
            return None if seen is None else {key: value for key, value in seen.items() if key != "before"}

    def finish(self) -> None:
        self._passed += timedelta(minutes=40)
        self._world.now()

    def job(self, phase: JobPhase) -> str | None:
        if phase != "absent":
            self._inner.add_job("7", [self.nodes[1]], state=phase, exit_code=160 if phase == "ended" else None)
            return "7"
        return "8"


class TestOnEks(Contract):
    @pytest.fixture
    def bench(self, fake: FakeSageMaker, api: SageMakerApi) -> HyperPodBench:
        return HyperPodBench(fake, api, "eks", 2)


class TestOnSlurm(Contract):
    @pytest.fixture
    def bench(self, fake: FakeSageMaker, api: SageMakerApi) -> HyperPodBench:
        return HyperPodBench(fake, api, "slurm", 1)
