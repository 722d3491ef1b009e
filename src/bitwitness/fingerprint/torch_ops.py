"""Fingerprints by torch operations alone: any device, bit-identical to `reference`, no compiler needed.

`row_sums` turns each hash row of bytes into three numbers. The whole rows of a contiguous tensor are taken where they
lie. Everything else is first copied into one small block, each tensor from a new row on: tensors of another layout,
what is left of a tensor after its last whole row, and small tensors, whose cost is the number of operations. The rest is
sums over rows, of many tensors together: with s_i, a_i, h_i the partial sums of row i of a tensor,

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
"""Rows that are worked on at a time: 4 MiB, the best of those measured on 1 MiB of L2. Also the size of the block."""

PIECE_BYTES = 1 << 20
"""Upper limit of one copy from a tensor that is not contiguous; a piece must be well under a block."""

Segment = tuple[int, int, int]
"""(index of a tensor, number of its row that comes first, how many rows): rows that follow each other in a group."""

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
    for index, size in enumerate(table.sizes):
        if size:
            table.add(index)
    return table.finish()


def combine(digests: Tensor, seed: int) -> Tensor:
    """As `bitwitness.fingerprint.combine`."""
    index = torch.arange(digests.shape[0], dtype=torch.int64, device=digests.device)
    weights = draws(reference.stream_start(seed, reference.COMBINE_STREAM), index).bitwise_or_(1)
    return (weights.unsqueeze(1) * digests).sum(0)


class _Table:
    """The tensors of one call, the block and the partial sums they share, and their digests.

    Every tensor that is not empty has to be added once; then `finish` has the digests. Rows wait in `_staged` to be
    copied into the block, by the width of the copy, because one operation copies many only if all have the same dtype.
    """

    def __init__(self, tensors: Sequence[Tensor], seed: int) -> None:
        self.tensors = tensors
        self.sizes = [tensor.nbytes for tensor in tensors]
        self._seed = seed
        self._device = tensors[0].device
        self._rows = sum(-(-size // ROW_BYTES) for size in self.sizes)
        salts = [_salts(tensor.dtype, tensor.shape) for tensor in tensors]
        self._out = torch.tensor(salts, dtype=torch.int64, device=self._device)
        self._sums = row_sums(seed, self._device, self._rows)
        self._group: list[Segment] = []
        self._group_rows = 0
        self._staged = {width: _Staged() for width in (1, 8)}

    @functools.cached_property
    def _block(self) -> Tensor:
        shape = (min(self._rows, BLOCK_ROWS), ROW_BYTES)
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def add(self, index: int) -> None:
        """Add the tensor at `index`."""
        tensor, size = self.tensors[index], self.sizes[index]
        plain = _is_plain(tensor)
        if size <= self._sums.small_bytes:
            self._stage(index, 0, _flat(tensor if plain else _carrier(tensor).contiguous()))
        elif plain and _is_aligned(tensor, self._sums.alignment):
            rows, rest = divmod(size, ROW_BYTES)
            first = 0
            for part in _rows(tensor, rows):
                self._append(part, [(index, first, part.shape[0])])
                first += part.shape[0]
            if rest:
                self._stage(index, rows, _flat(tensor)[-(rest // tensor.element_size()) :])
        else:
            first = 0
            for part in _filled_blocks(tensor, self._block):
                self._append(part, [(index, first, part.shape[0])])
                first += part.shape[0]

    def finish(self) -> Tensor:
        """The digests of all that was added: int64 [len(tensors), 3]."""
        for width in self._staged:
            self._copy_staged(width)
        self._close_group()
        return self._out

    def _stage(self, index: int, first: int, elements: Tensor) -> None:
        """Let the contiguous 1-D `elements`, row `first` and following of the tensor at `index`, wait to be copied."""
        size = elements.nbytes
        width = 8 if size % 8 == 0 and elements.storage_offset() * elements.element_size() % 8 == 0 else 1
        data = elements.view(_CARRIERS[width])
        rows = -(-size // ROW_BYTES)
        if self._staged[width].rows + rows > BLOCK_ROWS:
            self._copy_staged(width)
        staged = self._staged[width]
        staged.parts.append(data)
        if rows * ROW_BYTES > size:
            staged.parts.append(_zeros((rows * ROW_BYTES - size) // width, data.dtype, self._device))
        staged.segments.append((index, first, rows))
        staged.rows += rows

    def _copy_staged(self, width: int) -> None:
        staged, self._staged[width] = self._staged[width], _Staged()
        if staged.rows:
            used = self._block[: staged.rows]
            torch.cat(staged.parts, out=used.view(-1).view(_CARRIERS[width]))
            self._append(used, staged.segments)

    def _append(self, rows: Tensor, segments: list[Segment]) -> None:
        """Take the partial sums of `rows`, at most BLOCK_ROWS, which are those of `segments`."""
        if self._group_rows + rows.shape[0] > GROUP_ROWS:
            self._close_group()
        self._sums.append(rows)
        self._group += segments
        self._group_rows += rows.shape[0]

    def _close_group(self) -> None:
        if self._group_rows:
            target, before, weights = _places(tuple(self._group), self._group_rows, self._seed, self._device)
            values = self._sums.take()
            values[1].addcmul_(values[0], before)
            values[2].mul_(weights)
            self._out.view(-1).index_add_(0, target, values.view(-1))
            self._group, self._group_rows = [], 0


class _Staged:
    """Parts to be copied into the block one after another, padding among them, and the rows that they make up."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.segments: list[Segment] = []
        self.rows = 0


@functools.lru_cache(maxsize=64)
def _places(segments: tuple[Segment, ...], rows: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For the `rows` rows of a group: where their three sums belong in the flattened digests, int64 [3 * rows]; how many
    words of the tensor come before each row; w of each row. Kept, because the steps of a training have one table: up to
    160 KiB each.
    """
    table = torch.tensor(segments, dtype=torch.int64, device=device)
    owner, first, count = table.unbind(1)
    # Row i of the group is row `i + first - (rows of the segments before)` of its tensor.
    shift = (first - count.cumsum(0) + count).repeat_interleave(count, output_size=rows)
    number = torch.arange(rows, dtype=torch.int64, device=device) + shift
    column = torch.arange(3, dtype=torch.int64, device=device).unsqueeze(1)
    target = (owner.repeat_interleave(count, output_size=rows) * 3 + column).view(-1)
    return target, number * ROW_WORDS, outer_weights(seed, number)


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


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` holds its elements in row-major order without gaps."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a plain tensor in one dimension. Not `view(-1)`, which keeps an odd stride of a single element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _rows(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """The first `count` rows of a plain tensor, where they lie: uint8 [at most BLOCK_ROWS, ROW_BYTES] each."""
    elements = ROW_BYTES // tensor.element_size()
    rows = tensor.as_strided((count, elements), (elements, 1)).view(torch.uint8)
    return rows.split(BLOCK_ROWS) if count > BLOCK_ROWS else (rows,)


def _is_aligned(tensor: Tensor, alignment: int) -> bool:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return offset % alignment == 0 and tensor.data_ptr() % alignment == 0


def _filled_blocks(tensor: Tensor, block: Tensor) -> Iterator[Tensor]:
    """`block`, filled again and again with the bytes of `tensor`: the first rows, uint8 [n, ROW_BYTES].

    The last time it ends in zeros up to a whole row.
    """
    width = min(tensor.element_size(), 8)
    space = block.view(-1).view(_CARRIERS[width])
    row_elements = ROW_BYTES // width
    fill = 0
    for piece in _pieces(tensor, block.numel()):
        carrier = _carrier(piece)
        if fill + carrier.numel() > space.numel():
            whole = fill // row_elements
            yield block[:whole]
            rest = space[whole * row_elements : fill]
            space[: rest.numel()] = rest
            fill = rest.numel()
        space[fill : fill + carrier.numel()].view(carrier.shape).copy_(carrier)
        fill += carrier.numel()
    rows = -(-fill // row_elements)
    space[fill : rows * row_elements].zero_()
    yield block[:rows]


def _pieces(tensor: Tensor, block_bytes: int) -> Iterator[Tensor]:
    """Views that cover `tensor` in row-major order, of at most PIECE_BYTES each; of a block each where it is contiguous."""
    if _is_plain(tensor):
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
