"""Faults on purpose: what is understood, what is refused, and that just one bit is changed, with the probability that was asked for."""

from __future__ import annotations

import random

import pytest
import torch

from bitwitness.errors import ConfigurationError
from bitwitness.scan.drill import Drill, check, parse
from bitwitness.scan.striking import Striker


@pytest.mark.parametrize(
    ("text", "drill"),
    [
        ("rank=5 p=0.001", Drill(0.001, rank=5)),
        ("rank=0", Drill(1.0, rank=0)),
        ("p=0.1, link=3-7", Drill(0.1, link=(3, 7))),
    ],
)
def test_what_is_understood(text: str, drill: Drill) -> None:
    assert parse(text) == drill
    assert parse(str(drill)) == drill


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank",
        "rank=x",
        "rank=1 p=0",
        "rank=1 p=2",
        "rank=1 p=nan",
        "link=3",
        "link=3-3",
        "rank=1 link=1-2",
        "p=1",
        "rank=1 q=1",
    ],
)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        parse(text)


def test_a_rank_of_another_scan_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="0 to 3"):
        check([Drill(1.0, rank=4)], 4)
    check([Drill(1.0, link=(0, 3))], 4)


def test_one_bit_of_a_copy_is_flipped() -> None:
    outputs = [torch.zeros(0), torch.arange(12, dtype=torch.float64).reshape(3, 4), torch.tensor(True)]
    before = [output.clone() for output in outputs]
    striker = Striker([Drill(1.0, rank=2)], 2, seed=1)
    struck = striker.strike(outputs)
    assert all(torch.equal(one, other) for one, other in zip(outputs, before, strict=True))
    flipped = sum(
        int.bit_count(first ^ second)
        for one, other in zip(struck, outputs, strict=True)
        for first, second in zip(_bytes(one), _bytes(other), strict=True)
    )
    assert flipped == 1


def test_it_strikes_as_often_as_asked_and_only_its_rank(seed: int) -> None:
    random.seed(seed)
    state = random.getstate()
    outputs = [torch.zeros(4)]
    striker, other = Striker([Drill(0.1, rank=1)], 1, seed), Striker([Drill(0.1, rank=1)], 0, seed)
    for _ in range(2000):
        striker.strike(outputs)
        assert other.strike(outputs) is outputs
    assert 100 < striker.struck < 320  # 200 +- 13: beyond, chance would need eight standard deviations
    assert random.getstate() == state


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
