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

KILLS = 100 if os.environ.get("BITWITNESS_EXHAUSTIVE") else 6


@pytest.mark.parametrize("importers", [1, 2])
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
            steps = {one["step"] for one in written}
            (covered,) = rows(database, "rank_coverage", rank=rank)
            assert (covered["passed"], covered["last"]) == (len(steps), max(one["step"] for one in written[-6:]))
            source = rows(database, "sources", path=f"journal/rank-{rank:05d}.jsonl")[0]
            assert source["skipped"] == 0
        shutil.copytree(path, tmp_path / "copy" / "run")
        with Database(tmp_path / "other.db") as other:
            Importer(other, [tmp_path / "copy" / "run"]).round()
            assert content(database) == content(other), "what was imported with kills is what is imported without"
