"""What this machine says of itself: its kernel log, its log files, and the counters of its devices.

Nothing is started that costs anybody anything: no diagnostic, no load. A source that is absent or not ours to read is told
as *no evidence*, each with what would make it readable.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from importlib import import_module
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError, MissingExtra
from bitwitness.fleet.signals import detect, kernel
from bitwitness.fleet.signals.opening import LINE_MAX
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import Clock

_LOGS = re.compile(r"(?:messages|kern\.log|syslog)(?:[-.][\w.-]{1,40})?")
_JOURNAL_DAYS = timedelta(days=30)
_JOURNAL, _RING = "journalctl", "dmesg"
_PATIENCE = 120.0
"""Seconds that a program may take to print its log."""
_SAID = 2000
"""Bytes of its errors that are kept."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where the sources of this machine are; another one in tests.

    Attributes:
        root: what `/` is.
        journal: prints the kernel's part of the journal as JSON; the time since which is appended.
        ring: prints the ring buffer, where it cannot be read directly.
        kmsg: the device that has the ring buffer.
        devices: whether NVML, EDAC and rasdaemon are asked.
    """

    root: Path = Path("/")
    journal: tuple[str, ...] = (
        "journalctl",
        "_TRANSPORT=kernel",
        "--output=json",
        "--output-fields=MESSAGE,_HOSTNAME",
        "--no-pager",
        "--quiet",
        "--utc",
    )
    ring: tuple[str, ...] = ("dmesg",)
    kmsg: Path = Path("/dev/kmsg")
    devices: bool = True


def read(
    *,
    now: datetime | None = None,
    zone: tzinfo | None = None,
    host: str = "",
    since: datetime | None = None,
    here: Here | None = None,
) -> Iterator[Signal]:
    """The signals of this machine.

    Args:
        now: the time; default: now.
        zone: of log files that do not say theirs; default: this machine's.
        host: the name of this node, which may be another than the one by which its own logs call it.
        since: older entries of the journal are not asked for; default: 30 days back.
        here: where its sources are.
    """
    here = here or Here()
    latest = now or datetime.now(UTC)
    zone = zone or datetime.now(UTC).astimezone().tzinfo or UTC
    own = {"", socket.gethostname(), socket.gethostname().partition(".")[0]}
    for signal in _all(here, latest, zone, since or latest - _JOURNAL_DAYS):
        ours = signal.host in own or signal.origin in (_JOURNAL, _RING, str(here.kmsg))
        yield replace(signal, host=host) if host and ours else signal


def _all(here: Here, now: datetime, zone: tzinfo, since: datetime) -> Iterator[Signal]:
    yield from _kernel(here, Clock(now, zone, _boot()), since)
    yield from _files(here.root / "var" / "log", zone)
    if here.devices:
        yield from _devices(here.root, now)


def _boot() -> datetime:
    """When the clock of the ring buffer began, which stands still while the machine sleeps."""
    return datetime.fromtimestamp(time.time() - time.monotonic(), UTC)


def _kernel(here: Here, clock: Clock, since: datetime) -> Iterator[Signal]:
    """The journal, or the ring buffer where there is no journal: their times differ, and one event would be two."""
    journal = _Output([*here.journal, f"--since=@{int(since.timestamp())}"])
    yield from kernel.read(journal.lines(), clock, origin=_JOURNAL)
    if journal.count and not journal.why:
        return
    why = journal.why or "it has no entries of the kernel"
    yield no_evidence("kernel", "kernel:no-journal", f"the journal: {why}", origin=_JOURNAL)
    try:
        ring = _ring_buffer(here.kmsg)
    except OSError as error:
        dmesg = _Output(here.ring)
        yield from kernel.read(dmesg.lines(), clock, origin=_RING)
        if dmesg.why or not dmesg.count:
            why = f"{error}; dmesg: {dmesg.why or 'it is empty'}. Reading it may need root"
            yield no_evidence("kernel", "kernel:unreadable", f"the ring buffer: {why}", origin=str(here.kmsg))
        return
    lines = _Counted(ring)
    yield from kernel.read(lines, clock, origin=str(here.kmsg))
    if not lines.count:
        yield no_evidence("kernel", "kernel:empty", "the ring buffer is empty", origin=str(here.kmsg))


class _Counted:
    """Lines, and how many there were so far."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.count = 0

    def __iter__(self) -> Iterator[bytes]:
        for line in self._lines:
            self.count += 1
            yield line


class _Output:
    """What a program prints, line by line, with a limit on the length of a line and on the time it may take.

    Attributes:
        count: lines so far.
        why: why there were none, or not all; complete after the last line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.count = 0
        self.why = ""
        self._said = bytearray()

    def lines(self) -> Iterator[bytes]:
        """Its lines, those that are too long cut. Never raises for what the program does, and never waits for it for long."""
        environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment
            )
        except OSError as error:
            self.why = f"{self.command[0]} cannot be started ({error.strerror or error})"
            return
        try:
            for line in _lines(self._chunks(process)):
                self.count += 1
                yield line.rstrip(b"\r")
            if process.wait(timeout=10):
                said = words(bytes(self._said).decode("utf-8", "replace"))
                self.why = f"{self.command[0]} failed: {said or f'exit {process.returncode}'}"
        except TimeoutError:
            self.why = f"{self.command[0]} took longer than {_PATIENCE:g} seconds, and was read only so far"
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.why = f"{self.command[0]} could not be read to its end ({error})"
        finally:
            process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # it hangs inside the kernel, where no signal reaches it
                process.wait(timeout=1)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _chunks(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """What it prints; what it says of errors is taken as it comes, because a full pipe would stop it.

        Raises:
            TimeoutError: it has not ended in time, whether it prints something or is silent.
        """
        until = time.monotonic() + _PATIENCE
        with selectors.DefaultSelector() as waiting:
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                waiting.register(stream, selectors.EVENT_READ)
            while waiting.get_map():
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready or time.monotonic() > until:
                    raise TimeoutError
                for key, _ in ready:
                    chunk = os.read(key.fd, LINE_MAX)
                    if not chunk:
                        waiting.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        yield chunk
                    else:
                        self._said += chunk[: _SAID - len(self._said)]


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends, each cut at the longest that there may be."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line[:LINE_MAX] for line in whole)
        rest = rest[:LINE_MAX]
    if rest:
        yield rest


def _ring_buffer(device: Path) -> Iterator[bytes]:
    """The lines of the ring buffer, as the kernel has them (Documentation/ABI/testing/dev-kmsg).

    Raises:
        OSError: it is not there, or not ours to read.
    """
    file = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    return _records(file)


def _records(file: int) -> Iterator[bytes]:
    try:
        while True:
            try:
                record = os.read(file, LINE_MAX)
            except BlockingIOError:  # that was the last one
                return
            except BrokenPipeError:  # it was overwritten meanwhile; the next read goes on behind that
                continue
            except OSError:
                return
            if not record:
                return
            yield from record.splitlines()
    finally:
        os.close(file)


def _files(folder: Path, zone: tzinfo) -> Iterator[Signal]:
    try:
        found = sorted(path for path in folder.iterdir() if _LOGS.fullmatch(path.name) and path.is_file())
    except OSError as error:
        yield no_evidence("kernel", "kernel:no-logs", f"log files: {error}", origin=str(folder))
        return
    if not found:
        why = "there is no log file (messages, kern.log, syslog)"
        yield no_evidence("kernel", "kernel:no-logs", why, origin=str(folder))
    for path in found:
        with contextlib.suppress(ConfigurationError):  # rotated away meanwhile
            for signal in detect.read(path, zone=zone):
                if signal.code != "kernel:empty":
                    yield signal


def _devices(root: Path, now: datetime) -> Iterator[Signal]:
    def asked(name: str, ask: Callable[[Any], Iterator[Signal]]) -> Iterator[Signal]:
        try:
            module = import_module(f"bitwitness.fleet.signals.{name}")
            yield from ask(module)
        except MissingExtra as error:
            yield no_evidence(name, f"{name}:absent", f"it cannot be asked: {error}")
        except ModuleNotFoundError as error:
            yield no_evidence(name, f"{name}:absent", f"it cannot be asked: {error}")

    yield from asked("nvml", lambda module: iter(module.read()))
    yield from asked("edac", lambda module: iter(module.read_sysfs(root / "sys/devices/system/edac/mc")))
    database = root / "var/lib/rasdaemon/ras-mc_event.db"
    if database.exists():
        yield from asked("rasdaemon", lambda module: iter(module.read(database, origin=str(database), now=now)))
    else:
        why = "it has recorded nothing here, or is not installed"
        yield no_evidence("rasdaemon", "rasdaemon:absent", why, origin=str(database))
