"""Runs as guards leave them, written by the writers of `runfiles`, and what an import of them must come to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.evidence import Observation, Verdict
from bitwitness.runfiles import FileDigest, Label, RunFiles, write_label
from bitwitness.runfiles.drills import start_of
from bitwitness.store import tables
from bitwitness.store.database import Database
from bitwitness.topology import Placement, Topology

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
INCIDENT = "20261130T120000Z-00000a"
STARTED = {"supervision": "s1", "generation": 1}
"""What names the start of the job in all of these files, unless something else is said."""
START = start_of(STARTED)


class Clock:
    """The importer's clock: it goes on when it is told to."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now

    def pass_(self, seconds: float) -> None:
        """Let some time pass."""
        self.now += timedelta(seconds=seconds)


def topology(nodes: Sequence[str] = ("n0", "n1", "n2"), per_node: int = 2) -> Topology:
    """Ranks in the order of nodes, each with a device of its own."""
    places = [(node, slot) for node in nodes for slot in range(per_node)]
    return Topology(
        tuple(Placement(rank, node, f"GPU-{node}-{slot}", slot, "H100") for rank, (node, slot) in enumerate(places))
    )


def about(where: Topology, run: str = "run-1", **more: Any) -> dict[str, Any]:
    """The content of a run.json."""
    return {
        "run": run,
        "started": "2026-11-30T11:00:00.000Z",
        "bitwitness": "0.1",
        "world_size": where.world_size,
        "placement": where.to_json(),
        "policy": {"audit": "gradients"},
        "limits": ["two nodes"],
        "scheduler_job": "slurm:7",
        **more,
    }


def make_run(path: Path, where: Topology | None = None, **more: Any) -> RunFiles:
    """A run in which nothing has happened yet."""
    files = RunFiles(path).create()
    files.write_run(about(where or topology(), **more))
    return files


def train(files: RunFiles, ranks: int, first: int, last: int, *, start: bool = True, check: str = "replay") -> None:
    """Every rank makes these steps, sees something at each of them, and says that a check has passed."""
    for rank in range(ranks):
        journal = files.journal(rank)
        if start:
            journal.append("start", {"world_size": ranks, "node": "n0", **STARTED})
        for step in range(first, last + 1):
            seen = Observation("replay", step, rank, "original", f"{step:024x}", owner=rank, micro=0)
            journal.append("observation", seen.to_json())
        journal.append("ledger", {"check": check, "first": first, "last": last, "outcome": "passed"})
        journal.close()


def verdict(where: Topology, ranks: Sequence[int] = (2,), step: int = 7) -> Verdict:
    """One that names these ranks, or nobody."""
    if not ranks:
        return Verdict("unattributed", step, kind="compute", candidates=(0, 2), check="replay", window=(step - 1, step))
    return Verdict(
        "attributed",
        step,
        ranks=tuple(ranks),
        nodes=where.nodes_of(ranks),
        devices=tuple(where.device_of(rank) for rank in ranks),
        candidates=(),
        kind="compute",
        persistence="persistent",
        persistences=tuple("persistent" for _ in ranks),
        reason="as a test says",
        check="replay",
        window=(step - 1, step),
    )


def make_incident(files: RunFiles, found: Verdict, where: Topology, name: str = INCIDENT, **more: Any) -> Path:
    """An incident as the guard publishes it."""
    seen = [Observation("replay", found.step, rank, "original", "a" * 24, owner=rank, micro=0) for rank in range(4)]
    record = {
        "id": name,
        "time": "2026-11-30T11:30:00.000Z",
        "verdict": found.to_json(),
        "observations": [one.to_json() for one in seen],
        "placement": where.to_json(),
        "policy": {},
        "notes": ["a note"],
        **STARTED,
        **more,
    }
    return files.commit_incident(name, record)


def make_checkpoint(files: RunFiles, step: int, where: Topology, **more: Any) -> Path:
    """A checkpoint with a label."""
    folder = files.path / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "shared.pt").write_bytes(b"weights")
    values: dict[str, Any] = {
        "step": step,
        "saved": "2026-11-30T11:10:00.000Z",
        "world_size": where.world_size,
        "placement": where.to_json(),
        "passed": {"replay": step - 1},
        "failed": {},
        "incidents": (),
        "seed": 1,
        "tensors": {},
        "files": {"shared.pt": FileDigest(7, "0" * 64)},
        "software": {},
        "read_back": "nobody",
    }
    write_label(folder, Label(**(values | more)))
    return folder


def strike(rank: int, step: int, *, start: str = START, node: str = "n1", **site: Any) -> str:
    """A line of a record of injected faults."""
    # Work that is repeated, as one of a fault that persists: it explains what was wrong once, and what was wrong again.
    about_ = {"fault": 0, "rank": rank, "step": step, "micro": 0, "work": "rerun", "target": "gradient"}
    record = {"schema": 1, "site": {**about_, "name": "w", "call": 0, "start": 1, **site}}
    record |= {"spec": "flip", "node": node, "shape": [2], "dtype": "torch.float32", "count": 1}
    record |= {"start_id": start} if start else {}
    return json.dumps(record | {"example": {}, "indices": "", "before": "", "after": ""}) + "\n"


def append(path: Path, text: str | bytes) -> None:
    """Add to a file as another process would, in one system call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, text if isinstance(text, bytes) else text.encode())
    finally:
        os.close(descriptor)


def rows(database: Database, table_name: str, /, **where: Any) -> list[dict[str, Any]]:
    """All rows of a table, in the order of its primary key."""
    table = tables.metadata.tables[table_name]
    chosen = sa.select(table).where(*(table.c[each] == value for each, value in where.items()))
    with database.read() as connection:
        return [dict(row) for row in connection.execute(chosen.order_by(*table.primary_key)).mappings()]


def content(database: Database) -> dict[str, Any]:
    """Everything that came of files, without what tells when, how and under which key it was imported."""
    hidden = {
        "id",
        "run_id",
        "incident_id",
        "imported",
        "grew",
        "over",
        "copy_of",
        "stamp",
        "seen_at",
        "path",
        "place",
        "offset",
        "size",
        "scanned",
    }
    hidden |= {"identity", "files"}
    found = {}
    for name in tables.metadata.tables:
        if name not in ("meta", "sources", "problems", "controllers"):
            kept = [{key: value for key, value in row.items() if key not in hidden} for row in rows(database, name)]
            found[name] = sorted(kept, key=repr)
    return found
