"""What the manifests allow is what the adapter needs, no less and no more; and what it sends keeps to the published schemas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Check
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer, Rule, rules_of
from tests.fleet.kubernetes.test_acting import CLEAR, DRAIN, do

DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
LEASE = "bitwitness/bitwitness-fleet"
KINDS = ("job", "jobset", "pytorchjob", "trainjob")
CONVENIENCE = {("get", "events")}
"""Without it an Event is made a second time, which is refused."""


def shipped() -> list[Rule]:
    """The rules of the manifests, evictions included."""
    files = (DEPLOY / "base" / "rbac.yaml", DEPLOY / "components" / "evict" / "rbac.yaml")
    return rules_of(one for file in files for one in yaml.safe_load_all(file.read_text()))


def apart(rules: list[Rule]) -> list[Rule]:
    """A rule for each verb and resource."""
    return [
        replace(rule, resources=(resource,), verbs=(verb,))
        for rule in rules
        for resource in rule.resources
        for verb in rule.verbs
    ]


def everything(server: KubernetesServer, make: Make) -> Iterator[Check]:
    """All that the adapter can do; what it says beforehand."""
    server.clear_objects()
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    for kind in KINDS:
        server.add(f"{kind}s", "ml", "j", spec={}, status={})
    passed = [0.0]
    cluster = make(evict=True, lease=LEASE, identity="one", ticks=lambda: passed[0])
    for kind in KINDS:
        cluster.job(f"ml/{kind}/j")
    yield from cluster.check(DRAIN, cluster.look("n1"), cluster.plan(DRAIN, cluster.look("n1")))
    cluster.leader()
    passed[0] += 15.0
    cluster.leader()
    cluster.carry_out(cluster.plan(DRAIN, cluster.look("n1"))[0])
    for call in cluster.rest(DRAIN, cluster.look("n1")):
        cluster.carry_out(call)
    assert cluster.census().out == 1
    do(cluster, CLEAR)
    cluster.resign()


def test_the_manifests_allow_all_that_is_needed(server: KubernetesServer, make: Make) -> None:
    server.only(shipped())
    assert {one.outcome for one in everything(server, make) if one.what != "evictions"} == {"good"}
    assert [verb for verb, _ in server.applied] == [
        "patch nodes",
        "create events",
        "patch nodes/status",
        "create pods/eviction",
        "patch nodes",
        "patch nodes/status",
    ]


def test_the_manifests_allow_no_more(server: KubernetesServer, make: Make) -> None:
    rules = apart(shipped())
    assert len(rules) == 15
    for rule in rules:
        server.only(one for one in rules if one != rule)
        needed = (rule.verbs[0], rule.resources[0])
        if needed in CONVENIENCE:
            list(everything(server, make))
            continue
        with pytest.raises(ClusterError, match=rf"resources: \[{needed[1]}\], verbs: \[{needed[0]}\]"):
            list(everything(server, make))


def test_what_is_sent_keeps_to_the_schemas(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    cluster = make(evict=True, lease=LEASE)
    cluster.leader()
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    list(cluster.check(DRAIN, cluster.look("n1"), calls))
    do(cluster, DRAIN)
    sent = [body for method, _, body in server.requests if method in ("POST", "PUT")]
    assert {one["kind"] for one in sent} == {"Event", "Eviction", "Lease", "SelfSubjectAccessReview"}
    for body in sent:
        kubernetes_validate.validate(body, "1.37", strict=True)
    node = server.node("n1")
    known = {"type", "status", "reason", "message", "lastHeartbeatTime", "lastTransitionTime"}
    conditions: list[dict[str, Any]] = [one for one in node["status"]["conditions"] if set(one) == known]
    assert len(conditions) == 1
    status = {**node["status"], "conditions": conditions}
    status.pop("nodeInfo")
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Node", **node, "status": status}, "1.37", strict=True)
