"""A person's answer to what the controller asks: noted once, with who and why, whatever is killed and whoever else answers.

Nothing is called here. The controller acts in its next round, through all that it looks at, so that an answer which is given twice or by
two people is acted upon once. The first answer counts; an approval can be withdrawn until its act is begun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.fleet.approving import asking
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.judgements import word_beside
from bitwitness.fleet.kept import Book, Kept
from bitwitness.fleet.kept_answers import Question, Questions, Said, digest_of
from bitwitness.fleet.kept_judgements import Word, Words
from bitwitness.fleet.notify import About, clean, compose_rejection
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.state import State

_KEY = re.compile(r"([0-9]{1,18})(?:-([0-9a-f]{8}))?")
_LISTED = 10
_REASON = 2000
_CAME: dict[Said, tuple[str, ...]] = {"approved": ("done", "already out"), "rejected": ("rejected",)}
"""What an answer was given for, where it is over: the same answer again is no mistake then."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of an answer.

    Attributes:
        question: as it stands now.
        text: what was done, in a sentence.
        new: whether it was noted now; False where the same had been said before.
    """

    question: Question
    text: str
    new: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {**self.question.to_json(), "text": self.text, "new": self.new}


def find(state: State, which: str) -> Question:
    """The question that somebody means.

    Args:
        state: of the controller.
        which: its name (`12-3fa9c1d2`), the key of its proposal (`12`), or an incident or a node of which there is one.

    Raises:
        ConfigurationError: there is none, there are several, or it is not what was shown any more; says which there are.
    """
    questions = Questions(state)
    match = _KEY.fullmatch(which)
    if match is not None:
        found = questions.of(int(match[1]))
        if found is None:
            raise ConfigurationError(_no_question(state, int(match[1])))
        if match[2] is not None and match[2] != found.digest:
            raise ConfigurationError(
                f"what was shown as {which} is not what is asked now: {found.act} {found.node} because of incident {found.incident}, as "
                f"{found.name}. Look at it again (bitwitness fleet status), and answer that"
            )
        return found
    about = questions.about(which)
    waiting = {one.number for one in questions.waiting()}
    wanted = [one for one in about if one.number in waiting] or about[-1:]
    if len(wanted) == 1:
        return wanted[0]
    if wanted:
        raise ConfigurationError(f"several acts wait for an answer there, so say which: {_listed(wanted)}")
    there = _listed(questions.waiting())
    raise ConfigurationError(f"{which!r:.120} waits for no answer; what does: {there or 'nothing'}")


def answer(state: State, which: str, said: Said, who: str, why: str, *, notifiers: Sequence[str] = ()) -> Answered:
    """Note an answer.

    Args:
        state: of the controller, which may be running.
        which: as in `find`.
        said: the answer.
        who: whoever answers.
        why: what was looked at, or found out.
        notifiers: names of those who are told of a rejection.

    Raises:
        ConfigurationError: there is no reason or no such question, it was answered otherwise, or it is over.
    """
    why = _reason(why)
    with state.change():
        question = find(state, which)
        kept = _kept(state, question)
        closed = stands(state, question, said)
        if question.said == said and (kept.status in _CAME[said] or not _closed(state, question, said)):
            came = f": it is {kept.status} ({kept.why})" if kept.final else ""
            return Answered(question, f"{_was(question)}; nothing is noted a second time{came}", new=False)
        if closed:
            raise ConfigurationError(closed)
        Questions(state).answer(question.number, said, who, why)
        record = {
            "question": question.name,
            "act": question.act,
            "machine": question.machine,
            "calls": list(question.calls),
        }
        state.note(said, why, incident=question.incident, node=question.node, who=who, record=record)
        if said == "rejected":
            Book(state).set_status(kept.key, "rejected", f"{who} has rejected the {question.act}: {why}", final=True)
            about = About(state.stamp(), "", state=str(state.folder))
            Outbox(state, notifiers).put(compose_rejection(question, who, why, about))
        else:
            text = f"approved by {who} at {state.stamp()} ({why}); the controller acts in its next round, within its budget and quiet hours"
            Book(state).set_status(kept.key, "held", text)  # by nothing any more, until the controller looks
        return Answered(_again(state, question), _done(question, said), new=True)


def stands(state: State, question: Question, said: Said) -> str:
    """Where it stands, if this answer cannot be given any more: it was answered, is over, has changed, or was judged; "" if it can."""
    closed = _closed(state, question, said)
    if not question.said:
        return closed
    if closed:
        return f"{_was(question)}: the first answer counts. Now {closed}"
    more = " (bitwitness fleet approve --withdraw takes it back until its act is begun)"
    return f"{_was(question)}: the first answer counts{more if question.said == 'approved' else ''}"


def _closed(state: State, question: Question, said: Said) -> str:
    """Why nothing comes of it any more, whoever has answered what."""
    kept = _kept(state, question)
    if kept.final:
        return f"the {question.act} of {question.node} is over: it is {kept.status} ({kept.why})"
    if digest_of(kept, question.act, question.machine) != question.digest:
        return f"what is proposed about {question.node} has changed since it was asked: the controller asks anew in its next round"
    word = heard(state, question.incident)
    if said == "approved" and word is not None and word.is_away:
        return (
            f"incident {question.incident} was {word.text}, so that the {question.act} of {question.node} is not approved. If it is to be "
            "done all the same, judge the incident `confirmed` first (bitwitness incident judge)"
        )
    return ""


def withdraw(state: State, which: str, who: str, why: str) -> Answered:
    """Take an approval back whose act is not begun; the same is asked again.

    Raises:
        ConfigurationError: there is no reason or no such approval, or its act was begun.
    """
    why = _reason(why)
    with state.change():
        question = find(state, which)
        kept = _kept(state, question)
        if question.said != "approved":
            text = _was(question) if question.said else f"the {question.act} of {question.node} was not approved yet"
            raise ConfigurationError(f"{text}: there is nothing to withdraw")
        begun = [one for one in Book(state).intents(proposal=kept.key) if one.outcome != "not done"]
        if begun or kept.final:
            raise ConfigurationError(
                f"the {question.act} of {question.node} was begun already, it is {kept.status} ({kept.why}): "
                "bitwitness fleet clear returns the node"
            )
        Questions(state).withdraw(question, f"{who} has withdrawn the approval: {why}")
        record = {"question": question.name, "act": question.act}
        state.note("withdrawn", why, incident=question.incident, node=question.node, who=who, record=record)
        open_again = _again(state, question)
        text = asking(open_again, str(state.folder))
        Book(state).set_status(kept.key, "held", text, hold="approval")
        return Answered(open_again, f"the approval by {question.who} counts no more: {text}", new=True)


def heard(state: State, incident: str) -> Word | None:
    """What counts of an incident now: what stands beside it, else what the controller has heard."""
    known = Book(state).incident(incident)
    try:
        word = None if known is None else word_beside(known.path)
    except (BitwitnessError, OSError, *DAMAGE):  # the controller says so
        word = None
    return word or Words(state).of(incident)


def _again(state: State, question: Question) -> Question:
    found = Questions(state).of(question.proposal)
    assert found is not None, "it was there, and this is its transaction"
    return found


def _kept(state: State, question: Question) -> Kept:
    return Book(state).proposals(key=question.proposal)[0]


def _reason(why: str) -> str:
    plain = one_line(clean(why).replace("\n", " "), _REASON)
    if not plain:
        raise ConfigurationError("an answer needs a reason, which is kept: what was looked at, or found out?")
    return plain


def _no_question(state: State, key: int) -> str:
    kept = Book(state).proposals(key=key)
    there = _listed(Questions(state).waiting())
    if not kept:
        return f"there is no proposal {key}; what waits for an answer: {there or 'nothing'}"
    one = kept[0]
    hold = f", {one.hold}" if one.hold else ""
    return f"proposal {key} waits for no answer: it is {one.status}{hold} ({one.why or one.proposal.reason}); what does: {there or 'nothing'}"


def _listed(questions: Sequence[Question]) -> str:
    named = [f"{one.name} ({one.act} {one.node}, incident {one.incident})" for one in questions[:_LISTED]]
    more = [f"{len(questions) - _LISTED} more"] if len(questions) > _LISTED else []
    return ", ".join(named + more)


def _was(question: Question) -> str:
    return f"the {question.act} of {question.node} was {question.said} by {question.who} at {question.answered} ({question.why})"


def _done(question: Question, said: Said) -> str:
    if said == "rejected":
        return f"the {question.act} of {question.node} is rejected: nothing is done about incident {question.incident} by itself"
    return (
        f"the {question.act} of {question.node} is approved: the controller does it in its next round, within its budget and quiet hours, "
        f"if {question.node} is still as it was"
    )
