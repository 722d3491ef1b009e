"""What a person sees of a controller: is it alive, what may it still do, what stands where, and what is to be done now.

Computed from the database alone, so that it is as right beside a controller that hangs as beside one that runs.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from bitwitness.fleet.approving import asking
from bitwitness.fleet.budget import HOUR, left
from bitwitness.fleet.clock import moment, stamp
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.judgements import still_out
from bitwitness.fleet.kept import Book, Kept, Requeue
from bitwitness.fleet.kept_answers import Question, Questions
from bitwitness.fleet.kept_judgements import Word, Words
from bitwitness.fleet.notify import clean, undo_command
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.owning import STATE_LOCK, owned
from bitwitness.fleet.pulse import pulse
from bitwitness.fleet.state import State

RECENT = timedelta(days=7)
LONGEST_TODO = 12
"""What a person is asked to do at once; more is counted."""
_SHOWN = 200

Life = Literal["running", "silent", "stopped", "never"]


@dataclass(frozen=True, slots=True)
class Report:
    """A controller at one moment.

    Attributes:
        life: `running`; `silent` where it should do rounds and does not; `stopped` as it was told; `never` where it did none.
        text: the same in a sentence.
        about: what it said of itself: mode, cluster, host, pid, ...
        last_round: when the last round ended, or "".
        budget: of nodes within an hour: `limit`, `used`, `left`, and `free_at` where none is left.
        incidents: status of the verdict -> how many.
        proposals: those that wait, and what became of others lately; newest last.
        more: how many things a person should do that are not in `todo`, which would be too long.
        requeues: jobs that are to be started again.
        returns: condemned devices that came back.
        troubles: what is wrong with what is watched, since when.
        messages: how many wait to be delivered.
        todo: what a person should do now, the most urgent first.
        questions: what waits for a person's answer, oldest first.
        judged: what people have said of the incidents of these.
    """

    life: Life
    text: str
    about: dict[str, str]
    last_round: str
    budget: dict[str, Any]
    incidents: dict[str, int]
    proposals: tuple[Kept, ...]
    requeues: tuple[Requeue, ...]
    returns: tuple[dict[str, str], ...]
    troubles: tuple[tuple[str, str], ...]
    messages: dict[str, Any]
    todo: tuple[str, ...]
    more: int = 0
    questions: tuple[Question, ...] = ()
    judged: tuple[Word, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "controller": {
                "life": self.life,
                "text": self.text,
                "last_round": self.last_round or None,
                **_public(self.about),
            },
            "budget": self.budget,
            "incidents": self.incidents,
            "proposals": [one.to_json() for one in self.proposals],
            "requeues": [
                {
                    "incident": one.incident,
                    "job": one.job,
                    "nodes": list(one.nodes),
                    "status": one.status,
                    "why": one.why,
                }
                for one in self.requeues
            ],
            "returns": list(self.returns),
            "troubles": [{"since": since, "text": text} for since, text in self.troubles],
            "messages": self.messages,
            "todo": list(self.todo),
            "todo_more": self.more,
            "questions": [one.to_json() for one in self.questions],
            "judged": [one.to_json() for one in self.judged],
        }


def _public(about: dict[str, str]) -> dict[str, str]:
    return {
        name: about[name]
        for name in ("mode", "cluster", "leader", "host", "pid", "started", "policy", "owner", "command")
        if about.get(name)
    }


def report(state: State, now: datetime | None = None) -> Report:
    """The controller now."""
    now = now or state.clock.now()
    book, about = Book(state), state.about()
    words = Words(state).all()
    kept = _with_words(_with_cleared([one for one in book.proposals() if _is_shown(one, now)], state), words)
    life, text = _life(about, now, state.folder)
    troubles = tuple((since, said) for key, (said, since) in state.said().items() if not key.startswith("told:"))
    returns, messages = tuple(book.returns()), Outbox(state, ()).waiting()
    budget = _budget(book, about, now)
    requeues = tuple(book.requeues())
    questions = tuple(Questions(state).waiting())
    todo = _todo(kept, returns, troubles, messages, questions, words, state)
    about_these = {one.proposal.incident for one in kept} | {one.incident for one in questions}
    if life in ("silent", "stopped", "never"):
        todo.insert(0, _again(life, text, about, state))
    return Report(
        life,
        text,
        about,
        about.get("round", ""),
        budget,
        book.incidents(),
        tuple(kept),
        requeues,
        returns,
        troubles,
        messages,
        tuple(todo[:LONGEST_TODO]),
        max(0, len(todo) - LONGEST_TODO),
        questions,
        tuple(word for name, word in words.items() if name in about_these),
    )


def _is_shown(one: Kept, now: datetime) -> bool:
    return (not one.final and one.proposal.act is not None) or now - moment(one.updated) < RECENT


def _with_cleared(kept: Sequence[Kept], state: State) -> list[Kept]:
    """What a person has returned to service since is not out any more."""
    cleared = {one.node: one for one in state.history(what="cleared")}
    shown = []
    for one in kept:
        by = cleared.get(one.proposal.node)
        if by is not None and by.time >= one.updated and one.status in ("done", "already out"):
            why = f"returned to service by {by.who}: {by.text}"
            shown.append(replace(one, status="cleared", why=why, updated=by.time))
        else:
            shown.append(one)
    return shown


def _with_words(kept: Sequence[Kept], words: Mapping[str, Word]) -> list[Kept]:
    """What people have said of its incident stands beside what became of a proposal."""
    shown = []
    for one in kept:
        word = words.get(one.proposal.incident)
        if word is None or word.text in one.why or word.text in one.proposal.reason:
            shown.append(one)
        else:
            shown.append(replace(one, why=f"{one.why or one.proposal.reason}; its incident was {word.text}"))
    return shown


def _life(about: dict[str, str], now: datetime, folder: Path) -> tuple[Life, str]:
    where = f"on {about.get('host', '?')}, pid {about.get('pid', '?')}"
    if not about.get("started"):
        return "never", "no controller has run with this state yet"
    if about.get("stopped"):
        return "stopped", f"the controller {where} was stopped at {about['stopped']}: nothing is watched"
    last = moment(about["round"]).timestamp() if about.get("round") else None
    seen = pulse(moment(about["started"]).timestamp(), last, now.timestamp())
    age = seen.age or 0.0
    if about.get("host") == socket.gethostname() and owned(folder / STATE_LOCK) is False:
        shown_last = f"{'it was started' if seen.first else 'its last round was'} {_length(age)} ago"
        return (
            "silent",
            f"the controller {where} is gone, killed or ended by an error: nothing is watched, {shown_last}",
        )
    if seen.silent:
        return (
            "silent",
            f"the controller {where} has done no round for {_length(age)}: it hangs, was killed, or cannot write its state",
        )
    if seen.first:
        return "running", f"the controller {where} was started {age:.0f} s ago, its first round is under way"
    if about.get("leader"):
        return "running", f"the controller {where} stands by: {about['leader']} leads on this cluster"
    return "running", f"the controller {where} does its rounds, the last {age:.0f} s ago"


def _length(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _budget(book: Book, about: dict[str, str], now: datetime) -> dict[str, Any]:
    limit = int(about.get("nodes_per_hour") or 0)
    now_left = left(book.acted(HOUR), now, limit)
    return {
        "limit": limit,
        "used": now_left.used,
        "left": now_left.nodes,
        "free_at": None if now_left.until is None else stamp(now_left.until),
        "cluster_share": float(about.get("cluster_share") or 0),
    }


# What to do -----------------------------------------------------------------------------------------------------------


def _todo(
    kept: Sequence[Kept],
    returns: Sequence[dict[str, str]],
    troubles: Sequence[tuple[str, str]],
    waiting: dict[str, Any],
    questions: Sequence[Question],
    words: Mapping[str, Word],
    state: State,
) -> list[str]:
    """The most urgent first, and of what is as urgent the newest. Every sentence says what to do, not only what is wrong."""
    folder = str(state.folder)
    found = [
        f"{shown(one['text'])}. Take {one['node']} out, or if it was repaired: {undo_command(one['node'], folder)}"
        for one in returns
    ]
    advised = [
        (rank, -place, text)
        for place, one in enumerate(kept)
        for rank, text in _advice(one, words.get(one.proposal.incident))
    ]
    first = [text for rank, _, text in sorted(advised) if rank == 0]
    found += first
    found += [still_out(node, word, folder) for node, word in Words(state).out()]
    found += [_asking(one, words.get(one.incident), folder) for one in reversed(questions)]
    found += [f"since {since}: {shown(text)}" for since, text in reversed(troubles)]
    if waiting["failed"]:
        error = shown(str(waiting["error"]))
        found.append(f"{waiting['failed']} messages could not be delivered, so people may not know: {error}")
    return found + [text for rank, _, text in sorted(advised) if rank > 0]


def _asking(question: Question, word: Word | None, folder: str) -> str:
    judged = "" if word is None else f" (incident {question.incident} was {shown(word.text)})"
    return f"{asking(question, folder)}{judged}"


def _again(life: Life, text: str, about: dict[str, str], state: State) -> str:
    """How to start a controller that does not run."""
    command = about.get("command") or f"bitwitness fleet watch RUN_DIR... --state {shlex.quote(str(state.folder))}"
    again = f"tart it again, by its service if it has one: {command}"
    return f"{text}. Look at its log, end it if it hangs, and s{again}" if life == "silent" else f"{text}. S{again}"


def shown(text: str) -> str:
    """What a program or a file said, as a part of a sentence: one line of what can be seen, and not too much of it."""
    return one_line(clean(text).replace("\n", " "), _SHOWN)


def _advice(kept: Kept, word: Word | None = None) -> list[tuple[int, str]]:
    """What a person should do about one proposal, and how urgent that is, 0 first; nothing where nothing.

    Whoever has judged an incident has looked at it; where it was no fault, nothing that is not begun is to be done about it.
    """
    one, node, why = kept.proposal, kept.proposal.node, shown(kept.why)
    if kept.status == "unclear":
        return [(0, f"{node}: look whether the {one.act} happened, and finish it or `fleet clear` it by hand ({why})")]
    if kept.status == "failed":
        return [(0, f"{node}: the cluster does not take it out ({why}); take it out by hand if it goes on")]
    if word is not None and word.is_away:
        return []
    if kept.status == "expired":
        return [(1, f"{node}: it is still in service although {shown(one.reason)}")]
    if kept.hold in ("not-ours", "protected"):
        return [(2, f"{node}: {why}; a person must decide, because {shown(one.reason)}")]
    if kept.hold == "cluster":
        return [(0, f"{node}: {why}")]
    if one.action == "contact" and kept.status == "nothing" and word is None:
        return [(2, f"incident {one.incident}: {shown(one.reason)}")]
    return []


def sources(about: dict[str, str]) -> dict[str, Any]:
    """What the controller was started with: `runs`, `parents`, `cluster` (settings) and `notifiers` (names), as far as it said so."""
    try:
        value = json.loads(about.get("sources", "{}"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
