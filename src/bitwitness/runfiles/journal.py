"""Journals: one rank's account of what it saw and verified, appended to line by line.

A line is one system call, so a process that dies leaves at most one torn line at the end, which readers skip and the next
writer cuts off.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import SCHEMA, Reported, dump, open_plain, sync_folder, utc_now

logger = logging.getLogger(__name__)


class Journal:
    """One rank's observations and ledger, one JSON object a line, each with `"schema": 1` and the time.

    A line is handed to the operating system before `append` returns, so it survives the death of the process; only a
    loss of power can take the last lines with it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        with Reported(path, "opened for appending"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                _cut_torn_line(self._file)
            except OSError:
                os.close(self._file)
                raise

    def append(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append one record of a kind, e.g. `observation`, `ledger`, `verdict`, `start`.

        A line that cannot be written in full, e.g. on a full disk, is taken back: what follows is not glued to it.

        Raises:
            RunFilesError: the line cannot be written; names the file and the cause.
        """
        assert not {"schema", "time", "kind"} & record.keys(), "a record must not hide what kind of record it is"
        entry = {"schema": SCHEMA, "time": utc_now(), "kind": kind, "rank": self.rank, **record}
        line = dump(entry).encode() + b"\n"
        written = 0
        with Reported(self.path, "written"):
            try:
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except OSError:
                if written:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise

    def close(self) -> None:
        """Flush to the disk and close; a second call does nothing."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to a file that is rarely written, by whoever has something to say, and flush it to the disk.

    What a writer that died left of a line stays, for readers to skip: another writer may be in the middle of it.

    Raises:
        RunFilesError: the line cannot be written; names the file and the cause.
    """
    line = dump({"schema": SCHEMA, "time": utc_now(), **record}).encode() + b"\n"
    with Reported(path, "written"):
        descriptor = open_plain(path, append=True)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(path.parent)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, in order; a torn or damaged line is skipped, and counted in a warning at the end."""
    skipped = 0
    try:
        with path.open("rb") as file:
            for line in file:
                record = parse_line(line) if line.endswith(b"\n") else None
                if record is None:
                    skipped += 1
                else:
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFilesError(f"journal {path} cannot be read: {error.strerror or error}") from error
    if skipped:
        logger.warning("%s: skipped %d torn or damaged line(s)", path, skipped)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line; None where it is damaged, or of another schema."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def _cut_torn_line(descriptor: int) -> None:
    """Cut off what a writer that died left after the last whole line, so that the file never holds a torn middle."""
    size = os.fstat(descriptor).st_size
    block, end = 65_536, size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
