"""How one tensor differs from another, against definitions written down the slow way."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from bitwitness.compare.differing import difference, distance, ranges, spread, squares
from bitwitness.compare.records import DECADES, Difference
from bitwitness.compare.tape import host, like, overwrite
from bitwitness.mutate import words_of

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
]


def made(dtype: torch.dtype, seed: int, shape: tuple[int, ...] = (5, 7)) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


def found(observed: Tensor, expected: Tensor, **options: Tensor | None) -> Difference:
    seen = difference(4, observed, expected, options.get("previous"))
    assert seen is not None
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_are_no_difference_and_one_bit_is(dtype: torch.dtype) -> None:
    one = made(dtype, 1)
    assert difference(0, one, one.clone()) is None
    assert spread(0, one, one.clone()) is None
    other = one.clone()
    other[2, 3] = not other[2, 3] if dtype == torch.bool else other[2, 3].to(torch.float64).add(1).to(dtype)
    seen = found(other, one)
    assert (seen.site, seen.mismatches) == (4, 1)
    words = (int(words_of(tensor, [17])) & (1 << 64) - 1 for tensor in (one, other))
    assert seen.elements == ((17, *words),)
    rough = spread(4, other, one)
    assert rough is not None
    assert (rough.mismatches, rough.noise, rough.answer) == (1, seen.noise, seen.answer)


def test_nan_is_equal_to_itself_and_zeros_of_both_signs_differ() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert difference(0, nan, nan.clone()) is None
    assert spread(0, nan, nan.clone()) is None
    seen = found(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert (seen.mismatches, seen.zeros, seen.zero_largest, seen.severity_of, seen.ulp_largest) == (1, 1, 0.0, 0, 0)


def test_figures_as_they_are_defined() -> None:
    expected = torch.tensor([0.0, 2.0, -4.0, 1.0, math.inf, 8.0, 5.0])
    observed = torch.tensor([3.0, 2.5, 4.0, math.nan, 1.0, 8.0, 0.0])
    seen = found(observed, expected)
    assert seen.mismatches == 6
    assert seen.severity_of == 3
    assert seen.severity_sum == pytest.approx(0.25 + 2.0 + 1.0)
    assert seen.severity_largest == 2.0
    assert (seen.zeros, seen.zero_largest) == (1, 3.0)
    assert seen.nonfinite == 2
    assert seen.noise == pytest.approx(9 + 0.25 + 64 + 25)
    assert seen.signal == pytest.approx(4 + 16 + 64 + 25)
    assert seen.classes == {"zero": 1, "special": 1, "sign": 1, "moved": 1, "other": 2}


def test_classes_say_what_was_stale() -> None:
    before, right = made(torch.float32, 1), made(torch.float32, 2)
    observed = right.clone()
    observed[0, :3] = before[0, :3]
    observed[1, 1] = right[4, 4]
    assert found(observed, right, previous=before).classes == {"stale": 3, "moved": 1}
    assert found(observed, right, previous=made(torch.float32, 3, (7, 5))).classes == {"other": 3, "moved": 1}


@pytest.mark.parametrize("pair", [(1.0, 1.0000001), (-1e-45, 1e-45), (-1.0, 1.0), (3.0e38, -3.0e38)])
def test_units_in_the_last_place(pair: tuple[float, float]) -> None:
    one, other = (torch.tensor([value]) for value in pair)

    def order(value: float) -> int:
        word = struct.unpack("<i", struct.pack("<f", value))[0]
        return int(word) if word >= 0 else -(word & 0x7FFFFFFF)

    assert found(one, other).ulp_largest == abs(order(float(one)) - order(float(other)))
    wide = found(one.double(), other.double()).ulp_largest
    assert wide > found(one, other).ulp_largest


def test_the_first_elements_are_kept() -> None:
    right = torch.arange(100, dtype=torch.float32)
    seen = difference(0, right + 1, right, None, 5)
    assert seen is not None
    assert seen.mismatches == 100
    assert [index for index, _, _ in seen.elements] == [0, 1, 2, 3, 4]


def test_ranges_count_every_element_once(seed: int) -> None:
    values = (10.0 ** torch.empty(500).uniform_(-15, 12, generator=torch.Generator().manual_seed(seed))).tolist()
    values += [0.0, -0.0, math.inf, -math.inf, math.nan, *DECADES]
    counts = ranges(torch.tensor(values, dtype=torch.float64)).tolist()
    expected = [0] * len(DECADES)
    for value in values:
        size = abs(value)
        if size == 0:
            expected[0] += 1
        elif math.isnan(size):
            expected[-1] += 1
        else:
            expected[max(1, *(place for place, low in enumerate(DECADES) if low <= size))] += 1
    assert counts == expected


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(4, 3).t(),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(2, 3, dtype=torch.complex64).conj(),
        torch.zeros(()),
        torch.zeros(5, dtype=torch.bool),
        torch.zeros(8)[::2],
    ],
    ids=["expanded", "transposed", "complex", "conjugate", "scalar", "bool", "strided"],
)
def test_what_is_written_is_what_is_read(tensor: Tensor) -> None:
    target = tensor.clone() if tensor.is_conj() else tensor
    right = host(torch.ones_like(target))
    version = target._version
    overwrite(target, right)
    assert torch.equal(host(target), right)
    assert target._version == version, "autograd must not see it"
    assert torch.equal(host(like(target, right)), right)


def test_a_copy_on_the_host_shares_no_memory() -> None:
    one = torch.zeros(3)
    copy = host(one)
    one += 1
    assert copy.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_that_is_compared_is_written_to(dtype: torch.dtype) -> None:
    given = [made(dtype, seed) for seed in (1, 2, 3)]
    if dtype.is_floating_point:
        bad = math.nan if dtype == torch.float8_e4m3fn else math.inf  # that one has no infinity
        for place, (tensor, value) in enumerate(zip(given, (math.nan, bad, -bad), strict=True)):
            tensor[place, place] = value
    before = [host(one).view(torch.uint8) for one in given]
    observed, expected, previous = given
    assert difference(0, observed, expected, previous) is not None
    assert spread(0, observed, expected) is not None
    distance(observed, expected)
    ranges(expected)
    squares(expected)
    like(observed, expected)
    assert [torch.equal(host(one).view(torch.uint8), kept) for one, kept in zip(given, before, strict=True)] == [
        True
    ] * 3


def test_a_zero_of_the_other_sign_is_a_sign_and_no_lost_number() -> None:
    seen = found(torch.tensor([-0.0, 0.0, 0.0]), torch.tensor([0.0, -0.0, 3.0]))
    assert seen.classes == {"sign": 2, "zero": 1}


def test_the_distance_is_of_what_differs() -> None:
    right = torch.tensor([math.nan, math.inf, 1.0], dtype=torch.float64)
    other = right.clone()
    other[2] = 3.0
    assert distance(other, right) == 4.0
    other[0] = 0.0
    assert distance(other, right) == math.inf


def test_large_finite_numbers_are_finite() -> None:
    rough = spread(0, torch.tensor([1e308], dtype=torch.float64), torch.tensor([-1e308], dtype=torch.float64))
    assert rough is not None
    assert rough.nonfinite == 0


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 3).t(), torch.zeros(3, 1).expand(3, 4)], ids=["transposed", "expanded"]
)
def test_what_stands_in_the_place_of_another_is_laid_out_as_it_is(tensor: Tensor) -> None:
    assert like(tensor, host(torch.ones_like(tensor))).stride() == tensor.stride()


class Named(Tensor):
    """A subclass that adds nothing."""


def test_subclasses_are_compared_as_what_they_are() -> None:
    one = torch.zeros(3).as_subclass(Named)
    assert type(host(one)) is Tensor
    overwrite(one, torch.ones(3))
    assert one.tolist() == [1, 1, 1]
