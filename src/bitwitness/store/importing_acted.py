"""Because of which incidents a person has acted through a controller of the fleet: an answer is no less one for not being in the run.

Whoever approves, rejects or returns a node does so in the state of a controller, and a run has no line of it. Both are read by
themselves and in any order, so this is asked when either has something new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from bitwitness.store.queries.meaning import meant
from bitwitness.store.tables import audit, incident_ranks, incidents

MACHINES = ("", "controller")
"""Who is no person."""
CLEARED = "cleared"
"""What a controller notes when a person has returned a node."""
_BY_PERSON = audit.c.who.not_in(MACHINES)


def by_fleet(connection: sa.Connection, run: int) -> set[int]:
    """Keys of the incidents of a run because of which a person has acted: about the incident itself, or by a return of its node."""
    known = {row.name: row for row in connection.execute(sa.select(incidents).where(incidents.c.run_id == run))}
    return _about(connection, run, known) | _returned(connection, run, known)


def _about(connection: sa.Connection, run: int, known: Mapping[str, Any]) -> set[int]:
    of_run = sa.select(incidents.c.name).where(incidents.c.run_id == run)
    lines = sa.select(audit.c.incident, audit.c.controller_id).where(_BY_PERSON, audit.c.incident.in_(of_run))
    said = connection.execute(lines.distinct()).all()
    means = meant(connection, {row.incident for row in said}) if said else {}
    return {known[row.incident].id for row in said if row.controller_id in means.get((run, row.incident), ())}


def _returned(connection: sa.Connection, run: int, known: Mapping[str, Any]) -> set[int]:
    named = sa.select(incident_ranks.c.incident_id, incident_ranks.c.node).where(
        incident_ranks.c.run_id == run, incident_ranks.c.role == "named"
    )
    nodes: dict[int, set[str]] = defaultdict(set)
    for key, node in connection.execute(named):
        nodes[key].add(node)
    if not nodes:
        return set()
    of_run = sa.select(incident_ranks.c.node).where(incident_ranks.c.run_id == run, incident_ranks.c.role == "named")
    lines = sa.select(audit.c.node, sa.func.max(audit.c.time).label("time")).where(
        _BY_PERSON, audit.c.what == CLEARED, audit.c.node.in_(of_run)
    )
    last = {row.node: row.time for row in connection.execute(lines.group_by(audit.c.node))}
    return {
        row.id
        for row in known.values()
        # Of one that names several, all must be answered.
        if nodes.get(row.id) and all(row.time < last.get(node, "") for node in nodes[row.id])
    }


def concerned(connection: sa.Connection, entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """The runs of which new lines of an audit trail answer something."""
    people = [one for one in entries if one["who"] not in MACHINES]
    named = _values(one["incident"] for one in people)
    nodes = _values(one["node"] for one in people if one["what"] == CLEARED)
    found: set[int] = set()
    if named:
        found |= set(connection.scalars(sa.select(incidents.c.run_id).where(incidents.c.name.in_(named)).distinct()))
    if nodes:
        where = sa.and_(incident_ranks.c.node.in_(nodes), incident_ranks.c.role == "named")
        found |= set(connection.scalars(sa.select(incident_ranks.c.run_id).where(where).distinct()))
    return sorted(found)


def _values(every: Iterable[str]) -> set[str]:
    return {one for one in every if one}
