"""What retention removes, and above all what it does not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.store import retention
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from tests.store.making import INCIDENT, Clock, make_incident, make_run, rows, topology, train, verdict

KEPT = ("incidents", "incident_ranks", "coverage", "rank_coverage", "ranks", "marks", "stays", "nodes", "sources")
"""Tables of which nothing may go, with what is told of them."""
YEAR = timedelta(days=365)


def old_and_new(database: Database, tmp_path: Path) -> Importer:
    """One run that ended, and one that was written to a year later."""
    old = make_run(tmp_path / "old", run="old")
    train(old, 2, 0, 3)
    make_incident(old, verdict(topology()), topology())
    new = make_run(tmp_path / "new", run="new")
    train(new, 1, 0, 3)
    importer = Importer(database, [tmp_path / "old", tmp_path / "new"], clock=Clock())
    importer.round()
    return importer


def test_only_raw_records_of_runs_that_ended_go(database: Database, tmp_path: Path) -> None:
    importer = old_and_new(database, tmp_path)
    before = {name: rows(database, name) for name in KEPT}
    proof = rows(database, "evidence")
    later = Clock()
    later.pass_(YEAR.total_seconds() * 20)
    assert retention.prune(database, keep=YEAR * 30, clock=later).runs == 0
    would = retention.prune(database, keep=YEAR, clock=later, dry_run=True)
    assert len(rows(database, "observations")) == 12
    done = retention.prune(database, keep=YEAR, clock=later)
    assert done == would == retention.Pruned(2, 12, 3, 0)
    assert (rows(database, "observations"), rows(database, "ledger"), rows(database, "evidence")) == ([], [], proof)
    assert {name: rows(database, name) for name in KEPT} == before
    assert all(row["pruned"] and row["observations"] for row in rows(database, "runs"))
    importer.round()
    Importer(database, [tmp_path / "old"], clock=Clock()).round()
    assert rows(database, "observations") == [], "what was read is not read again"
    assert retention.prune(database, keep=YEAR, clock=later).runs == 0


def test_a_run_that_grew_lately_keeps_everything(database: Database, tmp_path: Path) -> None:
    """Whatever the clocks of its writers say."""
    importer = old_and_new(database, tmp_path)
    train(make_run(tmp_path / "new", run="new"), 1, 4, 5, start=False)
    importer.round()
    later = Clock()
    later.pass_(-timedelta(days=1).total_seconds())
    assert retention.prune(database, keep=timedelta(0), clock=later).runs <= 1
    assert len(rows(database, "observations", rank=0)) >= 6


def test_evidence_goes_only_of_incidents_that_are_settled(database: Database, tmp_path: Path) -> None:
    importer = old_and_new(database, tmp_path)
    later = Clock()
    later.pass_(YEAR.total_seconds() * 20)
    assert retention.prune(database, keep=YEAR, evidence_keep=YEAR, clock=later).incidents == 0
    make_run(tmp_path / "old", run="old").note_action(
        INCIDENT, "judged", judgement="confirmed", who="ann@host", why="seen"
    )
    importer.round()
    assert retention.prune(database, keep=YEAR, evidence_keep=YEAR, clock=later).incidents == 1
    (incident,) = rows(database, "incidents")
    assert (incident["pruned"], rows(database, "evidence"), incident["judgement"]) == (True, [], "confirmed")
    retention.shrink(database)


def test_less_than_no_time_is_refused(database: Database) -> None:
    with pytest.raises(ConfigurationError):
        retention.prune(database, keep=timedelta(seconds=-1))
