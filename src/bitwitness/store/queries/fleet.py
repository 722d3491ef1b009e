"""All nodes, and what is to be done about them.

What a node is called follows from what the fleet last wrote of it, then from who was named and not answered. A node that was
only a candidate of an unattributed incident is in none of the bad states because of it; one of which nobody knows anything is
`unknown`, and only one on which a run trains now is said to be in service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, get_args

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.pages import FleetPage, NodeRow, NodeState, ProposalRow
from bitwitness.store.queries.copies import counted_run, of_counted_run
from bitwitness.store.queries.node_states import Facts, state_of_node
from bitwitness.store.queries.paging import part, searched
from bitwitness.store.queries.rows import PROPOSALS, fleet_audit, proposal_row
from bitwitness.store.queries.states import state_of
from bitwitness.store.queries.strikes import concerns, denied_where, held, involved
from bitwitness.store.tables import (
    audit,
    controllers,
    denied,
    incident_ranks,
    incidents,
    nodes,
    proposals,
    runs,
    stays,
)

_LIVE = ("proposed", "acting", "failed", "held", "unclear")
"""Where a proposal stands that is not at its end."""
_OUT = ("done", "already out")
_ORDER: tuple[NodeState, ...] = (
    "waits for approval",
    "unclear",
    "held",
    "acting",
    "suspected",
    "out",
    "unknown",
    "in service",
)
_PROPOSALS, _HISTORY, _CONTROLLERS, _TODO = 200, 100, 50, 50
_NODES = 50_000
"""Nodes of a fleet that are looked at; nobody has more."""


def fleet_page(
    database: Database,
    *,
    query: str = "",
    state: str = "",
    page: int = 1,
    size: int = 100,
    now: datetime | None = None,
) -> FleetPage:
    """All nodes, those about which something is to be done first.

    Args:
        database: where.
        query: what the name of a node holds, as it is, in upper or lower case.
        state: only nodes of this state; of one that does not exist there are none.
        page: which part, from 1; of one that does not exist, the one nearest to it.
        size: rows of a part, at most 500.
        now: the time; of this machine where it is None.

    Raises:
        StoreError: the database does not answer.
    """
    text = searched(query)
    with database.read() as connection:
        every = node_rows(connection, now)
        found = [one for one in every if text.casefold() in one.name.casefold() and state in ("", one.state)]
        shown = part(len(found), page, size)
        watching = connection.execute(
            sa.select(controllers).order_by(controllers.c.path, controllers.c.id).limit(_CONTROLLERS)
        ).all()
        recent = sa.select(audit).order_by(audit.c.time.desc(), audit.c.number.desc()).limit(_HISTORY)
        return FleetPage(
            states={name: sum(one.state == name for one in every) for name in get_args(NodeState)},
            nodes=tuple(found[shown.offset : shown.offset + shown.size]),
            total=len(found),
            page=shown.page,
            pages=shown.pages,
            query=text,
            waiting=_proposals(connection, proposals.c.waits),
            acting=_proposals(
                connection,
                sa.and_(
                    ~proposals.c.waits,
                    sa.or_(sa.and_(~proposals.c.final, proposals.c.status.in_(_LIVE)), _left_to_a_person()),
                ),
            ),
            controllers=tuple(_controller(row) for row in watching),
            todo=tuple(dict.fromkeys(str(one) for row in watching for one in row.todo or ()))[:_TODO],
            history=tuple(fleet_audit(row) for row in connection.execute(recent)),
        )


def _left_to_a_person() -> sa.ColumnElement[bool]:
    """What the controller looks at no more, and nobody has answered: protected, or the node of somebody else, and not out since."""
    later = proposals.alias()
    out = sa.select(later.c.key).where(
        later.c.node == proposals.c.node, later.c.status.in_(_OUT), later.c.updated > proposals.c.updated
    )
    return sa.and_(proposals.c.final, proposals.c.status == "held", ~out.exists())


def _proposals(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[ProposalRow, ...]:
    query = (
        PROPOSALS.where(where, proposals.c.act != "")
        .order_by(proposals.c.updated.desc(), proposals.c.key.desc())
        .limit(_PROPOSALS)
    )
    return tuple(proposal_row(row) for row in connection.execute(query))


def _controller(row: Any) -> Mapping[str, str]:
    names = ("path", "mode", "cluster", "life", "text", "last_round", "seen")
    return {"id": str(row.id), **{name: str(getattr(row, name)) for name in names}}


# Nodes ----------------------------------------------------------------------------------------------------------------


def node_rows(connection: sa.Connection, now: datetime | None, only: str | None = None) -> Sequence[NodeRow]:
    """All nodes of which anything is known, or only this one, in the order in which a person should look at them."""
    facts: dict[str, Facts] = {}

    def of(name: str) -> Facts:
        return facts.setdefault(name, Facts(name))

    for row in connection.execute(_known(nodes.c.name, only, sa.select(nodes))):
        known = of(row._mapping["name"])
        known.devices, known.seen = row.devices, row.seen
    for row in connection.execute(_newest_proposals(only)):
        of(row.node).proposals.append(row)
    for row in connection.execute(_cleared(only)):
        of(row.node).returned = row.time
    for one in held(connection, only):
        of(one.now).held.append(one)
        if one.then != one.now:
            of(one.then).left.append(one)
    for row in connection.execute(_involvements(only)):
        of(row.node).involved = row.incidents
    for row in connection.execute(_denials(only)):
        of(row.node).denied = row.runs
    for row in connection.execute(_training(only, now)):
        of(row.node).training = row.runs
    made = [_row(one) for name, one in facts.items() if name and only in (None, name)]
    return sorted(made, key=lambda one: (_ORDER.index(one.state), -one.strikes, -one.involved, one.name))


def _row(one: Facts) -> NodeRow:
    state, text = state_of_node(one)
    return NodeRow(one.name, state, text, one.devices, one.strikes, one.involved, one.denied, one.seen)


def _known(column: sa.ColumnElement[str], only: str | None, query: sa.Select[Any]) -> sa.Select[Any]:
    return (query if only is None else query.where(column == only)).limit(_NODES)


def _newest_proposals(only: str | None) -> sa.Select[Any]:
    """Of each node the proposal that changed last, and those that are not at their end."""
    place = sa.func.row_number().over(
        partition_by=proposals.c.node, order_by=(proposals.c.updated.desc(), proposals.c.key.desc())
    )
    names = ("node", "act", "action", "status", "hold", "why", "reason", "waits", "final", "updated")
    each = sa.select(*(proposals.c[name] for name in names), place.label("place")).where(proposals.c.node != "")
    if only is not None:
        each = each.where(proposals.c.node == only)
    newest = each.subquery()
    # Of those that are left to a person, also such as were before the node was taken out: the newest is what it is then.
    live = sa.or_(
        sa.and_(~newest.c.final, newest.c.status.in_(_LIVE)), sa.and_(newest.c.final, newest.c.status == "held")
    )
    query = sa.select(newest).where(sa.or_(newest.c.place == 1, newest.c.waits, live))
    return query.order_by(newest.c.node, newest.c.place).limit(_NODES)


def _cleared(only: str | None) -> sa.Select[Any]:
    query = sa.select(audit.c.node, sa.func.max(audit.c.time).label("time")).where(audit.c.what == "cleared")
    return _known(audit.c.node, only, query).group_by(audit.c.node)


def _involvements(only: str | None) -> sa.Select[Any]:
    many = sa.func.count(sa.distinct(incident_ranks.c.incident_id)).label("incidents")
    query = (
        sa.select(incident_ranks.c.node, many)
        .join(incidents, incidents.c.id == incident_ranks.c.incident_id)
        .where(involved())
    )
    return _known(incident_ranks.c.node, only, query).group_by(incident_ranks.c.node)


def _denials(only: str | None) -> sa.Select[Any]:
    where: sa.ColumnElement[Any] = denied_where()
    query = sa.select(where.label("node"), sa.func.count(sa.distinct(denied.c.run_id)).label("runs")).where(
        of_counted_run(denied.c.run_id)
    )
    if only is not None:
        query = query.where(sa.or_(denied.c.name == only, concerns(denied.c.name, denied.c.node, only)))
    return _known(where, only, query).group_by(where)


def _training(only: str | None, now: datetime | None) -> sa.Select[Any]:
    query = (
        sa.select(stays.c.node, sa.func.count(sa.distinct(stays.c.run_id)).label("runs"))
        .join(runs, runs.c.id == stays.c.run_id)
        .where(stays.c.current, counted_run(), state_of(now) == "training")
    )
    return _known(stays.c.node, only, query).group_by(stays.c.node)
