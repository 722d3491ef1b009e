from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from bitwitness import mutate
from bitwitness.mutate import FlipBits, FlipSign, Mutation, Scale, SetTo, StuckAt

FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.float8_e8m0fnu, torch.bool]


def made(dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    """Small numbers that every dtype can hold, none of them zero where that would matter."""
    count = math.prod(shape)
    numbers = torch.arange(1, count + 1, dtype=torch.float64) % 7 + 1
    if dtype == torch.bool:
        return (numbers > 3).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers, -numbers).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> list[list[int]]:
    """Every element's bytes, in logical order."""
    flat = tensor.detach().contiguous().reshape(-1)
    rows: list[list[int]] = flat.view(torch.uint8).reshape(flat.numel(), -1).tolist()
    return rows


def flipped_bits(before: Tensor, after: Tensor) -> dict[int, list[int]]:
    """By element, which bits differ."""
    found: dict[int, list[int]] = {}
    for index, (old, new) in enumerate(zip(as_bytes(before), as_bytes(after), strict=True)):
        bits = [8 * i + b for i, (x, y) in enumerate(zip(old, new, strict=True)) for b in range(8) if (x ^ y) >> b & 1]
        if bits:
            found[index] = bits
    return found


def as_numbers(tensor: Tensor) -> list[int]:
    """Every element's bits as one number, in logical order."""
    return [int.from_bytes(bytes(row), "little") for row in as_bytes(tensor)]


def joined(words: Tensor) -> list[int]:
    """Words as numbers; of two, the second is the upper half."""
    rows: list[list[int]] = words.reshape(len(words), -1).tolist()
    return [sum((word & (2**64 - 1)) << 64 * place for place, word in enumerate(row)) for row in rows]


def strike(tensor: Tensor, mutation: Mutation, indices: Sequence[int] | Tensor) -> None:
    """What a fault does: read, mutate, write. The words read stay what they were."""
    before = mutate.words_of(tensor, indices)
    kept = before.clone()
    after = mutate.mutated(before, tensor.dtype, mutation)
    mutate.put_words(tensor, indices, after)
    assert torch.equal(before, kept)
    assert torch.equal(mutate.words_of(tensor, indices), after)


def struck(tensor: Tensor, mutation: Mutation, indices: Sequence[int] | Tensor) -> Tensor:
    """A copy with these elements mutated."""
    copy = tensor.clone()
    strike(copy, mutation, indices)
    return copy


def shown(tensor: Tensor, index: int) -> str:
    return mutate.shown(mutate.words_of(tensor, [index]), tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_every_dtype_flips_alone(dtype: torch.dtype) -> None:
    width = 1 if dtype == torch.bool else 8 * dtype.itemsize
    for bit in range(width):
        before = made(dtype)
        after = struck(before, FlipBits((bit,)), [7])
        assert flipped_bits(before, after) == {7: [bit]}
        assert shown(before, 7) != shown(after, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_bits_of_several_elements(dtype: torch.dtype) -> None:
    bits = [0] if dtype == torch.bool else [0, 8 * dtype.itemsize - 1]
    before = made(dtype)
    after = struck(before, FlipBits(tuple(bits)), [14, 0, 3])
    assert flipped_bits(before, after) == {0: bits, 3: bits, 14: bits}


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_stuck_bit_changes_only_elements_that_have_it_otherwise(dtype: torch.dtype, value: Literal[0, 1]) -> None:
    for bit in range(mutate.bits_of(dtype)):
        before = made(dtype)
        otherwise = [index for index, word in enumerate(as_numbers(before)) if word >> bit & 1 != value]
        after = struck(before, StuckAt(bit, value), range(15))
        assert flipped_bits(before, after) == {index: [bit] for index in otherwise}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sign_of_a_float_is_its_top_bit(dtype: torch.dtype) -> None:
    before = made(dtype)
    after = struck(before, FlipSign(), [4])
    assert flipped_bits(before, after) == {4: [8 * dtype.itemsize - 1]}
    assert float(after.flatten()[4].double()) == -float(before.flatten()[4].double())


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_sign_of_a_complex_number_is_two_bits(dtype: torch.dtype) -> None:
    before = made(dtype)
    after = struck(before, FlipSign(), [4])
    width = 8 * dtype.itemsize
    assert flipped_bits(before, after) == {4: [width // 2 - 1, width - 1]}
    assert after.flatten()[4] == -before.flatten()[4]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_sign_of_an_integer_is_its_negative(dtype: torch.dtype) -> None:
    after = struck(made(dtype), FlipSign(), [4])
    assert after.flatten()[4] == -made(dtype).flatten()[4]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.bool, torch.float8_e8m0fnu)], ids=str)
def test_scaling(dtype: torch.dtype) -> None:
    before = made(dtype)
    after = struck(before, Scale(4.0), list(range(15)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(after.to(wide), before.to(wide) * 4)
    assert len(flipped_bits(before, after)) == 15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_setting_a_value_touches_nothing_else(dtype: torch.dtype) -> None:
    before = made(dtype)
    value = 1.0 - float(before.flatten()[2].double()) if dtype == torch.bool else 64.0
    after = struck(before, SetTo(value), [2])
    assert list(flipped_bits(before, after)) == [2]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert after.flatten()[2].to(wide) == value


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_land_or_are_refused(dtype: torch.dtype, value: float) -> None:
    has_inf = dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    before = made(dtype)
    if math.isinf(value) and not has_inf:
        with pytest.raises(ValueError, match="has no such value"):
            struck(before, SetTo(value), [2])
        return
    after = struck(before, SetTo(value), [2])
    wide = torch.complex128 if dtype.is_complex else torch.float64
    real = float(after.flatten()[2].to(wide).real)
    assert math.isnan(real) if math.isnan(value) else real == value
    assert list(flipped_bits(before, after)) == [2]
    assert "nan" in shown(after, 2) or "inf" in shown(after, 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda base: base.t(),
    "every second": lambda base: base[:, ::2],
    "a column": lambda base: base[:, 1],
    "one element": lambda base: base[1, 1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_views_are_changed_in_place_and_in_logical_order(dtype: torch.dtype, layout: str) -> None:
    base = made(dtype, (4, 6))
    untouched = base.clone()
    view = LAYOUTS[layout](base)
    before = view.clone()
    last = view.numel() - 1
    strike(view, FlipBits((0,)), [last])
    assert flipped_bits(before, view) == {last: [0]}
    assert len(flipped_bits(untouched, base)) == 1


def test_a_leaf_that_requires_a_gradient_is_changed_silently() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    loss = (weight * weight).sum()
    version = weight._version
    strike(weight, FlipSign(), [5])
    assert weight.detach().flatten().tolist() == [1.0] * 5 + [-1.0]
    assert weight._version == version
    loss.backward()  # autograd saw nothing, as it would not in hardware
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [2.0] * 5 + [-2.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_are_a_copy(dtype: torch.dtype) -> None:
    """Also of the integers that are words already."""
    tensor = made(dtype).requires_grad_(dtype.is_floating_point or dtype.is_complex)
    words = mutate.words_of(tensor, range(15))
    assert not words.requires_grad
    words.zero_()
    assert not flipped_bits(made(dtype), tensor)
    written = mutate.words_of(tensor, range(15))
    mutate.put_words(tensor, range(15), written)
    written.zero_()
    assert not flipped_bits(made(dtype), tensor)


def test_no_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    for mutation in (FlipBits((3,)), FlipSign(), Scale(3.0), SetTo(math.nan)):
        strike(torch.ones(100), mutation, torch.arange(50))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("mutation", "value"), [(Scale(1.0), 3.0), (Scale(4.0), 0.0), (SetTo(3.0), 3.0), (SetTo(math.nan), math.nan)]
)
def test_a_mutation_that_changes_nothing_is_seen_in_the_words(mutation: Mutation, value: float) -> None:
    words = mutate.words_of(torch.full((4,), value), [1, 2])
    assert torch.equal(mutate.mutated(words, torch.float32, mutation), words)


def test_zero_turning_negative_has_landed() -> None:
    """The bits count, not what == makes of them."""
    after = struck(torch.zeros(3), FlipSign(), [1])
    assert math.copysign(1.0, float(after[1])) == -1.0
    assert flipped_bits(torch.zeros(3), after) == {1: [31]}


def test_part_of_the_selection_may_stay_as_it_is() -> None:
    gradient = torch.tensor([0.0, 2.0, 0.0, 3.0])
    strike(gradient, Scale(4.0), range(4))
    assert gradient.tolist() == [0.0, 8.0, 0.0, 12.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_element_no_words(dtype: torch.dtype) -> None:
    tensor = made(dtype)
    strike(tensor, SetTo(1.0), [])
    assert mutate.words_of(tensor, []).shape == ((0, 2) if dtype == torch.complex128 else (0,))
    assert not flipped_bits(made(dtype), tensor)


WRONG: list[tuple[torch.dtype, Mutation]] = [
    (torch.float32, FlipBits((32,))),
    (torch.float32, FlipBits((-1,))),
    (torch.float32, FlipBits(())),
    (torch.float32, FlipBits((3, 3))),
    (torch.bool, FlipBits((1,))),
    (torch.bool, Scale(2.0)),
    (torch.bool, FlipSign()),
    (torch.uint8, FlipSign()),
    (torch.int32, Scale(0.5)),
    (torch.int32, SetTo(math.nan)),
    (torch.int32, SetTo(0.5)),
    (torch.uint8, SetTo(256)),
    (torch.uint8, SetTo(-1)),
    (torch.bool, SetTo(2)),
    (torch.float32, StuckAt(32, 1)),
    (torch.float32, StuckAt(-1, 0)),
    (torch.bool, StuckAt(1, 1)),
]


@pytest.mark.parametrize(("dtype", "mutation"), WRONG, ids=str)
def test_mutations_that_make_no_sense(dtype: torch.dtype, mutation: Mutation) -> None:
    words = mutate.words_of(made(dtype), [0])
    with pytest.raises(ValueError, match=r"Flip|Scale|SetTo|StuckAt"):
        mutate.mutated(words, dtype, mutation)
    assert torch.equal(words, mutate.words_of(made(dtype), [0]))


CONJUGATED = torch.ones(3, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.eye(3).to_sparse(), "layout"), (CONJUGATED, "lazily"), (CONJUGATED.imag, "lazily")],
    ids=["sparse", "conjugated", "negated"],
)
def test_sparse_and_lazy_tensors_are_refused(tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mutate.words_of(tensor, [0])
    with pytest.raises(ValueError, match=message):
        mutate.put_words(tensor, [0], torch.tensor([0]))


def test_integers_wrap_around() -> None:
    assert struck(torch.tensor([100], dtype=torch.int8), Scale(2.0), [0]).tolist() == [-56]
    assert struck(torch.tensor([200], dtype=torch.uint8), Scale(2.0), [0]).tolist() == [144]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_words_are_the_bits_and_can_be_written_back(dtype: torch.dtype, layout: str) -> None:
    base = made(dtype, (4, 6))
    top = mutate.bits_of(dtype) - 1
    if not dtype.is_complex:  # whose imaginary part is negative as it is
        strike(base, StuckAt(top, 1), range(24))  # a sign must not spread over the words
    view = LAYOUTS[layout](base)
    chosen = [view.numel() - 1, 0][: view.numel()]
    words = mutate.words_of(view, chosen)
    assert words.dtype == torch.int64
    assert words.shape == ((len(chosen), 2) if dtype == torch.complex128 else (len(chosen),))
    assert joined(words) == [as_numbers(view)[index] for index in chosen]
    empty = torch.zeros_like(view)
    mutate.put_words(empty, chosen, words)
    assert [as_numbers(empty)[index] for index in chosen] == joined(words)
    assert sum(number != 0 for number in as_numbers(empty)) <= len(chosen)
    numbers = mutate.numbers_of(words, dtype)
    assert numbers.dtype == dtype
    assert as_numbers(numbers) == joined(words)


def test_writing_words_leaves_no_trace_but_the_bits() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    mutate.put_words(weight, [1], torch.tensor([0xC0000000]))
    assert weight.tolist() == [1.0, -2.0, 1.0]
    assert weight._version == 0


@pytest.mark.parametrize(
    ("dtype", "words", "message"),
    [
        (torch.float32, [1], "1. words for 2 elements of torch.float32: give .2."),
        (torch.complex128, [1, 2], "give .2, 2."),
        (torch.float16, [1, 0x10000], "wider than the 16 bits"),
        (torch.int8, [1, -1], "wider than the 8 bits"),
        (torch.bool, [1, 2], "wider than the 1 bits"),
    ],
)
def test_words_of_another_tensor_are_refused(dtype: torch.dtype, words: list[int], message: str) -> None:
    tensor = made(dtype)
    with pytest.raises(ValueError, match=message):
        mutate.put_words(tensor, [0, 1], torch.tensor(words))
    assert not flipped_bits(made(dtype), tensor)


@pytest.mark.parametrize(
    ("dtype", "word", "width"), [(torch.float16, 0x10000, 16), (torch.int8, -1, 8), (torch.bool, 2, 1)]
)
def test_words_of_another_dtype_are_not_mutated(dtype: torch.dtype, word: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"wider than the {width} bits of {dtype}"):
        mutate.mutated(torch.tensor([1, word]), dtype, FlipBits((0,)))


def test_elements_that_share_memory_are_read_and_not_written() -> None:
    expanded = torch.ones(1, 3).expand(4, 3)
    assert mutate.words_of(expanded, [0, 11]).tolist() == [0x3F800000] * 2
    with pytest.raises(ValueError, match="share memory"):
        mutate.put_words(expanded, [0], torch.tensor([0]))
    assert torch.equal(expanded, torch.ones(4, 3))


@pytest.mark.parametrize("indices", [[4], [-1], [1, 1]])
def test_words_of_wrong_indices(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="index"):
        mutate.words_of(torch.ones(4), indices)
    with pytest.raises(ValueError, match="index"):
        mutate.put_words(torch.ones(4), indices, torch.zeros(len(indices), dtype=torch.int64))


SHOWN: list[tuple[torch.dtype, complex, str]] = [
    (torch.float32, 2.0, "2.0 (0x40000000)"),
    (torch.float32, math.nan, "nan (0x7fc00000)"),
    (torch.float64, -math.inf, "-inf (0xfff0000000000000)"),
    (torch.bfloat16, 1.5, "1.5 (0x3fc0)"),
    (torch.float8_e5m2, -1.0, "-1.0 (0xbc)"),
    (torch.float8_e8m0fnu, 1.0, "1.0 (0x7f)"),
    (torch.bool, True, "True (0x1)"),
    (torch.int8, -1, "-1 (0xff)"),
    (torch.uint8, 200, "200 (0xc8)"),
    (torch.int64, -2, "-2 (0xfffffffffffffffe)"),
    (torch.uint64, 2**64 - 1, "18446744073709551615 (0xffffffffffffffff)"),
    (torch.complex64, 1 - 2j, "(1-2j) (0xc00000003f800000)"),
    (torch.complex128, 1 - 2j, "(1-2j) (0x3ff0000000000000 c000000000000000)"),
]


@pytest.mark.parametrize(("dtype", "number", "text"), SHOWN, ids=str)
def test_an_element_is_shown_as_number_and_bits(dtype: torch.dtype, number: complex, text: str) -> None:
    assert shown(torch.tensor([0, number], dtype=dtype), 1) == text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_the_bits_of_an_element_are_shown(dtype: torch.dtype) -> None:
    for index, number in enumerate(as_numbers(made(dtype))):
        first, *rest = shown(made(dtype), index).partition(" (0x")[2].removesuffix(")").split(" ")
        digits = "".join([*reversed(rest), first])
        assert int(digits, 16) == number
        assert len(digits) == max(1, mutate.bits_of(dtype) // 4)
