"""Nothing is done to a machine that may not be the one that was blamed, and what a person has answered stays answered, whoever leads next."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters.base import found_at
from bitwitness.fleet.clusters.kubernetes_words import CLEARED, SUSPECT, Clearance
from tests.fleet.kubernetes.conftest import NOW, Make
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_acting import CLEAR, DRAIN, ID, condition, do
from tests.fleet.kubernetes.test_leading import NODES, cordons, scene

LATER = replace(DRAIN, incident="20261130T093015Z-000002")


def made_anew(server: KubernetesServer, *, created: str = "2027-01-01T00:00:00Z", same_boot: bool = False) -> None:
    """Another machine gets the name n1; or its own kubelet registers it once more."""
    server.remove("nodes", "", "n1")
    server.add_node("n1", created=created)
    new = {} if same_boot else {"bootID": "another boot", "systemUUID": "another machine"}
    server.change_node("n1", lambda node: node["status"]["nodeInfo"].update(new))


def test_the_time_in_an_incident() -> None:
    assert found_at(ID) == datetime(2026, 11, 29, 9, 30, 15, tzinfo=UTC)
    assert [found_at(text) for text in ("", "by-hand", "20261129T093015Z", "20260231T093015Z-4be1d2")] == [None] * 4


# Another machine of the same name -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("created", "acts"),
    [
        ("2026-11-29T09:30:14Z", True),
        ("2026-11-29T09:30:15Z", False),
        ("2026-11-29T12:00:00+01:00", False),
        ("", True),
        ("no time", True),
    ],
)
def test_a_node_that_was_made_after_the_incident(
    server: KubernetesServer, make: Make, created: str, acts: bool
) -> None:
    server.add_node("n1", created=created)
    cluster = make()
    if acts:
        assert cluster.plan(DRAIN, cluster.look("n1"))
        return
    with pytest.raises(ConfigurationError, match=r"made at 2026-\S+, after the incident .* cannot be told"):
        cluster.plan(DRAIN, cluster.look("n1"))
    assert cluster.plan(replace(DRAIN, incident=""), cluster.look("n1")), "what a person asks for has no time"
    assert cluster.plan(replace(DRAIN, back=True), cluster.look("n1")), "its device was seen there since"


def test_a_drain_is_not_told_by_another_machine(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make()
    before = cluster.look("n1")
    assert cluster.landed(DRAIN, before, before) == "no"
    made_anew(server)
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "unknown"
    made_anew(server, same_boot=True)
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "no", "registered again, and not booted since"
    server.change_node("n1", lambda node: node["metadata"].update(uid=before.more["uid"]))
    server.change_node("n1", lambda node: node["status"]["nodeInfo"].update(bootID="the next one"))
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "no", "booted"
    server.change_node("n1", lambda node: node["status"]["nodeInfo"].update(systemUUID="another machine"))
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "unknown", "another machine that found the Node"


@pytest.mark.parametrize("when", ["between two looks", "after a refusal"])
def test_a_controller_leaves_another_machine_alone(
    server: KubernetesServer, make: Make, tmp_path: Path, when: str
) -> None:
    for node in NODES:
        server.add_node(node)
    with scene(make, tmp_path / "play") as play:
        play.incident("n1")
        if when == "between two looks":
            play.before_look(2, lambda: made_anew(server))
        else:
            server.forbid("patch", "nodes")
            play.rounds(1)
            assert play.stands() == [("failed", "")]
            server.allow()
            made_anew(server)
        play.rounds(5)
        assert cordons(server) == []
        play.later()
        play.rounds(3, apart=12 * 3600)
        ((status, hold),) = play.stands()
        assert (status, hold) in (("held", "cluster"), ("expired", "")), play.why()
    assert cordons(server) == []
    assert "unschedulable" not in server.node("n1")["spec"]


# What a person has answered -------------------------------------------------------------------------------------------


def test_a_return_stays_on_the_node(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make()
    do(cluster, DRAIN)
    patch = cluster.plan(CLEAR, cluster.look("n1"))[0]
    cluster.carry_out(patch)  # and the process is killed before the condition
    assert json.loads(server.node("n1")["metadata"]["annotations"][CLEARED]) == {
        "incident": ID,
        "time": "2026-11-29T10:00:00Z",
    }
    for step in range(2):
        for incident in (ID, "20261129T100000Z-000001"):
            with pytest.raises(ConfigurationError, match=r"has returned n1 to service at 2026-11-29T10:00:00Z"):
                cluster.plan(replace(DRAIN, incident=incident), cluster.look("n1"))
        left = cluster.plan(CLEAR, cluster.look("n1"))
        assert [call.words[1] for call in left] == ["/api/v1/nodes/n1/status"] * (1 - step)
        for call in left:
            cluster.carry_out(call)
    assert cluster.plan(replace(DRAIN, incident="20261129T100001Z-000002"), cluster.look("n1"))
    do(cluster, LATER)
    assert cluster.look("n1").ours
    assert cluster.rest(LATER, cluster.look("n1")) == ()


def test_another_controller_does_not_undo_a_return(server: KubernetesServer, make: Make, tmp_path: Path) -> None:
    """It has a state of its own, and finds an incident of the same day in the run."""
    for node in NODES:
        server.add_node(node)
    with scene(make, tmp_path / "first") as first:
        repaired = first.clock.now() + timedelta(hours=1)
        first.incident("n1")
        first.rounds(3)
        assert first.stands() == [("done", "")]
        clear(first.state, make(now=lambda: repaired), "n1", "replaced GPU 3", "kim@head")
    with scene(make, tmp_path / "second") as second:
        second.incident("n1")
        second.rounds(3)
        assert second.stands() == [("held", "cluster")]
        assert cordons(server) == ["n1", "n1"], "out and in"
        second.clock.move(timedelta(hours=2))
        second.incident("n1")
        second.rounds(3)
        assert second.stands()[1:] == [("done", "")], second.why()
    assert cordons(server) == ["n1"] * 3


def test_an_uncordon_by_hand_answers_what_was_found_before(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make()
    do(cluster, DRAIN)
    server.uncordon("n1")
    older = replace(DRAIN, incident="20261129T080000Z-000001")
    with pytest.raises(ConfigurationError, match=r"taken out at 2026-11-29T10:00:00Z for incident .* is left alone"):
        cluster.plan(older, cluster.look("n1"))
    assert cluster.plan(LATER, cluster.look("n1"))


def test_a_device_that_came_back_is_news(server: KubernetesServer, make: Make) -> None:
    """Also where the kubelet changes the node at this moment."""
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    do(cluster, DRAIN)
    do(cluster, CLEAR)
    noted = server.node("n1")["metadata"]["annotations"][CLEARED]
    server.conflict(1)
    do(cluster, replace(DRAIN, back=True))
    assert cluster.look("n1").ours
    assert server.node("n1")["metadata"]["annotations"][CLEARED] == noted


def test_a_return_that_is_made_while_a_drain_is_planned(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    text = Clearance("another one", "2026-11-29T10:00:00Z").text()
    server.conflict(1, lambda node: node["metadata"]["annotations"].update({CLEARED: text}))
    with pytest.raises(ClusterError, match=r"n1 changed meanwhile, .*: a person has returned it"):
        cluster.carry_out(calls[0])
    assert not server.applied


def test_a_return_is_from_one_incident(server: KubernetesServer, make: Make) -> None:
    """Somebody else returns it at the same moment, and it is taken out for what came after."""
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    do(cluster, DRAIN)
    calls = cluster.plan(CLEAR, cluster.look("n1"))
    do(cluster, CLEAR)
    do(cluster, LATER)
    with pytest.raises(ClusterError, match=f"it was taken out for incident {LATER.incident} meanwhile"):
        cluster.carry_out(calls[0])
    assert cluster.look("n1").ours


def test_a_return_of_what_is_half_taken_back_by_hand(server: KubernetesServer, make: Make) -> None:
    """The annotation was removed: the condition still says that the node is suspect, and the return is noted all the same."""
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    do(cluster, DRAIN)

    def by_hand(node: dict[str, Any]) -> None:
        node["metadata"].update(annotations={}, labels={})
        node["spec"].clear()

    server.change_node("n1", by_hand)
    server.conflict(1)
    do(cluster, CLEAR)
    assert SUSPECT not in server.node("n1")["metadata"]["annotations"]
    with pytest.raises(ConfigurationError, match="a person has returned n1"):
        cluster.plan(DRAIN, cluster.look("n1"))
    assert cluster.plan(CLEAR, cluster.look("n1")) == ()


def test_what_is_left_is_not_shown_on_a_node_that_was_returned(server: KubernetesServer, make: Make) -> None:
    """A person returns it between the look and the call."""
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    cluster.carry_out(cluster.plan(DRAIN, cluster.look("n1"))[0])
    status = cluster.rest(DRAIN, cluster.look("n1"))[-1]
    do(cluster, CLEAR)
    with pytest.raises(ClusterError, match="n1 changed meanwhile, so nothing is done to it"):
        cluster.carry_out(status)
    assert condition(server).get("status") != "True"


def test_what_is_left_is_shown_although_others_change_the_node(server: KubernetesServer, make: Make) -> None:
    server.add_node("n1")
    cluster = make(pause=lambda seconds: None)
    cluster.carry_out(cluster.plan(DRAIN, cluster.look("n1"))[0])
    status = cluster.rest(DRAIN, cluster.look("n1"))[-1]
    server.change_node("n1", lambda node: node["metadata"]["labels"].update(other="x"))
    assert cluster.carry_out(status) == "done, at the 2. try: somebody else was changing the node"
    assert condition(server)["status"] == "True"
    assert cluster.carry_out(status) == "it was so already"
    assert NOW.isoformat().startswith(condition(server)["lastTransitionTime"].removesuffix("Z"))


def test_a_device_that_came_back_is_taken_out_again(server: KubernetesServer, make: Make) -> None:
    """A person has uncordoned the node, and a job has shown that the condemned device is still in it."""
    server.add_node("n1")
    cluster = make()
    do(cluster, DRAIN)
    server.uncordon("n1")
    before = cluster.look("n1")
    with pytest.raises(ConfigurationError, match="left alone"):
        cluster.plan(DRAIN, before)
    back = replace(DRAIN, back=True)
    assert cluster.landed(back, before, before) == "no"
    for call in cluster.plan(back, before):
        cluster.carry_out(call)
    now = cluster.look("n1")
    assert (now.service, now.ours) == ("out", True)
    assert cluster.landed(back, before, now) == "yes"
