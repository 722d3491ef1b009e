"""Reading a run that somebody else is writing, may have been killed at, or has made up.

The console reads directories of many people beside their jobs, so nothing here follows a link, waits at a pipe, trusts a size
or takes the whole of a large file into memory. A folder is held open while it is read: what is read is of one directory, also
where another is renamed into its place meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import SCHEMA

RUN, LOG, SESSION = "run.json", "supervise/log.jsonl", "supervise/session.json"
QUARANTINE, JOURNALS, INCIDENTS, CHECKPOINTS, FAULTS = (
    "quarantine.json",
    "journal",
    "incidents",
    "checkpoints",
    "faults",
)
INCIDENT, ACTIONS, LABEL = "incident.json", "actions.jsonl", "label.json"
INCIDENT_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}", re.ASCII)
CHECKPOINT_NAME = re.compile(r"step-(\d{8,15})", re.ASCII)
_JOURNAL_NAME = re.compile(r"rank-(\d{5,7})\.jsonl", re.ASCII)

BLOCK = 1 << 20
LONGEST = 8 << 20
"""Bytes of a line that is still read; the longest that we write are a few KiB."""
_SCANNED = 256 << 20
_HEAD, _ANCHOR = 4096, 64


def rank_of(name: str) -> int | None:
    """The rank whose journal has this name; None where it is no name of one."""
    match = _JOURNAL_NAME.fullmatch(name)
    return int(match[1]) if match and name == f"rank-{int(match[1]):05d}.jsonl" else None


def stop_name(session: str) -> str | None:
    """Where a supervised session says how it has ended; None where this is no id of one."""
    return f"supervise/{session}/stop.json" if re.fullmatch(r"[\w-]{1,100}", session, re.ASCII) else None


class Folder:
    """A directory that is held open; names in it are relative, with forward slashes.

    Raises:
        OSError: it is not there, or is no directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def open(self, name: str) -> int:
        """Open a regular file for reading; its descriptor.

        Raises:
            OSError: it is not there, is reached through a link, or is something else.
        """
        above, _, last = name.rpartition("/")
        folder = self._walk(above)
        try:
            descriptor = os.open(
                last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder
            )
        finally:
            self._leave(folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{name} is no regular file")
        return descriptor

    def look(self, name: str) -> str:
        """What tells whether a file has changed, without reading it; "" where there is none.

        Raises:
            OSError: it is there, and cannot be looked at.
        """
        above, _, last = name.rpartition("/")
        try:
            folder = self._walk(above)
        except FileNotFoundError:
            return ""
        try:
            seen = os.stat(last, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return ""
        finally:
            self._leave(folder)
        return f"{seen.st_ino}:{seen.st_size}:{seen.st_mtime_ns}"

    def names(self, name: str) -> list[str]:
        """What is in a folder, without hidden names; nothing where there is none.

        Raises:
            OSError: it cannot be read, is a link, or no folder.
        """
        try:
            folder = self._walk(name)
        except FileNotFoundError:
            return []
        try:
            return sorted(one for one in os.listdir(folder) if not one.startswith("."))  # noqa: PTH208  (of a descriptor)
        finally:
            self._leave(folder)

    def sizes(self, name: str, most: int) -> dict[str, int]:
        """The regular files of a folder and their sizes; the first so many."""
        found: dict[str, int] = {}
        for one in self.names(name)[:most]:
            try:
                descriptor = self.open(f"{name}/{one}")
            except OSError:
                continue
            found[one] = os.fstat(descriptor).st_size
            os.close(descriptor)
        return found

    def read(self, name: str, most: int) -> bytes:
        """All of a file.

        Raises:
            OSError: it is not there, or cannot be read.
            RunFilesError: it is larger than that.
        """
        descriptor = self.open(name)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise RunFilesError(f"{name} is larger than {most >> 20} MiB: it was not written by bitwitness")
        return content

    def _walk(self, name: str) -> int:
        folder = self._descriptor
        for part in filter(None, name.split("/")):
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            finally:
                self._leave(folder)
            folder = inner
        return folder

    def _leave(self, folder: int) -> None:
        if folder != self._descriptor:
            os.close(folder)


def to_object(content: bytes, name: str) -> dict[str, Any]:
    """A JSON object of our schema.

    Raises:
        RunFilesError: it is damaged, or of another schema; says what.
    """
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        what = str(error)[:100] if isinstance(error, ValueError) else "it is nested too deeply"
        raise RunFilesError(f"{name} is not JSON ({what}): it was not written by bitwitness, or was damaged") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or isinstance(record.get("schema"), bool):
        found = record.get("schema") if isinstance(record, dict) else None
        raise RunFilesError(f"{name} has schema {str(found)[:40]}, this version reads {SCHEMA}")
    return record


# Files that grow line by line -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lines:
    """The next lines of a file.

    Attributes:
        lines: byte at which each begins, and what is in it; without its end.
        offset: up to where these are read: always the beginning of a line.
        scanned: how far a line that is too long was looked through for its end; 0 if there is none.
        skipped: lines that were too long.
        more: whether there may be more right now.
    """

    lines: tuple[tuple[int, bytes], ...]
    offset: int
    scanned: int = 0
    skipped: int = 0
    more: bool = False


def next_lines(descriptor: int, offset: int, scanned: int = 0) -> Lines:
    """The next whole lines after an offset, some MiB at most; a line that is not ended is not there yet.

    A line with a NUL in it ends what is read: no writer of ours writes one, but a network file system shows what has not
    arrived yet as zeros. The caller may skip it when it stays so (`Lines.offset` is where it begins).
    """
    size = BLOCK
    content = _read(descriptor, offset, size)
    while b"\n" not in content and len(content) == size and size < LONGEST:
        size = min(LONGEST, size * 2)
        content = _read(descriptor, offset, size)
    end = content.rfind(b"\n") + 1
    if not end:
        return _past_long_line(descriptor, offset, scanned) if len(content) >= LONGEST else Lines((), offset)
    found: list[tuple[int, bytes]] = []
    at = 0
    for line in content[:end].split(b"\n")[:-1]:
        if b"\0" in line:
            return Lines(tuple(found), offset + at)
        found.append((offset + at, line))
        at += len(line) + 1
    return Lines(tuple(found), offset + end, more=len(content) == size)


def after_line(descriptor: int, offset: int) -> int:
    """Where the line that begins here ends; the same place where it does not."""
    end = _read(descriptor, offset, LONGEST).find(b"\n") + 1
    return offset + end


def _past_long_line(descriptor: int, offset: int, scanned: int) -> Lines:
    """Look for the end of a line that is too long to be read, from where that ended the last time."""
    at = max(offset + LONGEST, scanned)
    for _ in range(_SCANNED // BLOCK):
        content = _read(descriptor, at, BLOCK)
        end = content.find(b"\n") + 1
        if end:
            return Lines((), at + end, skipped=1, more=True)
        at += len(content)
        if len(content) < BLOCK:
            return Lines((), offset, scanned=at)
    return Lines((), offset, scanned=at, more=True)


def identity(descriptor: int, offset: int) -> str:
    """What a file must still hold for its offset to mean the same: its beginning, and what lies before the offset.

    By content and not by inode: a run that is restored from a copy goes on where it was.
    """
    if not offset:
        return ""
    head = _digest(_read(descriptor, 0, min(_HEAD, offset)))
    before = max(0, offset - _ANCHOR)
    return f"{head}:{_digest(_read(descriptor, before, offset - before))}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _read(descriptor: int, at: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
        size -= len(part)
    return b"".join(parts)
