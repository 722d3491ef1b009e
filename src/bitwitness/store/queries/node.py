"""The page of a node, and that of a device: through all runs, under whatever rank and, for a device, whatever node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.pages import AuditRow, IncidentRow, NodePage, ProposalRow, Stay, StrikeRow
from bitwitness.store.queries import rows
from bitwitness.store.queries.copies import counted_incident, counted_run, of_counted_run
from bitwitness.store.queries.fleet import node_rows
from bitwitness.store.queries.meaning import meant
from bitwitness.store.queries.paging import exactly
from bitwitness.store.queries.strikes import concerns, denied_where, place_of, strikes_of
from bitwitness.store.tables import (
    audit,
    denied,
    incident_ranks,
    incidents,
    namings,
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
            strikes=strikes_of(connection, _of(incident_ranks, text), _of(namings, text)),
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
        strikes = strikes_of(connection, incident_ranks.c.device == text, namings.c.device == text)
        named_in = {one.incident for one in strikes}
        proposed = _proposals(connection, sa.or_(proposals.c.incident.in_(named_in), _lists(text)))
        proposed = tuple(one for one in proposed if text in one.devices)
        means = _Means(connection, named_in | {one.incident for one in proposed})
        proposed = tuple(one for one in proposed if means(one.controller, one.incident))
        at = _now_at(connection, text, strikes)
        page = NodePage(
            kind="device",
            name=text,
            row=next(iter(node_rows(connection, now, at)), None) if at else None,
            stays=_stays(connection, stays.c.device == text),
            strikes=strikes,
            involved=_involved(connection, incident_ranks.c.device == text),
            denied=_denied(connection, sa.and_(denied.c.kind == "device", denied.c.name == text)),
            proposals=proposed,
            history=_history(connection, audit.c.incident.in_(means.incidents), quarantine.c.name == text, means),
        )
    return _known(page)


class _Means:
    """Whether what a controller says of an incident is about this device: where it means the incident that names it, or nobody has imported
    any of that id.
    """

    def __init__(self, connection: sa.Connection, names: set[str]) -> None:
        self.incidents = names
        imported = sa.select(incidents.c.name).where(incidents.c.name.in_(names))
        self._imported = set(connection.scalars(imported))
        self._sure = {(who, name) for (_, name), by in meant(connection, names).items() for who in by}

    def __call__(self, controller: int, incident: str) -> bool:
        return (controller, incident) in self._sure or incident in self.incidents - self._imported


def _lists(device: str) -> sa.ColumnElement[bool]:
    """Whether a proposal has it among its devices, as they are written."""
    return sa.type_coerce(proposals.c.devices, sa.Text).contains(json.dumps(device), autoescape=True)


def _known(page: NodePage) -> NodePage:
    if page.row or page.stays or page.strikes or page.involved or page.denied or page.proposals or page.history:
        return page
    raise NotFound(
        f"there is nothing about a {page.kind} {page.name[:80]!r} in this database: no run that was imported was on it, and no controller of "
        "the fleet whose state was imported has proposed or done anything about it"
    )


def _of(table: sa.Table, node: str) -> sa.ColumnElement[bool]:
    """Whether a row that names a device concerns this node: the device was in it then, or is in it now."""
    here = sa.or_(table.c.node == node, place_of(table.c.device, table.c.node) == node)
    return sa.and_(concerns(table.c.device, table.c.node, node), here)


def _now_at(connection: sa.Connection, device: str, strikes: Sequence[StrikeRow]) -> str:
    """The node in which a device was seen last: by a run, else where it was when it was named."""
    query = (
        sa.select(stays.c.node)
        .where(stays.c.device == device, stays.c.node != "")
        .order_by(stays.c.last.desc(), stays.c.id.desc())
        .limit(1)
    )
    return connection.scalar(query) or next((one.now for one in strikes if one.now), "")


def _stays(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[Stay, ...]:
    query = (
        sa.select(stays, runs.c.name.label("run_name"), runs.c.path.label("run_path"))
        .join(runs, runs.c.id == stays.c.run_id)
        .where(where, counted_run())
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
        rows.INCIDENTS.where(incidents.c.status == "unattributed", counted_incident(), incidents.c.id.in_(keys))
        .order_by(incidents.c.time.desc(), incidents.c.id.desc())
        .limit(_INVOLVED)
    ).all()
    return rows.incident_rows(connection, found)


def _denies_node(name: str) -> sa.ColumnElement[bool]:
    """Quarantines that deny the node, or a device that is in it now."""
    concerned = sa.or_(denied.c.name == name, concerns(denied.c.name, denied.c.node, name))
    return sa.and_(concerned, denied_where() == name)


def _denied(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[str, ...]:
    query = (
        sa.select(denied, runs.c.name.label("run_name"), runs.c.path.label("run_path"))
        .join(runs, runs.c.id == denied.c.run_id)
        .where(where, counted_run())
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
    means: _Means | None = None,
) -> tuple[AuditRow, ...]:
    acts = sa.select(audit).where(by_fleet).order_by(audit.c.time.desc()).limit(_HISTORY)
    changes = (
        sa.select(quarantine)
        .where(by_runs, of_counted_run(quarantine.c.run_id))
        .order_by(quarantine.c.time.desc())
        .limit(_HISTORY)
    )
    found = [
        rows.fleet_audit(row)
        for row in connection.execute(acts)
        if means is None or means(row.controller_id, row.incident)
    ]
    found += [rows.quarantine_audit(row) for row in connection.execute(changes)]
    return rows.newest_first(found, _HISTORY)
