"""Starting a health check of a node that is out of service, which a person asks for: once, whoever clicks twice and whatever is killed.

The request is noted before it is made. SageMaker gives a check no id, so where it cannot be told whether one was started, none is
started again until what would be seen of it must have been seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.asking import Preview, needed
from bitwitness.fleet.clock import moment
from bitwitness.fleet.clusters.base import Act, Call, Checking, Cluster, NodeState, one_line, valid_node
from bitwitness.fleet.notify import clean
from bitwitness.fleet.state import State

PAUSE = timedelta(minutes=30)
"""For which no second check of a machine is asked for: a check shows after minutes."""


@dataclass(frozen=True, slots=True)
class Started:
    """What became of a request.

    Attributes:
        node: of which.
        calls: the exact calls.
        text: what was done, in a sentence.
        new: whether they were made now; False where somebody has asked for it already.
    """

    node: str
    calls: tuple[str, ...]
    text: str
    new: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"node": self.node, "calls": list(self.calls), "text": self.text, "new": self.new}


def preview_check(cluster: Cluster, node: str) -> Preview:
    """What would be called, and what that needs; nothing is changed.

    Raises:
        ConfigurationError: this cluster checks no nodes, or this node cannot be checked now.
        ClusterError: the node cannot be looked at.
    """
    if not isinstance(cluster, Checking):
        raise ConfigurationError(
            f"{cluster.name} has no health check that could be started from here: run one on the node itself, e.g. `dcgmi diag`"
        )
    state = cluster.look(valid_node(node))
    calls = cluster.plan_check(node, state)
    act = Act("drain", node, "", "a health check")
    return Preview(act, state, calls, needed(cluster, act, state, calls), (_MEANING,))


_MEANING = "a check that passes rules out no silent corruption, and returns no node; one that fails may have the machine replaced by the cluster"


def start_check(
    state: State, cluster: Cluster, node: str, why: str, who: str, *, shown: str = "", limit: float = 30.0
) -> Started:
    """Start a check.

    Args:
        state: of the controller, which may be running.
        cluster: that has the node.
        node: its name.
        why: what for.
        who: whoever asks.
        shown: digest of the preview that was shown; "" where none was.
        limit: seconds that one call to the cluster may take.

    Raises:
        ConfigurationError: there is no reason, the node cannot be checked, or it is not what was shown.
        ClusterError: the cluster did not do it, or it cannot be told whether it did.
    """
    why = one_line(clean(why).replace("\n", " "), 2000)
    if not why:
        raise ConfigurationError("a health check needs a reason, which is kept: what is it for?")
    try:
        found = preview_check(cluster, node)
    except ConfigurationError:  # e.g. because it is being checked already, as somebody has asked for
        if (earlier := _lately(state, node, "", limit)) is not None:
            return earlier
        raise
    if (earlier := _lately(state, node, found.before.instance, limit)) is not None:
        return earlier
    if shown and shown != found.digest:
        raise ConfigurationError(f"what would be called about {node} is not what was shown: look at it again")
    words = tuple(str(call) for call in found.calls)
    with state.change():
        earlier = _lately(state, node, found.before.instance, limit)
        if earlier is not None:
            return earlier
        number = _begin(state, found.before, why, who, words)
        record = {"calls": list(words), "machine": found.before.instance, "before": found.before.raw}
        state.note("health check", f"is about to be asked for: {why}", node=node, who=who, record=record)
    said = _call(state, cluster, number, node, who, found.calls)
    return Started(node, words, f"a health check of {node} was asked for{f': {said}' if said else ''}", new=True)


def _begin(state: State, before: NodeState, why: str, who: str, words: Sequence[str]) -> int:
    clock = state.clock
    return state.write(
        "INSERT INTO health_checks (node, machine, begun, boot, ticks, who, why, calls) VALUES (?,?,?,?,?,?,?,?)",
        (before.node, before.instance, state.stamp(), clock.boot(), clock.ticks(), who, why, json.dumps(list(words))),
    )


def _call(state: State, cluster: Cluster, number: int, node: str, who: str, calls: Sequence[Call]) -> str:
    """Make the calls; what was answered to the first. What comes after it only notes that it was asked for."""
    said = ""
    for place, call in enumerate(calls):
        try:
            answered = cluster.carry_out(call)
        except (ClusterError, ConfigurationError) as error:
            refused = place == 0 and bool(getattr(error, "refused", isinstance(error, ConfigurationError)))
            outcome = "asked for" if place else ("refused" if refused else "unclear")
            text = f"{call}: {error}"
            with state.change():
                _end(state, number, outcome, text)
                state.note("health check failed", f"{outcome}: {text}", node=node, who=who)
            if place:
                return f"{said}; that it was could not be noted on the node: {error}"
            if refused:
                raise
            raise ClusterError(
                f"whether the health check of {node} was started is not known: {error}. It is not asked for again for "
                f"{PAUSE.total_seconds() / 60:.0f} minutes; look at the node"
            ) from error
        said = said or answered
    with state.change():
        _end(state, number, "asked for", said)
        state.note("health check asked for", said or "the cluster has taken the request", node=node, who=who)
    return said


def _end(state: State, number: int, outcome: str, text: str) -> None:
    state.write("UPDATE health_checks SET outcome = ?, text = ? WHERE number = ?", (outcome, text, number))


def _lately(state: State, node: str, machine: str, limit: float) -> Started | None:
    """One that was begun already and may be under way; of this machine, where it is known which that is."""
    if state.schema < 3:
        return None
    rows = state.read(
        "SELECT begun, boot, ticks, who, why, calls, outcome FROM health_checks WHERE node = ? AND (? = '' OR machine = ?) "
        "AND (outcome IS NULL OR outcome != 'refused') ORDER BY number DESC LIMIT 1",
        (node, machine, machine),
    )
    for begun, boot, ticks, who, why, calls, outcome in rows:
        if state.clock.since(moment(begun), boot, ticks) < PAUSE + timedelta(seconds=limit):
            told = "was asked for" if outcome == "asked for" else "was begun, and whether it was started is not known,"
            text = f"a health check of {node} {told} by {who} at {begun} ({why}): none is asked for a second time yet"
            return Started(node, tuple(json.loads(calls)), text, new=False)
    return None
