"""How the supervised training of the demo recovered, as its files say: who trained when, what was kept, what was done.

Everything is read from the run directory that guard and supervisor share; the only thing that only the demo knows is when the
fault struck.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.examples.plan import Event, Settings
from bitwitness.runfiles import (
    Incident,
    RunFiles,
    checkpoint_step,
    distrust,
    read_incident,
    read_journal,
    read_label,
    verify_files,
)
from bitwitness.runfiles.supervision import SupervisionFiles

_TOLD = ("outcome", "quarantine", "remark", "restart", "refused", "started", "lost", "stuck", "ended")
"""Kinds of the supervisor's events that belong to the story, but for outcomes that are told by others."""

_TOLD_BY_OTHERS = ("corruption", "finished")


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: when, in seconds since 1970, and in one line what."""

    time: float
    what: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as it lies on the disk when all is over.

    Attributes:
        name, step: of the checkpoint.
        time: when it was saved.
        passed: check -> last step at which it had passed, as the label says.
        read_back: by whom, as the label says.
        refused: why nobody should go on from it, in words; empty if nothing speaks against it.
    """

    name: str
    step: int
    time: float = 0.0
    passed: Mapping[str, int] | None = None
    read_back: str = ""
    refused: str = ""

    @property
    def verified(self) -> bool:
        """Whether its files are whole, no check had failed, and no incident speaks against it."""
        return not self.refused

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "step": self.step,
            "verified": self.verified,
            "passed": dict(self.passed or {}),
            "read_back": self.read_back,
            "refused": self.refused,
        }


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the files of a supervised training say.

    Attributes:
        exit_code: of `bitwitness run`. `reason`: as the supervisor put it.
        generations: the nodes of each start of the job, in the order of ranks.
        resumed_from: the step at which the last start went on from a checkpoint; None if it began at the beginning.
        devices, nodes: what is in quarantine, and why.
        struck: devices with strikes, and how many.
        timeline: what happened, from the newest checkpoint before the fault to the end; without a fault, from the start.
        since: when the fault struck, or the job started.
        checkpoints: all that there are, oldest first.
        actions: what was done about the incidents, in order.
    """

    exit_code: int | None
    reason: str
    generations: tuple[tuple[str, ...], ...]
    resumed_from: int | None
    devices: Mapping[str, str]
    nodes: Mapping[str, str]
    struck: Mapping[str, int]
    timeline: tuple[Moment, ...]
    since: float
    checkpoints: tuple[Saved, ...]
    actions: tuple[Mapping[str, Any], ...]


def utc(time: float) -> str:
    """A time as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_recovery(settings: Settings, run_dir: Path, exit_code: int | None, landed: Event | None) -> Recovery:
    """Read it all.

    Args:
        settings: of the demo.
        run_dir: of the demo.
        exit_code: of `bitwitness run`.
        landed: the first strike of the fault, if there was one.

    Raises:
        RunFilesError: an incident or the quarantine is damaged.
    """
    files = RunFiles(run_dir / "guarded")
    incidents = [read_incident(path) for path in files.incidents()]
    journal = list(files.read_journal(0))
    quarantine = files.quarantine.read()
    checkpoints = tuple(sorted(_checkpoints(files, incidents), key=lambda saved: saved.step))
    generations, reason = _supervision(files.path)
    resumes = [int(one["step"]) for one in journal if one["kind"] == "resume"]
    timeline = sorted(_moments(settings, files, journal, checkpoints, landed), key=lambda moment: moment.time)
    return Recovery(
        exit_code=exit_code,
        reason=reason,
        generations=generations,
        resumed_from=resumes[-1] if resumes else None,
        devices={name: denial.reason for name, denial in quarantine.denied_devices.items()},
        nodes={name: denial.reason for name, denial in quarantine.denied_nodes.items()},
        struck={name: len(strikes) for name, strikes in quarantine.strikes.items() if strikes},
        timeline=tuple(timeline),
        since=float(landed["time"]) if landed is not None else min((one.time for one in timeline), default=0.0),
        checkpoints=checkpoints,
        actions=tuple(action for incident in incidents for action in files.actions(incident.path.name)),
    )


def _supervision(run_dir: Path) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Who trained in each generation, and how the supervisor says that it ended."""
    files = SupervisionFiles(run_dir)
    session = files.read_session()
    if session is None:
        return (), ""
    stop = files.read_stop(session.id)
    told = [files.read_generation(session.id, number) for number in range(1, session.generation + 1)]
    return tuple(one.nodes for one in told if one is not None), stop.reason if stop is not None else ""


def _checkpoints(files: RunFiles, incidents: Sequence[Incident]) -> Iterator[Saved]:
    """What lies there, with what its label says; each is verified anew, file by file."""
    for path in files.checkpoints.list():
        step = checkpoint_step(path) or 0
        try:
            label = read_label(path)
        except RunFilesError as error:
            yield Saved(path.name, step, refused=str(error))
            continue
        refused = "; ".join(verify_files(path, label)) or distrust(label, incidents)
        yield Saved(path.name, step, _seconds(label.saved), label.passed, label.read_back, refused)


def _moments(
    settings: Settings,
    files: RunFiles,
    journal: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[Saved],
    landed: Event | None,
) -> Iterator[Moment]:
    since = float(landed["time"]) if landed is not None else 0.0
    for record in read_journal(files.path / "supervise" / "log.jsonl"):
        told = record["kind"] in _TOLD and not (
            record["kind"] == "outcome" and record.get("outcome") in _TOLD_BY_OTHERS
        )
        if told and _seconds(record["time"]) >= since:
            yield Moment(_seconds(record["time"]), str(record["text"]))
    for resume in journal:
        if resume["kind"] == "resume":
            newer = "".join(f"; {name} refused: {why}" for name, why in resume.get("refused", ()))
            where = Path(resume["checkpoint"]).name
            yield Moment(_seconds(resume["time"]), f"went on with step {resume['step']} from {where}{newer}")
    if landed is None:
        return
    before = [saved for saved in checkpoints if saved.time and saved.time <= since]
    if before:
        yield Moment(before[-1].time, f"{before[-1].name} saved; read back: {before[-1].read_back}")
    yield Moment(since, f"step {landed['step']}: rank {landed['rank']} ({settings.device}): {landed['where']} is wrong")
    for path in files.incidents():
        incident = read_incident(path)
        headline = incident.verdict.headline()
        yield Moment(
            _seconds(str(incident.record["time"])), f"every rank stopped; {headline}; by {incident.verdict.check}"
        )


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
