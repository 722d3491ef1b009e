"""Who was named, and which of that still counts: the one rule, for a device, for a node, and for all nodes at once.

What counts is what was found by chance, and not answered since. A drill, and what a person has called a false alarm, say nothing
of the device; where the fleet has an account of an incident, a hand-clear there decides, else one in the quarantine of the run.

It counts against the device, wherever that is now: a node answers for the devices that are in it, whatever it was called when they were
named, and for none that was seen elsewhere since. A device that has no identity of its own stays with the name of its node.

Of an incident that was not imported here, what a controller of the fleet has on record stands for it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import StrikeRow
from bitwitness.store.queries.copies import counted_incident
from bitwitness.store.tables import denied, incident_ranks, incidents, namings, quarantine, runs, stays

_MOST = 200
_NAMINGS = 50_000
_ANONYMOUS = "/cpu-"
"""In what a device is called that has no identity of its own: `node/cpu-0`."""


@dataclass(frozen=True, slots=True)
class Held:
    """Strikes that count against one device.

    Attributes:
        device: it, or "".
        then: the node that it was in when it was named.
        now: the node that it was seen in last.
        incidents: that name it.
    """

    device: str
    then: str
    now: str
    incidents: frozenset[tuple[int, str]]


# Where a device is ----------------------------------------------------------------------------------------------------


def place_of(device: sa.ColumnElement[str], then: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """The node in which a device was seen last; the one of that time where it has no identity of its own, or nobody has seen it since."""
    where = (
        sa.select(stays.c.node)
        .where(stays.c.device == device, stays.c.node != "")
        .order_by(stays.c.last.desc(), stays.c.id.desc())
        .limit(1)
        .correlate_except(stays)
        .scalar_subquery()
    )
    known = sa.and_(device != "", ~device.contains(_ANONYMOUS, autoescape=True))
    return sa.case((known, sa.func.coalesce(where, then)), else_=then)


def concerns(device: sa.ColumnElement[str], then: sa.ColumnElement[str], node: str) -> sa.ColumnElement[bool]:
    """Whether what names a device can concern a node: it was there then, or some time."""
    return sa.or_(then == node, device.in_(sa.select(stays.c.device).where(stays.c.node == node, stays.c.device != "")))


def denied_where() -> sa.ColumnElement[str]:
    """The node that a row of `denied` keeps out now: itself, or that in which the device is."""
    return sa.case((denied.c.kind == "node", denied.c.name), else_=place_of(denied.c.name, denied.c.node))


def held(connection: sa.Connection, node: str | None = None) -> list[Held]:
    """What counts, by device: of all nodes, or only what concerns one of them, whether the device is in it still or has left."""
    found: dict[tuple[str, str, str], set[tuple[int, str]]] = defaultdict(set)
    here = place_of(incident_ranks.c.device, incident_ranks.c.node).label("now")
    columns = (incident_ranks.c.device, incident_ranks.c.node, here, incident_ranks.c.run_id, incidents.c.name)
    query = (
        sa.select(*columns)
        .join(incidents, incidents.c.id == incident_ranks.c.incident_id)
        .where(named(), counts())
        .limit(_NAMINGS)
    )
    if node is not None:
        query = query.where(concerns(incident_ranks.c.device, incident_ranks.c.node, node))
    for device, then, now, run, name in connection.execute(query):
        found[device, then, now].add((run, name))
    where = [] if node is None else [concerns(namings.c.device, namings.c.node, node)]
    for row in connection.execute(_elsewhere(*where, namings.c.cleared == "").limit(_NAMINGS)):
        found[row.device, row.node, row.now].add((0, row.incident))
    every = [Held(*who, frozenset(which)) for who, which in sorted(found.items())]
    return every if node is None else [one for one in every if node in (one.then, one.now)]


def _elsewhere(*where: sa.ColumnElement[bool]) -> sa.Select[Any]:
    """Namings of the fleet whose incident was not imported here."""
    imported = sa.select(incidents.c.id).where(incidents.c.name == namings.c.incident).correlate(namings).exists()
    now = place_of(namings.c.device, namings.c.node).label("now")
    columns = (namings.c.incident, namings.c.device, namings.c.node, namings.c.cleared, now)
    return sa.select(*columns).where(~imported, *where).distinct()


# What counts ----------------------------------------------------------------------------------------------------------


def named() -> sa.ColumnElement[bool]:
    """Whether a row of `incident_ranks`, with its incident, names somebody: of an unattributed incident none does."""
    return sa.and_(incident_ranks.c.role == "named", incidents.c.status == "attributed", counted_incident())


def involved() -> sa.ColumnElement[bool]:
    """Whether it is one without blame, in an incident that is no drill and no false alarm."""
    return sa.and_(
        incident_ranks.c.role == "candidate",
        incidents.c.status == "unattributed",
        counted_incident(),
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


def strikes_of(
    connection: sa.Connection, where: sa.ColumnElement[bool], not_imported: sa.ColumnElement[bool]
) -> tuple[StrikeRow, ...]:
    """The namings of a device or a node, newest first, also those that do not count; last those of incidents that were not imported.

    Args:
        connection: to the database.
        where: which rows of `incident_ranks`.
        not_imported: which rows of `namings`.
    """
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
            place_of(incident_ranks.c.device, incident_ranks.c.node).label("now"),
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
    others = connection.execute(_elsewhere(not_imported).order_by(namings.c.incident.desc()).limit(_MOST))
    return (*(_strike(row, words) for row in found), *(_by_fleet(row) for row in others))


def _by_fleet(row: Any) -> StrikeRow:
    return StrikeRow(
        time="",
        incident=row.incident,
        run=0,
        run_name="",
        rank=-1,
        device=row.device,
        node=row.node,
        persistence="unknown",
        counts=row.cleared == "",
        cleared=f"cleared in the fleet at {row.cleared}" if row.cleared else "",
        judgement="",
        now=row.now,
    )


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
        now=row.now,
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
