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


@pytest.fixture(scope="module")
def server() -> Iterator[KubernetesServer]:
    """One for all tests: each begins with an empty one."""
    with KubernetesServer() as made:
        yield made


def begun(server: KubernetesServer, folder: Path, strategy: Strategy) -> Iterator[NVSentinelBench]:
    made = NVSentinelBench(server, folder, strategy)
    yield made
    made.world.end()
    server.down()  # a test may have left it so
    server.up()


class TestExecuteRemediation(Contract):
    @pytest.fixture
    def bench(self, server: KubernetesServer, tmp_path: Path) -> Iterator[NVSentinelBench]:
        yield from begun(server, tmp_path, "EXECUTE_REMEDIATION")


class TestStoreOnly:
    """We cordon, so the rest of the contract is kept by the adapter of Kubernetes that does it, and tested there."""

    @pytest.fixture
    def bench(self, server: KubernetesServer, tmp_path: Path) -> Iterator[NVSentinelBench]:
        yield from begun(server, tmp_path, "STORE_ONLY")

    test_a_node_that_is_not_there = Contract.test_a_node_that_is_not_there
    test_out_and_in_again = Contract.test_out_and_in_again
    test_what_is_left_of_a_drain_is_told_until_it_is_done = (
        Contract.test_what_is_left_of_a_drain_is_told_until_it_is_done
    )
    test_what_somebody_else_took_out_is_theirs = Contract.test_what_somebody_else_took_out_is_theirs
    test_a_node_that_a_person_has_returned_is_in = Contract.test_a_node_that_a_person_has_returned_is_in
