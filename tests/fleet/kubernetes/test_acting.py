"""A node of Kubernetes is taken out and returned, whatever others do to it meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, Call, Led, Rehearsing, Troubled
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_words import CONDITION, INCIDENT, SUSPECT
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import TOKEN, KubernetesServer

ID = "20261129T093015Z-4be1d2"
DRAIN = Act("drain", "n1", ID, "replay differs on two GPUs", ("GPU-1",))
CLEAR = Act("clear", "n1", "", "the board was changed")
GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
LATE = {"key": "node.example/late", "effect": "NoExecute"}
OURS = {"key": SUSPECT, "value": ID.lower(), "effect": "NoSchedule"}


def do(cluster: KubernetesCluster, act: Act) -> list[str]:
    """Plan and carry out; what was answered."""
    return [cluster.carry_out(call) for call in cluster.plan(act, cluster.look(act.node))]


def add(taint: dict[str, str]) -> Any:
    """A change of somebody else: one more taint."""
    return lambda node: node["spec"].setdefault("taints", []).append(taint)


def condition(server: KubernetesServer, node: str = "n1") -> dict[str, Any]:
    """Our condition of a node."""
    return next((one for one in server.node(node)["status"]["conditions"] if one["type"] == CONDITION), {})


def test_what_is_written(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1", taints=[GPU], labels={"pool": "train"})
    cluster = make()
    assert isinstance(cluster, Led)
    assert isinstance(cluster, Rehearsing)
    assert isinstance(cluster, Troubled)
    do(cluster, DRAIN)
    node = server.node("n1")
    assert node["spec"] == {"unschedulable": True, "taints": [GPU, OURS]}
    assert node["metadata"]["labels"] == {"pool": "train", INCIDENT: ID}
    said = json.loads(node["metadata"]["annotations"][SUSPECT])
    assert said.pop("time").endswith("Z")
    assert said == {
        "incident": ID,
        "reason": DRAIN.reason,
        "devices": ["GPU-1"],
        "cordoned": True,
        "execute": False,
        "taint": SUSPECT,
    }
    shown = condition(server)
    assert (shown["status"], shown["reason"]) == ("True", "CorruptionAttributed")
    assert shown["message"] == f"[{ID}] replay differs on two GPUs (GPU-1)"
    assert len(node["status"]["conditions"]) == 3, "the conditions of others stay"
    event = server.get("events", "default", f"n1.{ID.lower()}")
    assert (event["type"], event["reason"], event["reportingComponent"]) == ("Warning", CONDITION, "bitwitness")
    assert event["involvedObject"]["uid"] == node["metadata"]["uid"]
    now = cluster.look("n1")
    assert (now.service, now.reason) == ("out", f"bitwitness {ID}: {DRAIN.reason}")
    do(cluster, CLEAR)
    node = server.node("n1")
    assert node["spec"] == {"unschedulable": False, "taints": [GPU]}
    assert node["metadata"]["labels"] == {"pool": "train"}
    assert SUSPECT not in node["metadata"]["annotations"]
    assert condition(server)["status"] == "False"
    assert cluster.plan(CLEAR, cluster.look("n1")) == ()
    assert TOKEN not in str(server.requests)


def test_a_node_that_is_taken_out_for_the_second_time(server: KubernetesServer, make: Make) -> None:
    """Its condition is there already, and says that all is well."""
    server.add_node("n1")
    cluster, second = make(), replace(DRAIN, incident="20261130T093015Z-000002")
    do(cluster, DRAIN)
    do(cluster, CLEAR)
    cluster.carry_out(cluster.plan(second, cluster.look("n1"))[0])  # and the process is killed
    for call in cluster.rest(second, cluster.look("n1")):
        cluster.carry_out(call)
    assert condition(server)["message"].startswith(f"[{second.incident}]")
    assert len(server.names("events")) == 2
    assert cluster.rest(DRAIN, cluster.look("n1")) == (), "the first act has nothing to do with it any more"


def test_a_conflict_is_tried_again_and_foreign_taints_are_kept(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1", taints=[GPU])
    cluster = make(pause=lambda seconds: None)
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    server.change_node("n1", add(LATE))  # between our reading and our writing
    server.conflict(2)  # and the kubelet, twice
    assert cluster.carry_out(calls[0]) == "done, at the 3. try: somebody else was changing the node"
    assert server.node("n1")["spec"]["taints"] == [GPU, LATE, OURS]
    assert server.applied == [("patch nodes", "n1")]
    clear = cluster.plan(CLEAR, cluster.look("n1"))
    more = {**LATE, "key": "node.example/later"}
    server.conflict(1, add(more))
    cluster.carry_out(clear[0])
    assert server.node("n1")["spec"] == {"unschedulable": False, "taints": [GPU, LATE, more]}


def test_a_conflict_without_end_is_told(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    server.conflict(50)
    with pytest.raises(ClusterError, match=r"PATCH .*/api/v1/nodes/n1 was answered 409"):
        cluster.carry_out(calls[0])
    assert not server.applied
    assert len(server.writes()) <= 5


def _cordon(node: dict[str, Any]) -> None:
    node["spec"]["unschedulable"] = True


def _made_anew(node: dict[str, Any]) -> None:
    node["metadata"]["uid"] = "another machine"


@pytest.mark.parametrize("change", [_cordon, _made_anew])
def test_nothing_is_done_to_what_has_changed(server: KubernetesServer, make: Make, change: Any) -> None:
    server.add_node("n1", taints=[GPU])
    cluster = make(pause=lambda seconds: None)
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    server.change_node("n1", change)
    before = server.node("n1")
    with pytest.raises(ClusterError, match="n1 changed meanwhile, so nothing is done to it"):
        cluster.carry_out(calls[0])
    assert server.node("n1") == before


def test_a_return_that_somebody_else_has_begun(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1", taints=[GPU])
    cluster = make(pause=lambda seconds: None)
    do(cluster, DRAIN)
    calls = cluster.plan(CLEAR, cluster.look("n1"))
    server.uncordon("n1")
    before = server.node("n1")
    with pytest.raises(ClusterError, match="somebody else has uncordoned it"):
        cluster.carry_out(calls[0])
    assert server.node("n1") == before


def test_a_condition_is_not_put_on_another_machine(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make()
    status = cluster.plan(DRAIN, cluster.look("n1"))[2]
    server.change_node("n1", _made_anew)
    with pytest.raises(ClusterError, match="422"):
        cluster.carry_out(status)
    assert condition(server) == {}


def test_an_answer_that_was_lost(server: KubernetesServer, make: Make) -> None:
    """The patch was applied, and nobody heard of it: made again, it changes nothing."""
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    for call in calls:
        cluster.carry_out(call)
    before = server.node("n1")
    assert [cluster.carry_out(call) for call in calls[:2]] == ["it was so already", "it was told before"]
    assert server.node("n1") == before


def test_a_manual_uncordon_is_honoured(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1", taints=[GPU])
    cluster = make()
    do(cluster, DRAIN)
    out = cluster.look("n1")
    server.uncordon("n1")
    now = cluster.look("n1")
    assert (now.service, now.ours, cluster.rest(DRAIN, now)) == ("in", False, ())
    assert now.raw == f"Ready,uncordoned by hand after bitwitness {ID} (its taint is still there)"
    assert "kubectl taint node n1 bitwitness.dev/suspect:NoSchedule-" in cluster.troubles()["n1"]
    assert cluster.landed(DRAIN, out, now) == "yes", "it was done; that it is undone is a person's will"
    with pytest.raises(ConfigurationError, match="a person has returned it to service: it is left alone"):
        cluster.plan(DRAIN, now)
    other = replace(DRAIN, incident="20261130T093015Z-000002")
    assert cluster.plan(other, now), "a new incident is another matter"
    do(cluster, CLEAR)
    assert server.node("n1")["spec"] == {"taints": [GPU]}, "what is left of ours goes"
    cluster.look("n1")
    assert cluster.troubles() == {}


def test_only_what_we_cordoned_is_uncordoned(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1", unschedulable=True)
    cluster = make()
    with pytest.raises(ConfigurationError, match="not by bitwitness"):
        cluster.plan(CLEAR, cluster.look("n1"))
    assert cluster.plan(DRAIN, cluster.look("n1")) == ()
    said = json.dumps({"incident": ID, "reason": "x", "cordoned": False})
    server.change_node("n1", lambda node: node["metadata"]["annotations"].update({SUSPECT: said}))
    assert cluster.look("n1").ours
    do(cluster, CLEAR)
    assert server.node("n1")["spec"] == {"unschedulable": True}


def test_pods_leave_when_asked(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1", labels={"batch.kubernetes.io/job-name": "train"})
    server.add_pod("guarded-0", "n1")
    server.add_pod("agent", "n1", daemon=True)
    server.add_pod("ended", "n1", phase="Succeeded")
    server.add_pod("elsewhere", "n2")
    server.protect("guarded-0")
    calm, cluster = make(), make(evict=True)
    assert all("eviction" not in call.words[1] for call in calm.plan(DRAIN, calm.look("n1")))
    do(calm, DRAIN)
    busy = cluster.look("n1")
    assert (busy.service, busy.jobs) == ("draining", ("ml/job/train",))
    left = cluster.rest(DRAIN, busy)
    assert [call.words[1].rpartition("/")[0] for call in left] == [
        "/api/v1/namespaces/ml/pods/guarded-0",
        "/api/v1/namespaces/ml/pods/train-0",
    ]
    with pytest.raises(ClusterError, match=r"the pod may not go yet: .* disruption budget"):
        cluster.carry_out(left[0])
    cluster.carry_out(left[1])
    assert cluster.carry_out(left[1]) == "the pod is gone"
    server.release("guarded-0")
    server.remove("pods", "ml", "guarded-0")
    server.add_pod("guarded-0", "n2")  # one of the same name, elsewhere
    assert cluster.carry_out(left[0]) == "the pod is gone"
    assert sorted(server.names("pods")) == ["agent", "elsewhere", "ended", "guarded-0"]
    now = cluster.look("n1")
    assert (now.service, cluster.rest(DRAIN, now)) == ("out", ())


def test_a_conflict_about_a_budget_is_no_pod_that_is_gone(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    cluster = make(evict=True)
    do(make(), DRAIN)
    (evict,) = cluster.rest(DRAIN, cluster.look("n1"))
    server.quarrel("train-0")
    with pytest.raises(ClusterError, match="409"):
        cluster.carry_out(evict)
    server.change("pods", "ml", "train-0", lambda pod: pod["metadata"].update(uid="another"))
    assert cluster.carry_out(evict) == "the pod is gone"


def test_a_pod_that_is_leaving_is_not_asked_again(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    cluster = make(evict=True)
    do(make(), DRAIN)
    server.change("pods", "ml", "train-0", lambda pod: pod["metadata"].update(deletionTimestamp="2026-11-29T10:00:00Z"))
    now = cluster.look("n1")
    assert (now.service, cluster.rest(DRAIN, now)) == ("draining", ())


def test_evictions_end_when_a_person_has_returned_the_node(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    server.add_pod("train-1", "n1")
    cluster = make(evict=True)
    do(make(), DRAIN)
    first, _ = cluster.rest(DRAIN, cluster.look("n1"))
    cluster.carry_out(first)
    server.uncordon("n1")
    assert cluster.rest(DRAIN, cluster.look("n1")) == ()
    assert server.names("pods") == ["train-1"]


@pytest.mark.parametrize(
    ("verb", "resource", "rule"),
    [
        ("get", "nodes", 'ClusterRole: apiGroups: [""], resources: [nodes], verbs: [get]'),
        ("list", "pods", 'ClusterRole: apiGroups: [""], resources: [pods], verbs: [list]'),
        ("patch", "nodes", 'ClusterRole: apiGroups: [""], resources: [nodes], verbs: [patch]'),
        ("patch", "nodes/status", 'ClusterRole: apiGroups: [""], resources: [nodes/status], verbs: [patch]'),
        ("create", "events", 'Role in namespace default: apiGroups: [""], resources: [events], verbs: [create]'),
        ("create", "pods/eviction", 'ClusterRole: apiGroups: [""], resources: [pods/eviction], verbs: [create]'),
    ],
)
def test_a_permission_that_is_missing_is_named(
    server: KubernetesServer, make: Make, verb: str, resource: str, rule: str
) -> None:
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    server.forbid(verb, resource)
    with pytest.raises(ClusterError) as caught:
        do(make(evict=True), DRAIN)
    assert rule in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_server_that_hangs(server: KubernetesServer, make: Make) -> None:
    server.slow = 0.6
    with pytest.raises(ClusterError, match=r"was not answered within 0\.15 s"):
        make(timeout=0.15).look("n1")


def test_credentials_that_are_not_taken(server: KubernetesServer, make: Make) -> None:
    cluster = make()
    server.token = "another one"
    with pytest.raises(ClusterError, match=r"401 .*; who asks is not known") as caught:
        cluster.look("n1")
    assert TOKEN not in f"{caught.value!r} {caught.getrepr(style='long')}", "the server repeats it"


def test_a_token_with_the_end_of_its_line(server: KubernetesServer, make: Make, tmp_path: Path) -> None:
    server.add_node("n1")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert make(token_file=tmp_path / "token").look("n1").service == "in"


@pytest.mark.parametrize("token", [f"{TOKEN}\nX-More: y", f"{TOKEN}\x00", f"{TOKEN}\u00fc"])
def test_a_token_that_is_none_is_not_shown(server: KubernetesServer, make: Make, tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(ClusterError, match="the token of the credentials is not one word") as caught:
        make(token_file=tmp_path / "token").look("n1")
    assert TOKEN not in repr(caught.value)
    assert not server.requests


@pytest.mark.parametrize("name", ["train-0", "pod_train-0"])
def test_a_name_that_is_a_pod_is_no_node(server: KubernetesServer, make: Make, name: str) -> None:
    """A job that was not told its node: the pod's node of today is not taken in its place."""
    server.add_node("n1")
    server.add_pod("train-0", "n1")
    cluster = make()
    state = cluster.look(name)
    assert (state.service, state.ours) == ("absent", False)
    assert state.raw.startswith("train-0 is a pod in namespace ml, and no node: its job was not told where it runs")
    assert "fieldRef: {fieldPath: spec.nodeName}" in state.raw
    assert list(cluster.troubles()) == [name]
    assert cluster.troubles()[name].startswith(f"an incident names {name}: train-0 is a pod")
    with pytest.raises(ConfigurationError, match=f"the cluster has no node {name}: nothing is done"):
        cluster.plan(replace(DRAIN, node=name), state)
    assert cluster.look("n2") == replace(cluster.look("n2"), service="absent", raw="")
    assert not server.writes()


def test_a_pod_that_is_gone_is_still_no_node(server: KubernetesServer, make: Make) -> None:
    """Its name says so, and no Node is asked for, because none can have it."""
    cluster = make()
    assert cluster.look("pod_train-0").raw.startswith("train-0 is a pod, and no node: its job was not told")
    assert [path for _, path, _ in server.requests] == ["/api/v1/pods"]
    server.forbid("list", "pods")
    assert cluster.look("pod_train-0").raw.startswith("train-0 is a pod, and no node: its job was not told")


def test_names_at_their_limits(server: KubernetesServer, make: Make) -> None:
    """Two nodes whose names differ at the end only, and an incident that is no label: each has its own Event."""
    nodes = [".".join(["a" * 62] * 4)[:252] + end for end in "xy"]
    incident = "Ünusual incident: " + "9" * 60
    cluster = make()
    for node in nodes:
        server.add_node(node)
        act = Act("drain", node, incident, "r\n" * 2000, tuple(f"GPU-{number}" for number in range(99)))
        do(cluster, act)
        now = cluster.look(node)
        assert now.service == "out"
        assert now.reason.startswith(f"{act.tag}: r")
        assert cluster.rest(act, now) == ()
    assert len(set(server.names("events"))) == 2


def test_the_size_of_the_cluster(server: KubernetesServer, make: Make) -> None:
    for number in range(600):  # more than two pages
        server.add_node(f"n{number}", labels={"pool": "train" if number % 2 else "web"})
    server.change_node("n1", _cordon)
    server.change_node("n3", lambda node: node["status"]["conditions"][1].update(status="Unknown"))
    assert (make().census().total, make().census().out) == (600, 2)
    assert (make(nodes="pool=web").census().total, make(nodes="pool=web").census().out) == (300, 0)


@pytest.mark.parametrize(
    "call",
    [
        Call(("PATCH", "/api/v1/nodes/n1/../n2"), {}),
        Call(("PATCH", "/api/v1/nodes/n1?x=y"), {}),
        Call(("PATCH", "/api/v1/nodes/n1"), None),
        Call(("POST", "/api/v1/namespaces/ml/pods"), {}),
        Call(("DELETE", "/api/v1/nodes/n1"), {}),
    ],
)
def test_no_other_call_is_made(server: KubernetesServer, make: Make, call: Call) -> None:
    with pytest.raises(ConfigurationError, match="not a request of this cluster"):
        make().carry_out(call)
    assert not server.requests


@pytest.mark.parametrize("after", ["other.example/key", ""])
def test_a_return_takes_back_the_taint_that_was_written(server: KubernetesServer, make: Make, after: str) -> None:
    """The settings name another one since; what somebody else has under a key that an annotation names stays."""
    server.add_node("n1", taints=[GPU])
    do(make(), DRAIN)
    assert make(taint=after).look("n1").ours
    do(make(taint=after), CLEAR)
    assert server.node("n1")["spec"] == {"unschedulable": False, "taints": [GPU]}
    said = json.dumps({"incident": ID, "reason": "x", "taint": GPU["key"]})
    server.change_node("n1", lambda node: node["metadata"]["annotations"].update({SUSPECT: said}))
    do(make(taint=after), CLEAR)
    assert server.node("n1")["spec"]["taints"] == [GPU]


def test_no_taint_where_none_is_wanted(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make(taint="")
    do(cluster, DRAIN)
    assert server.node("n1")["spec"] == {"unschedulable": True}
    assert cluster.look("n1").ours
    with pytest.raises(ConfigurationError, match="cannot be the key of a taint"):
        make(taint="no key")
