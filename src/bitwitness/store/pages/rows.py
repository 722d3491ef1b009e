"""Records that more than one page has: runs, incidents, who did what, what the fleet proposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunState = Literal["training", "silent", "finished", "stopped", "failed", "unknown"]
"""What a run does now, by what its files show.

    training   its journals were seen growing, or its session has begun
    silent     it has not ended, and nothing has been written for longer than its steps take
    finished   a durable mark says that every rank has finished
    stopped    it was told to stop
    failed     its supervisor gave up, or a person must look
    unknown    nothing tells; e.g. it was imported long after it ended, and no supervisor ran it
"""

IncidentStatus = Literal["attributed", "unattributed"]

Judgement = Literal["", "confirmed", "false alarm", "drill"]
"""What a person has said of an incident since, or that its fault was injected on purpose (`drill`); "" is nothing yet."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far one check got.

    Attributes:
        check: the detector.
        passed: rank-steps on record as passed.
        unverified, failed: likewise.
        all: rank-steps that the run has made, as far as known; what is in none of the three is a gap.
        last: the last step that had passed on every rank; -1 if none.
    """

    check: str
    passed: int
    unverified: int
    failed: int
    all: int
    last: int


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs, and at the head of its page.

    Attributes:
        key: of the run in this database; stands in its address.
        name: the shortest end of its path that no other run in this database has.
        path: of its directory, as it was imported.
        run: its id, kept over restarts, or "".
        job: of the scheduler, e.g. `slurm:4711`, or "".
        state, state_text: what it does now, and the same in a sentence.
        started: when its first guard was made, UTC in ISO 8601, or "".
        seen: when something of it was last written, as far as known.
        world_size, nodes: ranks, and nodes that they are on.
        step: the last step on record; -1 if none.
        checkpoint: the step of the newest checkpoint that is verified and that no incident casts doubt on; -1 if none.
        coverage: by check.
        cost: share of the wall time that all checks took; None where nothing is on record.
        attributed, unattributed: incidents of each status, drills and false alarms left out.
        drills, false_alarms: incidents that are known to be these.
        open: incidents that nobody has judged, and after which no person has acted.
        problems: how many of its files could not be read, wholly or in part.
    """

    key: int
    name: str
    path: str
    run: str
    job: str
    state: RunState
    state_text: str
    started: str
    seen: str
    world_size: int
    nodes: int
    step: int
    checkpoint: int
    coverage: tuple[Coverage, ...]
    cost: float | None
    attributed: int
    unattributed: int
    drills: int
    false_alarms: int
    open: int
    problems: int


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """An incident in a list.

    Attributes:
        id: as in its directory.
        run: key of its run.
        run_name: what the run is called, as in `RunRow`.
        time: when it was found.
        step: in which it was found.
        check, kind, status, persistence, headline, reason: as the verdict says.
        ranks, nodes, devices: named; empty unless attributed.
        candidates: ranks involved, without blame.
        window: (last step at which the check had passed, step of detection].
        judgement: what a person has said of it.
        action: what the fleet proposes about it or has done, in a few words; "" if nothing.
        run_path: directory of the run.
        open: whether it waits for a person: nobody has judged it, and no person has acted because of it.
    """

    id: str
    run: int
    run_name: str
    time: str
    step: int
    check: str
    kind: str
    status: IncidentStatus
    persistence: str
    headline: str
    reason: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    candidates: tuple[int, ...]
    window: tuple[int, int]
    judgement: Judgement
    action: str
    run_path: str = ""
    open: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is.

    Attributes:
        rank, node, device: its number, its node, the identity of its device.
        slot: which device of the node.
        model: of the device.
        pod: in Kubernetes, or "".
    """

    rank: int
    node: str
    device: str
    slot: int
    model: str
    pod: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that could not be read, wholly or in part.

    Attributes:
        path: of the file.
        text: what was wrong, and what was done about it.
        time: since when.
        lines: lines of it that were skipped.
    """

    path: str
    text: str
    time: str
    lines: int


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Who did what: of the fleet's audit log, of a run's quarantine, or beside an incident.

    Attributes:
        time: when.
        who: `user@host`, or `controller`.
        what: in a word.
        incident, node: which it is about, or "".
        text: a sentence.
        source: where it stands: `fleet`, `quarantine`, `incident` or `console`.
    """

    time: str
    who: str
    what: str
    incident: str
    node: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class ProposalRow:
    """What the fleet proposes, and where that stands.

    Attributes:
        key: of the proposal in the controller's state.
        incident, node, devices, action, confidence, reason: as the fleet decided.
        act: what the cluster is asked for; "" for nothing.
        status, hold, why: where it stands, what holds it (`approval`: a person must answer), and the same in a sentence.
        updated: when that last changed.
        signals: what the hardware said that bears on it, a sentence each.
        waits: whether it waits for a person's approval now.
        controller: key of the controller in this database; stands, with `key`, in the address of an answer.
        question: by what it is answered on a command line (`bitwitness fleet approve`); "" while nothing is asked.
        state: folder of the controller's state.
        imported: whether the incident is in this database, so that it has a page.
    """

    key: int
    incident: str
    node: str
    devices: tuple[str, ...]
    action: str
    confidence: str
    reason: str
    act: str
    status: str
    hold: str
    why: str
    updated: str
    signals: tuple[str, ...]
    waits: bool
    controller: int = 0
    question: str = ""
    state: str = ""
    imported: bool = True
