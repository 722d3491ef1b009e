"""The quarantine of a run: which devices and nodes must not join, why, and everything that was ever changed about it.

It must outlive restarts and changes of rank, so it is a file; and since the wrappers of several nodes write it, each change
is made under a lock, on what the file holds at that moment. A quarantine that cannot be read is never an empty one: a
device that was shown to compute wrongly would join again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.files import TEMPORARY, Reported, exists, open_plain, read_json, utc_now, write_json

_PATIENCE = 60.0
"""Seconds that an edit waits for another one, which takes milliseconds."""

_MEND = (
    "until then nobody can say who is in quarantine: mend it by hand, or move it away and deny again whom you know of "
    "(bitwitness quarantine add)"
)

_ODD = re.compile(r"[^A-Za-z0-9._+$\\-]")
"""What no name of a user or a host has."""

_THREADS = threading.Lock()  # a POSIX lock is one of a process: threads need one of their own

_Record = TypeVar("_Record", "Strike", "Denial")


@dataclass(frozen=True, slots=True)
class Strike:
    """One incident in which a device was named.

    Attributes:
        time: when it was noted, UTC in ISO 8601.
        incident: id of the incident.
        node: where the device was then.
        persistence: whether it was wrong again when it repeated its work (`Verdict.persistence`).
    """

    time: str
    incident: str
    node: str
    persistence: str


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a device or a node must not join.

    Attributes:
        since: UTC in ISO 8601.
        reason: a sentence.
        incident: id of the incident, or empty.
        node: where a device was then; of a node, its name.
    """

    since: str
    reason: str
    incident: str
    node: str


@dataclass(slots=True)
class Quarantine:
    """The content of the file. `log` has one object a change: time, what, name, who, reason."""

    strikes: dict[str, list[Strike]] = field(default_factory=dict)
    denied_devices: dict[str, Denial] = field(default_factory=dict)
    denied_nodes: dict[str, Denial] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def why_denied(self, node: str, devices: Sequence[str]) -> str:
        """Why a node with these devices must not join, in a sentence; empty if it may."""
        found = []
        if node in self.denied_nodes:
            found.append(f"node {node} is in quarantine {_since(self.denied_nodes[node])}")
        for device in dict.fromkeys(devices):
            if device in self.denied_devices:
                denial = self.denied_devices[device]
                moved = f" (then on node {denial.node})" if denial.node and denial.node != node else ""
                found.append(f"device {device}{moved} is in quarantine {_since(denial)}")
        return "; ".join(found)

    def strikes_within(self, device: str, seconds: float, now: datetime | str | None = None) -> int:
        """How many incidents named a device in the last `seconds`; what a clock that is ahead has noted counts too."""
        moment = datetime.fromisoformat(now) if isinstance(now, str) else now or datetime.now(UTC)
        earliest = moment - timedelta(seconds=seconds)
        return sum(datetime.fromisoformat(strike.time) >= earliest for strike in self.strikes.get(device, ()))

    def names(self) -> list[str]:
        """Everything that can be cleared: denied nodes and devices, and devices with strikes."""
        return sorted({*self.denied_nodes, *self.denied_devices, *self.strikes})

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Quarantine:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: a part is missing or of another type.
        """
        strikes = {name: [_record(Strike, one) for one in _list(each)] for name, each in record["strikes"].items()}
        for each in strikes.values():
            for strike in each:
                if datetime.fromisoformat(strike.time).tzinfo is None:
                    raise ValueError(f"the time of a strike has no zone: {strike.time}")
        return cls(
            strikes=strikes,
            denied_devices={name: _record(Denial, one) for name, one in record["denied_devices"].items()},
            denied_nodes={name: _record(Denial, one) for name, one in record["denied_nodes"].items()},
            log=[dict(one) for one in _list(record["log"])],
        )


def _since(denial: Denial) -> str:
    incident = f" (incident {denial.incident})" if denial.incident else ""
    return f"since {denial.since}: {denial.reason}{incident}"


def _record(kind: type[_Record], record: Mapping[str, Any]) -> _Record:
    values = {one.name: record[one.name] for one in fields(kind)}
    for name, value in values.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is no text: {value!r:.80}")
    return kind(**values)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"no list: {value!r:.80}")
    return value


def who_asks() -> str:
    """`user@host` of this process, for the log; `uid-1000@host` of a user who has no name.

    The user is the one that the system knows: the environment says whatever its owner likes. Nothing of it can look like a name that
    the console keeps (`carol (console)`), which always has a space and no host.
    """
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"
    return f"{_plain(user)}@{_plain(socket.gethostname())}"


def _plain(name: str) -> str:
    return _ODD.sub("_", name)[:100] or "_"


class QuarantineFile:
    """`RUN_DIR/quarantine.json`, read and changed by any number of processes on any number of nodes.

    Raises:
        RunFilesError: by every method, where the file is damaged, cannot be locked or cannot be written; it is unchanged then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._lock = self.path.with_name(f".{self.path.name}.lock")

    def read(self) -> Quarantine:
        """What the file holds; an empty quarantine where there is no file."""
        if not exists(self.path):
            return Quarantine()
        try:
            return Quarantine.from_json(read_json(self.path))
        except RunFilesError as error:
            raise RunFilesError(f"{error}; {_MEND}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFilesError(f"{self.path} is damaged ({error!r}); {_MEND}") from error

    @contextmanager
    def edit(self) -> Iterator[Quarantine]:
        """Change the quarantine: what is done to it inside the `with` is written at its end, unless that raises.

        Others wait meanwhile, and see all of it or nothing. Whoever edits by hand writes the log by hand.
        """
        with _THREADS, self._locked():
            quarantine = self.read()
            before = quarantine.to_json()
            for leftover in self.path.parent.glob(f".{self.path.name}.*{TEMPORARY}"):
                leftover.unlink(missing_ok=True)  # of a writer that died: whoever holds the lock is the only one
            yield quarantine
            if quarantine.to_json() != before:
                write_json(self.path, quarantine.to_json())

    def strike(self, device: str, *, incident: str, node: str, persistence: str, who: str = "") -> Quarantine:
        """Note that an incident named a device, once however often it is called; the quarantine as it is then."""
        with self.edit() as quarantine:
            strikes = quarantine.strikes.setdefault(device, [])
            if all(strike.incident != incident for strike in strikes):
                strikes.append(Strike(utc_now(), incident, node, persistence))
                _note(quarantine, "strike", device, who, persistence, incident=incident, node=node)
        return quarantine

    def deny_devices(
        self, devices: Iterable[str], *, node: str, reason: str, incident: str = "", who: str = ""
    ) -> Quarantine:
        """Let these devices of a node join no more, wherever they are; one that is denied already keeps its first reason."""
        with self.edit() as quarantine:
            for device in devices:
                if device not in quarantine.denied_devices:
                    quarantine.denied_devices[device] = Denial(utc_now(), reason, incident, node)
                    _note(quarantine, "deny device", device, who, reason, incident=incident, node=node)
        return quarantine

    def deny_node(self, node: str, *, reason: str, incident: str = "", who: str = "") -> Quarantine:
        """Let a node join no more; one that is denied already keeps its first reason."""
        with self.edit() as quarantine:
            if node not in quarantine.denied_nodes:
                quarantine.denied_nodes[node] = Denial(utc_now(), reason, incident, node)
                _note(quarantine, "deny node", node, who, reason, incident=incident, node=node)
        return quarantine

    def clear(self, names: Collection[str] | None, *, who: str = "", reason: str) -> list[dict[str, Any]]:
        """Take devices and nodes out of quarantine, strikes included; None: all of them. The entries of the log.

        A node's devices are not cleared with it: one that computes wrongly does so in any node.

        Raises:
            RunFilesError: one of the names is not there; nothing is cleared then, and the message says what is.
            ConfigurationError: there is no reason.
        """
        if not reason.strip():
            raise ConfigurationError("clearing a quarantine needs a reason: what was repaired or found out?")
        with self.edit() as quarantine:
            present = quarantine.names()
            absent = [name for name in names or () if name not in present]
            if absent:
                there = f"there are: {', '.join(present)}" if present else "nobody is"
                raise RunFilesError(f"{', '.join(absent)}: not in the quarantine {self.path}; {there}")
            old = len(quarantine.log)
            for name in present if names is None else dict.fromkeys(names):
                _clear(quarantine, name, who, reason)
            return quarantine.log[old:]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with Reported(self._lock, "opened for locking"):
            descriptor = open_plain(self._lock)
        try:
            _acquire(descriptor, self._lock)
            yield
        finally:
            os.close(descriptor)  # releases the lock


def _acquire(descriptor: int, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait for a lock on a file, for a limited time: who holds it may be frozen on another node."""
    deadline = clock() + _PATIENCE
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise RunFilesError(
                    f"{path} could not be locked: {error.strerror or error}. The run directory must be on a file system that locks "
                    "files across nodes (docs/files.md, What shared storage must guarantee)"
                ) from error
            if clock() > deadline:
                raise RunFilesError(
                    f"{path} has been locked by another process for {_PATIENCE:.0f} s: look for a bitwitness that hangs, and end it"
                ) from error
        time.sleep(0.01)


def _clear(quarantine: Quarantine, name: str, who: str, reason: str) -> None:
    node, device = quarantine.denied_nodes.pop(name, None), quarantine.denied_devices.pop(name, None)
    strikes = quarantine.strikes.pop(name, [])
    what = {
        **({"node": asdict(node)} if node is not None else {}),
        **({"device": asdict(device)} if device is not None else {}),
        **({"strikes": [asdict(strike) for strike in strikes]} if strikes else {}),
    }
    _note(quarantine, "clear", name, who, reason, cleared=what)


def _note(quarantine: Quarantine, what: str, name: str, who: str, reason: str, **more: Any) -> None:
    entry = {"time": utc_now(), "what": what, "name": name, "who": who or who_asks(), "reason": reason, **more}
    quarantine.log.append(entry)
