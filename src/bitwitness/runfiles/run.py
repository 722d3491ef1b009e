"""The directory of a run: `run.json`, the journals, the incidents, and where checkpoints and the quarantine are.

An incident is a folder that is staged under a name with a dot, filled by several ranks, and renamed when it is whole.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from bitwitness.errors import RunFilesError
from bitwitness.evidence import Observation, Verdict
from bitwitness.runfiles.checkpoints import Checkpoints
from bitwitness.runfiles.files import TEMPORARY, Reported, read_json, sync_file, sync_folder, write_json
from bitwitness.runfiles.journal import Journal, append_line, read_journal
from bitwitness.runfiles.quarantine import QuarantineFile
from bitwitness.topology import Topology

logger = logging.getLogger(__name__)

_STAGING = ".staging-"
_ACTIONS = "actions.jsonl"
_QUARANTINE = "quarantine.json"
_INCIDENT_NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")


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
            with Reported(folder, "made"):
                folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}"
            with Reported(folder, "written to (choose another run directory, or mend its permissions)"):
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

    def size(self) -> int:
        """Bytes of all journals, as far as they can be looked at."""
        total = 0
        for path in (self.path / "journal").glob("rank-*.jsonl"):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def incidents(self) -> list[Path]:
        """The incidents, oldest first. Staged ones, whose writer died, do not count."""
        folder = self.path / "incidents"
        with Reported(folder, "read"):
            found = (
                [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
                if folder.exists()
                else []
            )
        foreign = [path.name for path in found if not _INCIDENT_NAME.fullmatch(path.name)]
        strange = [name for name in foreign if not name.startswith(_STAGING)]
        if strange:
            logger.warning("%s: not incidents, and skipped: %r", folder, strange[:5])
        return sorted(path for path in found if path.name not in foreign)

    def stage_incident(self, incident_id: str) -> Path:
        """Make the folder in which an incident's evidence is gathered until `commit_incident` publishes it."""
        staging = self.path / "incidents" / (_STAGING + incident_id)
        with Reported(staging, "made"):
            staging.mkdir(parents=True, exist_ok=True)
        return staging

    def commit_incident(self, incident_id: str, record: Mapping[str, Any]) -> Path:
        """Write incident.json into the staged folder and publish it under its final name, durably."""
        staging, final = self.stage_incident(incident_id), self.path / "incidents" / incident_id
        write_json(staging / "incident.json", record)
        with Reported(final, "published"):
            for evidence in staging.rglob("*"):
                if evidence.is_file():
                    sync_file(evidence)
            sync_folder(staging)
            staging.rename(final)
            sync_folder(final.parent)
        return final

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.path / "checkpoints")

    @property
    def quarantine(self) -> QuarantineFile:
        """The devices and nodes that must not join."""
        return QuarantineFile(self.path / _QUARANTINE)

    def note_action(self, incident_id: str, action: str, **fields: Any) -> None:
        """Note what was done about an incident, one line of `actions.jsonl` beside it, on the disk when this returns.

        Raises:
            RunFilesError: there is no such incident, or the line cannot be written; names it.
        """
        assert not {"schema", "time", "action"} & fields.keys(), "a record must not hide what kind of record it is"
        folder = self.path / "incidents" / incident_id
        if not _INCIDENT_NAME.fullmatch(incident_id) or not folder.is_dir() or folder.is_symlink():
            raise RunFilesError(f"{folder} is no incident: nothing can be noted about it")
        append_line(folder / _ACTIONS, {"action": action, **fields})

    def actions(self, incident_id: str) -> list[dict[str, Any]]:
        """What was done about an incident, in order; each has `time`, `action` and what else was noted."""
        return read_actions(self.path / "incidents" / incident_id)

    def discard_staged(self) -> None:
        """Remove what writers that died have left half-done; call before the first step, when nobody is writing."""
        for path in (self.path / "incidents").glob(_STAGING + "*"):
            shutil.rmtree(path, ignore_errors=True)
        for folder in (self.path, self.path / "journal", self.path / "incidents"):
            for path in folder.glob(f".*{TEMPORARY}"):
                if not path.name.startswith(
                    f".{_QUARANTINE}."
                ):  # it is written while guards are made, and tidies up itself
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


def read_actions(incident: Path) -> list[dict[str, Any]]:
    """What was done about the incident in this folder, in order; lines that are damaged are skipped."""
    return [record for record in read_journal(incident / _ACTIONS) if isinstance(record.get("action"), str)]
