"""Rows for tests of the pages: what an importer would have written, without the files, so that a test says only what it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from bitwitness.store import tables
from bitwitness.store.database import Database

Who = tuple[int, str, str]
"""Rank, node and device."""
Range = tuple[int, int, str]
"""First and last step, and the outcome."""
TIME = "2026-11-29T12:00:00.000Z"


class Filling:
    """Writes rows into an empty database; keys count up from 1."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._keys = dict.fromkeys(("runs", "incidents", "controllers"), 0)

    def add(self, table: sa.Table, *rows: dict[str, Any]) -> None:
        """Any rows of a table; each of them may have other columns."""
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            alike.setdefault(tuple(row), []).append(row)
        with self.database.write() as connection:
            for each in alike.values():
                connection.execute(sa.insert(table), each)

    def _key(self, table: str) -> int:
        self._keys[table] += 1
        return self._keys[table]

    def run(self, name: str = "job", **columns: Any) -> int:
        """A run that nobody has seen growing."""
        key = self._key("runs")
        row = {
            "id": key,
            "place": str(key),
            "path": f"/runs/{key}/{name}",
            "name": name,
            "run": f"id-{key}",
            "current": True,
        }
        self.add(tables.runs, row | {"started": TIME, "world_size": 4, "step": 9} | columns)
        return key

    def ledger(self, run: int, check: str, rank: int, *ranges: Range) -> None:
        """Ranges of one rank."""
        self.ledgers(run, check, {rank: ranges})

    def ledgers(self, run: int, check: str, told: Mapping[int, Iterable[Range]]) -> None:
        """Ranges of several ranks."""
        rows = [
            {"run_id": run, "check": check, "rank": rank, "first": first, "last": last, "outcome": outcome}
            | {"reason": "" if outcome == "passed" else f"why {outcome}"}
            for rank, ranges in told.items()
            for first, last, outcome in ranges
        ]
        self.add(tables.ledger, *rows)

    def incident(
        self, run: int, name: str, *, named: Iterable[Who] = (), candidates: Iterable[Who] = (), **columns: Any
    ) -> int:
        """An incident, attributed where somebody is named unless `status` says otherwise."""
        key, named = self._key("incidents"), list(named)
        row = {
            "id": key,
            "run_id": run,
            "name": name,
            "path": f"/runs/{run}/incidents/{name}",
            "time": TIME,
            "check": "replay",
        }
        row |= {
            "kind": "compute",
            "status": "attributed" if named else "unattributed",
            "headline": f"headline of {name}",
        }
        self.add(tables.incidents, row | columns)
        for role, who in (("named", named), ("candidate", candidates)):
            ranks = [{"role": role, "rank": rank, "node": node, "device": device} for rank, node, device in who]
            self.add(tables.incident_ranks, *({"incident_id": key, "run_id": run} | each for each in ranks))
        return key

    def stays(self, run: int, *places: Who, **columns: Any) -> None:
        """Where ranks were, and last so."""
        rows = [{"run_id": run, "rank": rank, "node": node, "device": device} for rank, node, device in places]
        self.add(tables.stays, *({"first": TIME, "last": TIME, "current": True} | row | columns for row in rows))

    def node(self, *names: str) -> None:
        """Nodes that ranks were on."""
        self.add(tables.nodes, *({"name": name, "devices": 1, "seen": TIME} for name in names))

    def controller(self, **columns: Any) -> int:
        """A controller of the fleet."""
        key = self._key("controllers")
        self.add(
            tables.controllers, {"id": key, "place": str(key), "path": f"/fleet/{key}", "life": "running"} | columns
        )
        return key

    def proposal(self, controller: int, key: int, node: str, **columns: Any) -> None:
        """A proposal to drain a node."""
        row = {
            "controller_id": controller,
            "key": key,
            "incident": f"i-{key}",
            "node": node,
            "action": "drain",
            "act": "drain",
        }
        self.add(tables.proposals, row | {"devices": [], "signals": [], "updated": TIME} | columns)

    def audit(self, controller: int, number: int, what: str, **columns: Any) -> None:
        """A line of the audit trail."""
        row = {
            "controller_id": controller,
            "number": number,
            "time": TIME,
            "who": "controller",
            "what": what,
            "text": what,
        }
        self.add(tables.audit, row | columns)

    def quarantine(self, run: int, number: int, what: str, name: str, **columns: Any) -> None:
        """A line of the log of a run's quarantine."""
        row = {
            "run_id": run,
            "number": number,
            "time": TIME,
            "what": what,
            "name": name,
            "who": "ops@login",
            "reason": "why",
        }
        self.add(tables.quarantine, row | columns)


def emptied(database: Database) -> None:
    """Remove every row but the version and the counter of changes."""
    with database.write() as connection:
        for table in reversed(tables.metadata.sorted_tables):
            kept = tables.meta.c.name == "change" if table is tables.meta else sa.false()
            connection.execute(sa.delete(table).where(~kept))


def names(rows: Sequence[Any]) -> list[str]:
    """Names of rows, in order."""
    return [row.name for row in rows]
