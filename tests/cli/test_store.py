"""`bitwitness store`: fills, shows and prunes the database; one JSON object each, exit 2 for what was asked wrongly."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.runfiles import RunFiles
from tests.store.making import make_incident, make_run, topology, train, verdict


def run(*arguments: object, db: Path | None = None) -> Result:
    return CliRunner().invoke(
        cli, ["store", *map(str, arguments)], env={"BITWITNESS_DB": "" if db is None else str(db)}
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    files = make_run(tmp_path / "runs/a")
    train(files, 2, 0, 3)
    make_incident(files, verdict(topology(), ()), topology())
    (tmp_path / "runs/b/journal").mkdir(parents=True)
    return tmp_path / "runs"


def test_import_status_prune(runs: Path, tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    done = run("import", "--parent", runs, "--json", db=db)
    assert (done.exit_code, json.loads(done.output)["runs"]) == (0, 2)
    said = json.loads(run("status", "--json", db=db).output)
    assert (said["counts"]["runs"], said["counts"]["observations"], said["counts"]["unattributed"]) == (2, 8, 1)
    assert [Path(one["path"]).name for one in said["problems"]] == ["run.json"]
    pruned = run("prune", "--keep", "36500d", "--dry-run", "--json", db=db)
    assert json.loads(pruned.output)["observations"] == 0
    for command in (("import", runs / "a"), ("status",), ("prune", "--keep", "1d", "--evidence", "2d", "--shrink")):
        done = run(*command, db=db)
        assert (done.exit_code, bool(done.output)) == (0, True), done.output


@pytest.mark.parametrize(
    "arguments",
    [("import",), ("import", "/nowhere/at/all"), ("status",), ("prune", "--keep", "soon"), ("prune", "--keep", "-1")],
)
def test_what_was_asked_wrongly_ends_with_2_and_makes_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments, db=tmp_path / "x.db")
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_database_must_be_named() -> None:
    assert run("status").exit_code == 2


def objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One a round, over several lines."""
    text = ""
    for line in lines:
        text += line
        if line.startswith("}"):
            yield json.loads(text)
            text = ""


def test_an_import_that_goes_on_waits_for_its_database(runs: Path, tmp_path: Path) -> None:
    """Whether somebody holds its lock, or it takes nothing at all for a while: it says so, and goes on."""
    db = tmp_path / "store.db"
    run("import", "--parent", runs, db=db)
    command = [
        sys.executable,
        "-m",
        "bitwitness",
        "store",
        "import",
        str(runs / "a"),
        "--db",
        str(db),
        "--every",
        "0.1",
    ]
    with (
        closing(sqlite3.connect(db, isolation_level=None)) as other,
        subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            told = objects(process.stdout)
            assert "records" in next(told)
            other.execute("BEGIN IMMEDIATE")
            train(RunFiles(runs / "a"), 1, 20, 21)
            assert "is locked" in process.stderr.readline()
            other.execute("ALTER TABLE runs RENAME TO away")
            other.execute("COMMIT")
            failed = next(one for one in told if "error" in one)
            assert "runs" in failed["error"]
            assert failed["retry_seconds"] >= 1
            other.execute("ALTER TABLE away RENAME TO runs")
            assert next(one for one in told if one.get("records"))["runs"] == 1
        finally:
            process.kill()
