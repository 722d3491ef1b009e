"""The public entry of fingerprints: checks what it was given, then hands it to the implementation for the device.

It is apart from the implementations so that a kernel for one kind of device can register here without any other
implementation, or any caller, knowing of it. All must give identical bits (`reference` is the definition).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bitwitness.errors import ConfigurationError
from bitwitness.fingerprint import torch_ops

Backend = Callable[[Sequence[Tensor], int], Tensor]
"""(at least one tensor, all dense and on one device; seed in [0, 2^64), called without gradients) -> int64 [len(tensors), 3] on that device."""

_backends: dict[str, Backend] = {}

_PLAIN = (Tensor, nn.Parameter)


class Tap:
    """Sees what is hashed and the digests, and may give others in their place: how a fault in the hash itself is played."""

    def hashes(self, tensors: list[Tensor]) -> list[Tensor]:
        """Before: the tensors, or copies that were read wrongly."""
        return tensors

    def hashed(self, digests: Tensor) -> Tensor:
        """After: the digests, int64 [tensors, 3]."""
        return digests


_tap: Tap | None = None


@contextmanager
def tapped(tap: Tap) -> Iterator[None]:
    """Have every fingerprint of this process pass through a tap, until the end of the context."""
    global _tap  # noqa: PLW0603  (as for the backends: one for the process)
    before, _tap = _tap, tap
    try:
        yield
    finally:
        _tap = before


def register_backend(device_type: str, backend: Backend) -> None:
    """Let `backend` compute the fingerprints of tensors on devices of `device_type` (e.g. "cuda"), instead of `torch_ops`."""
    _backends[device_type] = backend


def fingerprint_tensors(tensors: Sequence[Tensor], seed: int = 0) -> Tensor:
    """The digests of `tensors`: int64 [len(tensors), 3], columns sum, weighted sum, seeded hash, on the tensors' device.

    tensors: dense tensors of any dtype, shape and layout in memory, all on one device; the result depends on dtype,
    shape and elements only, and not on strides, grad mode, autocast or defaults of torch. Two tensors that differ in
    any one or two 4-byte words are certain to differ in their digests; any other difference that does not depend on
    `seed` is missed with probability at most 2^-26 (`bitwitness.fingerprint.reference` has definition and proof).
    seed: any integer, taken modulo 2^64; the ranks that compare digests must share it.

    Leaves the tensors and the random state alone, and never holds more than 64 MiB of its own. An empty list gives
    int64 [0, 3] on the CPU.

    Raises ConfigurationError (a ValueError), naming the index: tensors on different devices, or a tensor that has no
    bytes of its own in a dense layout (sparse, quantized, meta, a wrapper such as DTensor, not a tensor at all).
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise ConfigurationError(f"tensors is a {type(tensors).__name__}: give a list of tensors")
    if not isinstance(seed, int):
        raise ConfigurationError(f"seed is {seed!r}: give an integer")
    tensors = list(tensors)
    device = _common_device(tensors)
    if device is None:
        return torch.zeros((0, 3), dtype=torch.int64, device="cpu")
    backend = _backends.get(device.type, torch_ops.fingerprint_tensors)
    with torch_ops.isolated():
        if _tap is None:
            return backend(tensors, seed % 2**64)
        return _tap.hashed(backend(_tap.hashes(tensors), seed % 2**64))


def combine(digests: Tensor, seed: int) -> Tensor:
    """One digest of many: int64 [3], sum_t c_t * digests[t] modulo 2^64, with odd c_t drawn from `seed` by the index t.

    digests: int64 [N, 3], as `fingerprint_tensors` returns them; the result is on the same device, 0 for N = 0.

    A change within one tensor that shows in its digest is certain to show here: if digests[t] changes by d != 0 (mod
    2^64) in some column, and no other row does, the result changes by c_t * d in that column, and an odd c_t is a unit
    modulo 2^64. Changes in several rows are missed only if sum_t c_t d_t = 0 in all three columns.

    Raises ConfigurationError if `digests` is not an int64 tensor of shape [N, 3].
    """
    if digests.dtype != torch.int64 or digests.dim() != 2 or digests.shape[1] != 3:
        raise ConfigurationError(
            f"combine() needs int64 digests of shape [N, 3]; got {digests.dtype} {list(digests.shape)}"
        )
    with torch_ops.isolated():
        return torch_ops.combine(digests.detach(), seed % 2**64)


def _common_device(tensors: Sequence[Tensor]) -> torch.device | None:
    device: torch.device | None = None
    for index, tensor in enumerate(tensors):
        if (
            type(tensor) not in _PLAIN
            or tensor.is_nested
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or tensor.is_meta
        ):
            _refuse_unless_dense(index, tensor)
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ConfigurationError(
                f"tensors[{index}] is on {tensor.device} but tensors[0] on {device}: "
                "fingerprint the tensors of each device in a call of their own"
            )
    return device


def _refuse_unless_dense(index: int, tensor: object) -> None:
    kind = None
    if not isinstance(tensor, Tensor):
        kind = f"not a tensor but {type(tensor).__name__}"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # A wrapper such as DTensor has no bytes of its own, and its operations may communicate.
        kind = f"a {type(tensor).__name__}"
    elif tensor.is_meta:
        kind = "on the meta device"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.is_nested:
        kind = "nested"
    elif tensor.layout != torch.strided:
        kind = f"of layout {tensor.layout}"
    if kind is not None:
        raise ConfigurationError(
            f"tensors[{index}] is {kind}: only dense tensors have a fingerprint; pass its dense or local parts instead"
        )
