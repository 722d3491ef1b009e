"""How long ten million observations take to import, in how much memory, and how large the database gets.

    python -m benchmarks.console --folder /tmp/console --runs 1000 --observations 10000

Makes runs as a guard leaves them (run.json, a journal a rank, incidents), imports them in a process of its own, and prints a
table. What is made stays in the folder, with the database, so that the pages can be measured on it (`benchmarks.console_pages`);
runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bitwitness.evidence import Observation, Verdict
from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.topology import Placement, Topology

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
PER_NODE = 2
CHECKS = ("numerics", "replay", "replicas")
STEPS = 20_000


def stamp(at: datetime) -> str:
    """A time as files have it."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def topology(run: int, ranks: int) -> Topology:
    """Where the ranks of a run are: a window of a cluster that all runs share."""
    placed = []
    for rank in range(ranks):
        node, slot = (run * 3 + rank // PER_NODE) % 500, rank % PER_NODE
        placed.append(Placement(rank, f"node-{node:04d}", f"GPU-{node:04d}-{slot}", slot, "H100", "torch 2.13"))
    return Topology(tuple(placed))


def lines(run: int, rank: int, ranks: int, observations: int) -> Iterator[str]:
    """The journal of one rank."""
    chance = random.Random(f"{run}/{rank}")
    started = BEGIN + timedelta(hours=run)

    def line(kind: str, step: int, rest: str) -> str:
        time_ = stamp(started + timedelta(seconds=step))
        return f'{{"schema":1,"time":"{time_}","kind":"{kind}","rank":{rank},{rest}}}\n'

    yield line("start", 0, f'"world_size":{ranks},"node":"node"')
    seen = 0
    for step in range(0, STEPS, 100):
        last = step + 99
        for check in CHECKS:
            outcome = "unverified" if check == "replay" and step % 5000 == 4900 else "passed"
            why = ',"reason":"no witness"' if outcome == "unverified" else ""
            yield line("ledger", last, f'"check":"{check}","first":{step},"last":{last},"outcome":"{outcome}"{why}')
        for _ in range(round(observations / ranks * (step + 100) / STEPS) - seen):
            value = f"{chance.getrandbits(96):024x}"
            work = f'"place":"original","value":"{value}","repeats":["{value}","{value}"],"owner":{rank},"micro":0'
            yield line("observation", last, f'"check":"replay","step":{chance.randrange(step, last + 1)},{work}')
            seen += 1
        if rank == 0:
            for first in range(step, step + 100, 10):
                loss = 10.0 / (1 + first) ** 0.3 + chance.random() / 10
                numbers = f'"loss":{loss:.6f},"loss_low":{loss - 0.1:.6f},"loss_high":{loss + 0.1:.6f},"norm":1.0'
                cost = '"cost":{"numerics":0.02,"replay":0.3,"guard":0.05}'
                rest = f'{numbers},"norm_low":0.9,"norm_high":1.1,"nonfinite":0,"seconds":10.0,{cost},"clock":"host"'
                yield line("steps", first + 9, f'"first":{first},"last":{first + 9},{rest}')
            yield line("checkpoint", last, f'"step":{step + 100},"checkpoint":"step"')


def make(folder: Path, run: int, ranks: int, observations: int) -> None:
    """A run as a guard leaves it; every second one has an incident, every fourth one that names nobody."""
    path = folder / f"run-{run:05d}"
    files = RunFiles(path)
    (path / "journal").mkdir(parents=True, exist_ok=True)
    where = topology(run, ranks)
    for rank in range(ranks):
        with (path / "journal" / f"rank-{rank:05d}.jsonl").open("w", encoding="ascii") as file:
            file.writelines(lines(run, rank, ranks, observations))
    if run % 2 == 0:
        name, at = f"{BEGIN + timedelta(hours=run + 5):%Y%m%dT%H%M%SZ}-{run:06x}", BEGIN + timedelta(hours=run + 5)
        folder_ = path / "incidents" / name
        folder_.mkdir(parents=True, exist_ok=True)
        record = {"schema": 1, "id": name, "time": stamp(at), **incident(run, where)}
        (folder_ / "incident.json").write_text(json.dumps(record))
    about: dict[str, Any] = {"run": f"id-{run}", "started": stamp(BEGIN + timedelta(hours=run)), "world_size": ranks}
    about |= {
        "placement": where.to_json(),
        "policy": {"audit": "gradients"},
        "limits": [],
        "scheduler_job": f"slurm:{run}",
    }
    files.write_run(about)  # last: without it the run is made again


def incident(run: int, where: Topology) -> dict[str, Any]:
    """The content of an incident.json."""
    wrong, step = run % where.world_size, STEPS - 1
    named = run % 4 == 2
    verdict = Verdict(
        "attributed" if named else "unattributed",
        step,
        ranks=(wrong,) if named else (),
        nodes=where.nodes_of([wrong]) if named else (),
        devices=(where.device_of(wrong),) if named else (),
        candidates=() if named else tuple(range(min(4, where.world_size))),
        kind="compute",
        reason="as a benchmark says",
        window=(step - 1, step),
        check="replay",
    )
    seen = [
        Observation("replay", step, rank, "original", "a" * 24, owner=rank, micro=0) for rank in range(where.world_size)
    ]
    return {
        "verdict": verdict.to_json(),
        "observations": [one.to_json() for one in seen],
        "placement": where.to_json(),
        "policy": {},
        "notes": [],
    }


def import_all(folder: Path, url: str) -> dict[str, Any]:
    """Import once, and look again when nothing is new."""
    with Database(url) as database:
        importer = Importer(database, [], parents=[folder])
        begin = time.monotonic()
        done = importer.round()
        first = time.monotonic() - begin
        begin = time.monotonic()
        importer.round()
        again = time.monotonic() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "records": done.records,
            "problems": done.problems,
            "seconds": first,
            "again": again,
            "peak": peak,
            "bytes": database.size(),
        }


def main() -> None:
    """Make, import, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs and the database are made")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--observations", type=int, default=10_000, help="a run")
    parser.add_argument("--ranks", type=int, default=8, help="a run")
    parser.add_argument("--db", default="", help="an address; by default a file in the folder")
    parser.add_argument("--import-only", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    runs, url = given.folder / "runs", given.db or str(given.folder / "console.db")
    if given.import_only:
        print(json.dumps(import_all(runs, url)))
        return
    begin = time.monotonic()
    for run in range(given.runs):
        if not (runs / f"run-{run:05d}" / "run.json").exists():
            make(runs, run, given.ranks, given.observations)
    made = time.monotonic() - begin
    command = [sys.executable, "-m", "benchmarks.console", "--import-only", "--folder", str(given.folder), "--db", url]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = sum(path.stat().st_size for path in runs.glob("*/journal/*"))
    table = Table(box=None)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("runs", f"{given.runs:,}"),
        ("observations", f"{given.runs * given.observations:,}"),
        ("journals", f"{size / 1e9:.2f} GB, made in {made:.0f} s"),
        ("records imported", f"{done['records']:,}, problems {done['problems']}"),
        ("import", f"{done['seconds']:.0f} s, {done['records'] / done['seconds']:,.0f} records a second"),
        ("looking again", f"{done['again'] * 1000:.0f} ms"),
        ("peak memory (RSS)", f"{done['peak'] / 1e6:.0f} MB"),
        ("database", f"{done['bytes'] / 1e9:.2f} GB"),
        ("load of the machine", f"{os.getloadavg()[0]:.1f}"),
    ):
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    main()
