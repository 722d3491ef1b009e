"""From a controller to a node that NVSentinel takes out, and back: API server over HTTP, agent, gRPC, and what fault-quarantine does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, Call, NodeState, Rehearsing
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_words import CLEARED
from bitwitness.fleet.clusters.nvsentinel import RULE, NVSentinelCluster, from_settings
from bitwitness.fleet.clusters.nvsentinel_plan import AWAIT
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.nvsentinel.quarantine import BY_HAND
from tests.fleet.nvsentinel.world import World

DRAIN = Act("drain", "n0", "20261129T093015Z-4be1d2", "replay differs at step 4100", ("GPU-1111",))
CLEAR = Act("clear", "n0", "", "board replaced")
MANAGED = "nvsentinel.dgxc.nvidia.com/managed"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with KubernetesServer() as server:
        server.add_node("n0", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}], labels={"zone": "a"})
        server.add_node("n1")
        made = World(server, tmp_path, ("n0",))
        yield made
        made.end()


@pytest.fixture
def cluster(world: World) -> NVSentinelCluster:
    return world.client("EXECUTE_REMEDIATION")


def ask(cluster: NVSentinelCluster, act: Act = DRAIN) -> NodeState:
    """Look, plan, carry out; the node before it."""
    before = cluster.look(act.node)
    for call in cluster.plan(act, before):
        cluster.carry_out(call)
    return before


def told(world: World) -> list[tuple[bool, str]]:
    return [(one.healthy, one.strategy) for one in world.connector.taken]


# STORE_ONLY -----------------------------------------------------------------------------------------------------------


def test_what_is_only_stored_is_cordoned_by_us(world: World) -> None:
    cluster, plain = world.client("STORE_ONLY"), KubernetesCluster(world.api)
    before = cluster.look("n0")
    same = replace(before, more={**before.more, "time": plain.look("n0").more["time"]})
    assert cluster.plan(DRAIN, same) == plain.plan(DRAIN, same)
    ask(cluster)
    now = cluster.look("n0")
    assert (now.service, now.ours) == ("out", True)
    world.work()
    world.work()
    assert told(world) == [(False, "STORE_ONLY")]
    assert "quarantineHealthEvent" not in world.server.node("n0")["metadata"]["annotations"]
    before = ask(cluster, CLEAR)
    assert cluster.landed(CLEAR, before, cluster.look("n0")) == "yes"
    world.work()
    assert told(world) == [(False, "STORE_ONLY"), (True, "STORE_ONLY")]


# EXECUTE_REMEDIATION --------------------------------------------------------------------------------------------------


def test_asking_nvsentinel_changes_one_annotation_and_a_label(world: World, cluster: NVSentinelCluster) -> None:
    world.acts, old = False, world.server.node("n0")
    before = ask(cluster)
    new = world.server.node("n0")
    said = json.loads(new["metadata"]["annotations"].pop("bitwitness.dev/suspect"))
    assert (said["incident"], said["execute"], said["cordoned"], said["devices"]) == (
        DRAIN.incident,
        True,
        False,
        ["GPU-1111"],
    )
    assert new["metadata"]["labels"].pop("bitwitness.dev/incident") == DRAIN.incident
    new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
    assert new == old
    now = cluster.look("n0")
    assert (now.service, now.ours, now.raw) == ("in", False, "Ready,NVSentinel was asked")
    assert cluster.landed(DRAIN, before, now) == "no"
    assert [method for method, _ in world.server.writes()] == ["PATCH"]


def test_it_has_landed_when_nvsentinel_has_cordoned(world: World, cluster: NVSentinelCluster) -> None:
    before = ask(cluster)
    now = cluster.look("n0")
    assert (now.service, now.ours, now.reason_by) == ("out", True, "NVSentinel")
    assert now.reason == f"bitwitness {DRAIN.incident}: {DRAIN.reason}"
    assert "NVSentinel:bitwitness" in now.raw
    assert cluster.landed(DRAIN, before, now) == "yes"
    assert cluster.plan(DRAIN, now) == cluster.rest(DRAIN, now) == ()
    (event,) = world.connector.taken
    assert (event.node, event.strategy, event.entities) == ("n0", "EXECUTE_REMEDIATION", (("GPU_UUID", "GPU-1111"),))
    assert cluster.census().out == 1


def test_a_return_waits_for_nvsentinel(world: World, cluster: NVSentinelCluster) -> None:
    ask(cluster)
    world.work()
    before = cluster.look("n0")
    calls = cluster.plan(CLEAR, before)
    assert [call.words[0] for call in calls] == ["PATCH", AWAIT]
    ask(cluster, CLEAR)
    now = cluster.look("n0")
    assert cluster.landed(CLEAR, before, now) == "yes"
    assert (now.service, now.raw) == ("in", "Ready")
    assert told(world) == [(False, "EXECUTE_REMEDIATION"), (True, "EXECUTE_REMEDIATION")]
    left = world.server.node("n0")["metadata"]
    assert (left["labels"], set(left["annotations"])) == ({"zone": "a"}, {CLEARED})


def test_a_return_answers_what_was_found_before_it(world: World, cluster: NVSentinelCluster) -> None:
    ask(cluster)
    world.work()
    ask(cluster, CLEAR)
    with pytest.raises(ConfigurationError, match="a person has returned n0 to service at"):
        ask(cluster)
    assert len(world.connector.taken) == 2
    ask(cluster, replace(DRAIN, back=True))
    assert cluster.look("n0").ours, "its device is on a node once more, which is news"


def test_another_machine_of_the_same_name_is_not_asked_for(world: World, cluster: NVSentinelCluster) -> None:
    world.quarantine.rules = ()
    before = ask(cluster)
    told_before = len(world.connector.taken)
    world.server.remove("nodes", "", "n0")
    world.server.add_node("n0", created="2027-01-01T00:00:00Z")
    world.server.change_node("n0", lambda node: node["status"]["nodeInfo"].update(bootID="b", systemUUID="s"))
    now = cluster.look("n0")
    assert cluster.landed(DRAIN, before, now) == "unknown"
    with pytest.raises(ConfigurationError, match="cannot be told"):
        cluster.plan(DRAIN, now)
    world.work()
    assert len(world.connector.taken) == told_before


def test_without_a_rule_nothing_lands_and_asking_anew_is_told_anew(world: World, cluster: NVSentinelCluster) -> None:
    world.quarantine.rules = ()
    before = ask(cluster)
    now = cluster.look("n0")
    assert cluster.landed(DRAIN, before, now) == "no"
    (call,) = cluster.plan(DRAIN, replace(now, more={**now.more, "time": "2026-11-29T10:00:00Z"}))
    world.quarantine.rules = ("bitwitness",)
    cluster.carry_out(call)
    assert cluster.landed(DRAIN, before, cluster.look("n0")) == "yes"
    assert told(world) == [(False, "EXECUTE_REMEDIATION")] * 2


def test_an_agent_that_may_only_store_takes_nothing_out(world: World, cluster: NVSentinelCluster) -> None:
    world.allowed = "STORE_ONLY"
    before = ask(cluster)
    assert cluster.landed(DRAIN, before, cluster.look("n0")) == "no"
    assert told(world) == [(False, "STORE_ONLY")]


def test_a_node_that_nvsentinel_leaves_alone_is_not_asked_for(world: World, cluster: NVSentinelCluster) -> None:
    world.server.change_node("n0", lambda found: found["metadata"]["labels"].update({MANAGED: "false"}))
    state = cluster.look("n0")
    assert "not managed by NVSentinel" in state.raw
    with pytest.raises(ConfigurationError, match=f"{MANAGED}=false.*cordon the node by hand"):
        cluster.plan(DRAIN, state)
    assert world.client("STORE_ONLY").plan(DRAIN, state)  # we cordon it: that is not NVSentinel's


def test_a_person_who_uncordons_is_not_overruled(world: World, cluster: NVSentinelCluster) -> None:
    before = ask(cluster)
    world.quarantine.uncordon_by_hand("n0")
    for forgotten in (False, True):
        if forgotten:
            world.forget()
        world.work()
        now = cluster.look("n0")
        assert (now.service, now.raw) == ("in", "Ready,uncordoned by hand after NVSentinel had it")
        assert len(world.connector.taken) == 1
        assert cluster.landed(DRAIN, before, now) == "yes"  # it had, and is theirs to undo
        with pytest.raises(ConfigurationError, match="a person has returned it"):
            cluster.plan(DRAIN, now)
    other = replace(
        DRAIN, incident="20261130T000000Z-000002"
    )  # the next one is another matter, though the mark is still there
    ask(cluster, other)
    now = cluster.look("n0")
    assert (now.service, now.reason.startswith(other.tag)) == ("out", True)
    assert BY_HAND not in world.server.node("n0")["metadata"]["annotations"]


def test_what_nvsentinel_holds_for_others_is_theirs(world: World, cluster: NVSentinelCluster) -> None:
    world.quarantine.hold_for("n0", "gpu-health-monitor")
    now = cluster.look("n0")
    assert (now.service, now.ours, now.reason) == (
        "out",
        False,
        "NVSentinel has taken it out because of gpu-health-monitor",
    )
    assert cluster.plan(DRAIN, now) == ()
    with pytest.raises(ConfigurationError, match="not by bitwitness"):
        cluster.plan(CLEAR, now)


def test_a_return_of_what_others_hold_too_takes_back_ours_only(world: World, cluster: NVSentinelCluster) -> None:
    ask(cluster)
    world.quarantine.hold_for("n0", "gpu-health-monitor")
    assert cluster.look("n0").ours
    patch, wait = cluster.plan(CLEAR, cluster.look("n0"))
    cluster.carry_out(patch)
    with pytest.raises(ClusterError, match="taken back what we said, and holds it because of gpu-health-monitor"):
        cluster.carry_out(wait)
    now = cluster.look("n0")
    assert (now.service, now.ours) == ("out", False)
    assert told(world)[-1] == (True, "EXECUTE_REMEDIATION")


def test_a_return_without_an_agent_is_told_and_can_be_repeated(world: World, cluster: NVSentinelCluster) -> None:
    ask(cluster)
    world.acts = False
    patch, wait = cluster.plan(CLEAR, cluster.look("n0"))
    cluster.carry_out(patch)
    with pytest.raises(
        ClusterError, match=r"not back after 0 s: NVSentinel still holds it because of us .*fleet agent --check"
    ):
        cluster.carry_out(wait)
    now = cluster.look("n0")
    assert (now.ours, now.reason.startswith(DRAIN.tag)) == (True, True)  # by what NVSentinel keeps of our event
    # A person has returned it, and that is kept: when the agent is back NVSentinel uncordons, and nobody wonders why.
    assert cluster.landed(CLEAR, now, now) == "yes"
    assert now.awaits == "NVSentinel, which was told that it is over and has not returned it yet"
    for strategy in ("STORE_ONLY", "EXECUTE_REMEDIATION"):
        assert [call.words[0] for call in world.client(strategy).plan(CLEAR, now)] == [AWAIT]
    world.acts = True
    before = ask(cluster, CLEAR)
    assert cluster.landed(CLEAR, before, cluster.look("n0")) == "yes"


def test_what_a_person_cordons_before_nvsentinel_does_is_still_asked_for(
    world: World, cluster: NVSentinelCluster
) -> None:
    world.acts = False
    before = ask(cluster)
    world.server.change_node("n0", lambda node: node["spec"].update(unschedulable=True))  # for a maintenance
    now = cluster.look("n0")
    assert (now.service, now.ours, cluster.landed(DRAIN, before, now)) == ("out", False, "no")
    world.server.uncordon("n0")
    world.acts = True
    world.work()
    now = cluster.look("n0")
    assert (now.service, now.ours, cluster.landed(DRAIN, before, now)) == ("out", True, "yes")


def test_a_reason_with_half_a_character_is_told(world: World, cluster: NVSentinelCluster) -> None:
    ask(cluster, replace(DRAIN, reason="gpu says \udcff broken", devices=("GPU-\udcff1",)))
    world.work()
    (event,) = world.connector.taken
    assert "gpu says   broken" in event.message


def test_a_return_before_nvsentinel_has_acted_leaves_it_in(world: World, cluster: NVSentinelCluster) -> None:
    world.acts = False
    ask(cluster)
    world.acts = True
    world.agent("n0").round()  # it is told, and is slow
    asked = cluster.look("n0")
    assert cluster.landed(CLEAR, asked, asked) == "no"  # in service, and about to be taken out
    before = ask(cluster, CLEAR)
    world.work()
    assert cluster.landed(CLEAR, before, cluster.look("n0")) == "yes"
    assert told(world) == [(False, "EXECUTE_REMEDIATION"), (True, "EXECUTE_REMEDIATION")]


def test_a_cordon_of_somebody_else_stays_theirs_also_where_nvsentinel_holds_it_too(
    world: World, cluster: NVSentinelCluster
) -> None:
    world.acts = False
    before = ask(cluster)
    world.server.change_node("n0", lambda found: found["spec"].update(unschedulable=True))
    assert not cluster.look("n0").ours
    world.acts = True
    world.work()
    now = cluster.look("n0")
    assert (now.service, now.ours, now.reason) == ("out", False, "cordoned")
    assert cluster.landed(DRAIN, before, now) == "yes"  # it takes no jobs


def test_a_conflict_keeps_what_others_wrote_and_adds_no_taint(world: World, cluster: NVSentinelCluster) -> None:
    world.acts = False
    theirs = {"key": "anna.example/fan", "value": "bad", "effect": "NoSchedule"}
    (call,) = cluster.plan(DRAIN, cluster.look("n0"))
    world.server.conflict(2, lambda found: found["spec"].update(taints=[*found["spec"]["taints"][:1], theirs]))
    cluster.carry_out(call)
    found = world.server.node("n0")
    assert found["spec"] == {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, theirs]}
    assert "bitwitness.dev/suspect" in found["metadata"]["annotations"]


def test_what_was_begun_one_way_ends_that_way_whatever_the_settings_say_now(world: World) -> None:
    store, execute = world.client("STORE_ONLY"), world.client("EXECUTE_REMEDIATION")
    ask(store)
    world.work()
    before = ask(execute, CLEAR)  # we had cordoned it, so we uncordon it
    assert execute.landed(CLEAR, before, execute.look("n0")) == "yes"
    ask(execute, replace(DRAIN, incident="20261130T000000Z-000002"))
    assert store.look("n0").ours
    before = ask(store, CLEAR)  # NVSentinel had
    assert store.landed(CLEAR, before, store.look("n0")) == "yes"


def test_an_act_of_another_kind_or_node_is_none_of_this_clusters(cluster: NVSentinelCluster) -> None:
    state = cluster.look("n0")
    for act in (replace(DRAIN, kind="reboot"), replace(DRAIN, node="n1"), replace(DRAIN, node="n-1")):
        with pytest.raises(ConfigurationError):
            cluster.plan(act, state)
    for call in (Call((AWAIT, "/api/v1/nodes/n0")), Call((AWAIT, "n0", "x"), {"seconds": 1})):
        with pytest.raises(ConfigurationError):
            cluster.carry_out(call)


def test_a_node_is_read_once_so_that_all_of_a_look_is_of_one_version(world: World, cluster: NVSentinelCluster) -> None:
    world.server.requests.clear()
    assert cluster.look("n0").service == "in"
    assert [path for _, path, _ in world.server.requests].count("/api/v1/nodes/n0") == 1


# Settings and checks --------------------------------------------------------------------------------------------------


def test_settings(world: World) -> None:
    inner = {"kubeconfig": str(world.config), "evict": True}
    made = from_settings({"kind": "nvsentinel", "strategy": "EXECUTE_REMEDIATION", "kubernetes": inner})
    assert (made.name, made.scheduler, made.look("n0").service) == ("nvsentinel", "kubernetes", "in")
    assert isinstance(made, Rehearsing)
    with pytest.raises(ConfigurationError, match=r"unknown settings.*kubeconfig.*\[cluster.kubernetes\]"):
        from_settings({"kind": "nvsentinel", "kubeconfig": "x"})
    with pytest.raises(ConfigurationError, match="STORE_ONLY and EXECUTE_REMEDIATION"):
        from_settings({"kind": "nvsentinel", "strategy": "execute"})
    with pytest.raises(ConfigurationError, match="is a table"):
        from_settings({"kind": "nvsentinel", "kubernetes": "x"})


@pytest.mark.parametrize("strategy", ["STORE_ONLY", "EXECUTE_REMEDIATION"])
def test_what_cannot_be_seen_beforehand_is_said_with_what_to_do(world: World, strategy: Any) -> None:
    cluster = world.client(strategy)
    state = cluster.look("n0")
    writes = len(world.server.applied)
    found = {one.what: one for one in cluster.check(DRAIN, state, cluster.plan(DRAIN, state))}
    assert len(world.server.applied) == writes
    assert not [one for one in found.values() if one.outcome == "bad"], found
    assert found["NVSentinel may act on n0"].outcome == "good"
    assert "bitwitness fleet agent --check" in found["the agent on n0"].remedy
    rule = found.get("a rule of fault-quarantine about us")
    assert (rule is not None) == (strategy == "EXECUTE_REMEDIATION")
    if rule is not None:
        assert (rule.outcome, RULE in rule.remedy) == ("unknown", True)


def test_a_label_that_keeps_nvsentinel_off_is_bad_where_it_has_to_act(world: World) -> None:
    world.server.change_node("n0", lambda found: found["metadata"]["labels"].update({MANAGED: "false"}))
    outcomes = []
    for strategy in ("STORE_ONLY", "EXECUTE_REMEDIATION"):
        cluster = world.client(strategy)
        (managed,) = (
            one for one in cluster.check(DRAIN, cluster.look("n0"), ()) if one.what == "NVSentinel may act on n0"
        )
        outcomes.append(managed.outcome)
        assert f"kubectl label node n0 {MANAGED}-" in managed.remedy
    assert outcomes == ["unknown", "bad"]


def test_the_rule_is_an_entry_of_the_charts_list_and_the_one_in_the_guide() -> None:
    (rule,) = yaml.safe_load(RULE)
    assert rule["match"]["all"][0]["expression"] == "event.agent == 'bitwitness' && event.isFatal == true"
    guide = (Path(__file__).parents[3] / "docs" / "nvsentinel.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert yaml.safe_load(shown) == {"fault-quarantine": {"ruleSets": [rule]}}
