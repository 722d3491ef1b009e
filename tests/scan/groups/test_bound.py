"""The bound is what the literature says where that is known in closed form."""

from __future__ import annotations

import math

import pytest

from bitwitness.scan.groups.bound import bound, capacity, sets


@pytest.mark.parametrize("bad", [1, 2, 3, 5])
def test_a_test_of_certain_faults_tells_one_bit(bad: int) -> None:
    assert capacity(bad, 1.0) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
def test_one_bad_node_is_a_z_channel(rate: float) -> None:
    """Capacity log2(1 + (1 - z) z^(z / (1 - z))), with z the chance that a fault does not show."""
    quiet = 1 - rate
    assert capacity(1, rate) == pytest.approx(math.log2(1 + rate * quiet ** (quiet / rate)), rel=1e-6)


def test_small_rates_tell_their_share_of_e() -> None:
    assert capacity(1, 1e-4) == pytest.approx(1e-4 / (math.e * math.log(2)), rel=1e-3)


def test_the_bound_is_its_largest_part() -> None:
    one = bound(1000, 1, 1.0, 0.99, None)
    assert sets(1000, 1) == 1001
    assert one.counting == pytest.approx(math.log2(1001))
    assert one.tests == one.accusing == pytest.approx(math.log2(1001) + math.log2(100))
    healthy = bound(1000, 0, 1.0, 0.99, 0.1)
    assert healthy.tests == healthy.certifying == pytest.approx(math.log(0.01) / math.log(0.9))
