"""What a world behind an adapter has to offer, so that one set of tests can be put to every adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from bitwitness.fleet.clusters.base import Act, Call, Cluster, Finishing, NodeState

JobPhase = Literal["absent", "running", "ended"]
INCIDENT = "20261129T120000Z-000001"


class Bench(Protocol):
    """A world with some nodes in service, and clients of it."""

    nodes: tuple[str, ...]
    """Names of nodes; at least three, all in service at the beginning."""
    once: frozenset[str]
    """Kinds in `changes` that must not happen twice because of one act."""

    def reset(self) -> None:
        """All as at the beginning."""

    def client(self) -> Cluster:
        """A fresh one, as of a new process."""

    def take_out(self, node: str) -> None:
        """Somebody else takes a node out: anna, because of a bad fan."""

    def take_in(self, node: str) -> None:
        """Somebody else returns a node to service, whoever took it out."""

    def refuse(self, on: bool) -> None:
        """Whatever would change something is refused; what asks is answered."""

    def unreachable(self, on: bool) -> None:
        """Nobody answers."""

    def traffic(self) -> int:
        """How much has reached the world so far, questions included; always 0 where that cannot be counted."""

    def changes(self) -> Sequence[tuple[str, str]]:
        """(kind, node) of everything that has changed the world so far, in order."""

    def shown(self, node: str) -> Any:
        """All that matters of a node, without times and versions: two ways to one end show the same."""

    def finish(self) -> None:
        """The world does what it was asked for and takes its time for: reboots, replacements, pods that leave."""

    def job(self, phase: JobPhase) -> str | None:
        """A job on the second node; its id. None where the cluster has no jobs."""


def drain(node: str, reason: str = "wrong numbers") -> Act:
    """An act of an incident."""
    return Act("drain", node, INCIDENT, reason, (f"GPU-{node}-0",))


def rest(cluster: Cluster, act: Act, now: NodeState) -> tuple[Call, ...]:
    """What is left of an act, of a cluster that can say."""
    return cluster.rest(act, now) if isinstance(cluster, Finishing) else ()


def do(cluster: Cluster, act: Act) -> NodeState:
    """Carry out a whole act, the rest as well; the node after it."""
    for call in cluster.plan(act, cluster.look(act.node)):
        cluster.carry_out(call)
    for call in rest(cluster, act, cluster.look(act.node)):
        cluster.carry_out(call)
    return cluster.look(act.node)


@contextmanager
def untouched(bench: Bench) -> Iterator[None]:
    """Nothing changes meanwhile."""
    before = list(bench.changes()), [bench.shown(node) for node in bench.nodes]
    yield
    assert (list(bench.changes()), [bench.shown(node) for node in bench.nodes]) == before
