"""Which run a directory is, and where its ranks are: from run.json.

A run is a path and the id in run.json, which is kept over restarts. Where another run lies at the same path now, the one before
stays as it was imported. Where ranks were is kept from every file that says so, because run.json knows only the last start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import ConfigurationError
from bitwitness.store.database import upsert
from bitwitness.store.importing_values import digest, moment, name, plain, text, whole
from bitwitness.store.tables import runs, stays
from bitwitness.topology import Placement, Topology

LARGEST_RANK = 1 << 24


def key_of(connection: sa.Connection, path: Path, run: str | None) -> int:
    """The key of the run at a path, made where it is new. `run`: its id; None where run.json cannot be read."""
    place = digest(str(path))
    here = sa.select(runs.c.id, runs.c.run, runs.c.current).where(runs.c.place == place).with_for_update(key_share=True)
    known = {row.run: row for row in connection.execute(here)}
    current = next((row for row in known.values() if row.current), None)
    if run is None:
        if current is not None:
            return int(current.id)
        run = ""
    if run and run not in known and current is not None and not current.run:
        # It was imported before its id could be read, and is the same.
        connection.execute(sa.update(runs).where(runs.c.id == current.id).values(run=run))
        return int(current.id)
    if run not in known:
        row = {"place": place, "run": run, "path": text(str(path)), "name": name(path.name)}
        upsert(connection, runs, [row], keys=("place", "run"), update=())
        known = {row.run: row for row in connection.execute(here)}
    key = int(known[run].id)
    if not known[run].current:
        connection.execute(sa.update(runs).where(runs.c.place == place).values(current=runs.c.id == key))
    return key


def write_about(connection: sa.Connection, run: int, record: Mapping[str, Any]) -> None:
    """Take over what run.json says of a run.

    Raises:
        ConfigurationError, KeyError, TypeError, ValueError: its placement is none; everything else was taken over.
    """
    limits, policy = record.get("limits"), record.get("policy")
    versions = [f"{each} {text(record.get(each), 50)}" for each in ("bitwitness", "torch") if record.get(each)]
    values = {
        "job": name(record.get("scheduler_job")),
        "started": _first(connection, run, moment(record.get("started"))),
        "world_size": whole(record.get("world_size"), most=LARGEST_RANK) or 0,
        "generation": whole(record.get("generation")) or 0,
        "policy": plain(policy) if isinstance(policy, dict) else {},
        "limits": [text(one, 500) for one in limits[:100] if isinstance(one, str)] if isinstance(limits, list) else [],
        "versions": ", ".join(versions),
    }
    connection.execute(sa.update(runs).where(runs.c.id == run).values(**values))
    places = Topology.from_json(record["placement"]).placements
    write_stays(connection, run, places, moment(record.get("started")), current=True)
    nodes = len({place.node for place in places})
    connection.execute(sa.update(runs).where(runs.c.id == run).values(nodes=nodes))


def _first(connection: sa.Connection, run: int, time: str) -> str:
    """When the first guard was made: run.json knows the newest only."""
    before = connection.execute(sa.select(runs.c.started).where(runs.c.id == run)).scalar()
    return min(filter(None, (before, time)), default="")


def to_placements(value: Any) -> tuple[Placement, ...]:
    """A placement as files have it; nothing where it is none."""
    try:
        return Topology.from_json(value).placements
    except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError):
        return ()


def write_stays(
    connection: sa.Connection, run: int, places: tuple[Placement, ...], time: str, *, current: bool = False
) -> None:
    """Note that ranks were at these places at a time; `current`: that they are there now.

    One row a rank and place: a rank that left and came back has been there from the first time to the last.
    """
    known = {
        (row.rank, row.node, row.device): row
        for row in connection.execute(sa.select(stays).where(stays.c.run_id == run))
    }
    rows = []
    for rank, place in enumerate(places[:LARGEST_RANK]):
        at = (rank, name(place.node), name(place.device))
        if not at[1]:
            continue
        old = known.pop(at, None)
        first, last = (old.first, old.last) if old is not None else ("", "")
        row = {
            "run_id": run,
            **dict(zip(("rank", "node", "device"), at, strict=True)),
            "slot": whole(place.slot, most=LARGEST_RANK) or 0,
            "model": text(place.model, 200),
            "pod": name(place.pod),
            "first": min(filter(None, (first, time)), default=""),
            "last": max(last, time),
            "current": current or (old is not None and old.current),
        }
        if old is None or any(getattr(old, each) != value for each, value in row.items()):
            rows.append(row)
    if current:
        left = [{"key": old.id} for old in known.values() if old.current]
        if left:
            connection.execute(sa.update(stays).where(stays.c.id == sa.bindparam("key")).values(current=False), left)
    upsert(connection, stays, rows, keys=("run_id", "rank", "node", "device"))
