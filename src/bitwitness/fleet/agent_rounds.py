"""The work of a node's agent, round after round: look, tell, remember; and keep the signals. Nothing ends it but a signal.

What fails is said once, is tried again after growing pauses, and loses nothing: what is to be told stands on the Node, and what was
told in the memory. The two kinds of work do not wait for each other: a log that hangs must not keep NVSentinel from being told.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.agent import Memory, Seen, Step, remembered, step
from bitwitness.fleet.agent_memory import MemoryFile, Noted
from bitwitness.fleet.agent_signals import signals_file, write_signals
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.clusters.nvsentinel_events import HealthEvent, Strategy, Suspicion, fault, recovery

logger = logging.getLogger(__name__)

_LONGEST = 60.0
"""Seconds: the longest pause after failures, where the usual one is not longer."""
_FIRST = 1.0
_NOTED = timedelta(seconds=30)
"""How old the note of the last look may get before it is renewed without need."""
_ANY = (BitwitnessError, OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""What a round may end with and be tried again: a mistake of ours must not end an agent either."""


class Reader(Protocol):
    """Who says what the Node shows."""

    def look(self) -> Seen:
        """The node now."""
        ...


class Listener(Protocol):
    """Who is told."""

    def tell(self, *events: HealthEvent) -> None:
        """Say these events, all or none."""
        ...

    def check(self) -> None:
        """Whether there is anybody who could be told."""
        ...


class Reporter:
    """Tells NVSentinel of this node.

    Args:
        node: its name.
        reader: of the Node.
        listener: NVSentinel.
        memory: what was told.
        allowed: the most that may be asked of NVSentinel.
        action: what is recommended with a fault.
        clock: the time.
    """

    def __init__(
        self,
        node: str,
        reader: Reader,
        listener: Listener,
        memory: MemoryFile,
        *,
        allowed: Strategy = "STORE_ONLY",
        action: str = "CONTACT_SUPPORT",
        clock: Clock | None = None,
    ) -> None:
        self._node, self._reader, self._listener, self._file = node, reader, listener, memory
        self._allowed, self._action, self._clock = allowed, action, clock or Clock()
        self._noted = memory.load()
        self._written = self._noted
        if self._noted.memory.lost:
            logger.info("%s: nothing is remembered of what NVSentinel was told before", node)

    def round(self) -> str:
        """Look once, and tell what is to be told; what is wrong with the node, "" where nothing.

        Raises:
            BitwitnessError: it could not be seen, told, or remembered.
        """
        now = self._clock.now()
        seen = self._reader.look()
        memory = self._noted.memory
        next_step = step(seen, memory, self._allowed, now)
        if next_step.tell:
            event = self._event(seen, memory, next_step, now)
            self._listener.tell(event)
            what = "stored" if event.strategy == "STORE_ONLY" else "acted upon"
            logger.info("%s: NVSentinel was told, to be %s: %s", self._node, what, event.message)
        else:
            self._listener.check()  # to find out in the night that nobody listens would be late
        troubles = (next_step.trouble,) if next_step.trouble else ()
        self._noted = Noted(remembered(seen, memory, next_step, now), now, troubles)
        self._save()
        return next_step.trouble

    def _event(self, seen: Seen, memory: Memory, what: Step, now: datetime) -> HealthEvent:
        if what.tell == "fault":
            assert isinstance(seen.suspicion, Suspicion)
            return fault(self._node, seen.suspicion, what.strategy, self._action, now)
        incident = memory.said.incident if memory.said is not None else seen.quarantine.incident
        return recovery(self._node, incident, what.strategy, now)

    def _save(self) -> None:
        """Only what has changed, or is old: a look every few seconds need not be a write each."""
        old, new = self._written, self._noted
        same = replace(old, looked=None) == replace(new, looked=None)
        if same and old.looked and new.looked and timedelta(0) <= new.looked - old.looked < _NOTED:
            return
        self._file.save(new)
        self._written = new


@dataclass
class Work:
    """One kind of work that is done again and again.

    Attributes:
        name: for people.
        do: does it once; what is wrong all the same, or "".
        every: seconds between two times.
        phase: spreads the nodes of a cluster over the time between two looks.
    """

    name: str
    do: Callable[[], str]
    every: float
    phase: str = ""
    _trouble: str = field(default="", init=False)
    _failures: int = field(default=0, init=False)
    _times: int = field(default=0, init=False)

    def once(self) -> bool:
        """Do it; whether it went well. What is wrong is said when it begins, and when it is over."""
        try:
            trouble = self.do()
            self._failures = 0
        except _ANY as error:
            known = isinstance(error, BitwitnessError | OSError)
            trouble = one_line(str(error) if known else repr(error), 1000)
            self._failures += 1
        self._times += 1
        if trouble and trouble != self._trouble:
            logger.warning("%s: %s", self.name, trouble)
        elif self._trouble and not trouble:
            logger.warning("%s: this is over: %s", self.name, self._trouble)
        self._trouble = trouble
        return not trouble

    def pause(self) -> float:
        """Seconds until the next time: as usual, and sooner at first and then later where it failed; spread by a fifth."""
        wait = self.every
        if self._failures:
            first, longest = min(_FIRST, self.every), max(_LONGEST, self.every)
            wait = min(first * 2.0 ** min(self._failures - 1, 20), longest)
        return wait * (0.8 + 0.4 * zlib.crc32(f"{self.phase} {self._times}".encode()) / 2**32)

    def run(self, stop: threading.Event) -> None:
        """Again and again, until told to stop."""
        while not stop.is_set():
            self.once()
            stop.wait(self.pause())


def signals_work(folder: Path, node: str, sources: Sequence[Path], every: float) -> Work:
    """Keep this node's signals in a folder."""

    def do() -> str:
        write_signals(folder, node, sources)
        return ""

    return Work(f"signals of {node} in {signals_file(folder, node)}", do, every, node)


def report_work(reporter: Reporter, node: str, every: float) -> Work:
    """Tell NVSentinel of this node."""
    return Work(f"NVSentinel of {node}", reporter.round, every, node)


def run(works: Sequence[Work], stop: threading.Event) -> None:
    """All of them at once, the first one in this thread, until told to stop. Others are left where they are then: each file is whole."""
    for work in works[1:]:
        threading.Thread(target=work.run, args=(stop,), name=work.name, daemon=True).start()
    works[0].run(stop)
