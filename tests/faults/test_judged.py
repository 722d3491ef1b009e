"""Real runs of a tiny job, and what is made of them: policies that go on after a catch, damage that heals or is removed, wrong votes.

In one go, since a process with torch takes seconds to start.
"""

from __future__ import annotations

from typing import Any

import pytest

from bitwitness.faults import runner
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.outcomes import Settings
from bitwitness.faults.rows import Row
from bitwitness.faults.table import Table, build

EVERY = {"audit_every": 1, "check_every": 1}
ONE = "rank=1 grad_w:0.weight @ step=3 : n=1 -> bit=28"
SAME = "fwd_out:0 @ step=3 : index=0 -> bit=28 ; permanent"


def cell(key: str, *faults: str, policy: Any = EVERY, **options: Any) -> CellSpec:
    job = {"ranks": 3, "steps": 6, "checkpoint_every": 3, "rebuild": True, **options}
    return CellSpec(key, "tiny", "mlp", job, policy, faults, 0, "fault" if faults else "clean", key)


CELLS = [
    cell("clean", policy=None),
    *(
        cell(reaction, ONE, policy={**EVERY, "on_detection": reaction})
        for reaction in ("raise", "record", "retry", "skip")
    ),
    cell("skip each time", f"{ONE} ; permanent", policy={**EVERY, "on_detection": "skip"}),
    cell(
        "heals",
        "rank=1 exp_avg:0.weight @ step=0 : index=2 -> bit=0",
        policy={"audit_every": 6, "check_every": 6},
        checkpoint_every=0,
    ),
    cell("removed", "rank=0 ckpt @ step=1 : n=1 -> bit=0", policy={**EVERY, "keep_checkpoints": 1}, checkpoint_every=1),
    cell("outvoted", f"rank=0 {SAME}", f"rank=1 {SAME}"),
    cell("nobody disagrees", "rank=1 during=arbiter fwd_out:0 @ step=3 : n=1 -> bit=28"),
]


@pytest.fixture(scope="module")
def table() -> Table:
    found: dict[str, tuple[CellSpec, CellResult]] = {}

    def keep(spec: CellSpec, result: CellResult) -> None:
        found[spec.key] = spec, result

    runner.run(CELLS, deadline=100.0, on_result=keep, on_progress=lambda _: None)
    return build([found[cell.key] for cell in CELLS], Settings())


@pytest.fixture(scope="module")
def rows(table: Table) -> dict[str, Row]:
    return {row.spec.key: row for row in table.rows}


@pytest.mark.parametrize("reaction", ["raise", "record", "retry", "skip"])
def test_caught_at_once_is_not_late_whatever_the_policy(rows: dict[str, Row], reaction: str) -> None:
    row = rows[reaction]
    assert (row.status, row.late, row.updates, row.held, row.named) == ("caught", 0, 0, (), "right"), row.result.error
    assert not row.is_late
    assert row.result.end == ("detected" if reaction == "raise" else "finished")


def test_what_went_on_is_what_the_policy_says(rows: dict[str, Row]) -> None:
    assert rows["record"].masked is False
    assert "not a verified one" in rows["record"].result.checkpoints[-1]["distrusted"]
    assert rows["retry"].masked is True
    assert rows["skip"].masked is None
    assert not rows["skip each time"].is_late


def test_a_moment_heals(rows: dict[str, Row]) -> None:
    row = rows["heals"]
    assert row.coverage.certain
    assert row.updates
    assert (row.status, row.note) == ("masked", "healed before it was compared")


def test_retention_removes_what_was_damaged(rows: dict[str, Row]) -> None:
    row = rows["removed"]
    assert [one["step"] for one in row.result.checkpoints if one.get("gone")] == [2, 4]
    assert row.status == "masked"
    assert "nobody can resume" in row.note


def test_two_nodes_outvote_a_third_and_that_is_told(rows: dict[str, Row], table: Table) -> None:
    assert not rows["outvoted"].coverage.covered
    assert rows["outvoted"].named == "wrong"
    assert [told.partition(" [")[0] for told in table.summary.wrong_rank] == [rows["outvoted"].fault]


def test_an_arbiter_that_nobody_asks_is_not_promised(rows: dict[str, Row], table: Table) -> None:
    assert rows["nobody disagrees"].status == "not landed"
    assert not rows["nobody disagrees"].is_unproved
    assert [words.partition(" ")[2] for words in table.summary.problems()] == [
        "times a rank was named that was not hit"
    ]
