"""The pages of the fleet: all nodes, and one node or device through all runs and under all names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bitwitness.store.pages.rows import AuditRow, IncidentRow, Judgement, ProposalRow


@dataclass(frozen=True, slots=True)
class Stay:
    """A device that was at a node under some rank, from when to when it was seen there.

    Attributes:
        device, node: which and where.
        run: key of the run.
        run_name, run_path: what it is called, and its directory.
        rank: under which.
        first, last: when it was first and last seen so.
    """

    device: str
    node: str
    run: int
    run_name: str
    rank: int
    first: str
    last: str
    run_path: str = ""


@dataclass(frozen=True, slots=True)
class StrikeRow:
    """An incident that named a device.

    Attributes:
        time, incident, run, run_name, run_path, rank: when, which, in which run, under which rank. Of an incident that was not imported
            here, and that only a controller of the fleet has on record, run is 0, rank -1, and the time and the names are "".
        device, node: what was named, and where it was then.
        now: the node in which the device was seen last.
        persistence: `transient`, `persistent` or `unknown`.
        counts: whether it still counts; why not is in `cleared`.
        cleared: who cleared it when and why, or "".
        judgement: of the incident.
    """

    time: str
    incident: str
    run: int
    run_name: str
    rank: int
    device: str
    node: str
    persistence: str
    counts: bool
    cleared: str
    judgement: Judgement
    run_path: str = ""
    now: str = ""


NodeState = Literal["in service", "out", "acting", "waits for approval", "held", "suspected", "unclear", "unknown"]
"""Of a node, as far as bitwitness knows: what its last proposal came to. `suspected` was named, and nothing is proposed to be
done; `unknown`: the fleet keeps no record of it. A node that was only a candidate of an unattributed incident is in none of the
bad states because of it."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node.

    Attributes:
        name: of the node.
        state, state_text: as far as bitwitness knows.
        devices: how many were seen on it.
        strikes: incidents that count against a device that is in it now.
        involved: unattributed incidents in which it was a candidate: no blame.
        quarantined: in how many runs it or a device that is in it now is denied.
        seen: when a rank was last seen on it.
    """

    name: str
    state: NodeState
    state_text: str
    devices: int
    strikes: int
    involved: int
    quarantined: int
    seen: str


@dataclass(frozen=True, slots=True)
class NodePage:
    """A node, or a device, through all runs and under all names.

    Attributes:
        kind: `node` or `device`.
        name: its name or identity.
        row: of the node; for a device, of that in which it was seen last, None where nobody has.
        stays: which devices were there (of a node), or where it was (of a device), newest first.
        strikes: of a node those of the devices that are in it now, and of those that were in it when they were named; newest first.
        involved: unattributed incidents in which it was a candidate, newest first; no blame.
        denied: quarantines that deny it now, or a device that is in it now, a sentence each.
        proposals: of the fleet, newest first.
        history: who did what about it, newest first.
    """

    kind: Literal["node", "device"]
    name: str
    row: NodeRow | None
    stays: tuple[Stay, ...]
    strikes: tuple[StrikeRow, ...]
    involved: tuple[IncidentRow, ...]
    denied: tuple[str, ...]
    proposals: tuple[ProposalRow, ...]
    history: tuple[AuditRow, ...]


@dataclass(frozen=True, slots=True)
class FleetPage:
    """All nodes, and what is to be done about them.

    Attributes:
        states: state -> how many nodes.
        nodes: those that are not in service or were named, then the others, of this page of the list.
        total, page, pages: of that list.
        query: what was searched for.
        waiting: proposals that wait for a person's approval.
        acting: proposals that are under way, held, or unclear.
        controllers: of each controller's state: its folder, mode, cluster, when its last round was, whether it is alive, in a sentence.
        todo: what a person should do now, as the controllers say.
        history: the newest of the audit log.
    """

    states: Mapping[str, int]
    nodes: tuple[NodeRow, ...]
    total: int
    page: int
    pages: int
    query: str
    waiting: tuple[ProposalRow, ...]
    acting: tuple[ProposalRow, ...]
    controllers: tuple[Mapping[str, str], ...]
    todo: tuple[str, ...]
    history: tuple[AuditRow, ...]
