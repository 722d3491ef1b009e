"""Fingerprints by torch operations alone: any device, bit-identical to `reference`, no compiler needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bitwitness.fingerprint import reference

_MASK32 = 0xFFFFFFFF
_BLOCK_BYTES = 1 << 21


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Torch's ambient modes switched off: gradients, inference mode, and the overrides of tensor subclasses.

    Autocast never touches integers, and every tensor made here names its dtype and device.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


def fingerprint_tensors(tensors: Sequence[Tensor], seed: int) -> Tensor:
    """As `bitwitness.fingerprint.fingerprint_tensors`, for valid tensors on one device."""
    digests = [_digest(tensor, seed) for tensor in tensors]
    out = torch.stack(digests)
    return out + _salts(tensors, out.device)


def _salts(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    rows = [reference.salts(str(tensor.dtype)[6:], tuple(tensor.shape)) for tensor in tensors]
    return torch.tensor([[reference.signed(salt) for salt in row] for row in rows], dtype=torch.int64, device=device)


def _digest(tensor: Tensor, seed: int) -> Tensor:
    device = tensor.device
    out = torch.zeros(3, dtype=torch.int64, device=device)
    start = 0
    for block in blocks(tensor):
        words = block.to(torch.int64).bitwise_and_(_MASK32)
        index = torch.arange(start, start + words.numel(), dtype=torch.int64, device=device)
        out[0] += words.sum()
        out[1] += (words * (index + 1)).sum()
        outer = draws(reference.stream_start(seed, reference.OUTER_STREAM), index // reference.ROW_WORDS).bitwise_or_(1)
        inner = draws(reference.stream_start(seed, reference.INNER_STREAM), index % reference.ROW_WORDS)
        inner = inner.bitwise_right_shift_(32).bitwise_and_(_MASK32).bitwise_or_(1)
        out[2] += (outer * inner * words).sum()
        start += words.numel()
    return out


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The words of `tensor` in order, as int32 [n] blocks; every block but the last a whole number of hash rows."""
    stage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    row_bytes = 4 * reference.ROW_WORDS
    for piece in _pieces(tensor.resolve_conj().resolve_neg(), _BLOCK_BYTES // tensor.element_size()):
        stage = torch.cat([stage, piece.contiguous().view(-1).view(torch.uint8)])
        whole = stage.numel() // row_bytes * row_bytes
        if whole:
            yield stage[:whole].view(torch.int32)
            stage = stage[whole:].clone()
    if stage.numel():
        yield torch.nn.functional.pad(stage, (0, -stage.numel() % 4)).view(torch.int32)


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that cover `tensor` in row-major order, of at most `limit` elements each."""
    if tensor.numel() == 0:
        return
    if tensor.numel() <= limit:
        yield tensor
    elif tensor.numel() // tensor.shape[0] <= limit:
        step = limit // (tensor.numel() // tensor.shape[0])
        yield from (tensor[start : start + step] for start in range(0, tensor.shape[0], step))
    else:
        for part in tensor.unbind(0):
            yield from _pieces(part, limit)


def draws(start: int, index: Tensor) -> Tensor:
    """`reference.draw(start, index)` of every element of `index`, int64 in and out (two's complement)."""
    value = (index + 1) * reference.signed(reference.GOLDEN) + reference.signed(start)
    value = (value ^ _shift(value, 30)) * reference.signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * reference.signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def combine(digests: Tensor, seed: int) -> Tensor:
    """As `bitwitness.fingerprint.combine`."""
    index = torch.arange(digests.shape[0], dtype=torch.int64, device=digests.device)
    weights = draws(reference.stream_start(seed, reference.COMBINE_STREAM), index).bitwise_or_(1)
    return (weights.unsqueeze(1) * digests).sum(0)
