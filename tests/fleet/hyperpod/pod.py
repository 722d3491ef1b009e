"""A HyperPod cluster on loopback, and a controller in front of it: what the tests of the adapter stand on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.base import Act
from bitwitness.fleet.clusters.hyperpod import HyperPodCluster
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeNodes
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from tests.fleet.incidents import NOW, incident_id
from tests.fleet.rehearsal import HandClock, Rehearsal

POLICY = FleetPolicy(
    act=True,
    may=frozenset({"drain", "replace", "reboot"}),
    nodes_per_hour=9,
    cluster_share=1.0,
    act_within=timedelta(hours=6),
    cluster={"kind": "hyperpod"},
)
ID = incident_id(1)


def act(kind: str, node: str, incident: str = ID) -> Act:
    return Act(kind, node, incident, "no spare rows are left")  # type: ignore[arg-type]


class Pod(Rehearsal):
    """A controller whose cluster is HyperPod's; the node of rank 1 has bad memory."""

    def __init__(self, folder: Path, api: SageMakerApi, orchestrator: Any = "eks", **more: Any) -> None:
        self.clock = HandClock()
        self.api, self.more = api, more
        self.world = World({"gpu": 4}, self._now, orchestrator=orchestrator)
        self.nodes = FakeNodes(self.world)
        names = [self.nodes.name_of(one) for one in self.world.now()]
        self.node, self.machine = names[1], self.world.now()[1].id
        super().__init__(folder, names, POLICY)
        self.signals = [
            Signal("kernel", "xid:64", f"GPU-{self.node}-0", stamp(NOW), "memory", "strong", "no rows", host=self.node)
        ]

    def _now(self) -> datetime:
        return self.clock.now()

    def begin(self, **policy: Any) -> None:
        more = {"orchestrator": self.world.orchestrator, "ticks": self._ticks, **self.more}
        self.pod = HyperPodCluster(self.nodes, self.api, **more)
        self.cluster = self.pod  # type: ignore[assignment]
        super().begin(**policy)

    def _ticks(self) -> float:
        return self.clock.ticks()

    def minutes(self, count: int) -> None:
        """So many minutes, with a round in each."""
        self.rounds(count, timedelta(minutes=1))

    def critical(self) -> list[str]:
        return [one.subject for one in self.listener.got if one.severity == "critical"]

    def texts(self) -> str:
        return "\n".join(one.text for one in self.state.history())


def words(calls: Sequence[Any]) -> list[str]:
    """The kinds of calls, in order."""
    return [" ".join(call.words[:2]) for call in calls]
