"""Deep health checks that this process has asked for, and what is seen of them: SageMaker gives them no id and keeps no list of them.

That one was asked for is noted on its node in the same breath, with the result that stood there before, so that another process neither
asks for it a second time nor takes an old result for a new one. What is seen of it is for people only: a pass returns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Call, NodeState
from bitwitness.fleet.clusters.hyperpod_plan import Seen, noted, seen_in
from bitwitness.fleet.clusters.hyperpod_words import CHECKING, RESULTS

SHOWS = 1800.0
"""Seconds after which a check of which nothing is seen is told: it shows after minutes."""


@dataclass
class _Asked:
    """One that was asked for: which node, when, the result that stood on it then, and whether something of it was seen."""

    node: str
    since: float
    result: str
    ran: bool = False


class DeepChecks:
    """The deep health checks of one process.

    Args:
        ticks: seconds that pass.
        fresh: seconds for which a result that was read counts as one that is there.
    """

    def __init__(self, ticks: Callable[[], float], fresh: float) -> None:
        self._ticks, self._fresh = ticks, fresh
        self._seen: dict[str, Seen] = {}
        self._asked: dict[str, _Asked] = {}
        self._busy: frozenset[str] = frozenset()
        self._results: dict[str, tuple[str, float]] = {}

    def see(self, state: NodeState) -> NodeState:
        """A node was looked at; the same, with what is known here of its check."""
        seen, out = seen_in(state), state.service in ("out", "draining")
        rest = self._busy - {seen.instance}
        self._busy = rest | {seen.instance} if state.service == "draining" else rest
        self._seen[state.node] = seen
        asked = self._asked.get(seen.instance)
        if asked is not None and not out:
            del self._asked[seen.instance]
        elif asked is not None:
            asked.ran = asked.ran or _runs(seen) or (seen.check in RESULTS and seen.check != asked.result)
            state = noted(state, ran=asked.ran)
            seen = seen_in(state)
        self._results.pop(state.node, None)
        new = seen.ran or seen.check != _before(seen.mark)
        if out and seen.mark and seen.check in RESULTS and new and not _runs(seen):
            self._results[state.node] = seen.check, self._ticks()
        return state

    def before(self, call: Call) -> str:
        """What there is to say in place of asking; "" where it is to be asked for now.

        Raises:
            ClusterError: a job runs there still.
        """
        for instance in _instances(call):
            if instance in self._busy:
                raise ClusterError(
                    f"the deep health check waits until no job runs on {instance} any more", refused=True
                )
            if asked := self._asked.get(instance):
                return f"it was asked for {self._ticks() - asked.since:.0f} s ago"
        return ""

    def after(self, call: Call) -> None:
        """SageMaker has taken the request."""
        for instance in _instances(call):
            node, seen = next(
                ((node, one) for node, one in self._seen.items() if one.instance == instance), ("", Seen())
            )
            self._asked[instance] = _Asked(node, self._ticks(), seen.check)

    def node_of(self, note: Call) -> str:
        """The node on which a check is to be noted, which this process has asked for, or sees running.

        Raises:
            ClusterError: none was.
        """
        words = {word for one in note.words for word in re.split("[/=]", one)}
        found = [
            node for node, seen in self._seen.items() if node in words and (seen.instance in self._asked or _runs(seen))
        ]
        if len(found) != 1:
            raise ClusterError("a deep health check that was not asked for yet is not noted", refused=True)
        return found[0]

    def troubles(self) -> Mapping[str, str]:
        """Results that are there, and checks of which nothing is seen, for people."""
        now = self._ticks()
        results = {
            f"check:{node}": f"the deep health check of {node} says {result}; it stays out of service until a person returns it"
            + (": a pass does not rule out silent corruption" if result == "Passed" else "")
            for node, (result, when) in self._results.items()
            if now - when < self._fresh
        }
        unseen = {
            f"check:{one.node}": f"SageMaker has taken the request for a deep health check of {one.node} ({instance}), and nothing shows that "
            "one has run; it is not asked for again. See DeepHealthCheckResults in CloudWatch, and whether the machine image is recent enough"
            for instance, one in self._asked.items()
            if not one.ran and now - one.since >= SHOWS
        }
        return unseen | results


def _runs(seen: Seen) -> bool:
    return seen.status == CHECKING or seen.check == "InProgress"


def _before(mark: str) -> str:
    """The result that stood there when the check was asked for, by its mark."""
    return mark.rpartition(" after ")[2] if " after " in mark else ""


def _instances(call: Call) -> list[str]:
    """The machines of a request, none of anything else."""
    if call.words[1:] != ("StartClusterHealthCheck",) or not isinstance(call.body, Mapping):
        return []
    groups = call.body.get("DeepHealthCheckConfigurations") or ()
    return [str(one) for group in groups for one in group.get("InstanceIds") or ()]
