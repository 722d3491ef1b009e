"""That pages stay fast: what SQLite says of the plan of every statement, on the database of the benchmark, in small."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import sqlalchemy as sa

from benchmarks.console_pages import filled, measure, scans
from bitwitness.store.database import Database

SMALL = Namespace(runs=3, observations=40, ranks=16, steps=400, rounds=1, seed=7)


def test_no_page_reads_a_table_from_end_to_end_that_grows_with_the_length_of_a_run(tmp_path: Path) -> None:
    with Database(tmp_path / "console.db") as database:
        filled(database, SMALL)
        found = measure(database, SMALL)
        assert {one["page"]: one["scans"] for one in found} == {one["page"]: [] for one in found}
        assert {one["page"] for one in found} >= {"runs", "run", "incident", "node", "device", "fleet", "drills"}
        told = scans(
            database, [(str(sa.text("SELECT * FROM ledger")), ()), ("SELECT count(value) FROM observations", ())]
        )
        assert told == ["ledger", "observations"], "the proof can fail"
