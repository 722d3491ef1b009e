"""How long each page of the console takes over a large database, and that none of them reads the observations.

    python -m benchmarks.console_pages [--runs 1000] [--observations 10000] [--ranks 64] [--steps 10000] [--rounds 20]
                                       [--db URL] [--keep] [--json]

The tables are filled directly, by statements of the database itself, so that it takes minutes; what an import costs is measured
by `benchmarks.console`. Pages are asked for in turns, each time of another run, node or device, and medians and the slowest are
printed, and the time of this process alone, which says more on a machine that has other work. Of every statement that a page has
sent the plan is asked for: a table that grows with the length of a run and that is read from end to end is named.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store import queries, tables
from bitwitness.store.database import Database

NODES = 512
LARGE = ("observations", "ledger", "steps", "rank_coverage", "evidence", "stays")
"""Tables whose rows are as many as a run is long or wide: no page may read one from end to end."""
CHECKS = ("numerics", "replay", "replicas")


def filled(database: Database, asked: argparse.Namespace) -> None:
    """Make the rows of so many runs, and of a fleet."""
    with database.write() as connection:
        connection.execute(sa.insert(tables.nodes), [_named(f"node-{node:04d}", devices=8) for node in range(NODES)])
        _fleet(connection, asked.runs)
    for key in range(1, asked.runs + 1):
        with database.write() as connection:
            _run(connection, key, asked)
        if key % 100 == 0:
            print(f"  {key} of {asked.runs} runs", file=sys.stderr, flush=True)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def _named(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "seen": _time(0), **more}


def _time(minutes: int) -> str:
    return f"2026-11-{1 + minutes // 1440 % 28:02d}T{minutes // 60 % 24:02d}:{minutes % 60:02d}:00.000Z"


def _insert(connection: sa.Connection, table: str, many: int, columns: dict[str, str], **values: Any) -> None:
    """So many rows, each column an expression of its number `i`; made by the database, because millions are wanted."""
    names, each = ", ".join(f'"{name}"' for name in columns), ", ".join(columns.values())
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < :many - 1)"
    connection.execute(
        sa.text(f"INSERT INTO {table} ({names}) {numbers} SELECT {each} FROM n"), {"many": many, **values}
    )


def _run(connection: sa.Connection, key: int, asked: argparse.Namespace) -> None:
    connection.execute(
        sa.insert(tables.runs).values(
            id=key, place=f"{key:032d}", path=f"/runs/job-{key:05d}", name=f"job-{key:05d}", run=f"{key:08x}",
            current=True, started=_time(key), seen=_time(key), grew=_time(key), imported=_time(key),
            world_size=asked.ranks, nodes=asked.ranks // 8 or 1, step=asked.steps - 1, checkpoint=asked.steps,
            pace=0.5, cost=0.007, attributed=3, unattributed=2, open=key % 3, finished=key % 4 == 0,
            policy={"audit": "gradients", "audit_every": 100, "check_every": 10}, limits=["a sentence"],
        )
    )  # fmt: skip
    _insert(
        connection, "observations", asked.observations,
        {
            "run_id": ":key", "rank": "i % :ranks", "at": "i * 200", "time": ":time", "check": "'replay'", "step": "i % :steps",
            "place": "'original'", "value": "'65c6ee7d4551c88acfa06ea6'",
        },
        key=key, ranks=asked.ranks, steps=asked.steps, time=_time(key),
    )  # fmt: skip
    many = min(4096, asked.steps)
    _insert(
        connection, "steps", many,
        {
            "run_id": ":key", "first": "i * :width", "last": "(i + 1) * :width - 1", "count": ":width", "loss": "1.0 / (i + 1)",
            "loss_low": "1.0 / (i + 2)", "loss_high": "2.0 / (i + 1)", "norm": "1.0",
        },
        key=key, width=asked.steps // many,
    )  # fmt: skip
    _ledger(connection, key, asked)
    _rest(connection, key, asked)


def _ledger(connection: sa.Connection, key: int, asked: argparse.Namespace) -> None:
    """Numerics in ranges with a gap in each thousand, audits every hundredth step, comparisons every tenth in long ranges."""
    for check, every, length in (("numerics", 1000, 999), ("replay", 100, 1), ("replicas", 2000, 2000)):
        each = max(1, asked.steps // every)
        _insert(
            connection, "ledger", asked.ranks * each,
            {
                "run_id": ":key", "check": f"'{check}'", "rank": "i / :each", "first": "i % :each * :every",
                "last": "i % :each * :every + :length - 1",
                "outcome": "CASE WHEN i % 97 = 5 THEN 'unverified' ELSE 'passed' END",
                "reason": "CASE WHEN i % 97 = 5 THEN 'out of memory' ELSE '' END", "start": "1",
            },
            key=key, each=each, every=every, length=length,
        )  # fmt: skip


def _rest(connection: sa.Connection, key: int, asked: argparse.Namespace) -> None:
    steps = {"passed": asked.steps, "unverified": 0, "failed": 0}
    places = [
        (rank, f"node-{(key * 8 + rank // 8) % NODES:04d}", f"GPU-{(key * 64 + rank) % (NODES * 8):05d}")
        for rank in range(asked.ranks)
    ]
    every = {
        tables.coverage: [{"run_id": key, "check": check, **steps, "all": asked.steps * asked.ranks, "last": 9} for check in CHECKS],
        tables.costs: [{"run_id": key, "check": check, "seconds": 1.0, "steps": asked.steps, "wall": 5000.0} for check in CHECKS],
        tables.ranks: [{"run_id": key, "rank": rank, "first": 0, "last": asked.steps - 1} for rank, *_ in places],
        tables.stays: [
            {"run_id": key, "rank": rank, "node": node, "device": device, "slot": rank % 8, "first": _time(key), "last": _time(key), "current": True}
            for rank, node, device in places
        ],
        tables.checkpoints: [{"run_id": key, "step": step, "saved": _time(key), "passed": {"replay": step}, "present": True} for step in range(0, asked.steps, max(1, asked.steps // 100))],
        tables.marks: [{"run_id": key, "origin": str(one), "step": one, "kind": "start", "text": "a start", "time": _time(key)} for one in range(20)],
        tables.quarantine: [{"run_id": key, "number": one, "time": _time(key), "what": "strike", "name": places[one][2], "node": places[one][1]} for one in range(min(3, asked.ranks))],
        tables.drills: [{"run_id": key, "rank": 0, "start": one, "fault": 0, "spec": "a fault", "time": _time(key), "outcome": ("caught", "missed")[one], "step": 5} for one in range(2)],
    }  # fmt: skip
    for table, rows in every.items():
        connection.execute(sa.insert(table), rows)
    for one in range(5):
        _incident(connection, key * 10 + one, key, one, places)


def _incident(connection: sa.Connection, number: int, key: int, one: int, places: list[tuple[int, str, str]]) -> None:
    named = one % 2 == 0
    connection.execute(
        sa.insert(tables.incidents).values(
            id=number, run_id=key, name=f"2026-{number:06d}", time=_time(key + one), step=one * 100, check="replay",
            kind="compute", status="attributed" if named else "unattributed", headline="a line", reason="a sentence",
            judgement=("", "confirmed", "false alarm", "", "drill")[one], window_first=one * 100 - 1,
        )
    )  # fmt: skip
    role, who = ("named", places[one : one + 1]) if named else ("candidate", places[:8])
    ranks = [{"incident_id": number, "run_id": key, "role": role, "rank": rank, "node": node, "device": device} for rank, node, device in who]  # fmt: skip
    connection.execute(sa.insert(tables.incident_ranks), ranks)
    seen = [{"check": "replay", "step": 1, "rank": rank, "place": "original", "value": "65c6ee7d"} for rank in range(24)]  # fmt: skip
    connection.execute(sa.insert(tables.evidence).values(incident_id=number, observations=seen, placement=[]))


def _fleet(connection: sa.Connection, many: int) -> None:
    connection.execute(sa.insert(tables.controllers).values(id=1, place="1", path="/var/lib/fleet", life="running"))
    statuses = ("done", "held", "observed", "nothing", "acting", "held")
    rows = [
        {"controller_id": 1, "key": one, "incident": f"2026-{one * 10:06d}", "node": f"node-{one % NODES:04d}", "action": "drain", "act": "drain", "status": statuses[one % 6], "updated": _time(one), "waits": one % 50 == 5, "devices": [], "signals": []}
        for one in range(1, many + 1)
    ]  # fmt: skip
    connection.execute(sa.insert(tables.proposals), rows)
    connection.execute(sa.insert(tables.audit), [{"controller_id": 1, "number": one, "time": _time(one), "who": "controller", "what": "held", "node": f"node-{one % NODES:04d}", "incident": f"2026-{one:06d}", "text": "a sentence"} for one in range(1, 10 * many)])  # fmt: skip
    connection.execute(sa.insert(tables.namings), [{"controller_id": 1, "number": one, "incident": f"2026-{one * 10:06d}", "device": f"GPU-{one:05d}", "node": f"node-{one % NODES:04d}"} for one in range(1, many + 1)])  # fmt: skip


# Measuring ------------------------------------------------------------------------------------------------------------


def pages(database: Database, runs: int, draw: random.Random) -> dict[str, Callable[[], object]]:
    """Each page, of something else each time."""

    def key() -> int:
        return draw.randint(1, runs)

    def page_of(page: Callable[[Database, str], object], name: str) -> object:
        """One that was never seen is not found, which is a page as well."""
        try:
            return page(database, name)
        except NotFound:
            return None

    def incident() -> object:
        run = key()
        return queries.incident_page(database, run, f"2026-{run * 10 + draw.randrange(5):06d}")

    return {
        "runs": lambda: queries.runs_page(database),
        "runs, last part": lambda: queries.runs_page(database, page=10**6),
        "runs, searched": lambda: queries.runs_page(database, query=f"{key():03d}"),
        "runs, by node": lambda: queries.runs_page(database, query=f"node-{draw.randrange(NODES):04d}"),
        "runs, by device": lambda: queries.runs_page(database, query=f"GPU-{draw.randrange(NODES * 8):05d}"),
        "runs, by all nodes": lambda: queries.runs_page(database, query="node-"),
        "runs, by all devices": lambda: queries.runs_page(database, query="GPU-"),
        "run": lambda: queries.run_page(database, key()),
        "incident": incident,
        "node": lambda: page_of(queries.node_page, f"node-{draw.randrange(NODES):04d}"),
        "device": lambda: page_of(queries.device_page, f"GPU-{draw.randrange(NODES * 8):05d}"),
        "fleet": lambda: queries.fleet_page(database),
        "drills": lambda: queries.drills_page(database),
        "history": lambda: queries.history(database),
        "change": lambda: queries.change(database),
    }


@contextmanager
def heard(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """The statements that are sent meanwhile, with their values."""
    sent: list[tuple[str, Any]] = []

    def hear(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        sent.append((statement, values))

    sa.event.listen(database.engine, "before_cursor_execute", hear)
    try:
        yield sent
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", hear)


def scans(database: Database, sent: list[tuple[str, Any]]) -> list[str]:
    """Of large tables those that one of these statements reads from end to end, as the database says itself."""
    explain = "EXPLAIN QUERY PLAN " if database.dialect == "sqlite" else "EXPLAIN "
    found = set()
    with database.read() as connection:
        for statement, values in sent:
            if not statement.lstrip().upper().startswith(("SELECT", "WITH")):
                continue
            for row in connection.exec_driver_sql(explain + statement, values):
                said = str(row[-1])
                scan = said.strip().startswith("SCAN ") if database.dialect == "sqlite" else "Seq Scan on" in said
                words = said.replace("(", " ").split()
                found |= {table for table in LARGE if scan and table in words and "USING INDEX" not in said}
                if "observations" in words:
                    found.add("observations")
    return sorted(found)


def measure(database: Database, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Median and slowest of each page, how many statements it sends, and what it scans."""
    every = pages(database, asked.runs, random.Random(asked.seed))
    times: dict[str, list[float]] = {name: [] for name in every}
    busy: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(asked.rounds):
        for name, page in every.items():
            start, cpu = time.perf_counter(), time.process_time()
            page()
            busy[name].append((time.process_time() - cpu) * 1000)
            times[name].append((time.perf_counter() - start) * 1000)
    results = []
    for name, page in every.items():
        with heard(database) as sent:
            page()
        selects = [one for one in sent if one[0].lstrip().upper().startswith(("SELECT", "WITH"))]
        results.append(
            {
                "page": name,
                "first_ms": round(times[name][0], 1),
                "median_ms": round(statistics.median(times[name]), 1),
                "worst_ms": round(max(times[name]), 1),
                "cpu_ms": round(statistics.median(busy[name]), 1),
                "statements": len(selects),
                "scans": scans(database, sent),
            }
        )
    return results


def exported(database: Database, asked: argparse.Namespace) -> dict[str, float]:
    """How fast the observations of all runs are exported, at most a million of them, and what memory that took."""
    start, many = time.perf_counter(), 0
    for many, _ in enumerate(queries.export(database, "observations")[1], 1):
        if many >= min(10**6, asked.runs * asked.observations):
            break
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": many, "rows_per_second": round(many / seconds), "peak_mib": round(peak)}


def main() -> None:
    """Fill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("runs", 1000), ("observations", 10_000), ("ranks", 64), ("steps", 10_000), ("rounds", 20), ("seed", 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--db", help="an empty database, or with --keep one that this has filled before")
    parser.add_argument("--keep", action="store_true", help="do not fill")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Database(asked.db or Path(folder) / "console.db") as database:
        start = time.perf_counter()
        if not asked.keep:
            filled(database, asked)
        filling = time.perf_counter() - start
        found: dict[str, Any] = {
            "filled_s": round(filling),
            "pages": measure(database, asked),
            "export": exported(database, asked),
        }
    if asked.json:
        print(json.dumps(found))
        return
    print(f"{asked.runs} runs of {asked.observations} observations, {asked.ranks} ranks, {asked.steps} steps, {database.dialect}, seed {asked.seed}")  # fmt: skip
    print(f"{'page':20} {'median':>8} {'slowest':>8} {'first':>8} {'cpu':>8} {'statements':>10}  reads from end to end")
    for one in found["pages"]:
        print(
            f"{one['page']:20} {one['median_ms']:>6.1f}ms {one['worst_ms']:>6.1f}ms {one['first_ms']:>6.1f}ms {one['cpu_ms']:>6.1f}ms "
            f"{one['statements']:>10}  {', '.join(one['scans']) or '-'}"
        )
    print(f"export of observations: {found['export']}")


if __name__ == "__main__":
    main()
