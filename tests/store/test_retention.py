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


def kept(database: Database) -> dict[str, list[dict[str, object]]]:
    """What stays, without the note of which steps its sums are."""
    found = {name: rows(database, name) for name in KEPT}
    for row in found["rank_coverage"]:
        del row["pruned"]
    return found


def test_a_run_that_goes_on_after_its_ranges_went_counts_no_gap_as_passed(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", topology(("n0",)))
    train(files, 2, 0, 99)
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    later = Clock()
    later.pass_(YEAR.total_seconds() * 20)
    retention.prune(database, keep=YEAR, clock=later)
    for rank in range(2):
        journal = files.journal(rank)
        journal.append("start", {"world_size": 2, "node": "n0", "supervision": "s2", "generation": 1})
        journal.append("resume", {"step": 20, "checkpoint": "x", "refused": []})
        for first, last in ((20, 49), (180, 199))[: 2 - rank]:
            journal.append("ledger", {"check": "replay", "first": first, "last": last, "outcome": "passed"})
        journal.close()
    importer.round()
    (covered,) = rows(database, "coverage")
    assert (covered["passed"], covered["all"], covered["last"]) == (50 + 50 + 20, 200 + 100, 49)
    retention.prune(database, keep=YEAR, clock=later)
    journal = files.journal(1)
    journal.append("resume", {"step": 30, "checkpoint": "x", "refused": []})
    journal.close()
    importer.round()
    (covered,) = rows(database, "coverage")
    assert covered["passed"] == 50 + 20 + 30, "every step of rank 1 up to 29 is known to have passed"
    assert covered["last"] == -1, "which of its steps rank 0 had passed before 49 is not known any more"


def test_only_raw_records_of_runs_that_ended_go(database: Database, tmp_path: Path) -> None:
    importer = old_and_new(database, tmp_path)
    before = kept(database)
    proof = rows(database, "evidence")
    later = Clock()
    later.pass_(YEAR.total_seconds() * 20)
    assert retention.prune(database, keep=YEAR * 30, clock=later).runs == 0
    would = retention.prune(database, keep=YEAR, clock=later, dry_run=True)
    assert len(rows(database, "observations")) == 12
    done = retention.prune(database, keep=YEAR, clock=later)
    assert done == would == retention.Pruned(2, 12, 3, 0)
    assert (rows(database, "observations"), rows(database, "ledger"), rows(database, "evidence")) == ([], [], proof)
    assert kept(database) == before
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
