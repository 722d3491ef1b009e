"""The rights that are shipped are those that the calls need, which are made against an API server that writes them down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bitwitness.fleet.agent_node import NodeReader
from bitwitness.fleet.clusters.base import Act
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi, Permission, permission_for
from tests.deploy.manifests import EXAMPLES, Manifest, documents, of_kind, rendered, the
from tests.fleet.kubernetes.server import KubernetesServer

LEASE = "bitwitness/bitwitness-fleet"
DRAIN = Act("drain", "n1", "20261129T093015Z-4be1d2", "rank 3 computed wrongly", ("GPU-1",))
JOBS = ("batch", "jobset.x-k8s.io", "kubeflow.org", "trainer.kubeflow.org")


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as made:
        yield made


def used(server: KubernetesServer) -> set[Permission]:
    """What the requests so far needed; a question about one's own rights is open to everybody (system:basic-user)."""
    asked = [permission_for(method, path) for method, path, _ in server.requests]
    return {one for one in asked if one.resource != "selfsubjectaccessreviews"}


def granted(made: list[Manifest], account: str) -> set[Permission]:
    """What the bindings give to an account."""
    found = set()
    for binding in (*of_kind(made, "ClusterRoleBinding"), *of_kind(made, "RoleBinding")):
        if {"kind": "ServiceAccount", "name": account, "namespace": "bitwitness"} not in binding["subjects"]:
            continue
        role = the(made, binding["roleRef"]["kind"], binding["roleRef"]["name"])
        namespace = role["metadata"].get("namespace", "")
        assert namespace == binding["metadata"].get("namespace", "")
        for rule in role["rules"]:
            (group,), (resource,) = rule["apiGroups"], rule["resources"]
            found |= {Permission(verb, resource, group, namespace) for verb in rule["verbs"]}
    return found


def everywhere(permissions: set[Permission]) -> set[Permission]:
    """Pods and jobs may be in any namespace, so the right to them is one of the whole cluster."""
    moving = {"pods", "pods/eviction", "jobs", "jobsets", "pytorchjobs", "trainjobs"}
    return {
        Permission(one.verb, one.resource, one.group, "" if one.resource in moving else one.namespace)
        for one in permissions
    }


def do(cluster: KubernetesCluster, act: Act) -> None:
    for call in cluster.plan(act, cluster.look(act.node)):
        cluster.carry_out(call)


def every_call(server: KubernetesServer, folder: Path, *, evict: bool) -> None:
    """All that a controller does: lead, look, count, rehearse, act, look again, return, look after jobs, resign."""
    for name in ("n1", "n2"):
        server.add_node(name)
    server.add_pod("worker", "n1")
    api = KubernetesApi.load(str(server.kubeconfig(folder / "config")))
    cluster = KubernetesCluster(api, evict=evict, lease=LEASE)
    assert cluster.leader() == ""
    assert cluster.look("pod_train-0").service == "absent"
    cluster.census()
    state = cluster.look("n1")
    cluster.check(DRAIN, state, cluster.plan(DRAIN, state))
    do(cluster, DRAIN)
    for call in cluster.rest(DRAIN, cluster.look("n1")):
        cluster.carry_out(call)
    server.change_node("n1", lambda node: node["status"].update(conditions=node["status"]["conditions"][:2]))
    cluster.look("n1")  # a controller was killed before it told: is the Event there?
    do(cluster, Act("clear", "n1", "", "repaired"))
    for kind in ("job", "jobset", "pytorchjob", "trainjob"):
        cluster.job(f"ml/{kind}/train")
        cluster.check_job(f"ml/{kind}/train")
    KubernetesCluster(api, lease=LEASE, identity="another").leader()
    cluster.resign()
    assert KubernetesCluster(api, lease=LEASE, identity="another").leader() == ""  # which updates it


@pytest.mark.parametrize("evict", [False, True])
def test_the_controller_has_the_rights_that_it_needs_and_no_others(
    server: KubernetesServer, tmp_path: Path, evict: bool
) -> None:
    every_call(server, tmp_path, evict=evict)
    made = rendered("base", "evict") if evict else rendered("base")
    assert everywhere(used(server)) == everywhere(granted(made, "bitwitness-fleet"))


def test_the_rights_that_are_compared_are_all_there_is() -> None:
    """Nothing is given by a wildcard, to a group, or by a role of Kubernetes itself."""
    for folder in ("base", "overlays/default", "overlays/hyperpod-eks", "overlays/nvsentinel"):
        made = rendered(folder)
        for role in (*of_kind(made, "ClusterRole"), *of_kind(made, "Role")):
            for rule in role["rules"]:
                assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
                assert not [word for words in rule.values() for word in words if "*" in word]
        for binding in (*of_kind(made, "ClusterRoleBinding"), *of_kind(made, "RoleBinding")):
            assert [one["kind"] for one in binding["subjects"]] == ["ServiceAccount"]
            the(made, binding["roleRef"]["kind"], binding["roleRef"]["name"])
        evicts = "evict = true" in the(made, "ConfigMap", "bitwitness-policy")["data"]["fleet.toml"]
        whole = rendered("base", "evict") if evicts else rendered("base")
        assert granted(made, "bitwitness-fleet") == granted(whole, "bitwitness-fleet")


def test_the_agent_may_get_nodes_where_it_asks_for_its_own_and_nothing_elsewhere(
    server: KubernetesServer, tmp_path: Path
) -> None:
    server.add_node("n1")
    NodeReader(KubernetesApi.load(str(server.kubeconfig(tmp_path / "config"))), "n1").look()
    assert used(server) == {Permission("get", "nodes")} == granted(rendered("overlays/nvsentinel"), "bitwitness-agent")
    assert granted(rendered("overlays/default"), "bitwitness-agent") == set()


@pytest.mark.parametrize(("file", "plural"), [
    ("job", "jobs"), ("jobset", "jobsets"), ("pytorchjob", "pytorchjobs"), ("trainjob", "trainjobs"), ("hyperpod-pytorchjob", "pytorchjobs"),
])  # fmt: skip
def test_a_rehearsal_finds_nothing_wrong_with_the_examples(
    server: KubernetesServer, tmp_path: Path, file: str, plural: str
) -> None:
    *_, made = documents(EXAMPLES / f"{file}.yaml")
    server.add(plural, "ml", "train", spec=made["spec"], status={})
    if file == "trainjob":
        runtime = documents(EXAMPLES / "trainjob.yaml")[0]["spec"]["template"]["spec"]
        server.add("jobsets", "ml", "train", spec=runtime, status={})  # as Trainer makes it of the runtime
    api = KubernetesApi.load(str(server.kubeconfig(tmp_path / "config")))
    found = {evict: KubernetesCluster(api, evict=evict).check_job(f"ml/{plural[:-1]}/train") for evict in (False, True)}
    assert len(found[True]) > 2
    assert [one for one in found[True] if one.outcome == "bad"] == []
    wrong = [one for one in found[False] if one.outcome == "bad"]
    assert bool(wrong) == file.startswith("hyperpod"), "OnFailure stays on a cordoned node unless its pod is evicted"


def test_a_lease_is_the_only_thing_that_is_named(server: KubernetesServer) -> None:
    role = the(rendered("base"), "Role", "bitwitness-fleet-lease")
    assert [rule["verbs"] for rule in role["rules"] if "resourceNames" in rule] == [["get", "update"]]
