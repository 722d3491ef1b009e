"""The page of a node, and that of a device: through all runs, under whatever rank and, for a device, whatever node."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.pages import AuditRow, IncidentRow, NodePage, ProposalRow, Stay
from bitwitness.store.queries import rows
from bitwitness.store.queries.fleet import node_rows
from bitwitness.store.queries.meaning import meant
from bitwitness.store.queries.paging import exactly
from bitwitness.store.queries.strikes import strikes_of
from bitwitness.store.tables import (
    audit,
    denied,
    incident_ranks,
    incidents,
    proposals,
    quarantine,
    runs,
    stays,
)

_STAYS, _INVOLVED, _DENIED, _PROPOSALS, _HISTORY = 500, 100, 100, 100, 200


def node_page(database: Database, name: str, *, now: datetime | None = None) -> NodePage:
    """A node by its name, through all runs.

    Raises:
        NotFound: nothing is known of it.
        StoreError: the database does not answer.
    """
    text = exactly(name)
    with database.read() as connection:
        where = incident_ranks.c.node == text
        page = NodePage(
            kind="node",
            name=text,
            row=next(iter(node_rows(connection, now, text)), None),
            stays=_stays(connection, stays.c.node == text),
            strikes=strikes_of(connection, where),
            involved=_involved(connection, where),
            denied=_denied(connection, _denies_node(text)),
            proposals=_proposals(connection, proposals.c.node == text),
            history=_history(connection, audit.c.node == text, _of_node(text)),
        )
    return _known(page)


def device_page(database: Database, device: str, *, now: datetime | None = None) -> NodePage:
    """A device by its identity, wherever it was.

    Raises:
        NotFound: nothing is known of it.
        StoreError: the database does not answer.
    """
    text = exactly(device)
    with database.read() as connection:
        stayed = _stays(connection, stays.c.device == text)
        strikes = strikes_of(connection, incident_ranks.c.device == text)
        named_in = list(dict.fromkeys(one.incident for one in strikes))
        by_whom = meant(connection, named_in)
        sure = {(who, one.incident) for one in strikes for who in by_whom.get((one.run, one.incident), ())}
        at = _now_at(connection, text)
        page = NodePage(
            kind="device",
            name=text,
            row=next(iter(node_rows(connection, now, at)), None) if at else None,
            stays=stayed,
            strikes=strikes,
            involved=_involved(connection, incident_ranks.c.device == text),
            denied=_denied(connection, sa.and_(denied.c.kind == "device", denied.c.name == text)),
            proposals=tuple(
                one
                for one in _proposals(connection, proposals.c.incident.in_(named_in))
                if text in one.devices and (one.controller, one.incident) in sure
            ),
            history=_history(connection, audit.c.incident.in_(named_in), quarantine.c.name == text, sure),
        )
    return _known(page)


def _known(page: NodePage) -> NodePage:
    if page.row or page.stays or page.strikes or page.involved or page.denied or page.proposals or page.history:
        return page
    raise NotFound(
        f"nothing is known of a {page.kind} {page.name[:80]!r}: no run was on it, and the fleet has no record of it"
    )


def _now_at(connection: sa.Connection, device: str) -> str:
    """The node on which a device was seen last, where it was still there at the end of that run."""
    query = (
        sa.select(stays.c.node)
        .where(stays.c.device == device, stays.c.current)
        .order_by(stays.c.last.desc(), stays.c.id.desc())
        .limit(1)
    )
    return connection.scalar(query) or ""


def _stays(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[Stay, ...]:
    query = (
        sa.select(stays, runs.c.name.label("run_name"), runs.c.path.label("run_path"))
        .join(runs, runs.c.id == stays.c.run_id)
        .where(where)
        .order_by(stays.c.last.desc(), stays.c.id.desc())
        .limit(_STAYS)
    )
    return tuple(
        Stay(row.device, row.node, row.run_id, row.run_name, row.rank, row.first, row.last, row.run_path)
        for row in connection.execute(query)
    )


def _involved(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[IncidentRow, ...]:
    keys = sa.select(incident_ranks.c.incident_id).where(incident_ranks.c.role == "candidate", where)
    found = connection.execute(
        rows.INCIDENTS.where(incidents.c.status == "unattributed", incidents.c.id.in_(keys))
        .order_by(incidents.c.time.desc(), incidents.c.id.desc())
        .limit(_INVOLVED)
    ).all()
    return rows.incident_rows(connection, found)


def _denies_node(name: str) -> sa.ColumnElement[bool]:
    """Quarantines that deny the node, a device that was on it then, or one that is on it now."""
    here = sa.select(stays.c.device).where(stays.c.node == name, stays.c.current)
    return sa.or_(
        sa.and_(denied.c.kind == "node", denied.c.name == name),
        sa.and_(denied.c.kind == "device", sa.or_(denied.c.node == name, denied.c.name.in_(here))),
    )


def _denied(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[str, ...]:
    query = (
        sa.select(denied, runs.c.name.label("run_name"), runs.c.path.label("run_path"))
        .join(runs, runs.c.id == denied.c.run_id)
        .where(where)
        .order_by(denied.c.since.desc(), denied.c.name)
        .limit(_DENIED)
    )
    return tuple(_sentence(row) for row in connection.execute(query))


def _sentence(row: Any) -> str:
    moved = f" (then on {row.node})" if row.kind == "device" and row.node else ""
    because = f": {row.reason}" if row.reason else ""
    incident = f" (incident {row.incident})" if row.incident else ""
    return f"run {row.run_name} denies {row.kind} {row._mapping['name']}{moved} since {row.since}{because}{incident}"


def _proposals(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[ProposalRow, ...]:
    query = rows.PROPOSALS.where(where).order_by(proposals.c.updated.desc(), proposals.c.key.desc()).limit(_PROPOSALS)
    return tuple(rows.proposal_row(row) for row in connection.execute(query))


def _of_node(name: str) -> sa.ColumnElement[bool]:
    return sa.or_(quarantine.c.node == name, quarantine.c.name == name)


def _history(
    connection: sa.Connection,
    by_fleet: sa.ColumnElement[bool],
    by_runs: sa.ColumnElement[bool],
    sure: Container[tuple[int, str]] | None = None,
) -> tuple[AuditRow, ...]:
    acts = sa.select(audit).where(by_fleet).order_by(audit.c.time.desc()).limit(_HISTORY)
    changes = sa.select(quarantine).where(by_runs).order_by(quarantine.c.time.desc()).limit(_HISTORY)
    found = [
        rows.fleet_audit(row)
        for row in connection.execute(acts)
        if sure is None or (row.controller_id, row.incident) in sure
    ]
    found += [rows.quarantine_audit(row) for row in connection.execute(changes)]
    return rows.newest_first(found, _HISTORY)
