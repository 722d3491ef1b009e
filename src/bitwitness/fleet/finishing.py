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
from bitwitness.fleet.begun import CALL
from bitwitness.fleet.clusters.base import Call, Finishing
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.kept import Book, Intent
from bitwitness.fleet.patience import Patient
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.telling import Teller
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
        teller: tells people.
    """

    def __init__(
        self, book: Book, cluster: Patient, rest: Finishing | None, policy: FleetPolicy, teller: Teller
    ) -> None:
        self._book, self._cluster, self._rest, self._policy, self._state = book, cluster, rest, policy, book.state
        self._teller = teller
        self._looked: dict[int, float] = {}
        self._noted: set[tuple[int, tuple[str, ...]]] = set()
        self._left: dict[int, str] = {}

    def round(self) -> list[Trouble]:
        """What is still left of acts; of each the cluster is asked once a minute, and those first that have waited longest."""
        if self._rest is None or not self._policy.act:
            return []
        over = self._state.said(_OVER)
        done = [one for one in self._book.intents() if one.outcome == "done" and f"{_OVER}{one.key}" not in over]
        now = self._state.clock.ticks()
        due = [one for one in done if now - self._looked.get(one.key, -_EVERY) >= _EVERY]
        for intent in sorted(due, key=lambda one: self._looked.get(one.key, 0.0)):
            if self._cluster.over:
                break
            self._looked[intent.key] = now
            self._finish(intent, self._rest)
        told = [one for one in done if one.key in self._left and one.tried >= _LATE]
        return [Trouble(f"rest:{one.key}", _text(one, self._left[one.key])) for one in told]

    def _finish(self, intent: Intent, rest: Finishing) -> None:
        """Do what is left of one act."""
        act = intent.act
        if self._is_cleared(intent):
            self._end(intent)
            return
        try:
            calls = rest.rest(act, self._cluster.look(act.node))
            if not calls:
                self._end(intent)
                return
            if intent.tried > self._policy.act_within:
                self._give_up(intent, calls)
                return
            said = self._make(intent, rest, calls)
        except (ClusterError, OSError, *DAMAGE) as error:
            said = str(error)
        if said:
            logger.info("%s: what is left of its %s: %s", act.node, act.kind, said)
            self._left[intent.key] = said
        else:
            self._left.pop(intent.key, None)

    def _give_up(self, intent: Intent, calls: Sequence[Call]) -> None:
        """A person is told what they may want to do by hand."""
        act, said = intent.act, self._left.get(intent.key, "")
        text = f"{_text(intent, said or 'nobody has said why')}. It is asked for no more; what is left: {calls[0]}"
        text += f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        with self._state.change():
            self._state.note("given up", text, incident=act.incident, node=act.node)
            self._teller.trouble(f"rest/{intent.key}", "warning", f"bitwitness: {act.node}: not all was done", text)
        self._end(intent)

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
                self._looked.pop(intent.key, None)  # the rest in the next round
                return failed
            calls = rest.rest(act, self._cluster.look(act.node))
        return failed

    def _is_cleared(self, intent: Intent) -> bool:
        """Whether a person has returned the node since this was done."""
        (kept,) = self._book.proposals(key=intent.proposal)
        return any(one.node == intent.act.node and one.time >= kept.updated for one in self._book.clears())

    def _end(self, intent: Intent) -> None:
        with self._state.change():
            self._state.say_once(f"{_OVER}{intent.key}", "over")
        self._left.pop(intent.key, None)
        self._looked.pop(intent.key, None)
        self._noted = {one for one in self._noted if one[0] != intent.key}


def _text(intent: Intent, said: str) -> str:
    act = intent.act
    return f"{act.node} is out of service, and not all of its {act.kind} is done (incident {act.incident}): {said}"
