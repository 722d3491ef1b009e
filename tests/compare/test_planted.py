"""What is planted is found: rates within their intervals, masks, strides, tiles and periods; through the whole of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitwitness.compare.judging import judge
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.results import Patterns, Row
from bitwitness.compare.simulated import Simulated
from bitwitness.compare.workload import Make
from tests.compare.lineups import ONE_STEP, compared, make_with, rows, squared

SEED = 20261130
"""Of all that is drawn here."""


class Sheet(nn.Module):
    """One large result: `[rows, 1024]` from a number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Outer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.work(x)
        return y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 1024))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sheet(count: int) -> Make:
    return make_with(Sheet, lambda number: rows(number, count, 1), squared)


def looked_at(files: CompareFiles) -> tuple[Row, Patterns | None]:
    result = judge(files, "suspect", 0.95)
    (mode,) = result.modes
    row = next(one for one in mode.rows if (one.group, one.phase) == ("work", "fwd_out"))
    return row, mode.patterns[0] if mode.patterns else None


@pytest.mark.parametrize(
    ("rate", "count", "steps"), [(1e-6, 1024, 12), (1e-5, 512, 8), (1e-4, 128, 8), (1e-3, 32, 8), (1e-2, 32, 8)]
)
def test_planted_rates_are_within_their_intervals(tmp_path: Path, rate: float, count: int, steps: int) -> None:
    fault = f"fwd_out:work @ every=1 : rate={rate} -> bit=20 ; permanent redraw"
    files = compared(tmp_path, fault, make=sheet(count), modes=["lock-step"], steps=steps, seed=SEED)
    row, _ = looked_at(files)
    assert row.mismatches.of == count * 1024 * steps
    assert row.mismatches.low <= rate <= row.mismatches.high
    assert row.mismatches.low > 0
    assert row.mismatches.high < 10 * rate, "an interval that says everything says nothing"


def test_nothing_seen_has_a_bound(tmp_path: Path) -> None:
    row, patterns = looked_at(compared(tmp_path, make=sheet(128), modes=["lock-step"], steps=4))
    assert row.mismatches.count == 0
    assert row.bound == pytest.approx(3.0 / (128 * 1024 * 4), rel=0.01)
    assert row.step_bound == pytest.approx(1 - 0.05**0.25)
    assert patterns is None or patterns.records == 0


def planted(path: Path, select: str, mutate: str = "bit=20", count: int = 64) -> Patterns:
    fault = f"fwd_out:work @ every=1 : {select} -> {mutate} ; permanent redraw"
    _, found = looked_at(compared(path, fault, make=sheet(count), modes=["lock-step"], steps=12, seed=SEED))
    assert found is not None
    return found


def test_a_planted_mask_is_found(tmp_path: Path) -> None:
    found = planted(tmp_path, "n=5")
    assert found.masks == ((1 << 20, 60),)
    assert found.bits[20] == (found.bits[20][0], 60 - found.bits[20][0])
    assert sum(sum(pair) for pair in found.bits) == 60
    assert any("00100000" in one for one in found.findings), found.findings


def test_a_bit_that_is_stuck_flips_one_way_only(tmp_path: Path) -> None:
    found = planted(tmp_path, "n=40", "stuck1=20")
    assert found.bits[20][0] > 200
    assert found.bits[20][1] == 0


@pytest.mark.parametrize("stride", [2, 4, 8, 16, 32])
def test_a_planted_stride_is_found(tmp_path: Path, stride: int) -> None:
    found = planted(tmp_path, f"run=8,stride={stride}")
    assert min(one.lag for one in found.lags if one.found) == stride
    assert all(one.lag % stride == 0 for one in found.lags if one.found)


def test_a_planted_tile_is_found(tmp_path: Path) -> None:
    found = planted(tmp_path, "tile=3x3")
    assert max(found.tiles, key=lambda one: one[2])[:2] == (3, 3)


def test_a_planted_period_is_found_on_both_axes(tmp_path: Path) -> None:
    found = planted(tmp_path, "grid=4,rows=8,columns=32")
    assert {(one.axis, one.period) for one in found.periods} >= {("row", 8), ("column", 32)}


def test_scattered_errors_have_no_pattern_of_place(tmp_path: Path) -> None:
    found = planted(tmp_path, "rate=0.001", "random")
    assert found.records > 500
    assert not any(one.found for one in found.lags)
    assert found.periods == ()


def test_where_most_steps_do_not_count_nothing_is_said_to_be_clean(tmp_path: Path) -> None:
    for steps, said in (("1..2", "nothing seen"), ("1..4", "not characterised")):
        bad = {"reference-1": Simulated(f"fwd_out:first.up @ steps={steps} : n=2 -> set=9.0 ; permanent", SEED)}
        files = compared(tmp_path / steps, bad, modes=["lock-step"], steps=6)
        result = judge(files, "suspect")
        assert result.outcome == said, result.sentence
        assert any("reference-1 differs from the leader" in note for note in result.notes)


@pytest.mark.parametrize(
    ("bad", "said"),
    [("reference-0", "not characterised"), ("reference-1", "not characterised"), ("suspect", "differs")],
)
def test_a_wrong_name_is_never_given(tmp_path: Path, bad: str, said: str) -> None:
    fault = "fwd_out:first.up @ every=1 : n=2 -> set=9.0 ; permanent redraw"
    files = compared(tmp_path, {bad: Simulated(fault, SEED)}, modes=["lock-step"], steps=8)
    assert judge(files, "suspect").outcome == said


def test_one_event_is_no_verdict(tmp_path: Path) -> None:
    files = compared(tmp_path, ONE_STEP)
    result = judge(files, "suspect")
    assert result.outcome == "not characterised"
    assert "work that now and then does not repeat" in result.sentence
    assert result.modes[0].first == 1
