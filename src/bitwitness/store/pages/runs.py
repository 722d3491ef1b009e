"""The list of runs, and the page of one: chart, ledger, costs, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bitwitness.store.pages.rows import AuditRow, IncidentRow, Place, Problem, RunRow

Cell = Literal["gap", "passed", "partly", "unverified", "failed"]
"""Of the ledger: nothing is on record; verified; verified for some ranks or steps of the cell; looked at in vain; failed."""


@dataclass(frozen=True, slots=True)
class Found:
    """What has been searched for, and has a page of its own.

    Attributes:
        kind: what it is.
        name: its name, identity or id.
        run: key of the run, of an incident; else 0.
    """

    kind: Literal["node", "device", "incident"]
    name: str
    run: int = 0


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
        incidents: the newest open ones of each status, newest first.
        found: nodes, devices and incidents whose name holds what was searched for; a few of each.
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
    found: tuple[Found, ...] = ()


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
class Twin:
    """Another run with the same id: the same directory by another path, one that was moved, or a copy.

    Attributes:
        key: in this database.
        name: of it.
        path: of its directory.
        counted: whether it is the one that is counted, of which the others are copies.
        apart: whether one of the two went its own way: then both are counted, and what they share once.
        missing: whether its directory is gone.
    """

    key: int
    name: str
    path: str
    counted: bool
    apart: bool
    missing: bool


@dataclass(frozen=True, slots=True)
class RunPage:
    """One run.

    Attributes:
        run: its row.
        series: loss and gradient norm.
        marks: what happened, on the same axis.
        maps: the ledger, a map a check.
        costs: what each check took.
        incidents: newest first; all that are open, whatever is left out.
        checkpoints: newest first.
        placement: where the ranks were last; thinned to the first 512.
        policy: as run.json has it.
        limits: what the guard cannot do on this placement.
        history: of its quarantine and of the fleet's acts because of its incidents, newest first.
        problems: what could not be imported.
        pruned: when retention removed the ledger, so that there are no maps; "" if it did not.
        twins: other runs with the same id: copies of this one, or the one of which this is a copy.
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
    pruned: str = ""
    twins: tuple[Twin, ...] = ()
