"""Messages that wait to be delivered: noted together with what they tell, so that none is lost and none tells what is not so.

Each is handed over at least once to each notifier; whoever gets it twice knows by its id. A notifier that does not take a
message delays no other, and nothing of the rest of the controller. In a storm nobody reads a hundred messages, so that after the
first of them those that can wait are counted, and told together.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.fleet.clock import Clock, moment
from bitwitness.fleet.notify import SEVERITIES, Message, Notifier
from bitwitness.fleet.state import State

logger = logging.getLogger(__name__)

_FIRST, _LONGEST = timedelta(seconds=5), timedelta(minutes=10)
_BATCH = 100
_WINDOW, _SETTLES = timedelta(minutes=10), timedelta(seconds=30)
"""Within which messages are counted, and how long more are waited for before the first are told together."""
MOST = 20
"""Messages within the window that are sent one by one."""
_MERGED = "(merged)"
"""Stands for a notifier in what is to be told together."""
_NAMED = 10


class Outbox:
    """The messages of a state.

    Args:
        state: where they are.
        names: of the notifiers to which new messages go.

    Raises:
        ConfigurationError: two have one name, so nobody could say which of them has got a message.
    """

    def __init__(self, state: State, names: Sequence[str]) -> None:
        self._state, self._names = state, tuple(names)
        twice = sorted({name for name in self._names if self._names.count(name) > 1})
        if twice:
            raise ConfigurationError(
                f"several ways to notify are called {', '.join(twice)}: give each a name of its own (name = ...)"
            )

    def put(self, message: Message) -> None:
        """Have it delivered, inside `State.change`; one that was put already is not put again. In a storm it is told with others."""
        if self._state.read("SELECT 1 FROM outbox WHERE id = ?", (message.id,)):
            return
        merged = self._names and _may_be_merged(message) and self._lately() >= MOST
        self._add(message, (_MERGED,) if merged else self._names)

    def _lately(self) -> int:
        """How many messages were sent one by one within the window."""
        now = self._state.clock.now()
        rows = self._state.read(
            "SELECT COUNT(DISTINCT id) FROM deliveries JOIN outbox ON id = message "
            "WHERE notifier != ? AND time BETWEEN ? AND ?",
            (_MERGED, self._state.stamp(now - _WINDOW), self._state.stamp(now + _WINDOW)),
        )
        return int(rows[0][0])

    def tell_merged(self, *, at_once: bool = False) -> None:
        """Have one message delivered for all that are to be told together, at most once within the window."""
        now = self._state.clock.now()
        rows = self._merged()
        if not rows or not self._names:
            return
        last = [moment(one[0]) for one in self._state.read("SELECT time FROM outbox WHERE id LIKE 'more/%'")]
        if any(timedelta(0) <= now - one < _WINDOW for one in last):
            return
        if not at_once and timedelta(0) <= now - moment(rows[-1][1]) < _SETTLES:
            return
        with self._state.change():
            rows = self._merged()
            if not rows:
                return  # another process was faster
            self._add(_together(rows, self._state), self._names)
            for name, *_ in rows:
                query = "UPDATE deliveries SET delivered = ? WHERE message = ? AND notifier = ?"
                self._state.write(query, (self._state.stamp(), name, _MERGED))

    def _merged(self) -> list[tuple[Any, ...]]:
        """What is to be told together, newest first."""
        return self._state.read(
            "SELECT id, time, severity, subject FROM deliveries JOIN outbox ON id = message "
            "WHERE notifier = ? AND delivered IS NULL ORDER BY time DESC, id",
            (_MERGED,),
        )

    def _add(self, message: Message, names: Sequence[str]) -> None:
        record = json.dumps(dict(message.record))
        row = (message.id, message.time, message.severity, message.subject, message.text, record)
        self._state.write("INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?)", row)
        for name in names:
            query = "INSERT INTO deliveries (message, notifier, due) VALUES (?, ?, ?)"
            self._state.write(query, (message.id, name, self._state.stamp()))

    def forget_strangers(self) -> None:
        """Give up, inside `State.change`, what waits for notifiers that the policy has no more, and say so."""
        waiting = self._state.read(
            "SELECT notifier, COUNT(*) FROM deliveries WHERE delivered IS NULL GROUP BY notifier"
        )
        for name, count in waiting:
            if name not in self._names and not (name == _MERGED and self._names):
                self._state.write("DELETE FROM deliveries WHERE delivered IS NULL AND notifier = ?", (name,))
                self._state.note("given up", f"{count} messages for {name}, which is not in the policy any more")

    def waiting(self) -> dict[str, Any]:
        """How many wait, how many of them were refused last, and the time of the oldest."""
        rows = self._state.read(
            "SELECT COUNT(*), COALESCE(SUM(error != ''), 0), MIN(time), MAX(error) "
            "FROM deliveries JOIN outbox ON id = message WHERE delivered IS NULL"
        )
        count, failed, oldest, error = rows[0]
        return {"waiting": int(count), "failed": int(failed), "oldest": oldest, "error": error or ""}


def _may_be_merged(message: Message) -> bool:
    """What was done, refused or come back is told by itself; that a person must look at another incident need not be."""
    asks = message.record.get("kind") == "proposal" and message.record.get("ending") == "nothing"
    return message.severity != "critical" or asks


def _together(rows: Sequence[tuple[Any, ...]], state: State) -> Message:
    """One message for many; as severe as the most severe of them."""
    now, folder = state.stamp(), shlex.quote(str(state.folder))
    severity = max((row[2] for row in rows), key=SEVERITIES.index)
    named = [f"  {row[3]}" for row in rows[:_NAMED]]
    text = (
        f"{len(rows)} more messages, the newest of them:\n"
        + "\n".join(named)
        + "\n\nWhat to do next: look for a common cause. "
        f"So many at once are rarely so many broken devices.\n\nLook:\nbitwitness fleet status --state {folder}\n"
        f"bitwitness fleet history --state {folder} --last 0"
    )
    record = {"kind": "more", "count": len(rows), "messages": [row[0] for row in rows[:_BATCH]]}
    return Message(f"more/{now}", now, severity, f"bitwitness: {len(rows)} more; see fleet status", text, record)


def deliver(state: State, notifiers: Sequence[Notifier], stop: threading.Event | None = None) -> int:
    """Hand over what is due; how many messages were taken. Without `stop` this is the last time for now, and nothing is held back."""
    taken = 0
    Outbox(state, [one.name for one in notifiers]).tell_merged(at_once=stop is None)
    for notifier in notifiers:
        rows = state.read(
            "SELECT id, time, severity, subject, text, record, attempts FROM deliveries JOIN outbox ON id = message "
            "WHERE notifier = ? AND delivered IS NULL AND (due <= ? OR due > ?) ORDER BY time, id LIMIT ?",
            (notifier.name, state.stamp(), state.stamp(state.clock.now() + 2 * _LONGEST), _BATCH),
        )
        for name, time, severity, subject, text, record, attempts in rows:
            if stop is not None and stop.is_set():
                return taken
            message = Message(name, time, severity, subject, text, json.loads(record))
            if not _hand_over(state, notifier, message, attempts):
                break  # the next one would fare no better, and time-outs add up
            taken += 1
    return taken


def _hand_over(state: State, notifier: Notifier, message: Message, attempts: int) -> bool:
    key = (message.id, notifier.name)
    try:
        notifier.send(message)
    except (BitwitnessError, OSError, ValueError) as error:
        wait = min(_LONGEST, _FIRST * 2 ** min(attempts, 10))
        due = state.stamp(state.clock.now() + wait)
        with state.change():
            query = (
                "UPDATE deliveries SET attempts = attempts + 1, due = ?, error = ? WHERE message = ? AND notifier = ?"
            )
            state.write(query, (due, f"{error}"[:500], *key))
        logger.warning("%s did not take %r: %s", notifier.name, message.subject, error)
        return False
    with state.change():
        query = "UPDATE deliveries SET delivered = ?, error = '' WHERE message = ? AND notifier = ?"
        state.write(query, (state.stamp(), *key))
    return True


class Deliverer:
    """A thread that delivers, with a connection of its own: a mail server that hangs must hold nobody up.

    Args:
        folder: of the state.
        notifiers: to whom.
        every: seconds between two looks.
        clock: the time.
    """

    def __init__(self, folder: Path, notifiers: Sequence[Notifier], every: float, clock: Clock) -> None:
        self._folder, self._notifiers, self._every, self._clock = folder, notifiers, every, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bitwitness-fleet-deliverer", daemon=True)

    def start(self) -> None:
        """Begin; nothing is started where there is nobody to tell."""
        if self._notifiers:
            self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End after the message that is being handed over; one that hangs is left, and handed over again at the next start."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with State(self._folder, clock=self._clock, create=False) as state:
                    while not self._stop.is_set():
                        deliver(state, self._notifiers, self._stop)
                        self._stop.wait(self._every)
            except RunFilesError as error:
                logger.error("messages are not delivered for now: %s", error)  # noqa: TRY400 - it says all there is
                self._stop.wait(30.0)
