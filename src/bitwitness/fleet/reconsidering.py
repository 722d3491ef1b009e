"""A second look at what the hardware says, when the window after an incident is over.

An incident is picked up within seconds, and acted upon; the lines that a log server forwards, and the counters that a scrape
brings, come later. They never change who is named. They can change what the node needs before anybody gets it back, and that
is worth telling whoever has it on the bench.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.decision import Proposal, propose
from bitwitness.fleet.kept import Book, Kept, Known
from bitwitness.fleet.kept_judgements import Words
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import ReadSignals
from bitwitness.runfiles import read_incident

logger = logging.getLogger(__name__)

_A_ROUND = 10
"""Incidents that are looked at again in one round: what is new comes first."""
_SOON, _PUT_OFF = timedelta(minutes=2), timedelta(hours=2)
_WAITING = ("proposed", "observed", "held")


def later_look(known: Known, heard: Iterable[Signal], now: datetime, policy: FleetPolicy) -> datetime | None:
    """When the hardware is asked about an incident once more; None: never.

    When the window after it is over; where a source had no time to be read, soon, but not for ever.
    """
    try:
        end = (
            min(datetime.fromisoformat(known.time), now) + policy.signals_after
        )  # a clock that is ahead must not put it off
    except (ValueError, TypeError, OverflowError):
        return None
    if end > now:
        return end
    soon = now + _SOON
    return soon if soon < end + _PUT_OFF and any(one.code.endswith(":later") for one in heard) else None


class Reconsiderer:
    """Looks again.

    Args:
        book: what is kept.
        policy: the thresholds.
        teller: tells people.
        read_signals: what the hardware says around an incident.
    """

    def __init__(self, book: Book, policy: FleetPolicy, teller: Teller, read_signals: ReadSignals) -> None:
        self._book, self._policy, self._teller, self._signals = book, policy, teller, read_signals
        self._words = Words(book.state)

    def round(self) -> None:
        """Look again at those whose time has come."""
        for known in self._book.to_reconsider(_A_ROUND):
            word = self._words.of(known.id)
            if word is not None and word.is_away:
                with self._book.state.change():
                    self._book.reconsidered(known.id, None)
                continue
            before = {one.number: one for one in self._book.proposals(incident=known.id)}
            try:
                proposals, later = self._proposals(known, before.values())
            except (BitwitnessError, OSError, *DAMAGE) as error:
                logger.warning("incident %s cannot be looked at again: %s", known.path, error)
                proposals, later = (), None
            with self._book.state.change():
                self._book.reconsidered(known.id, later)
                for number, proposal in enumerate(proposals):
                    kept = before.get(number)
                    if kept is not None and _differs(kept.proposal, proposal):
                        self._tell(kept, proposal)

    def _proposals(self, known: Known, before: Iterable[Kept]) -> tuple[tuple[Proposal, ...], datetime | None]:
        """What would be proposed today, by the namings that were known then; and when to look once more, if at all.

        What was heard before counts still: a source that does not answer today takes nothing back.
        """
        incident = read_incident(known.path)
        until = datetime.fromisoformat(known.time)
        history = [one for one in self._book.namings() if one.moment <= until]
        heard = self._signals(incident)
        fresh = {_key(one) for one in heard}
        old = [one for kept in before for one in kept.proposal.signals if _key(one) not in fresh]
        later = later_look(known, heard, self._book.state.clock.now(), self._policy)
        return propose(incident, known.run, [*old, *heard], history, self._policy), later

    def _tell(self, kept: Kept, proposal: Proposal) -> None:
        """Note what is proposed now; where nothing was done yet, it takes the place of what was proposed."""
        before = kept.proposal
        text = f"the hardware has said more since: {proposal.action} instead of {before.action}. {proposal.reason}"
        if proposal.action == before.action:
            text = f"the hardware has said more since, which does not change what is proposed: {proposal.reason}"
        if kept.status in _WAITING and not kept.final:
            self._book.reword(kept.key, proposal)
        record = {"action": proposal.action, "was": before.action, "confidence": proposal.confidence}
        self._book.state.note("reconsidered", text, incident=before.incident, node=before.node, record=record)
        if proposal.action != before.action:
            subject = f"bitwitness: {before.node} needs {proposal.action}, by what its hardware has said since"
            self._teller.trouble(f"later/{before.incident}/{kept.number}", "warning", subject, text)


def _key(one: Signal) -> tuple[str, str, str, str | None]:
    return one.host, one.code, one.device, one.time


def _differs(before: Proposal, now: Proposal) -> bool:
    """Whether there is something new; never where it is about somebody else, or would act on whom nobody would have acted on."""
    if (before.node, before.devices) != (now.node, now.devices) or (before.act is None) != (now.act is None):
        return False
    codes = [{one.code for one in each.signals if one.kind != "no-evidence"} for each in (before, now)]
    return codes[1] > codes[0]
