"""Scores of gradient norms."""

from __future__ import annotations

import math
from dataclasses import replace

from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.norms import scores, strays

CLEAN = CellSpec("a", "job", "mlp", {}, None, (), 0, "clean")


def test_a_score_is_in_median_absolute_deviations_of_the_steps_before() -> None:
    norms = [1.0, 2.0, 3.0, 4.0, 5.0, 13.0, 3.0]
    assert scores(norms, window=5) == {5: (13 - 3) / 1, 6: (4 - 3) / 1}


def test_steps_without_a_spread_or_with_nonfinite_norms_have_no_score() -> None:
    assert scores([1.0] * 6, window=5) == {}
    assert list(scores([1.0, 2.0, math.nan, 4.0, 5.0, 1.0, 2.0, 3.0, 4.0, 5.0], window=5)) == [8, 9]


def test_faults_beside_fault_free_runs() -> None:
    calm = tuple(1.0 + 0.01 * (step % 7) for step in range(200))
    wild = (*calm[:150], 1.5, *calm[151:])  # a fault-free run has such a step too
    hit = (*calm[:120], 1.2, *calm[121:])
    runs = [
        (CLEAN, CellResult("a", "finished", norms=calm)),
        (replace(CLEAN, role="reference"), CellResult("b", "finished", norms=wild)),
        (replace(CLEAN, role="fault", faults=("x",)), CellResult("c", "finished", norms=hit, first_step=120)),
        (replace(CLEAN, role="fault", policy={}), CellResult("d", "finished", norms=hit, first_step=120)),
    ]
    (found,) = strays(runs)
    assert (found.calm_runs, found.faults, found.above) == (2, 1, 0)
    assert 5 < found.highest < found.calm
    assert strays(runs[2:]) == ()
