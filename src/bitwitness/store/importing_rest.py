"""The smaller files of a run into the database: checkpoints' labels, the quarantine, the supervisor's word, injected faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.drills import landing, merged
from bitwitness.runfiles.faults import read_injected
from bitwitness.runfiles.label import Label, label_of
from bitwitness.runfiles.quarantine import Quarantine
from bitwitness.runfiles.reading import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    LABEL,
    QUARANTINE,
    SESSION,
    Folder,
    Lines,
    stop_name,
    to_object,
)
from bitwitness.store.database import upsert
from bitwitness.store.importing_about import to_placements, write_stays
from bitwitness.store.importing_problems import Problems
from bitwitness.store.importing_sources import Source, Taken
from bitwitness.store.importing_values import LARGEST_STEP, moment, name, plain, text, whole
from bitwitness.store.tables import checkpoints, denied, drills, marks, quarantine, runs, strikes

_LARGEST = 64 << 20

Damaged = (KeyError, TypeError, ValueError, AttributeError, AssertionError, IndexError, RecursionError)
"""What a record that is not what it should be may raise in the readers of `runfiles`."""

# Checkpoints ----------------------------------------------------------------------------------------------------------


def checkpoint_steps(folder: Folder) -> dict[int, str]:
    """Step -> name of the folder, of what is named as a checkpoint."""
    found = {}
    for one in folder.names(CHECKPOINTS):
        match = CHECKPOINT_NAME.fullmatch(one)
        if match and int(match[1]) <= LARGEST_STEP and one == f"step-{int(match[1]):08d}":
            found[int(match[1])] = one
    return found


def label_path(checkpoint: str) -> str:
    """Where the label of a checkpoint lies."""
    return f"{CHECKPOINTS}/{checkpoint}/{LABEL}"


def read_label(folder: Folder, checkpoint: str, step: int, problems: Problems) -> Label | None:
    """The label of a checkpoint; None where it cannot be read, or is gone."""
    where = label_path(checkpoint)
    path = str(folder.path / where)
    try:
        label = label_of(to_object(folder.read(where, _LARGEST), LABEL), LABEL)
        if label.step != step:
            raise RunFilesError(f"it is of step {label.step}, and its folder of step {step}")
    except FileNotFoundError:
        return None
    except (OSError, *Damaged, RunFilesError) as error:
        problems.note(path, f"this checkpoint has no label that can be read, so it counts as none: {error}")
        return None
    problems.clear(path)
    return label


def write_checkpoint(connection: sa.Connection, run: int, label: Label, stamp: str) -> None:
    """Write a checkpoint; whether to doubt it follows from the incidents, later."""
    row = {
        "run_id": run,
        "step": label.step,
        "saved": moment(label.saved),
        "passed": {name(check): whole(step, -1) for check, step in label.passed.items()},
        "failed": plain(label.failed),
        "incidents": [text(one, 100) for one in label.incidents],
        "present": True,
        "stamp": stamp,
    }
    upsert(connection, checkpoints, [row])
    write_stays(connection, run, to_placements(label.placement), moment(label.saved))


# Quarantine -----------------------------------------------------------------------------------------------------------


def read_quarantine(folder: Folder, problems: Problems) -> Quarantine | None:
    """The quarantine; None where it cannot be read: then what was known of it stays, for it is never an empty one."""
    path = str(folder.path / QUARANTINE)
    try:
        found = Quarantine.from_json(to_object(folder.read(QUARANTINE, _LARGEST), QUARANTINE))
    except FileNotFoundError:
        return None
    except (OSError, *Damaged, RunFilesError) as error:
        problems.note(
            path, f"the quarantine could not be read, so what is shown of it may be old: {text(str(error), 500)}"
        )
        return None
    problems.clear(path)
    return found


def write_quarantine(connection: sa.Connection, run: int, found: Quarantine) -> None:
    """What the quarantine holds now, and its log."""
    for table in (denied, strikes):
        connection.execute(sa.delete(table).where(table.c.run_id == run))
    rows = [
        {
            "run_id": run,
            "kind": kind,
            "name": name(one),
            "since": moment(denial.since),
            "reason": text(denial.reason),
            "incident": text(denial.incident, 100),
            "node": name(denial.node),
        }
        for kind, each in (("device", found.denied_devices), ("node", found.denied_nodes))
        for one, denial in each.items()
    ]
    upsert(connection, denied, rows)
    hits = [
        {
            "run_id": run,
            "device": name(device),
            "number": number,
            "time": moment(strike.time),
            "incident": text(strike.incident, 100),
            "node": name(strike.node),
            "persistence": text(strike.persistence, 20),
        }
        for device, each in found.strikes.items()
        for number, strike in enumerate(each)
    ]
    upsert(connection, strikes, hits)
    log = [_change(run, number, one) for number, one in enumerate(found.log) if isinstance(one, Mapping)]
    upsert(connection, quarantine, log)
    # Mended by hand, it may be shorter than it was.
    connection.execute(sa.delete(quarantine).where(quarantine.c.run_id == run, quarantine.c.number >= len(found.log)))


def _change(run: int, number: int, record: Mapping[str, Any]) -> dict[str, Any]:
    cleared = record.get("cleared")
    inner = cleared if isinstance(cleared, Mapping) else {}
    return {
        "run_id": run,
        "number": number,
        "time": moment(record.get("time")),
        "what": text(record.get("what"), 50),
        "name": name(record.get("name")),
        "who": name(record.get("who")),
        "reason": text(record.get("reason")),
        "incident": text(record.get("incident") or inner.get("incident"), 100),
        "node": name(record.get("node") or inner.get("node")),
    }


# Supervision ----------------------------------------------------------------------------------------------------------


def read_end(folder: Folder) -> tuple[str, dict[str, Any]]:
    """The newest session of `bitwitness run`, "" without one; and how it ended: columns of `runs`.

    What is half visible is not there yet, as for the wrappers themselves: another beat brings it anew.
    """
    try:
        session = text(to_object(folder.read(SESSION, 1 << 20), SESSION).get("id"), 100)
    except (OSError, RunFilesError):
        return "", {}
    where, stop = stop_name(session), dict[str, Any]()
    try:
        stop = to_object(folder.read(where, _LARGEST), where) if where is not None else stop
    except FileNotFoundError:
        pass
    except (OSError, RunFilesError):
        return session, {}
    code, outcome = whole(stop.get("exit_code"), -1024, 1024), text(stop.get("outcome"), 100)
    ended = {"outcome": outcome, "exit_code": code, "reason": text(stop.get("reason"), 2000)}
    return session, {**ended, "finished": outcome == "finished" and code == 0}


def beat_of(folder: Folder) -> tuple[str, int]:
    """The session of `bitwitness run` that goes on by its own word, and how often it has said so; "" where none does."""
    try:
        said = to_object(folder.read(SESSION, 1 << 20), SESSION)
    except (OSError, RunFilesError):
        return "", 0
    session = text(said.get("id"), 100)
    where = stop_name(session)
    if said.get("ended") or where is None or folder.look(where):
        return "", 0
    return session, whole(said.get("beat")) or 0


def end_of(session: str, columns: Mapping[str, Any], start: tuple[str, str] | None, ended: str) -> dict[str, Any]:
    """Columns of `runs`: how the newest session ended, unless the newest start is not of it.

    A guard that was started without a supervisor says so in run.json. Where the session ended after that, it is a newer one that
    came to no guard.

    Args:
        session: of `read_end`.
        columns: likewise.
        start: session and time of the newest start, by run.json; None where that is not known.
        ended: when the session ended, by its log; "" where that is not known.
    """
    of, started = start or (session, "")
    if not session:
        return {"supervision": of}
    if not of and columns.get("outcome") and started >= ended:
        return {"supervision": "", "outcome": "", "exit_code": None, "reason": "", "finished": False}
    return {**columns, "supervision": session}


def take_log(connection: sa.Connection, source: Source, lines: Lines, run: int) -> Taken:
    """Write lines of the supervisor's log: what belongs on the axis of the run, and when it ended."""
    rows, used, skipped = [], 0, 0
    for at, line in lines.lines:
        if not line.strip():
            continue
        try:
            record = to_object(line, source.path)
        except RunFilesError:
            skipped += 1
            continue
        used += 1
        kind, time = record.get("kind"), moment(record.get("time"))
        if kind not in ("restart", "ended", "session"):
            continue
        if kind in ("ended", "session"):
            ended = time if kind == "ended" else ""
            connection.execute(sa.update(runs).where(runs.c.id == run).values(ended=ended))
        if kind != "session":
            said = {"run_id": run, "origin": f"log:{at}", "step": -1, "time": time, "kind": kind}
            rows.append({**said, "text": text(record.get("text"), 500)})
    upsert(connection, marks, rows, keys=("run_id", "origin"), update=())
    return Taken(used, skipped)


def forget_log(connection: sa.Connection, run: int) -> None:
    """Remove what came of the log: it was replaced by another."""
    connection.execute(sa.delete(marks).where(marks.c.run_id == run, marks.c.origin.startswith("log:")))


# Injected faults ------------------------------------------------------------------------------------------------------


def take_faults(connection: sa.Connection, source: Source, lines: Lines, run: int, time: str) -> Taken:
    """Write lines of a record of injected faults; a fault that struck often is one row."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    used = skipped = 0
    for _, line in lines.lines:
        one = read_injected(line)
        if one is None:
            skipped += bool(line.strip())
            continue
        used += 1
        row = found.setdefault(
            (one.rank, name(one.start), one.fault),
            {
                "run_id": run,
                "rank": one.rank,
                "start": name(one.start),
                "fault": one.fault,
                "spec": text(one.spec, 1000),
                "node": name(one.node),
                "work": text(one.work, 50),
                "target": text(one.target, 50),
                "name": text(one.name, 500),
                "step": one.step,
                "last": one.step,
                "landed": {},
                "hits": 0,
                "time": time,
                "outcome": "unclear",
            },
        )
        row["step"], row["last"] = min(row["step"], one.step), max(row["last"], one.step)
        row["landed"] = landing(row["landed"], one.step, one.work)
        row["hits"] += 1
    for row in found.values():
        same = [drills.c[each] == row[each] for each in ("run_id", "rank", "start", "fault")]
        old = connection.execute(
            sa.select(drills.c.step, drills.c.last, drills.c.landed, drills.c.hits, drills.c.time).where(*same)
        ).one_or_none()
        row["landed"] = sorted(merged(landed_of(None if old is None else old.landed), row["landed"]).items())
        if old is not None:
            row["step"], row["last"] = min(row["step"], old.step), max(row["last"], old.last)
            row["hits"], row["time"] = row["hits"] + old.hits, old.time
        upsert(connection, drills, [row], keys=("run_id", "rank", "start", "fault"))
    return Taken(used, skipped)


def landed_of(kept: object) -> dict[int, str]:
    """What a fault has landed in, as it is kept."""
    return {int(step): str(kinds) for step, kinds in kept} if isinstance(kept, list) else {}


def forget_faults(connection: sa.Connection, run: int, rank: int | None) -> None:
    """Remove what came of a record: it was replaced by another."""
    if rank is not None:
        connection.execute(sa.delete(drills).where(drills.c.run_id == run, drills.c.rank == rank))
