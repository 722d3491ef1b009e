"""One readable message about what was found and done, and the ways it reaches a person.

Whoever reads it at three in the morning is told what happened, where, how sure that is, what was done, what to do next and how
to take it back. Names in it come from other machines, so nothing in them can become a header of a mail, a mention in a chat
or an escape sequence. Addresses of chat rooms are secrets too: no error and no log tells them.
"""

from __future__ import annotations

import hashlib
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import one_line

if TYPE_CHECKING:
    from bitwitness.fleet.decision import Proposal
    from bitwitness.fleet.identity import Return
    from bitwitness.fleet.kept_answers import Question

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
Ending = Literal["observed", "done", "already out", "held", "failed", "unclear", "expired", "nothing"]
"""Where a proposal stands when somebody is told."""

SUBJECT = 120
"""Characters of a subject, at most."""
_TEXT = 8000
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Kinds of characters that control instead of show: line ends, escapes, marks that turn the direction of a text."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a person is told.

    Attributes:
        id: the same whenever the same is told; whoever has got it once ignores the second.
        time: UTC in ISO 8601.
        severity: `info`, `warning` or `critical`.
        subject: one line of at most 120 characters; what is longer is cut, and what controls instead of shows is taken out.
        text: all of it, likewise.
        record: the same for a program, JSON values.
    """

    id: str
    time: str
    severity: Severity
    subject: str
    text: str
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = clean(self.text)
        if len(text) > _TEXT:
            text = text[: _TEXT - 40] + "\n... (cut; the incident has all of it)"
        object.__setattr__(self, "subject", one_line(clean(self.subject).replace("\n", " "), SUBJECT))
        object.__setattr__(self, "text", text)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Message:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it is not one of these.
        """
        texts = {name: record[name] for name in ("id", "time", "severity", "subject", "text")}
        if not all(isinstance(text, str) for text in texts.values()) or texts["severity"] not in SEVERITIES:
            raise ValueError(f"no message: {texts!r:.80}")
        return cls(**texts, record=dict(record["record"]))


class Notifier(Protocol):
    """A way to reach somebody."""

    @property
    def name(self) -> str:
        """For logs and the audit; it holds no secret."""
        ...

    def send(self, message: Message) -> None:
        """Hand the message over; it may be handed over again if the process dies before that is noted.

        Raises:
            ClusterError: it was not taken; it is tried again.
        """
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What a message tells besides the proposal itself.

    Attributes:
        time: when what it tells happened, UTC in ISO 8601.
        run: the run, for people: its name or directory.
        incident: where the incident is on disk, or "".
        headline: the verdict in a line, or "".
        job: of the scheduler, or "".
        state: directory of the controller's state; "" means the default one.
        calls: what was called on the cluster, or would be.
        owner: whom to ask.
        answers: the commands by which a person answers, where an answer is wanted.
    """

    time: str
    run: str
    incident: str = ""
    headline: str = ""
    job: str = ""
    state: str = ""
    calls: Sequence[str] = ()
    owner: str = ""
    answers: Sequence[str] = ()


def compose(proposal: Proposal, ending: Ending, why: str, about: About, *, hold: str = "") -> Message:
    """The message about one proposal. Pure.

    Args:
        proposal: what is proposed.
        ending: where it stands.
        why: why it stands there, in a sentence: of a hold, an error, an outcome.
        about: the rest.
        hold: of what is held, the reason in a word; another one is another message.
    """
    parts = [
        _happened(proposal, about),
        _done(proposal, ending, why, about),
        "What to do next: " + " ".join(_next(proposal, ending, hold, about)),
        *_answers(about),
        *_undo(proposal, ending, about),
        _look(about),
    ]
    record = {
        "kind": "proposal",
        "ending": ending,
        "hold": hold,
        "why": why,
        "run": about.run,
        "job": about.job,
        "proposal": proposal.to_json(),
        "calls": list(about.calls),
        "answers": list(about.answers),
        "undo": undo_command(proposal.node, about.state) if _undoable(proposal, ending) else "",
    }
    node = f" {proposal.node}" if proposal.node else ""
    subject = f"bitwitness: {_subject(proposal, ending, hold)}{node} (incident {proposal.incident})"
    identity = f"{proposal.incident}/{proposal.node}/{ending}/{hold}"
    return _message(identity, about.time, _severity(proposal, ending), subject, parts, record)


def compose_return(back: Return, about: About) -> Message:
    """The message that a condemned device is in service again. Pure."""
    was, seen = back.condemned, back.sighting
    parts = [
        back.text + ".",
        "Whatever runs on it may be computing wrongly now. What is done about the node, if anything, is told apart.",
        (
            f"What to do next: take node {seen.node} out of service, and ask whoever repaired it for proof that the device was exchanged. "
            "If it was tested and is healthy, clear it by the command below."
        ),
        f"Undo: {undo_command(was.node, about.state)}",
        _look(about),
    ]
    record = {"kind": "return", "run": about.run, "condemned": asdict(was), "sighting": asdict(seen)}
    subject = f"bitwitness: a condemned device is back, in {seen.node} (incident {was.incident})"
    return _message(f"{was.incident}/{was.device}/{seen.node}/returned", about.time, "critical", subject, parts, record)


def compose_clear(node: str, who: str, why: str, about: About) -> Message:
    """The message that a person has put a node back into service. Pure."""
    parts = [f"{who} has put node {node} back into service: {why}", "What to do next: nothing.", _look(about)]
    record = {"kind": "clear", "node": node, "who": who, "why": why}
    subject = f"bitwitness: {node} is back in service, by {who}"
    return _message(f"{node}/clear/{about.time}", about.time, "info", subject, parts, record)


def compose_rejection(question: Question, who: str, why: str, about: About) -> Message:
    """The message that a person has rejected what was asked. Pure."""
    node, act = question.node, question.act
    parts = [
        f"{who} has rejected the {act} of node {_flat(node)}, which was proposed because of incident {question.incident}: {_flat(why)}",
        f"Nothing is done about that by itself. Another incident that names {_flat(node)} is asked about anew; what was found counts on.",
        _look(about),
    ]
    record = {"kind": "rejection", "question": question.name, "node": node, "act": act, "who": who, "why": why}
    subject = f"bitwitness: {act} rejected: {node}, by {who} (incident {question.incident})"
    return _message(f"{question.name}/{question.number}/rejected", about.time, "info", subject, parts, record)


def answer_commands(question: str, state: str = "") -> tuple[str, str]:
    """The exact commands by which a person approves or rejects."""
    where = f" --state {shlex.quote(state)}" if state else ""
    yes, no = (
        f"bitwitness fleet {word} {question} --why 'WHAT WAS LOOKED AT'{where}" for word in ("approve", "reject")
    )
    return yes, no


def undo_command(node: str, state: str = "") -> str:
    """The exact command that puts a node back into service."""
    where = f" --state {shlex.quote(state)}" if state else ""
    return f"bitwitness fleet clear {shlex.quote(node)} --why 'WHAT WAS FOUND OUT'{where}"


def clean(text: str) -> str:
    """A text of which every character is shown: no escape sequences, no marks that turn the direction. Line ends stay."""
    return "".join(
        char if char == "\n" or unicodedata.category(char) not in _UNSEEN else " " for char in text.expandtabs(2)
    )


def _message(
    identity: str, time: str, severity: Severity, subject: str, parts: Sequence[str], record: Mapping[str, Any]
) -> Message:
    name = hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()[:32]
    return Message(name, time, severity, subject, "\n\n".join(part for part in parts if part), record)


# The parts ----------------------------------------------------------------------------------------------------------


def _happened(proposal: Proposal, about: About) -> str:
    job = f", job {_flat(about.job)}" if about.job else ""
    headline = f" {_flat(about.headline)}." if about.headline else ""
    if not proposal.node:
        return f"Incident {proposal.incident} of run {_flat(about.run)}{job}:{headline} Nobody can be named. {_flat(proposal.reason)}"
    devices = ", ".join(map(_flat, proposal.devices)) or "not named"
    return (
        f"Incident {proposal.incident} of run {_flat(about.run)}{job}:{headline}\nNode: {_flat(proposal.node)}\nDevice: {devices}\n"
        f"Proposed: {proposal.action} ({proposal.confidence} confidence)\nWhy: {_flat(proposal.reason)}"
    )


def _flat(text: str) -> str:
    """On one line: what comes from elsewhere must not look like a line of ours."""
    return one_line(clean(text).replace("\n", " "), 1000)


def _done(proposal: Proposal, ending: Ending, why: str, about: About) -> str:
    said = {
        "observed": "Nothing was done: the controller only observes.",
        "done": f"Done: {_ACTS.get(proposal.act or '', 'done')}.",
        "already out": "Nothing had to be done: the node was out of service already.",
        "held": "Nothing was done yet: it is held.",
        "failed": "It failed; it is tried again for a while.",
        "unclear": "It is not known whether it was done: the controller was interrupted. It is not tried a second time.",
        "expired": "Nothing was done, and nothing will be: it had to wait for too long.",
        "nothing": "No node was touched.",
    }[ending]
    calls = ""
    if about.calls:
        head = "Calls:" if ending in ("done", "failed", "unclear") else "What would be called:"
        calls = "\n" + head + "".join(f"\n  {_flat(call)}" for call in about.calls)
    reason = _flat(why)
    return f"{said}{f' {reason}' if reason and reason != _flat(proposal.reason) else ''}{calls}"


_ACTS = {
    "drain": "the node takes no new jobs",
    "reboot": "the node is out of service and was told to reboot",
    "replace": "the node is out of service and its replacement was asked for",
    "clear": "the node is in service again",
}


def _next(proposal: Proposal, ending: Ending, hold: str, about: About) -> Iterator[str]:
    node = _flat(proposal.node)
    ask = f" Ask {_flat(about.owner)} if in doubt." if about.owner else ""
    if not node:
        yield f"read the incident and look at its candidates; take no node out of service because of it alone.{ask}"
    elif ending in {"done", "already out"}:
        yield f"diagnose {node} and have it repaired; put it back when somebody knows what was wrong.{ask}"
    elif ending == "unclear":
        yield f"look at {node} now: is it out of service, rebooted or replaced? Then say so by clearing or draining it by hand.{ask}"
    elif ending == "failed":
        yield f"look whether the cluster answers, and take {node} out of service by hand if it does not.{ask}"
    elif ending == "held":
        yield (
            _HOLDS.get(hold, f"decide whether {node} must be taken out of service now, and do it by hand if so.") + ask
        )
    elif proposal.act is not None:
        yield f"take {node} out of service by hand, or leave it in knowingly.{ask}"
    elif proposal.action == "contact":
        yield f"a person must decide about {node}; nothing happens by itself.{ask}"
    elif proposal.action == "re-test":
        yield f"test {node} when it is next idle.{ask}"
    else:
        yield f"nothing now; another incident that names the same device counts on.{ask}"


_HOLDS = {
    "approval": "look at the incident and at the calls above, and answer by one of the commands below.",
    "quiet-hours": "nothing, if it can wait for the end of the quiet hours; else take the node out of service by hand.",
    "nodes-per-hour": "find out why so many nodes are named at once, before more of them are taken out; the limit is nodes_per_hour.",
    "cluster-share": "bring nodes back into service, or find out why so many are out; the limit is cluster_share.",
    "protected": "take the node out of service by hand if you agree; the policy protects it.",
    "cluster": "look whether the cluster answers; it is asked again.",
    "not-ours": "nothing is done to a node that somebody else took out: tell them why it must not come back as it is.",
}


def _answers(about: About) -> Iterator[str]:
    if about.answers:
        yield "To answer:" + "".join(f"\n{_flat(command)}" for command in about.answers)


def _undoable(proposal: Proposal, ending: Ending) -> bool:
    return bool(proposal.node) and proposal.act is not None and ending in ("done", "already out", "unclear")


def _undo(proposal: Proposal, ending: Ending, about: About) -> Iterator[str]:
    if _undoable(proposal, ending):
        yield f"Undo: {_flat(undo_command(proposal.node, about.state))}"


def _look(about: About) -> str:
    state = f" --state {shlex.quote(about.state)}" if about.state else ""
    shown = f"bitwitness incident show {shlex.quote(about.incident)}\n" if about.incident else ""
    return f"Look:\n{shown}bitwitness fleet history{state}"


def _subject(proposal: Proposal, ending: Ending, hold: str) -> str:
    if not proposal.node:
        return "corruption found, nobody can be named"
    if ending == "done":
        return {"drain": "drained", "reboot": "rebooting", "replace": "replacing"}.get(proposal.act or "", "done:")
    if hold == "approval":
        return f"an answer is wanted: {proposal.act}"
    if ending == "nothing":
        return {"contact": "a person must decide about", "re-test": "to be tested:"}.get(
            proposal.action, "a strike against"
        )
    return {
        "observed": f"would {proposal.act or proposal.action}",
        "already out": "already out of service:",
        "held": f"{proposal.act or proposal.action} held ({hold or 'waiting'}):",
        "failed": f"{proposal.act or proposal.action} FAILED:",
        "unclear": f"UNCLEAR whether {proposal.act or proposal.action} was done:",
        "expired": f"{proposal.act or proposal.action} not done, expired:",
    }[ending]


def _severity(proposal: Proposal, ending: Ending) -> Severity:
    if ending in ("failed", "unclear") or (proposal.action == "contact" and ending == "nothing"):
        return "critical"
    if ending in ("done", "held", "expired") or (ending == "observed" and proposal.act is not None):
        return "warning"
    return "info"


def notifiers(settings: Sequence[Mapping[str, Any]]) -> list[Notifier]:
    """The ways to reach somebody that a policy asks for: `notifiers(policy.notify)`. Nothing is sent.

    Raises:
        ConfigurationError: a kind or a setting is unknown, or a secret cannot be read.
        MissingExtra: what it needs is not installed.
    """
    if not settings:
        return []
    from bitwitness.fleet.senders import made  # noqa: PLC0415 - whoever only composes needs no client

    build: Callable[[Mapping[str, Any], str], Notifier] = made
    found = [build(one, f"[[notify]] number {number}") for number, one in enumerate(settings, 1)]
    twice = sorted(name for name, count in Counter(one.name for one in found).items() if count > 1)
    if twice:
        raise ConfigurationError(
            f"[[notify]]: {' and '.join(twice)} is there twice: give each a name of its own by `name`, by which its messages wait"
        )
    return found
