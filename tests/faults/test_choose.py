from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.faults import choose
from bitwitness.faults.spec import Select

SHAPES = st.lists(st.integers(1, 7), max_size=5).map(tuple)
COUNTS = st.integers(1, 9)
SHARES = st.floats(0.0, 1.0, exclude_min=True)
SELECTS = st.one_of(
    st.builds(Select, st.sampled_from(["row", "largest", "all"])),
    st.builds(Select, st.just("rate"), rate=SHARES),
    st.builds(Select, st.just("run"), count=COUNTS, stride=COUNTS, align=COUNTS, channels_last=st.booleans()),
    st.builds(Select, st.just("groups"), count=COUNTS, channels_last=st.booleans()),
    st.builds(lambda k, c, r: Select("grid", count=min(k, c), columns=max(k, c), rows=r), COUNTS, COUNTS, COUNTS),
    st.builds(Select, st.just("tile"), count=COUNTS, columns=COUNTS, low=st.just(0.2), high=st.just(0.75)),
    st.builds(Select, st.just("frac"), low=st.just(0.1), high=SHARES.filter(lambda high: high >= 0.1)),
)


def drawn(select: Select, tensor: Tensor, seed: int = 0, only_if: tuple[float, float] | None = None) -> list[int]:
    found = choose.indices(select, tensor, Random(seed), torch.Generator().manual_seed(seed), only_if)
    assert found.dtype == torch.int64
    listed: list[int] = found.tolist()
    return listed


@settings(max_examples=400, deadline=None)
@given(SELECTS, SHAPES, st.integers(0, 99))
def test_each_element_once_within_the_tensor_and_again_by_the_same_seed(
    select: Select, shape: tuple[int, ...], seed: int
) -> None:
    tensor = torch.zeros(shape)
    before = torch.get_rng_state()
    found = drawn(select, tensor, seed)
    assert found == sorted(set(found))
    assert all(0 <= index < tensor.numel() for index in found)
    assert found or select.kind == "rate"
    assert found == drawn(select, tensor, seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_n_draws_so_many(count: int) -> None:
    tensor = torch.zeros(100, 60)
    assert len(drawn(Select("n", count=count), tensor)) == count
    assert drawn(Select("n", count=6000), tensor) == list(range(6000))


def test_n_draws_all_with_the_same_chance() -> None:
    counts = Counter(index for seed in range(2000) for index in drawn(Select("n", count=2), torch.zeros(2, 5), seed))
    assert sorted(counts) == list(range(10))
    assert all(abs(count - 400) < 100 for count in counts.values())  # five times the spread of a binomial


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.5, 0.999])
def test_rate_is_a_share_of_independent_elements(rate: float) -> None:
    size = 200_000
    found = torch.tensor(drawn(Select("rate", rate=rate), torch.zeros(size)))
    spread = math.sqrt(size * rate * (1 - rate))
    assert abs(len(found) - size * rate) < 5 * spread
    halves = int((found < size // 2).sum()) - len(found) / 2
    assert abs(halves) < 5 * math.sqrt(len(found)) / 2 + 1
    neighbours = int(((found[1:] - found[:-1]) == 1).sum())
    assert abs(neighbours - size * rate**2) < 6 * math.sqrt(size * rate**2) + 6


def test_rate_of_next_to_nothing_and_of_all() -> None:
    assert drawn(Select("rate", rate=1e-300), torch.zeros(100)) == []
    assert drawn(Select("rate", rate=1.0), torch.zeros(100)) == list(range(100))


def test_run() -> None:
    starts = set()
    for seed in range(100):
        found = drawn(Select("run", count=3, stride=4, align=2), torch.zeros(4, 5), seed)
        assert [index - found[0] for index in found] == [0, 4, 8]
        starts.add(found[0])
    assert starts == {0, 2, 4, 6, 8, 10}


def test_a_run_longer_than_the_tensor_is_cut_to_it() -> None:
    assert drawn(Select("run", count=16, align=16), torch.zeros(5)) == [0, 1, 2, 3, 4]
    assert drawn(Select("run", count=8, stride=4), torch.zeros(10)) == [0, 4, 8]


HUGE = [10**12, 2**63 - 1, 2**63, 10**400]


@pytest.mark.parametrize("huge", HUGE, ids=lambda huge: f"{len(str(huge))} digits")
@pytest.mark.parametrize("shape", [(), (7,), (6, 8), (2, 3, 4, 5)])
def test_whatever_is_larger_than_the_tensor_is_cut_before_anything_is_made(huge: int, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    everything, columns = list(range(tensor.numel())), shape[-1] if shape else 1
    for channels_last in (False, True):
        for whole in (
            Select("run", count=huge, channels_last=channels_last),
            Select("run", count=huge, align=huge, channels_last=channels_last),
            Select("groups", count=huge, channels_last=channels_last),
            Select("grid", count=huge, rows=1, columns=huge, channels_last=channels_last),
        ):
            assert drawn(whole, tensor) == everything
        for one in (
            Select("run", count=huge, stride=huge, channels_last=channels_last),
            Select("run", count=1, stride=huge, align=huge, channels_last=channels_last),
            Select("grid", count=1, rows=huge, columns=huge, channels_last=channels_last),
        ):
            assert len(drawn(one, tensor)) == 1
    assert len(drawn(Select("grid", count=huge, rows=huge, columns=huge), tensor)) == columns
    assert len(drawn(Select("tile", count=huge, columns=huge), tensor)) == math.prod(shape[-2:])
    assert len(drawn(Select("tile", count=huge, columns=1, low=1e-18, high=1.0), tensor)) >= 1
    for impossible in (Select("n", count=huge), Select("index", indices=(huge,))):
        with pytest.raises(ConfigurationError, match=r"elements|outside"):
            drawn(impossible, tensor)


def test_groups_are_whole_and_aligned() -> None:
    spans = set()
    for seed in range(200):
        found = drawn(Select("groups", count=4), torch.zeros(2, 7), seed)
        assert found == list(range(found[0], found[-1] + 1))
        assert found[0] % 4 == 0
        assert (found[-1] + 1) % 4 == 0 or found[-1] == 13
        spans.add((found[0], found[-1]))
    assert len(spans) == 10  # of four groups, the first and the last


def test_grid_is_periodic_on_both_axes() -> None:
    for seed in range(50):
        hit = torch.zeros(2 * 9, 16, dtype=torch.bool)
        hit.view(-1)[drawn(Select("grid", count=2, rows=3, columns=5), torch.zeros(2, 9, 16), seed)] = True
        rows = hit.any(dim=1).nonzero().flatten().tolist()
        columns = hit.any(dim=0).nonzero().flatten().tolist()
        assert rows == list(range(rows[0], 18, 3))
        assert rows[0] < 3
        first = columns[0]
        assert first <= 3
        assert columns == [column for column in range(first, 16) if (column - first) % 5 < 2]
        assert int(hit.sum()) == len(rows) * len(columns)


def test_tile_is_a_rectangle_of_the_last_two_axes() -> None:
    corners = set()
    for seed in range(300):
        found = drawn(Select("tile", count=2, columns=3), torch.zeros(2, 3, 4), seed)
        first = found[0]
        assert found == [first, first + 1, first + 2, first + 4, first + 5, first + 6]
        assert first % 4 <= 1
        assert first // 4 % 3 <= 1
        corners.add(first)
    assert len(corners) == 2 * 2 * 2


def test_a_tile_larger_than_the_last_two_axes_is_cut_to_them() -> None:
    assert drawn(Select("tile", count=99, columns=2), torch.zeros(3, 2)) == [0, 1, 2, 3, 4, 5]
    assert drawn(Select("tile", count=99, columns=99), torch.zeros(4)) == [0, 1, 2, 3]
    assert drawn(Select("tile", count=99, columns=99), torch.zeros(())) == [0]


def test_share_of_a_tile_and_of_all() -> None:
    for select, size in (
        (Select("tile", count=10, columns=10, low=0.2, high=0.75), 100),
        (Select("frac", low=0.2, high=0.75), 400),
    ):
        counts = [len(drawn(select, torch.zeros(20, 20), seed)) for seed in range(100)]
        assert min(counts) >= 0.2 * size
        assert max(counts) <= 0.75 * size
        assert len(set(counts)) > 20
    assert len(drawn(Select("frac", low=1e-9, high=1e-9), torch.zeros(10))) == 1


def test_row() -> None:
    rows = {tuple(drawn(Select("row"), torch.zeros(2, 2, 3), seed)) for seed in range(100)}
    assert rows == {(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint8, torch.uint64],
    ids=str,
)
def test_largest_is_so_in_magnitude(dtype: torch.dtype) -> None:
    numbers = [3.0, 1.0, -7.0, 2.0] if dtype not in (torch.uint8, torch.uint64) else [3.0, 1.0, 7.0, 2.0]
    assert drawn(Select("largest"), torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(2, 2)) == [2]


def test_largest_passes_over_nan_and_not_over_infinity() -> None:
    assert drawn(Select("largest"), torch.tensor([1.0, math.nan, 3.0])) == [2]
    assert drawn(Select("largest"), torch.tensor([1.0, -math.inf, 3.0])) == [1]
    assert drawn(Select("largest"), torch.tensor([math.nan, math.nan])) == [0]


def test_index_and_all() -> None:
    assert drawn(Select("index", indices=(5, 0, 3)), torch.zeros(2, 3)) == [0, 3, 5]
    assert drawn(Select("all"), torch.zeros(2, 3)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dims", [4, 5])
def test_channels_last_counts_the_channels_of_a_pixel_one_after_the_other(dims: int) -> None:
    image = torch.zeros(2, 3, 4, 5, *([2] if dims == 5 else []))
    hit = torch.zeros_like(image)
    hit.view(-1)[drawn(Select("run", count=3, align=3, channels_last=True), image)] = 1
    by_pixel = hit.movedim(1, -1).reshape(-1, 3).sum(dim=1)
    assert sorted(by_pixel.tolist())[-2:] == [0.0, 3.0]


def test_channels_last_says_nothing_of_what_is_no_image() -> None:
    plain, last = Select("run", count=3), Select("run", count=3, channels_last=True)
    assert [drawn(plain, torch.zeros(4, 5, 6), seed) for seed in range(9)] == [
        drawn(last, torch.zeros(4, 5, 6), seed) for seed in range(9)
    ]


def test_only_if_keeps_what_is_in_the_range() -> None:
    tensor = torch.tensor([[0.5, -1.0, 3.0], [math.nan, -math.inf, 2.0]])
    assert drawn(Select("all"), tensor, only_if=(1.0, 2.0)) == [1, 5]
    assert drawn(Select("all"), tensor, only_if=(2.5, math.inf)) == [2, 4]
    assert drawn(Select("index", indices=(0,)), tensor, only_if=(1.0, 2.0)) == []
    assert drawn(Select("all"), torch.tensor(1.5), only_if=(1.0, 2.0)) == [0]
    assert drawn(Select("all"), tensor.t(), only_if=(1.0, 2.0)) == [2, 5]
    assert drawn(Select("all"), torch.tensor([0, -3, 7]), only_if=(3.0, 5.0)) == [1]


@pytest.mark.parametrize(
    ("select", "shape", "message"),
    [
        (
            Select("index", indices=(2, 6)),
            (2, 3),
            "index 6 is outside a tensor of shape .2, 3., whose elements are 0 to 5",
        ),
        (Select("n", count=7), (2, 3), "has only 6 elements"),
        (Select("all"), (2, 0), "has no element"),
    ],
)
def test_what_cannot_be_selected_is_said_before_and_while(select: Select, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose.check(select, shape)
    with pytest.raises(ValueError, match=message):
        drawn(select, torch.zeros(shape))


def test_a_sample_has_different_numbers() -> None:
    for count in (10, 5000):
        found = choose.sample(6000, count, Random(0), torch.Generator().manual_seed(0)).tolist()
        assert len(set(found)) == count
        assert set(found) <= set(range(6000))
