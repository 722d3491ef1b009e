"""Importers and a writer that are killed again and again: run as a program of its own, because it forks.

    python -m tests.store.killing URL RUN_DIR SEED KILLS IMPORTERS

A writer appends to the journals of two ranks as a guard does, and is killed and started again. Importers read beside it, and are
killed as well, wherever they are. What is told at the end is for the test to judge.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bitwitness.evidence import Observation
from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer

RANKS = 2


def child(work: Callable[[], None]) -> int:
    """Do something in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001  (told, and the process ends)
        sys.stderr.write(f"{error!r}\n")
    finally:
        os._exit(code)


def write(path: Path) -> None:
    """Go on where the journals end, until somebody kills this."""
    files = RunFiles(path)
    last = max(
        (record["step"] for rank in range(RANKS) for record in files.read_journal(rank) if "step" in record), default=-1
    )
    journals = [files.journal(rank) for rank in range(RANKS)]
    for journal in journals:
        journal.append("start", {"world_size": RANKS, "node": "n0", "generation": 1})
    begin = max(0, last - 5)
    for step in range(begin, 1_000_000):
        for rank, journal in enumerate(journals):
            journal.append(
                "observation", Observation("replay", step, rank, "original", f"{step:x}", owner=rank).to_json()
            )
            journal.append("ledger", {"check": "replay", "first": step, "last": step, "outcome": "passed"})
        numbers = {"first": step, "last": step, "loss": 1.0, "seconds": 1.0, "nonfinite": 0, "cost": {"replay": 0.25}}
        journals[0].append("steps", numbers)
        # A line that was begun, as a kill in the middle of a write leaves it; the next writer cuts it off.
        if step == begin + 40:
            with (path / f"journal/rank-{step % RANKS:05d}.jsonl").open("ab") as torn:
                torn.write(b'{"schema":1,"time":"2026-11-30T')
                torn.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)


def read(url: str, path: Path) -> None:
    """Import until somebody kills this."""
    with Database(url) as database:
        importer = Importer(database, [path])
        while True:
            importer.round()


def main(url: str, path: Path, seed: int, kills: int, importers: int) -> None:
    """Kill, begin again, and at last import what is left."""
    chance = random.Random(seed)
    writing = child(lambda: write(path))
    reading = [child(lambda: read(url, path)) for _ in range(importers)]
    failed = 0
    for _ in range(kills):
        time.sleep(chance.random() * 0.5)
        number = chance.randrange(importers)
        os.kill(reading[number], signal.SIGKILL)
        failed += not os.WIFSIGNALED(os.waitpid(reading[number], 0)[1])
        reading[number] = child(lambda: read(url, path))
        if os.waitpid(writing, os.WNOHANG)[0] or chance.random() < 0.5:
            try:
                os.kill(writing, signal.SIGKILL)
                os.waitpid(writing, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
            writing = child(lambda: write(path))
    for pid in (writing, *reading):
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    with Database(url) as database:
        Importer(database, [path]).round()
    sys.stdout.write(json.dumps({"failed": failed}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6]))
