"""The tail of a binomial distribution, against its definition."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from bitwitness.scan.chance import chernoff, tail


def exact(trials: int, least: int, share: Fraction) -> float:
    return float(sum(comb(trials, n) * share**n * (1 - share) ** (trials - n) for n in range(least, trials + 1)))


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(1, 16), Fraction(9, 10), Fraction(1, 1000)])
@pytest.mark.parametrize("trials", [1, 2, 7, 40])
def test_it_is_the_definition_above_the_mean_and_one_below_it(trials: int, share: Fraction) -> None:
    for least in range(trials + 2):
        wanted = 1.0 if least <= trials * share else exact(trials, least, share)
        assert tail(trials, least, float(share)) == pytest.approx(wanted, rel=1e-9)


def test_many_wrong_answers_elsewhere_make_one_here_no_less_probable() -> None:
    assert tail(1_000_000, 1, 1 / 16) == 1.0
    assert tail(10**9, 10**9 // 16 + 1, 1 / 16) == pytest.approx(0.5, abs=0.01)


def test_what_cannot_be_has_no_probability() -> None:
    assert tail(3, 4, 0.5) == 0.0
    assert tail(3, 1, 0.0) == 0.0


@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(1, 16), Fraction(1, 1000)])
@pytest.mark.parametrize("trials", [1, 7, 40])
def test_the_bound_is_one(trials: int, share: Fraction) -> None:
    for least in range(1, trials + 1):
        assert chernoff(least, float(trials * share)) >= exact(trials, least, share) * (1 - 1e-9)
    assert chernoff(3, 0.0) == 0.0
    assert chernoff(0, 0.0) == 1.0
