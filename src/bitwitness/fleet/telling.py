"""Who is told what: messages for people, and a line beside the incident for whoever looks there first.

A message is put into the outbox together with what it tells. The line beside the incident is a courtesy: a run directory that
is full or gone must not undo what was done to a node.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from bitwitness.errors import RunFilesError
from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.identity import Return
from bitwitness.fleet.kept import RETURNED, Book, Kept
from bitwitness.fleet.kept_answers import Question
from bitwitness.fleet.notify import About, Ending, Message, Severity, answer_commands, compose, compose_return
from bitwitness.fleet.outbox import Outbox
from bitwitness.runfiles import RunFiles

logger = logging.getLogger(__name__)


class Teller:
    """Writes messages into the outbox, inside `State.change`.

    Args:
        book: what is kept.
        outbox: where messages wait.
        owner: whom people are told to ask.
        touching: whether anything may be written beside incidents; a rehearsal may not.

    Attributes:
        touching: the same.
    """

    def __init__(self, book: Book, outbox: Outbox, owner: str, *, touching: bool = True) -> None:
        self.touching = touching
        self._book, self._outbox, self._owner = book, outbox, owner

    def about(self, incident: str, calls: Sequence[str] = ()) -> About:
        """What a message tells besides."""
        known, state = self._book.incident(incident), self._book.state
        shared = {"time": state.stamp(), "state": str(state.folder), "owner": self._owner, "calls": tuple(calls)}
        if known is None:
            return About(run="", **shared)  # type: ignore[arg-type]
        return About(run=known.run, incident=str(known.path), headline=known.headline, job=known.job, **shared)  # type: ignore[arg-type]

    def propose(self, proposal: Proposal, number: int) -> None:
        """Note a proposal; where nothing is to be done, that is its end, and is told."""
        book, state = self._book, self._book.state
        book.add_proposal(proposal, number)
        record = {"action": proposal.action, "act": proposal.act, "confidence": proposal.confidence}
        state.note("proposed", proposal.reason, incident=proposal.incident, node=proposal.node, record=record)
        if proposal.act is None and proposal.action != "none":
            self.ending(book.proposals(incident=proposal.incident)[-1], "nothing", proposal.reason)

    def ending(self, kept: Kept, ending: Ending, why: str, calls: Sequence[str] = (), *, hold: str = "") -> None:
        """Where a proposal stands. What holds a node is told once a day, not once an incident: a storm names it often."""
        node = kept.proposal.node
        told = {"held": f"told:{node}:{hold}", "already out": f"told:{node}:out"}.get(ending)
        if told is not None and not self._book.state.say_once(told, self._book.state.stamp()[:10]):
            return
        message = compose(kept.proposal, ending, why, self.about(kept.proposal.incident, calls), hold=hold)
        if kept.number >= RETURNED:  # the same incident, told a second time because its device came back
            message = replace(message, id=f"{message.id}-{kept.number}")
        self._outbox.put(message)

    def ask(self, kept: Kept, question: Question, why: str) -> None:
        """An answer is wanted; told of every question, because each needs one of its own."""
        state = self._book.state
        about = self.about(kept.proposal.incident, question.calls)
        about = replace(about, answers=answer_commands(question.name, str(state.folder)))
        message = compose(replace(kept.proposal, act=question.act), "held", why, about, hold="approval")
        self._outbox.put(replace(message, id=f"{message.id}-{question.name}-{question.number}"))

    def back(self, found: Return) -> None:
        """A condemned device is in service again."""
        message = compose_return(found, self.about(found.condemned.incident))
        since = found.condemned.time  # of a device that was taken out twice, the second return is another one
        self._outbox.put(replace(message, id=f"{message.id}-{since}"))

    def trouble(self, key: str, severity: Severity, subject: str, text: str) -> None:
        """Something about the controller itself, or about what it watches."""
        now = self._book.state.stamp()
        record = {"kind": "trouble", "key": key}
        self._outbox.put(Message(f"trouble/{key}/{now}", now, severity, subject[:120], text, record))

    def beside(self, kept: Kept, act: str, text: str) -> None:
        """A line of `actions.jsonl` beside the incident; called after what it tells is noted."""
        known = self._book.incident(kept.proposal.incident)
        if known is None or not self.touching:
            return
        try:
            RunFiles(known.run).note_action(known.id, f"fleet {act}", node=kept.proposal.node, outcome=text)
        except (RunFilesError, OSError) as error:
            logger.warning("%s: what was done could not be noted beside it: %s", known.path, error)
