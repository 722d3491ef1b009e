"""What a monitoring system is told of the runs that go on: the newest of each number, and never more runs than it can bear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.pages import RunRow
from bitwitness.store.queries.copies import counted_incident, counted_run, of_counted_run
from bitwitness.store.queries.rows import RUN_COLUMNS, checks_wanted, is_open, run_rows
from bitwitness.store.queries.states import STATES, state_of
from bitwitness.store.tables import costs, incidents, problems, runs, steps

GOING_ON = ("training", "silent", "unknown")
"""States of a run that has not ended, as far as known."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The last row of a run's steps: means over the steps that it is of, None where a number was not finite or is not known."""

    loss: float | None
    norm: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Going:
    """A run that goes on.

    Attributes:
        row: as in the list of runs.
        newest: its last steps; None before the first.
        every: check -> steps between two of it, by the policy.
        costs: check -> share of the wall time of the steps that it was measured over.
        open: status -> incidents that nobody has judged, and after which no person has acted.
    """

    row: RunRow
    newest: Newest | None
    every: Mapping[str, int]
    costs: Mapping[str, float]
    open: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Running:
    """All that is measured.

    Attributes:
        states: state -> how many runs.
        open: status -> open incidents over all runs.
        problems: files that could not be read, of all runs and of none.
        runs: those that go on: who needs a person first, then those that train, then the newest.
        left_out: how many more there are.
    """

    states: Mapping[str, int]
    open: Mapping[str, int]
    problems: int
    runs: tuple[Going, ...] = ()
    left_out: int = 0


def running(database: Database, *, most: int = 200, now: datetime | None = None) -> Running:
    """What is measured now.

    Args:
        database: where.
        most: runs that are told of one by one.
        now: the time; of this machine where it is None.

    Raises:
        StoreError: the database does not answer.
    """
    is_now = state_of(now)
    with database.read() as connection:
        each = sa.select(is_now.label("state")).select_from(runs).where(counted_run()).subquery()
        counted = connection.execute(sa.select(each.c.state, sa.func.count().label("n")).group_by(each.c.state))
        states = dict.fromkeys(STATES, 0) | {row.state: row.n for row in counted}
        first = sa.case((runs.c.open > 0, 0), (is_now == "training", 1), (is_now == "silent", 2), else_=3)
        goes_on = (is_now.in_(GOING_ON), counted_run(), runs.c.current, ~runs.c.missing)
        going = connection.scalar(sa.select(sa.func.count()).select_from(runs).where(*goes_on)) or 0
        chosen = (
            sa.select(*RUN_COLUMNS, is_now.label("state"))
            .where(*goes_on)
            .order_by(first, runs.c.started.desc(), runs.c.id.desc())
            .limit(most + 1)
        )
        found = connection.execute(chosen).all()[:most]
        keys = [row.id for row in found]
        newest, shares, open_of = _newest(connection, keys), _shares(connection, keys), _open(connection, keys)
        told = run_rows(connection, found)
        return Running(
            states=states,
            open=_open_in_all(connection),
            problems=connection.scalar(sa.select(sa.func.count()).select_from(problems).where(_told())) or 0,
            runs=tuple(
                Going(row, newest.get(row.key), _every(raw.policy), shares.get(row.key, {}), open_of.get(row.key, {}))
                for row, raw in zip(told, found, strict=True)
            ),
            left_out=max(0, going - len(found)),
        )


def _told() -> sa.ColumnElement[bool]:
    """A file that is reached by two paths is one that cannot be read."""
    return sa.or_(problems.c.run_id.is_(None), of_counted_run(problems.c.run_id))


def _newest(connection: sa.Connection, keys: list[int]) -> dict[int, Newest]:
    last = (
        sa.select(steps.c.run_id, sa.func.max(steps.c.first).label("first"))
        .where(steps.c.run_id.in_(keys))
        .group_by(steps.c.run_id)
        .subquery()
    )
    query = sa.select(steps).join(last, (steps.c.run_id == last.c.run_id) & (steps.c.first == last.c.first))
    return {row.run_id: Newest(row.loss, row.norm, row.seconds) for row in connection.execute(query)}


def _shares(connection: sa.Connection, keys: list[int]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in connection.execute(sa.select(costs).where(costs.c.run_id.in_(keys), costs.c.wall > 0)):
        found.setdefault(row.run_id, {})[row._mapping["check"]] = row.seconds / row.wall
    return found


def _open(connection: sa.Connection, keys: list[int]) -> dict[int, dict[str, int]]:
    query = (
        sa.select(incidents.c.run_id, incidents.c.status, sa.func.count().label("n"))
        .where(incidents.c.run_id.in_(keys), is_open())
        .group_by(incidents.c.run_id, incidents.c.status)
    )
    found: dict[int, dict[str, int]] = {}
    for row in connection.execute(query):
        found.setdefault(row.run_id, {})[row.status] = row.n
    return found


def _open_in_all(connection: sa.Connection) -> dict[str, int]:
    query = (
        sa.select(incidents.c.status, sa.func.count().label("n"))
        .where(is_open(), counted_incident())
        .group_by(incidents.c.status)
    )
    return {row.status: row.n for row in connection.execute(query)}


def _every(policy: object) -> dict[str, int]:
    """Steps between two of a check: what the files say, and nothing where they say no such number."""
    if not isinstance(policy, Mapping):
        return {}
    setting = {"numerics": 1, "replay": policy.get("audit_every"), "replicas": policy.get("check_every")}
    return {check: value for check in checks_wanted(policy) if isinstance(value := setting[check], int) and value > 0}
