"""One act on one node, so that it happens once, whenever the process is killed and whatever the cluster shows.

    look -> intent on disk -> look again -> call begun on disk -> call -> look -> outcome on disk

An intent without an outcome is settled by looking at the node, never by doing it again at once. To drain a node twice changes
nothing, so a drain that is not seen after a while is asked for again; a reboot or a replacement that may have happened is
not, and a person is told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.budget import HOUR, Hold, hold
from bitwitness.fleet.clusters.base import Act, Call, Census, Cluster, NodeState, valid_node
from bitwitness.fleet.kept import RETURNED, Book, Intent, Kept, Status
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.telling import Teller

logger = logging.getLogger(__name__)

_SHOWN = {"drain": timedelta(minutes=1), "reboot": timedelta(minutes=30), "replace": timedelta(minutes=90)}
"""How long a cluster may take to show an act that it was asked for (recovery.md section 2.2)."""
_FIRST, _LONGEST = timedelta(seconds=30), timedelta(minutes=30)
_OUT = ("out", "draining")
_LOOK_AGAIN = 60.0
"""Seconds after which a node is looked at again for a proposal that only looking can end."""
DAMAGE = (ValueError, LookupError, TypeError, ArithmeticError, AssertionError, RecursionError, AttributeError)
"""What an adapter raises that has a mistake in it: one node must not stop all others."""


class Actor:
    """Asks the cluster for acts, and notes everything around them.

    Args:
        book: what is kept.
        cluster: on which is acted.
        policy: the limits.
        teller: tells people.
        process: of this process; an intent of another one was cut off.
    """

    def __init__(self, book: Book, cluster: Cluster, policy: FleetPolicy, teller: Teller, process: str) -> None:
        self._book, self._cluster, self._policy, self._teller = book, cluster, policy, teller
        self._state, self._process = book.state, process
        self._census: Census | None = None
        self._acted: list[tuple[datetime, str]] | None = None
        self._done: set[str] | None = None
        self._looked: dict[int, float] = {}
        self.census_error = ""

    # Holds ------------------------------------------------------------------------------------------------------------

    def forget_census(self) -> None:
        """Ask the cluster anew how many nodes are out."""
        self._census, self._acted, self._done, self.census_error = None, None, None, ""

    def hold(self, kept: Kept, but: int = 0) -> Hold | None:
        """What holds a proposal now; `but`: an intent that does not count, because it is its own."""
        now = self._state.clock.now()
        if but:
            acted = self._book.acted(HOUR, but=but)
        else:
            self._acted = acted = self._book.acted(HOUR) if self._acted is None else self._acted
        made, census = min(now - kept.waited, self._happened(kept) or now), self._counted()
        return hold(kept.proposal, made=made, acted=acted, census=census, now=now, policy=self._policy)

    def _happened(self, kept: Kept) -> datetime | None:
        """When the incident was: a controller that is new to a run must not act on what was repaired months ago.

        Not of a device that came back, which is news however old its incident is.
        """
        known = self._book.incident(kept.proposal.incident)
        if known is None or kept.number >= RETURNED:
            return None
        try:
            said = datetime.fromisoformat(known.time)
        except ValueError:
            return None
        return said if said.tzinfo is not None else None

    def _is_ours(self, state: NodeState) -> bool:
        """Whether we took a node out: by its reason, or where HyperPod leaves no room for ours there, by what was done."""
        if state.ours:
            return True
        mine = (one for one in self._book.intents(node=state.node) if one.outcome == "done")
        return state.reason.startswith("Action:") and any(one.act.kind in ("reboot", "replace") for one in mine)

    def _counted(self) -> Census | None:
        """The census of this round; what was begun and is not shown yet counts as out already."""
        if not self._policy.act or self.census_error:
            return None
        if self._census is None:
            try:
                seen = self._cluster.census()
            except (ClusterError, OSError) as error:
                self.census_error = str(error)
                logger.warning("the cluster cannot be counted: %s", error)
                return None
            hidden = {one.act.node for one in self._book.intents(unsettled=True) if one.outcome is None}
            self._census = Census(seen.total, seen.out + len(hidden))
        return self._census

    def is_out_already(self, kept: Kept) -> bool:
        """Whether a node that is held back by a budget was taken out because of another incident; that needs none."""
        node = kept.proposal.node
        if self._done is None:
            self._done = {one.proposal.node for one in self._book.proposals(statuses=("done",))}
        if node not in self._done:
            return False
        if self._was_looked_at(kept.key):
            return False
        try:
            state = self._cluster.look(node)
        except (ClusterError, OSError):
            return False
        return state.service in _OUT and self._is_ours(state) and not self._may(kept, state)

    def _was_looked_at(self, key: int) -> bool:
        """Whether a node was looked at for a proposal lately; if not, it is now."""
        now, last = self._state.clock.ticks(), self._looked.get(key)
        if last is not None and now - last < _LOOK_AGAIN:
            return True
        self._looked[key] = now
        return False

    # A new act --------------------------------------------------------------------------------------------------------

    def act(self, kept: Kept) -> None:
        """Do what is proposed, if the node is as it should be."""
        node = kept.proposal.node
        assert kept.proposal.act is not None
        kind = kept.proposal.act if kept.proposal.act in self._cluster.acts else "drain"
        act = Act(kind, node, kept.proposal.incident, kept.proposal.reason, kept.proposal.devices)
        if any(one.outcome is None for one in self._book.intents(unsettled=True, node=node)):
            return  # another incident's act on this node is under way: its end decides
        try:
            valid_node(node)
            before = self._cluster.look(node)
            if not self._may(kept, before):
                return
            calls = self._cluster.plan(act, before)
            if not calls:
                self._finish(kept, None, "already out", f"nothing is left to be done to {node}: {before.raw}")
                return
            key = self._intend(kept, act, before, calls)
            if key is None:
                return
            self.forget_census()
            again = self._cluster.look(node)
            if (again.service, again.reason) != (before.service, before.reason):
                self._abandon(key, kept, f"{node} changed meanwhile: it is {again.raw or again.service} now")
                return
            self._carry_out(key, kept, act, before, self._cluster.plan(act, again))
        except ConfigurationError as error:
            self._held(kept, "cluster", f"{error}", final=True)
        except (ClusterError, OSError, *DAMAGE) as error:
            self._refused(kept, _said(error))

    def _may(self, kept: Kept, state: NodeState) -> bool:
        """Whether a node in this state is to be acted upon; where not, what that means is noted."""
        node = kept.proposal.node
        if state.service == "in":
            return True
        if state.service in _OUT and self._is_ours(state):
            self._finish(kept, None, "already out", f"{node} was taken out before: {state.reason}")
        elif state.service in _OUT:
            whose = f" by {state.reason_by}" if state.reason_by else ""
            text = f"{node} was taken out{whose}, not by bitwitness (reason: {state.reason or 'none'}): it is theirs"
            self._held(kept, "not-ours", text, final=True)
        else:
            what = f"the cluster has no node {node}" if state.service == "absent" else f"the state of {node} is unclear"
            self._held(kept, "cluster", f"{what} ({state.raw or state.service})", retry=True)
        return False

    def _intend(self, kept: Kept, act: Act, before: NodeState, calls: Sequence[Call]) -> int | None:
        """Note what is about to be done; None where a person has closed the proposal meanwhile."""
        with self._state.change():
            if self._kept(kept.key).final:
                return None
            key = self._book.add_intent(kept.key, act, before, calls, self._process)
            self._book.set_status(kept.key, "acting", f"about to {act.kind} {act.node}", attempt=True)
            record = {"calls": [str(call) for call in calls], "before": before.raw, "intent": key}
            text = f"is about to {act.kind} {act.node}: {act.reason}"
            self._state.note("intent", text, incident=act.incident, node=act.node, record=record)
        return key

    def _abandon(self, key: int, kept: Kept, why: str) -> None:
        """Nothing was begun: as if it had not been intended."""
        with self._state.change():
            self._book.set_outcome(key, "not done", why)
            self._book.set_status(kept.key, "proposed", why)
            self._note("not begun", kept, why)

    def _carry_out(self, key: int, kept: Kept, act: Act, before: NodeState, calls: Sequence[Call]) -> None:
        said = ""
        for call in calls:
            with self._state.change():
                self._book.set_started(key, self._process)
                self._state.note("call", str(call), incident=act.incident, node=act.node, record={"intent": key})
            try:
                said = self._cluster.carry_out(call)
            except (ClusterError, OSError, *DAMAGE) as error:
                said = _said(error)
                with self._state.change():
                    self._book.set_outcome(key, None, said)
                    text = f"the cluster did not do it: {said}"
                    self._book.set_status(kept.key, "failed", text, due=self._due(kept.attempts + 1))
                    self._note("refused", kept, text)
                    self._teller.ending(kept, "failed", text, [str(call)])
                break
        else:
            with self._state.change():
                self._book.set_status(kept.key, "acting", f"asked for: {said}, and not seen yet")
        intent = next(one for one in self._book.intents(proposal=kept.key) if one.key == key)
        if intent.outcome is not None:
            return  # a person has cleared the node meanwhile
        self._settle(intent, self._kept(kept.key), self._cluster.look(act.node))

    # What is not settled ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Look at every node on which an act was begun whose outcome is not known."""
        for intent in self._book.intents(unsettled=True):
            kept = self._kept(intent.proposal)
            if intent.started == 0:
                self._abandon(intent.key, kept, "it was intended, and nothing was begun")
                continue
            if intent.outcome == "unclear" and (kept.final or self._was_looked_at(kept.key)):
                continue
            try:
                self._settle(intent, kept, self._cluster.look(intent.act.node))
            except (ClusterError, OSError, *DAMAGE) as error:
                logger.warning("whether %s was done cannot be seen: %s", intent.act.kind, _said(error))

    def _kept(self, key: int) -> Kept:
        return self._book.proposals(key=key)[0]

    def _settle(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        act = intent.act
        landed = self._cluster.landed(act, intent.before, now)
        repeatable = act.kind == "drain" and landed == "no"
        if landed == "yes" and act.kind == "drain" and now.service in _OUT and not now.ours:
            whose = f" by {now.reason_by}" if now.reason_by else ""
            text = f"{act.node} was taken out meanwhile{whose}, not by bitwitness (reason: {now.reason or 'none'})"
            with self._state.change():
                self._book.set_outcome(intent.key, "not ours", text)
            self._held(kept, "not-ours", text, final=True)
        elif landed == "yes":
            self._finish(kept, intent, "done", f"{act.node} is {now.raw or now.service}")
        elif intent.outcome == "unclear":
            self._expire(intent, kept)
        elif intent.tried < _SHOWN[act.kind] and (repeatable or intent.process == self._process):
            return  # the cluster may only be slow to show it
        elif repeatable:
            self._again(intent, kept, now)
        else:
            self._unclear(intent, kept, now)

    def _expire(self, intent: Intent, kept: Kept) -> None:
        """Nobody could say in all the time that there was: it stays unclear."""
        if kept.waited > self._policy.act_within:
            with self._state.change():
                text = f"{intent.text}; a person must look at {intent.act.node}"
                self._book.set_status(kept.key, "unclear", text, final=True)
                self._note("unclear", kept, text)

    def _unclear(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        act = intent.act
        text = f"whether the {act.kind} of {act.node} was done cannot be told: it is {now.raw or now.service}. It is not asked for again"
        with self._state.change():
            self._book.set_outcome(intent.key, "unclear", text)
            self._book.set_status(kept.key, "unclear", text)
            self._note("unclear", kept, text)
            self._teller.ending(kept, "unclear", text)

    def _again(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        """Ask for a drain that did not happen once more, within the same intent, so that it counts once."""
        held = self.hold(kept, but=intent.key)
        act = intent.act
        if held is not None and held.why == "expired":
            with self._state.change():
                self._book.set_outcome(intent.key, "not done", f"{act.node} is {now.raw or now.service}")
                self._book.set_status(kept.key, "expired", held.text, hold=held.why, final=True)
                self._note("expired", kept, held.text)
                self._teller.ending(kept, "expired", held.text)
            return
        if held is not None or not self.is_due(kept):
            return
        if now.service != "in":
            return  # what it is now may pass; it is looked at again
        calls = self._cluster.plan(act, now)
        with self._state.change():
            text = f"{act.node} still takes jobs: asked for once more"
            self._book.set_status(kept.key, "failed", text, due=self._due(kept.attempts + 1), attempt=True)
            self._note("again", kept, text)
        self._carry_out(intent.key, self._kept(kept.key), act, now, calls)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _finish(self, kept: Kept, intent: Intent | None, status: Status, text: str) -> None:
        about, calls = kept.proposal, []
        with self._state.change():
            if intent is not None:
                self._book.set_outcome(intent.key, "done", text)
                trail = self._state.history(incident=about.incident, node=about.node)
                calls = [one.text for one in trail if one.what == "call" and one.record.get("intent") == intent.key]
            self._book.set_status(kept.key, status, text, final=True)
            self._note(status, kept, text)
            if kept.proposal.act != "reboot":
                self._book.condemn(kept.proposal)
            self._wants_requeue(kept.proposal.incident)
            self._teller.ending(kept, "done" if status == "done" else "already out", text, calls)
        if status == "done":
            self._teller.beside(kept, intent.act.kind if intent else "drain", text)

    def _wants_requeue(self, incident: str) -> None:
        known = self._book.incident(incident)
        scheduler, _, job = (known.job if known else "").partition(":")
        if self._policy.requeue and job and scheduler == self._cluster.name:
            self._book.add_requeue(incident, job)

    def _held(self, kept: Kept, why: str, text: str, *, final: bool = False, retry: bool = False) -> None:
        due = self._due(kept.attempts + 1) if retry else None
        with self._state.change():
            if (kept.status, kept.hold) != ("held", why):
                self._note("held", kept, text)
                self._teller.ending(kept, "held", text, hold=why)
            self._book.set_status(kept.key, "held", text, hold=why, due=due, final=final, attempt=retry)

    def _refused(self, kept: Kept, text: str) -> None:
        """The cluster could not be asked. What was begun stays so until it is seen; what was not is tried again."""
        begun = False
        with self._state.change():
            for intent in self._book.intents(proposal=kept.key):
                if intent.outcome is None and intent.started == 0:
                    self._book.set_outcome(
                        intent.key, "not done", "the cluster could not be asked, and nothing was begun"
                    )
                begun = begun or (intent.outcome is None and intent.started > 0)
        if begun:
            logger.warning("%s: what was asked for cannot be seen: %s", kept.proposal.node, text)
        else:
            self._held(kept, "cluster", text, retry=True)

    def note_hold(self, kept: Kept, held: Hold) -> None:
        """Note what holds a proposal, where that is new, inside `State.change`."""
        status: Status = {"observe": "observed", "expired": "expired"}.get(held.why, "held")  # type: ignore[assignment]
        text = f"{held.text}: {self.census_error}" if held.why == "cluster" and self.census_error else held.text
        same = (kept.status, kept.hold, kept.final) == (status, held.why, held.final)
        if same and _are_close(kept.due, held.until):
            return
        new = (kept.status, kept.hold) != (status, held.why)
        self._book.set_status(kept.key, status, text, hold=held.why, due=held.until, final=held.final)
        if new:
            self._note(status, kept, text)
            ending = {"observed": "observed", "expired": "expired"}.get(status, "held")
            self._teller.ending(kept, ending, text, hold=held.why)  # type: ignore[arg-type]

    def _note(self, what: str, kept: Kept, text: str) -> None:
        self._state.note(what, text, incident=kept.proposal.incident, node=kept.proposal.node)

    def _due(self, attempts: int) -> datetime:
        wait = min(_LONGEST, _FIRST * float(1 << max(0, min(attempts - 1, 10))))
        return self._state.clock.now() + wait

    def is_due(self, kept: Kept) -> bool:
        """Whether a proposal is to be looked at again. A time that is further off than any wait is one of a clock that was set."""
        now = self._state.clock.now()
        return kept.due is None or now >= kept.due or kept.due - now > _LONGEST


def _said(error: BaseException) -> str:
    """What an error says; of one that nobody foresaw, its kind too."""
    return str(error) if isinstance(error, ClusterError | OSError | ConfigurationError) else repr(error)[:300]


def _are_close(one: datetime | None, other: datetime | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < timedelta(seconds=5)
