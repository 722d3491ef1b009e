"""What is planted in bits, places and values is found, and in what is scattered nothing is."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bitwitness.compare.differing import ranges as ranges_of
from bitwitness.compare.patterns import Struck, look
from bitwitness.compare.patterns_places import places, recurring, to_look_at
from bitwitness.compare.patterns_words import magnitude, mantissa, range_of, width
from bitwitness.compare.records import DECADES, Difference, Site
from bitwitness.compare.results import Patterns

Shape = tuple[int, ...]
Draw = Callable[[random.Random, Shape], Sequence[int]]
Flip = Callable[[random.Random, int], int]


def any_bit(dice: random.Random, word: int) -> int:
    return word ^ 1 << dice.randrange(32)


def struck(
    shape: Shape, drawn: Sequence[Sequence[int]], seed: int = 0, flip: Flip = any_bit, **more: Any
) -> list[Struck]:
    dice, site = random.Random(f"words {seed}"), Site("ffn", "fwd_out", "0", 0, "float32", shape)
    made = []
    for step, indices in enumerate(drawn):
        words = [(index, dice.getrandbits(32)) for index in sorted(set(indices))]
        elements = [(index, word, flip(dice, word)) for index, word in words]
        elements = [one for one in elements if one[1] != one[2]]
        if elements:
            classes = more.get("classes") or {"other": len(elements)}
            made.append(Struck(step, site, Difference(0, len(elements), elements=tuple(elements), classes=classes)))
    return made


def scattered(count: int) -> Draw:
    return lambda dice, shape: dice.sample(range(shape[0] * shape[1]), min(count, shape[0] * shape[1]))


def run(length: int, stride: int = 1) -> Draw:
    def draw(dice: random.Random, shape: Shape) -> list[int]:
        start = dice.randrange(shape[0] * shape[1] - length * stride)
        return [start + number * stride for number in range(length)]

    return draw


def tile(rows: int, columns: int) -> Draw:
    def draw(dice: random.Random, shape: Shape) -> list[int]:
        top, west = dice.randrange(shape[0] - rows + 1), dice.randrange(shape[1] - columns + 1)
        return [(top + row) * shape[1] + west + column for row in range(rows) for column in range(columns)]

    return draw


def grid(length: int, rows: int, columns: int) -> Draw:
    def draw(dice: random.Random, shape: Shape) -> list[int]:
        top, west = dice.randrange(rows), dice.randrange(columns - length + 1)
        across = [column for column in range(shape[1]) if (column - west) % columns < length and column >= west]
        return [row * shape[1] + column for row in range(top, shape[0], rows) for column in across]

    return draw


def whole_row(dice: random.Random, shape: Shape) -> list[int]:
    row = dice.randrange(shape[0])
    return list(range(row * shape[1], (row + 1) * shape[1]))


def planted(
    draw: Draw, *, shape: Shape = (128, 128), steps: int = 12, anew: bool = True, noise: int = 1, seed: int = 0
) -> Patterns:
    dice = random.Random(seed)
    once = draw(dice, shape)
    drawn = []
    for _ in range(steps):
        here = draw(dice, shape) if anew else once
        drawn.append([*here, *scattered(noise)(dice, shape)])
    return look("float32", struck(shape, drawn, seed))


def about_places(found: Patterns) -> list[str]:
    return [one for one in found.findings if "again and again" not in one]


ANEW = pytest.mark.parametrize("anew", [True, False], ids=["drawn-anew", "permanent"])


# Places --------------------------------------------------------------------------------------------------------------


@ANEW
@pytest.mark.parametrize("stride", [2, 4, 8, 16])
def test_a_stride_is_found(stride: int, anew: bool) -> None:
    found = planted(run(8, stride), anew=anew)
    assert any(one.startswith(f"stride {stride}:") for one in found.findings)
    assert next(one for one in found.lags if one.lag == stride).found
    assert not any(one.found for one in found.lags if one.lag % stride)


@ANEW
@pytest.mark.parametrize(
    ("draw", "words", "block"),
    [
        (run(4), "runs of 4 neighbours along a row", (1, 4)),
        (tile(3, 3), "tiles of 3 × 3 neighbours", (3, 3)),
        (whole_row, "whole rows are wrong: 1 of 128", (1, 128)),
        (
            lambda dice, shape: [row * shape[1] + 5 for row in range(shape[0])],
            "whole columns are wrong: 1 of 128",
            (128, 1),
        ),
    ],
    ids=["run", "tile", "row", "column"],
)
def test_blocks_are_found(draw: Draw, words: str, block: tuple[int, int], anew: bool) -> None:
    found = planted(draw, anew=anew, noise=0)
    assert any(one.startswith(words) for one in found.findings)
    assert block in [(rows, columns) for rows, columns, _ in found.tiles]
    assert not found.periods


@ANEW
def test_a_grid_is_found_by_its_smallest_periods(anew: bool) -> None:
    found = planted(grid(4, 8, 32), anew=anew)
    periods = {one.axis: one for one in found.periods}
    assert periods["row"].period == 8
    assert len(periods["row"].phases) == 1
    assert periods["column"].period == 32
    assert len(periods["column"].phases) == 4
    assert periods["column"].share > 0.8
    assert periods["column"].expected == pytest.approx(4 / 32)
    assert any(one.startswith("runs of 4 neighbours") for one in found.findings)


def test_a_lane_is_found_though_each_tensor_shows_little_of_it() -> None:
    def draw(dice: random.Random, shape: Shape) -> list[int]:
        return [dice.randrange(shape[0]) * shape[1] + 3 + 8 * dice.randrange(shape[1] // 8) for _ in range(3)]

    found = planted(draw, shape=(64, 1024), steps=60, noise=0)
    assert [(one.axis, one.period, one.phases) for one in found.periods] == [("column", 8, (3,))]


SCATTERED = {
    "few": (scattered(3), (64, 64), 30, True),
    "many": (scattered(400), (64, 64), 4, True),
    "half": (scattered(900), (32, 64), 2, True),
    "one-tensor": (scattered(60), (64, 128), 1, True),
    "small": (scattered(3), (8, 8), 30, True),
    "permanent": (scattered(6), (64, 64), 30, False),
    "three-times": (scattered(8), (64, 64), 3, False),
    "vector": (scattered(5), (1, 512), 20, True),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_in_what_is_scattered_nothing_is_found(name: str) -> None:
    draw, shape, steps, anew = SCATTERED[name]
    wrong = []
    for seed in range(12):
        found = planted(draw, shape=shape, steps=steps, anew=anew, noise=0, seed=seed)
        if about_places(found) or found.periods or any(one.found for one in found.lags):
            wrong.append((seed, found.findings))
    assert not wrong


def test_positions_that_are_visible_now_and_then_are_looked_at_once() -> None:
    dice = random.Random(3)
    bad = [10, 17, 500, 900, 1300, 2222]  # two of them lie 7 apart by accident
    drawn = [[place for place in bad if dice.random() < 0.5] for _ in range(60)]
    found = look("float32", struck((64, 64), drawn))
    assert about_places(found) == []
    assert any("again and again" in one for one in found.findings)


def test_what_strikes_all_tensors_of_a_step_alike_is_looked_at_once() -> None:
    """A fault of one unit hits the same places in each tensor; the accidental distances between them are then seen many times."""
    for seed in range(12):
        dice = random.Random(f"alike {seed}")
        drawn = [dice.sample(range(128 * 96), 12) for _ in range(12)]
        same = struck((128, 96), drawn, seed)
        everywhere = [
            Struck(one.step, Site(f"layer.{number}", "fwd_out", "0", 0, "float32", one.site.shape), one.difference)
            for number in range(8)
            for one in same
        ]
        found = look("float32", everywhere)
        assert not any(one.found for one in found.lags), seed
        assert found.periods == (), seed
        assert any("same places" in one for one in found.findings), "but that they are the same is said"


def drawn_from(
    pools: Callable[[random.Random], Callable[[random.Random], Sequence[int]]], count: int
) -> Callable[..., Any]:
    """In each of 40 steps a few of the places that can be wrong at all in it."""

    def made(seed: int, shape: Shape) -> Patterns:
        dice = random.Random(f"pools {seed}")
        pool = pools(dice)
        return look("float32", struck(shape, [dice.sample(list(pool(dice)), count) for _ in range(40)], seed))

    return made


def tokens(dice: random.Random) -> Callable[[random.Random], list[int]]:
    """The rows of an embedding that a batch has tokens of, out of few and with some much commoner than others."""
    known = [dice.randrange(256) for _ in range(40)]
    weights = [1 / (1 + number) for number in range(40)]
    return lambda dice: [row * 32 + column for row in set(dice.choices(known, weights, k=10)) for column in range(32)]


def live_units(dice: random.Random) -> Callable[[random.Random], list[int]]:
    """After a ReLU: some columns are dead, and of the others half are 0."""
    live = [column for column in range(96) if dice.random() < 0.6]
    return lambda dice: [row * 96 + column for row in range(64) for column in live if dice.random() < 0.5]


def below_the_diagonal(_: random.Random) -> Callable[[random.Random], list[int]]:
    return lambda _: [row * 32 + column for row in range(128) for column in range(row % 32 + 1)]


def tokens_of_live_units(dice: random.Random) -> Callable[[random.Random], list[int]]:
    rows, live = tokens(dice), {column for column in range(32) if dice.random() < 0.5}
    return lambda dice: [index for index in rows(dice) if index % 32 in live] or [0]


STRUCTURED = {
    "embedding": (tokens, (256, 32), 6),
    "relu": (live_units, (64, 96), 8),
    "causal": (below_the_diagonal, (4, 32, 32), 8),
    "embedding-of-live-units": (tokens_of_live_units, (256, 32), 4),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_that_only_some_rows_and_columns_can_be_wrong_is_no_pattern(name: str) -> None:
    pools, shape, count = STRUCTURED[name]
    for seed in range(12):
        found = drawn_from(pools, count)(seed, shape)
        assert found.periods == (), (seed, found.findings)
        assert not about_places(found), (seed, found.findings)


@pytest.mark.parametrize("stride", range(2, 33))
def test_strides_are_found_in_any_width(stride: int) -> None:
    for columns in (64, 96, 128):
        found = planted(run(12, stride), shape=(64, columns), noise=0, seed=stride)
        assert any(
            one.startswith((f"stride {stride}:", "runs of 12 neighbours along a column")) for one in found.findings
        ), (columns, found.findings)


def test_places_redrawn_in_each_step_do_not_recur_though_many_tensors_have_them() -> None:
    for seed in range(6):
        dice = random.Random(f"redrawn {seed}")
        made = []
        for step in range(30):
            here = dice.sample(range(1024), 6)
            for number, shape in enumerate([(32, 32)] * 3 + [(64, 32)] * 3):
                (one,) = struck(shape, [here], seed)
                made.append(Struck(step, Site(f"layer.{number}", "fwd_out", "0", 0, "float32", shape), one.difference))
        found = look("float32", made).findings
        assert not any("again and again" in one for one in found), seed
        assert any(one.startswith("tensors of one step are wrong at the same places: 1,080 ") for one in found)
        assert not any("runs" in one or "stride" in one or "neighbours" in one for one in found), found


def test_tensors_of_one_step_that_are_scattered_are_not_said_to_be_alike() -> None:
    dice = random.Random(7)
    made = []
    for number in range(6):
        drawn = [dice.sample(range(1024), 100) for _ in range(30)]
        made += [
            Struck(one.step, Site(f"layer.{number}", "fwd_out", "0", 0, "float32", (32, 32)), one.difference)
            for one in struck((32, 32), drawn, number)
        ]
    assert not any("same places" in one for one in look("float32", made).findings)


def test_a_zero_of_the_other_sign_is_no_zero_for_what_is_right() -> None:
    site = Site("ffn", "fwd_out", "0", 0, "float32", (64, 64))
    changed = (*((number, 0, 0x80000000) for number in range(30)), (40, 0x3F800000, 0), (50, 0x3F800000, 1))
    for classes in ({"zero": 31, "other": 1}, {"zero": 1, "sign": 30, "other": 1}):
        found = look("float32", [Struck(0, site, Difference(0, 32, elements=changed, classes=classes))])
        assert found.classes == {"other": 1, "sign": 30, "zero": 1}
        assert not any("are 0" in one for one in found.findings)
        assert any("30 of 32" in one and "other sign" in one for one in found.findings)


def test_of_what_was_cut_off_only_the_part_that_was_kept_counts() -> None:
    one = places((1000, 1000), range(0, 2000, 20), 50_000)
    assert one.elements == 1981
    assert not one.whole
    looked = to_look_at([one])
    assert looked == [one]
    assert recurring([one]) == 0
    site = Site("ffn", "fwd_out", "0", 0, "float32", (1000, 1000))
    dice = random.Random(1)
    kept = sorted(dice.sample(range(20_000), 500))
    elements = tuple((index, 0, 1) for index in kept)
    found = look("float32", [Struck(0, site, Difference(0, 25_000, elements=elements))])
    assert found.truncated
    assert not any(lag.found for lag in found.lags)


def test_whole_tensors_are_called_so() -> None:
    found = look("float32", struck((4, 8), [range(32)] * 4))
    assert any("wrong in every element" in one for one in found.findings)
    assert not any(lag.found for lag in found.lags)


# Bits ----------------------------------------------------------------------------------------------------------------


def test_a_mask_is_found() -> None:
    drawn = [scattered(5)(random.Random(seed), (64, 64)) for seed in range(10)]
    found = look("float32", struck((64, 64), drawn, flip=lambda _, word: word ^ 0x00100008))
    assert found.masks == ((0x00100008, 50),)
    assert found.mask_kinds == 1
    assert any(one.startswith("XOR mask 0x00100008 (2 bits) in 50 of 50 records") for one in found.findings)
    assert sum(found.bits[3]) == sum(found.bits[20]) == 50
    assert sum(map(sum, found.bits)) == 100


def test_a_stuck_bit_is_found_and_a_flipped_one_is_not_called_so() -> None:
    drawn = [scattered(12)(random.Random(seed), (64, 64)) for seed in range(10)]
    stuck = look("float32", struck((64, 64), drawn, flip=lambda _, word: word | 1 << 10))
    assert stuck.bits[10][1] == 0
    assert any("bit 10 flips from 0 to 1" in one and "stuck at 1" in one for one in stuck.findings)
    flipped = look("float32", struck((64, 64), drawn, flip=lambda _, word: word ^ 1 << 10))
    assert not any("stuck" in one for one in flipped.findings)
    assert any("bit 10" in one for one in flipped.findings)


def test_bits_that_flip_alike_are_no_finding() -> None:
    drawn = [scattered(20)(random.Random(seed), (64, 64)) for seed in range(20)]
    assert look("float32", struck((64, 64), drawn)).findings == ()


def test_zeroing_is_said_of_values_and_of_all_bits_at_once() -> None:
    drawn = [scattered(20)(random.Random(seed), (64, 64)) for seed in range(10)]
    made = struck((64, 64), drawn, flip=lambda _, word: 0, classes={"zero": 20})
    found = look("float32", made).findings
    assert any(one.startswith("23 of the 23 bits of the mantissa flip from 1 to 0 only") for one in found)
    assert len(found) == 2


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero", "are 0"),
        ("special", "NaN"),
        ("sign", "other sign"),
        ("stale", "one step before"),
        ("moved", "another place"),
    ],
)
def test_classes_of_values_are_said(name: str, words: str) -> None:
    drawn = [[number * 97, number * 131 + 7, number * 53 + 1000] for number in range(10)]
    found = look("float32", struck((64, 64), drawn, classes={name: 2, "other": 1}))
    assert found.classes == {name: 20, "other": 10}
    assert any(words in one and "20 of 30" in one for one in found.findings)


def test_a_range_of_operands_is_found_within_its_own_tensors() -> None:
    dice = random.Random(4)
    site, elsewhere = (Site(name, "fwd_out", "0", 0, "float32", (64, 64)) for name in ("ffn", "attn"))
    population = torch.tensor([10 ** dice.uniform(-6, 1) for _ in range(4096)])
    known = {
        site: (40 * ranges_of(population)).tolist(),
        elsewhere: (40 * ranges_of(torch.full((4096,), 3.0))).tolist(),
    }

    def made(chosen: Sequence[int]) -> list[Struck]:
        struck = []
        for step, index in enumerate(chosen):
            (word,) = struct.unpack("<I", struct.pack("<f", float(population[index])))
            struck.append(
                Struck(step, site, Difference(0, 1, elements=((index, word, word ^ 1 << dice.randrange(32)),)))
            )
        return struck

    small = [index for index in range(4096) if 1e-3 <= float(population[index]) < 1e-2]
    found = look("float32", made(dice.sample(small, 40)), known)
    assert any(one.startswith("right values from 0.001 to 0.01 are hit in 40 of 40") for one in found.findings)
    assert (1e-3, known[site][DECADES.index(1e-3)], 40) in found.ranges
    alike = look("float32", made(dice.sample(range(4096), 40)), known)
    assert not any("right values" in one for one in alike.findings)
    in_one_step = [Struck(0, site, one.difference) for one in made(dice.sample(small, 40))]
    assert not any("right values" in one for one in look("float32", in_one_step, known).findings)


def test_one_bad_position_is_no_range() -> None:
    site = Site("ffn", "fwd_out", "0", 0, "float32", (64,))
    known = {site: (50 * ranges_of(torch.cat([torch.full((32,), 0.5), torch.full((32,), 5.0)]))).tolist()}
    same = [Struck(step, site, Difference(0, 1, elements=((7, 0x3F000000, 0x3F000001 + step),))) for step in range(50)]
    found = look("float32", same, known)
    assert not any("right values" in one or "flips" in one for one in found.findings)
    assert found.ranges == ((0.1, 1600, 50), (1.0, 1600, 0))


# Words ---------------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_are_the_numbers_that_torch_says(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    bits = 8 * dtype.itemsize
    assert width(name) == bits
    dice = random.Random(2)
    words = [dice.getrandbits(bits) for _ in range(300)] if dtype != torch.bool else [0, 1]
    signed = [word - (1 << bits) if word >> (bits - 1) else word for word in words]
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.tensor(signed, dtype=integer).view(dtype).to(torch.float64).abs()
    mine = torch.tensor([magnitude(word, name) for word in words], dtype=torch.float64)
    assert torch.equal(mine.nan_to_num(nan=-1.0), values.nan_to_num(nan=-1.0))
    counts = ranges_of(values)
    assert [sum(range_of(float(one)) == number for one in mine) for number in range(len(DECADES))] == counts.tolist()
    if dtype.is_floating_point:
        assert 2.0 ** -mantissa(name) == torch.finfo(dtype).eps


def test_a_dtype_that_is_not_known_has_no_magnitudes_and_harms_nobody() -> None:
    site = Site("ffn", "fwd_out", "0", 0, "complex64", (8,))
    found = look("complex64", [Struck(0, site, Difference(0, 1, elements=((0, 1, 2),)))])
    assert found.ranges == ()
    assert found.records == 1
    assert magnitude(1, "complex64") is None
