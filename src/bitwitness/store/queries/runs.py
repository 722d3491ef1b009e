"""The first page: all runs, and what waits for a person."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, get_args

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.pages import IncidentStatus, RunsPage
from bitwitness.store.queries.copies import counted_incident, counted_run
from bitwitness.store.queries.paging import part, searched
from bitwitness.store.queries.rows import INCIDENTS, RUN_COLUMNS, incident_rows, is_open, run_rows
from bitwitness.store.queries.searching import found_by_name, runs_that_match
from bitwitness.store.queries.states import STATES, state_of
from bitwitness.store.tables import incidents, runs

_NEWEST = 20
"""Open incidents of each status beside the list: many that name somebody must not hide those that name nobody."""


def runs_page(
    database: Database,
    *,
    query: str = "",
    state: str = "",
    page: int = 1,
    size: int = 50,
    now: datetime | None = None,
) -> RunsPage:
    """All runs, those that need a person first, then those that train, then the newest.

    Args:
        database: where.
        query: what name, path, id or job of a run holds, or the name of a node or device that it was on, or the id of an incident of
            it; as it is, in upper or lower case.
        state: only runs of this state; of one that does not exist there are none.
        page: which part, from 1; of one that does not exist, the one nearest to it.
        size: rows of a part, at most 500.
        now: the time; of this machine where it is None.

    Raises:
        StoreError: the database does not answer.
    """
    text = searched(query)
    is_now = state_of(now)
    wanted: list[sa.ColumnElement[bool]] = [counted_run(), *([is_now == searched(state)] if state else [])]
    with database.read() as connection:
        wanted += [runs.c.id.in_(runs_that_match(connection, text))] if text else []
        total = connection.scalar(sa.select(sa.func.count()).select_from(runs).where(*wanted)) or 0
        shown = part(total, page, size)
        rank = sa.case((runs.c.open > 0, 0), (is_now.in_(("training", "silent")), 1), else_=2)
        # Sorted by key first, so that only the rows that are shown are read whole.
        keys = (
            sa.select(runs.c.id, is_now.label("state"))
            .where(*wanted)
            .order_by(rank, runs.c.started.desc(), runs.c.id.desc())
            .limit(shown.size)
            .offset(shown.offset)
        )
        states = {row.id: row.state for row in connection.execute(keys)}
        found = sa.select(*RUN_COLUMNS, is_now.label("state")).where(runs.c.id.in_(list(states)))
        rows = {row.id: row for row in connection.execute(found)}
        open_now = _open_incidents(connection)
        return RunsPage(
            runs=run_rows(connection, [rows[key] for key in states]),
            total=total,
            page=shown.page,
            pages=shown.pages,
            states=_counts(connection, is_now),
            attributed=open_now.get("attributed", 0),
            unattributed=open_now.get("unattributed", 0),
            query=text,
            incidents=incident_rows(connection, _newest(connection)),
            found=found_by_name(connection, text) if text else (),
        )


def _counts(connection: sa.Connection, is_now: sa.ColumnElement[str]) -> Mapping[str, int]:
    each = sa.select(is_now.label("state")).select_from(runs).where(counted_run()).subquery()
    query = sa.select(each.c.state, sa.func.count().label("runs")).group_by(each.c.state)
    found = {row.state: row.runs for row in connection.execute(query)}
    return {state: found.get(state, 0) for state in STATES}


def _open_incidents(connection: sa.Connection) -> dict[str, Any]:
    """How many of each status are open; drills and false alarms are judged."""
    query = (
        sa.select(incidents.c.status, sa.func.count().label("incidents"))
        .where(is_open(), counted_incident())
        .group_by(incidents.c.status)
    )
    return {row.status: row.incidents for row in connection.execute(query)}


def _newest(connection: sa.Connection) -> list[Any]:
    """The newest open ones of each status, newest first."""
    found: list[Any] = []
    for status in get_args(IncidentStatus):
        query = INCIDENTS.where(is_open(), counted_incident(), incidents.c.status == status)
        found += connection.execute(query.order_by(incidents.c.time.desc(), incidents.c.id.desc()).limit(_NEWEST)).all()
    return sorted(found, key=lambda row: (row.time, row.id), reverse=True)
