"""Fingerprints by torch operations alone: any device, bit-identical to `reference`, no compiler needed.

Elements of any dtype and layout are copied, as integers of their size, into one small block in the order of the
definition; a block is a whole number of hash rows, and `row_sums` turns each row into three numbers. Small tensors share
a block, each from a new row on, because for them the cost is the number of launches. The rest is sums over rows: with
s_i, a_i, h_i the partial sums of row i of a tensor,

    S = sum_i s_i,    W = sum_i (a_i + C i s_i),    H = sum_i w_i h_i     (mod 2^64).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitwitness.fingerprint import reference
from bitwitness.fingerprint.row_sums import GROUP_ROWS, ROW_BYTES, ROW_WORDS, draws, outer_weights, row_sums

BLOCK_ROWS = 512
"""Rows of the block that is filled and worked on at a time: 4 MiB, the best of those measured on 1 MiB of L2."""

SMALL_BYTES = 1 << 19
"""Tensors up to this size share a block."""

PIECE_BYTES = 1 << 20
"""Upper limit of one copy from a tensor that is not contiguous; a piece must be well under a block."""

_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Torch's ambient modes switched off: gradients, inference mode, and the overrides of tensor subclasses.

    Autocast never touches integers, and every tensor made here names its dtype and device.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def fingerprint_tensors(tensors: Sequence[Tensor], seed: int) -> Tensor:
    """As `bitwitness.fingerprint.fingerprint_tensors`, for at least one valid tensor, all on one device."""
    table = _Table(tensors, seed)
    small: dict[int, list[int]] = {}
    for index, size in enumerate(table.sizes):
        if size > SMALL_BYTES:
            table.add_large(index)
        elif size:
            small.setdefault(min(tensors[index].element_size(), 8), []).append(index)
    for indices in small.values():
        for batch in table.batches(indices):
            table.add_small(batch)
    return table.out


def combine(digests: Tensor, seed: int) -> Tensor:
    """As `bitwitness.fingerprint.combine`."""
    index = torch.arange(digests.shape[0], dtype=torch.int64, device=digests.device)
    weights = draws(reference.stream_start(seed, reference.COMBINE_STREAM), index).bitwise_or_(1)
    return (weights.unsqueeze(1) * digests).sum(0)


class _Table:
    """The tensors of one call, the block and partial sums they share, and `out`, int64 [len(tensors), 3], filled row by row.

    Begins with the salts in `out`; every tensor that is not empty has to be added once.
    """

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        self.device = tensors[0].device
        self.tensors = tensors
        self.seed = seed
        self.sizes = [tensor.nbytes for tensor in tensors]
        self.rows = [-(-size // ROW_BYTES) for size in self.sizes]
        salts = [_salts(tensor.dtype, tensor.shape) for tensor in tensors]
        self.out = torch.tensor(salts, dtype=torch.int64, device=self.device)
        shape = (min(sum(self.rows), BLOCK_ROWS), ROW_BYTES)
        self.block = torch.empty(shape, dtype=torch.uint8, device=self.device)
        self.sums = row_sums(seed, self.device)

    def batches(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """`indices` cut so that the tensors of each part fit one block."""
        batch: list[int] = []
        used = 0
        for index in indices:
            if used + self.rows[index] > BLOCK_ROWS:
                yield batch
                batch, used = [], 0
            batch.append(index)
            used += self.rows[index]
        yield batch

    def add_small(self, batch: Sequence[int]) -> None:
        """Add the tensors at `batch`, all of one element size, which fit one block together."""
        owners: list[int] = []
        numbers: list[int] = []
        parts: list[Tensor] = []
        for index in batch:
            carrier = _carrier(self.tensors[index])
            parts.append(carrier if carrier.dim() == 1 else carrier.reshape(-1))
            padding = self.rows[index] * ROW_BYTES - self.sizes[index]
            if padding:
                parts.append(_zeros(padding // carrier.element_size(), carrier.dtype, self.device))
            owners += [index] * self.rows[index]
            numbers += range(self.rows[index])
        used = self.block[: len(owners)]
        torch.cat(parts, out=used.view(-1).view(parts[0].dtype))
        if self.sums.flip:
            used.view(torch.int64).bitwise_xor_(_repeated(self.sums.flip, 8))
        self.sums.append(used)
        owner, number = torch.tensor([owners, numbers], dtype=torch.int64, device=self.device)
        weights = outer_weights(self.seed, 0, self.device).index_select(0, number)
        self.out.index_add_(0, owner, _weighted(self.sums.take(), number, weights))

    def add_large(self, index: int) -> None:
        """Add the tensor at `index` by itself, block after block."""
        first = pending = 0
        for rows in _filled_blocks(self.tensors[index], self.block, self.sums.flip):
            if pending + rows.shape[0] > GROUP_ROWS:
                self._add_group(index, first, pending)
                first, pending = first + pending, 0
            self.sums.append(rows)
            pending += rows.shape[0]
        self._add_group(index, first, pending)

    def _add_group(self, index: int, first: int, count: int) -> None:
        """Add the `count` <= GROUP_ROWS collected rows, the first of which is row `first` of the tensor at `index`."""
        group, offset = divmod(first, GROUP_ROWS)
        weights = outer_weights(self.seed, group, self.device)[offset : offset + count]
        if weights.shape[0] < count:
            rest = outer_weights(self.seed, group + 1, self.device)[: count - weights.shape[0]]
            weights = torch.cat([weights, rest])
        number = torch.arange(first, first + count, dtype=torch.int64, device=self.device)
        self.out[index] += _weighted(self.sums.take(), number, weights).sum(0)


@functools.lru_cache(maxsize=65536)
def _salts(dtype: torch.dtype, shape: torch.Size) -> list[int]:
    return [reference.signed(salt) for salt in reference.salts(str(dtype).removeprefix("torch."), tuple(shape))]


def _carrier(tensor: Tensor) -> Tensor:
    """`tensor` as signed integers of its element size, with any lazy conjugation or negation carried out.

    Integers, because copies of them keep every bit of a NaN and exist for every dtype. complex128 gets one more
    dimension. Copies the tensor only where a lazy bit is set.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.element_size() == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_CARRIERS[tensor.element_size()])


@functools.lru_cache(maxsize=4096)
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` zeros; `count` is under a row."""
    if count * dtype.itemsize < ROW_BYTES:
        return _zeros(ROW_BYTES // dtype.itemsize, dtype, device)[:count]
    return torch.zeros(count, dtype=dtype, device=device)


def _repeated(byte: int, size: int) -> int:
    """The signed integer of `size` bytes that are all `byte`."""
    return int.from_bytes(bytes([byte] * size), "little", signed=True)


def _weighted(values: Tensor, number: Tensor, weights: Tensor) -> Tensor:
    """What rows with partial sums `values`, int64 [n, 3], add to S, W, H at row numbers `number`; overwrites `values`."""
    values[:, 1] += values[:, 0] * number * ROW_WORDS
    values[:, 2] *= weights
    return values


def _filled_blocks(tensor: Tensor, block: Tensor, flip: int) -> Iterator[Tensor]:
    """`block`, filled again and again with the bytes of `tensor` XORed with `flip`: the first rows, uint8 [n, ROW_BYTES].

    The last time it ends in zeros, flipped, up to a whole row.
    """
    width = min(tensor.element_size(), 8)
    space = block.view(-1).view(_CARRIERS[width])
    row_elements = ROW_BYTES // width
    mask = _repeated(flip, width)
    fill = 0
    for piece in _pieces(tensor, block.numel()):
        carrier = _carrier(piece)
        if fill + carrier.numel() > space.numel():
            whole = fill // row_elements
            yield block[:whole]
            rest = space[whole * row_elements : fill]
            space[: rest.numel()] = rest
            fill = rest.numel()
        target = space[fill : fill + carrier.numel()].view(carrier.shape)
        # One operation both copies and flips; with a mask of 0 it is a plain copy.
        torch.bitwise_xor(carrier, mask, out=target)
        fill += carrier.numel()
    rows = -(-fill // row_elements)
    space[fill : rows * row_elements].fill_(mask)
    yield block[:rows]


def _pieces(tensor: Tensor, block_bytes: int) -> Iterator[Tensor]:
    """Views that cover `tensor` in row-major order, of at most PIECE_BYTES each; of a block each where it is contiguous."""
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        yield from tensor.view(-1).split(block_bytes // tensor.element_size())
    else:
        yield from _split(tensor, PIECE_BYTES // tensor.element_size())


def _split(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that cover `tensor`, which is not empty, in row-major order, of at most `limit` elements each."""
    if tensor.numel() <= limit:
        yield tensor
    elif tensor.numel() // tensor.shape[0] <= limit:
        yield from tensor.split(limit // (tensor.numel() // tensor.shape[0]))
    else:
        for part in tensor.unbind(0):
            yield from _split(part, limit)
