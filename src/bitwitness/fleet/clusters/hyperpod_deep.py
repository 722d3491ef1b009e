"""Deep health checks that this process has asked for, and what is seen of them: SageMaker gives them no id and keeps no list of them.

That one was asked for is noted on its node once it is seen, and until then it is what is left of a drain. One that begins and ends
between two looks is told by a result that was not there before; one of which nothing is ever seen is asked for some times, and
then people are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Call, NodeState
from bitwitness.fleet.clusters.hyperpod_plan import Seen, noted, seen_in
from bitwitness.fleet.clusters.hyperpod_words import CHECKING, MARKED, RESULTS

ONCE = 600.0
"""Seconds in which the check of a machine is not asked for a second time: it shows after minutes."""
MOST = 3
"""How often it is asked for where nothing of it is seen."""


@dataclass
class _Asked:
    """One that was asked for.

    Attributes:
        result, mark: what stood on the node before.
        times, last: how often it was asked for, and when for the last time.
        ran: whether something of it was seen.
    """

    result: str
    mark: str
    times: int = 0
    last: float = 0.0
    ran: bool = False


class DeepChecks:
    """The deep health checks of one process.

    Args:
        ticks: seconds that pass.
        fresh: seconds for which a result that was read counts as one that is there.
    """

    def __init__(self, ticks: Callable[[], float], fresh: float) -> None:
        self._ticks, self._fresh = ticks, fresh
        self._shown: dict[str, tuple[str, str]] = {}
        self._asked: dict[str, _Asked] = {}
        self._busy: frozenset[str] = frozenset()
        self._results: dict[str, tuple[str, float]] = {}

    def see(self, state: NodeState) -> NodeState:
        """A node was looked at; the same, with what is known here of its check."""
        seen, out = seen_in(state), state.service in ("out", "draining")
        mark = seen.mark or (MARKED if MARKED in state.reason else "")
        rest = self._busy - {seen.instance}
        self._busy = rest | {seen.instance} if state.service == "draining" else rest
        told = seen.check if seen.mark and out and seen.check in RESULTS else ""
        self._results.pop(state.node, None)
        if told:
            self._results[state.node] = told, self._ticks()
        self._shown[seen.instance] = seen.check, mark
        asked = self._asked.get(seen.instance)
        if asked is None:
            return state
        if not out or mark != asked.mark:
            del self._asked[seen.instance]
            return state
        asked.ran = asked.ran or _runs(seen) or (seen.check in RESULTS and seen.check != asked.result)
        return noted(state, ran=asked.ran)

    def before(self, call: Call) -> str:
        """What there is to say in place of asking; "" where it is to be asked for now.

        Raises:
            ClusterError: it must wait, or was asked for in vain too often.
        """
        for instance in _instances(call):
            if instance in self._busy:
                raise ClusterError(
                    f"the deep health check waits until no job runs on {instance} any more", refused=True
                )
            asked = self._asked.get(instance)
            if asked is None:
                continue
            passed = self._ticks() - asked.last
            if passed < ONCE:
                return f"it was asked for {passed:.0f} s ago, and need not show yet"
            if asked.times >= MOST:
                raise ClusterError(
                    f"SageMaker took {asked.times} requests for a deep health check of {instance}, and nothing shows that one has run: it is "
                    "asked for no more. See DeepHealthCheckResults in CloudWatch, and whether the machine image is recent enough",
                    refused=True,
                )
        return ""

    def after(self, call: Call) -> None:
        """SageMaker has taken the request."""
        for instance in _instances(call):
            asked = self._asked.setdefault(instance, _Asked(*self._shown.get(instance, ("", ""))))
            asked.times, asked.last = asked.times + 1, self._ticks()

    def troubles(self) -> Mapping[str, str]:
        """Results that are there, for people."""
        now = self._ticks()
        return {
            f"check:{node}": f"the deep health check of {node} says {result}; it stays out of service until a person returns it"
            + (": a pass does not rule out silent corruption" if result == "Passed" else "")
            for node, (result, when) in self._results.items()
            if now - when < self._fresh
        }


def _runs(seen: Seen) -> bool:
    return seen.status == CHECKING or seen.check == "InProgress"


def _instances(call: Call) -> list[str]:
    """The machines of a request, none of anything else."""
    if call.words[1:] != ("StartClusterHealthCheck",) or not isinstance(call.body, Mapping):
        return []
    groups = call.body.get("DeepHealthCheckConfigurations") or ()
    return [str(one) for group in groups for one in group.get("InstanceIds") or ()]
