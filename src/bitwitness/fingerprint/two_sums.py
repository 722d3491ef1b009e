"""The first two numbers of a fingerprint without the hash: what a reader of DESIGN section 7 measures against.

The guard always takes all three; this is here so that the cost of the seeded hash can be told, and as the way without
8-bit dot products to take sums of 32-bit words, which torch cannot widen and add in one operation. The memory is read as
64-bit integers at two offsets: x_k = b_2k + 2^32 b_2k+1 and, four bytes further, y_k = b_2k+1 + 2^32 b_2k+2. Modulo 2^64,
with E and O the sums over even and odd words of a row, F its first word and N the word after it,

    sum x = E + 2^32 O,    sum y = O + 2^32 (E - F + N) =: z + 2^32 (N - F),    hence E = sum x - 2^32 z,  O = z - 2^32 sum x.

Any other pair of weights, a_c for x and g_c for y, gives word 2c the weight a_c + 2^32 g_c-1 and word 2c+1 the weight
g_c + 2^32 a_c, so sums over columns give the position-weighted sum. Nothing is widened and nothing written.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_COLUMNS = 1 << 15
_ROWS = 8
_BLOCK = _COLUMNS * _ROWS
"""64-bit integers in a block: 2 MiB, in rows of 256 KiB; the best of those measured."""


def two_sums(tensor: Tensor) -> Tensor:
    """Sum and weighted sum of the words of `tensor`, without salts: int64 [2]; bit-identical to `reference`.

    tensor: contiguous, on a CPU, storage offset and size multiples of 8 bytes; other tensors raise ValueError.
    """
    offset = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or offset % 8 or tensor.nbytes % 8:
        raise ValueError("two_sums() needs a contiguous tensor on the CPU, aligned and sized to 8 bytes")
    storage = tensor.untyped_storage()
    # The last word of a block is also read as the lower half of a y that ends in the word after it.
    blocks = max(0, tensor.nbytes // 8 - 1) // _BLOCK
    x = _integers(storage, offset, tensor.nbytes // 8)
    out = _plain(x[blocks * _BLOCK :], 2 * blocks * _BLOCK)
    if blocks:
        y = _integers(storage, offset + 4, blocks * _BLOCK)
        out += _blocks(x[: blocks * _BLOCK], y, x[: blocks * _BLOCK + 1 : _COLUMNS])
    return out


def _integers(storage: torch.UntypedStorage, offset: int, count: int) -> Tensor:
    """`count` int64 of `storage` from byte `offset` on, which need only be a multiple of 4: the CPU does not mind."""
    part = storage[offset : offset + 8 * count]
    return torch.empty(0, dtype=torch.int64, device="cpu").set_(part, 0, (count,), (1,))


def _blocks(x: Tensor, y: Tensor, row_starts: Tensor) -> Tensor:
    rows = x.numel() // _COLUMNS
    x, y = x.view(-1, _ROWS, _COLUMNS), y.view(-1, _ROWS, _COLUMNS)
    of_rows = torch.empty((2, *x.shape[:2]), dtype=torch.int64, device="cpu")
    of_columns = torch.empty((2, _COLUMNS), dtype=torch.int64, device="cpu")
    column_total = torch.zeros((2, _COLUMNS), dtype=torch.int64, device="cpu")
    for block in range(x.shape[0]):
        torch.sum(x[block], 1, out=of_rows[0, block])
        torch.sum(y[block], 1, out=of_rows[1, block])
        torch.sum(x[block], 0, out=of_columns[0])
        torch.sum(y[block], 0, out=of_columns[1])
        column_total += of_columns
    heads = row_starts & 0xFFFFFFFF
    after = heads[1:]
    x_rows, y_rows = of_rows.view(2, -1)
    odd_and_even = y_rows - ((after - heads[:-1]) << 32)
    totals = (x_rows + odd_and_even) - ((x_rows + odd_and_even) << 32)
    weights = _column_weights()
    in_row = (column_total * weights).sum() - (after.sum() * weights[1, -1] << 32)
    first_position = torch.arange(rows, dtype=torch.int64, device="cpu") * (2 * _COLUMNS)
    return torch.stack([totals.sum(), in_row + (totals * first_position).sum()])


@functools.cache
def _column_weights() -> Tensor:
    """int64 [2, columns]: a and g such that word number k of a row is weighted with k + 1."""
    odd = torch.arange(2, 2 * _COLUMNS + 1, 2, dtype=torch.int64, device="cpu")
    even = odd - 1
    x_weights = even - ((odd - 2) << 32)
    return torch.stack([x_weights, odd - (even << 32)])


def _plain(x: Tensor, first: int) -> Tensor:
    """The two sums of the words of `x`, less than a block and a bit, of which the first is word number `first`."""
    words = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    position = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device="cpu")
    return torch.stack([words.sum(), (words * position).sum()])
