"""Returning a node to service, which is always a person's decision: only what bitwitness took out, and with a reason.

What still waits for the node is closed first, and when that was is kept: a controller that runs beside, or later, must not take it
out again because of an incident that the person has just answered. An act that was begun and is not shown yet is waited for.
Its strikes are forgotten, and its devices may come back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError, RunFilesError
from bitwitness.fleet.begun import begun
from bitwitness.fleet.clusters.base import Act, Call, Cluster, NodeState, one_line, valid_node
from bitwitness.fleet.identity import write_condemned
from bitwitness.fleet.kept import Book
from bitwitness.fleet.notify import About, compose_clear
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.publishing import CONDEMNED, publish
from bitwitness.fleet.state import State


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was done, or would be."""

    node: str
    calls: tuple[Call, ...]
    closed: int
    devices: tuple[str, ...]
    text: str
    warning: str = ""

    @property
    def closing(self) -> str:
        """How many proposals that waited are closed, in a sentence; "" where none is."""
        if not self.closed:
            return ""
        many = self.closed != 1
        return f"{self.closed} proposal{'s' * many} that waited for it {'are' if many else 'is'} closed"

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        calls = [str(call) for call in self.calls]
        return {
            "node": self.node,
            "calls": calls,
            "closed": self.closed,
            "devices": list(self.devices),
            "text": self.text,
            "warning": self.warning,
        }


def clear(
    state: State,
    cluster: Cluster,
    node: str,
    why: str,
    who: str,
    *,
    notifiers: tuple[str, ...] = (),
    dry: bool = False,
    timeout: float = 30.0,
) -> Cleared:
    """Return a node to service.

    Args:
        state: of the controller, which may be running.
        cluster: that has the node.
        node: its name.
        why: what was repaired or found out.
        who: whoever asks.
        notifiers: names of those who are told.
        dry: only say what would be done.
        timeout: seconds that a call of the controller to the cluster may take.

    Raises:
        ConfigurationError: there is no reason, no such node, or somebody else took it out.
        ClusterError: the cluster did not do it, or does not show it; or it does not show yet what it was asked for before.
    """
    if not why.strip():
        raise ConfigurationError("returning a node needs a reason: what was repaired or found out?")
    before = cluster.look(valid_node(node))
    book = Book(state)
    done_before = [one.act.kind for one in book.intents(node=node) if one.outcome == "done"]
    # Its machine was exchanged for one of another name: the cluster has nothing to return, and its devices may come back.
    gone = before.service == "absent" and bool(done_before)
    if not gone:
        _refuse(before, replaced=bool({"reboot", "replace"} & set(done_before)))
    act = Act("clear", node, "", one_line(why))
    calls = () if gone else tuple(replace(call, who=who) for call in cluster.plan(act, before))
    devices = tuple(dict.fromkeys(device for one in book.proposals(node=node) for device in one.proposal.devices))
    text = f"the cluster has no {node} any more: nothing is called, and its devices may come back"
    done = Cleared(node, calls, book.waiting(node), devices, text if gone else f"{node} is in service again")
    _wait_for_begun(book, cluster, before, timeout)
    if dry:
        return done
    record = {"calls": [str(call) for call in calls], "before": before.raw, "reason": before.reason}
    with state.change():
        earlier = book.clears()
        _wait_for_begun(book, cluster, before, timeout)  # one that is begun from now on finds that it is closed
        state.note("clear", why, node=node, who=who, record=record)
        done = replace(done, closed=book.close_proposals(node, f"{who} returned the node: {why}"))
        for intent in book.intents(unsettled=True, node=node):
            book.set_outcome(intent.key, "cleared", f"{who} returned the node: {why}")
        time = book.add_clear(node, devices, who)
    left = ""
    try:
        if not gone:
            now, left = _return(cluster, act, before, calls)
            done = replace(done, text=_is_back(now, node))
    except (ClusterError, ConfigurationError) as error:
        with state.change():
            state.note("clear failed", str(error), node=node, who=who)
            book.take_back_clear(node, time, who, earlier)
        raise
    _forget(state, book, done, who, why, notifiers)
    waits = "" if gone or not before.awaits else f"{node} still waits for {before.awaits}, which may take it out again"
    return replace(done, warning="; ".join(filter(None, (left, waits, _publish(state, book)))))


def _is_back(now: NodeState, node: str) -> str:
    """What a node is after its return, in a sentence."""
    if now.service == "absent":
        return f"{node} is kept out no more, and may join again; no run has it now"
    if now.service == "unknown":
        return f"the cluster has returned {node}, and does not tell now what it is"
    return f"{node} is in service again"


def _return(cluster: Cluster, act: Act, before: NodeState, calls: tuple[Call, ...]) -> tuple[NodeState, str]:
    """Have the cluster do it, if the node still is what it was when the calls were planned, and look.

    Returns:
        The node as it is then, and what is wrong although it is returned; "" where nothing is.
    """
    again = cluster.look(act.node)
    if (again.service, again.reason) != (before.service, before.reason):
        raise ClusterError(
            f"{act.node} changed meanwhile: it is {again.raw or again.service} now ({again.reason or 'no reason'}). Try again"
        )
    refused: ClusterError | None = None
    for call in calls:
        try:
            cluster.carry_out(call)
        except ClusterError as error:
            refused = error
            break
    try:
        now = cluster.look(act.node)
    except ClusterError as error:
        if refused is not None or not calls:
            raise
        # All of it was accepted: what was done is not called a failure because it cannot be looked at.
        return NodeState(act.node, "unknown"), f"{act.node} was returned, and could not be looked at since: {error}"
    if cluster.landed(act, before, now) != "yes":
        if refused is not None:
            raise refused
        raise ClusterError(
            f"{act.node} does not show that it is in service: it is {now.raw or now.service} ({now.reason or 'no reason'})"
        )
    wrong = "" if refused is None else f"{act.node} is in service, and not all was taken back (say it again): {refused}"
    return now, wrong


def _wait_for_begun(book: Book, cluster: Cluster, now: NodeState, timeout: float) -> None:
    """An act that was asked for, and is only slow to show, would take out what has just been returned."""
    for intent in book.intents(unsettled=True, node=now.node):
        called = begun(book.state, intent)
        kind, limit = intent.act.kind, called.shown + timedelta(seconds=timeout)
        if intent.outcome is not None or not intent.started or called.refused or intent.tried > limit:
            continue
        if cluster.landed(intent.act, intent.before, now) != "yes":
            left = (limit - intent.tried).total_seconds()
            raise ClusterError(
                f"the {kind} of {now.node} was asked for {intent.tried.total_seconds():.0f} s ago (incident {intent.act.incident}) and is "
                f"not shown yet: it would come after the return. Nothing was changed; try again when `bitwitness fleet status` shows how "
                f"it ended, or in {left:.0f} s"
            )


def _refuse(state: NodeState, *, replaced: bool) -> None:
    if state.service == "absent":
        raise ConfigurationError(f"the cluster has no node {state.node}")
    if state.service == "unknown":
        raise ClusterError(f"the cluster does not tell whether {state.node} is in service ({state.raw}): try again")
    if state.service != "in" and not state.ours and not (state.reason.startswith("Action:") and replaced):
        whose = f" by {state.reason_by}" if state.reason_by else ""
        raise ConfigurationError(
            f"{state.node} was taken out{whose}, not by bitwitness (reason: {state.reason or 'none'}): only they return it"
        )


def _forget(state: State, book: Book, done: Cleared, who: str, why: str, notifiers: tuple[str, ...]) -> None:
    with state.change():
        open_ones = [one for one in book.intents(unsettled=True, node=done.node) if one.outcome is None]
        if not any(one.started for one in open_ones):  # what was found while it was being returned, and is not begun
            book.close_proposals(done.node, f"{who} returned the node: {why}")
            for one in open_ones:
                book.set_outcome(one.key, "cleared", f"{who} returned the node: {why}")
        book.add_clear(done.node, done.devices, who)
        book.forget(done.node, done.devices)
        for key in state.said(f"told:{done.node}:"):
            state.unsay(key)
        state.note("cleared", why, node=done.node, who=who, record={"devices": list(done.devices)})
        about = About(state.stamp(), "", state=str(state.folder))
        Outbox(state, notifiers).put(compose_clear(done.node, who, why, about))


def _publish(state: State, book: Book) -> str:
    """Tell the nodes that the devices may come back; why they are not told yet, or ""."""
    write_condemned(state.folder / CONDEMNED, book.condemned())
    shared = state.about().get("publish", "")
    if not shared:
        return ""
    try:
        publish(Path(shared), book.condemned())
    except RunFilesError as error:
        return f"nodes still refuse its devices, until the controller can write there: {error}"
    return ""
