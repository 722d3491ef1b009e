"""One act on one node, so that it happens once, whenever the process is killed and whatever the cluster shows.

    look -> intent on disk -> look again -> call begun on disk -> call -> look -> outcome on disk

An intent without an outcome is settled by looking at the node, never by doing it again at once. To drain a node twice changes
nothing, so a drain that is not seen after a while is asked for again. A reboot that may have happened is not, and a person is told:
once a call was begun that is not `repeatable`, nothing of its intent is called again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.approving import Approver
from bitwitness.fleet.begun import CALL, NO, SHOWN, begun
from bitwitness.fleet.budget import Hold
from bitwitness.fleet.clusters.base import Act, ActKind, Call, Cluster, Finishing, Landed, NodeState, valid_node
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.holding import OUT, Holder
from bitwitness.fleet.judgements import Judges
from bitwitness.fleet.kept import RETURNED, Book, Intent, Kept, Status, found_at
from bitwitness.fleet.patience import Patience
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.telling import Teller

logger = logging.getLogger(__name__)

_FIRST, _LONGEST = timedelta(seconds=30), timedelta(minutes=30)
_OUT = ("out", "draining")
_LOOK_AGAIN = 60.0
"""Seconds after which a node is looked at again for a proposal that only looking can end."""
_A_ROUND = 5
"""Nodes that are looked at in one round because the run itself may have taken them out."""


class Actor:
    """Asks the cluster for acts, and notes everything around them.

    Args:
        book: what is kept.
        cluster: on which is acted.
        policy: the limits.
        teller: tells people.
        process: of this process; an intent of another one was cut off.
        judges: know what people have said of incidents.
        patience: how long a round may wait for the cluster.
    """

    def __init__(
        self,
        book: Book,
        cluster: Cluster,
        policy: FleetPolicy,
        teller: Teller,
        process: str,
        judges: Judges,
        patience: Patience | None = None,
    ) -> None:
        self._book, self._cluster, self._policy, self._teller = book, cluster, policy, teller
        self.patience = patience or Patience(book.state.clock)
        self.holder = Holder(book, cluster, policy, self.patience)
        self.approver = Approver(book, policy, real=teller.touching)
        self._state, self._process, self._judges = book.state, process, judges
        self._done: set[str] | None = None
        self._by_others = 0
        self._looked: dict[int, float] = {}
        self._unseen: set[int] = set()

    # Looking ----------------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Another round begins."""
        self._done, self._by_others = None, 0
        self.holder.renew()

    def _is_ours(self, state: NodeState) -> bool:
        """Whether we took a node out: by its reason, or where HyperPod leaves no room for ours there, by what was done."""
        if state.ours:
            return True
        mine = (one for one in self._book.intents(node=state.node) if one.outcome == "done")
        return state.reason.startswith("Action:") and any(one.act.kind in ("reboot", "replace") for one in mine)

    def is_out_already(self, kept: Kept) -> bool:
        """Whether a node that is held back by a budget is out because of us already; that needs none.

        Of a node that this controller took out for another incident that is likely; that it was the supervisor of its run, is not, so
        that of these only a few a round are looked at.
        """
        node = kept.proposal.node
        if self._done is None:
            self._done = {one.proposal.node for one in self._book.proposals(statuses=("done",))}
        if self.patience.over or (node not in self._done and self._by_others >= _A_ROUND):
            return False
        if self._was_looked_at(kept.key):
            return False
        self._by_others += node not in self._done
        try:
            state = self._look(node)
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

    def _look(self, node: str) -> NodeState:
        return self.patience.ask(self._cluster.look, node)

    # A new act --------------------------------------------------------------------------------------------------------

    def asks_early(self, kept: Kept) -> bool:
        """Ask a person about what a budget holds, so that the answer is there when it may be done; whether anything was noted."""
        known = not self.approver.concerns(kept) or self.approver.standing(kept) is not None
        if known or self.patience.over or self._was_looked_at(-kept.key):
            return False
        self.act(kept, only_ask=True)
        now = self._kept(kept.key)
        return (now.updated, now.status, now.hold) != (kept.updated, kept.status, kept.hold)

    def act(self, kept: Kept, *, only_ask: bool = False) -> None:
        """Do what is proposed, if the node is as it should be, and a person has approved it where that is wanted."""
        node = kept.proposal.node
        assert kept.proposal.act is not None
        kind = kept.proposal.act if kept.proposal.act in self._cluster.acts else "drain"
        about, back = kept.proposal, kept.number >= RETURNED
        act = Act(kind, node, about.incident, about.reason, about.devices, back)
        if any(one.outcome is None for one in self._book.intents(unsettled=True, node=node)):
            return  # another incident's act on this node is under way: its end decides
        try:
            valid_node(node)
            before = self._look(node)
            if not self._may(kept, before):
                return
            act, calls = self._planned(act, before)
            if not calls:
                self._finish(kept, None, "already out", f"nothing is left to be done to {node}: {before.raw}")
                return
            if self._must_ask(kept, act, before, calls) or only_ask:
                return
            self._judges.hear(kept.proposal)  # what ends it now is seen when it is intended
            key = self._intend(kept, act, before, calls)
            if key is None:
                return
            self._done = None
            self.holder.forget()
            again = self._look(node)
            changed = (again.service, again.reason) != (before.service, before.reason)
            if changed or not self.approver.allows(kept, act.kind, again.instance):
                self._abandon(key, kept, f"{node} changed meanwhile: it is {again.raw or again.service} now")
                return
            self._carry_out(key, kept, act, self._cluster.plan(act, again))
        except ConfigurationError as error:
            self._held(kept, "cluster", f"{error}", final=True)
        except (ClusterError, OSError, *DAMAGE) as error:
            self._refused(kept, _said(error))

    def _planned(self, act: Act, before: NodeState) -> tuple[Act, tuple[Call, ...]]:
        """The calls of an act; of a drain where no more can be planned, because to be out of service is what protects jobs."""
        try:
            return act, self._cluster.plan(act, before)
        except (ConfigurationError, ClusterError) as error:
            if act.kind == "drain":
                raise
            reason = f"{act.reason}; it is drained only, because its {act.kind} cannot be asked for: {error}"
            drain = replace(act, kind="drain", reason=reason)
            return drain, self._cluster.plan(drain, before)

    def _must_ask(self, kept: Kept, act: Act, before: NodeState, calls: Sequence[Call]) -> bool:
        """Whether a person must approve this first; they are asked then."""
        machine = before.instance
        if self.approver.allows(kept, act.kind, machine):
            return False
        was = self.approver.standing(kept)
        if was is not None and was.said and was.act == act.kind and was.machine and not machine:
            text = f"which machine {act.node} is cannot be told now, and its {act.kind} was approved for {was.machine}"
            self._held(kept, "cluster", text, retry=True)
            return True
        with self._state.change():
            kept = self._kept(kept.key)
            if kept.final or self.approver.allows(kept, act.kind, machine):
                return True  # a person was faster; the next round sees it
            why = self.approver.changed(kept, act.kind, machine)
            asked = self.approver.questions.ask(kept, act.kind, machine, calls, why)
            text = self.approver.text(asked)
            if self._moves(kept, "held", text, "", hold="approval"):
                said = f"{why}, so that what was answered before counts no more; {text}" if why else text
                record = {"question": asked.name, "act": act.kind, "machine": machine, "calls": list(asked.calls)}
                self._state.note("asked", said, incident=act.incident, node=act.node, record=record)
                self._teller.ask(kept, asked, said)
        return True

    def _may(self, kept: Kept, state: NodeState) -> bool:
        """Whether a node in this state is to be acted upon; where not, what that means is noted."""
        node = kept.proposal.node
        if state.service == "in":
            resumed = self._was_resumed(kept)
            if resumed:
                self._held(kept, "not-ours", resumed, final=True)
            return not resumed
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

    def _was_resumed(self, kept: Kept) -> str:
        """Why a node in service is left alone: we had taken it out after this was found, and somebody has resumed it; or ""."""
        found = self.holder.happened(kept)
        if found is None:
            return ""
        node = kept.proposal.node
        cleared = [one.time for one in self._book.clears() if one.node == node]
        done = [
            one for one in self._book.proposals(statuses=("done",), node=node) if one.updated > max(cleared, default="")
        ]
        if not any(found < datetime.fromisoformat(one.updated) for one in done):
            return ""
        return f"{node} was taken out after this was found, and a person has resumed it: it is left alone"

    def _intend(self, kept: Kept, act: Act, before: NodeState, calls: Sequence[Call]) -> int | None:
        """Note what is about to be done; None where a person has closed the proposal, or withdrawn the approval, meanwhile."""
        with self._state.change():
            now = self._kept(kept.key)
            if now.final or not self.approver.allows(now, act.kind, before.instance):
                return None
            key = self._book.add_intent(kept.key, act, before, calls, self._process)
            self._book.set_act(kept.key, act.kind)
            self._book.set_status(kept.key, "acting", f"about to {act.kind} {act.node}", attempt=True)
            record = {"calls": [str(call) for call in calls], "before": before.raw, "intent": key}
            text = f"is about to {act.kind} {act.node}: {act.reason}"
            self._state.note("intent", text, incident=act.incident, node=act.node, record=record)
        return key

    def _abandon(self, key: int, kept: Kept, why: str) -> None:
        """Nothing was begun: as if it had not been intended."""
        with self._state.change():
            self._book.set_outcome(key, "not done", why)
            self._moves(kept, "proposed", why, "not begun")

    def _moves(
        self,
        kept: Kept,
        status: Status,
        why: str,
        what: str,
        *,
        hold: str = "",
        due: datetime | None = None,
        final: bool = False,
        attempt: bool = False,
    ) -> bool:
        """Note where a proposal stands now, inside `State.change`; where a person has answered it meanwhile, that it does not."""
        if self._book.set_status(kept.key, status, why, hold=hold, due=due, final=final, attempt=attempt):
            if what:
                self._note(what, kept, why)
            return True
        now = self._kept(kept.key)
        self._note("left", kept, f"it stays {now.status} ({now.why}), and is not {status}: {why}")
        return False

    def _carry_out(self, key: int, kept: Kept, act: Act, calls: Sequence[Call]) -> None:
        """Make the calls, each only while nobody has closed the act."""
        said = ""
        before = self._intent(key, kept).before
        for number, call in enumerate(calls, 1):
            if number > 1 and not self._goes_on(act, before):
                break
            record = {"intent": key, "once": not call.repeatable, "last": number == len(calls)}
            with self._state.change():
                if not self._book.set_started(key, self._process):
                    self._note("not begun", kept, f"{self._kept(kept.key).why}, so it is not called: {call}")
                    return
                self._state.note(CALL, str(call), incident=act.incident, node=act.node, record=record)
            try:
                said = self.patience.ask(self._cluster.carry_out, call)
            except (ClusterError, OSError, *DAMAGE) as error:
                if getattr(error, "refused", False):
                    with self._state.change():
                        self._state.note(NO, _said(error), incident=act.incident, node=act.node, record=record)
                if not self._has_landed(key, kept, error):
                    self._not_done(key, kept, call, _said(error))
                break
        else:
            with self._state.change():
                answered = f" ({said})" if said else ""
                self._book.set_outcome(key, None, "")
                self._moves(kept, "acting", f"asked for{answered}, and not seen yet", "")
        intent = self._intent(key, kept)
        if intent.outcome is not None:
            return  # a person has cleared the node meanwhile
        self._settle(intent, self._kept(kept.key), self._look(act.node))

    def _goes_on(self, act: Act, before: NodeState) -> bool:
        """Whether the next call of an act is to be made: a person may have returned the node since, or this process be told to end.

        Where the cluster says what is left of an act that has landed, that is for the rounds to come (`finishing`).
        """
        if self.patience.over:
            return False
        now = self._look(act.node)
        landed = self._cluster.landed(act, before, now) == "yes"
        return now.service != "in" and not (landed and isinstance(self._cluster, Finishing))

    def _has_landed(self, key: int, kept: Kept, error: BaseException) -> bool:
        """Whether the node shows the act although a call failed: what the call was for is then only what is left of it."""
        intent = self._intent(key, kept)
        try:
            landed = self._cluster.landed(intent.act, intent.before, self._look(intent.act.node)) == "yes"
        except (ClusterError, OSError, *DAMAGE):
            return False
        if landed:
            with self._state.change():
                self._note("refused", kept, f"what is left when the node is out: {_said(error)}")
        return landed

    def _intent(self, key: int, kept: Kept) -> Intent:
        return next(one for one in self._book.intents(proposal=kept.key) if one.key == key)

    def _not_done(self, key: int, kept: Kept, call: Call, said: str) -> None:
        text = f"the cluster did not do it: {said}"
        with self._state.change():
            self._book.set_outcome(key, None, said)
            if self._moves(kept, "failed", text, "refused", due=self._due(kept.attempts + 1)):
                self._teller.ending(kept, "failed", text, [str(call)])

    # What is not settled ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Look at every node on which an act was begun whose outcome is not known."""
        for intent in self._book.intents(unsettled=True):
            kept = self._kept(intent.proposal)
            if intent.started == 0:
                self._abandon(intent.key, kept, "it was intended, and nothing was begun")
                continue
            if kept.final:
                self._close(intent, kept)
                continue
            old = intent.outcome == "unclear" or intent.tried > SHOWN[intent.act.kind] or intent.key in self._unseen
            if self.patience.over or (old and self._was_looked_at(kept.key)):
                continue  # what has been looked at in vain leaves the time of this round to the others
            try:
                self._settle(intent, kept, self._look(intent.act.node))
                self._unseen.discard(intent.key)
            except (ClusterError, OSError, *DAMAGE) as error:
                self._unseen.add(intent.key)
                self._was_looked_at(kept.key)
                logger.warning("whether %s was done cannot be seen: %s", intent.act.kind, _said(error))

    def _close(self, intent: Intent, kept: Kept) -> None:
        """The proposal has come to its end, and its act with it."""
        if intent.outcome is None:
            with self._state.change():
                self._book.set_outcome(intent.key, "unclear", kept.why)

    def _kept(self, key: int) -> Kept:
        return self._book.proposals(key=key)[0]

    def _settle(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        act = intent.act
        landed = self._cluster.landed(act, intent.before, now)
        if landed == "yes" and act.kind == "drain" and now.service in _OUT and not now.ours:
            whose = f" by {now.reason_by}" if now.reason_by else ""
            text = f"{act.node} was taken out meanwhile{whose}, not by bitwitness (reason: {now.reason or 'none'})"
            self._held(kept, "not-ours", text, final=True, intent=intent)
        elif landed == "yes":
            self._finish(kept, intent, "done", f"{act.node} is {now.raw or now.service}")
        elif intent.outcome == "unclear":
            self._expire(intent, kept)
        elif act.kind == "drain" and landed == "unknown":
            self._unseen_drain(intent, kept, now)
        else:
            self._not_shown(intent, kept, now, landed)

    def _not_shown(self, intent: Intent, kept: Kept, now: NodeState, landed: Landed) -> None:
        """The node does not show the act: wait, ask for it once more, or say that nobody can tell."""
        if now.service in _OUT and now.ours and intent.act.kind != "drain":
            self._protected(kept, intent.act)
        elif now.service == "in" and self._was_out(kept):
            text = (
                f"{now.node} was taken out, and a person has returned it before its {intent.act.kind}: it is left alone"
            )
            self._held(kept, "not-ours", text, final=True, intent=intent)
            return
        called = begun(self._state, intent)
        repeatable = landed == "no" and not called.once
        if intent.tried < called.shown and (repeatable or intent.process == self._process):
            return  # the cluster may only be slow to show it
        if repeatable:
            self._again(intent, kept, now)
        else:
            self._unclear(intent, kept, now)

    def _protected(self, kept: Kept, act: Act) -> None:
        """The node takes no jobs already, whatever becomes of its reboot or replacement: its job need not wait for that."""
        if self._was_out(kept):
            return
        with self._state.change():
            if not self._state.say_once(f"{OUT}{kept.key}", act.node):
                return
            if act.kind != "reboot":
                self._book.condemn(kept.proposal)
            self._wants_requeue(act.incident)
            self._note("out", kept, f"{act.node} takes no jobs; the {act.kind} itself is not seen yet")

    def _was_out(self, kept: Kept) -> bool:
        """Whether the node of a reboot or replacement was seen out of service because of it."""
        return f"{OUT}{kept.key}" in self._state.said(OUT)

    def _expire(self, intent: Intent, kept: Kept) -> None:
        """Nobody could say in all the time that there was: it stays unclear."""
        if kept.waited > self._policy.act_within:
            with self._state.change():
                text = f"{intent.text}; a person must look at {intent.act.node}"
                self._moves(kept, "unclear", text, "unclear", final=True)

    def _unseen_drain(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        """A drain does no harm twice, so it is looked at for as long as it may be asked for: a cluster that restarts shows nothing."""
        if kept.waited > self._policy.act_within:
            text = (
                f"whether {now.node} was taken out cannot be seen: it is {now.raw or now.service}; a person must look"
            )
            self._end_expired(intent, kept, text, "unclear")

    def _end_expired(self, intent: Intent, kept: Kept, text: str, outcome: str) -> None:
        with self._state.change():
            self._book.set_outcome(intent.key, outcome, text)
            if self._moves(kept, "expired", text, "expired", hold="expired", final=True):
                self._teller.ending(kept, "expired", text)

    def _unclear(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        act = intent.act
        text = f"whether the {act.kind} of {act.node} was done cannot be told: it is {now.raw or now.service}. It is not asked for again"
        with self._state.change():
            self._book.set_outcome(intent.key, "unclear", text)
            if self._moves(kept, "unclear", text, "unclear"):
                self._teller.ending(kept, "unclear", text)

    def _again(self, intent: Intent, kept: Kept, now: NodeState) -> None:
        """Ask for a drain that did not happen once more, within the same intent, so that it counts once."""
        held = self.holder.hold(kept, but=intent.key)
        act = intent.act
        if held is not None and held.why == "expired":
            self._end_expired(intent, kept, held.text, "not done")
            return
        if word := self._judges.against(kept.proposal.incident):
            with self._state.change():
                self._book.set_outcome(intent.key, "not done", word)
                self._moves(kept, "cleared", f"{word}, so it is not asked for again", "ended", final=True)
            return
        if held is not None or not self.is_due(kept):
            return
        if now.service != "in" and not (now.service in _OUT and now.ours):
            return  # what it is now may pass; it is looked at again
        try:
            calls = self._cluster.plan(act, now)
        except ConfigurationError as error:
            with self._state.change():
                if self._book.set_outcome(intent.key, "not done", str(error)):
                    self._hold_on(kept, "cluster", str(error), final=True)
            return
        if not calls:
            return  # two answers of the cluster that do not agree
        with self._state.change():
            text = f"{act.node} is {now.raw or now.service}: the {act.kind} is asked for once more"
            if not self._moves(kept, "failed", text, "again", due=self._due(kept.attempts + 1), attempt=True):
                return
        self._carry_out(intent.key, self._kept(kept.key), act, calls)

    # Ends -------------------------------------------------------------------------------------------------------------

    def _finish(self, kept: Kept, intent: Intent | None, status: Status, text: str) -> None:
        about, calls, kind = kept.proposal, [], self._carried_out(kept, intent)
        with self._state.change():
            if intent is not None:
                if not self._book.set_outcome(intent.key, "done", text):
                    return  # a person has closed it meanwhile
                trail = self._state.history(incident=about.incident, node=about.node)
                calls = [one.text for one in trail if one.what == "call" and one.record.get("intent") == intent.key]
            if not self._moves(kept, status, text, status, final=True):
                return
            if kind != "reboot":
                self._book.condemn(about)
            self._wants_requeue(about.incident)
            told = replace(kept, proposal=replace(about, act=kind))
            self._teller.ending(told, "done" if status == "done" else "already out", text, calls)
        if status == "done":
            self._teller.beside(kept, kind, text)

    def _carried_out(self, kept: Kept, intent: Intent | None) -> ActKind:
        """What was done to the node, which is not always what was proposed; of one that was out before, by what was done then."""
        if intent is not None:
            return intent.act.kind
        done = [one.act.kind for one in self._book.intents(node=kept.proposal.node) if one.outcome == "done"]
        return "reboot" if kept.proposal.act == "reboot" and done[-1:] == ["reboot"] else "drain"

    def _wants_requeue(self, incident: str) -> None:
        known = self._book.incident(incident)
        scheduler, _, job = (known.job if known else "").partition(":")
        if known is not None and self._policy.requeue and job and scheduler == self._cluster.scheduler:
            self._book.add_requeue(incident, job, found_at(known, self._state.clock.now()))

    def _held(
        self,
        kept: Kept,
        why: str,
        text: str,
        *,
        final: bool = False,
        retry: bool = False,
        intent: Intent | None = None,
    ) -> None:
        """Note that a node waits; `intent`: of what was begun, and is somebody else's now."""
        with self._state.change():
            if intent is None or self._book.set_outcome(intent.key, "not ours", text):
                self._hold_on(kept, why, text, final=final, retry=retry)

    def _hold_on(self, kept: Kept, why: str, text: str, *, final: bool = False, retry: bool = False) -> None:
        """The same, inside `State.change`."""
        due, text = self._due(kept.attempts + 1) if retry else None, self.approver.held(kept, text)
        new = (kept.status, kept.hold) != ("held", why)
        what = "held" if new else ""
        if self._moves(kept, "held", text, what, hold=why, due=due, final=final, attempt=retry) and new:
            self._teller.ending(kept, "held", text, hold=why)

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
            if not begun:
                self._hold_on(kept, "cluster", text, retry=True)
        if begun:
            logger.warning("%s: what was asked for cannot be seen: %s", kept.proposal.node, text)

    def note_hold(self, kept: Kept, held: Hold) -> None:
        """Note what holds a proposal, where that is new, inside `State.change`."""
        status: Status = {"observe": "observed", "expired": "expired"}.get(held.why, "held")  # type: ignore[assignment]
        text = f"{held.text}: {self.holder.error}" if held.why == "cluster" and self.holder.error else held.text
        text = text if held.why == "approval" else self.approver.held(kept, text)
        same = (kept.status, kept.hold, kept.final) == (status, held.why, held.final)
        if same and _are_close(kept.due, held.until):
            return
        new = (kept.status, kept.hold) != (status, held.why)
        moved = self._moves(kept, status, text, status if new else "", hold=held.why, due=held.until, final=held.final)
        if new and moved and held.why != "approval":  # that was told when it was asked
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
