"""A controller upon any adapter, that can be killed at any of its calls to the cluster.

The kill is an exception that no code catches: everything of the process is abandoned, and the next one has only what is on
disk and what the cluster shows. `tests/fleet/test_controller_kills.py` does the same with real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwitness.fleet.clusters.base import Call, Cluster, NodeState
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Book
from bitwitness.fleet.outbox import deliver
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.runfiles import Incident
from tests.fleet.clusters.bench import Bench
from tests.fleet.incidents import topology, verdict, write
from tests.fleet.rehearsal import ACT, HandClock, Listener

POLICY = replace(ACT, may=frozenset({"drain", "reboot", "replace"}))


class Killed(BaseException):
    """The process ends here."""


class Scene:
    """A run, a state and a controller, upon a bench.

    Attributes:
        last: the call that `kill_at` has seen last.
    """

    def __init__(self, bench: Bench, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.bench, self.folder, self.clock, self.listener = bench, folder, HandClock(), Listener()
        self.where = topology(bench.nodes, per_node=1)
        self.heard: list[Signal] = []
        self.last = Call(())
        self.cluster: Cluster
        self.state: State
        self.controller: Controller
        self._begin()

    def _begin(self) -> None:
        self.cluster = self.bench.client()
        self.state = State(self.folder / "state", clock=self.clock, check=False)
        self.state.read("PRAGMA synchronous=OFF")
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        self.controller = Controller(
            [run], self.state, self.cluster, POLICY, notifiers=[self.listener], read_signals=self._hear
        )

    def _hear(self, incident: Incident) -> list[Signal]:
        return self.heard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.controller.close()
        self.state.close()

    def again(self) -> None:
        """Another process, after the end of the one before: a fresh client, and what is on disk."""
        self.__exit__(None, None, None)
        self._begin()

    def incident(self, node: str, kind: str = "drain", **more: Any) -> None:
        """One that names a node, with signals of such a kind that this act is proposed; `more` stands in its record."""
        self.heard = _signals(node, kind, self.clock.now().isoformat())
        found = verdict(self.where, (self.bench.nodes.index(node),))
        write(self.folder / "run", 1, found, self.where, self.clock.now(), **more)

    def rounds(self, count: int = 1, apart: float = 40.0) -> None:
        """Some rounds; the world does what it was asked for between them."""
        for _ in range(count):
            self.controller.round()
            deliver(self.state, [self.listener])
            self.bench.finish()
            self.clock.move(timedelta(seconds=apart))

    def later(self) -> None:
        """Minutes and then hours pass."""
        self.rounds(5)
        self.rounds(5, apart=1800)

    def before_look(self, number: int, what: Callable[[], None]) -> None:
        """Something happens just before the controller looks at a node for the so manieth time."""
        looks, look = [0], self.cluster.look

        def looked(node: str) -> NodeState:
            looks[0] += 1
            if looks[0] == number:
                what()
            return look(node)

        setattr(self.cluster, "look", looked)  # noqa: B010

    def stands(self) -> list[tuple[str, str]]:
        """Where the proposals stand, and what holds them."""
        return [(one.status, one.hold if one.status == "held" else "") for one in Book(self.state).proposals()]

    def why(self) -> list[str]:
        """The trail, for whoever reads a test that fails."""
        return [f"{one.what}: {one.text}" for one in self.state.history()]

    def acted(self) -> list[str]:
        """Which acts were done."""
        return [one.act.kind for one in Book(self.state).intents() if one.outcome == "done"]

    def told(self) -> list[str]:
        """Subjects of what was delivered."""
        return [one.subject for one in self.listener.got]


def numbered(calls: int) -> Iterator[tuple[str, int]]:
    """Before and after each of so many calls."""
    for number in range(1, calls + 1):
        yield "before", number
        yield "after", number


def kill_at(scene: Scene, when: str, number: int, what: Callable[[Cluster], object] | None = None) -> int:
    """Some rounds of the controller, or something else, with a kill before or after a call; how many calls it made."""
    made, carry_out = [0], scene.cluster.carry_out

    def carried(call: Call) -> str:
        made[0] += 1
        scene.last = call
        if when == "before" and made[0] == number:
            raise Killed
        said = carry_out(call)
        if when == "after" and made[0] == number:
            raise Killed
        return said

    setattr(scene.cluster, "carry_out", carried)  # noqa: B010
    try:
        if what is None:
            scene.rounds(4)
        else:
            what(scene.cluster)
    finally:
        setattr(scene.cluster, "carry_out", carry_out)  # noqa: B010
    return made[0]


def _signals(node: str, kind: str, time: str) -> list[Signal]:
    device = f"GPU-{node}-0"
    about: dict[str, Any] = {"host": node}
    if kind == "replace":
        return [Signal("kernel", "xid:95", device, time, "memory", "strong", "uncontained memory error", **about)]
    if kind == "reboot":
        said = "the driver asks for a reboot"
        return [Signal("kernel", "xid:154", device, time, "loud", "medium", said, **about)]
    return []
