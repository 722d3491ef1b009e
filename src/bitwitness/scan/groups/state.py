"""What a search has been told, on disk: a search that is killed goes on where it was and repeats no test that had ended.

The first line says what was asked for, and of which planner; each further one is a test that ended. The planner is the same for
the same answers, so nothing of it is kept: it is told all of them again. An answer of other nodes would accuse whom nobody tested,
so each line says of which nodes it is and has a checksum, and the search stops where one does not fit. Only what is behind
the last whole line is cut off: a writer that was killed leaves that, and its test is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.files import SCHEMA, Reported, dump, open_plain, sync_folder, utc_now, write_bytes
from bitwitness.runfiles.journal import append_line, parse_line
from bitwitness.scan.groups.planning import PLANNER_VERSION

logger = logging.getLogger(__name__)

Key = tuple[int, int, int]
"""Which test: number of the plan, of the group in it, of the repeat of the group."""

OUTCOMES = ("passed", "failed", "not judged")

_LONGEST = 64 << 20
"""Bytes of a line that is read: the first holds 10,000 names."""


def default_path(arguments: Mapping[str, Any]) -> Path:
    """Where the state of a search with these arguments is: in the working directory, another one for other arguments."""
    text = json.dumps(arguments, sort_keys=True)
    return Path(f"find-bad-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl")


def digest(text: str) -> str:
    """Enough of a SHA-256 to tell one line, or the nodes of one group, from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checked(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with its checksum."""
    return {**record, "check": digest(dump(record))}


class State:
    """The file of one search."""

    def __init__(self, path: Path, arguments: Mapping[str, Any]) -> None:
        """Open it, and read what has been told if it is there.

        Raises:
            ConfigurationError: it is of a search with other arguments.
            RunFilesError: it cannot be read or written, is no such file, is damaged, or of another planner.
        """
        self.path = path
        self.logs = path.with_name(path.name.removesuffix(".jsonl") + "-logs")
        self.told: dict[Key, tuple[str, str, str, int]] = {}
        self._number = 0
        self._plain()
        self._lock = self._locked()
        try:
            self._read(dict(arguments))
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

    # -- reading -----------------------------------------------------------------------------------------------------

    def _plain(self) -> None:
        """Refuse what is there and no plain file, before it is opened: a device could be read for ever."""
        with Reported(self.path, "opened"):
            if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
                raise RunFilesError(f"{self.path} is no plain file: give another --state")

    def _lock_path(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    def _locked(self) -> int:
        while True:
            with Reported(self.path, "opened"):
                descriptor = os.open(self._lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise ConfigurationError(f"{self.path} is in use: the same search runs already") from None
            if self._lock_path().exists() and os.path.samestat(os.fstat(descriptor), self._lock_path().stat()):
                return descriptor
            os.close(descriptor)  # a search that ended has just removed it

    def _read(self, arguments: Mapping[str, Any]) -> None:
        self._plain()
        if not self.path.exists() or not self.path.stat().st_size:
            header = checked({"kind": "search", "planner": PLANNER_VERSION, "arguments": arguments})
            write_bytes(self.path, (dump({"schema": SCHEMA, "time": utc_now(), **header}) + "\n").encode())
            return
        with Reported(self.path, "read"):
            descriptor = open_plain(self.path)
        with Reported(self.path, "read"), os.fdopen(descriptor, "r+b") as file:
            self._header(parse_line(file.readline(_LONGEST)), arguments)
            number, start = 1, file.tell()
            while line := file.readline(_LONGEST):
                number += 1
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    logger.warning("%s: the last line is torn: its test is made again", self.path)
                    file.truncate(start)
                    os.fsync(file.fileno())
                    break
                if not self._take(parse_line(line), number):
                    raise RunFilesError(
                        f"{self.path}, line {number} is damaged, so nothing after it can be trusted: put an undamaged copy back,"
                        f" keep only the {number - 1} lines before it, or give another --state to begin anew"
                    )
                start = file.tell()

    def _header(self, record: dict[str, Any] | None, arguments: Mapping[str, Any]) -> None:
        if record is None or record.get("kind") != "search" or not isinstance(record.get("arguments"), dict):
            raise RunFilesError(
                f"{self.path} is no state of a search, or its first line is damaged: give another --state"
            )
        if record.get("planner") != PLANNER_VERSION:
            raise RunFilesError(
                f"{self.path} is of planner {record.get('planner', 'unknown')}, this version has {PLANNER_VERSION}, which asks for"
                " other groups: finish it with the version that began it, or give another --state to begin anew"
            )
        if not _sound(record):
            raise RunFilesError(f"{self.path}: its first line is damaged: give another --state to begin anew")
        before = record["arguments"]
        if before != arguments:
            other = sorted(key for key in {*before, *arguments} if before.get(key) != arguments.get(key))
            raise ConfigurationError(
                f"{self.path} is of a search with other arguments ({', '.join(other)}): give them again, or another --state"
            )

    def _take(self, record: dict[str, Any] | None, number: int) -> bool:
        """Take a line in; whether it is one of ours and whole."""
        if record is None or not _sound(record):
            return False
        if record.get("kind") == "result":
            self._number = int(record["number"])
            return True
        key = record.get("test")
        if record.get("kind") != "test" or not isinstance(key, list) or [type(part) for part in key] != [int] * 3:
            return False
        place = (key[0], key[1], key[2])
        if record.get("outcome") not in OUTCOMES or place in self.told:
            return False
        self.told[place] = record["outcome"], str(record.get("why", "")), str(record.get("group")), number
        return True

    # -- what was told -------------------------------------------------------------------------------------------------

    def answer(self, key: Key, nodes: Sequence[str]) -> tuple[str, str] | None:
        """How the test of these nodes ended, if it has been told; each answer is given once.

        Raises:
            RunFilesError: what was told is of other nodes, or there are later answers and not this one.
        """
        known = self.told.pop(key, None)
        if known is not None:
            outcome, why, group, number = known
            if group != digest("\n".join(nodes)):
                self._misfit(number, "is of a test of other nodes than those that the search tests here")
            return outcome, why
        for (plan, place, _), (_, _, _, number) in self.told.items():
            if plan != key[0] or place == key[1]:
                self._misfit(number, "answers a test that the search has not come to: lines before it are missing")
        return None

    def used_up(self) -> None:
        """The search is over.

        Raises:
            RunFilesError: there are answers for which it did not ask.
        """
        if self.told:
            self._misfit(min(number for *_, number in self.told.values()), "is of a test that the search does not make")

    def _misfit(self, number: int, why: str) -> None:
        raise RunFilesError(
            f"{self.path}, line {number} {why}: the file was changed, or written by another version or on a machine that calculates"
            " otherwise. Finish it where it was begun, or give another --state to begin anew"
        )

    def tell(self, key: Key, outcome: str, why: str, nodes: Sequence[str]) -> None:
        """A test of these nodes has ended.

        Raises:
            RunFilesError: that cannot be written.
        """
        group = digest("\n".join(nodes))
        record = {
            "kind": "test",
            "test": list(key),
            "outcome": outcome,
            "why": why,
            "nodes": len(nodes),
            "group": group,
        }
        append_line(self.path, checked(record))

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, result: Mapping[str, Any]) -> Path:
        """Keep the result, and the name under which `put_away` will put the file; one that was chosen before stays, if it is free."""
        if not self._number or self._kept().exists() or (self.logs.exists() and self._kept_logs().exists()):
            self._number = 1
            while os.path.lexists(self._kept()) or os.path.lexists(self._kept_logs()):
                self._number += 1
        append_line(self.path, checked({"kind": "result", "number": self._number, "result": dict(result)}))
        return self._kept()

    def put_away(self) -> None:
        """Give it its name, so that the same search asked for again begins anew. Killed before the end, it is done next time.

        Raises:
            RunFilesError: it cannot be renamed; it stays as it is, and the same search answers from it.
        """
        with Reported(self.path, "put away"):
            if self.logs.exists():
                self.logs.rename(self._kept_logs())
            self.path.rename(self._kept())
            self._lock_path().unlink(missing_ok=True)
            sync_folder(self.path.parent)

    def _stem(self) -> str:
        return f"{self.path.name.removesuffix('.jsonl')}.{self._number}"

    def _kept(self) -> Path:
        return self.path.with_name(f"{self._stem()}.jsonl")

    def _kept_logs(self) -> Path:
        return self.path.with_name(f"{self._stem()}-logs")


def _sound(record: Mapping[str, Any]) -> bool:
    """Whether a record is as it was written."""
    said = {key: value for key, value in record.items() if key not in ("schema", "time", "check")}
    return record.get("check") == digest(dump(said))
