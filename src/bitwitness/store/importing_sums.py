"""What follows from all files of a run together, kept so that no page has to count: written when a round has read a run.

It is made anew from what the database holds, so it does not matter in which order files were read, by whom, or how often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.evidence import Verdict
from bitwitness.runfiles.drills import Found, Struck, settled
from bitwitness.runfiles.label import Label, distrust
from bitwitness.runfiles.run import Incident
from bitwitness.store.database import upsert
from bitwitness.store.importing_acted import MACHINES, by_fleet
from bitwitness.store.importing_coverage import write_coverage
from bitwitness.store.importing_rest import landed_of
from bitwitness.store.tables import (
    actions,
    checkpoints,
    costs,
    drills,
    incident_ranks,
    incidents,
    marks,
    nodes,
    problems,
    ranks,
    runs,
    stays,
    steps,
)
from bitwitness.topology import Topology


def add_up(connection: sa.Connection, run: int) -> None:
    """Write what follows from all that is known of a run."""
    row = connection.execute(sa.select(runs).where(runs.c.id == run).with_for_update(key_share=True)).one()
    write_coverage(connection, run, row.world_size)
    _settle_marks(connection, run)
    _judge(connection, run)
    newest = _doubt(connection, run)
    started = _started(connection, run, row.started)
    seen = _seen(connection, run, started)
    _write_places(connection, run, seen)
    values = {
        "seen": seen,
        "started": started,
        "checkpoint": newest,
        **_counts(connection, run),
        **_pace(connection, run),
    }
    connection.execute(sa.update(runs).where(runs.c.id == run).values(**values))


def answered(connection: sa.Connection, run: int) -> None:
    """Write what follows from what people have done through the fleet since a run was read."""
    connection.execute(sa.select(runs.c.id).where(runs.c.id == run).with_for_update(key_share=True))
    _judge(connection, run)
    connection.execute(sa.update(runs).where(runs.c.id == run).values(**_counts(connection, run)))


def _started(connection: sa.Connection, run: int, known: str) -> str:
    """When the first guard was made, by the journals too: run.json is written anew with every start."""
    here = sa.and_(marks.c.run_id == run, marks.c.kind == "start", marks.c.time != "")
    first = _one(connection, sa.select(sa.func.min(marks.c.time)).where(here))
    return min(filter(None, (known, first)), default="")


def _one(connection: sa.Connection, query: sa.Select[Any]) -> Any:
    return connection.execute(query).scalar()


def _settle_marks(connection: sa.Connection, run: int) -> None:
    """A restart of the supervisor has no step of its own: it is that with which the next guard went on."""
    open_ones = sa.select(marks.c.id, marks.c.time).where(
        marks.c.run_id == run, marks.c.kind == "restart", marks.c.step < 0
    )
    for key, time in connection.execute(open_ones).all():
        after = sa.select(marks.c.step).where(
            marks.c.run_id == run, marks.c.kind == "start", marks.c.time >= time, marks.c.step >= 0
        )
        step = _one(connection, after.order_by(marks.c.time).limit(1))
        if step is not None:
            connection.execute(sa.update(marks).where(marks.c.id == key).values(step=step))


# Judgements -----------------------------------------------------------------------------------------------------------


def _judge(connection: sa.Connection, run: int) -> None:
    known = connection.execute(sa.select(incidents).where(incidents.c.run_id == run)).all()
    if not known and not _one(connection, sa.select(sa.func.count()).where(drills.c.run_id == run)):
        return
    by_fault = _settle_drills(connection, run, known)
    said, acted = _said(connection, run)
    for row in known:
        word = said.get(row.id, {"judged": "", "judged_by": "", "judged_at": "", "judged_why": ""})
        drill = row.id in by_fault
        judgement = word["judged"] or ("drill" if drill else "")
        values = {**word, "drill": drill, "judgement": judgement, "acted": row.id in acted}
        if any(getattr(row, each) != value for each, value in values.items()):
            connection.execute(sa.update(incidents).where(incidents.c.id == row.id).values(**values))


def _said(connection: sa.Connection, run: int) -> tuple[dict[int, dict[str, str]], set[int]]:
    """The last word of a person on each incident, and after which a person has acted."""
    said: dict[int, dict[str, str]] = {}
    acted: set[int] = set()
    chosen = sa.select(actions).where(actions.c.run_id == run).order_by(actions.c.incident_id, actions.c.at)
    for row in connection.execute(chosen):
        if row.action == "judged":
            said[row.incident_id] = {
                "judged": str(row.record.get("judgement", "")),
                "judged_by": row.who,
                "judged_at": row.time,
                "judged_why": row.text,
            }
        elif row.who not in MACHINES:
            acted.add(row.incident_id)
    return said, acted | by_fleet(connection, run)


def _settle_drills(connection: sa.Connection, run: int, known: Sequence[Any]) -> AbstractSet[int | str]:
    struck = connection.execute(sa.select(drills).where(drills.c.run_id == run)).all()
    if not struck:
        return frozenset()
    roles: dict[str, dict[int, set[tuple[int, str]]]] = {"named": defaultdict(set), "candidate": defaultdict(set)}
    chosen = sa.select(incident_ranks).where(incident_ranks.c.run_id == run, incident_ranks.c.role.in_(roles))
    for row in connection.execute(chosen):
        roles[row.role][row.incident_id].add((row.rank, row.node))
    found = [
        Found(
            row.id,
            row.step,
            row.window_first,
            row.status,
            frozenset(roles["named"].get(row.id, ())),
            row.start,
            frozenset(rank for rank, _ in roles["candidate"].get(row.id, ())),
            row.check,
            row.persistence,
        )
        for row in known
    ]
    started = sa.select(marks.c.start, sa.func.max(marks.c.passed)).where(
        marks.c.run_id == run, marks.c.kind == "start"
    )
    passed = dict(tuple(row) for row in connection.execute(started.group_by(marks.c.start)))
    every = [Struck(row.rank, row.node, row.start, landed_of(row.landed) or {row.step: ""}) for row in struck]
    explained, outcomes = settled(every, found, passed)
    for row, result in zip(struck, outcomes, strict=True):
        values = {"outcome": result.outcome, "incident_id": result.incident, "late": result.late}
        if any(getattr(row, each) != value for each, value in values.items()):
            connection.execute(sa.update(drills).where(drills.c.id == row.id).values(**values))
    return explained


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _doubt(connection: sa.Connection, run: int) -> int:
    """Doubt checkpoints by the incidents; the step of the newest one that is there and that nothing speaks against."""
    chosen = sa.select(incidents).where(incidents.c.run_id == run).order_by(incidents.c.name)
    known = [_incident(row) for row in connection.execute(chosen)]
    newest = -1
    for row in connection.execute(sa.select(checkpoints).where(checkpoints.c.run_id == run)).all():
        doubt = distrust(_label(row), known)
        if doubt != row.doubt:
            here = sa.and_(checkpoints.c.run_id == run, checkpoints.c.step == row.step)
            connection.execute(sa.update(checkpoints).where(here).values(doubt=doubt))
        if row.present and not doubt:
            newest = max(newest, row.step)
    return newest


def _incident(row: Any) -> Incident:
    """As much of an incident as the doubt about a checkpoint asks for."""
    verdict = Verdict(
        "unattributed", row.step, kind="software", window=(row.window_first, row.window_last), check=row.check or None
    )
    return Incident(Path(row.name), verdict, (), Topology(()), {})


def _label(row: Any) -> Label:
    failed: Mapping[str, str] = row.failed or {}
    return Label(row.step, "", 0, (), {}, failed, tuple(row.incidents or ()), 0, {}, {}, {}, "")


# The run --------------------------------------------------------------------------------------------------------------


def _seen(connection: sa.Connection, run: int, started: str) -> str:
    newest: list[str | None] = [
        _one(connection, sa.select(sa.func.max(column)).where(table.c.run_id == run))
        for table, column in (
            (ranks, ranks.c.seen),
            (incidents, incidents.c.time),
            (checkpoints, checkpoints.c.saved),
            (actions, actions.c.time),
        )
    ]
    return max([started, *(one for one in newest if one)])


def _write_places(connection: sa.Connection, run: int, seen: str) -> None:
    here = sa.and_(stays.c.run_id == run, stays.c.current, stays.c.last < seen)
    connection.execute(sa.update(stays).where(here).values(last=seen))
    of_run = sa.select(stays.c.node).where(stays.c.run_id == run).distinct()
    sums = sa.select(stays.c.node, sa.func.count(stays.c.device.distinct()), sa.func.max(stays.c.last))
    found = connection.execute(sums.where(stays.c.node.in_(of_run)).group_by(stays.c.node).order_by(stays.c.node)).all()
    known = {row.name: row for row in connection.execute(sa.select(nodes).where(nodes.c.name.in_(of_run)))}
    rows = [{"name": node, "devices": devices, "seen": last} for node, devices, last in found]
    changed = [row for row in rows if row["name"] not in known or dict(known[row["name"]]._mapping) != row]
    upsert(connection, nodes, changed)


def _counts(connection: sa.Connection, run: int) -> dict[str, Any]:
    counts = {"attributed": 0, "unattributed": 0, "drills": 0, "false_alarms": 0, "open": 0}
    chosen = sa.select(incidents.c.status, incidents.c.judgement, incidents.c.acted).where(incidents.c.run_id == run)
    for status, judgement, acted in connection.execute(chosen):
        kind = {"drill": "drills", "false alarm": "false_alarms"}.get(judgement, status)
        counts[kind] += 1
        counts["open"] += not judgement and not acted
    sums = sa.select(
        sa.func.max(ranks.c.last).label("step"),
        sa.func.coalesce(sa.func.sum(ranks.c.observations), 0).label("observations"),
    )
    row = connection.execute(sums.where(ranks.c.run_id == run)).one()
    broken = _one(connection, sa.select(sa.func.count()).where(problems.c.run_id == run))
    step = -1 if row.step is None else row.step
    return {**counts, "step": step, "observations": int(row.observations), "problems": broken}


def _pace(connection: sa.Connection, run: int) -> dict[str, float | None]:
    newest = sa.select(steps.c.seconds).where(steps.c.run_id == run, steps.c.seconds.is_not(None))
    sums = sa.select(sa.func.sum(costs.c.seconds), sa.func.max(costs.c.wall)).where(costs.c.run_id == run)
    seconds, wall = connection.execute(sums).one()
    return {
        "pace": _one(connection, newest.order_by(steps.c.first.desc()).limit(1)),
        "cost": seconds / wall if wall else None,
    }
