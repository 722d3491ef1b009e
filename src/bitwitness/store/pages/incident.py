"""The page of one incident: what was seen, what was concluded, what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwitness.store.pages.rows import AuditRow, IncidentRow, Place, ProposalRow, RunRow


@dataclass(frozen=True, slots=True)
class Seen:
    """An observation of an incident.

    Attributes:
        check, step, rank, place, value, repeats, owner, micro, error, detail: as in `evidence.Observation`.
    """

    check: str
    step: int
    rank: int
    place: str
    value: str
    repeats: tuple[str, ...]
    owner: int | None
    micro: int | None
    error: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class IncidentPage:
    """One incident.

    Attributes:
        incident: its row.
        run: the row of its run.
        observations: what it was decided from; empty where these were pruned, which `pruned` says.
        placement: of the ranks that were involved.
        world_size, nodes: how many ranks there were then, and on how many nodes; 0 nodes where that is not on record.
        checkpoint: of the checkpoints that are still kept, the step of the last safe one, at or before the start of the suspect window;
            -1 if none.
        proposals: of the fleet.
        history: what was done, by whom, oldest first.
        notes: of the guard, e.g. that evidence could not be saved.
        files: name -> bytes of the evidence beside it.
        path: its directory.
        pruned: whether the observations were removed by retention.
        on_detection: what the policy had the job do then, e.g. `raise`; "" where it is not on record.
        resumed: the step of the checkpoint from which the job went on after it, as its journal says; -1 where it does not.
    """

    incident: IncidentRow
    run: RunRow
    observations: tuple[Seen, ...]
    placement: tuple[Place, ...]
    world_size: int
    nodes: int
    checkpoint: int
    proposals: tuple[ProposalRow, ...]
    history: tuple[AuditRow, ...]
    notes: tuple[str, ...]
    files: Mapping[str, int]
    path: str
    pruned: bool
    on_detection: str = ""
    resumed: int = -1
