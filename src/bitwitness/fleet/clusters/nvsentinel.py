"""Kubernetes with NVSentinel beside us: it is told why a node is suspect, and where that is wanted, takes it out itself.

Whoever has no token may speak to NVSentinel only of the node on which it runs (NVIDIA/NVSentinel
docs/configuration/authentication.md, ab47e44), so a controller cannot. It writes on the Node, and that node's agent
(`bitwitness fleet agent`) says it. With STORE_ONLY we cordon as without NVSentinel, which keeps the event and touches nothing. With
EXECUTE_REMEDIATION NVSentinel cordons, drains and repairs by its own rules, and one of them must be about us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import kubernetes, nvsentinel_plan
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Census,
    Check,
    JobState,
    Landed,
    NodeState,
    valid_node,
)
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.nvsentinel_events import AGENT, MANAGED, OPTED_OUT, Strategy, valid_strategy
from bitwitness.fleet.clusters.nvsentinel_plan import AWAIT

_SETTINGS = {"kind", "strategy", "kubernetes"}
_RETURNS = 120.0
"""Seconds that NVSentinel and the agent of a node may take to return it: the agent looks every 15 s."""
_PAUSE = 2.0

RULE = (
    f'- {{name: {AGENT}, version: "1", enabled: true, match: {{all: ['
    f"{{kind: HealthEvent, expression: \"event.agent == '{AGENT}' && event.isFatal == true\"}}, "
    f"{{kind: Node, expression: \"!('{OPTED_OUT}' in node.metadata.labels && node.metadata.labels['{OPTED_OUT}'] == 'false')\"}}"
    "]}, cordon: {shouldCordon: true}}"
)
"""The rule that fault-quarantine needs, as one line of YAML: an entry of `fault-quarantine.ruleSets` of its Helm chart; none of its own is about us."""


class NVSentinelCluster:
    """A cluster of Kubernetes with NVSentinel in it.

    Args:
        inner: the cluster of Kubernetes.
        strategy: whether NVSentinel is to act.
        returns: seconds that it may take to return a node.
        pause: waits; another one in tests.
        ticks: seconds that pass.
    """

    name = "nvsentinel"
    scheduler = "kubernetes"
    acts: frozenset[ActKind] = frozenset({"drain", "clear"})

    def __init__(
        self,
        inner: KubernetesCluster,
        strategy: Strategy = "STORE_ONLY",
        *,
        returns: float = _RETURNS,
        pause: Callable[[float], None] = time.sleep,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self._execute = inner, strategy == "EXECUTE_REMEDIATION"
        self._returns, self._pause, self._ticks = returns, pause, ticks

    # Looking ----------------------------------------------------------------------------------------------------------

    def look(self, node: str) -> NodeState:
        """The node now, with what NVSentinel shows on it: both of the same version of the Node."""
        state, found = self.inner.read(node)
        return state if state.service == "absent" else nvsentinel_plan.with_quarantine(state, found)

    def census(self) -> Census:
        """The size of the cluster now."""
        return self.inner.census()

    def troubles(self) -> Mapping[str, str]:
        """What is wrong with a part of it."""
        return self.inner.troubles()

    # Acting -----------------------------------------------------------------------------------------------------------

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act; none where nothing is left of it."""
        known = act.kind in self.acts and state.service not in ("absent", "unknown") and state.node == act.node
        if not known or not self._through_nvsentinel(state):
            return self.inner.plan(act, state)
        valid_node(act.node)
        if act.kind == "drain":
            return nvsentinel_plan.drain(act, state)
        return (*self.inner.plan(act, state), *nvsentinel_plan.waiting(act.node, state, self._returns))

    def rest(self, act: Act, now: NodeState) -> tuple[Call, ...]:
        """What is left of an act that has landed; of what is NVSentinel's, nothing is ours."""
        return () if self._through_nvsentinel(now) else self.inner.rest(act, now)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act has happened, by what the node shows now."""
        if act.kind == "clear" and self._through_nvsentinel(before):
            return nvsentinel_plan.landed(act, before, now)
        if self._through_nvsentinel(now):
            return nvsentinel_plan.landed(act, before, now)
        return self.inner.landed(act, before, now)

    def carry_out(self, call: Call) -> str:
        """Do it; what was answered.

        Raises:
            ClusterError: refused, or NVSentinel has not returned the node in time.
            ConfigurationError: it is no call of this cluster.
        """
        if call.words[:1] == (AWAIT,):
            return self._await(call)
        return self.inner.carry_out(call)

    def _through_nvsentinel(self, state: NodeState) -> bool:
        return nvsentinel_plan.goes_through_nvsentinel(state, execute=self._execute)

    def _await(self, call: Call) -> str:
        node = valid_node(call.words[1].rpartition("/")[2]) if len(call.words) == 2 else ""
        if not isinstance(call.body, Mapping) or not isinstance(call.body.get("seconds"), int | float):
            raise ConfigurationError(f"not a request of this cluster: {call}")
        seconds = float(call.body["seconds"])
        end = self._ticks() + seconds
        while True:
            state = self.look(node)
            if state.service == "in":
                return "NVSentinel has returned it"
            held = nvsentinel_plan.quarantine(state)
            others = bool(held.others) and not held.is_ours
            if others or self._ticks() >= end:
                raise ClusterError(
                    f"{node} is not back{'' if others else f' after {seconds:.0f} s'}: {_why_not_back(state)}"
                )
            self._pause(_PAUSE)

    # Jobs -------------------------------------------------------------------------------------------------------------

    def job(self, job: str) -> JobState:
        """A job now."""
        return self.inner.job(job)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """As Kubernetes does."""
        return self.inner.plan_requeue(job, exclude)

    # One of several ---------------------------------------------------------------------------------------------------

    def leader(self) -> str:
        """Take the lead or keep it."""
        return self.inner.leader()

    def resign(self) -> None:
        """Give the lead up."""
        self.inner.resign()

    # Rehearsed --------------------------------------------------------------------------------------------------------

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Try everything that these calls need, and change nothing."""
        through = self._through_nvsentinel(state)
        own = [call for call in calls if call.words[:1] != (AWAIT,)]
        return (*self.inner.check(act, state, own), *_checks(act.node, state, through))

    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that count."""
        return self.inner.nodes()

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether a job would go on without a node that is taken out."""
        return self.inner.check_job(job)


def from_settings(settings: Mapping[str, Any]) -> NVSentinelCluster:
    """The cluster that the table `cluster` of a policy describes.

    Raises:
        ConfigurationError: a setting is unknown or has an impossible value.
    """
    if unknown := sorted(set(settings) - _SETTINGS):
        raise ConfigurationError(
            f"unknown settings of a cluster with NVSentinel: {', '.join(unknown)}; known: {', '.join(sorted(_SETTINGS))} "
            "(those of Kubernetes stand in [cluster.kubernetes])"
        )
    inner = settings.get("kubernetes", {})
    if not isinstance(inner, Mapping):
        raise ConfigurationError(f"cluster.kubernetes is a table, not {inner!r:.80}")
    strategy = valid_strategy(str(settings.get("strategy", "STORE_ONLY")), "cluster.strategy")
    return NVSentinelCluster(kubernetes.from_settings({**inner, "kind": "kubernetes"}), strategy)


def _why_not_back(state: NodeState) -> str:
    held = nvsentinel_plan.quarantine(state)
    if held.is_ours:
        return (
            f"NVSentinel still holds it because of us ({state.raw}). Does the agent run there, with --strategy EXECUTE_REMEDIATION "
            "(bitwitness fleet agent --check)? Has NVSentinel's circuit breaker tripped?"
        )
    if held.others:
        return (
            f"NVSentinel has taken back what we said, and holds it because of {', '.join(held.others)}: they return it"
        )
    return f"it is {state.raw} ({state.reason or 'no reason'}), and not because of NVSentinel"


def _checks(node: str, state: NodeState, through: bool) -> tuple[Check, ...]:
    """What can be said beforehand of NVSentinel and the agent; most of it stands where we cannot look."""
    if nvsentinel_plan.managed(state):
        managed = Check(
            f"NVSentinel may act on {node}", "good", f"it is not labelled {MANAGED}=false or {OPTED_OUT}=false"
        )
    else:
        managed = Check(
            f"NVSentinel may act on {node}",
            "bad" if through else "unknown",
            f"the node is labelled {MANAGED}=false or {OPTED_OUT}=false: NVSentinel only stores what it is told of it",
            f"kubectl label node {node} {MANAGED}- {OPTED_OUT}-, when its other owner is done with it",
        )
    agent = Check(
        f"the agent on {node}",
        "unknown",
        "whether it runs there and reaches NVSentinel's socket cannot be seen from here",
        "in its pod: bitwitness fleet agent --check --nvsentinel SOCKET --state FILE"
        + (", and start it with --strategy EXECUTE_REMEDIATION" if through else ""),
    )
    if not through:
        return managed, agent
    rule = Check(
        "a rule of fault-quarantine about us",
        "unknown",
        "its rules stand in its own configuration; without one about us it cordons nothing",
        f"have this in fault-quarantine.ruleSets of NVSentinel's values, beside all others (Helm replaces the whole list): {RULE}",
    )
    return managed, agent, rule


__all__ = ["RULE", "NVSentinelCluster", "from_settings"]
