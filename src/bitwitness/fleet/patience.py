"""How long a round may wait for the cluster: one that hangs must not keep a controller from saying that it is alive.

A command that hangs takes its whole time-out, and a hundred proposals would each wait for it. So the first one that fails
slowly ends what is asked of the cluster in this round, and so does the sum of many slow answers; a refusal that comes at once
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from bitwitness.errors import ClusterError
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.base import Act, ActKind, Call, Census, Cluster, JobState, Landed, NodeState

_HANGS = 5.0
"""Seconds after which a call that fails is taken for one to a cluster that hangs."""
_A_ROUND = 30.0
"""Seconds that all calls of a round may take together; the one that is under way then is waited for."""

P = ParamSpec("P")
T = TypeVar("T")


class Patience:
    """Times what the cluster is asked.

    Args:
        clock: the time.

    Attributes:
        over: whether the rest is left for the next round.
        told_to_stop: whether the controller is to end; then nothing new is begun either.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._spent, self._hung = clock, 0.0, False
        self.told_to_stop: Callable[[], bool] = lambda: False

    def renew(self) -> None:
        """Another round begins."""
        self._spent, self._hung = 0.0, False

    @property
    def over(self) -> bool:
        """Whether the rest is left for the next round."""
        return self._hung or self._spent > _A_ROUND or self.told_to_stop()

    def ask(self, call: Callable[P, T], *words: P.args, **more: P.kwargs) -> T:
        """Ask the cluster something, and note how long that took.

        Raises:
            ClusterError, OSError: as the call does.
        """
        began = self._clock.ticks()
        try:
            return call(*words, **more)
        except (ClusterError, OSError):
            self._hung = self._hung or self._clock.ticks() - began >= _HANGS
            raise
        finally:
            self._spent += self._clock.ticks() - began


class Patient:
    """A cluster that is not asked any more in this round once that has taken too long; the call fails at once then."""

    def __init__(self, cluster: Cluster, patience: Patience) -> None:
        self._cluster, self._patience = cluster, patience
        self.name, self.scheduler = cluster.name, cluster.scheduler
        self.acts: frozenset[ActKind] = cluster.acts

    @property
    def over(self) -> bool:
        """Whether the rest is left for the next round."""
        return self._patience.over

    def _ask(self, call: Callable[P, T], *words: P.args, **more: P.kwargs) -> T:
        if self._patience.over:
            raise ClusterError("the cluster has taken too long in this round: it is asked in the next one")
        return self._patience.ask(call, *words, **more)

    def look(self, node: str) -> NodeState:
        """The node now."""
        return self._ask(self._cluster.look, node)

    def census(self) -> Census:
        """The size of the cluster now."""
        return self._ask(self._cluster.census)

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """As the cluster plans."""
        return self._cluster.plan(act, state)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """As the cluster says."""
        return self._cluster.landed(act, before, now)

    def job(self, job: str) -> JobState:
        """A job now."""
        return self._ask(self._cluster.job, job)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """As the cluster plans."""
        return self._cluster.plan_requeue(job, exclude)

    def carry_out(self, call: Call) -> str:
        """Do it."""
        return self._ask(self._cluster.carry_out, call)
