"""A controller on a fake cluster, with a clock that a test moves: what tests of the controller stand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Kept
from bitwitness.fleet.notify import Message
from bitwitness.fleet.outbox import deliver
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.runfiles import Incident
from tests.fleet.incidents import NOW, topology, verdict, write

ACT = FleetPolicy(act=True, nodes_per_hour=100, cluster_share=1.0, cluster={"kind": "fake"})
NODES = tuple(f"n{number}" for number in range(4))


class HandClock(Clock):
    """A clock that stands still until it is moved; the wall can be set apart from what really passes."""

    def __init__(self, wall: datetime = NOW) -> None:
        self.wall, self.passed, self.started = wall, 0.0, "boot-1"

    def now(self) -> datetime:
        return self.wall

    def boot(self) -> str:
        return self.started

    def ticks(self) -> float:
        return self.passed

    def move(self, by: timedelta) -> None:
        """Time passes."""
        self.wall += by
        self.passed += by.total_seconds()


@dataclass
class Listener:
    """A notifier that keeps what it gets, or refuses it."""

    name: str = "listener"
    got: list[Message] = field(default_factory=list)
    refuses: bool = False

    def send(self, message: Message) -> None:
        if self.refuses:
            raise ClusterError("refused, as it was told")
        self.got.append(message)


class Rehearsal:
    """A run, a state, a cluster and a controller, in a folder."""

    def __init__(self, folder: Path, nodes: Sequence[str] = NODES, policy: FleetPolicy = ACT) -> None:
        self.folder, self.policy, self.clock = folder, policy, HandClock()
        self.where = topology(nodes, per_node=1)
        self.run_dir = folder / "run"
        self.run_dir.mkdir(exist_ok=True)
        self.cluster = FakeCluster(nodes, folder / "cluster.json", clock=self.clock.now)
        self.listener = Listener()
        self.signals: list[Signal] = []
        self.state: State
        self.controller: Controller
        self.begin()

    def begin(self, **policy: Any) -> None:
        """Start a controller, as after the end of the one before."""
        if hasattr(self, "state"):
            self.controller.close()
            self.state.close()
        self.policy = replace(self.policy, **policy)
        self.state = State(self.folder / "state", clock=self.clock)
        self.state.read("PRAGMA synchronous=OFF")  # nobody pulls the plug of a test
        self.controller = Controller(
            [self.run_dir],
            self.state,
            self.cluster,
            self.policy,
            notifiers=[self.listener],
            read_signals=self.heard,
        )

    def heard(self, incident: Incident) -> Sequence[Signal]:
        return self.signals

    def incident(self, number: int = 1, ranks: Sequence[int] = (1,), **more: Any) -> Path:
        """An incident appears, now."""
        persistence = more.pop("persistence", "persistent")
        kind = more.pop("kind", "compute")
        found = verdict(self.where, ranks, persistence, kind=kind)
        return write(
            more.pop("run_dir", self.run_dir), number, found, self.where, more.pop("at", self.clock.wall), **more
        )

    def rounds(self, count: int = 1, apart: timedelta = timedelta(seconds=2)) -> None:
        """Some rounds, and what they tell is delivered."""
        for _ in range(count):
            self.controller.round()
            deliver(self.state, [self.listener])
            self.clock.move(apart)

    def kept(self, node: str = "") -> list[Kept]:
        return self.controller.book.proposals(node=node)

    def statuses(self) -> dict[str, str]:
        """Node to where its last proposal stands."""
        return {one.proposal.node: one.status for one in self.kept()}

    def told(self) -> list[str]:
        """Subjects of what was delivered."""
        return [one.subject for one in self.listener.got]

    def trail(self, what: str) -> list[str]:
        """Texts of a kind in the audit trail."""
        return [one.text for one in self.state.history() if one.what == what]

    def end(self) -> None:
        self.controller.close()
        self.state.close()
