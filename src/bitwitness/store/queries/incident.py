"""The page of one incident, and which runs have one of this name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.pages import AuditRow, IncidentPage, Place, Seen
from bitwitness.store.queries import rows
from bitwitness.store.queries.copies import counted_incident
from bitwitness.store.queries.meaning import meant
from bitwitness.store.queries.paging import searched
from bitwitness.store.queries.run import find_run
from bitwitness.store.tables import (
    actions,
    audit,
    checkpoints,
    evidence,
    incident_ranks,
    incidents,
    marks,
    proposals,
    quarantine,
)

_RUNS, _HISTORY, _PROPOSALS, _SEEN, _PLACES = 100, 500, 100, 5_000, 512


def find_incident(database: Database, name: str) -> list[int]:
    """Keys of the runs that have an incident of this name: one, unless two runs have incidents of one name; newest first.

    Raises:
        NotFound: none has.
        StoreError: the database does not answer.
    """
    text = searched(name)
    query = (
        sa.select(incidents.c.run_id)
        .where(incidents.c.name == text, counted_incident())
        .order_by(incidents.c.run_id.desc())
        .limit(_RUNS)
    )
    with database.read() as connection:
        found = list(connection.scalars(query))
    if not found:
        raise NotFound(f"there is no incident {text[:60]!r} in this database: it may not have been imported yet")
    return found


def incident_page(database: Database, run_key: int, incident_id: str, *, now: datetime | None = None) -> IncidentPage:
    """One incident of a run.

    Raises:
        NotFound: there is no such run, or it has no such incident.
        StoreError: the database does not answer.
    """
    name = searched(incident_id)
    with database.read() as connection:
        run = find_run(connection, run_key, now)
        row = connection.execute(rows.INCIDENTS.where(incidents.c.run_id == run_key, incidents.c.name == name)).first()
        if row is None:
            raise NotFound(f"run {run.name!r:.80} has no incident {name[:60]!r} in this database")
        by_whom = meant(connection, [name]).get((run_key, name), frozenset())
        seen = connection.execute(sa.select(evidence).where(evidence.c.incident_id == row.id)).first()
        return IncidentPage(
            incident=rows.incident_rows(connection, [row])[0],
            run=rows.run_rows(connection, [run])[0],
            observations=_observations(None if seen is None else seen.observations),
            placement=_placement(connection, row.id, None if seen is None else seen.placement),
            world_size=row.world_size or run.world_size,
            nodes=row.nodes,
            checkpoint=_safe_checkpoint(connection, row),
            resumed=_resumed(connection, row),
            proposals=tuple(rows.proposal_row(one) for one in connection.execute(_proposals(name, by_whom))),
            history=_history(connection, row, by_whom),
            notes=_texts(row.notes),
            files={str(one): size for one, size in _mapping(row.files).items() if isinstance(size, int)},
            path=row.path,
            pruned=row.pruned,
            on_detection=row.on_detection,
        )


def _observations(found: object) -> tuple[Seen, ...]:
    each = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    return tuple(_seen(one) for one in each[:_SEEN])


def _seen(one: Mapping[str, Any]) -> Seen:
    """An observation as in incident.json, where empty fields are left out."""
    return Seen(
        check=str(one.get("check", "")),
        step=_number(one.get("step")) or 0,
        rank=_number(one.get("rank")) or 0,
        place=str(one.get("place", "")),
        value=str(one.get("value", "")),
        repeats=_texts(one.get("repeats")),
        owner=_number(one.get("owner")),
        micro=_number(one.get("micro")),
        error=str(one.get("error", "")),
        detail=_mapping(one.get("detail")),
    )


def _placement(connection: sa.Connection, key: int, found: object) -> tuple[Place, ...]:
    """Of the ranks that were involved, where they were then; after pruning, what is left of it."""
    query = (
        sa.select(incident_ranks)
        .where(incident_ranks.c.incident_id == key)
        .order_by(incident_ranks.c.rank)
        .limit(_PLACES)
    )
    places = {one.rank: Place(one.rank, one.node, one.device, 0, "", "") for one in connection.execute(query)}
    for one in found if isinstance(found, list) else ():
        rank = _number(one.get("rank")) if isinstance(one, Mapping) else None
        if rank is not None and (rank in places or len(places) < _PLACES):
            texts = {field: str(one.get(field) or "") for field in ("node", "device", "model", "pod")}
            places[rank] = Place(
                rank, texts["node"], texts["device"], _number(one.get("slot")) or 0, texts["model"], texts["pod"]
            )
    return tuple(places[rank] for rank in sorted(places))


def _safe_checkpoint(connection: sa.Connection, row: Any) -> int:
    """Of those that are still kept, the newest that is free of doubt and holds no update after the one at which the check had passed
    last. There may have been newer ones then, which were removed since.
    """
    query = sa.select(sa.func.max(checkpoints.c.step)).where(
        checkpoints.c.run_id == row.run_id,
        checkpoints.c.step <= row.window_first + 1,
        checkpoints.c.present,
        checkpoints.c.doubt == "",
    )
    found = connection.scalar(query)
    return -1 if found is None else int(found)


def _resumed(connection: sa.Connection, row: Any) -> int:
    """The step of the checkpoint with which the job went on after this incident, as rank 0's journal says; -1 where it does not.

    It is the first start since, if no other incident lies between, and if it went back: a job that was started anew for another
    reason says nothing of this incident.
    """
    if not row.time:
        return -1
    since = sa.select(marks.c.step, marks.c.time).where(
        marks.c.run_id == row.run_id, marks.c.kind == "resume", marks.c.time > row.time
    )
    first = connection.execute(since.order_by(marks.c.time, marks.c.id).limit(1)).first()
    if first is None or not 0 <= first.step <= row.step:
        return -1
    between = sa.select(incidents.c.id).where(
        incidents.c.run_id == row.run_id, incidents.c.time > row.time, incidents.c.time < first.time
    )
    return -1 if connection.execute(between.limit(1)).first() is not None else int(first.step)


def _proposals(name: str, by_whom: frozenset[int]) -> sa.Select[Any]:
    return (
        rows.PROPOSALS.where(proposals.c.incident == name, proposals.c.controller_id.in_(by_whom))
        .order_by(proposals.c.updated.desc(), proposals.c.key.desc())
        .limit(_PROPOSALS)
    )


def _history(connection: sa.Connection, row: Any, by_whom: frozenset[int]) -> tuple[AuditRow, ...]:
    """Oldest first: what was done in the run, what its quarantine says, what the fleet did."""
    name = row._mapping["name"]
    noted = (
        sa.select(actions, sa.literal(name).label("incident"))
        .where(actions.c.incident_id == row.id)
        .order_by(actions.c.at)
        .limit(_HISTORY)
    )
    changes = (
        sa.select(quarantine)
        .where(quarantine.c.run_id == row.run_id, quarantine.c.incident == name)
        .order_by(quarantine.c.number)
        .limit(_HISTORY)
    )
    here = sa.and_(audit.c.incident == name, audit.c.controller_id.in_(by_whom))
    by_fleet = sa.select(audit).where(here).order_by(audit.c.time.desc()).limit(_HISTORY)
    found = [rows.action_audit(one) for one in connection.execute(noted)]
    found += [rows.quarantine_audit(one) for one in connection.execute(changes)]
    found += [rows.fleet_audit(one) for one in connection.execute(by_fleet)]
    return tuple(sorted(found, key=lambda one: one.time))


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list | tuple) else ()
