"""Several kinds of work at once, without a pause: load, and with it temperature and current, rise until marginal hardware fails.

How often a fault shows grows with the temperature, and some show only while other units work too (SOSP '23). So the parts of a mix take
turns, on a GPU each on a stream of its own, where they run at the same time. Every round's outputs count: they are added up as
integers, in which a difference in one round cannot be lost, without keeping them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bitwitness.scan.items import Item
from bitwitness.scan.operands import Compute, Operands, Operation

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Part = tuple[str, str, tuple[int, ...], str]
"""Operation, dtype, shape, variant of one part."""


def _burn(size: int, dtype: str) -> list[_Part]:
    """Matrix units, FP64 and FP32 pipes, memory and its addresses, all at once."""
    count = size * size
    return [
        ("matmul", dtype, (size, size, size), ""),
        ("fma", "float32", (count,), ""),
        ("fma", "float64", (count // 4,), ""),
        ("memory", "int64", (count // 2,), "inversions"),
        ("exp", "float32", (count,), ""),
        ("scatter", "float32", (count // 4,), ""),
    ]


def _model(size: int, dtype: str) -> list[_Part]:
    """What a model does at one time: products, attention, normalisation, softmax, copies from the host."""
    return [
        ("matmul", dtype, (size, size, 4 * size), "transposed"),
        ("attention", dtype, (2, 4, size, 64), "causal"),
        ("layer_norm", "float32", (size, size), ""),
        ("softmax", "float32", (size, size), ""),
        ("conv2d", "float32", (2, 16, size // 4, 16, 3), ""),
        ("memory", "int64", (size * size // 4 // 64 * 64,), "host_copy"),
    ]


def operations(parts: Mapping[str, Operation]) -> dict[str, Operation]:
    """The mixes, made of these operations."""
    return {
        "burn": Operation(_mixed(_burn, parts), (2,)),
        "model": Operation(_mixed(_model, parts), (2,)),
    }


def _mixed(recipe: Callable[[int, str], list[_Part]], known: Mapping[str, Operation]) -> Callable[[Operands], Compute]:
    """`[size, rounds]`: so many rounds of all parts. α and β are those of each part."""

    def build(operands: Operands) -> Compute:
        size, rounds = operands.shape
        parts = []
        for number, (name, dtype, shape, variant) in enumerate(recipe(size, operands.item.dtype)):
            item = Item("ops", name, dtype, shape, operands.item.alpha, operands.item.beta, variant)
            own = Operands(item, operands.device, salt=f"{operands.item.id}/{number}")
            parts.append(known[name].build(own))
            operands.kept += own.kept
        if operands.device.type == "cuda":
            return _on_streams(parts, rounds, operands.device)
        return lambda: _one_after_another(parts, rounds)

    return build


def _one_after_another(parts: list[Compute], rounds: int) -> list[Tensor]:
    totals = [_words(part()) for part in parts]
    for _ in range(rounds - 1):
        for total, part in zip(totals, parts, strict=True):
            _add(total, part())
    return [one for total in totals for one in total]


def _on_streams(parts: list[Compute], rounds: int, device: torch.device) -> Compute:
    streams = [torch.cuda.Stream(device) for _ in parts]

    def compute() -> list[Tensor]:
        here = torch.cuda.current_stream(device)
        totals: list[list[Tensor]] = []
        for turn in range(rounds):
            for number, (stream, part) in enumerate(zip(streams, parts, strict=True)):
                if turn == 0:
                    stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    if turn == 0:
                        totals.append(_words(part()))
                    else:
                        _add(totals[number], part())
        for stream, total in zip(streams, totals, strict=True):
            here.wait_stream(stream)
            for one in total:
                if one.is_cuda:
                    # Its memory belongs to the stream, which could have it again while it is still read here.
                    one.record_stream(here)
        return [one for total in totals for one in total]

    return compute


def _add(totals: list[Tensor], outputs: list[Tensor]) -> None:
    """As integers that wrap around: an error in one round changes the sum for certain, the same in every round too if they are odd in number."""
    for total, output in zip(totals, _words(outputs), strict=True):
        total.add_(output)


def _words(outputs: list[Tensor]) -> list[Tensor]:
    """The bits of the outputs, as integers: sums of bits are no numbers of the outputs' kind."""
    return [one.view(torch.uint8 if one.dtype == torch.bool else _WORDS[one.element_size()]) for one in outputs]
