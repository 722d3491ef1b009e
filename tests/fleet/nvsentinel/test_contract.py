"""NVSentinel keeps the contract of clusters: with agents that speak over real gRPC, and an API server over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.nvsentinel_events import Strategy
from tests.fleet.clusters.contract import Contract
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_contract import NODES, KubernetesBench
from tests.fleet.nvsentinel.world import World


class NVSentinelBench(KubernetesBench):
    """Three nodes, the first with an agent, and NVSentinel."""

    def __init__(self, server: KubernetesServer, folder: Path, strategy: Strategy) -> None:
        self._strategy, self.world = strategy, World(server, folder, NODES[:1])
        super().__init__(server, folder, evict=True)

    def reset(self) -> None:
        super().reset()
        self.world.forget()
        self.world.work()

    def client(self) -> Cluster:
        return self.world.client(self._strategy, evict=self._evict)

    def take_in(self, node: str) -> None:
        if "quarantineHealthEvent" in self._server.node(node)["metadata"]["annotations"]:
            self.world.quarantine.uncordon_by_hand(node)
        else:
            super().take_in(node)

    def shown(self, node: str) -> Any:
        annotations = self._server.node(node)["metadata"]["annotations"]
        held = [one["metadata"] for one in json.loads(annotations.get("quarantineHealthEvent", "[]"))]
        return (*super().shown(node), held)

    def finish(self) -> None:
        self.world.work()


class TestExecuteRemediation(Contract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[NVSentinelBench]:
        with KubernetesServer() as server:
            made = NVSentinelBench(server, tmp_path, "EXECUTE_REMEDIATION")
            yield made
            made.world.end()
