"""Incidents as a guard would have written them, without a guard: observations, the verdict that follows, the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitwitness.evidence import NONFINITE, History, Observation, Place, Verdict
from bitwitness.policy import Policy
from bitwitness.runfiles import RunFiles, new_incident_id, utc_now
from bitwitness.topology import Placement, Topology
from bitwitness.verdict import decide

GOOD, BAD = "a" * 24, "b" * 24
STEP = 12
KNOWN = History({"numerics": 11, "replay": 9, "replicas": 9}, frozenset({"numerics", "replay", "replicas", "input"}))


def topology(nodes: int = 3, device: str = "{node}/cpu-{slot}", names: Sequence[str] = ()) -> Topology:
    """Two ranks a node."""
    placed = []
    for rank in range(2 * nodes):
        node, slot = names[rank // 2] if names else f"node-{rank // 2}", rank % 2
        placed.append(Placement(rank, node, device.format(node=node, slot=slot, rank=rank), slot, "device", "torch"))
    return Topology(tuple(placed))


def replays(where: Topology, wrong: int, repeats: str, first: str = BAD) -> list[Observation]:
    """Every rank's micro-batch as its owner and two witnesses saw it; one rank was wrong in its own, then `repeats`."""
    seen = []
    for owner in range(where.world_size):
        for rank in {owner, where.witness_of(owner, 1), where.witness_of(owner, 2)} - {None}:
            assert rank is not None
            place: Place = "original" if rank == owner else "witness"
            mine = rank == wrong == owner
            values = (first, (repeats,) * 3) if mine else (GOOD, (GOOD,) * 3)
            detail = (
                {"loss_differs": True, "gradients_differing": 2, "differs": ["head.weight", "norm.bias"]}
                if mine
                else {}
            )
            seen.append(
                Observation("replay", STEP, rank, place, values[0], values[1], owner=owner, micro=0, detail=detail)
            )
    return seen


def replicas(where: Topology, *wrong: int) -> list[Observation]:
    detail = {"differs": ["blocks.0.weight"], "differing": 1}
    return [
        Observation(
            "replicas", STEP, rank, "state", BAD if rank in wrong else GOOD, detail=detail if rank in wrong else {}
        )
        for rank in range(where.world_size)
    ]


def reduced(where: Topology, wrong: int, value: str) -> list[Observation]:
    return [
        Observation("numerics", STEP, rank, "reduced", value if rank == wrong else GOOD)
        for rank in range(where.world_size)
    ]


def nonfinite_everywhere(where: Topology, owner: int) -> list[Observation]:
    seen = [
        Observation("numerics", STEP, owner, "local", NONFINITE, detail={"largest_local": "inf", "norm_reduced": "nan"})
    ]
    for rank in sorted({owner, where.witness_of(owner, 1) or 0, where.witness_of(owner, 2) or 0}):
        place: Place = "original" if rank == owner else "witness"
        seen.append(Observation("replay", STEP, rank, place, NONFINITE, (NONFINITE,) * 3, owner=owner))
    return seen


def write(
    run_dir: Path,
    observations: Sequence[Observation],
    where: Topology,
    history: History = KNOWN,
    saved: Sequence[int] = (),
    **changes: Any,
) -> Path:
    """Write an incident and its run; the incident's directory."""
    files = RunFiles(run_dir).create()
    files.write_run({"world_size": where.world_size})
    verdict = decide(list(observations), where, history, STEP)
    assert verdict.status != "clean"
    name = new_incident_id()
    record = {
        "id": name,
        "time": utc_now(),
        "bitwitness": "0.1.0",
        "verdict": verdict.to_json(),
        "observations": [seen.to_json() for seen in observations],
        "history": history.to_json(),
        "placement": where.to_json(),
        "policy": Policy().to_json(),
        "notes": [],
        **changes,
    }
    folder = files.stage_incident(name)
    for rank in saved:
        (folder / f"micro-batches-rank-{rank:05d}.pt").write_bytes(b"?")
    files.commit_incident(name, record)
    return run_dir / "incidents" / name


def attributed(**fields: Any) -> Verdict:
    """A verdict made by hand, where the rules would take many observations."""
    given: dict[str, Any] = {
        "status": "attributed",
        "step": STEP,
        "ranks": (4,),
        "nodes": ("node-2",),
        "kind": "compute",
    }
    return Verdict(**{**given, **fields})
