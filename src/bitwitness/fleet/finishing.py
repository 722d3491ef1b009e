"""What is left of an act when the node is out already: pods that are to go, what people are to see on the node.

The first call of an act takes the node out of service, and that is what protects jobs, so from then on the act counts as done.
What comes after it may be refused for a while (a budget for disruptions lets no pod go), and a controller may be killed before
it; the cluster says what is left, by looking, and each of it may be asked for again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.acting import DAMAGE
from bitwitness.fleet.begun import CALL
from bitwitness.fleet.clusters.base import Call, Finishing
from bitwitness.fleet.kept import Book, Intent
from bitwitness.fleet.patience import Patient
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.watching import Trouble

logger = logging.getLogger(__name__)

_EVERY = 60.0
_LATE = timedelta(minutes=5)
"""After which people are told that something is left."""
_OVER = "told:rest:"


class Finisher:
    """Brings acts that have landed to their end.

    Args:
        book: what is kept.
        cluster: asked within what a round may take.
        rest: the same cluster, as one that knows what is left; None where every act is one call.
        policy: whether anything is done at all, and for how long it is tried.
    """

    def __init__(self, book: Book, cluster: Patient, rest: Finishing | None, policy: FleetPolicy) -> None:
        self._book, self._cluster, self._rest, self._policy, self._state = book, cluster, rest, policy, book.state
        self._looked: float | None = None
        self._noted: set[tuple[int, tuple[str, ...]]] = set()
        self._left: list[Trouble] = []

    def round(self) -> list[Trouble]:
        """What is still left of acts; once a minute the cluster is asked for it."""
        now = self._state.clock.ticks()
        if self._rest is None or not self._policy.act:
            return []
        due = self._looked is None or now - self._looked >= _EVERY
        if due and not self._cluster.over:
            self._looked = now
            over = self._state.said(_OVER)
            done = [one for one in self._book.intents() if one.outcome == "done" and f"{_OVER}{one.key}" not in over]
            self._left = [one for intent in done for one in self._finish(intent, self._rest)]
        return self._left

    def _finish(self, intent: Intent, rest: Finishing) -> list[Trouble]:
        """Do what is left of one act; what is to be told of it."""
        act = intent.act
        if intent.tried > self._policy.act_within:
            self._end(intent, f"what is left of the {act.kind} of {act.node} is asked for no more")
            return []
        if self._is_cleared(intent):
            self._end(intent, f"{act.node} was returned to service: nothing is left of its {act.kind}")
            return []
        try:
            calls = rest.rest(act, self._cluster.look(act.node))
            if not calls:
                self._end(intent, f"nothing is left of the {act.kind} of {act.node}")
                return []
            said = self._make(intent, rest, calls)
        except (ClusterError, OSError, *DAMAGE) as error:
            said = str(error)
        if said:
            logger.info("%s: what is left of its %s: %s", act.node, act.kind, said)
        if intent.tried < _LATE or not said:
            return []
        text = f"{act.node} is out of service, and not all of its {act.kind} is done (incident {act.incident}): {said}"
        return [Trouble(f"rest:{intent.key}", text)]

    def _make(self, intent: Intent, rest: Finishing, calls: Sequence[Call]) -> str:
        """Make every call, whatever becomes of the others; what the first that failed said, or "".

        Each is told by a look of its own: a node that a person returns in between is left alone from then on.
        """
        act, failed, tried = intent.act, "", set[tuple[str, ...]]()
        while call := next((one for one in calls if one.words not in tried), None):
            tried.add(call.words)
            if not call.repeatable:
                raise ValueError(f"{call} may not be repeated, and is none that is left")
            with self._state.change():
                if self._is_cleared(intent):
                    return failed
                if (intent.key, call.words) not in self._noted:  # a pod that may not go is asked for each minute
                    self._noted.add((intent.key, call.words))
                    self._state.note(CALL, str(call), incident=act.incident, node=act.node, record={"rest": intent.key})
            try:
                self._cluster.carry_out(call)
            except (ClusterError, ConfigurationError, OSError) as error:
                failed = failed or str(error)
            if self._cluster.over:
                self._looked = None  # the rest in the next round
                return failed
            calls = rest.rest(act, self._cluster.look(act.node))
        return failed

    def _is_cleared(self, intent: Intent) -> bool:
        """Whether a person has returned the node since this was done."""
        (kept,) = self._book.proposals(key=intent.proposal)
        return any(one.node == intent.act.node and one.time >= kept.updated for one in self._book.clears())

    def _end(self, intent: Intent, text: str) -> None:
        with self._state.change():
            self._state.say_once(f"{_OVER}{intent.key}", "over")
        self._noted = {one for one in self._noted if one[0] != intent.key}
        logger.info("%s", text)
