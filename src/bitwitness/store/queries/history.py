"""Who did what, of all sources at once, newest first: for those who have to answer for it."""

from __future__ import annotations

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.pages import AuditRow
from bitwitness.store.queries import rows
from bitwitness.store.queries.copies import counted_incident, of_counted_run
from bitwitness.store.queries.paging import LARGEST, searched
from bitwitness.store.tables import actions, audit, incidents, quarantine

_DEEPEST = 100_000
"""Rows that may be passed over; an export has all of them."""


def history(
    database: Database, *, node: str = "", incident: str = "", who: str = "", page: int = 1, size: int = 100
) -> tuple[AuditRow, ...]:
    """What was done, newest first: by the fleet, in quarantines, and about incidents.

    Args:
        database: where.
        node: only what is about it, where one is given.
        incident: likewise.
        who: only what they did.
        page: which part, from 1; after the last there is nothing.
        size: rows of a part, at most 500.

    Raises:
        StoreError: the database does not answer.
    """
    size = min(max(1, size), LARGEST)
    offset = min((max(1, page) - 1) * size, _DEEPEST)
    by_fleet, changes, noted = sa.select(audit), _changes(), _actions()
    if node := searched(node):
        by_fleet = by_fleet.where(audit.c.node == node)
        changes = changes.where(sa.or_(quarantine.c.node == node, quarantine.c.name == node))
        noted = noted.where(sa.false())  # they are about an incident, not about a node
    if incident := searched(incident):
        by_fleet = by_fleet.where(audit.c.incident == incident)
        changes = changes.where(quarantine.c.incident == incident)
        noted = noted.where(incidents.c.name == incident)
    if who := searched(who):
        by_fleet, changes = by_fleet.where(audit.c.who == who), changes.where(quarantine.c.who == who)
        noted = noted.where(actions.c.who == who)
    most = offset + size
    with database.read() as connection:
        found = [
            rows.fleet_audit(row) for row in connection.execute(by_fleet.order_by(audit.c.time.desc()).limit(most))
        ]
        found += [
            rows.quarantine_audit(row)
            for row in connection.execute(changes.order_by(quarantine.c.time.desc()).limit(most))
        ]
        found += [
            rows.action_audit(row) for row in connection.execute(noted.order_by(actions.c.time.desc()).limit(most))
        ]
    return rows.newest_first(found, most)[offset:]


def _changes() -> sa.Select[tuple[object, ...]]:
    return sa.select(quarantine).where(of_counted_run(quarantine.c.run_id))


def _actions() -> sa.Select[tuple[object, ...]]:
    joined = sa.select(actions, incidents.c.name.label("incident")).join(
        incidents, incidents.c.id == actions.c.incident_id
    )
    return joined.where(counted_incident())
