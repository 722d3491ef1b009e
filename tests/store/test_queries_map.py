"""The ledger as a map: whatever the thinning, it says of every cell what counting one rank-step after the other says."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bitwitness.store.pages import Cell, LedgerMap
from bitwitness.store.queries import run_page
from bitwitness.store.queries.ledger_map import COLUMNS, ROWS, grid
from tests.store.filling import Filling

SEED = 20261130
OUTCOMES = ("passed", "passed", "passed", "unverified", "failed", "")
Ranges = list[tuple[int, int, str]]


def map_of(filling: Filling, run: int, check: str = "replay") -> LedgerMap:
    return next(one for one in run_page(filling.database, run).maps if one.check == check)


def ranges(
    draw: random.Random, steps: int, longest: int, outcomes: tuple[str, ...] = OUTCOMES
) -> Iterator[tuple[int, int, str]]:
    at = draw.randrange(3)
    while at < steps:
        last = min(steps - 1, at + draw.randrange(longest))
        outcome = draw.choice(outcomes)
        if outcome:
            yield at, last, outcome
        at = last + 1


def counted(told: dict[int, Ranges], low: int, high: int, first: int, last: int) -> Cell:
    """A cell by looking at each of its rank-steps."""
    words = {(rank, step): outcome for rank in range(low, high + 1) for begin, end, outcome in told.get(rank, []) for step in range(max(begin, first), min(end, last) + 1)}  # fmt: skip
    found = set(words.values())
    if "failed" in found:
        return "failed"
    if found == {"passed"} and len(words) == (high - low + 1) * (last - first + 1):
        return "passed"
    return "partly" if "passed" in found else "unverified" if "unverified" in found else "gap"


@pytest.mark.parametrize(
    ("ranks", "steps", "longest"), [(3, 7, 3), (4, 160, 40), (5, 161, 60), (65, 200, 90), (130, 20, 8), (2, 700, 2)]
)
def test_every_cell_is_what_counting_says(filling: Filling, ranks: int, steps: int, longest: int) -> None:
    draw = random.Random(f"{SEED} {ranks} {steps} {longest}")
    run = filling.run(world_size=ranks, step=steps - 1)
    told: dict[int, Ranges] = {}
    for rank in range(ranks):
        only_passed = rank % 5 < 3
        told[rank] = list(ranges(draw, steps, longest, ("passed",) if only_passed else OUTCOMES))
        if only_passed and rank % 5:  # whole, but for one hole in some
            hole = draw.randrange(steps) if rank % 5 == 1 else steps
            told[rank] = [
                (first, last, "passed") for first, last in ((0, hole - 1), (hole + 1, steps - 1)) if first <= last
            ]
    told.pop(ranks // 2)  # one that nobody has heard of
    filling.ledgers(run, "replay", told)
    found = map_of(filling, run)
    assert len(found.rows) <= ROWS
    assert len(found.columns) <= COLUMNS
    assert (found.rows[0][0], found.rows[-1][1]) == (0, ranks - 1)
    assert (found.columns[0][0], found.columns[-1][1]) == (0, steps - 1)
    expected = tuple(tuple(counted(told, *row, *column) for column in found.columns) for row in found.rows)
    assert found.cells == expected
    for place, text in found.reasons.items():
        row, column = map(int, place.split(","))
        assert found.cells[row][column] != "passed"
        assert text.startswith("why ")


def test_one_step_in_millions_that_nobody_has_verified_is_never_rounded_away(filling: Filling) -> None:
    run = filling.run(world_size=1024, step=9_999_999)
    for rank in range(1024):
        hole = 1_234_567 if rank == 777 else 10_000_000
        each = [(0, hole - 1, "passed"), (hole + 1, 9_999_999, "passed")]
        filling_rows = [one for one in each if one[0] <= one[1]]
        if rank % 16 == 777 % 16 or rank % 128 == 0:
            filling.ledger(run, "replay", rank, *filling_rows)
    found = map_of(filling, run)
    assert len(found.rows) == 64
    assert all(cell != "passed" for cells in found.cells for cell in cells), "most ranks have no record"

    whole = filling.run(world_size=2, step=9_999_999)
    filling.ledger(whole, "replay", 0, (0, 9_999_999, "passed"))
    filling.ledger(whole, "replay", 1, (0, 1_234_566, "passed"), (1_234_568, 9_999_999, "passed"))
    found = map_of(filling, whole)
    assert set(found.cells[0]) == {"passed"}
    assert [found.columns[place] for place, cell in enumerate(found.cells[1]) if cell != "passed"] == [
        (1_187_500, 1_249_999)
    ]


def test_ranks_and_steps_of_which_nothing_is_on_record_are_gaps(filling: Filling) -> None:
    run = filling.run(world_size=4, step=19)
    filling.ledger(run, "replay", 1, (0, 9, "passed"))
    found = map_of(filling, run)
    assert found.cells[1] == ("passed",) * 10 + ("gap",) * 10
    assert set(found.cells[0] + found.cells[2] + found.cells[3]) == {"gap"}


def test_a_check_that_the_policy_wants_and_nobody_has_done_is_a_map_of_gaps(filling: Filling) -> None:
    wanted = filling.run(policy={"audit": "gradients", "audit_every": 1})
    filling.ledger(wanted, "numerics", 0, (0, 9, "passed"))
    page = run_page(filling.database, wanted)
    assert [one.check for one in page.maps] == ["numerics", "replay", "replicas"]
    assert {cell for cells in page.maps[1].cells for cell in cells} == {"gap"}
    off = filling.run(policy={"audit": "off"})
    assert [one.check for one in run_page(filling.database, off).maps] == ["numerics", "replicas"]


def test_a_step_that_had_failed_stays_failed_when_it_was_made_again(filling: Filling) -> None:
    run = filling.run(world_size=4, step=9)
    filling.ledgers(run, "replay", {rank: [(0, 9, "passed")] for rank in range(4)})
    filling.incident(run, "i-1", named=[(2, "node-c", "GPU-2")], candidates=[(3, "node-d", "GPU-3")], step=5)
    filling.incident(run, "i-2", candidates=[(0, "node-a", "GPU-0"), (1, "node-b", "GPU-1")], step=7)
    filling.incident(run, "i-3", named=[(3, "node-d", "GPU-3")], step=1, judgement="false alarm")
    found = map_of(filling, run)
    failed = {
        (row, column) for row, cells in enumerate(found.cells) for column, cell in enumerate(cells) if cell == "failed"
    }
    assert failed == {(2, 5), (0, 7), (1, 7), (3, 1)}
    assert found.reasons["2,5"] == "incident i-1: headline of i-1, and was made again since"
    assert found.reasons["3,1"].startswith("incident i-3, called a false alarm: ")


def test_a_run_without_a_step_has_no_map_and_one_whose_ledger_is_gone_says_so(filling: Filling) -> None:
    assert run_page(filling.database, filling.run(step=-1, policy={"audit": "gradients"})).maps == ()
    assert run_page(filling.database, filling.run(world_size=0)).maps == ()
    pruned = run_page(filling.database, filling.run(pruned="2026-12-01T00:00:00.000Z", policy={"audit": "gradients"}))
    assert (pruned.maps, pruned.pruned) == ((), "2026-12-01T00:00:00.000Z")


def test_records_of_ranks_beyond_the_world_and_of_absurd_steps_do_no_harm(filling: Filling) -> None:
    last = (1 << 40) - 1
    run = filling.run(world_size=2, step=last)
    for rank in range(40):
        filling.ledger(run, "replay", rank, (0, last, "passed"))
    found = map_of(filling, run)
    assert {cell for cells in found.cells for cell in cells} == {"passed"}
    assert len(found.columns) <= COLUMNS


def test_the_finest_grid_that_can_be_drawn() -> None:
    for ranks in (1, 63, 64, 65, 127, 128, 129, 100_000):
        for steps in (1, 159, 160, 161, 10**9):
            found = grid(ranks, 0, steps - 1)
            assert 1 <= len(found.rows) <= ROWS
            assert 1 <= len(found.columns) <= COLUMNS
            assert (found.height == 1) == (ranks <= ROWS)
            assert (found.width == 1) == (steps <= COLUMNS)
