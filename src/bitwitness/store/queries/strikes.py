"""Who was named, and which of that still counts: the one rule, for a device, for a node, and for all nodes at once.

What counts is what was found by chance, and not answered since. A drill, and what a person has called a false alarm, say nothing
of the device; where the fleet has an account of an incident, a hand-clear there decides, else one in the quarantine of the run.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import StrikeRow
from bitwitness.store.tables import incident_ranks, incidents, namings, quarantine, runs

_MOST = 200


def named() -> sa.ColumnElement[bool]:
    """Whether a row of `incident_ranks`, with its incident, names somebody: of an unattributed incident none does."""
    return sa.and_(incident_ranks.c.role == "named", incidents.c.status == "attributed")


def involved() -> sa.ColumnElement[bool]:
    """Whether it is one without blame, in an incident that is no drill and no false alarm."""
    return sa.and_(
        incident_ranks.c.role == "candidate",
        incidents.c.status == "unattributed",
        incidents.c.judgement.not_in(("drill", "false alarm")),
    )


def counts() -> sa.ColumnElement[bool]:
    """Whether a row of `incident_ranks` that names somebody, with its incident, still counts."""
    fleet = sa.select(namings.c.number).where(*_same_naming()).correlate(incidents, incident_ranks)
    kept = fleet.where(namings.c.cleared == "")
    return sa.and_(
        incidents.c.judgement.not_in(("drill", "false alarm")),
        sa.case((sa.exists(fleet), sa.exists(kept)), else_=~sa.exists(_clears())),
    )


def _same_naming() -> tuple[sa.ColumnElement[bool], ...]:
    return namings.c.incident == incidents.c.name, namings.c.device == incident_ranks.c.device


def _clears() -> sa.Select[Any]:
    """Hand-clears of the device in the quarantine of the run, since. Clearing a node clears no device: it is the same anywhere.

    *Since* is by the place in the log, which needs no clocks that agree, where the incident stands in it.
    """
    entry = quarantine.alias("entry")
    noted = (
        sa.select(sa.func.min(entry.c.number))
        .where(
            entry.c.run_id == incident_ranks.c.run_id,
            entry.c.incident == incidents.c.name,
            entry.c.name == incident_ranks.c.device,
        )
        .correlate(incidents, incident_ranks)
        .scalar_subquery()
    )
    since = sa.case((noted.is_not(None), quarantine.c.number > noted), else_=quarantine.c.time > incidents.c.time)
    return (
        sa.select(quarantine.c.number)
        .where(
            quarantine.c.name == incident_ranks.c.device,
            quarantine.c.run_id == incident_ranks.c.run_id,
            quarantine.c.what == "clear",
            since,
        )
        .correlate(incidents, incident_ranks)
    )


def strikes_of(connection: sa.Connection, where: sa.ColumnElement[bool]) -> tuple[StrikeRow, ...]:
    """The namings of a device or a node, newest first, also those that do not count."""
    cleared = (
        sa.select(sa.func.max(namings.c.cleared)).where(*_same_naming()).correlate(incidents, incident_ranks)
    ).scalar_subquery()
    first = _clears().with_only_columns(sa.func.min(quarantine.c.number)).scalar_subquery()
    query = (
        sa.select(
            incidents,
            runs.c.name.label("run_name"),
            runs.c.path.label("run_path"),
            incident_ranks.c.rank,
            incident_ranks.c.device,
            incident_ranks.c.node,
            incident_ranks.c.persistence.label("how"),
            counts().label("counts"),
            cleared.label("cleared"),
            first.label("clear"),
        )
        .join(incidents, incidents.c.id == incident_ranks.c.incident_id)
        .join(runs, runs.c.id == incidents.c.run_id)
        .where(named(), where)
        .order_by(incidents.c.time.desc(), incidents.c.id.desc(), incident_ranks.c.rank)
        .limit(_MOST)
    )
    found = connection.execute(query).all()
    words = _words(connection, found)
    return tuple(_strike(row, words) for row in found)


def _strike(row: Any, words: dict[tuple[int, int], str]) -> StrikeRow:
    return StrikeRow(
        time=row.time,
        incident=row._mapping["name"],
        run=row.run_id,
        run_name=row.run_name,
        run_path=row.run_path,
        rank=row.rank,
        device=row.device,
        node=row.node,
        persistence=row.how or row.persistence,
        counts=bool(row.counts),
        cleared="" if row.counts else _why_not(row, words),
        judgement=row.judgement,
    )


def _why_not(row: Any, words: dict[tuple[int, int], str]) -> str:
    if row.judgement == "drill" and not row.judged:
        return "a drill: the fault was injected on purpose"
    if row.judgement in ("drill", "false alarm"):
        why = f": {row.judged_why}" if row.judged_why else ""
        return f"called a {row.judgement} by {row.judged_by or 'somebody'} at {row.judged_at or 'some time'}{why}"
    if row.cleared:
        return f"cleared in the fleet at {row.cleared}"
    return words.get((row.run_id, row.clear), "cleared by hand")


def _words(connection: sa.Connection, found: Any) -> dict[tuple[int, int], str]:
    """Of the clears in quarantines, who did it and why."""
    wanted = {(row.run_id, row.clear) for row in found if row.clear is not None}
    if not wanted:
        return {}
    query = sa.select(quarantine).where(sa.tuple_(quarantine.c.run_id, quarantine.c.number).in_(sorted(wanted)))
    return {
        (row.run_id, row.number): f"cleared by {row.who} at {row.time}{f': {row.reason}' if row.reason else ''}"
        for row in connection.execute(query)
    }
