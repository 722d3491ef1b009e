"""The torch implementation gives the bits of the definition, for any dtype, layout in memory and seed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from bitwitness.fingerprint import combine, fingerprint_tensors, reference
from bitwitness.fingerprint.two_sums import two_sums

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SEEDS = st.one_of(st.integers(0, 3), st.integers(-(2**80), 2**80))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits of any pattern, NaN among them; bool only holds 0 and 1, as torch demands."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def expected(tensor: Tensor, seed: int = 0) -> list[int]:
    """The digest by the definition, from the elements of `tensor` in row-major order."""
    data = b""
    if tensor.numel():
        flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
        data = bytes(flat.view(torch.uint8).tolist())
    name = str(tensor.dtype).removeprefix("torch.")
    return list(reference.fingerprint_bytes(data, name, tuple(tensor.shape), seed))


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> Tensor:
    """A tensor of any dtype, 0 to 4 dimensions, sliced, stepped, permuted or expanded."""
    dtype = draw(st.sampled_from(dtypes))
    base = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    tensor = random_tensor(dtype, base, draw(st.integers(0, 2**31)))
    for dim, size in enumerate(base):
        start, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(base)))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    return tensor


@settings(max_examples=300, deadline=None)
@given(tensor=tensors(), seed=SEEDS)
def test_one_tensor_has_the_bits_of_the_definition(tensor: Tensor, seed: int) -> None:
    note(f"{tensor.dtype} shape {tuple(tensor.shape)} stride {tensor.stride()} offset {tensor.storage_offset()}")
    assert fingerprint_tensors([tensor], seed).tolist() == [expected(tensor, seed)]


@settings(max_examples=60, deadline=None)
@given(table=st.lists(tensors(), max_size=12), seed=SEEDS, data=st.data())
def test_a_table_is_its_tensors_one_by_one_in_any_order(table: list[Tensor], seed: int, data: st.DataObject) -> None:
    digests = fingerprint_tensors(table, seed).tolist()
    assert digests == [expected(tensor, seed) for tensor in table]
    order = data.draw(st.permutations(range(len(table))))
    assert fingerprint_tensors([table[index] for index in order], seed).tolist() == [digests[index] for index in order]


@settings(max_examples=100, deadline=None)
@given(count=st.integers(0, 20), seed=SEEDS, filling=st.integers(0, 1000))
def test_combine_has_the_bits_of_the_definition(count: int, seed: int, filling: int) -> None:
    digests = random_tensor(torch.int64, (count, 3), filling)
    rows = [(row[0], row[1], row[2]) for row in digests.tolist()]
    assert combine(digests, seed).tolist() == list(reference.combine_digests(rows, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("size", [1023, 1024, 1025, 4095, 4096, 4097, 16_385, 32_768, 70_001, 300_001])
def test_rows_and_blocks_join_up(dtype: torch.dtype, size: int) -> None:
    tensor = random_tensor(dtype, (size,), size)
    assert fingerprint_tensors([tensor], 5).tolist() == [expected(tensor, 5)]
    assert fingerprint_tensors([tensor[3:]], 5).tolist() == [expected(tensor[3:], 5)]


def test_a_table_of_more_rows_than_a_group() -> None:
    """Sizes around those of short and whole rows, in turn, so that blocks and groups fill up in the middle of each kind."""
    memory = random_tensor(torch.uint8, (300_000,), 1)
    sizes = [4, 8, 1023, 1024, 1025, 8191, 8192, 8193, 20_000, 131_072, 131_080, 140_001]
    table = [memory[start : start + sizes[start % len(sizes)]] for start in range(1800)]
    digests = fingerprint_tensors(table, 3)
    some = range(0, 1800, 89)
    assert [digests[index].tolist() for index in some] == [expected(table[index], 3) for index in some]
    assert digests.tolist() == torch.cat([fingerprint_tensors([tensor], 3) for tensor in table]).tolist()


@pytest.mark.parametrize("words", [2, 30, 2**19, 2**19 + 2, 2**19 + 4, 2**20 + 2, 3 * 2**19 + 6])
def test_two_sums_alone_are_those_of_the_fingerprint(words: int) -> None:
    """With bits that are all set, and random ones, around the size of a block."""
    for memory in (torch.full((words + 4,), -1, dtype=torch.int32), random_tensor(torch.int32, (words + 4,), words)):
        tensor = memory[2:-2]
        salts = [reference.signed(salt) for salt in reference.salts("int32", (words,))[:2]]
        assert (two_sums(tensor) + torch.tensor(salts)).tolist() == fingerprint_tensors([tensor])[0, :2].tolist()


def test_two_sums_refuses_what_it_cannot_read_in_place() -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    for bad in (memory[1:], memory[:63], memory.view(8, 8).t()):
        with pytest.raises(ValueError, match="contiguous"):
            two_sums(bad)


def test_complex32_counts_its_bytes() -> None:
    data = torch.arange(32, dtype=torch.uint8)
    digest = list(reference.fingerprint_bytes(bytes(range(32)), "complex32", (8,)))
    assert fingerprint_tensors([data.view(torch.complex32)]).tolist() == [digest]
