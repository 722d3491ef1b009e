"""Whether the detectors fire where a fault was injected on purpose, and whether they cry wolf where none was."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.pages import CheckTally, DrillRow, DrillsPage
from bitwitness.store.queries.bound import false_alarm_bound
from bitwitness.store.queries.copies import counted_drill, counted_incident
from bitwitness.store.queries.paging import Part, part
from bitwitness.store.queries.rows import INCIDENTS, in_order, incident_rows
from bitwitness.store.queries.states import state_of
from bitwitness.store.tables import coverage, drills, incidents, runs

OUTCOMES = ("caught", "caught, unattributed", "named wrongly", "missed", "unclear")
_FALSE_ALARMS = 100


def drills_page(database: Database, *, page: int = 1, size: int = 100, now: datetime | None = None) -> DrillsPage:
    """The drills, newest first, the false alarms, and what follows of both.

    A fault that nothing has seen yet is missed only when the run trains no more: a check that is due later may still see it.

    Raises:
        StoreError: the database does not answer.
    """
    with database.read() as connection:
        is_now = outcome_of(now)
        each = (
            sa.select(is_now.label("outcome"))
            .join(runs, runs.c.id == drills.c.run_id)
            .where(counted_drill())
            .subquery()
        )
        by_outcome = sa.select(each.c.outcome, sa.func.count().label("many")).group_by(each.c.outcome)
        found = {row.outcome: row.many for row in connection.execute(by_outcome)}
        total = sum(found.values())
        shown = part(total, page, size)
        false = connection.execute(
            INCIDENTS.where(incidents.c.judgement == "false alarm", counted_incident())
            .order_by(incidents.c.time.desc(), incidents.c.id.desc())
            .limit(_FALSE_ALARMS)
        ).all()
        unjudged = (
            sa.select(sa.func.count()).select_from(incidents).where(incidents.c.judgement == "", counted_incident())
        )
        return DrillsPage(
            drills=tuple(_drill(row) for row in connection.execute(_part(is_now, shown))),
            total=total,
            page=shown.page,
            pages=shown.pages,
            outcomes={outcome: found.get(outcome, 0) for outcome in OUTCOMES},
            false_alarms=incident_rows(connection, false),
            unjudged=connection.scalar(unjudged) or 0,
            tallies=_tallies(connection),
        )


def outcome_of(now: datetime | None) -> sa.ColumnElement[str]:
    """What came of a row of `drills`, with its run, as far as that can be said at this moment: one rule for pages and tables."""
    open_yet = sa.or_(drills.c.outcome == "", sa.and_(drills.c.outcome == "missed", state_of(now) == "training"))
    return sa.case((open_yet, sa.literal("unclear")), else_=drills.c.outcome)


def _part(is_now: sa.ColumnElement[str], shown: Part) -> sa.Select[Any]:
    return (
        sa.select(
            drills,
            is_now.label("came_of_it"),
            runs.c.name.label("run_name"),
            runs.c.path.label("run_path"),
            incidents.c.name.label("incident"),
            incidents.c.check.label("by"),
        )
        .join(runs, runs.c.id == drills.c.run_id)
        .outerjoin(incidents, incidents.c.id == drills.c.incident_id)
        .where(counted_drill())
        .order_by(drills.c.time.desc(), drills.c.id.desc())
        .offset(shown.offset)
        .limit(shown.size)
    )


def _drill(row: Any) -> DrillRow:
    return DrillRow(
        time=row.time,
        run=row.run_id,
        run_name=row.run_name,
        run_path=row.run_path,
        fault=row.spec,
        rank=row.rank,
        node=row.node,
        step=row.step,
        outcome=row.came_of_it,
        check=row.by or "",
        incident=row.incident or "",
        late=row.late,
    )


def _tallies(connection: sa.Connection) -> tuple[CheckTally, ...]:
    """By check, over all runs: what passed where nothing was wrong, and what a person has called false.

    A check that was not satisfied has had its chance as well, so a false alarm is one of the trials.
    """
    check = coverage.c.check
    passed: Mapping[str, int] = {
        row.name: int(row.passed)
        for row in connection.execute(
            sa.select(check.label("name"), sa.func.sum(coverage.c.passed).label("passed"))
            .where(coverage.c.run_id.not_in(sa.select(runs.c.id).where(runs.c.copy_of.is_not(None))))
            .group_by(check)
        )
    }
    false: Mapping[str, int] = {
        row.name: row.many
        for row in connection.execute(
            sa.select(incidents.c.check.label("name"), sa.func.count().label("many"))
            .where(incidents.c.judgement == "false alarm", counted_incident())
            .group_by(incidents.c.check)
        )
    }
    made = {name: _tally(name, passed.get(name, 0), false.get(name, 0)) for name in {*passed, *false} - {""}}
    return tuple(in_order(made))


def _tally(name: str, passed: int, false: int) -> CheckTally:
    return CheckTally(name, passed, false, false_alarm_bound(false, passed + false) if passed else None)
