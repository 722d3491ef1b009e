"""Intervals that hold what they promise, for single mismatches and for spikes; correlation of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from bitwitness.compare.intervals import UNEVEN, _least_of_squares, caution, design_effect, rate, spearman
from bitwitness.faults.statistics import highest_rate, wilson

CONFIDENCE = 0.95
SEED = 20260901
ELEMENTS = 100_000

Counts = list[tuple[int, int]]


def poisson(dice: random.Random, mean: float) -> int:
    """By the gaps between events where there are few; else the normal one, which is as good as it."""
    if mean > 50:
        return max(0, round(dice.gauss(mean, math.sqrt(mean))))
    count, passed = 0, dice.expovariate(1.0)
    while passed < mean:
        count, passed = count + 1, passed + dice.expovariate(1.0)
    return count


def coverage(draw: Callable[[random.Random], Counts], true: float, runs: int = 400) -> float:
    dice = random.Random(SEED)
    inside = 0
    for _ in range(runs):
        found = rate(draw(dice), CONFIDENCE)
        inside += found.low <= true <= found.high
    return inside / runs


def least(runs: int = 400) -> float:
    """Nominal less 2 %, and less three standard deviations of the simulation itself."""
    return CONFIDENCE - 0.02 - 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / runs)


@pytest.mark.parametrize("true", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("steps", [5, 40])
def test_planted_rates_are_in_the_interval(true: float, steps: int) -> None:
    def draw(dice: random.Random) -> Counts:
        return [(poisson(dice, ELEMENTS * true), ELEMENTS) for _ in range(steps)]

    assert coverage(draw, true) >= least(), f"seed {SEED}"


@pytest.mark.parametrize("hit", [0.1, 0.3])
@pytest.mark.parametrize(
    ("size", "mean"),
    [
        (lambda dice: poisson(dice, 300.0), 300.0),
        (lambda dice: 9 * (1 + poisson(dice, 1.0)), 18.0),
        (lambda dice: poisson(dice, dice.expovariate(1 / 200)), 200.0),
    ],
    ids=["alike", "tiles", "unlike"],
)
def test_spikes_are_in_the_interval_too(hit: float, size: Callable[[random.Random], int], mean: float) -> None:
    def draw(dice: random.Random) -> Counts:
        return [(size(dice) if dice.random() < hit else 0, ELEMENTS) for _ in range(80)]

    assert coverage(draw, hit * mean / ELEMENTS) >= least(), f"seed {SEED}"


@pytest.mark.parametrize(
    ("sigma", "hit", "steps", "promised"),
    [(1.5, 0.05, 200, 0.95), (1.5, 0.3, 12, 0.95), (2.0, 0.1, 200, 0.95), (2.0, 0.3, 40, 0.95), (2.0, 0.3, 12, 0.9)],
)
def test_spikes_of_very_different_sizes_are_in_the_interval(
    sigma: float, hit: float, steps: int, promised: float
) -> None:
    """Of few spikes of sizes that span decades it is less than was asked for, as the module says."""

    def draw(dice: random.Random) -> Counts:
        sizes = [round(dice.lognormvariate(4, sigma)) if dice.random() < hit else 0 for _ in range(steps)]
        return [(min(size, 10**6), 10**6) for size in sizes]

    true = hit * math.exp(4 + sigma**2 / 2) / 10**6
    assert coverage(draw, true) >= least() - (CONFIDENCE - promised), f"seed {SEED}"


def test_what_is_scattered_pays_nothing_for_spikes() -> None:
    """Nor do spikes of one size, once there are some."""
    dice = random.Random(SEED)
    wide = []
    for _ in range(100):
        found = rate([(poisson(dice, 1.0), 10**6) for _ in range(12)])
        wide.append(found.high / 1e-6)
    assert sorted(wide)[50] < 2.5
    alike = rate([(1000 if step % 5 == 0 else 0, 10**6) for step in range(40)])
    assert alike.high < 3 * (alike.share or 0)


def test_a_caution_is_given_where_one_step_has_a_third_of_all() -> None:
    assert caution([(0, 1000)] * 5 + [(40, 1000), (30, 1000), (300, 1000)]) == UNEVEN
    assert caution([(100, 1000)]) == UNEVEN
    assert caution([(0, 1000)] * 5 + [(100, 1000)] * 4) == ""
    assert caution([(0, 1000)] * 9 + [(1, 1000)]) == "", "one element alone is no spike"
    assert caution([(0, 1000)]) == caution([]) == ""


def test_quantiles_of_chi_square_are_those_of_tables() -> None:
    tables = {1: 0.000982, 2: 0.0506, 5: 0.8312, 10: 3.247, 30: 16.791, 100: 74.222}
    for freedom, value in tables.items():
        assert _least_of_squares(freedom, 0.025) == pytest.approx(value, rel=1e-3)


def test_the_plain_interval_would_not_hold_spikes() -> None:
    """What this module is for: else `faults.statistics` would do."""
    dice, inside = random.Random(SEED), 0
    for _ in range(200):
        wrong = sum(poisson(dice, 300.0) for _ in range(80) if dice.random() < 0.1)
        found = wilson(wrong, 80 * ELEMENTS)
        inside += found.low <= 30 / ELEMENTS <= found.high
    assert inside < 100


def test_an_interval_is_as_narrow_as_the_plain_one_where_elements_are_independent() -> None:
    dice = random.Random(SEED)
    counts = [(poisson(dice, 40.0), ELEMENTS) for _ in range(200)]
    found, plain = rate(counts), wilson(sum(wrong for wrong, _ in counts), 200 * ELEMENTS)
    assert (found.high - found.low) < 1.3 * (plain.high - plain.low)
    assert found.count == plain.count
    assert found.of == plain.of


def test_nothing_seen_ends_at_the_bound() -> None:
    found = rate([(0, 1000)] * 10)
    assert (found.count, found.of, found.low) == (0, 10_000, 0.0)
    assert found.high == highest_rate(10_000)
    assert rate([]).high == 1.0
    assert rate([(0, 0), (0, 0)]).high == 1.0


def test_one_step_is_one_event() -> None:
    found = rate([(500, 1000)])
    assert found.low < 0.5 < found.high
    assert found.high == pytest.approx(1.0, abs=0.01)
    assert found.low < 0.05
    assert design_effect([(500, 1000)]) == 500


def test_the_same_positions_in_every_step_leave_the_interval_of_that_many() -> None:
    found = rate([(7, 1000)] * 50)
    assert design_effect([(7, 1000)] * 50) == 1.0
    assert found.low < 0.007 < found.high


def test_all_wrong_is_a_share_too() -> None:
    found = rate([(10, 10)] * 20)
    assert found.high == 1.0
    assert 0.9 < found.low < 1.0


def test_more_confidence_is_wider_and_ends_stay_in_order() -> None:
    counts = [(wrong, 1000) for wrong in (0, 3, 0, 1, 40, 2, 0, 0, 1, 5)]
    some = [rate(counts, confidence) for confidence in (0.5, 0.8, 0.95, 0.99, 0.999)]
    assert all(wide.low <= narrow.low and narrow.high <= wide.high for narrow, wide in pairwise(some))
    assert all(0 <= one.low <= 52 / 10_000 <= one.high <= 1 for one in some)


@pytest.mark.parametrize("counts", [[(2, 1)], [(-1, 5)]])
def test_what_is_no_count_is_refused(counts: Counts) -> None:
    with pytest.raises(ValueError, match="none"):
        rate(counts)


def test_correlation_of_ranks() -> None:
    rising = [(float(number), float(number**3)) for number in range(10)]
    assert spearman(rising) == pytest.approx(1.0)
    assert spearman([(x, -y) for x, y in rising]) == pytest.approx(-1.0)
    # By hand: d = 1, 1 at one swap of neighbours in 8 ranks; 1 - 6 * 2 / (8 * 63).
    swapped = [(float(x), float(y)) for x, y in enumerate([1, 0, 2, 3, 4, 5, 6, 7])]
    assert spearman(swapped) == pytest.approx(1 - 12 / 504)
    tied = [(0.0, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    assert spearman(tied) == pytest.approx(0.0)


def test_correlation_is_not_said_of_too_little() -> None:
    assert spearman([(float(number), 1.0) for number in range(20)]) is None
    assert spearman([(float(number), float(number)) for number in range(7)]) is None
    assert spearman([(None, float(number)) for number in range(20)]) is None


def test_every_interval_holds_the_share_that_was_measured(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(4000):
        size = dice.choice([1, 2, 10, 96, 1000, 10**6])
        steps = [
            (dice.choice([0, dice.randint(0, size), size, min(1, size)]), size) for _ in range(dice.randint(1, 12))
        ]
        found = rate(steps)
        assert 0 <= found.low <= (found.share or 0.0) <= found.high <= 1, steps
