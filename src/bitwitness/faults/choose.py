"""Which elements of a tensor a fault hits.

Real faults hit neighbours, strides, tiles and rows, seldom one element anywhere, and a detector may be blind to exactly one of
these shapes; so they are drawn here, from generators that the caller owns: a draw from torch's own would change the training
that it is to spoil.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.faults.spec import Select, SelectKind

_FEW = 4096
"""Up to so many elements are drawn by `random.sample`, which needs memory for what it draws and not for the whole tensor."""


def check(select: Select, shape: Sequence[int]) -> None:
    """Whether a selection is possible in a tensor of this shape.

    A tile, a grid, a run or a group that is larger than the tensor is cut to it; a count of elements and an index are meant
    as they are written.

    Raises:
        ConfigurationError: it is not.
    """
    size = math.prod(shape)
    if not size:
        raise ConfigurationError(f"{select}: a tensor of shape {list(shape)} has no element")
    if select.kind == "n" and select.count > size:
        raise ConfigurationError(f"{select}: a tensor of shape {list(shape)} has only {size} elements")
    outside = [index for index in select.indices if index >= size]
    if select.kind == "index" and outside:
        raise ConfigurationError(
            f"{select}: index {outside[0]} is outside a tensor of shape {list(shape)}, whose elements are 0 to {size - 1}"
        )


def indices(
    select: Select,
    tensor: Tensor,
    random: Random,
    generator: torch.Generator,
    only_if: tuple[float, float] | None = None,
) -> Tensor:
    """Draw the elements of a selection.

    Args:
        select: which.
        tensor: whose elements; only its shape matters, but for `largest` and `only_if`.
        random: all that is drawn comes from it and the next.
        generator: for what is drawn by the thousand; on the CPU.
        only_if: keep only those of the drawn elements whose magnitude is in this range, both ends included.

    Returns:
        int64 positions in logical order (those of `tensor.flatten()`), ascending, each once, on the tensor's device. None at
        all where `rate` drew none or `only_if` kept none.

    Raises:
        ConfigurationError: it is impossible in this tensor (a ValueError).
    """
    check(select, tensor.shape)
    if select.kind == "largest":
        found = _magnitudes(tensor.detach().flatten()).nan_to_num(nan=-1.0).argmax().reshape(1)
    else:
        last = select.channels_last and tensor.dim() >= 4
        shape = (tensor.shape[0], *tensor.shape[2:], tensor.shape[1]) if last else tuple(tensor.shape)
        found = _DRAWN[select.kind](select, shape, random, generator)
        found = (_channels_first(found, shape) if last else found).sort().values.to(tensor.device)
    if only_if is None or not found.numel():
        return found
    size = _magnitudes(tensor.detach()[torch.unravel_index(found, tensor.shape)] if tensor.dim() else tensor.detach())
    return found[((size >= only_if[0]) & (size <= only_if[1])).reshape(-1)]


def sample(size: int, count: int, random: Random, generator: torch.Generator) -> Tensor:
    """So many different numbers below `size`, in drawn order."""
    if count <= _FEW:
        return torch.tensor(random.sample(range(size), count), dtype=torch.int64)
    return torch.randperm(size, generator=generator)[:count]


def _magnitudes(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.to(wide).abs()


def _channels_first(found: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Positions in a tensor whose axis 1 was moved to the end, as positions in the tensor itself."""
    first, *middle, channel = torch.unravel_index(found, shape)
    place = torch.zeros_like(found)
    for coordinate, size in zip((first, channel, *middle), (shape[0], shape[-1], *shape[1:-1]), strict=True):
        place = place * size + coordinate
    return place


def _n(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    return sample(math.prod(shape), select.count, random, generator)


def _rate(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    """By the gaps between hits, which are geometric: a rate of 1e-9 in a large tensor costs next to nothing."""
    size = math.prod(shape)
    if select.rate >= 1.0:
        return torch.arange(size)
    blocks, position = [], -1
    count = int(1.1 * size * select.rate) + 16
    while position < size:
        uniform = 1.0 - torch.rand(
            count, generator=generator, dtype=torch.float64
        )  # never 0, whose logarithm is infinite
        gaps = (uniform.log() / math.log1p(-select.rate)).floor().clamp(max=float(size)).to(torch.int64) + 1
        blocks.append(gaps.cumsum(0) + position)
        position = int(blocks[-1][-1])
    found = torch.cat(blocks)
    return found[found < size]


def _run(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    size = math.prod(shape)
    span = (select.count - 1) * select.stride + 1
    start = random.randrange(max(0, size - span) // select.align + 1) * select.align
    # Cut before anything is made: a run may be written longer than memory, a stride wider than 64 bits.
    count = min(select.count, (size - 1 - start) // select.stride + 1)
    return start + torch.arange(count) * min(select.stride, size)


def _groups(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    size = math.prod(shape)
    first, last = sorted(random.randrange(-(-size // select.count)) for _ in range(2))
    return torch.arange(first * select.count, min((last + 1) * select.count, size))


def _grid(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // columns
    # A period longer than the axis is the axis.
    every_row, every_column = min(select.rows, rows), min(select.columns, columns)
    count = min(select.count, every_column)
    row = random.randrange(every_row)
    column = random.randrange(every_column - count + 1)
    down = torch.arange(row, rows, every_row)
    across = torch.arange(columns)
    across = across[(across >= column) & ((across - column) % every_column < count)]
    return (down[:, None] * columns + across).flatten()


def _tile(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    rows, columns = (1, 1, *shape)[-2:]
    height, width = min(select.count, rows), min(select.columns, columns)
    matrix = random.randrange(math.prod(shape) // (rows * columns))
    row, column = random.randrange(rows - height + 1), random.randrange(columns - width + 1)
    corner = (matrix * rows + row) * columns + column
    found = (corner + torch.arange(height)[:, None] * columns + torch.arange(width)).flatten()
    return found[_share(select, found.numel(), random, generator)] if select.high else found


def _row(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    columns = shape[-1] if shape else 1
    return random.randrange(math.prod(shape) // columns) * columns + torch.arange(columns)


def _frac(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    return _share(select, math.prod(shape), random, generator)


def _share(select: Select, size: int, random: Random, generator: torch.Generator) -> Tensor:
    count = min(size, max(1, round(random.uniform(select.low, select.high) * size)))
    return sample(size, count, random, generator)


def _index(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    return torch.tensor(select.indices, dtype=torch.int64)


def _all(select: Select, shape: tuple[int, ...], random: Random, generator: torch.Generator) -> Tensor:
    return torch.arange(math.prod(shape))


_DRAWN: dict[SelectKind, Callable[[Select, tuple[int, ...], Random, torch.Generator], Tensor]] = {
    "n": _n,
    "rate": _rate,
    "run": _run,
    "groups": _groups,
    "grid": _grid,
    "tile": _tile,
    "row": _row,
    "frac": _frac,
    "index": _index,
    "all": _all,
}
