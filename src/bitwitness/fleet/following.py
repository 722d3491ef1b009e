"""Reboots and replacements that were asked for and are still to happen: the asking is not the end of it.

A node that was failed with `Action:Replace` is out of service at once, which is what protects jobs, and the act counts as
done. Whether anybody replaces it is another matter: HyperPod ignores words that it does not know, and a cluster without
spare machines waits. So the node is looked at until it waits no more, and after a while people are told that it still does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Act, Cluster, NodeState
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.kept import Book, Intent
from bitwitness.fleet.watching import Trouble

logger = logging.getLogger(__name__)

LATE = {"reboot": timedelta(minutes=30), "replace": timedelta(minutes=90)}
"""After which it is called failed: a reboot takes minutes, a replacement 20 to 30 of them (recovery.md section 2.2)."""
_EVERY = 60.0
_DONE = {"reboot": "rebooted", "replace": "replaced"}
_OVER = "told:asked:"


class Follower:
    """Looks after what was asked for.

    Args:
        book: what is kept.
        cluster: that was asked.
        recall: tells the cluster what a node was before an act, where it needs to know.
    """

    def __init__(self, book: Book, cluster: Cluster, recall: Callable[[Act, NodeState], None] | None = None) -> None:
        self._book, self._cluster, self._state, self._recall = book, cluster, book.state, recall
        self._looked: float | None = None
        self._busy: dict[int, float] = {}
        self._late: list[Trouble] = []

    def round(self) -> list[Trouble]:
        """What has not happened in time; the nodes are looked at once a minute."""
        now = self._state.clock.ticks()
        if self._looked is None or now - self._looked >= _EVERY:
            self._looked = now
            over, said = self._state.said(_OVER), self._state.said()
            waiting = [
                one
                for one in self._book.intents()
                if one.outcome == "done" and one.act.kind in LATE and f"{_OVER}{one.key}" not in over
            ]
            late = [self._look(one, now, said.get(_key(one), ("", ""))[0]) for one in waiting]
            self._late = [Trouble(_key(one), text, "critical") for one, text in zip(waiting, late, strict=True) if text]
        return self._late

    def _look(self, intent: Intent, now: float, said: str) -> str:
        """What is to be said of one: that it is late; "" where it is over, or there is time left."""
        try:
            if self._recall is not None:
                self._recall(intent.act, intent.before)
            seen = self._cluster.look(intent.act.node)
        except (ClusterError, OSError, *DAMAGE) as error:
            logger.warning("whether %s is %s cannot be seen: %s", intent.act.node, _DONE[intent.act.kind], error)
            return said  # nothing new is known
        # A cluster that knows why a node is gone says so: its machine was exchanged, and the new one has another name.
        gone = seen.service == "absent" and bool(seen.raw)
        if (gone or seen.service not in ("absent", "unknown")) and not seen.awaits:
            self._end(intent, seen)
            return ""
        if seen.jobs:
            self._busy[intent.key] = now  # it begins when they have ended
        limit, since = LATE[intent.act.kind], self._busy.get(intent.key)
        if intent.tried < limit or (since is not None and now - since < limit.total_seconds()):
            return ""
        return said or _text(intent, seen, limit)

    def _end(self, intent: Intent, seen: NodeState) -> None:
        act, booted = intent.act, f", booted at {seen.booted}" if seen.booted else ""
        text = f"{act.node} waits for no {act.kind} any more: it is {seen.raw or seen.service}{booted}"
        with self._state.change():
            self._state.say_once(f"{_OVER}{intent.key}", "over")
            self._state.note("over", text, incident=act.incident, node=act.node)
        self._busy.pop(intent.key, None)


def _key(intent: Intent) -> str:
    return f"asked:{intent.key}"


def _text(intent: Intent, seen: NodeState, limit: timedelta) -> str:
    """The same at every look, so that it is told once."""
    act = intent.act
    who = "HyperPod has not" if seen.awaits.startswith("Action:") else "the cluster has not"
    shown = f"{seen.raw or seen.service}{f' with the reason {seen.reason}' if seen.reason else ''}"
    minutes = limit.total_seconds() / 60
    text = (
        f"{act.node}: {who} {_DONE[act.kind]} it within {minutes:.0f} minutes (incident {act.incident}); it is {shown}"
    )
    return f"{text}. It takes no jobs; look at the cluster's events, and have it {_DONE[act.kind]} by hand"
