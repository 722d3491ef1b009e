"""Kubernetes keeps the contract of clusters, evictions included, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.kubernetes import from_settings
from bitwitness.fleet.clusters.kubernetes_words import SUSPECT
from tests.fleet.clusters.bench import JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.kubernetes.server import KubernetesServer

NODES = ("n0", "n1", "n2")
_TIMES = ("lastHeartbeatTime", "lastTransitionTime")


class KubernetesBench:
    """Three nodes, with a pod of a job on each, and an agent that stays."""

    nodes: tuple[str, ...] = NODES
    once = frozenset({"create events", "create pods/eviction"})

    def __init__(self, server: KubernetesServer, folder: Path, *, evict: bool) -> None:
        self._server, self._evict, self._config = server, evict, server.kubeconfig(folder / "config")
        self.reset()

    def reset(self) -> None:
        self._server.clear()
        for node in NODES:
            self._server.add_node(node, taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
            self._server.add_pod(f"agent-{node}", node, daemon=True)
            self._server.add_pod(f"train-{node}", node)

    def client(self) -> Cluster:
        return from_settings({"kind": "kubernetes", "kubeconfig": str(self._config), "evict": self._evict})

    def take_out(self, node: str) -> None:
        def cordon(found: dict[str, Any]) -> None:
            found["spec"]["unschedulable"] = True
            found["spec"]["taints"].append({"key": "anna.example/fan", "value": "bad", "effect": "NoSchedule"})

        self._server.change_node(node, cordon)

    def take_in(self, node: str) -> None:
        self._server.uncordon(node)

    def refuse(self, on: bool) -> None:
        for verb, resource in (("patch", "nodes"), ("patch", "nodes/status"), ("create", "events")):
            self._server.forbid(verb, resource)
        if not on:
            self._server.allow()

    def unreachable(self, on: bool) -> None:
        if on:
            self._server.down()
        else:
            self._server.up()

    def traffic(self) -> int:
        return len(self._server.requests)

    def changes(self) -> Sequence[tuple[str, str]]:
        return self._server.applied

    def shown(self, node: str) -> Any:
        found = self._server.node(node)
        annotations = found["metadata"]["annotations"]
        said = {key: value for key, value in json.loads(annotations.get(SUSPECT, "{}")).items() if key != "time"}
        conditions = [
            {key: value for key, value in one.items() if key not in _TIMES} for one in found["status"]["conditions"]
        ]
        unschedulable = found["spec"].get("unschedulable", False)
        pods = [name for name in self._server.names("pods") if name.endswith(node)]
        return (found["metadata"]["labels"], said, unschedulable, found["spec"]["taints"], conditions, pods)

    def finish(self) -> None:
        pass

    def job(self, phase: JobPhase) -> str | None:
        failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        if phase != "absent":
            status = {"active": 1} if phase == "running" else {"failed": 1, "conditions": [failed]}
            self._server.add("jobs", "ml", "j1", spec={}, status=status)
            code = None if phase == "running" else 160
            labels = {"batch.kubernetes.io/job-name": "j1"}
            pod = "Running" if phase == "running" else "Failed"
            self._server.add_pod("j1-0", NODES[1], labels=labels, phase=pod, exit_code=code)
            return "ml/job/j1"
        return "ml/job/j2"


class TestKubernetes(Contract):
    @pytest.fixture
    def bench(self, server: KubernetesServer, tmp_path: Path) -> KubernetesBench:
        return KubernetesBench(server, tmp_path, evict=True)
