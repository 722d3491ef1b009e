"""What becomes of the elements that a fault hits, bit for bit.

Between the grammar, which says `random` or `copy=other`, and `mutate`, which knows no chance: here it is drawn what exactly
is written, and what was written is handed back in words, so that a record can be replayed on any device to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from bitwitness import mutate
from bitwitness.errors import ConfigurationError
from bitwitness.faults.choose import sample
from bitwitness.faults.spec import Mutate
from bitwitness.mutate import FlipBits, FlipSign, Mutation, Scale, SetTo, StuckAt

ANATOMY_ZERO, ANATOMY_FLIPS = 0.5068, 0.4831
"""Shares of a strike's classes of damage in Anatomy of SDC (arXiv 2605.04213); the rest, 1.01 %, is NaN and infinity."""

ANATOMY_MEAN_FLIPS = 1.7
"""Of how many flipped bits an element would have on average, if it could have none: leaves 38 % with one, published is < 40 %."""

_BLOCK = 65536

_WORD = 2.0**63
"""The largest integers have 64 bits, one of them the sign."""


@dataclass(frozen=True, slots=True)
class Change:
    """The elements whose bits are now others, which may be none.

    Attributes:
        indices: in logical order, int64 on the CPU.
        before, after: their bits, as `mutate.words_of` returns them.
    """

    indices: Tensor
    before: Tensor
    after: Tensor

    def __len__(self) -> int:
        return self.indices.numel()


@dataclass(frozen=True, slots=True)
class _Chance:
    random: Random
    generator: torch.Generator


def check(mutation: Mutate, dtype: torch.dtype) -> None:
    """Whether a mutation makes sense for a dtype.

    Raises:
        ConfigurationError: it does not; names the mutation, the dtype and what is possible.
    """
    width = mutate.bits_of(dtype)
    number = dtype.is_floating_point or dtype.is_complex
    if mutation.bit is not None and not -width <= mutation.bit < width:
        raise ConfigurationError(
            f"{mutation}: {dtype} has the bits 0 to {width - 1} (or -1 to {-width}, from the uppermost)"
        )
    if mutation.kind == "bits" and mutation.count > width:
        raise ConfigurationError(f"{mutation}: {dtype} has only {width} bits")
    if mutation.kind == "add" and not number:
        raise ConfigurationError(f"{mutation}: {dtype} has no fractions to add a share in; use set=V or bit=B")
    if mutation.kind == "scale" and not number and not abs(mutation.value) < _WORD:
        raise ConfigurationError(f"{mutation}: {dtype} takes whole factors below 2**63")
    plain = _plain(mutation, dtype, bit=0)
    if plain is not None:
        words = torch.zeros((1, 2) if dtype == torch.complex128 else (1,), dtype=torch.int64)
        try:
            mutate.mutated(words, dtype, plain)
        except ValueError as error:
            raise ConfigurationError(f"{mutation}: {error}") from error


def apply_(
    tensor: Tensor,
    mutation: Mutate,
    indices: Tensor,
    random: Random,
    generator: torch.Generator,
    stale: Tensor | None = None,
) -> Change:
    """Damage elements in place: bits only, unseen by autograd and by version counters.

    Args:
        tensor: of any strided layout, dtype and device, whose elements do not share memory.
        mutation: what becomes of each element.
        indices: which, in logical order, each once; may be none.
        random: all that is drawn comes from it and the next.
        generator: for what is drawn by the thousand; on the CPU.
        stale: for `copy=stale`, what was in this place before. If there is none, or it has another shape or dtype, nothing is
            changed, as nothing can have been left over.

    Returns:
        The elements whose bits have changed; with `swap`, those they were swapped with are among them.

    Raises:
        ConfigurationError: the mutation makes no sense for this dtype, or there is no other element (a ValueError).
        ValueError: an index is out of range or repeated.
    """
    check(mutation, tensor.dtype)
    indices = indices.reshape(-1)
    chance = _Chance(random, generator)
    if mutation.kind == "copy" and mutation.source == "stale" and not _comparable(tensor, stale):
        indices = indices[:0]
    if not indices.numel():
        before = mutate.words_of(tensor, indices)
        return Change(indices.cpu(), before, before)
    if mutation.kind == "swap":
        indices = _with_partners(tensor, indices, chance)
    before = mutate.words_of(tensor, indices)
    mutate.put_words(tensor, indices, _damaged(tensor, mutation, indices, before, chance, stale))
    after = mutate.words_of(tensor, indices)
    changed = (before != after).reshape(indices.numel(), -1).any(dim=1)
    return Change(indices.cpu()[changed], before[changed], after[changed])


def restore_(tensor: Tensor, indices: Tensor, words: Tensor) -> None:
    """Write exactly these words, as those of a record.

    Raises:
        ValueError: an index is out of range or repeated, or the words are none of this dtype.
    """
    mutate.put_words(tensor, indices, words)


def _comparable(tensor: Tensor, stale: Tensor | None) -> bool:
    return stale is not None and stale.shape == tensor.shape and stale.dtype == tensor.dtype


def _plain(mutation: Mutate, dtype: torch.dtype, bit: int) -> Mutation | None:
    """The mutation in `mutate`'s terms, if chance has no part in it but for this bit."""
    match mutation.kind:
        case "bit":
            return FlipBits((bit,))
        case "stuck0":
            return StuckAt(bit, 0)
        case "stuck1":
            return StuckAt(bit, 1)
        case "zero":
            return SetTo(0.0) if dtype != torch.float8_e8m0fnu else SetTo(2.0**-127)  # which has no smaller number
        case "nan":
            return SetTo(math.nan)
        case "inf":
            return SetTo(math.inf)
        case "set":
            return SetTo(mutation.value)
        case "scale":
            return Scale(mutation.value)
        case "sign":
            return FlipSign()
        case _:
            return None


def _damaged(
    tensor: Tensor, mutation: Mutate, indices: Tensor, before: Tensor, chance: _Chance, stale: Tensor | None
) -> Tensor:
    dtype = tensor.dtype
    width = mutate.bits_of(dtype)
    plain = _plain(mutation, dtype, chance.random.randrange(width) if mutation.bit is None else mutation.bit % width)
    if plain is not None:
        return mutate.mutated(before, dtype, plain)
    match mutation.kind:
        case "bits":
            return before ^ _drawn(len(before), dtype, lambda shape: _subsets(shape, mutation.count, chance))
        case "profile":
            return _anatomy(before, dtype, chance)
        case "random":
            return _drawn(len(before), dtype, lambda shape: _coins(shape, chance), lambda words: _finite(words, dtype))
        case "copy" if mutation.source == "stale":
            assert stale is not None
            return mutate.words_of(stale, indices)
        case "copy":
            return mutate.words_of(tensor.detach().flatten()[_others(tensor, indices, chance)], range(len(indices)))
        case "swap":
            half = len(before) // 2
            return torch.cat([before[half:], before[:half]])
        case "add":
            return _added(before, dtype, mutation.value)
        case _:
            raise AssertionError(mutation.kind)


def _drawn(
    count: int,
    dtype: torch.dtype,
    draw: Callable[[tuple[int, int]], Tensor],
    good: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Words whose bits are drawn as truth values of shape [words, bits], each until it is good."""
    blocks = []
    for start in range(
        0, count, _BLOCK
    ):  # a bit takes a byte and more while it is drawn: never those of all words at once
        words = _packed(draw((min(_BLOCK, count - start), mutate.bits_of(dtype))), dtype)
        while good is not None and not bool((fine := good(words)).all()):
            words[~fine] = _packed(draw((int((~fine).sum()), mutate.bits_of(dtype))), dtype)
        blocks.append(words)
    return torch.cat(blocks)


def _packed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of truth values, from the least significant bit, as words."""
    width = min(64, bits.shape[1])
    parts = bits.reshape(len(bits), -1, width).to(torch.int64)
    words = (parts << torch.arange(width)).sum(dim=2)
    return words if dtype == torch.complex128 else words[:, 0]


def _subsets(shape: tuple[int, int], count: int, chance: _Chance) -> Tensor:
    """In every row so many true, any with the same chance."""
    return torch.rand(shape, generator=chance.generator).argsort(dim=1) < count


def _coins(shape: tuple[int, int], chance: _Chance) -> Tensor:
    return torch.randint(0, 2, shape, generator=chance.generator, dtype=torch.int8)


def _finite(words: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = mutate.numbers_of(words, dtype)
    if dtype.is_complex:
        return torch.view_as_real(numbers.to(torch.complex128)).isfinite().all(dim=-1)
    return numbers.to(torch.float64).isfinite() if dtype.is_floating_point else torch.ones(len(words), dtype=torch.bool)


def _anatomy(before: Tensor, dtype: torch.dtype, chance: _Chance) -> Tensor:
    """One class of damage for all elements of a strike: zero, else bits that differ from element to element, else NaN or infinity.

    Where a dtype has neither NaN nor infinity, bits are flipped instead.
    """
    draw = chance.random.random()
    if draw < ANATOMY_ZERO:
        zero = _plain(Mutate("zero"), dtype, bit=0)
        assert zero is not None
        return mutate.mutated(before, dtype, zero)
    special = [value for value in (math.nan, math.inf, -math.inf) if _has(dtype, value)]
    if draw >= ANATOMY_ZERO + ANATOMY_FLIPS and special:
        return mutate.mutated(before, dtype, SetTo(chance.random.choice(special)))
    total = mutate.bits_of(dtype)
    width = total // 2 if dtype.is_complex else total  # each of a complex number's two falls by itself
    falling = 1.0 - torch.arange(width) / width
    likely = (2 * ANATOMY_MEAN_FLIPS / (width + 1) * falling).clamp(max=1.0).repeat(total // width)
    return before ^ _drawn(
        len(before),
        dtype,
        lambda shape: torch.rand(shape, generator=chance.generator) < likely,
        lambda masks: (masks != 0).reshape(len(masks), -1).any(dim=1),
    )


def _has(dtype: torch.dtype, value: float) -> bool:
    try:
        mutate.mutated(
            torch.zeros((1, 2) if dtype == torch.complex128 else (1,), dtype=torch.int64), dtype, SetTo(value)
        )
    except ValueError:
        return False
    return True


def _others(tensor: Tensor, indices: Tensor, chance: _Chance) -> Tensor:
    """For each element another one, whichever."""
    if tensor.numel() < 2:
        raise ConfigurationError(f"copy=other: a tensor of shape {list(tensor.shape)} has no other element")
    drawn = torch.randint(tensor.numel() - 1, (indices.numel(),), generator=chance.generator).to(indices.device)
    return drawn + (drawn >= indices).to(torch.int64)


def _with_partners(tensor: Tensor, indices: Tensor, chance: _Chance) -> Tensor:
    """The elements, and after them as many others that they change places with.

    Where more than half of a tensor is selected, there are not as many others: then the selected change places among
    themselves, and an odd one stays.
    """
    size, count = tensor.numel(), indices.numel()
    if size < 2:
        raise ConfigurationError(f"swap: a tensor of shape {list(tensor.shape)} has no other element")
    if 2 * count > size:
        shuffled = indices[torch.randperm(count, generator=chance.generator).to(indices.device)]
        return shuffled[: count - count % 2]
    left_out = indices.sort().values
    drawn = sample(size - count, count, chance.random, chance.generator).to(indices.device)
    below = torch.searchsorted(left_out - torch.arange(count, device=indices.device), drawn, right=True)
    return torch.cat([indices, drawn + below])


def _added(before: Tensor, dtype: torch.dtype, share: float) -> Tensor:
    """`x + F * x`, in double precision before it is rounded to the dtype; of a complex number, both parts."""
    numbers = mutate.numbers_of(before, dtype)
    wide = numbers.to(torch.complex128 if dtype.is_complex else torch.float64)
    return mutate.words_of((wide + share * wide).to(dtype), range(len(before)))
