"""A controller, a person and other systems change nodes in any order; afterwards everything of others is as they left it.

The seed of a run that fails stands in the name of the test.
"""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.clusters.base import Act, Call
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_words import INCIDENT, SUSPECT, suspicion_of
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_acting import CLEAR, DRAIN

STEPS = 100


class Play:
    """One node, and all who change it."""

    def __init__(self, server: KubernetesServer, cluster: KubernetesCluster, seed: int) -> None:
        self.server, self.cluster, self.chance = server, cluster, random.Random(seed)
        self.taints: set[str] = set()
        self.planned: list[Call] = []
        self.now = datetime(2026, 11, 29, 9, 30, tzinfo=UTC)
        self.found = self.planned_at = self.now
        self.returned = self.found - timedelta(days=1)
        often = (self.plan, self.plan, self.carry, self.carry, self.carry)
        self.steps = (*often, self.change, self.race, self.uncordon, self.clear, self.next)

    def act(self) -> Act:
        """Of the incident that is looked after now."""
        return replace(DRAIN, incident=f"{self.found:%Y%m%dT%H%M%SZ}-4be1d2")

    def others(self, node: dict[str, Any]) -> None:
        """Another system adds or takes away a taint of its own."""
        key = f"other.example/{self.chance.randrange(4)}"
        kept = [one for one in node["spec"].get("taints", []) if one["key"] != key]
        if key not in self.taints:
            kept.insert(self.chance.randrange(len(kept) + 1), {"key": key, "effect": "NoSchedule"})
        self.taints ^= {key}
        node["spec"]["taints"] = kept

    def plan(self) -> None:
        self.planned_at = self.now
        try:
            self.planned = list(self.cluster.plan(self.act(), self.cluster.look("n1")))
        except BitwitnessError:
            self.planned = []

    def carry(self) -> None:
        if not self.planned:
            return
        before = self.shown()
        try:
            self.cluster.carry_out(self.planned.pop(0))
        except BitwitnessError:
            self.planned = []
        after = self.shown()
        if after[0] and not before[0]:
            assert self.found > self.returned, "cordoned for what a person had answered"
        if before[1] and not after[1]:
            self.returned = self.planned_at
        assert before[0] or not after[0] or before[1] != after[1], "cordoned again although a person had uncordoned it"

    def shown(self) -> tuple[bool, str]:
        """Whether it is cordoned, and the incident on it."""
        node = self.server.node("n1")
        found = suspicion_of(node["metadata"]["annotations"].get(SUSPECT))
        return node["spec"].get("unschedulable", False), found.incident if found else ""

    def change(self) -> None:
        self.server.change_node("n1", self.others)

    def race(self) -> None:
        self.server.conflict(1, self.others)

    def uncordon(self) -> None:
        self.server.uncordon("n1")

    def clear(self) -> None:
        self.planned_at = self.now
        self.planned = list(self.cluster.plan(CLEAR, self.cluster.look("n1")))

    def next(self) -> None:
        self.found = self.now

    def check(self) -> None:
        """What is of others is as they left it."""
        found = [one["key"] for one in self.server.node("n1")["spec"].get("taints", []) if one["key"] != SUSPECT]
        assert sorted(found) == sorted(self.taints)


@pytest.mark.parametrize("seed", range(5))
def test_everybody_at_once(server: KubernetesServer, make: Make, seed: int) -> None:
    server.add_node("n1")
    server.add_node("n2")
    untouched = server.node("n2")
    clock = [datetime.min.replace(tzinfo=UTC)]
    play = Play(server, make(pause=lambda seconds: None, now=lambda: clock[0]), seed)
    cordons = 0
    for _ in range(STEPS):
        play.now += timedelta(minutes=1)
        clock[0] = play.now
        was = play.shown()[0]
        play.chance.choice(play.steps)()
        cordons += play.shown()[0] and not was
        play.check()
    assert cordons > 1, "nothing has happened"
    for _ in range(STEPS):  # until nobody is faster any more
        play.clear()
        if not play.planned:
            break
        play.carry()
    play.check()
    node = server.node("n1")
    assert play.cluster.look("n1").service == "in"
    assert SUSPECT not in node["metadata"]["annotations"]
    assert INCIDENT not in node["metadata"]["labels"]
    assert all(taint["key"] != SUSPECT for taint in node["spec"].get("taints", []))
    assert server.node("n2") == untouched
