"""Importers that are killed at any instant beside a writer that is killed too: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from tests.store.making import content, make_run, rows, topology

EXHAUSTIVE = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))
KILLS = 100 if EXHAUSTIVE else 6


def _passed(path: Path, rank: int) -> set[int]:
    """The steps that count, line by line: a writer that begins anew throws away what was made from its first step on."""
    passed: set[int] = set()
    begins = False
    for one in RunFiles(path).read_journal(rank):
        step = one.get("step", one.get("first"))
        if step is None:
            begins = one["kind"] == "start"
            continue
        passed = {before for before in passed if not begins or before < step}
        begins = False
        passed |= {step} if one["kind"] == "ledger" else set()
    return passed


@pytest.mark.parametrize("importers", [1, 2] if EXHAUSTIVE else [2])
def test_nothing_is_lost_and_nothing_is_twice(url: str, tmp_path: Path, seed: int, importers: int) -> None:
    path = tmp_path / "run"
    make_run(path, topology(("n0",)))
    command = [sys.executable, "-m", "tests.store.killing", url, str(path), str(seed), str(KILLS), str(importers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"failed": 0}, f"an importer ended by itself: {done.stderr}"
    with Database(url) as database:
        for rank in range(2):
            written = [one for one in RunFiles(path).read_journal(rank) if one["kind"] == "observation"]
            found = rows(database, "observations", rank=rank)
            assert [row["step"] for row in found] == [one["step"] for one in written]
            assert len(found) > KILLS
            passed = _passed(path, rank)
            (covered,) = rows(database, "rank_coverage", rank=rank)
            assert (covered["passed"], covered["last"]) == (len(passed), max(passed))
            source = rows(database, "sources", path=f"journal/rank-{rank:05d}.jsonl")[0]
            assert source["skipped"] == 0
        shutil.copytree(path, tmp_path / "copy" / "run")
        with Database(tmp_path / "other.db") as other:
            Importer(other, [tmp_path / "copy" / "run"]).round()
            assert content(database) == content(other), "what was imported with kills is what is imported without"
