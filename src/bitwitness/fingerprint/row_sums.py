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
"""Rows whose partial sums are worked up together: 32 MiB of input, so that the small operations cost nothing."""

_CPU = torch.device("cpu")
_MASK32 = 0xFFFFFFFF
_BIAS = 0x80808080
"""128 in each byte of a word: what lies between a word and the word of its bytes taken as signed after the flip."""


class RowSums(ABC):
    """Collects the partial sums of up to `GROUP_ROWS` rows.

    flip: every byte of the rows must have been XORed with it; a zero byte is then `flip`.
    """

    flip: int

    @abstractmethod
    def append(self, rows: Tensor) -> None:
        """Take rows: uint8 [n, ROW_BYTES], contiguous; the memory may be reused afterwards."""

    @abstractmethod
    def take(self) -> Tensor:
        """The partial sums of all rows since the last call: int64 [rows, 3], in order."""


class Int64RowSums(RowSums):
    """Any device: each word widened to int64 and multiplied."""

    flip = 0

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
            columns = (words.sum(1), (words * self._position).sum(1), (words * self._inner).sum(1))
            self._parts.append(torch.stack(columns, 1))

    def take(self) -> Tensor:
        """See `RowSums`."""
        parts, self._parts = self._parts, []
        return torch.cat(parts)


class Int8RowSums(RowSums):
    """CPUs with 8-bit dot products: one int8 matrix product a block, rows of bytes times the bytes of the weights.

    With D = 128 in each byte, a flipped byte read as signed is the byte minus 128, so a row holds b_c - D. A weight
    times 256^j, for byte j of a word, is written in signed digits to base 256, one matrix column a digit: 4 columns for
    the weight 1, 5 for c + 1 < 2^15, 7 for u_c - D, whose 4 digits are the bytes of u_c minus 128. Together 16, one
    vector of int32. Products are at most 2^14 and ROW_BYTES of them fit an int32. The digits are put together modulo
    2^64 and the biases taken back:

        sum u b = sum (u - D)(b - D) + D sum b + D sum (u - D).
    """

    flip = 0x80
    _COLUMNS = ((0, 4), (4, 9), (9, 16))

    def __init__(self, seed: int, device: torch.device) -> None:
        self._matrix, self._bias = _int8_weights(seed)
        self._digits = torch.empty((GROUP_ROWS, 16), dtype=torch.int32, device=device)
        self._rows = 0

    def append(self, rows: Tensor) -> None:
        """See `RowSums`: leaves the digits of each row."""
        out = self._digits[self._rows : self._rows + rows.shape[0]]
        torch._int_mm(rows.view(torch.int8), self._matrix, out=out)
        self._rows += rows.shape[0]

    def take(self) -> Tensor:
        """See `RowSums`: puts the digits together."""
        digits = self._digits[: self._rows].to(torch.int64)
        self._rows = 0
        digits.mul_(_powers_of_256())
        values = torch.stack([digits[:, first:last].sum(1) for first, last in self._COLUMNS], 1)
        values.add_(self._bias)
        values[:, 2] += values[:, 0] * _BIAS
        return values


def row_sums(seed: int, device: torch.device) -> RowSums:
    """The fastest implementation for `device`."""
    if device.type == "cpu" and int8_products_are_exact():
        return Int8RowSums(seed, device)
    return Int64RowSums(seed, device)


@functools.cache
def int8_products_are_exact() -> bool:
    """Whether this CPU has 8-bit dot products and torch uses them without saturation, tried on the largest values.

    Before VNNI, x86 adds pairs of products in 16 bits, which saturate: then the library's int8 product is not exact.
    """
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    if supported is None or not supported():
        return False
    column = torch.arange(ROW_BYTES, dtype=torch.int64, device=_CPU)
    left = torch.stack([torch.full_like(column, -128), torch.full_like(column, 127), column * 37 % 256 - 128])
    right = left.repeat(6, 1)[:16]
    expected = (left.unsqueeze(1) * right).sum(2)
    for copies in (1, 5, 40):
        product = torch._int_mm(left.to(torch.int8).repeat(copies, 1), right.to(torch.int8).t())
        if not torch.equal(product.to(torch.int64), expected.repeat(copies, 1)):
            return False
    return True


def draws(start: int, index: Tensor) -> Tensor:
    """`reference.draw(start, index)` of every element of `index`, int64 in and out (two's complement)."""
    value = (index + 1) * reference.signed(reference.GOLDEN) + reference.signed(start)
    value = (value ^ _shift(value, 30)) * reference.signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * reference.signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


@functools.lru_cache(maxsize=256)
def outer_weights(seed: int, group: int, device: torch.device) -> Tensor:
    """w of the rows group * GROUP_ROWS ..., int64 [GROUP_ROWS]. Kept: 32 KiB each."""
    index = torch.arange(group * GROUP_ROWS, (group + 1) * GROUP_ROWS, dtype=torch.int64, device=device)
    return draws(reference.stream_start(seed, reference.OUTER_STREAM), index).bitwise_or_(1)


@functools.lru_cache(maxsize=16)
def inner_weights(seed: int, device: torch.device) -> Tensor:
    """u of every column, int64 [ROW_WORDS]."""
    index = torch.arange(ROW_WORDS, dtype=torch.int64, device=device)
    return _shift(draws(reference.stream_start(seed, reference.INNER_STREAM), index), 32).bitwise_or_(1)


@functools.lru_cache(maxsize=16)
def _int8_weights(seed: int) -> tuple[Tensor, Tensor]:
    """The matrix int8 [ROW_BYTES, 16] of `Int8RowSums` and what the biases add to a row, int64 [3]."""
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
    sums = (ROW_WORDS, ROW_WORDS * (ROW_WORDS + 1) // 2, int((inner - _BIAS).sum()))
    bias = torch.tensor([reference.signed(_BIAS * value) for value in sums], dtype=torch.int64, device=_CPU)
    return matrix.view(ROW_BYTES, 16), bias


@functools.cache
def _powers_of_256() -> Tensor:
    """Value of one unit of each column of the matrix, int64 [16]."""
    places = [place for first, last in Int8RowSums._COLUMNS for place in range(last - first)]
    return torch.tensor([1 << 8 * place for place in places], dtype=torch.int64, device=_CPU)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
