"""The page of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.pages import AuditRow, CheckCost, CheckpointRow, IncidentRow, Problem, RunPage
from bitwitness.store.queries import rows
from bitwitness.store.queries.copies import twins_of
from bitwitness.store.queries.ledger_map import Grid, grid, ledger_maps
from bitwitness.store.queries.marks import marks_of
from bitwitness.store.queries.meaning import meant
from bitwitness.store.queries.series import series_of
from bitwitness.store.queries.states import state_of
from bitwitness.store.tables import (
    actions,
    audit,
    checkpoints,
    costs,
    incidents,
    problems,
    quarantine,
    ranks,
    runs,
    stays,
)

_INCIDENTS, _CHECKPOINTS, _HISTORY, _PROBLEMS = 200, 100, 200, 100
_PLACES = 512
_LARGEST_KEY = 2**63 - 1


def run_page(database: Database, key: int, *, now: datetime | None = None) -> RunPage:
    """One run, by its key in this database.

    Raises:
        NotFound: there is none.
        StoreError: the database does not answer.
    """
    with database.read() as connection:
        row = find_run(connection, key, now)
        shown = rows.run_rows(connection, [row])[0]
        told = rows.incident_rows(connection, _incidents(connection, key))
        wanted = rows.checks_wanted(row.policy)
        return RunPage(
            run=shown,
            series=series_of(connection, key),
            marks=marks_of(connection, key, told),
            maps=() if row.pruned else ledger_maps(connection, key, _grid(connection, row), wanted),
            costs=_costs(connection, key),
            incidents=told,
            checkpoints=_checkpoints(connection, key),
            placement=tuple(rows.place(one) for one in connection.execute(_places(key))),
            policy=row.policy if isinstance(row.policy, Mapping) else {},
            limits=_limits(connection, key),
            history=_history(connection, key, told),
            problems=_problems(connection, key),
            twins=twins_of(connection, row),
            pruned=row.pruned,
        )


def find_run(connection: sa.Connection, key: int, now: datetime | None) -> Any:
    """The row of a run, with its state.

    Raises:
        NotFound: there is none.
    """
    known = isinstance(key, int) and 0 <= key <= _LARGEST_KEY
    query = sa.select(*rows.RUN_COLUMNS, state_of(now).label("state")).where(runs.c.id == key)
    row = connection.execute(query).first() if known else None
    if row is None:
        raise NotFound(f"there is no run {str(key)[:40]} in this database: look for it in the list of runs")
    return row


def _incidents(connection: sa.Connection, key: int) -> list[Any]:
    """The newest, and the open ones wherever they are: no number of newer ones may hide what waits for a person."""
    of_run = rows.INCIDENTS.where(incidents.c.run_id == key)
    in_order = (incidents.c.time.desc(), incidents.c.id.desc())
    newest = connection.execute(of_run.order_by(*in_order).limit(_INCIDENTS)).all()
    if len(newest) < _INCIDENTS:
        return list(newest)
    waiting = connection.execute(of_run.where(rows.is_open()).order_by(*in_order).limit(_INCIDENTS)).all()
    every = {row.id: row for row in (*newest, *waiting)}
    return sorted(every.values(), key=lambda row: (row.time, row.id), reverse=True)


def _grid(connection: sa.Connection, row: Any) -> Grid:
    """Of all ranks that there are, or that have left a record, and of all steps that were made."""
    query = sa.select(sa.func.max(ranks.c.rank), sa.func.max(ranks.c.last)).where(ranks.c.run_id == row.id)
    highest, last = connection.execute(query).one()
    world = max(row.world_size, -1 if highest is None else highest + 1)
    return grid(world, 0, max(row.step, -1 if last is None else last))


def _costs(connection: sa.Connection, key: int) -> tuple[CheckCost, ...]:
    found = {row._mapping["check"]: row for row in connection.execute(sa.select(costs).where(costs.c.run_id == key))}
    return tuple(
        CheckCost(row._mapping["check"], row.seconds, row.steps, row.seconds / row.wall if row.wall > 0 else None)
        for row in rows.in_order(found)
    )


def _checkpoints(connection: sa.Connection, key: int) -> tuple[CheckpointRow, ...]:
    query = (
        sa.select(checkpoints)
        .where(checkpoints.c.run_id == key)
        .order_by(checkpoints.c.step.desc())
        .limit(_CHECKPOINTS)
    )
    return tuple(
        CheckpointRow(
            row.step, row.saved, row.passed if isinstance(row.passed, Mapping) else {}, row.doubt, row.present
        )
        for row in connection.execute(query)
    )


def _places(key: int) -> sa.Select[Any]:
    return sa.select(stays).where(stays.c.run_id == key, stays.c.current).order_by(stays.c.rank).limit(_PLACES)


def _limits(connection: sa.Connection, key: int) -> tuple[str, ...]:
    found = connection.scalar(sa.select(runs.c.limits).where(runs.c.id == key))
    return tuple(str(one) for one in found) if isinstance(found, list) else ()


def _history(connection: sa.Connection, key: int, told: Sequence[IncidentRow]) -> tuple[AuditRow, ...]:
    changes = (
        sa.select(quarantine).where(quarantine.c.run_id == key).order_by(quarantine.c.number.desc()).limit(_HISTORY)
    )
    noted = (
        sa.select(actions, incidents.c.name.label("incident"))
        .join(incidents, incidents.c.id == actions.c.incident_id)
        .where(actions.c.run_id == key)
        .order_by(actions.c.time.desc())
        .limit(_HISTORY)
    )
    by_fleet = (
        sa.select(audit)
        .where(audit.c.incident.in_([one.id for one in told]))
        .order_by(audit.c.time.desc())
        .limit(_HISTORY)
    )
    found = [rows.quarantine_audit(row) for row in connection.execute(changes)]
    found += [rows.action_audit(row) for row in connection.execute(noted)]
    by_whom = meant(connection, [one.id for one in told])
    found += [
        rows.fleet_audit(row)
        for row in connection.execute(by_fleet)
        if row.controller_id in by_whom.get((key, row.incident), ())
    ]
    return rows.newest_first(found, _HISTORY)


def _problems(connection: sa.Connection, key: int) -> tuple[Problem, ...]:
    query = (
        sa.select(problems)
        .where(problems.c.run_id == key)
        .order_by(problems.c.time.desc(), problems.c.id)
        .limit(_PROBLEMS)
    )
    return tuple(Problem(row.path, row.text, row.time, row.lines) for row in connection.execute(query))
