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

SHORT_BYTES = 1 << 10
"""Tensors up to this size get a row of this size instead of a whole one, as if cut off after its zeros."""

SERIAL_ELEMENTS = (1 << 15) - 1
"""As many elements `torch.cat` copies on a CPU without starting threads for every single part."""

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
    copied into the block, by the width of a copied integer, because one operation copies many only if all have the same
    dtype, and by the size of a row.
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
        limit = SERIAL_ELEMENTS if self._device.type == "cpu" else BLOCK_ROWS * ROW_BYTES
        self._staged = {
            (width, row): _Staged(width, row, limit) for width in (1, 8) for row in (SHORT_BYTES, ROW_BYTES)
        }

    @functools.cached_property
    def _block(self) -> Tensor:
        shape = (min(self._rows, BLOCK_ROWS), ROW_BYTES)
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def add(self, index: int) -> None:
        """Add the tensor at `index`."""
        tensor, size = self.tensors[index], self.sizes[index]
        plain = _is_plain(tensor)
        if size <= self._sums.small_bytes:
            self._stage(index, 0, _flat(tensor if plain else _carrier(tensor).contiguous()), size)
            return
        first = 0
        whole = plain and _is_aligned(tensor, self._sums.alignment)
        for rows in _whole_rows(tensor) if whole else _filled_blocks(tensor, self._block):
            self._append(rows, [(index, first, rows.shape[0])])
            first += rows.shape[0]
        rest = size - first * ROW_BYTES
        if rest > 0:
            self._stage(index, first, _flat(tensor)[-(rest // tensor.element_size()) :], rest)

    def finish(self) -> Tensor:
        """The digests of all that was added: int64 [len(tensors), 3]."""
        for staged in self._staged.values():
            self._copy(staged)
        self._close_group()
        return self._out

    def _stage(self, index: int, first: int, elements: Tensor, size: int) -> None:
        """Let the `size` bytes of `elements`, contiguous and 1-D, wait: row `first` and on of the tensor at `index`."""
        wide = size % 8 == 0 and elements.storage_offset() * elements.element_size() % 8 == 0
        staged = self._staged[8 if wide else 1, SHORT_BYTES if size <= SHORT_BYTES else ROW_BYTES]
        rows = -(-size // staged.row_bytes)
        if staged.rows + rows > BLOCK_ROWS:
            self._copy(staged)
        padding = (rows * staged.row_bytes - size) // staged.width
        zeros = _zeros(padding, staged.dtype, self._device) if padding else None
        staged.add((index, first, rows), elements.view(staged.dtype), zeros)

    def _copy(self, staged: _Staged) -> None:
        if staged.rows:
            rows = self._block.view(-1)[: staged.rows * staged.row_bytes].view(staged.rows, staged.row_bytes)
            segments = staged.copy_into(rows)
            self._append(rows, segments)

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
    """Rows of `row_bytes` that wait to be copied as integers of `width` bytes, `limit` or fewer an operation if possible."""

    def __init__(self, width: int, row_bytes: int, limit: int) -> None:
        self.width = width
        self.dtype = _CARRIERS[width]
        self.row_bytes = row_bytes
        self.rows = 0
        self._limit = limit // (row_bytes // width)
        self._segments: list[Segment] = []
        self._batches: list[tuple[int, list[Tensor]]] = []

    def add(self, segment: Segment, data: Tensor, zeros: Tensor | None) -> None:
        """Add the rows of `segment`: `data` and then `zeros`."""
        rows = segment[2]
        if not self._batches or self.rows + rows - self._batches[-1][0] > self._limit:
            self._batches.append((self.rows, []))
        parts = self._batches[-1][1]
        parts.append(data)
        if zeros is not None:
            parts.append(zeros)
        self._segments.append(segment)
        self.rows += rows

    def copy_into(self, rows: Tensor) -> list[Segment]:
        """Fill `rows`, uint8 [self.rows, self.row_bytes], and begin anew. Says which rows they are."""
        space = rows.view(self.dtype)
        ends = [start for start, _ in self._batches[1:]] + [self.rows]
        for (start, parts), end in zip(self._batches, ends, strict=True):
            torch.cat(parts, out=space[start:end].view(-1))
        segments = self._segments
        self.rows, self._segments, self._batches = 0, [], []
        return segments


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
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def _whole_rows(tensor: Tensor) -> Sequence[Tensor]:
    """The whole rows of a plain tensor where they lie, but for a rest: uint8 [at most BLOCK_ROWS, ROW_BYTES] each."""
    count, elements = tensor.nbytes // ROW_BYTES, ROW_BYTES // tensor.element_size()
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
