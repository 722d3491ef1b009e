"""Whether a node that had to be taken out is still out: somebody may have returned it without knowing why it was.

An operator who resumes a node is not overruled: what a person has decided is not undone by a program (unless a job that starts there
shows that the condemned device is in it still, `identity`). But who drained it for a
fan, and resumes it when the fan turns, need not know that its arithmetic was shown to be wrong meanwhile. So it is said, for
as long as it is so; `bitwitness fleet clear` is the way to say that it is meant.
"""

from __future__ import annotations

import logging

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Cluster, NodeState
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.kept import Book, Kept
from bitwitness.fleet.watching import Trouble

logger = logging.getLogger(__name__)

_EVERY = 60.0
"""Seconds between two looks at a node."""
_GONE = 3600.0
"""Seconds more, where the cluster has no such node: its machine was exchanged, and the new one has another name."""
_A_ROUND = 5
"""Nodes that are looked at in one round: what is new comes first."""


class Keeper:
    """Looks at the nodes that should be out.

    Args:
        book: what is kept.
        cluster: that has them.
    """

    def __init__(self, book: Book, cluster: Cluster) -> None:
        self._book, self._cluster, self._state = book, cluster, book.state
        self._looked: dict[str, float] = {}
        self._back: dict[str, str] = {}

    def round(self) -> list[Trouble]:
        """The nodes that are in service again, and were not cleared."""
        wanted = self._wanted()
        self._back = {node: text for node, text in self._back.items() if node in wanted}
        now = self._state.clock.ticks()
        due = [node for node in wanted if now - self._looked.get(node, -_EVERY) >= _EVERY]
        for node in sorted(due, key=lambda one: self._looked.get(one, 0.0))[:_A_ROUND]:
            try:
                seen = self._cluster.look(node)
            except (ClusterError, OSError, *DAMAGE) as error:
                logger.debug("%s cannot be looked at: %s", node, error)
                continue
            self._looked[node] = now if seen.service != "absent" else now + _GONE
            self._back.pop(node, None)
            if seen.service == "in" and not self._is_another(seen):
                (last,) = self._book.proposals(key=wanted[node])
                self._back[node] = _text(last)
        return [Trouble(f"back:{node}", text, "critical") for node, text in sorted(self._back.items())]

    def _is_another(self, seen: NodeState) -> bool:
        """Whether the name is now that of another machine: what was wrong is gone, and a device that comes back with it is told apart."""
        done = [one for one in self._book.intents(node=seen.node) if one.outcome == "done"]
        was = done[-1].before.instance if done else ""
        return bool(was) and bool(seen.instance) and was != seen.instance

    def _wanted(self) -> dict[str, int]:
        """Nodes that should be out and were not cleared since; with the last proposal of each."""
        cleared = {one.node: one.time for one in self._book.clears()}
        return {node: key for node, (key, ended) in self._book.kept_out().items() if cleared.get(node, "") < ended}


def _text(kept: Kept) -> str:
    """The same at every look, so that it is told once."""
    node, incident = kept.proposal.node, kept.proposal.incident
    return (
        f"{node} is in service again, and nobody has cleared it: it was to stay out because of incident {incident} "
        f"({kept.proposal.reason}). It is left alone, since a person has resumed it, unless a job shows that the same device is in it. If that is right: bitwitness fleet clear {node} "
        f"--why TEXT; if not, drain it by hand"
    )
