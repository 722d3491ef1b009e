"""What a search has been told, on disk: a search that is killed goes on where it was and repeats no test that had ended.

The first line says what was asked for; each further one is a test that ended. The planner is the same for the same answers,
so nothing of it is kept: it is told all of them again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.files import Reported, sync_folder
from bitwitness.runfiles.journal import append_line, read_journal

Key = tuple[int, int, int]
"""Which test: number of the plan, of the group in it, of the repeat of the group."""


def default_path(arguments: Mapping[str, Any]) -> Path:
    """Where the state of a search with these arguments is: in the working directory, another one for other arguments."""
    text = json.dumps(arguments, sort_keys=True)
    return Path(f"find-bad-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl")


class State:
    """The file of one search."""

    def __init__(self, path: Path, arguments: Mapping[str, Any]) -> None:
        """Open it, and read what has been told if it is there.

        Raises:
            ConfigurationError: it is of a search with other arguments.
            RunFilesError: it cannot be read or written, or is no such file.
        """
        self.path = path
        self.logs = path.with_name(path.name.removesuffix(".jsonl") + "-logs")
        self.told: dict[Key, tuple[str, str]] = {}
        self._lock = self._locked()
        try:
            self._read(arguments)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another search use it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _locked(self) -> int:
        with Reported(self.path, "opened"):
            descriptor = os.open(
                self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ConfigurationError(f"{self.path} is in use: the same search runs already") from None
        return descriptor

    def _read(self, arguments: Mapping[str, Any]) -> None:
        path = self.path
        records = list(read_journal(path))
        if not records:
            if path.exists() and path.stat().st_size and not path.read_bytes().startswith(b'{"schema"'):
                raise RunFilesError(f"{path} is no state of a search: give another --state")
            append_line(path, {"kind": "search", "arguments": dict(arguments)})
            return
        if records[0].get("kind") != "search":
            raise RunFilesError(f"{path} is no state of a search: give another --state")
        if records[0].get("arguments") != dict(arguments):
            before = records[0].get("arguments")
            before = before if isinstance(before, dict) else {}
            other = sorted(key for key in {*before, *arguments} if before.get(key) != arguments.get(key))
            raise ConfigurationError(
                f"{path} is of a search with other arguments ({', '.join(other)}): give them again, or another --state"
            )
        for record in records[1:]:
            key = record.get("test")
            if record.get("kind") == "test" and isinstance(key, list) and len(key) == 3:
                self.told[key[0], key[1], key[2]] = str(record.get("outcome")), str(record.get("why", ""))

    def tell(self, key: Key, outcome: str, why: str, nodes: int) -> None:
        """A test has ended.

        Raises:
            RunFilesError: that cannot be written.
        """
        append_line(self.path, {"kind": "test", "test": list(key), "outcome": outcome, "why": why, "nodes": nodes})
        self.told[key] = outcome, why

    def finish(self, result: Mapping[str, Any]) -> Path:
        """Keep it, with the result, under a name of its own: the same search asked for again begins anew."""
        append_line(self.path, {"kind": "result", "result": dict(result)})
        stem, number = self.path.name.removesuffix(".jsonl"), 1
        while (kept := self.path.with_name(f"{stem}.{number}.jsonl")).exists():
            number += 1
        self.path.rename(kept)
        self.path.with_name(f".{self.path.name}.lock").unlink(missing_ok=True)
        if self.logs.exists():
            self.logs.rename(self.logs.with_name(f"{stem}.{number}-logs"))
        sync_folder(self.path.parent)
        return kept
