"""Blocks of memory that are written, left, and read back: what holds the numbers, apart from what computes them.

The patterns are the classic ones of memory tests, because each shows another fault: walking bits a stuck or shorted line,
checkerboards cells that disturb each other, an address in each word a wrong address, moving inversions a cell that a write
next to it changes. Each call takes its block anew from the allocator, so that in time much of the memory is gone over. One bit of HBM
that flips without notice of ECC was seen in the field (AEGIS).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitwitness.scan.operands import Compute, Operands, Operation

_CHECKERBOARD = 0x5555555555555555
_ANY_WORD = (-(1 << 63), (1 << 63) - 1)


def _repeated(words: list[int]) -> Callable[[Operands], Compute]:
    """Write a few words over and over, then their complement over them, then the words again; read after each but the first."""

    def build(operands: Operands) -> Compute:
        (size,) = operands.shape
        pattern = operands.keep(torch.tensor(words, dtype=operands.dtype, device="cpu"))
        rows = size // len(words)

        def compute() -> list[Tensor]:
            block = torch.empty((rows, len(words)), dtype=pattern.dtype, device=pattern.device)
            block.copy_(pattern.expand_as(block))
            inverted = torch.bitwise_not(block)
            block.copy_(inverted)
            return [inverted, torch.bitwise_not(block)]

        return compute

    return build


def _address(operands: Operands) -> Compute:
    """Each word holds its own place, and then the complement of it."""
    (size,) = operands.shape
    start = operands.integers((1,), 0, 1 << 40, operands.dtype)

    def compute() -> list[Tensor]:
        block = torch.arange(size, dtype=start.dtype, device=start.device).add_(start)
        return [torch.bitwise_not(block), block]

    return compute


def _inversions(operands: Operands) -> Compute:
    """Inverts a random block piece by piece, upwards and then downwards, each piece after its neighbour was written."""
    (size,) = operands.shape
    content = operands.integers((size,), *_ANY_WORD, operands.dtype)
    step = max(size // 16, 1)

    def compute() -> list[Tensor]:
        block = content.clone()
        for start in range(0, size, step):
            block[start : start + step].bitwise_not_()
        middle = block.clone()
        for start in reversed(range(0, size, step)):
            block[start : start + step].bitwise_not_()
        return [middle, block]

    return compute


def _kept(operands: Operands) -> Compute:
    """Written once, read at each call: what changes in between was not changed by anybody."""
    (size,) = operands.shape
    content = operands.integers((size,), *_ANY_WORD, operands.dtype)
    return lambda: [content.clone()]


def _strided(operands: Operands) -> Compute:
    """Copies that read or write with gaps, crosswise, and backwards."""
    (size,) = operands.shape
    content = operands.integers((size,), *_ANY_WORD, operands.dtype)
    table = content.view(-1, 64)

    def compute() -> list[Tensor]:
        spread = torch.zeros(3 * size, dtype=content.dtype, device=content.device)
        spread[::3] = content
        return [table.t().contiguous(), spread, content[1::2].clone(), content.flip(0), content.roll(37)]

    return compute


def _host_copy(operands: Operands) -> Compute:
    """From the host's memory to the device and back, by pages and, where there is a GPU, by pinned memory."""
    (size,) = operands.shape
    content = operands.host_integers((size,), *_ANY_WORD, operands.dtype)
    device = operands.device

    def compute() -> list[Tensor]:
        there = content.to(device, copy=True)
        back = torch.bitwise_not(there).to("cpu", copy=True)
        if device.type != "cuda":
            return [there, back]
        pinned = torch.empty_like(content, pin_memory=True).copy_(content)
        again = pinned.to(device, non_blocking=True)
        pinned.copy_(torch.bitwise_not(again), non_blocking=False)
        return [there, back, again, pinned]

    return compute


_PATTERNS: dict[str, Callable[[Operands], Compute]] = {
    "walking_ones": _repeated([1 << bit if bit < 63 else -(1 << 63) for bit in range(64)]),
    "walking_zeros": _repeated([~(1 << bit) if bit < 63 else (1 << 63) - 1 for bit in range(64)]),
    "checkerboard": _repeated([_CHECKERBOARD, ~_CHECKERBOARD]),
    "solid": _repeated([-1, 0]),
    "address": _address,
    "inversions": _inversions,
    "kept": _kept,
    "strided": _strided,
    "host_copy": _host_copy,
}


def _memory(operands: Operands) -> Compute:
    return _PATTERNS[operands.item.variant](operands)


OPERATIONS: dict[str, Operation] = {"memory": Operation(_memory, (1,), frozenset(_PATTERNS), needs_variant=True)}
