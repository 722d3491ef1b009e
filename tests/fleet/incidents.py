"""Incidents as the guard writes them, for tests of what follows: real files in a run directory, and records in memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bitwitness.evidence import Kind, Persistence, Verdict
from bitwitness.runfiles import Incident, RunFiles
from bitwitness.topology import Placement, Topology

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
"""When the incidents of tests happen, unless they say otherwise."""


def incident_id(number: int, at: datetime = NOW) -> str:
    """`20261129T120000Z-00002a`."""
    return f"{at:%Y%m%dT%H%M%SZ}-{number:06x}"


def topology(nodes: Sequence[str] = ("n0", "n1", "n2", "n3"), per_node: int = 2) -> Topology:
    """Ranks in the order of nodes, each with a GPU whose UUID says where it is."""
    return Topology(
        tuple(
            Placement(index * per_node + slot, node, f"GPU-{node}-{slot}", slot, "H100", "torch 2.13")
            for index, node in enumerate(nodes)
            for slot in range(per_node)
        )
    )


def verdict(
    where: Topology,
    ranks: Sequence[int] = (2,),
    persistence: Persistence = "persistent",
    kind: Kind = "compute",
    persistences: Sequence[Persistence] = (),
) -> Verdict:
    """One that names these ranks; one that names nobody where there are none."""
    candidates = tuple(rank for rank in (0, 2, 4) if rank < where.world_size)
    if not ranks:
        return Verdict("unattributed", 7, kind=kind, candidates=candidates, reason="as a test says", check="replay")
    return Verdict(
        "attributed",
        7,
        ranks=tuple(ranks),
        nodes=where.nodes_of(ranks),
        devices=tuple(where.device_of(rank) for rank in ranks),
        persistence=persistence,
        persistences=tuple(persistences) or (persistence,) * len(ranks),
        kind=kind,
        candidates=candidates,
        reason="as a test says",
        check="replay",
        window=(6, 7),
    )


def record(found: Verdict, where: Topology, at: datetime = NOW, **more: Any) -> dict[str, Any]:
    """The content of incident.json."""
    return {
        "id": "",
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "bitwitness": "0",
        "verdict": found.to_json(),
        "observations": [],
        "placement": where.to_json(),
        "policy": {"on_detection": "raise"},
        "notes": [],
        **more,
    }


def incident(
    number: int = 1, found: Verdict | None = None, where: Topology | None = None, at: datetime = NOW, **more: Any
) -> Incident:
    """An incident in memory."""
    where = where or topology()
    found = found or verdict(where)
    content = record(found, where, at, **more)
    return Incident(Path(incident_id(number, at)), found, (), where, content)


def write(
    run_dir: Path,
    number: int = 1,
    found: Verdict | None = None,
    where: Topology | None = None,
    at: datetime = NOW,
    **more: Any,
) -> Path:
    """An incident on disk, in the way of the guard; its folder."""
    where = where or topology()
    name = incident_id(number, at)
    content = record(found or verdict(where), where, at, **more) | {"id": name}
    files = RunFiles(run_dir).create()
    return files.commit_incident(name, content)


def days(number: float) -> timedelta:
    """So many days."""
    return timedelta(days=number)
