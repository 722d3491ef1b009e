"""Which reader a file is for, by what is in it: names of files tell nothing once they were copied off a node.

What no reader takes is read as a log. What cannot be read at all is told as *no evidence*; only a file that does not exist
is an error, because then it was the caller who was wrong.
"""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.signals import kernel
from bitwitness.fleet.signals.opening import Opened, regular
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import Clock

STDIN = Path("-")
FILES_MAX = 10_000
"""Of one directory."""
_DOCUMENTS = ("diagnostic", "amd", "ascend", "metrics", "rasdaemon")
"""Readers of whole documents, imported when there is one to read."""
_SQLITE = b"SQLite format 3\0"
_CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


def read(
    path: Path,
    *,
    now: datetime | None = None,
    zone: tzinfo = UTC,
    boot: datetime | None = None,
    host: str = "",
) -> Iterator[Signal]:
    """The signals of a file, whatever it is. Damage yields what can be read, and *no evidence* for the rest.

    Args:
        path: the file; `-` is standard input.
        now: times without a year lie before it; default: when the file was last written.
        zone: of times that do not say theirs.
        boot: when the machine started, for times that count from then.
        host: the node, where the file does not say.

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
    try:
        sound = opened.sound()
        for signal in _signals(opened, clock, latest, origin):
            told = signal if sound else _doubted(signal)
            yield told if told.host or not host else replace(told, host=host)
    finally:
        opened.close()


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
) -> Iterator[Signal]:
    """The signals of several files and of all files in directories, each file once by whatever names it is given.

    Raises:
        ConfigurationError: one of the paths does not exist; before anything is read.
    """
    given = list(paths)
    missing = [str(path) for path in given if path != STDIN and not _exists(path)]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)}: no such file or directory")
    seen: set[tuple[int, int]] = set()
    for path in given:
        files, more = _files(path)
        for file in files:
            known = _inode(file)
            if known is None or known not in seen:
                if known is not None:
                    seen.add(known)
                yield from read(file, now=now, zone=zone, boot=boot, host=host)
        if more:
            why = f"it has more than {FILES_MAX:,} files; the others were not read"
            yield no_evidence("kernel", "kernel:too-many", why, origin=str(path), host=host)


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


def _files(path: Path) -> tuple[Sequence[Path], bool]:
    """The file, or those in the directory, and whether there are more of them than are read."""
    if path == STDIN or not path.is_dir():
        return (path,), False
    found = list[Path]()
    for folder, _, names in _walk(path):
        for name in names:
            file = folder / name
            if _readable(file):
                if len(found) == FILES_MAX:
                    return sorted(found), True
                found.append(file)
    return sorted(found), False


def _walk(path: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield Path(folder), folders, sorted(names)


def _readable(path: Path) -> bool:
    """Whether a file of a directory is one to read: a pipe would wait for a writer."""
    try:
        return regular(path)
    except (OSError, ValueError):
        return False


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC) if path != STDIN and regular(path) else None
    except (OSError, ValueError, OverflowError):
        return None


def _signals(opened: Opened, clock: Clock, latest: datetime, origin: str) -> Iterator[Signal]:
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
        yield from _of_log(opened, clock, latest, origin)
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


def _of_log(opened: Opened, clock: Clock, latest: datetime, origin: str) -> Iterator[Signal]:
    binary = opened.binary
    lines = opened.lines()
    foreign = False
    for signal in kernel.read(lines, clock, origin=origin, latest=latest, export=kernel.is_export(opened.head)):
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
