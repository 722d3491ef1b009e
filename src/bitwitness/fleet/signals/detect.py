"""Which reader a file is for, by what is in it: names of files tell nothing once they were copied off a node.

What no reader takes is read as a log. What cannot be read at all is told as *no evidence*; only a file that does not exist
is an error, because then it was the caller who was wrong.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.signals import edac, kernel
from bitwitness.fleet.signals.merging import same_host
from bitwitness.fleet.signals.opening import Opened, regular
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import Clock, iso

STDIN = Path("-")
FILES_MAX = 10_000
"""Of one directory."""
_DOCUMENTS = ("diagnostic", "rvs", "scan", "amd", "ascend", "metrics", "rasdaemon")
"""Readers of whole documents, imported when there is one to read."""
_CONTROLLER = re.compile(r"mc\d{1,6}")
_SILENT_MAX = 100
_SQLITE = b"SQLite format 3\0"
_HELD = 2_000
"""Signals of lines without a host that wait for what the rest of the file names."""
_CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def read(
    path: Path,
    *,
    now: datetime | None = None,
    zone: tzinfo = UTC,
    boot: datetime | None = None,
    host: str = "",
    window: tuple[datetime, datetime] | None = None,
) -> Iterator[Signal]:
    """The signals of a file, whatever it is. Damage yields what can be read, and *no evidence* for the rest.

    Args:
        path: the file; `-` is standard input.
        now: times without a year lie before it; default: when the file was last written.
        zone: of times that do not say theirs.
        boot: when the machine started, for times that count from then.
        host: the node that is asked about. A file that names no node is taken to be of it; one that names only others says so.
        window: the time that is asked about: a log that ends before it or begins after it says so.

    Raises:
        ConfigurationError: there is no such file.
    """
    origin = str(path)
    try:
        opened = Opened(None if path == STDIN else path)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {error}"
        yield no_evidence("kernel", "kernel:unreadable", why, origin=origin, host=host)
        return
    latest = now or datetime.now(UTC)
    clock = Clock(now or _written(path) or latest, zone, boot)
    seen = kernel.Seen()
    try:
        sound = opened.sound()
        found = _signals(opened, clock, latest, origin, seen)
        yield from _of_host((one if sound else _doubted(one) for one in found), seen, host, origin)
        yield from _beside(seen, host, window, origin)
    finally:
        opened.close()


def _of_host(found: Iterable[Signal], seen: kernel.Seen, host: str, origin: str) -> Iterator[Signal]:
    """The signals, of a node that is asked about also those that name no host, unless the file is of other nodes as well."""
    held = list[Signal]()
    lost = 0
    for signal in found:
        seen.add(signal.host, None)
        if signal.host or not host:
            yield signal
        elif signal.kind == "no-evidence":
            yield replace(signal, host=host)
        elif len(held) < _HELD:
            held.append(signal)
        elif _only(seen, host):
            yield replace(signal, host=host)
        else:
            lost += 1
    if _only(seen, host):
        yield from (replace(signal, host=host) for signal in held)
    elif lost or held:
        why = (
            f"{lost + len(held)} signal(s) in it name no node, and it is not of this one alone: it names {_some(seen)}"
        )
        yield no_evidence("kernel", "kernel:nameless", why, origin=origin, host=host)


def _only(seen: kernel.Seen, host: str) -> bool:
    return all(same_host(one, host) for one in seen.hosts)


def _some(seen: kernel.Seen) -> str:
    names = sorted(seen.hosts)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _beside(seen: kernel.Seen, host: str, window: tuple[datetime, datetime] | None, origin: str) -> Iterator[Signal]:
    """That a file is not about the node or the time that is asked about: its silence must not be taken for theirs."""
    if host and seen.hosts and not any(same_host(one, host) for one in seen.hosts):
        why = f"nothing in it was found to be of {host}: it names {_some(seen)}"
        yield no_evidence("kernel", "kernel:other-node", why, origin=origin, host=host)
    if window is None or seen.first is None or seen.last is None:
        return
    why = ""
    if seen.last < window[0]:
        why = f"it ends at {iso(seen.last)}, before the time that is asked about begins ({iso(window[0])})"
    elif seen.first > window[1]:
        why = f"it begins at {iso(seen.first)}, after the time that is asked about ends ({iso(window[1])})"
    if why:
        yield no_evidence("kernel", "kernel:other-time", f"{why}: it tells nothing of it", origin=origin, host=host)


def _doubted(signal: Signal) -> Signal:
    """A signal out of a file that is not what was written: any digit in it may be wrong, so that it must weigh nothing."""
    if signal.kind == "no-evidence":
        return signal
    why = f"read from a damaged file, where it may be wrong, so that it weighs nothing. Else: {signal.weight}, {signal.reason}"
    return replace(signal, weight="none", reason=why)


def read_all(
    paths: Iterable[Path],
    *,
    now: datetime | None = None,
    zone: tzinfo = UTC,
    boot: datetime | None = None,
    host: str = "",
    window: tuple[datetime, datetime] | None = None,
) -> Iterator[Signal]:
    """The signals of several files and of all files in directories, each file once by whatever names it is given.

    The arguments are those of `read`.

    Raises:
        ConfigurationError: one of the paths does not exist; before anything is read.
    """
    given = list(paths)
    missing = [str(path) for path in given if path != STDIN and not _exists(path)]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)}: no such file or directory")
    seen: set[tuple[int, int]] = set()

    def is_new(path: Path) -> bool:
        known = _inode(path)
        if known is None or known not in seen:
            seen.update(() if known is None else (known,))
            return True
        return False

    for path in given:
        found = _Found()
        found.look(path)
        for tree in filter(is_new, found.trees):
            yield from edac.read_sysfs(tree, host=host)
        for file in filter(is_new, sorted(found.files)):
            yield from read(file, now=now, zone=zone, boot=boot, host=host, window=window)
        for silent in found.silent:
            yield replace(silent, host=host)


@dataclass(slots=True)
class _Found:
    """What is in a directory: files, trees of EDAC counters, and what cannot be read."""

    files: list[Path] = field(default_factory=list)
    trees: list[Path] = field(default_factory=list)
    silent: list[Signal] = field(default_factory=list)

    def look(self, path: Path) -> None:
        """Take in a file, or all that is in a directory."""
        if path == STDIN or not _is_folder(path):
            self.files.append(path)
            return
        for folder, folders, names in os.walk(path, onerror=self._unreadable):
            folders.sort()
            controllers = [name for name in folders if _CONTROLLER.fullmatch(name)]
            if any((Path(folder) / name / "ue_count").exists() for name in controllers):
                self.trees.append(Path(folder))
                folders[:] = [name for name in folders if name not in controllers and name != "power"]
            for name in sorted(names):
                if len(self.files) == FILES_MAX:
                    why = f"it has more than {FILES_MAX:,} files; the others were not read"
                    self._say("kernel:too-many", why, str(path))
                    return
                self._file(Path(folder) / name)
        if not (self.files or self.trees or self.silent):
            self._say("kernel:empty", "it is a directory without files", str(path))

    def _file(self, file: Path) -> None:
        try:
            if regular(file):
                self.files.append(file)
            else:  # a pipe would wait for a writer
                self._say(
                    "kernel:skipped", "it is a pipe, a socket or a device, which is not read in a directory", str(file)
                )
        except (OSError, ValueError) as error:
            self._say("kernel:unreadable", f"it cannot be read: {error}", str(file))

    def _unreadable(self, error: OSError) -> None:
        why = f"it cannot be listed, so that nothing in it was read: {error.strerror or error}"
        self._say("kernel:unreadable", why, str(error.filename or ""))

    def _say(self, code: str, why: str, origin: str) -> None:
        if len(self.silent) == _SILENT_MAX:
            why, origin = "there is more that could not be read than is listed", ""
        if len(self.silent) <= _SILENT_MAX:
            self.silent.append(no_evidence("kernel", code, why, origin=origin))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:  # not ours to read: there is something
        return True
    return True


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC) if path != STDIN and regular(path) else None
    except (OSError, ValueError, OverflowError):
        return None


def _signals(opened: Opened, clock: Clock, latest: datetime, origin: str, seen: kernel.Seen) -> Iterator[Signal]:
    head = opened.head
    if opened.format:
        yield no_evidence("kernel", "kernel:unreadable", f"it is {opened.format}", origin=origin)
        return
    if not head.strip():
        yield from _empty(opened, origin)
        return
    if head.startswith(_SQLITE) and (opened.packed or opened.path is None or not regular(opened.path)):
        why = "a database cannot be read through a pipe or packed: unpack it into a file"
        yield no_evidence("rasdaemon", "rasdaemon:unreadable", why, origin=origin)
        return
    name = _document(head, Path(opened.name).name, clock)
    if name == "ours":
        yield from _ours(opened.whole(), origin)
    elif name:
        yield from _of_document(name, opened, latest, origin)
    else:
        yield from _of_log(opened, clock, latest, origin, seen)
    for problem in opened.problems:
        yield no_evidence("kernel", "kernel:damaged", problem, origin=origin)


def _empty(opened: Opened, origin: str) -> Iterator[Signal]:
    """A file that begins with nothing: is there anything behind it?"""
    rest = next((line for line in opened.lines() if line.strip()), None)
    if rest is not None:
        why = f"it begins with more than {len(opened.head)} blanks, which is no log"
        yield no_evidence("kernel", "kernel:unreadable", why, origin=origin)
    for problem in opened.problems:
        yield no_evidence("kernel", "kernel:damaged", problem, origin=origin)
    if rest is None and not opened.problems:
        yield no_evidence("kernel", "kernel:empty", "it is empty", origin=origin)


def _document(head: bytes, name: str, clock: Clock) -> str:
    """The reader of a document, `ours`, or "" for a log."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"[") and all(key in head for key in (b'"source"', b'"code"', b'"class"', b'"weight"')):
        return "ours"
    if kernel.is_export(start):
        return ""
    if start.startswith(b"{") and any(key in head for key in (b'"__REALTIME_TIMESTAMP"', b'"MESSAGE"', b'"stream"')):
        return ""
    log = not start.startswith(b"{") and kernel.is_log(head.splitlines()[:5], clock)
    for one in _DOCUMENTS[:1] if log else _DOCUMENTS:  # a diagnostic may stand behind what a program logged
        reader = _reader(one)
        if reader is not None and reader.looks_like(head, name):
            return one
    if log:
        return ""
    return "ours" if start.startswith(b"[") and start.removeprefix(b"[").lstrip()[:1] in (b"]", b"") else ""


def _reader(name: str) -> Any:
    try:
        return importlib.import_module(f"bitwitness.fleet.signals.{name}")
    except ModuleNotFoundError:
        return None


def _of_document(name: str, opened: Opened, latest: datetime, origin: str) -> Iterator[Signal]:
    try:
        if name == "rasdaemon" and opened.path is not None and opened.head.startswith(_SQLITE):
            source: Path | str = opened.path
        else:
            source = opened.whole().decode("utf-8", "replace")
        yield from _reader(name).read(source, origin=origin, now=latest)
    except _CONTENT_ERRORS as error:  # readers promise not to; a promise is no proof
        yield no_evidence(name, f"{name}:unreadable", f"it cannot be read: {error!r:.200}", origin=origin)


def _of_log(opened: Opened, clock: Clock, latest: datetime, origin: str, seen: kernel.Seen) -> Iterator[Signal]:
    binary = opened.binary
    lines = opened.lines()
    foreign = False
    export = kernel.is_export(opened.head)
    for signal in kernel.read(lines, clock, origin=origin, latest=latest, export=export, seen=seen):
        if signal.code == "kernel:foreign":
            foreign = True
        else:
            yield signal
    if binary or (foreign and opened.problems):
        why = "it is no text, or damaged: what is in it was read only where it has lines of text"
        yield no_evidence("kernel", "kernel:unreadable", why, origin=origin)
    elif foreign:
        why = "it is none of the formats that are known, and none of its first lines begins like a line of a log"
        yield no_evidence("kernel", "kernel:foreign", why, origin=origin)


def _ours(data: bytes, origin: str) -> Iterator[Signal]:
    """What `bitwitness fleet signals --json` printed."""
    damaged, first = 0, ""
    try:
        records = json.load(io.StringIO(data.decode("utf-8", "replace").removeprefix("\ufeff")))
        if not isinstance(records, list):
            raise TypeError("no list")
        whole = True
    except (ValueError, TypeError, RecursionError):
        records = _records(data.decode("utf-8", "replace"))
        whole = False
    for record in records:
        try:
            made = Signal.from_json(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            damaged, first = damaged + 1, first or words(repr(error), 120)
            continue
        yield replace(made, origin=made.origin or origin, via=origin)
    if damaged or not whole:
        why = "the list is damaged or cut off" if not whole else f"{damaged} record(s) of the list are none ({first})"
        yield no_evidence("kernel", "signals:damaged", why, origin=origin)


def _records(text: str) -> list[Any]:
    """The objects in a damaged list, as far as they are whole."""
    decoder, at, found, failed = json.JSONDecoder(), 0, list[Any](), 0
    while failed < 100 and (at := text.find("{", at)) >= 0:
        try:
            record, at = decoder.raw_decode(text, at)
            found.append(record)
        except (ValueError, RecursionError):
            at, failed = at + 1, failed + 1
    return found
