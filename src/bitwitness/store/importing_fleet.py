"""The states of the fleet's controllers into the database: who proposed, approved and did what, across all of them.

A state is a database of its own that is only ever read here. Its audit trail counts up and is never changed, so it is read on
from the last number; everything else is small, and what has changed of it is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.fleet.kept import Book, Kept
from bitwitness.fleet.kept_answers import Questions
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.fleet.view import report
from bitwitness.store.database import Database, changed, upsert
from bitwitness.store.importing_acted import concerned
from bitwitness.store.importing_sums import answered
from bitwitness.store.importing_values import digest, moment, name, plain, text
from bitwitness.store.tables import audit, controllers, namings, picked, proposals

_AT_ONCE = 2000
_ABOUT = ("leader", "host", "pid", "started", "policy", "owner", "command", "every")
"""What a controller says of itself that a page may show; nothing else of `about` leaves it."""
_OVER = ("done", "already out", "cleared", "nothing", "expired")


def import_fleet(database: Database, folder: Path, now: str) -> tuple[int, bool]:
    """Read a controller's state: how many lines of its audit trail were new, and whether anything has changed.

    Raises:
        RunFilesError, ConfigurationError: it cannot be read; it says what.
        StoreError: the database does not take it.
    """
    with State(folder, create=False, check=False, write=False) as state:
        about = state.about()
        seen = _seen(folder, about, state, now)
        kept = Book(state).proposals()
        asked = {one.proposal: one.name for one in Questions(state).pending() if not one.said}
        means = state.read("SELECT id, path FROM incidents")
        named = state.read("SELECT incident, device, node, record, cleared FROM namings ORDER BY incident, record")
        key, after, wrote = database.change(lambda connection: _write(connection, seen, kept, asked, named, means))
        lines = 0
        while rows := state.read(f"{_AUDIT} WHERE number > ? ORDER BY number LIMIT ?", (after, _AT_ONCE)):
            entries = [_entry(key, row) for row in rows]
            after = entries[-1]["number"]
            database.change(partial(_add, key=key, entries=entries, after=after))
            lines += len(entries)
    return lines, wrote or lines > 0


_AUDIT = "SELECT number, time, who, what, incident, node, text, record FROM audit"


def unreadable(database: Database, folder: Path, why: str, now: str) -> bool:
    """Note that a state cannot be read; what was known of it stays. Whether that is new."""

    def note(connection: sa.Connection) -> bool:
        place = digest(str(folder))
        old = connection.execute(sa.select(controllers.c.text).where(controllers.c.place == place)).scalar()
        said = text(why, 1000)
        row = {"place": place, "path": text(str(folder)), "life": "unreadable", "text": said, "seen": now}
        upsert(connection, controllers, [row], keys=("place",), update=("life", "text", "seen"))
        if old != said:
            changed(connection)
        return old != said

    return database.change(note)


def _seen(folder: Path, about: dict[str, str], state: State, now: str) -> dict[str, Any]:
    found = report(state)
    return {
        "place": digest(str(folder)),
        "path": text(str(folder)),
        "mode": text(about.get("mode"), 50),
        "cluster": name(about.get("cluster")),
        "life": found.life,
        "text": text(found.text, 1000),
        "last_round": moment(found.last_round),
        "about": {one: text(about[one], 500) for one in _ABOUT if one in about},
        "todo": [text(one, 2000) for one in found.todo],
        "seen": now,
        "created": text(about.get("created"), 100),
    }


def _write(
    connection: sa.Connection,
    seen: dict[str, Any],
    kept: Sequence[Kept],
    asked: Mapping[int, str],
    named: Sequence[tuple[Any, ...]],
    means: Sequence[tuple[Any, ...]],
) -> tuple[int, int, bool]:
    """The controller, its proposals and its namings; its key, the last number of its audit trail, whether anything changed."""
    here = controllers.c.place == seen["place"]
    chosen = sa.select(controllers).where(here).with_for_update(key_share=True)
    old = connection.execute(chosen).mappings().one_or_none()
    if old is not None and old["created"] not in ("", seen["created"]):
        # Another state lies there now. What the one before did stays true, under a place that nothing else has.
        gone = {"place": digest(f"{seen['path']}\0{old['created']}"), "life": "stopped"}
        gone["text"] = "another state lies at its place now"
        connection.execute(sa.update(controllers).where(here).values(**gone))
        old = None
    upsert(connection, controllers, [seen], keys=("place",))
    row = connection.execute(chosen).mappings().one()
    key = int(row["id"])
    moved = old is None or any(old[one] != row[one] for one in ("mode", "cluster", "life", "todo", "about"))
    moved |= _write_proposals(connection, key, kept, asked)
    moved |= _write_picked(connection, key, means)
    moved |= _write_namings(connection, key, named)
    if moved:
        changed(connection)
    return key, int(row["audit"]), moved


def _write_proposals(connection: sa.Connection, key: int, kept: Sequence[Kept], asked: Mapping[int, str]) -> bool:
    known = {row.key: row for row in connection.execute(sa.select(proposals).where(proposals.c.controller_id == key))}
    rows = [_proposal(key, one, asked.get(one.key, "")) for one in kept]
    new = [
        row
        for row in rows
        if row["key"] not in known or any(getattr(known[row["key"]], each) != value for each, value in row.items())
    ]
    upsert(connection, proposals, new)
    return bool(new)


def _proposal(key: int, one: Kept, question: str) -> dict[str, Any]:
    said = one.proposal
    return {
        "controller_id": key,
        "key": one.key,
        "incident": text(said.incident, 100),
        "node": name(said.node),
        "devices": [name(device) for device in said.devices],
        "action": said.action,
        "confidence": said.confidence,
        "reason": text(said.reason),
        "act": said.act or "",
        "status": one.status,
        "hold": text(one.hold, 100),
        "why": text(one.why),
        "made": moment(one.made.isoformat()),
        "updated": moment(one.updated),
        "signals": [_sentence(each) for each in said.signals[:100]],
        "final": one.final,
        "waits": one.hold == "approval" and not one.final and one.status not in _OVER,
        "question": text(question, 100),
    }


def _sentence(signal: Signal) -> str:
    where = " ".join(filter(None, (signal.code, signal.device and f"on {signal.device}")))
    when = f" at {signal.time}" if signal.time else ""
    often = f", {signal.count} times" if signal.count > 1 else ""
    return text(f"{where}{when}{often} ({signal.source}, {signal.weight}): {signal.reason}", 1000)


def _write_picked(connection: sa.Connection, key: int, means: Sequence[tuple[Any, ...]]) -> bool:
    known = {
        row.incident: row.path for row in connection.execute(sa.select(picked).where(picked.c.controller_id == key))
    }
    rows = {text(incident, 100): text(os.path.realpath(path)) for incident, path in means}
    new = [
        {"controller_id": key, "incident": one, "path": path} for one, path in rows.items() if known.get(one) != path
    ]
    upsert(connection, picked, new)
    return bool(new)


def _write_namings(connection: sa.Connection, key: int, named: Sequence[tuple[Any, ...]]) -> bool:
    rows = [
        {
            "controller_id": key,
            "number": number,
            "incident": text(incident, 100),
            "device": name(device),
            "node": name(node),
            "cleared": moment(cleared),
        }
        for number, (incident, device, node, _, cleared) in enumerate(named)
    ]
    chosen = sa.select(namings).where(namings.c.controller_id == key).order_by(namings.c.number)
    known = [dict(row) for row in connection.execute(chosen).mappings()]
    if known == rows:
        return False
    connection.execute(sa.delete(namings).where(namings.c.controller_id == key))
    upsert(connection, namings, rows, update=())
    return True


def _entry(key: int, row: tuple[Any, ...]) -> dict[str, Any]:
    number, time, who, what, incident, node, said, record = row
    try:
        more = plain(json.loads(record))
    except (TypeError, ValueError, RecursionError):
        more = {}
    return {
        "controller_id": key,
        "number": int(number),
        "time": moment(time),
        "who": name(who),
        "what": text(what, 100),
        "incident": text(incident, 100),
        "node": name(node),
        "text": text(said),
        "record": more,
    }


def _add(connection: sa.Connection, key: int, entries: list[dict[str, Any]], after: int) -> None:
    upsert(connection, audit, entries, update=())
    here = sa.and_(controllers.c.id == key, controllers.c.audit < after)
    connection.execute(sa.update(controllers).where(here).values(audit=after))
    for run in concerned(connection, entries):
        answered(connection, run)
    changed(connection)
