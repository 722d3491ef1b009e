"""Tables for a spreadsheet or a notebook, streamed: of ten million rows no more than a few thousand are in memory at once.

Each part is asked for by the key of the last row before it, in a transaction of its own. A reader that is slow, or goes away,
holds nothing: one transaction over an hour's download would keep the database from tidying up for as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.queries.copies import counted_drill, counted_incident, counted_run
from bitwitness.store.queries.drills import outcome_of
from bitwitness.store.queries.fleet import node_rows
from bitwitness.store.queries.run import find_run
from bitwitness.store.queries.states import state_of
from bitwitness.store.tables import audit, checkpoints, drills, incident_ranks, incidents, ledger, observations, runs

_CHUNK = 2_000
_BETWEEN = "\n"
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Export:
    """A table that can be had.

    Attributes:
        columns: name -> what is in it.
        table: they are of this one, joined with its runs where `by_run`.
        keys: in whose order, unique together; an index has them.
        by_run: whether it can be had of one run.
    """

    columns: dict[str, sa.ColumnElement[Any]]
    table: sa.FromClause
    keys: tuple[sa.Column[Any], ...]
    by_run: sa.Column[Any] | None = None


def _named(table: sa.Table, *names: str) -> dict[str, sa.ColumnElement[Any]]:
    return {name: table.c[name] for name in names}


def _ranks(role: str, column: str) -> sa.ColumnElement[Any]:
    """Ranks, nodes or devices of an incident in one cell, in any order; of an unattributed one, nobody is named."""
    each = sa.cast(incident_ranks.c[column], sa.Text)
    query = sa.select(sa.func.aggregate_strings(each, _BETWEEN)).where(
        incident_ranks.c.incident_id == incidents.c.id,
        incident_ranks.c.role == role,
        incidents.c.status == ("attributed" if role == "named" else incidents.c.status),
    )
    return query.correlate(incidents).scalar_subquery().label(f"{role}_{column}")


_RUN = {"run": runs.c.name, "run_id": runs.c.run}
_NOW_OF_RUN: sa.ColumnElement[Any] = sa.literal("")
_NOW_OF_DRILL: sa.ColumnElement[Any] = sa.literal("")
"""In place of what is said of the moment in which a table is asked for."""
_TABLES: dict[str, _Export] = {
    "runs": _Export(
        {
            "key": runs.c.id,
            **_named(runs, "name", "path", "run", "job"),
            "state": _NOW_OF_RUN,
            **_named(runs, "started", "seen", "world_size", "nodes", "step", "checkpoint", "cost"),
            **_named(runs, "attributed", "unattributed", "drills", "false_alarms", "open", "problems", "observations"),
            **_named(runs, "outcome", "exit_code", "reason"),
        },
        runs,
        (runs.c.id,),
        runs.c.id,
    ),
    "incidents": _Export(
        {
            **_RUN,
            "incident": incidents.c.name,
            **_named(incidents, "time", "step", "check", "kind", "status", "persistence"),
            "named_ranks": _ranks("named", "rank"),
            "named_nodes": _ranks("named", "node"),
            "named_devices": _ranks("named", "device"),
            "candidate_ranks": _ranks("candidate", "rank"),
            **_named(incidents, "window_first", "window_last", "judgement", "judged_by", "judged_at", "judged_why"),
            **_named(incidents, "headline", "reason", "path"),
        },
        incidents,
        (incidents.c.id,),
        incidents.c.run_id,
    ),
    "observations": _Export(
        {
            **_RUN,
            **_named(observations, "rank", "time", "check", "step", "place", "value", "repeats", "owner", "micro"),
            **_named(observations, "error", "detail"),
        },
        observations,
        (observations.c.run_id, observations.c.rank, observations.c.at),
        observations.c.run_id,
    ),
    "ledger": _Export(
        {**_RUN, **_named(ledger, "check", "rank", "first", "last", "outcome", "reason", "detail", "start")},
        ledger,
        (ledger.c.run_id, ledger.c.check, ledger.c.rank, ledger.c.first),
        ledger.c.run_id,
    ),
    "checkpoints": _Export(
        {**_RUN, **_named(checkpoints, "step", "saved", "passed", "failed", "doubt", "present")},
        checkpoints,
        (checkpoints.c.run_id, checkpoints.c.step),
        checkpoints.c.run_id,
    ),
    "audit": _Export(
        {
            "controller": audit.c.controller_id,
            **_named(audit, "number", "time", "who", "what", "incident", "node", "text"),
        },
        audit,
        (audit.c.controller_id, audit.c.number),
    ),
    "drills": _Export(
        {
            **_RUN,
            **_named(drills, "time", "rank", "node", "step", "last", "hits"),
            "fault": drills.c.spec,
            "outcome": _NOW_OF_DRILL,
            **_named(drills, "late"),
        },
        drills,
        (drills.c.id,),
        drills.c.run_id,
    ),
}
_COUNTED = {incidents: counted_incident, drills: counted_drill}
"""Of all runs together, each is told once; the others by the run that they are of."""
EXPORTS = (*_TABLES, "nodes")
"""What can be had."""
_NODES = ("name", "state", "state_text", "devices", "strikes", "involved", "quarantined", "seen")


def export(database: Database, name: str, *, run: int | None = None) -> tuple[Sequence[str], Iterator[Row]]:
    """The columns of a table, and its rows, which are read as they are asked for; values are texts, numbers or None.

    Args:
        database: where.
        name: one of `EXPORTS`.
        run: key of the only run whose rows are wanted; None: all.

    Raises:
        NotFound: there is no such table, no such run, or the table is not of runs; before any row is read.
        StoreError: the database does not answer, also midway.
    """
    if name not in EXPORTS:
        raise NotFound(f"there is no table {name[:40]!r}: there are {', '.join(EXPORTS)}")
    if run is not None:
        if name == "nodes" or _TABLES[name].by_run is None:
            raise NotFound(f"the table {name} is not of one run: ask for it without one")
        with database.read() as connection:
            find_run(connection, run, None)
    if name == "nodes":
        with database.read() as connection:
            found = node_rows(connection, None)
        return _NODES, (tuple(getattr(one, column) for column in _NODES) for one in found)
    return tuple(_TABLES[name].columns), _rows(database, _TABLES[name], run)


def _rows(database: Database, one: _Export, run: int | None) -> Iterator[Row]:
    moment = {_NOW_OF_RUN: state_of(None), _NOW_OF_DRILL: outcome_of(None)}
    columns = [moment.get(each, each).label(name) for name, each in one.columns.items()]
    query = sa.select(*columns, *(key.label(f"key_{place}") for place, key in enumerate(one.keys)))
    if one.by_run is not None and one.table is not runs:
        query = query.select_from(one.table).join(runs, runs.c.id == one.by_run)
    if run is not None and one.by_run is not None:
        query = query.where(one.by_run == run)
    elif one.table in _COUNTED:
        query = query.where(_COUNTED[one.table]())
    elif one.by_run is not None:
        query = query.where(counted_run())
    query, many, after = query.order_by(*one.keys).limit(_CHUNK), len(columns), None
    while True:
        part = query if after is None else query.where(sa.tuple_(*one.keys) > sa.tuple_(*after))
        with database.read() as connection:
            found = [tuple(row) for row in connection.execute(part)]
        for row in found:
            yield tuple(_plain(name, value) for name, value in zip(one.columns, row, strict=False))
        if len(found) < _CHUNK:
            return
        after = found[-1][many:]


def _plain(name: str, value: Any) -> Any:
    """What a cell can hold: JSON as text, and of several ranks or names a list in order."""
    if name.startswith(("named_", "candidate_")):
        return "; ".join(sorted(set(str(value or "").split(_BETWEEN)), key=lambda each: (len(each), each)))
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else value
