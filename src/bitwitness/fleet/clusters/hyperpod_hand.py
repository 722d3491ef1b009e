"""A deep health check that a person asks for, of a node that bitwitness has taken out: pure.

It is noted on the node under the incident because of which the node is out, so that the controller takes it for the one that it would ask
for itself, and none is started twice. What comes of it returns no node: a pass does not rule out silent corruption.
"""

from __future__ import annotations

from dataclasses import replace

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import TAG, Act, Call, Cluster, NodeState, valid_node
from bitwitness.fleet.clusters.hyperpod_limits import CHECKS
from bitwitness.fleet.clusters.hyperpod_plan import Way, seen_in, start_check
from bitwitness.fleet.clusters.hyperpod_words import CHECKING, MARKED, PENDING


def plan_check(node: str, state: NodeState, inner: Cluster, way: Way) -> tuple[Call, ...]:
    """The calls.

    Raises:
        ConfigurationError: the node is in service or not ours, has no machine that runs, or is checked already.
    """
    if why := _why_not(valid_node(node), state):
        raise ConfigurationError(why)
    act = Act("drain", node, _incident(state.reason), _words(state.reason))
    return start_check(act, state, inner, way if way.checks else replace(way, checks=CHECKS))


def _why_not(node: str, state: NodeState) -> str:
    seen = seen_in(state)
    if state.service == "draining":
        return f"a job runs on {node} still: a health check waits until none does"
    if state.service != "out":
        return f"{node} is {state.raw or state.service}: only a node that is out of service is checked"
    if not state.ours:
        return f"{node} was taken out by {state.reason_by or 'somebody else'} ({state.reason or 'no reason'}): it is theirs to check"
    if not seen.instance or not seen.group:
        return f"which machine {node} is cannot be told: {seen.why or 'SageMaker has not said'}"
    if seen.status == CHECKING or seen.check == "InProgress":
        return f"{seen.instance} is being checked already"
    if seen.status != "Running" or seen.health in PENDING.values():
        return f"{seen.instance} is {seen.health or seen.status or 'not known'}: a machine that runs is checked, and none that is to go"
    return ""


def _incident(reason: str) -> str:
    """The id in `bitwitness 20261129T093015Z-4be1d2: ...`."""
    return reason.partition(":")[0].removeprefix(TAG).strip()


def _words(reason: str) -> str:
    return reason.partition(":")[2].replace(MARKED, "").strip()
