"""What is looked for on the first page: names of runs, and of whatever was in them.

Names of nodes and devices stand in `stays`, a row a rank and run: too many to be read for a search. So all nodes are looked through,
then all devices, which an index has in order, so that one is stepped to from the one before; and from those that match to the runs
that were on them.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import Found
from bitwitness.store.queries.copies import counted_incident, counted_run
from bitwitness.store.queries.paging import contains
from bitwitness.store.tables import incident_ranks, incidents, nodes, runs, stays

_RUNS = 20_000
_MOST = 10
"""Of each kind that are listed by name."""


def runs_that_match(connection: sa.Connection, text: str) -> list[int]:
    """Keys of the runs whose name, path, id or job holds this text, or the name of a node or device that they were on, or the id of an
    incident of theirs; of very many the newest.
    """
    was_on = sa.select(stays.c.run_id).where(
        sa.or_(stays.c.node.in_(_nodes(text)), stays.c.device.in_(_devices(text).where(_device.c.name != "")))
    )
    # An incident may be of ranks whose place is on record with it alone.
    then = sa.select(incident_ranks.c.run_id).where(
        sa.or_(incident_ranks.c.node == text, incident_ranks.c.device == text)
    )
    hit = sa.select(incidents.c.run_id).where(contains(text, incidents.c.name))
    wanted = sa.or_(
        contains(text, runs.c.name, runs.c.path, runs.c.run, runs.c.job),
        runs.c.id.in_(was_on),
        runs.c.id.in_(then),
        runs.c.id.in_(hit),
    )
    wanted = sa.and_(wanted, counted_run())
    return list(connection.scalars(sa.select(runs.c.id).where(wanted).order_by(runs.c.id.desc()).limit(_RUNS)))


def found_by_name(connection: sa.Connection, text: str) -> tuple[Found, ...]:
    """Nodes, devices and incidents of this name, or whose name holds it: those that are called so first, and a few of each kind."""
    hits = (
        sa.select(incidents.c.name, incidents.c.run_id)
        .where(contains(text, incidents.c.name), counted_incident())
        .order_by(incidents.c.name != text, incidents.c.time.desc())
        .limit(_MOST)
    )
    return (
        *(Found("node", one) for one in connection.scalars(_first(_nodes(text), nodes.c.name, text))),
        *(Found("device", one) for one in connection.scalars(_first(_devices(text), _device.c.name, text))),
        *(Found("incident", row._mapping["name"], row.run_id) for row in connection.execute(hits)),
    )


def _first(query: sa.Select[Any], name: sa.ColumnElement[str], text: str) -> sa.Select[Any]:
    return query.order_by(name != text, name).limit(_MOST)


def _nodes(text: str) -> sa.Select[Any]:
    return sa.select(nodes.c.name).where(contains(text, nodes.c.name))


def _each_device() -> sa.CTE:
    """All devices, each once: the next is the least that is greater, which the index has at hand."""
    least = sa.func.min(stays.c.device)
    every = sa.select(least.label("name")).cte("each_device", recursive=True)
    after = sa.select(least).where(stays.c.device > every.c.name).correlate(every).scalar_subquery()
    return every.union_all(sa.select(after).where(every.c.name.is_not(None)))


_device = _each_device()


def _devices(text: str) -> sa.Select[Any]:
    return sa.select(_device.c.name).where(_device.c.name.is_not(None), contains(text, _device.c.name))
