"""What an act from the console would do, and what became of it: records, made before anything is done and shown first.

Where the cluster hangs only the request that asks it waits, and not for ever: each is asked in a thread of its own, of which there are
few, and fewer for one node. What asks no cluster has threads of its own, so that it is always answered.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.clusters.base import Check

T = TypeVar("T")

LOOKING, DOING = 25.0, 90.0
"""Seconds that an offer is waited for, and that an act is."""
AT_ONCE = 8
"""Requests that may wait for clusters at one time."""
EACH = 2
"""Of these, for one node: one that hangs must not keep people from all others."""
HERE = 2 * AT_ONCE
"""Requests that may read and write files at one time; more than may wait for clusters, for which these wait a little too."""
HIDDEN = "THE REASON THAT YOU GIVE"
"""Stands in shown calls where the reason will stand."""


class NotAnswered(BitwitnessError):
    """A cluster or a disk has not answered in time, or too many wait for one already."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """Something to be chosen in the form: under which name and value it is sent, what it says, and whether it is chosen already."""

    name: str
    value: str
    label: str
    chosen: bool = False
    many: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What would be done.

    Attributes:
        title: in a few words.
        verb: of the button.
        text: in a sentence or two.
        facts: what it is about: label and value.
        checks: which permissions it needs, and whether they are there.
        calls: the exact calls, in order.
        caller: who makes them, and when.
        told: who is told what.
        warnings: what else whoever decides should know.
        choices: what has to be chosen.
        undo: the commands that take it back.
        command: the same on a command line.
        digest: what stands for all that would be done.
        back: the address of the page that it is about.
    """

    title: str
    verb: str
    text: str
    back: str
    digest: str
    checks: tuple[Check, ...] = ()
    calls: tuple[str, ...] = ()
    caller: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    told: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    undo: tuple[str, ...] = ()
    command: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an act.

    Attributes:
        status: of the answer by HTTP.
        title, text: in a few words, and in a sentence or two.
        happened: whether something was changed; `unknown` where that cannot be told.
        calls: that were made, or may have been.
        warnings: what is left.
        back: the address of the page that it is about.
        again: whether this repeats what a first click has done.
    """

    status: int
    title: str
    text: str
    happened: Literal["yes", "no", "unknown"]
    back: str
    calls: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """What a form has sent: the token of the form, the digest of what it showed, the reason, and what was chosen."""

    form: str
    shown: str
    why: str
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Doing(Protocol):
    """One act, on one thing."""

    def offer(self) -> Offer:
        """What would be done now. Changes nothing.

        Raises:
            BitwitnessError: nothing can be done; says why.
        """
        ...

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Do what was offered.

        Raises:
            BitwitnessError: it could not be done.
        """
        ...


class Bounded:
    """Runs what may hang, a few at a time, and waits only so long."""

    def __init__(self, most: int = AT_ONCE, each: int = EACH) -> None:
        self._most, self._each = most, each
        self._lock, self._running = threading.Lock(), Counter[str]()

    def _begin(self, about: str) -> None:
        with self._lock:
            mine = self._running[about] if about else 0
            if self._running.total() >= self._most or mine >= self._each:
                what = f"an answer about {about}" if mine >= self._each else "what does not answer"
                raise NotAnswered(f"too many requests wait for {what}: nothing was begun, try again later")
            self._running[about] += 1

    def _end(self, about: str) -> None:
        with self._lock:
            self._running[about] -= 1
            if not self._running[about]:
                del self._running[about]

    def run(self, what: Callable[[], T], limit: float, about: str = "") -> T:
        """The answer, or what it raised.

        Args:
            what: is run.
            limit: seconds for which it is waited for.
            about: which node is asked about, of which only a few are at one time; "" for none.

        Raises:
            NotAnswered: it took too long, and goes on by itself; or too many are waited for already, and it was not begun.
        """
        self._begin(about)
        found: list[T] = []
        failed: list[BaseException] = []
        over = threading.Event()

        def work() -> None:
            try:
                found.append(what())
            except BaseException as error:  # noqa: BLE001 - it is raised again by whoever waits
                failed.append(error)
            finally:
                self._end(about)
                over.set()

        threading.Thread(target=work, daemon=True, name="bitwitness-act").start()
        if not over.wait(limit):
            raise NotAnswered(f"no answer within {limit:g} s")
        if failed:
            raise failed[0]
        return found[0]


def writable(path: Path, whose: str) -> Check:
    """Whether the user of this console may write a file; it is not tried."""
    what = f"right to write {path}"
    if os.access(path.parent, os.W_OK | os.X_OK) and (not path.exists() or os.access(path, os.W_OK)):
        return Check(what, "good", f"the user of this console may write {whose}")
    remedy = "run the console as a user who may, or do it on the command line as one"
    return Check(what, "bad", f"uid {os.geteuid()} may not write there", remedy)


def sentence(text: str) -> str:
    """What a command says, as a sentence of a page; its first letter stays, because it may be that of a name, and `N1` is another node."""
    return text + ("" if text.endswith((".", "?", "!")) else ".")


def refused(title: str, text: str, back: str, status: int = 409) -> Done:
    """That nothing was done, and why."""
    return Done(status, title, sentence(text), "no", back)


def as_record(value: Offer | Done, **more: Any) -> dict[str, Any]:
    """For programs."""
    from bitwitness.web.rendering import plain  # noqa: PLC0415 - which needs the templates' environment

    record: dict[str, Any] = plain(value)
    return record | more
