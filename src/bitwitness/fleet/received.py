"""What the inbox lets in: an incident from another machine, checked before a byte of it is kept, and stored once.

The sender holds the token, and may still be a job that computes wrongly, or somebody who found the token. What is in here
ends in commands, file names, messages and pages, so each name is checked where it comes in. What is stored is whole or absent
after a kill at any instant, and what was stored is never overwritten.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.fleet.checked import check_incident
from bitwitness.fleet.clusters.base import one_line, valid_node
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.files import SCHEMA, Reported, read_json, sync_folder

logger = logging.getLogger(__name__)

LARGEST = 8 << 20
"""Bytes of one incident, as compact JSON; on 10,000 ranks it is a few MiB."""

_DEEPEST = 40
_MOST = 500_000
"""Values in one incident: indented on disk, each takes a line, and what a body of commas becomes would fill it."""
_HOUR = timedelta(hours=1)
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):
    """What was sent is not taken: the status of the answer, and a sentence that the sender can act on."""

    def __init__(self, status: int, why: str, retry_after: int | None = None) -> None:
        self.status, self.why, self.retry_after = status, why, retry_after
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the inbox takes.

    Attributes:
        per_hour: incidents stored in any hour; a job that reports more is in a loop.
        incidents: incidents in the folder.
        bytes: in the folder; the last incident may go over it.
    """

    per_hour: int = 1000
    incidents: int = 20_000
    bytes: int = 8 << 30


def valid_run(name: str) -> str:
    """The name of a run, if it can be one: it becomes the name of a folder.

    Raises:
        Refused: it cannot.
    """
    if not _RUN.fullmatch(name):
        raise Refused(
            400,
            f"{name!r:.120} is no name of a run (letters, digits, '_', '.', '-'; at most 100; not beginning with '.')",
        )
    return name


def parse(body: bytes, now: datetime) -> dict[str, Any]:
    """An incident from its JSON, every part of it checked that anybody acts upon.

    Raises:
        Refused: 400 and the reason.
    """
    try:
        record = json.loads(body.decode(), parse_constant=_no_number, parse_float=_finite)
        _shallow(record)
        json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair is no text: no database takes it
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not the JSON of an incident: {one_line(str(error))}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or isinstance(record["schema"], bool):
        raise Refused(
            400, f"the body is no JSON object of schema {SCHEMA}: send an incident.json as this version writes it"
        )
    try:
        check_incident(record, now)
        for name in {*(place["node"] for place in record["placement"]), *record["verdict"]["nodes"]}:
            valid_node(name)
    except ConfigurationError as error:
        raise Refused(400, one_line(str(error), 400)) from error
    return record


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is no number that can be kept")
    return number


def _shallow(record: Any) -> None:
    """Refuse what is nested deeper than any incident is: whoever walks through it later may do so by recursion."""
    level, count = [record], 0
    for _ in range(_DEEPEST):
        level = [item for value in level for item in _items(value)]
        count += len(level)
        if not level:
            return
        if count > _MOST:
            raise ValueError(f"it has more than {_MOST} values")
    raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


class Store:
    """The folder of the inbox, `FOLDER/<run>/incidents/<id>/incident.json`, written by one process.

    Raises:
        RunFilesError: the folder cannot be made, read or written to.
    """

    def __init__(
        self, folder: Path, limits: Limits | None = None, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.folder, self.limits, self._clock = folder.absolute(), limits or Limits(), clock
        self._lock = threading.Lock()
        self._times: deque[datetime] = deque()
        self._count = self._bytes = 0
        with Reported(self.folder, "made"):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for run in self._runs():
            RunFiles(run).discard_staged()
        self._scan()

    def add(self, run: str, body: bytes) -> tuple[Literal["stored", "known"], str]:
        """Check an incident and store it, on the disk when this returns; whether it was new, and its id.

        One at a time: what is parsed takes many times its size in memory.

        Raises:
            Refused: it is none, another one of its id is there, there is too much, or the disk refuses.
        """
        valid_run(run)
        with self._lock:
            record = parse(body, self._clock())
            incident = str(record["id"])
            home = self._home(run)
            if self._known(home / "incidents" / incident, record):
                return "known", incident
            self._room(len(body))
            size = self._write(home, incident, record)
            self._times.append(self._clock())
            self._count, self._bytes = self._count + 1, self._bytes + size
        logger.info("incident %s of run %s came in and is stored", incident, run)
        return "stored", incident

    def _home(self, run: str) -> Path:
        """The folder of a run: inside the inbox, and reached through no link."""
        home = self.folder / run
        for path in (home, home / "incidents"):
            if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
                logger.error("%s is no folder, or a link: nothing is stored there", path)
                raise Refused(409, f"run {run} cannot be stored: what is there under its name is no folder")
        return home

    def _known(self, path: Path, record: Mapping[str, Any]) -> bool:
        if not os.path.lexists(path):
            return False
        try:
            plain = stat.S_ISDIR(os.lstat(path).st_mode) and stat.S_ISREG(os.lstat(path / "incident.json").st_mode)
            if plain and _canonical(read_json(path / "incident.json")) == _canonical(record):
                return True
        except (OSError, RunFilesError) as error:
            logger.warning("%s: %s", path, error)
        raise Refused(409, f"incident {path.name} is there already with other content; it is not overwritten")

    def _room(self, size: int) -> None:
        now = self._clock()
        while self._times and self._times[0] <= now - _HOUR:
            self._times.popleft()
        if len(self._times) >= self.limits.per_hour:
            wait = max(1, min(3600, math.ceil((self._times[0] + _HOUR - now).total_seconds())))
            raise Refused(
                429, f"{self.limits.per_hour} incidents within an hour are all that is stored; try later", wait
            )
        if self._is_full(size) and now - self._scanned >= timedelta(minutes=1):
            self._scan()  # somebody may have tidied up
        if self._is_full(size):
            logger.error("%s is full (%d incidents): move old runs away", self.folder, self._count)
            raise Refused(
                507, "the inbox is full: somebody must move old runs out of its folder; send it again then", 600
            )

    def _is_full(self, size: int) -> bool:
        return self._count >= self.limits.incidents or self._bytes + size > self.limits.bytes

    def _write(self, home: Path, incident: str, record: Mapping[str, Any]) -> int:
        """Store it durably; the bytes that it takes."""
        files = RunFiles(home)
        try:
            new = not home.exists()
            files.create()
            if new:
                sync_folder(home)
                sync_folder(self.folder)
            shutil.rmtree(home / "incidents" / f".staging-{incident}", ignore_errors=True)  # of one who was killed
            return (files.commit_incident(incident, record) / "incident.json").stat().st_size
        except (OSError, RunFilesError) as error:
            shutil.rmtree(home / "incidents" / f".staging-{incident}", ignore_errors=True)
            logger.error("incident %s could not be stored: %s", incident, error)  # noqa: TRY400 - the message has all
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in _FULL:
                raise Refused(
                    507, "the disk of the inbox is full; nothing was stored, send it again later", 60
                ) from error
            raise Refused(503, "the inbox cannot write now; nothing was stored, send it again later", 60) from error

    def _runs(self) -> Iterator[Path]:
        with Reported(self.folder, "read"), os.scandir(self.folder) as entries:
            yield from (
                Path(one.path) for one in entries if one.is_dir(follow_symlinks=False) and _RUN.fullmatch(one.name)
            )

    def _scan(self) -> None:
        """Count what is there; what came in the last hour counts for this hour, also after a restart."""
        self._scanned = self._clock()
        self._count = self._bytes = 0
        times: list[datetime] = []
        for run in self._runs():
            for path in (run / "incidents").glob("*/incident.json"):
                try:
                    found = path.lstat()
                except OSError:
                    continue
                self._count, self._bytes = self._count + 1, self._bytes + found.st_size
                times.append(datetime.fromtimestamp(found.st_mtime, UTC))
        self._times = deque(sorted(time for time in times if self._scanned - _HOUR < time <= self._scanned))


def _canonical(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True)
