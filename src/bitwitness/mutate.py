"""How bits are changed on purpose: the one place.

A drill inside the guard and a fault injected by a test or a campaign must be the same thing, so both come here. Like a
fault in hardware, a mutation leaves no trace but the bits: it bypasses autograd and the version counters of tensors, and
draws no random number. Unlike one, it can be checked: bits are read and written as words, so that whoever strikes compares
those before and after, and says so where nothing has changed instead of letting it pass for a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e8m0fnu)


class FaultDidNotLand(RuntimeError):
    """A mutation changed no bit, so whatever it was to prove is not proved."""


@dataclass(frozen=True, slots=True)
class FlipBits:
    """Flip these bits of an element, numbered from the least significant, 0. A complex number's imaginary part is on top."""

    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlipSign:
    """Negate: the sign bit of a floating-point number (both of a complex one), the two's complement of an integer."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply by a factor. Integers take whole factors and wrap around, as their arithmetic does."""

    factor: float


@dataclass(frozen=True, slots=True)
class SetTo:
    """Replace by a value, e.g. `math.nan` or `math.inf`; rounded to the dtype, which must have such a value."""

    value: float


@dataclass(frozen=True, slots=True)
class StuckAt:
    """Force one bit of an element, numbered as in `FlipBits`, to 0 or to 1. Where it is that already, nothing changes."""

    bit: int
    value: Literal[0, 1]


Mutation = FlipBits | FlipSign | Scale | SetTo | StuckAt


def words_of(tensor: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    """The bits of elements, as they are kept in a record.

    Args:
        tensor: of any strided layout, dtype and device.
        indices: which, in logical order, each at most once; may be none.

    Returns:
        An int64 tensor on the CPU, one word an element, padded with zeros from the top; `[n, 2]` for complex128.

    Raises:
        ValueError: an index is out of range or repeated, or the tensor has no memory of its own to read.
    """
    words, place = _memory(tensor, _checked(tensor, indices), write=False)
    return _padded(words[place])


def put_words(tensor: Tensor, indices: Sequence[int] | Tensor, words: Tensor) -> None:
    """Write elements bit for bit: the inverse of `words_of`.

    Args:
        tensor: as for `words_of`, if its elements do not share memory; a leaf that requires a gradient is as good as any.
        indices: as for `words_of`.
        words: one for each index, on any device.

    Raises:
        ValueError: as `words_of`, or elements share memory, or the words are not as many as the indices or none of this dtype.
    """
    where = _checked(tensor, indices)
    memory, place = _memory(tensor, where, write=True)
    expected = (where.numel(), 2) if tensor.dtype == torch.complex128 else (where.numel(),)
    if words.shape != expected:
        raise ValueError(
            f"{list(words.shape)} words for {where.numel()} elements of {tensor.dtype}: give {list(expected)}"
        )
    _refuse_foreign(words, tensor.dtype)
    memory[place] = words.to(device=memory.device, dtype=memory.dtype)


def mutated(words: Tensor, dtype: torch.dtype, mutation: Mutation) -> Tensor:
    """What a mutation makes of words as `words_of` returns them.

    Raises:
        ValueError: the mutation makes no sense for this dtype, or the words are none of it.
    """
    _refuse_foreign(words, dtype)
    native = words.to(torch.int64 if dtype == torch.complex128 else _INTEGERS[dtype.itemsize])
    return _padded(_mutated(native, dtype, mutation))


def numbers_of(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that words stand for, as a tensor of this dtype."""
    if dtype == torch.complex128:
        return torch.view_as_complex(words.contiguous().view(torch.float64))
    return words.to(_INTEGERS[dtype.itemsize]).view(dtype)


def bits_of(dtype: torch.dtype) -> int:
    """How many bits of an element carry its value; of a bool, one."""
    return 1 if dtype == torch.bool else 8 * dtype.itemsize


def shown(word: Tensor, dtype: torch.dtype) -> str:
    """One element for people to read: the number, and the bits that it is made of.

    Args:
        word: of one element, as `words_of` returns it.
        dtype: of the element.
    """
    digits = bits_of(dtype) // word.numel() // 4 or 1
    bits = " ".join(f"{int(part) & (16**digits - 1):0{digits}x}" for part in word.flatten())
    return f"{numbers_of(word, dtype)[0].item()} (0x{bits})"


def _padded(words: Tensor) -> Tensor:
    width = _width(words)
    wide = words.to(device="cpu", dtype=torch.int64)
    return wide if width == 64 else wide & ((1 << width) - 1)


def _refuse_foreign(words: Tensor, dtype: torch.dtype) -> None:
    """Words that the dtype cannot have come from a record of another tensor; cut to size, they would be another fault."""
    width = 64 if dtype == torch.complex128 else bits_of(dtype)
    if words.numel() and width < 64 and (int(words.min()) < 0 or int(words.max()) >> width):
        raise ValueError(f"a word is wider than the {width} bits of {dtype}")


def _memory(tensor: Tensor, where: Tensor, *, write: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The tensor's memory as words, and how these elements are found in it."""
    words = _words(tensor)
    if write and any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError("elements of this tensor share memory (it is expanded): clone it first")
    return words, torch.unravel_index(where, tensor.shape or (1,))


def _checked(tensor: Tensor, indices: Sequence[int] | Tensor) -> Tensor:
    where = torch.as_tensor(indices, dtype=torch.int64, device=tensor.device).flatten()
    if not where.numel():
        return where
    lowest, highest = int(where.min()), int(where.max())
    if lowest < 0 or highest >= tensor.numel():
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"index {wrong} is outside a tensor of {tensor.numel()} elements (shape {list(tensor.shape)})")
    if where.unique().numel() != where.numel():
        raise ValueError("an index is given twice: a bit flipped twice is as it was")
    return where


def _words(tensor: Tensor) -> Tensor:
    """The tensor's own memory as integers as wide as its elements; a trailing axis of two where these have 16 bytes."""
    if tensor.layout != torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be mutated: give its values()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("this is a lazily conjugated or negated view: its bits are not in memory; resolve it first")
    raw = tensor.data  # not detach(): that shares the version counter, and hardware bumps none
    raw = raw.unsqueeze(0) if raw.dim() == 0 else raw
    if raw.dtype == torch.complex128:
        return torch.view_as_real(raw).view(torch.int64)
    return raw.view(_INTEGERS[raw.element_size()])


def _mutated(words: Tensor, dtype: torch.dtype, mutation: Mutation) -> Tensor:
    match mutation:
        case FlipBits(bits):
            return _flipped(words, dtype, bits)
        case FlipSign():
            return _negated(words, dtype)
        case Scale(factor):
            return _scaled(words, dtype, factor)
        case SetTo(value):
            return _value(value, dtype).to(words.device).expand(words.shape)
        case StuckAt(bit, value):
            mask = _masks((bit,), dtype, words, mutation)
            return words | mask if value else words & ~mask


def _width(words: Tensor) -> int:
    return 8 * words.element_size()


def _flipped(words: Tensor, dtype: torch.dtype, bits: Sequence[int]) -> Tensor:
    return words ^ _masks(bits, dtype, words, FlipBits(tuple(bits)))


def _masks(bits: Sequence[int], dtype: torch.dtype, words: Tensor, mutation: Mutation) -> Tensor:
    width, total = _width(words), bits_of(dtype)
    wrong = [bit for bit in bits if not 0 <= bit < total]
    if wrong or not bits or len(set(bits)) != len(bits):
        raise ValueError(f"{mutation}: {dtype} takes different bits from 0 to {total - 1}, at least one")
    if dtype != torch.complex128:
        return _mask(bits, words)
    real = _mask([bit for bit in bits if bit < width], words)
    imaginary = _mask([bit - width for bit in bits if bit >= width], words)
    return torch.stack([real, imaginary])


def _mask(bits: Sequence[int], words: Tensor) -> Tensor:
    """An integer with these bits set, as the signed number that has them."""
    width = _width(words)
    value = sum(1 << bit for bit in bits)
    signed = value - (1 << width) if value >> (width - 1) else value
    return torch.tensor(signed, dtype=words.dtype, device=words.device)


def _negated(words: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype in _UNSIGNED:
        raise ValueError(f"FlipSign: {dtype} has no sign")
    if not dtype.is_floating_point and not dtype.is_complex:
        return -words
    width = _width(words)
    half = width // 2
    signs = [half - 1, width - 1] if dtype in (torch.complex32, torch.complex64) else [width - 1]
    return words ^ _mask(signs, words)  # of a complex128 the two words are two numbers


def _scaled(words: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    if dtype == torch.bool:
        raise ValueError("Scale: a bool cannot be scaled; use FlipBits((0,)) or SetTo")
    if dtype.is_complex:
        part = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return (words.view(part).to(torch.float64) * factor).to(part).view(words.dtype)
    if dtype.is_floating_point:
        return (words.view(dtype).to(torch.float64) * factor).to(dtype).view(words.dtype)
    if not float(factor).is_integer():
        raise ValueError(f"Scale({factor}): {dtype} takes whole factors")
    wide = words.to(torch.int64)  # the sign of an unsigned number is wrong here, and its low bits are right
    return (wide * int(factor)).to(words.dtype)


def _value(value: float, dtype: torch.dtype) -> Tensor:
    """One value as words: a scalar, or `[2]` for complex128."""
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.tensor(value, dtype=torch.float64).to(dtype)
        got = complex(made.to(torch.complex128)) if dtype.is_complex else complex(float(made))
        if (math.isnan(value), math.isinf(value)) != (math.isnan(got.real), math.isinf(got.real)):
            raise ValueError(f"SetTo({value}): {dtype} has no such value")
        return _words(made).squeeze(0)
    allowed = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not math.isfinite(value) or value != int(value) or not allowed[0] <= value <= allowed[1]:
        raise ValueError(f"SetTo({value}): {dtype} takes whole numbers from {allowed[0]} to {allowed[1]}")
    width = 8 * dtype.itemsize
    number = int(value)
    signed = number - (1 << width) if number >> (width - 1) > 0 else number
    return torch.tensor(signed, dtype=_INTEGERS[dtype.itemsize])
