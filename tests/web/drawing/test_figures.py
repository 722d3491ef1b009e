"""A figure that lies is worse than none: what is drawn is what is on record, over any record."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest

from bitwitness.evidence import NONFINITE
from bitwitness.store import pages
from bitwitness.web import drawing, templating
from bitwitness.web.drawing.ring import _MOST as RANKS_DRAWN
from bitwitness.web.drawing.scales import Steps, grouped, round_values
from tests.web import records

CELLS = get_args(pages.Cell)


def some_map(chance: random.Random) -> pages.LedgerMap:
    rows, rank = [], 0
    for _ in range(chance.randint(1, 12)):
        size = chance.randint(1, 4)
        rows.append((rank, rank + size - 1))
        rank += size + chance.choice((0, 0, 3))
    columns, step = [], chance.randint(0, 50)
    for _ in range(chance.randint(1, 30)):
        size = chance.randint(1, 5)
        columns.append((step, step + size - 1))
        step += size + chance.choice((0, 0, 0, 7))
    few = chance.sample(CELLS, chance.randint(1, 3))
    kinds = [tuple(chance.choice(few) for _ in columns) for _ in range(3)]
    cells = tuple(chance.choice(kinds) for _ in rows)
    reasons = {
        f"{row},{column}": "why" for row in range(len(rows)) for column in range(len(columns)) if chance.random() < 0.02
    }
    return pages.LedgerMap("replay", tuple(rows), tuple(columns), cells, reasons)


@pytest.mark.parametrize("seed", range(40))
def test_a_map_draws_every_cell_as_it_is_and_a_gap_as_nothing(seed: int) -> None:
    one = some_map(random.Random(seed))
    steps = Steps.over([step for column in one.columns for step in column])
    made = drawing.ledger(one, steps)
    height = made.height / len(one.rows)
    for index, cells in enumerate(one.cells):
        (row,) = [row for row in made.rows if row.y <= (index + 0.5) * height < row.y + row.height]
        for (first, last), cell in zip(one.columns, cells, strict=True):
            for step in (first, last):
                over = [piece.cell for piece in row.pieces if piece.first <= step <= piece.last]
                assert over == ([] if cell == "gap" else [cell])
    for row in made.rows:
        for piece in row.pieces:
            assert piece.x == pytest.approx(steps.at(piece.first), abs=1e-3)
            assert piece.x + piece.width == pytest.approx(steps.at(piece.last + 1), abs=1e-3)
    assert sum(made.shares.values()) == pytest.approx(1)
    whole = Counter[str]()
    for (low, high), cells in zip(one.rows, one.cells, strict=True):
        for (first, last), cell in zip(one.columns, cells, strict=True):
            whole[cell] += (high - low + 1) * (last - first + 1)
    assert made.shares == pytest.approx({cell: count / whole.total() for cell, count in whole.items()})


def test_a_map_says_in_words_what_has_not_passed_and_why() -> None:
    made = drawing.ledger(records.ledger_map(), Steps(0, 3_999))
    assert [(line.cell, line.ranks, line.steps) for line in made.lines[:2]] == [
        ("failed", "rank 2", "steps 3\u202f600 to 3\u202f639"),
        ("failed", "rank 4", "steps 3\u202f600 to 3\u202f639"),
    ]
    assert any(line.why == "out of memory in the witness" for line in made.lines)
    assert made.more > 0


def test_a_lane_says_passed_only_where_all_ranks_had() -> None:
    def lane(*cells: pages.Cell) -> list[str]:
        one = pages.LedgerMap(
            "replay", tuple((rank, rank) for rank in range(len(cells))), ((0, 9),), tuple((cell,) for cell in cells)
        )
        (made,) = drawing.chart(records.run_page(maps=(one,))).lanes
        return [piece.cell for piece in made.pieces]

    assert lane("passed", "passed") == ["passed"]
    assert lane("passed", "gap") == lane("partly", "gap") == lane("passed", "unverified") == ["partly"]
    assert lane("unverified", "gap") == ["unverified"]
    assert lane("gap", "gap") == ["gap"]
    assert lane("passed", "failed", "gap") == ["failed"]


@pytest.mark.parametrize("seed", range(40))
def test_a_bar_is_filled_to_its_end_and_shows_whatever_is_there(seed: int) -> None:
    chance = random.Random(seed)
    passed, unverified, failed = (chance.choice((0, 1, 7, 10**6)) for _ in range(3))
    seen = passed + unverified + failed
    one = pages.Coverage("replay", passed, unverified, failed, seen + chance.choice((0, 1, 10**7)), 3)
    made = drawing.bar(one)
    there = {"passed": one.passed, "unverified": one.unverified, "failed": one.failed, "gap": one.all - seen}
    assert {part.cell for part in made.parts} == {cell for cell, count in there.items() if count} or not one.all
    assert made.parts[0].x == 0
    assert sum(part.width for part in made.parts) == pytest.approx(100, abs=0.01)
    for part, after in zip(made.parts, made.parts[1:], strict=False):
        assert part.x + part.width == pytest.approx(after.x, abs=0.01)


def test_a_bar_of_a_run_whose_steps_nobody_knows_is_a_gap() -> None:
    assert [part.cell for part in drawing.bar(pages.Coverage("replay", 0, 0, 0, 0, -1)).parts] == ["gap"]
    assert drawing.bar(pages.Coverage("replay", 12, 0, 0, 10, 3)).share is None, "an error is not hidden"


# The chart -----------------------------------------------------------------------------------------------------------


def test_a_value_that_is_not_finite_breaks_the_line_and_has_a_mark() -> None:
    series = pages.Series(
        first=(0, 10, 20, 30), last=(9, 19, 29, 39), loss=(3.0, None, 2.0, 1.9), loss_low=(2.9, None, 1.9, 1.8), loss_high=(3.1, None, 2.1, 2.0),
        norm=(1.0,) * 4, norm_low=(1.0,) * 4, norm_high=(1.0,) * 4, nonfinite=(0, 2, 0, 0), seconds=(None,) * 4,
    )  # fmt: skip
    run = records.run_page(series=series, run=records.run(step=39), maps=(), marks=())
    loss, norm = drawing.chart(run).panels
    assert loss.lines.count("M") == loss.band.count("M") == 2
    assert loss.breaks == norm.breaks == (25.0,)
    assert norm.lines.count("M") == 1
    numbers = [float(found) for found in re.findall(r"-?\d+\.?\d*", loss.lines)]
    assert all(0 <= number <= 100 for number in numbers)


def test_a_loss_that_explodes_does_not_flatten_all_others() -> None:
    series = records.series()
    high = (*series.loss_high[:-1], 1e30)
    made = drawing.chart(
        records.run_page(series=dataclasses.replace(series, loss=(*series.loss[:-1], 1e30), loss_high=high))
    ).panels[0]
    assert made.clipped == 1
    assert made.high < 100


def test_infinite_values_are_drawn_nowhere() -> None:
    series = dataclasses.replace(
        records.series(), loss=(float("inf"),) * 400, loss_low=(float("nan"),) * 400, loss_high=(float("inf"),) * 400
    )
    made = drawing.chart(records.run_page(series=series)).panels[0]
    assert (made.lines, made.band, made.ticks) == ("", "", ())


def test_marks_that_would_hide_each_other_become_one_that_tells_the_gravest() -> None:
    marks = (
        pages.Mark(1_000, records.at(1), "drill", "a drill", "drill"),
        pages.Mark(1_001, records.at(2), "attributed", "rank 4 was named", "named"),
        pages.Mark(2_000, records.at(3), "unattributed", "nobody was named", "nobody"),
    )
    rows = dict(drawing.chart(records.run_page(marks=marks)).rows)
    assert [(flag.kind, flag.link, flag.count) for flag in rows["incidents"]] == [
        ("attributed", "named", 2),
        ("unattributed", "nobody", 1),
    ]


def test_a_checkpoint_does_not_lengthen_the_axis() -> None:
    """It bears the number of the step that would come next; an axis to there would show a gap where nothing was trained."""
    marks = (pages.Mark(40, records.at(1), "checkpoint", "saved"),)
    page = records.run_page(run=records.run(step=39), series=pages.Series(), maps=(), marks=marks)
    assert drawing.axis(page) == Steps(39, 39)
    assert dict(drawing.chart(page).rows)["checkpoints"][0].x > 99


def test_round_values_are_few_and_within() -> None:
    chance = random.Random(7)
    for _ in range(300):
        low = chance.uniform(-1e6, 1e6)
        high = low + 10 ** chance.uniform(-6, 9)
        found = round_values(low, high, 6)
        slack = abs(high) * 1e-9 + 1e-6
        assert len(found) <= 6
        assert all(low - slack <= value <= high + slack for value in found)
    assert round_values(float("nan"), 1, 5) == round_values(0, float("inf"), 5) == round_values(2, 1, 5) == []


# The ring ------------------------------------------------------------------------------------------------------------


def test_the_ring_draws_who_is_named_and_which_pairs_do_not_agree() -> None:
    made = drawing.ring(records.incident_page())
    assert [point.rank for point in made.points if point.role == "named"] == [4]
    assert [group.node for group in made.groups] == ["node-0", "node-1", "node-2", "node-3"]
    assert [group.node for group in made.groups if group.named] == ["node-2"]
    differ = {(chord.owner, chord.witness) for chord in made.chords if chord.outcome == "differs"}
    assert differ == {(4, 6), (4, 0), (2, 4), (0, 4)}
    assert len(made.chords) == 16
    assert made.hidden == made.more == 0
    assert [chord.outcome for chord in made.chords] == ["agrees"] * 12 + ["differs"] * 4


def test_the_ring_of_an_unattributed_incident_names_nobody() -> None:
    made = drawing.ring(records.unattributed_page())
    assert {point.role for point in made.points} == {"candidate"}
    assert not [group for group in made.groups if group.named]
    assert made.differing == 3


def test_of_a_large_job_the_ranks_that_matter_are_drawn_and_the_others_counted() -> None:
    world = 4_096
    observations = tuple(
        records.seen(rank, owner, records.BAD if rank == 4_000 else records.GOOD)
        for owner in range(0, world, 2)
        for rank in (owner, (owner + 8) % world)
    )
    page = records.incident_page(
        incident=records.incident(ranks=(4_000,), nodes=("node-2000",)),
        observations=observations,
        placement=records.places(world),
        world_size=world,
    )
    made = drawing.ring(page)
    assert len(made.points) == RANKS_DRAWN
    assert made.hidden == world - RANKS_DRAWN
    assert {4_000, 3_992, 4_008} <= {point.rank for point in made.points}
    assert sum(chord.outcome == "differs" for chord in made.chords) == made.differing == 2
    assert len({(point.x, point.y) for point in made.points}) == RANKS_DRAWN
    assert all(0 < point.x < 400 and 0 < point.y < 400 for point in made.points)


def test_runs_that_are_not_finite_or_failed_are_no_agreement() -> None:
    observations = (
        records.seen(0, 0, NONFINITE), records.seen(2, 0, NONFINITE), records.seen(4, 0, "", error="out of memory", repeats=""),
    )  # fmt: skip
    made = drawing.ring(dataclasses.replace(records.unattributed_page(), observations=observations))
    assert {(chord.witness, chord.outcome) for chord in made.chords} == {(2, "differs"), (4, "unknown")}


def test_replicas_that_differ_are_drawn_between_those_that_hold_different_values() -> None:
    observations = tuple(
        pages.Seen("replicas", 9, rank, "state", records.BAD if rank == 4 else records.GOOD, (), None, None, "", {})
        for rank in range(8)
    )
    made = drawing.ring(records.incident_page(observations=observations))
    assert [(chord.owner, chord.witness, chord.outcome) for chord in made.chords] == [(0, 4, "differs")]


def test_a_ring_of_nothing_is_empty() -> None:
    made = drawing.ring(records.filled(pages.IncidentPage, "", 0, 0))
    assert (made.points, made.chords, made.hidden) == ((), (), 0)


# The life of a node ----------------------------------------------------------------------------------------------------


def test_a_strike_counts_a_cleared_one_does_not_and_being_involved_is_neither() -> None:
    made = drawing.lifeline(records.node_page())
    assert made is not None
    assert sorted(point.kind for point in made.points) == ["cleared", "involved", "strike"]
    assert [lane.name for lane in made.lanes] == ["GPU-8f2e6a30", "GPU-8f2e6a31"]
    assert all(bar.x >= 0 and bar.x + bar.width <= 100 for lane in made.lanes for bar in lane.bars)
    assert [len(lane.bars) for lane in made.lanes] == [3, 3]


def test_a_drill_that_named_a_device_is_no_strike_on_its_line() -> None:
    strikes = tuple(dataclasses.replace(one, counts=True, judgement="drill") for one in records.node_page().strikes)
    made = drawing.lifeline(records.node_page(strikes=strikes, involved=()))
    assert made is not None
    assert {point.kind for point in made.points} == {"cleared"}


def test_a_life_without_times_has_no_line() -> None:
    assert drawing.lifeline(records.filled(pages.NodePage)) is None
    assert drawing.lifeline(records.filled(pages.NodePage, "", 0, 0)) is None


# Whatever is on record -------------------------------------------------------------------------------------------------

EXTREME = (
    None, 0.0, -0.0, 5e-324, -5e-324, 2.5e-323, 1e-308, 1.0, 1.0 + 2**-52, -1.0, 3.7, 1e16, 1e300, 1e308, -1e308, sys.float_info.max,
    -sys.float_info.max, math.nan, math.inf, -math.inf,
)  # fmt: skip
TIMES = (
    "", "soon", "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00", "9999-12-31T23:59:59Z", "2026-11-30T06:00:00Z", "1969-01-01",
)  # fmt: skip


def every_number(value: object) -> Iterator[float]:
    """All numbers of a figure, those in its paths included."""
    if isinstance(value, str):
        if value.startswith("M") and templating.path(value):
            yield from (float(one) for one in re.findall(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", value))
    elif isinstance(value, float):
        yield value
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from every_number(getattr(value, one.name))
    elif isinstance(value, dict | tuple | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from every_number(entry)


def extreme_run(chance: random.Random) -> pages.RunPage:
    few = chance.sample(EXTREME, chance.randint(1, 3))
    many = chance.choice((0, 1, 2, 9))

    def values() -> tuple[float | None, ...]:
        return tuple(chance.choice(few) for _ in range(many))

    steps = sorted(chance.choice((0, 1, 2, 10**6, 2**62)) for _ in range(many))
    series = pages.Series(
        tuple(steps), tuple(steps), values(), values(), values(), values(), values(), values(),
        tuple(chance.choice((0, 1)) for _ in range(many)), values(),
    )  # fmt: skip
    marks = tuple(pages.Mark(chance.choice((-1, 0, 7, 2**62)), "", "checkpoint", "") for _ in range(2))
    kinds: tuple[pages.Cell, ...] = ("gap", "passed", "failed")
    maps = (
        pages.LedgerMap("replay", ((0, 2**62),), ((0, 0), (5, 2**62)), ((chance.choice(kinds), chance.choice(kinds)),)),
        pages.LedgerMap("update", (), (), ()),
        pages.LedgerMap("replicas", ((3, 1),), ((9, 2),), ((), ("passed",))),
    )
    return records.run_page(run=records.run(step=chance.choice((-1, 3, 2**62))), series=series, marks=marks, maps=maps)


@pytest.mark.parametrize("seed", range(300))
def test_every_figure_is_finite_whatever_is_on_record(seed: int) -> None:
    chance = random.Random(seed)
    run = extreme_run(chance)
    made = drawing.chart(run)
    for panel in made.panels:
        assert all(-1 <= one.at <= 101 for one in panel.ticks), panel.ticks
        assert len({one.at for one in panel.ticks}) == len(panel.ticks) <= 5
        for path in (panel.lines, panel.band):
            assert all(0 <= one <= 100 for one in every_number(path)), path
    life = records.node_page(
        stays=tuple(
            dataclasses.replace(one, first=chance.choice(TIMES), last=chance.choice(TIMES)) for one in records.node_page().stays
        ),
        strikes=tuple(dataclasses.replace(one, time=chance.choice(TIMES)) for one in records.node_page().strikes),
    )  # fmt: skip
    few = chance.sample(range(-3, 40), chance.randint(1, 8))
    observations = tuple(
        records.seen(chance.choice(few), chance.choice(few), chance.choice(("", NONFINITE, "aa", "bb")))
        for _ in range(12)
    )
    ring = drawing.ring(records.incident_page(observations=observations[: chance.randint(0, 12)], world_size=-1))
    passed, unverified, failed, every = (chance.choice((-1, 0, 1, 2**62)) for _ in range(4))
    figures = (
        made, drawing.axis(run), drawing.lifeline(life), ring, drawing.bar(pages.Coverage("replay", passed, unverified, failed, every, 3)),
        *(drawing.ledger(one, made.steps) for one in run.maps),
    )  # fmt: skip
    numbers = list(every_number(figures))
    assert numbers
    assert all(math.isfinite(one) for one in numbers)
    for one in EXTREME:
        assert templating.figure(one)
        assert one is None or grouped(one)
