"""Acts on nodes, through the state of their controller: answers, returns, and health checks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitwitness.errors import BitwitnessError, ConfigurationError, NotFound
from bitwitness.fleet.answering import answer, heard, stands
from bitwitness.fleet.approving import act_of
from bitwitness.fleet.asking import Preview, digest_of, needed, preview
from bitwitness.fleet.checking import preview_check, start_check
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters.base import Act, Check, valid_node
from bitwitness.fleet.kept import Book
from bitwitness.fleet.kept_answers import Question, Questions, Said
from bitwitness.fleet.kept_judgements import Word
from bitwitness.fleet.notify import undo_command
from bitwitness.fleet.state import NAME, State
from bitwitness.fleet.watched import cluster_as_watched, notifiers_as_watched, timeout_as_watched
from bitwitness.web import links
from bitwitness.web.acting_offers import HIDDEN, Bounded, Done, NotAnswered, Offer, Sent, sentence, writable

_ASKING = 10.0
"""Seconds for which a cluster is waited for where an answer needs nothing of it."""


@contextmanager
def opened(folder: Path, write: bool = False) -> Iterator[State]:
    """The state of a controller. Nothing is made where there is none, and nothing is changed unless it is to be."""
    with State(folder, create=False, check=False, write=write) as state:
        yield state


def fleet_of(node: str, fleets: tuple[Path, ...], given: str = "") -> Path:
    """The state of the controller that has a node.

    Args:
        node: its name.
        fleets: those of this console.
        given: which of them, by its number, where somebody has said so.

    Raises:
        ConfigurationError: this console has none.
        NotFound: none knows the node, or several do.
    """
    valid_node(node)
    if not fleets:
        raise ConfigurationError(
            "this console has no fleet to act with: it is started with --fleet STATE, the folder of `bitwitness fleet watch --state`"
        )
    if given:
        if not given.isdecimal() or int(given) >= len(fleets):
            raise NotFound(f"there is no fleet {given[:20]!r} here")
        return fleets[int(given)]
    knowing = [folder for folder in fleets if _knows(folder, node)]
    if len(knowing) > 1:
        named = ", ".join(f"?fleet={fleets.index(folder)} for {folder}" for folder in knowing)
        raise NotFound(f"several controllers know {node}: say which at the end of the address, {named}")
    if not knowing and len(fleets) > 1:
        raise NotFound(f"no controller of this console knows {node}")
    return (knowing or list(fleets))[0]


def _knows(folder: Path, node: str) -> bool:
    with opened(folder) as state:
        return bool(Book(state).proposals(node=node, last=1))


# Answers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answering:
    """Approve or reject what a controller asks.

    Attributes:
        folder: of its state.
        key: of the proposal.
        said: the answer.
        bounded: in which the cluster is asked.
    """

    folder: Path
    key: int
    said: Said
    bounded: Bounded

    def offer(self) -> Offer:
        """The question as it stands, and what would be called if it is approved."""
        with opened(self.folder) as state:
            question = Questions(state).of(self.key)
            kept = next(iter(Book(state).proposals(key=self.key)), None)
            if kept is None:
                raise NotFound(f"the controller of {self.folder} has no proposal {self.key}")
            if question is None:
                raise ConfigurationError(f"proposal {self.key} waits for no answer: it is {kept.status} ({kept.why})")
            if over := stands(state, question, self.said):
                raise ConfigurationError(over)  # no form for what cannot happen
            told, word = notifiers_as_watched(state), heard(state, question.incident)
        judged = "" if word is None else word.text
        seen = self._seen(question.node)
        calls = tuple(str(call) for call in seen.calls) if isinstance(seen, Preview) else question.calls
        checks = seen.checks if isinstance(seen, Preview) else (_unseen(seen),)
        machine = seen.before.instance if isinstance(seen, Preview) else question.machine
        state_now = seen.before.raw or seen.before.service if isinstance(seen, Preview) else "not known now"
        shown = seen.digest if isinstance(seen, Preview) else "unseen"
        yes, name, act, node = self.said == "approved", question.name, question.act, question.node
        return Offer(
            title=f"{'Approve' if yes else 'Reject'}: {act} {node}",
            verb=f"{'Approve' if yes else 'Reject'} the {act} of {node}",
            text=_YES if yes else _NO,
            back=links.node(node),
            digest=digest_of((), name, question.said, kept.status, judged, *((shown, *calls) if yes else ())),
            checks=(*checks, _noting(self.folder)),
            calls=calls if yes else (),
            caller="The controller makes these calls, in its next round." if yes and calls else "Nothing is called.",
            facts=(
                ("Node", node),
                ("Act", act),
                ("Machine", machine or "the cluster tells none"),
                ("Node now", state_now),
                ("Incident", question.incident),
                ("Judged", judged or "nobody has"),
                ("Proposed", f"{kept.proposal.action}, {kept.proposal.confidence} confidence"),
                ("Because", kept.proposal.reason),
                ("Devices", ", ".join(kept.proposal.devices) or "none is named"),
                ("Asked", question.asked),
                ("Controller", str(self.folder)),
            ),
            told=_told(told, "when it is done, or why it is not" if yes else "that it was rejected, by whom and why"),
            warnings=(*_judged(word, yes=yes), *_warnings(question, kept.status, machine, seen)),
            undo=(
                f"bitwitness fleet approve {name} --withdraw --why ... --state {shlex.quote(str(self.folder))}",
                undo_command(node, str(self.folder)),
            )
            if yes
            else (),
            command=f"bitwitness fleet {'approve' if yes else 'reject'} {name} --why ... --state {shlex.quote(str(self.folder))}",
        )

    def _seen(self, node: str) -> Preview | str:
        """What the cluster says of it, as far as it answers: an answer can be given without it."""

        def look() -> Preview:
            with opened(self.folder) as state:
                question = Questions(state).of(self.key)
                if question is None:
                    raise ConfigurationError("it waits for no answer any more")
                return preview(cluster_as_watched(state), act_of(state, question))

        try:
            return self.bounded.run(look, _ASKING, node)
        except (BitwitnessError, OSError, NotAnswered) as error:
            return str(error)

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Note the answer."""
        with opened(self.folder, write=True) as state:
            question = Questions(state).of(self.key)
            if question is None:
                raise ConfigurationError("it waits for no answer any more")
            done = answer(state, question.name, self.said, who, sent.why, notifiers=notifiers_as_watched(state))
        title = f"{self.said.capitalize()}: {question.act} {question.node}"
        return Done(200, title, sentence(done.text), "yes" if done.new else "no", offer.back)


_YES = (
    "You approve exactly what is shown here. The controller looks at the node again, and acts within its budget and quiet hours; where the "
    "proposal or the machine has changed by then, it asks anew."
)
_NO = (
    "Nothing is done about this incident by itself then. What was found counts on as a strike, and another incident that names the node is "
    "asked about anew."
)


def _noting(folder: Path) -> Check:
    """Everything is noted in the controller's state before it is done."""
    return writable(folder / NAME, "the controller's state")


def _unseen(text: str) -> Check:
    return Check(
        "the cluster", "unknown", f"it cannot be asked from here now: {text}", "the controller asks it before it acts"
    )


def _warnings(question: Question, status: str, machine: str, seen: Preview | str) -> tuple[str, ...]:
    found = []
    if question.said:
        found.append(
            f"It was {question.said} by {question.who} at {question.answered} ({question.why}): the first answer counts."
        )
    elif status != "held":
        found.append(f"It is {status} now.")
    if machine != question.machine:
        found.append(
            f"The machine was {question.machine or 'not told'} when it was asked: the controller will ask anew."
        )
    if isinstance(seen, str):
        found.append("These calls are those that were planned when it was asked.")
    else:
        found += seen.warnings
    return tuple(found)


def _judged(word: Word | None, *, yes: bool) -> tuple[str, ...]:
    if word is None or not word.is_away:
        return ()
    ends = "The controller ends this by itself in its next round"
    return (f"Its incident was {word.text}. {ends}{', and it cannot be approved' if yes else ''}.",)


def _told(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    return tuple(f"{name}: {what}" for name in names)


# Nodes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Returning:
    """Return a node to service.

    Attributes:
        folder: of the state of its controller.
        node: its name.
    """

    folder: Path
    node: str

    def offer(self) -> Offer:
        """What the cluster would be asked for, and what the controller would forget."""
        with opened(self.folder) as state:
            cluster = cluster_as_watched(state)
            before = cluster.look(valid_node(self.node))
            planned = clear(state, cluster, self.node, HIDDEN, "", dry=True, timeout=timeout_as_watched(state))
            checks = needed(cluster, Act("clear", self.node, "", HIDDEN), before, planned.calls)
            told = notifiers_as_watched(state)
        where = shlex.quote(str(self.folder))
        text = "The node takes jobs again, its strikes are forgotten, and its devices may come back. Nothing that was found before takes it out again."
        return Offer(
            title=f"Return {self.node} to service",
            verb=f"Return {self.node} to service",
            text=text,
            back=links.node(self.node),
            digest=digest_of(planned.calls, "clear", self.node, before.instance, before.service, before.reason),
            checks=(*checks, _noting(self.folder)),
            calls=tuple(str(call) for call in planned.calls),
            caller="This console makes these calls, now." if planned.calls else "Nothing is called.",
            facts=(
                ("Node", self.node),
                ("Node now", f"{before.raw or before.service}{f': {before.reason}' if before.reason else ''}"),
                ("Machine", before.instance or "the cluster tells none"),
                ("Devices that may come back", ", ".join(planned.devices) or "none is known"),
                ("Proposals that are closed", str(planned.closed)),
                ("Controller", str(self.folder)),
            ),
            told=_told(told, f"{self.node} is back in service, by whom and why"),
            warnings=() if planned.calls else (planned.text,),
            command=f"bitwitness fleet clear {shlex.quote(self.node)} --why ... --state {where}",
        )

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Return it."""
        with opened(self.folder, write=True) as state:
            cluster, told = cluster_as_watched(state), notifiers_as_watched(state)
            limit = timeout_as_watched(state)
            done = clear(state, cluster, self.node, sent.why, who, notifiers=told, timeout=limit)
        warnings = tuple(f"{text}." for text in (done.warning, done.closing) if text)
        title = f"Returned: {self.node}"
        return Done(
            200, title, sentence(done.text), "yes", offer.back, tuple(str(call) for call in done.calls), warnings
        )


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Start a health check of a node that is out.

    Attributes:
        folder: of the state of its controller.
        node: its name.
    """

    folder: Path
    node: str

    def offer(self) -> Offer:
        """What the cluster would be asked for."""
        with opened(self.folder) as state:
            seen = preview_check(cluster_as_watched(state), self.node)
        return Offer(
            title=f"Start a health check of {self.node}",
            verb=f"Start a health check of {self.node}",
            text="The cluster checks the machine of this node, which is out of service and stays so until a person returns it.",
            back=links.node(self.node),
            digest=seen.digest,
            checks=(*seen.checks, _noting(self.folder)),
            calls=tuple(str(call) for call in seen.calls),
            caller="This console makes these calls, now.",
            facts=(
                ("Node", self.node),
                (
                    "Node now",
                    f"{seen.before.raw or seen.before.service}{f': {seen.before.reason}' if seen.before.reason else ''}",
                ),
                ("Machine", seen.before.instance or "the cluster tells none"),
                ("Controller", str(self.folder)),
            ),
            told=("Nobody is told by a message; its result is seen on the node, and in `fleet status`.",),
            warnings=seen.warnings,
            command=f"bitwitness fleet check {shlex.quote(self.node)} --why ... --state {shlex.quote(str(self.folder))}",
        )

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Start it."""
        with opened(self.folder, write=True) as state:
            limit = timeout_as_watched(state)
            done = start_check(
                state, cluster_as_watched(state), self.node, sent.why, who, shown=offer.digest, limit=limit
            )
        title = f"Health check of {self.node}"
        return Done(200, title, sentence(done.text), "yes" if done.new else "no", offer.back, done.calls)
