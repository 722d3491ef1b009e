"""The files of a run: the only place that knows their names and formats (DESIGN section 4).

They are the whole contract between the guard, which knows tensors, and the fleet, which knows clusters, so they outlive
the process that wrote them. A `kill -9` at any instant leaves each file whole or absent: whole files are written under a
temporary name, flushed to the disk and renamed; journals are appended to with one system call a line, and may end in one
torn line, which readers skip and the next writer cuts off. No torch here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import RunFilesError
from bitwitness.evidence import Observation, Verdict
from bitwitness.topology import Topology

logger = logging.getLogger(__name__)

SCHEMA = 1
_STAGING = ".staging-"
_LARGEST = 256 << 20
"""Bytes of a JSON file that is read; an incident on 10,000 ranks is a few MiB."""

_TEMPORARY = ".tmp"
_DEEPEST = 50  # a record that contains itself ends here
_INCIDENT_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_incident_id() -> str:
    """`<utc>-<short id>`, e.g. `20261129T093015Z-4be1d2`: sorts by time and does not collide."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Incident:
    """A verdict that is not clean, with what it was computed from."""

    path: Path
    verdict: Verdict
    observations: tuple[Observation, ...]
    topology: Topology
    record: Mapping[str, Any]


class Journal:
    """One rank's observations and ledger, one JSON object a line, each with `"schema": 1` and the time.

    A line is handed to the operating system before `append` returns, so it survives the death of the process; only a
    loss of power can take the last lines with it.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        with _Reported(path, "opened for appending"):
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
        line = _dump(entry).encode() + b"\n"
        written = 0
        with _Reported(self.path, "written"):
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


class RunFiles:
    """The files of one run directory, which all ranks share.

    Raises:
        RunFilesError: the directory cannot be made or written to; names it and the cause.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir).absolute()

    def create(self) -> Self:
        """Make the directory and its folders; harmless where they exist."""
        for folder in (self.path, self.path / "journal", self.path / "incidents"):
            with _Reported(folder, "made"):
                folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}"
            with _Reported(folder, "written to (choose another run directory, or mend its permissions)"):
                # Permissions tell too little: root has all of them, and a quota or a read-only mount still refuses.
                try:
                    probe.write_bytes(b"?")
                finally:
                    probe.unlink(missing_ok=True)
        return self

    def write_run(self, record: Mapping[str, Any]) -> None:
        """Write run.json: policy, world, placement, software, seed of the fingerprints."""
        write_json(self.path / "run.json", record)

    def read_run(self) -> dict[str, Any]:
        """The content of run.json."""
        return read_json(self.path / "run.json")

    def journal(self, rank: int) -> Journal:
        """Open one rank's journal for appending."""
        return Journal(self.path / "journal" / f"rank-{rank:05d}.jsonl", rank)

    def read_journal(self, rank: int) -> Iterator[dict[str, Any]]:
        """The records of one rank's journal, in order; none where it does not exist."""
        return read_journal(self.path / "journal" / f"rank-{rank:05d}.jsonl")

    def incidents(self) -> list[Path]:
        """The incidents, oldest first. Staged ones, whose writer died, do not count."""
        folder = self.path / "incidents"
        with _Reported(folder, "read"):
            found = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
        foreign = [path.name for path in found if not _INCIDENT_NAME.fullmatch(path.name)]
        strange = [name for name in foreign if not name.startswith(_STAGING)]
        if strange:
            logger.warning("%s: not incidents, and skipped: %r", folder, strange[:5])
        return sorted(path for path in found if path.name not in foreign)

    def stage_incident(self, incident_id: str) -> Path:
        """Make the folder in which an incident's evidence is gathered until `commit_incident` publishes it."""
        staging = self.path / "incidents" / (_STAGING + incident_id)
        with _Reported(staging, "made"):
            staging.mkdir(parents=True, exist_ok=True)
        return staging

    def commit_incident(self, incident_id: str, record: Mapping[str, Any]) -> Path:
        """Write incident.json into the staged folder and publish it under its final name, durably."""
        staging, final = self.stage_incident(incident_id), self.path / "incidents" / incident_id
        write_json(staging / "incident.json", record)
        with _Reported(final, "published"):
            for evidence in staging.rglob("*"):
                if evidence.is_file():
                    _sync_file(evidence)
            _sync_folder(staging)
            staging.rename(final)
            _sync_folder(final.parent)
        return final

    def discard_staged(self) -> None:
        """Remove what writers that died have left half-done; call before the first step, when nobody is writing."""
        for path in (self.path / "incidents").glob(_STAGING + "*"):
            shutil.rmtree(path, ignore_errors=True)
        for folder in (self.path, self.path / "journal", self.path / "incidents"):
            for path in folder.glob(f".*{_TEMPORARY}"):
                path.unlink(missing_ok=True)


def read_incident(path: str | os.PathLike[str]) -> Incident:
    """Read an incident from its directory, or from its incident.json.

    Raises:
        RunFilesError: it is not there, damaged, or of another schema.
    """
    folder = Path(path)
    folder = folder.parent if folder.name == "incident.json" else folder
    record = read_json(folder / "incident.json")
    try:
        return Incident(
            path=folder,
            verdict=Verdict.from_json(record["verdict"]),
            observations=tuple(Observation.from_json(seen) for seen in record["observations"]),
            topology=Topology.from_json(record["placement"]),
            record=record,
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise RunFilesError(f"{folder / 'incident.json'} is damaged: {error!r}") from error


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal, in order; a torn or damaged line is skipped, and counted in a warning at the end."""
    skipped = 0
    try:
        with path.open("rb") as file:
            for line in file:
                record = _parse(line) if line.endswith(b"\n") else None
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


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of our schema.

    Raises:
        RunFilesError: absent, damaged, or of another schema; the message says which and what to do.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise RunFilesError(f"{path} is not a regular file: it was not written by bitwitness")
        if path.exists() and path.stat().st_size > _LARGEST:
            raise RunFilesError(f"{path} is larger than {_LARGEST >> 20} MiB: it was not written by bitwitness")
        record = json.loads(path.read_bytes(), parse_constant=_no_such_number)
    except FileNotFoundError as error:
        raise RunFilesError(f"{path} does not exist: is {path.parent} the right directory?") from error
    except OSError as error:
        raise RunFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        damaged = f"{path} is not JSON ({error}): it was not written by bitwitness, or was damaged"
        raise RunFilesError(damaged) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise RunFilesError(f"{path} has schema {found!r}, this version reads {SCHEMA}: use the version that wrote it")
    return record


def _no_such_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object so that a kill at any instant leaves the old file or the new one, and flush it to the disk."""
    write_bytes(path, (_dump({"schema": SCHEMA} | dict(record) | {"schema": SCHEMA}, indent=2) + "\n").encode())


def _dump(record: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON of whatever is in a record: a guard that has found something must not fail at writing it down."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(record, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(record), allow_nan=False, indent=indent, separators=separators)


def _plain(value: Any, depth: int = 0) -> Any:
    """The JSON value nearest to any value: non-finite numbers, which JSON lacks, become "nan", "inf" and "-inf"."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return str(value)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file under a temporary name beside it, flush it, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")
    with _Reported(path, "written"):
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename within a folder durable; some network file systems refuse, and then do it by themselves."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("%s: fsync of a folder refused: %s", folder, error)
    finally:
        os.close(descriptor)


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


class _Reported:
    """Turn an OSError into one that names the file and what was being done."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise RunFilesError(f"{self._path} could not be {self._what}: {reason}") from error
