"""The inner loop of the torch fingerprints: rows of words in, three partial sums of each row out.

It is apart from `torch_ops` because it alone decides the speed, and because there are two of it: one for any device,
and one for CPUs with 8-bit dot products, which reads every byte once and is limited by memory and the multiplier only.

For a row of words b_0 ... b_{C-1} (C = `reference.ROW_WORDS`) the partial sums are, modulo 2^64,

    sum_c b_c,    sum_c (c + 1) b_c,    sum_c u_c b_c.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from bitwitness.fingerprint import reference

ROW_WORDS = reference.ROW_WORDS
ROW_BYTES = 4 * ROW_WORDS
GROUP_ROWS = 4096
"""Rows whose partial sums are worked up together: 32 MiB of input, so that the small operations cost little."""

_CPU = torch.device("cpu")
_MASK32 = 0xFFFFFFFF
_BIAS = 0x80808080
"""128 in each byte of a word: what lies between an inner weight and the number whose digits are its bytes as signed."""


class RowSums(ABC):
    """Collects the partial sums of up to `GROUP_ROWS` rows.

    alignment: of the memory of rows, in bytes. small_bytes: up to this size a tensor is cheaper copied next to others
    than taken by itself.
    """

    alignment: int
    small_bytes: int

    @abstractmethod
    def append(self, rows: Tensor) -> None:
        """Take rows: uint8 [n, at most ROW_BYTES], contiguous; the memory may be reused afterwards.

        A row that is cut short, to a multiple of the alignment, counts as filled up with zeros.
        """

    @abstractmethod
    def take(self) -> Tensor:
        """The partial sums of all rows since the last call: int64 [3, rows], in order."""


class Int64RowSums(RowSums):
    """Any device: each word widened to int64 and multiplied."""

    alignment = 4
    small_bytes = 1 << 19

    def __init__(self, seed: int, device: torch.device) -> None:
        self._inner = inner_weights(seed, device)
        self._position = torch.arange(1, ROW_WORDS + 1, dtype=torch.int64, device=device)
        # On a CPU the widened words should stay in cache; elsewhere launches cost more.
        self._step = 64 if device.type == "cpu" else 512
        self._parts: list[Tensor] = []

    def append(self, rows: Tensor) -> None:
        """See `RowSums`: some rows at a time."""
        for part in rows.split(self._step):
            words = part.view(torch.int32).to(torch.int64).bitwise_and_(_MASK32)
            count = words.shape[1]
            columns = (words.sum(1), (words * self._position[:count]).sum(1), (words * self._inner[:count]).sum(1))
            self._parts.append(torch.stack(columns))

    def take(self) -> Tensor:
        """See `RowSums`."""
        parts, self._parts = self._parts, []
        return torch.cat(parts, 1)


class Int8RowSums(RowSums):
    """CPUs with 8-bit dot products: one matrix product of the bytes of many rows and the bytes of the weights.

    The product is of unsigned by signed bytes, which is what such CPUs multiply, so memory is read where it lies. A
    weight times 256^j, for byte j of a word, is written in signed digits to base 256, one matrix column a digit: 4
    columns for the weight 1, 5 for c + 1 < 2^15, 7 for u_c - D, whose 4 digits are the bytes of u_c minus 128 with
    D = 128 in each byte. Together 16, one vector of int32. Products are below 2^15, and ROW_BYTES of them fit an int32.
    The digits are put together modulo 2^64, and

        sum u b = sum (u - D) b + D sum b.
    """

    alignment = 1
    small_bytes = 1 << 17
    _COLUMNS = ((0, 4), (4, 9), (9, 16))

    def __init__(self, seed: int, rows: int) -> None:
        self._matrix = _int8_weights(seed)
        self._digits = torch.empty((min(rows, GROUP_ROWS), 16), dtype=torch.int32, device=_CPU)
        self._rows = 0

    def append(self, rows: Tensor) -> None:
        """See `RowSums`: leaves the digits of each row."""
        count, width = rows.shape
        last = self._rows + count
        matrix = self._matrix if width == ROW_BYTES else self._matrix[:width]
        torch._int_mm(rows, matrix, out=self._digits[self._rows : last])
        self._rows = last

    def take(self) -> Tensor:
        """See `RowSums`: puts the digits together."""
        digits = self._digits[: self._rows].t().to(torch.int64, memory_format=torch.contiguous_format)
        self._rows = 0
        digits.mul_(_powers_of_256())
        values = torch.stack([digits[first:last].sum(0) for first, last in self._COLUMNS])
        values[2].add_(values[0], alpha=_BIAS)
        return values


def row_sums(seed: int, device: torch.device, rows: int) -> RowSums:
    """The fastest implementation for `device` and `rows` rows in all."""
    if device.type == "cpu" and int8_products_are_exact():
        return Int8RowSums(seed, rows)
    return Int64RowSums(seed, device)


@functools.cache
def int8_products_are_exact() -> bool:
    """Whether this CPU has 8-bit dot products and torch uses them without saturation, tried on the largest values.

    Before VNNI, x86 adds pairs of products in 16 bits, which saturate: then the library's 8-bit product is not exact.
    """
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    if supported is None or not supported():
        return False
    column = torch.arange(ROW_BYTES, dtype=torch.int64, device=_CPU)
    left = torch.stack([torch.full_like(column, 255), torch.full_like(column, 127), column * 37 % 256])
    right = torch.stack([torch.full_like(column, -128), torch.full_like(column, 127), column * 91 % 256 - 128])
    right = right.repeat(6, 1)[:16]
    expected = (left.unsqueeze(1) * right).sum(2)
    try:
        for copies in (1, 5, 40):
            product = torch._int_mm(left.to(torch.uint8).repeat(copies, 1), right.to(torch.int8).t().contiguous())
            if not torch.equal(product.to(torch.int64), expected.repeat(copies, 1)):
                return False
    except RuntimeError:  # a torch that multiplies signed bytes only
        return False
    return True


def draws(start: int, index: Tensor) -> Tensor:
    """`reference.draw(start, index)` of every element of `index`, int64 in and out (two's complement)."""
    value = (index + 1) * reference.signed(reference.GOLDEN) + reference.signed(start)
    value = (value ^ _shift(value, 30)) * reference.signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * reference.signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def outer_weights(seed: int, row: Tensor) -> Tensor:
    """w of every row number in `row`, int64."""
    return draws(reference.stream_start(seed, reference.OUTER_STREAM), row).bitwise_or_(1)


@functools.lru_cache(maxsize=16)
def inner_weights(seed: int, device: torch.device) -> Tensor:
    """u of every column, int64 [ROW_WORDS]."""
    index = torch.arange(ROW_WORDS, dtype=torch.int64, device=device)
    return _shift(draws(reference.stream_start(seed, reference.INNER_STREAM), index), 32).bitwise_or_(1)


@functools.lru_cache(maxsize=16)
def _int8_weights(seed: int) -> Tensor:
    """The matrix int8 [ROW_BYTES, 16] of `Int8RowSums`."""
    inner = inner_weights(seed, _CPU)
    position = torch.arange(1, ROW_WORDS + 1, dtype=torch.int64, device=_CPU)
    low = (position + 128) % 256 - 128
    inner_digits = [(inner >> 8 * byte) % 256 - 128 for byte in range(4)]
    matrix = torch.zeros((ROW_WORDS, 4, 16), dtype=torch.int8, device=_CPU)
    for byte in range(4):
        matrix[:, byte, byte] = 1
        for first, digits in ((4, [low, (position - low) >> 8]), (9, inner_digits)):
            for place, digit in enumerate(digits):
                matrix[:, byte, first + byte + place] = digit.to(torch.int8)
    return matrix.view(ROW_BYTES, 16)


@functools.cache
def _powers_of_256() -> Tensor:
    """Value of one unit of each column of the matrix, int64 [16, 1]."""
    places = [place for first, last in Int8RowSums._COLUMNS for place in range(last - first)]
    return torch.tensor([[1 << 8 * place] for place in places], dtype=torch.int64, device=_CPU)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
