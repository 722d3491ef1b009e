"""A rehearsal on Kubernetes, over real HTTP: names of pods, a missing right and a lease are found out, and nothing is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.rehearsing import Result
from bitwitness.fleet.rehearsing_walk import Asked, rehearse
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Placement, Topology
from tests.fleet.kubernetes.server import KubernetesServer


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as made:
        for node in ("n0", "n1", "n2"):
            made.add_node(node)
            made.add_pod(f"train-{node}", node)
        yield made


def walk(server: KubernetesServer, folder: Path, *nodes: str) -> Result:
    """A rehearsal with a run on these nodes; nothing of the server is changed by it."""
    config = server.kubeconfig(folder / "config")
    settings = {"kind": "kubernetes", "kubeconfig": str(config), "lease": "bitwitness/fleet", "evict": True}
    policy = replace(FleetPolicy(), act=True, owner="hw", cluster_share=0.5, cluster=settings)
    where = Topology(tuple(Placement(rank, name, f"GPU-{rank}", 0) for rank, name in enumerate(nodes)))
    RunFiles(folder / "run").create().write_run({"placement": where.to_json()})
    before = copy.deepcopy(server._objects)
    found = rehearse(Asked(policy, lambda: cluster_of(policy, []), folder / "state", run=folder / "run", limit=30))
    assert server.applied == []
    assert server._objects == before, "something was changed, a lease perhaps"
    methods = {(method, path.rpartition("/")[2]) for method, path, _ in server.requests if method != "GET"}
    assert methods <= {("POST", "selfsubjectaccessreviews"), ("PATCH", "n0"), ("PATCH", "status"), ("POST", "events")}
    assert not [path for method, path, _ in server.requests if path.endswith("/eviction")]
    assert not (folder / "state").exists()
    return found


def bad(found: Result) -> list[str]:
    return [one.what for part in found.parts for one in part.checks if one.outcome == "bad"]


def test_all_is_well(server: KubernetesServer, tmp_path: Path) -> None:
    found = walk(server, tmp_path, "n0", "n1")
    assert bad(found) == [], found.to_json()
    assert (found.node, found.code) == ("n0", 0)
    (part,) = [one for one in found.parts if one.name == "act drain"]
    checks = {one.what: one.outcome for one in part.checks}
    assert checks["return n0 after the drain"] == "good"
    assert checks["evictions"] == "unknown"
    assert len(part.calls) >= 5


def test_names_of_pods_and_a_right_that_is_missing(server: KubernetesServer, tmp_path: Path) -> None:
    server.forbid("patch", "nodes/status")
    found = walk(server, tmp_path, "n0", "train-n1")
    assert bad(found)[0] == "nodes of the run"
    assert "permission to patch nodes/status" in bad(found)
    assert found.code == 1


def test_an_api_server_that_is_away(server: KubernetesServer, tmp_path: Path) -> None:
    server.down()
    found = walk(server, tmp_path, "n0")
    assert "count the nodes" in bad(found)
    (part,) = [one for one in found.parts if one.name == "state"]
    assert {one.outcome for one in part.checks} == {"good"}


def test_a_job_that_goes_on_by_itself_is_good(server: KubernetesServer, tmp_path: Path) -> None:
    told = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "env": [told]}]}
    server.add("jobs", "ml", "j", spec={"template": {"spec": pod}, "backoffLimit": 6}, status={"active": 1})
    server.add_pod("j-0", "n1", labels={"batch.kubernetes.io/job-name": "j"})
    settings = {"kind": "kubernetes", "kubeconfig": str(server.kubeconfig(tmp_path / "config"))}
    policy = replace(FleetPolicy(), act=True, owner="hw", cluster_share=0.5, cluster=settings)
    asked = Asked(policy, lambda: cluster_of(policy, []), tmp_path / "state", job="kubernetes:ml/job/j", limit=30)
    found = rehearse(asked)
    (part,) = [one for one in found.parts if one.name == "job"]
    assert {one.outcome for one in part.checks} == {"good"}, part.to_json()
    assert found.code == 0
    assert server.applied == []
