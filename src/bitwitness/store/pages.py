"""What each page of the console says, as plain data: the contract between the database, the pages and their JSON twins.

They lie apart from both because three things must never differ: what a person reads, what a program reads, and what was
imported. A page is made by `store.queries`, drawn by `web`, and its JSON twin is the same record, field by field. An
*unattributed* incident has a status of its own in every one of them: it is counted apart, and names nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RunState = Literal["training", "silent", "finished", "stopped", "failed", "unknown"]
"""What a run does now, by what its files show.

    training   its journals grow
    silent     it has not ended, and nothing has been written for longer than its steps take
    finished   a durable mark says that every rank has finished
    stopped    it was told to stop
    failed     its supervisor gave up, or a person must look
    unknown    nothing tells; e.g. it was imported long after it ended, and no supervisor ran it
"""

IncidentStatus = Literal["attributed", "unattributed"]
Judgement = Literal["", "confirmed", "false alarm", "drill"]
"""What a person has said of an incident since, or that its fault was injected on purpose (`drill`); "" is nothing yet."""

Cell = Literal["gap", "passed", "partly", "unverified", "failed"]
"""Of the ledger: nothing is on record; verified; verified for some ranks or steps of the cell; looked at in vain; failed."""


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
class CheckCost:
    """What one check took of the time of training.

    Attributes:
        check: the detector, or `guard` for what belongs to none.
        seconds: in all, on the rank that reports (0), as its host or device saw it.
        steps: over how many steps.
        share: of the wall time of these steps; None where that is not known.
    """

    check: str
    seconds: float
    steps: int
    share: float | None


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs, and at the head of its page.

    Attributes:
        key: of the run in this database; stands in its address.
        name: of its directory.
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
        run_name: name of the run's directory.
        time: when it was found.
        step: in which it was found.
        check, kind, status, persistence, headline, reason: as the verdict says.
        ranks, nodes, devices: named; empty unless attributed.
        candidates: ranks involved, without blame.
        window: (last step at which the check had passed, step of detection].
        judgement: what a person has said of it.
        action: what the fleet proposes about it or has done, in a few words; "" if nothing.
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


@dataclass(frozen=True, slots=True)
class RunsPage:
    """All runs, those that need a person first, then those that train, then the newest.

    Attributes:
        runs: of this page of the list.
        total: how many there are that match.
        page, pages: which part this is, from 1, of how many.
        states: state -> how many runs, whatever is selected.
        unattributed, attributed: open incidents over all runs.
        query: what was searched for, "" if nothing.
        incidents: the newest that nobody has judged.
    """

    runs: tuple[RunRow, ...]
    total: int
    page: int
    pages: int
    states: Mapping[str, int]
    attributed: int
    unattributed: int
    query: str
    incidents: tuple[IncidentRow, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Loss and gradient norm along the steps, thinned to what can be drawn; one entry a bucket of steps.

    Attributes:
        first, last: steps of each bucket, both included.
        loss, loss_low, loss_high: mean, least and largest of rank 0's loss; None where it was not finite or is not known.
        norm, norm_low, norm_high: likewise of the gradient's norm.
        nonfinite: steps of the bucket whose loss or norm was NaN or Inf.
        seconds: wall time of a step, mean.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    loss: tuple[float | None, ...] = ()
    loss_low: tuple[float | None, ...] = ()
    loss_high: tuple[float | None, ...] = ()
    norm: tuple[float | None, ...] = ()
    norm_low: tuple[float | None, ...] = ()
    norm_high: tuple[float | None, ...] = ()
    nonfinite: tuple[int, ...] = ()
    seconds: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step, on the axis of the chart.

    Attributes:
        step: where.
        time: when.
        kind: `start`, `resume`, `checkpoint`, `attributed`, `unattributed`, `drill`, `false alarm`, `guard_failure`, `restart`.
        text: in a sentence.
        link: id of an incident, or "".
    """

    step: int
    time: str
    kind: str
    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class LedgerMap:
    """The ledger of one check as a map of ranks and steps, thinned to what can be drawn; what is not on record is a gap.

    Attributes:
        check: the detector.
        rows: of each row its first and last rank.
        columns: of each column its first and last step.
        cells: a row of cells for each row.
        reasons: `row,column` -> why a cell is not `passed`, for those that say so.
    """

    check: str
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    cells: tuple[tuple[Cell, ...], ...]
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint.

    Attributes:
        step: training goes on with it.
        saved: when.
        passed: check -> last step at which it had passed.
        doubt: why it must not be resumed from, in a sentence; "" if nothing speaks against it.
        present: whether it is still there.
    """

    step: int
    saved: str
    passed: Mapping[str, int]
    doubt: str
    present: bool


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
class RunPage:
    """One run.

    Attributes:
        run: its row.
        series: loss and gradient norm.
        marks: what happened, on the same axis.
        maps: the ledger, a map a check.
        costs: what each check took.
        incidents, checkpoints: newest first.
        placement: where the ranks were last; thinned to the first 512.
        policy: as run.json has it.
        limits: what the guard cannot do on this placement.
        history: of its quarantine and of the fleet's acts because of its incidents, newest first.
        problems: what could not be imported.
    """

    run: RunRow
    series: Series
    marks: tuple[Mark, ...]
    maps: tuple[LedgerMap, ...]
    costs: tuple[CheckCost, ...]
    incidents: tuple[IncidentRow, ...]
    checkpoints: tuple[CheckpointRow, ...]
    placement: tuple[Place, ...]
    policy: Mapping[str, Any]
    limits: tuple[str, ...]
    history: tuple[AuditRow, ...]
    problems: tuple[Problem, ...]


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


@dataclass(frozen=True, slots=True)
class IncidentPage:
    """One incident.

    Attributes:
        incident: its row.
        run: the row of its run.
        observations: what it was decided from; empty where these were pruned, which `pruned` says.
        placement: of the ranks that were involved.
        world_size: how many ranks there were.
        checkpoint: the step of the last safe checkpoint, at or before the start of the suspect window; -1 if none.
        proposals: of the fleet.
        history: what was done, by whom, oldest first.
        notes: of the guard, e.g. that evidence could not be saved.
        files: name -> bytes of the evidence beside it.
        path: its directory.
        pruned: whether the observations were removed by retention.
    """

    incident: IncidentRow
    run: RunRow
    observations: tuple[Seen, ...]
    placement: tuple[Place, ...]
    world_size: int
    checkpoint: int
    proposals: tuple[ProposalRow, ...]
    history: tuple[AuditRow, ...]
    notes: tuple[str, ...]
    files: Mapping[str, int]
    path: str
    pruned: bool


@dataclass(frozen=True, slots=True)
class Stay:
    """A device that was at a node under some rank, from when to when it was seen there.

    Attributes:
        device, node: which and where.
        run: key of the run.
        run_name: of its directory.
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


@dataclass(frozen=True, slots=True)
class StrikeRow:
    """An incident that named a device.

    Attributes:
        time, incident, run, run_name, rank: when, which, in which run, under which rank.
        device, node: what was named, and where it was then.
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
        strikes: that count.
        involved: unattributed incidents in which it was a candidate: no blame.
        quarantined: in how many runs it or a device of it is denied.
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
        row: of the node; None for a device that is nowhere now.
        stays: which devices were there (of a node), or where it was (of a device), newest first.
        strikes: newest first.
        involved: unattributed incidents in which it was a candidate, newest first; no blame.
        denied: quarantines that deny it now, a sentence each.
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


@dataclass(frozen=True, slots=True)
class DrillRow:
    """A fault that was injected on purpose, and what came of it.

    Attributes:
        time: when it struck.
        run, run_name: in which run.
        fault: in a line, as the grammar has it.
        rank, node, step: where it struck.
        outcome: `caught` (named right), `caught, unattributed`, `named wrongly`, `missed` or `unclear`.
        check: which one saw it, or "".
        incident: its id, or "".
        late: steps between strike and detection; None where it was not caught.
    """

    time: str
    run: int
    run_name: str
    fault: str
    rank: int
    node: str
    step: int
    outcome: str
    check: str
    incident: str
    late: int | None


@dataclass(frozen=True, slots=True)
class CheckTally:
    """How often a check passed where nothing was wrong.

    Attributes:
        check: the detector.
        passed: rank-steps that passed.
        false_alarms: incidents of it that a person called false.
        bound: upper bound (95 %) on false alarms per rank-step, 3/n where there was none; None where nothing passed.
    """

    check: str
    passed: int
    false_alarms: int
    bound: float | None


@dataclass(frozen=True, slots=True)
class DrillsPage:
    """Whether the detectors fire, and whether they cry wolf.

    Attributes:
        drills: newest first, of this page of the list.
        total, page, pages: of that list.
        outcomes: outcome -> how many.
        false_alarms: incidents that a person called false, newest first.
        open: incidents that nobody has judged yet, so that nobody knows.
        tallies: by check.
    """

    drills: tuple[DrillRow, ...]
    total: int
    page: int
    pages: int
    outcomes: Mapping[str, int]
    false_alarms: tuple[IncidentRow, ...]
    open: int
    tallies: tuple[CheckTally, ...]
