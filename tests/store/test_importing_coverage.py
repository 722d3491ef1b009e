"""How far a run is verified: never further than every rank has got, and never by work that was thrown away."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.importing_coverage import verified
from bitwitness.store.queries import run_page
from bitwitness.store.tables import ledger, rank_coverage, runs
from tests.store.making import Clock, about, make_incident, make_run, rows, topology, verdict


def say(files: RunFiles, rank: int, *words: Sequence[Any], size: int = 2) -> None:
    """Append to a journal: ("start", name), ("resume", step), or (first, last, outcome)."""
    journal = files.journal(rank)
    for word in words:
        if word[0] == "start":
            journal.append("start", {"world_size": size, "node": "n0", "start_id": word[1]})
        elif word[0] == "resume":
            journal.append("resume", {"step": word[1], "checkpoint": "x", "refused": []})
        else:
            journal.append("ledger", {"check": "replay", "first": word[0], "last": word[1], "outcome": word[2]})
    journal.close()


def covered(database: Database) -> tuple[int, int, int]:
    """Passed rank-steps, all, and the last verified step."""
    (row,) = rows(database, "coverage")
    return row["passed"], row["all"], row["last"]


def test_work_that_was_thrown_away_is_not_verified(database: Database, tmp_path: Path) -> None:
    """At once when a restart goes back, and for good where the work was never made again."""
    where = topology(("n0", "n1", "n2"), 1)
    files, three = make_run(tmp_path / "run", where), range(3)
    importer = Importer(database, [files.path], clock=Clock())
    for rank in three:
        say(files, rank, ("start", "a"), (0, 29, "passed"))
    make_incident(files, verdict(where, (1,), 22), where)
    importer.round()
    assert covered(database) == (90, 90, 29)
    for rank in three:
        say(files, rank, ("start", "b"), ("resume", 10))
    importer.round()
    assert covered(database) == (30, 90, 9)
    for rank in three:
        say(files, rank, (10, 19, "passed"), ("start", "c"), ("resume", 24), (24, 39, "passed"))
    importer.round()
    assert covered(database) == (3 * 36, 120, 39), "20 to 23 were killed with the second start"
    (key,) = (row["id"] for row in rows(database, "runs"))
    (shown,) = [one for one in run_page(database, key).maps if one.check == "replay"]
    assert shown.cells[0] == ("passed",) * 20 + ("gap",) * 4 + ("passed",) * 16
    assert shown.cells[1][22] == "failed", "what was found is not hidden by what came after"


def test_a_start_that_begins_anew_without_a_word_undoes_all(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", topology(("n0",)))
    importer = Importer(database, [files.path], clock=Clock())
    for rank in range(2):
        say(files, rank, ("start", "a"), (0, 49, "passed"), ("start", "b"))
    importer.round()
    assert covered(database) == (100, 100, 49), "nobody knows yet where it begins"
    for rank in range(2):
        say(files, rank, (0, 4, "passed"))
        importer.round()
    assert covered(database) == (10, 100, 4)
    say(files, 0, ("start", "c"), (7, 8, "unverified"), (3, 6, "passed"), (7, 9, "passed"))
    importer.round()
    assert covered(database) == (3 + 4 + 1 + 5, 100, 4)


def test_what_a_rank_did_that_a_restart_left_out_was_thrown_away_too(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", topology(("n0", "n1")))
    for rank in range(4):
        say(files, rank, ("start", "a"), (0, 19, "passed"), size=4)
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    assert covered(database) == (80, 80, 19)
    files.write_run(about(topology(("n0",))))
    for rank in range(2):
        say(files, rank, ("start", "b"), ("resume", 10), (10, 14, "passed"))
    importer.round()
    assert covered(database) == (15 * 2 + 10 * 2, 80, 14)
    assert [row["passed"] for row in rows(database, "rank_coverage")] == [15, 15, 10, 10]


def test_a_step_is_verified_only_where_every_rank_passed_it(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", topology(("n0",)))
    say(files, 0, ("start", "a"), (0, 100, "passed"), (101, 200, "unverified"))
    say(files, 1, ("start", "a"), (0, 50, "passed"), (51, 149, "unverified"), (150, 200, "passed"))
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    assert covered(database)[2] == 50
    for rank in range(2):  # sampled, and one rank is read a little later than the other
        say(files, rank, *((step, step, "passed") for step in range(299, 1000 + 100 * rank, 100)))
    importer.round()
    assert covered(database)[2] == 999
    say(files, 0, (999, 999, "failed"))
    importer.round()
    assert covered(database)[2] == 899, "the worst word counts"


@pytest.mark.parametrize("seed", range(3))
def test_the_last_verified_step_is_that_of_an_account_step_by_step(database: Database, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(8):
        world, length = chance.randint(1, 5), chance.randint(1, 60)
        passed: list[set[int]] = []
        with database.write() as connection:
            run = connection.execute(
                sa.insert(runs).values(place=str((seed, number))).returning(runs.c.id)
            ).scalar_one()
            for rank in range(world):
                mine = {step for step in range(length) if chance.random() < 0.7}
                keys = {"run_id": run, "check": "replay", "rank": rank}
                found = [{**keys, "first": step, "last": step, "outcome": "passed"} for step in sorted(mine)]
                if found:
                    connection.execute(sa.insert(ledger), found)
                connection.execute(sa.insert(rank_coverage).values(**keys, last=max(mine, default=-1)))
                passed.append(mine)
            common = set.intersection(*passed)
            assert verified(connection, run, "replay", world) == max(common, default=-1), (seed, number)
            assert verified(connection, run, "replay", world + 1) == -1, "a rank that said nothing has passed nothing"
