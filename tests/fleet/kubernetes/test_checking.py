"""What an act needs is tried beforehand, without changing anything; settings and configurations that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import Check
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster, from_settings
from bitwitness.fleet.clusters.kubernetes_api import Permission, permission_for
from bitwitness.fleet.clusters.kubernetes_words import event_name, is_key, label_value, suspicion_of
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_acting import DRAIN, add, do

LEASE = "bitwitness/fleet"
NEEDED = {
    "permission to get nodes",
    "permission to list nodes",
    "permission to patch nodes",
    "permission to patch nodes/status",
    "permission to list pods",
    "permission to create events",
    "permission to get events",
    "permission to create pods/eviction",
    "permission to get leases",
    "permission to create leases",
    "permission to update leases",
}


def checked(cluster: KubernetesCluster) -> dict[str, Check]:
    """What is said of a drain, by what it is about."""
    state = cluster.look("n1")
    return {one.what: one for one in cluster.check(DRAIN, state, cluster.plan(DRAIN, state))}


def outcomes(found: dict[str, Check]) -> dict[str, str]:
    """Those that are not good."""
    return {what: one.outcome for what, one in found.items() if one.outcome != "good"}


def test_all_is_well(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    before = server.node("n1")
    found = checked(make(evict=True, lease=LEASE))
    assert {what for what in found if what.startswith("permission")} == NEEDED
    assert outcomes(found) == {"evictions": "unknown"}, "they are not tried"
    assert found["size of the cluster"].text == "1 nodes, 0 of them out of service"
    assert found[f"lease {LEASE}"].text == "nobody leads"
    dry = [what for what in found if what.startswith("dry run")]
    assert len(dry) == 3
    assert (server.node("n1"), server.applied, server.names("events"), server.names("pods")) == (
        before,
        [],
        [],
        ["train-0"],
    )
    assert not server.writes("eviction")


@pytest.mark.parametrize(
    ("verb", "resource", "bad"),
    [
        ("patch", "nodes", 2),
        ("patch", "nodes/status", 2),
        ("create", "events", 2),
        ("create", "pods/eviction", 1),
        ("update", "leases", 1),
        ("get", "leases", 2),
    ],
)
def test_what_would_be_refused(server: KubernetesServer, make: Make, verb: str, resource: str, bad: int) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    server.forbid(verb, resource)
    found = checked(make(evict=True, lease=LEASE))
    wrong = {what: one for what, one in found.items() if one.outcome == "bad"}
    assert len(wrong) == bad, wrong
    one = wrong[f"permission to {verb} {resource}"]
    assert f"resources: [{resource}], verbs: [{verb}]" in one.remedy
    assert not server.applied


def test_the_right_to_evict_is_tried_where_no_pod_runs_too(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.forbid("create", "pods/eviction")
    found = checked(make(evict=True))
    assert outcomes(found) == {"permission to create pods/eviction": "bad"}
    assert "ClusterRole" in found["permission to create pods/eviction"].remedy


def test_a_right_that_only_saves_a_request(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.forbid("get", "events")
    found = checked(make())
    assert outcomes(found) == {"permission to get events": "unknown"}
    assert "Role in namespace default" in found["permission to get events"].remedy


def test_a_node_that_would_be_left_alone(server: KubernetesServer, make: Make) -> None:
    cluster = make()
    assert cluster.check(DRAIN, cluster.look("n1"), ())[0].outcome == "bad"
    server.add_node("n1", unschedulable=True)
    assert "somebody else has taken it out" in checked(cluster)["node n1"].text


def test_an_act_that_is_done(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make()
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    do(cluster, DRAIN)
    found = {one.what: one for one in cluster.check(DRAIN, cluster.look("n1"), calls)}
    assert outcomes(found) == {next(iter(found_patch(found))): "unknown"}
    assert found[next(what for what in found if what.endswith("/events"))].text == "it is there already"


def found_patch(found: dict[str, Check]) -> list[str]:
    """The dry run of the patch of the node."""
    return [what for what in found if what.endswith("PATCH /api/v1/nodes/n1")]


def test_a_server_that_goes_away(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make(lease=LEASE)
    state = cluster.look("n1")
    calls = cluster.plan(DRAIN, state)
    server.down()
    found = {one.what: one.outcome for one in cluster.check(DRAIN, state, calls)}
    server.up()
    assert set(found.values()) == {"good", "bad", "unknown"}
    assert found["permission to patch nodes"] == "unknown", "what could not be tried is no sign that it works"


def test_no_node_has_the_labels(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    assert checked(make(nodes="pool=train"))["size of the cluster"].outcome == "bad"


# Settings -------------------------------------------------------------------------------------------------------------


def test_settings(server: KubernetesServer, tmp_path: Path) -> None:
    server.add_node("n1")
    config = str(server.kubeconfig(tmp_path / "config"))
    settings = {"kind": "kubernetes", "kubeconfig": config, "context": "tests", "timeout": 5, "taint": "a.example/b"}
    cluster = from_settings({**settings, "evict": True, "lease": "", "nodes": ""})
    do(cluster, DRAIN)
    assert server.node("n1")["spec"]["taints"][0]["key"] == "a.example/b"
    assert cluster.leader() == "", "no lease outside of a cluster"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"evicts": True}, "unknown settings of a Kubernetes cluster: evicts; known: context, evict"),
        ({"evict": "yes"}, "cluster.evict is true or false"),
        ({"timeout": 0}, "cluster.timeout is a number of seconds"),
        ({"taint": 7}, "cluster.taint is a text"),
        ({"taint": "a b"}, "cannot be the key of a taint"),
        ({"lease": "fleet"}, "cluster.lease reads NAMESPACE/NAME"),
        ({"context": "nobody"}, "no configuration for Kubernetes"),
        ({"kubeconfig": "/no/such/file"}, "no configuration for Kubernetes"),
    ],
)
def test_settings_that_cannot_be(server: KubernetesServer, tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    config = {"kubeconfig": str(server.kubeconfig(tmp_path / "config"))}
    with pytest.raises(ConfigurationError, match=said):
        from_settings({**config, **wrong})


@pytest.mark.parametrize("text", ["", "[]", "apiVersion: v1\nclusters: 7\n", "\0", "{"])
def test_a_configuration_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigurationError, match="no configuration for Kubernetes"):
        from_settings({"kubeconfig": str(tmp_path / "config")})


# Words ----------------------------------------------------------------------------------------------------------------


def test_values_of_labels() -> None:
    assert label_value("20261129T093015Z-4be1d2") == "20261129T093015Z-4be1d2"
    odd = [label_value(text) for text in ("2026-11-29T09:30:15", "x" * 64, "x" * 65, "ü", "-a-", " ")]
    assert len(set(odd)) == len(odd)
    assert all(len(one) <= 63 and one[0].isalnum() and one[-1].isalnum() for one in odd)
    assert label_value("") == ""
    assert is_key("bitwitness.dev/suspect")
    assert is_key("suspect")
    assert not any(map(is_key, ("", "/", "a/b/c", "a/", "/b", "A.dev/b", "x" * 64, "a b")))


def test_names_of_events() -> None:
    assert event_name("n1", "20261129T093015Z-4be1d2") == "n1.20261129t093015z-4be1d2"
    odd = [event_name(node, incident) for node in ("n" * 253, "n" * 252) for incident in ("A", "a", "..", "ü")]
    assert len(set(odd)) == len(odd)
    assert max(map(len, odd)) <= 253


@pytest.mark.parametrize("text", [None, 7, "", "{", "[]", '{"incident": 7}', "[" * 100_000])
def test_annotations_that_are_none_of_ours(text: object) -> None:
    assert suspicion_of(text) is None


def test_permissions_for_requests() -> None:
    lease = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
    assert permission_for("PUT", f"{lease}/l") == Permission("update", "leases", "coordination.k8s.io", "ns")
    assert permission_for("GET", "/api/v1/pods") == Permission("list", "pods")
    assert permission_for("POST", "/api/v1/namespaces/ml/pods/p/eviction") == Permission("create", "pods/eviction")
    assert permission_for("GET", "/else").verb == "get"


def test_a_taint_that_kubernetes_adds_itself(server: KubernetesServer, make: Make) -> None:
    """The node controller answers a cordon with a taint of its own, which is no reason and nobody's."""
    server.add_node("n1")
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    do(make(), DRAIN)
    server.change_node("n1", add(cordon))
    assert make().look("n1").ours
    server.add_node("n2", taints=[cordon, {"key": "fan.example/bad", "effect": "NoSchedule"}], unschedulable=True)
    assert make().look("n2").reason == "cordoned, taints fan.example/bad=:NoSchedule"


def test_a_webhook_without_dry_run_is_no_finding(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.webhook = "policy.example.org"
    cluster = make()
    state = cluster.look("n1")
    found = cluster.check(DRAIN, state, cluster.plan(DRAIN, state))
    tried = [one for one in found if one.what.startswith("dry run")]
    assert {one.outcome for one in tried} == {"unknown"}
    assert all("policy.example.org" in one.text for one in tried)
    assert "bad" not in {one.outcome for one in found}
