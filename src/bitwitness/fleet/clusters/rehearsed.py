"""A cluster on which nothing is done: what `--dry-run` acts upon.

It shows the real cluster, keeps the exact calls instead of carrying them out, and from then on shows a node as it would be,
so that budgets and the order of things are those of a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitwitness.fleet.clusters.base import Act, ActKind, Call, Census, Cluster, JobState, Landed, NodeState


class Rehearsed:
    """A cluster in front of a real one.

    Args:
        cluster: the real one; it is looked at and nothing more.

    Attributes:
        calls: what would have been called, in order.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.name, self.scheduler = cluster.name, cluster.scheduler
        self.acts: frozenset[ActKind] = cluster.acts
        self.calls: list[Call] = []
        self._planned: Act | JobState | None = None
        self._done: dict[str, Act] = {}
        self._started: set[str] = set()

    def look(self, node: str) -> NodeState:
        """The node, as it would be."""
        now, act = self._cluster.look(node), self._done.get(node)
        if act is None:
            return now
        if act.kind == "clear":
            return replace(now, service="in", reason="")
        return replace(
            now, service="out", raw=f"{now.raw}, after a rehearsed {act.kind}", reason=f"{act.tag}: {act.reason}"
        )

    def census(self) -> Census:
        """The size of the cluster, and how many nodes would be out."""
        now = self._cluster.census()
        return Census(now.total, now.out + sum(act.kind != "clear" for act in self._done.values()))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """As the real one."""
        self._planned = act
        return self._cluster.plan(act, state)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether it was rehearsed."""
        return "yes" if act.node in self._done else self._cluster.landed(act, before, now)

    def job(self, job: str) -> JobState:
        """The job, as it would be."""
        now = self._cluster.job(job)
        return replace(now, state="pending", restarts=now.restarts + 1) if job in self._started else now

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """As the real one."""
        self._planned = job
        return self._cluster.plan_requeue(job, exclude)

    def carry_out(self, call: Call) -> str:
        """Keep the call."""
        self.calls.append(call)
        if isinstance(self._planned, Act):
            self._done[self._planned.node] = self._planned
        elif self._planned is not None:
            self._started.add(self._planned.job)
        return "rehearsed"
