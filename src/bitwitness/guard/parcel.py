"""Batches and states on their way to another rank: bits, strides, alignment and all.

A matrix product may take another path through the hardware for another stride or alignment, and then end in other bits
on healthy devices. So a tensor travels as the stretch of memory it lies in and is laid out again in the same way, at the
same offset within a cache line. Everything around the tensors (dictionaries, data classes, a tokenizer's own types)
travels pickled, with the tensors lifted out of it.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwitness.errors import WorkloadError

_LINE = 64
"""Bytes in a cache line, and what allocators align to."""


@dataclass(frozen=True, slots=True)
class _Layout:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    start: int
    nbytes: int
    is_array: bool


def pack(value: Any, device: torch.device) -> Tensor:
    """Everything needed to rebuild `value` elsewhere: uint8 `[n]` on `device`.

    Raises:
        WorkloadError: something in it cannot travel; names what.
    """
    skeleton, tensors, arrays = _take_apart(value)
    layouts: list[_Layout] = []
    pieces: list[Tensor] = []
    position = 0
    for index, tensor in enumerate(tensors):
        stretch = _stretch(tensor)
        offset = stretch.data_ptr() % _LINE if stretch.numel() else 0
        start = position + offset
        layouts.append(
            _Layout(
                dtype=tensor.dtype,
                size=tuple(tensor.size()),
                stride=_stride(tensor, stretch),
                device=tensor.device.type,
                requires_grad=tensor.requires_grad,
                start=start,
                nbytes=stretch.numel(),
                is_array=index in arrays,
            )
        )
        end = start + stretch.numel()
        padding = -end % _LINE
        zeros = torch.zeros(offset + padding, dtype=torch.uint8, device=device)
        pieces += [zeros[:offset], stretch.to(device), zeros[offset:]]
        position = end + padding
    head = pickle.dumps((skeleton, layouts))
    front = struct.pack("<q", len(head)) + head
    front += bytes(-len(front) % _LINE)
    first = torch.frombuffer(bytearray(front), dtype=torch.uint8).to(device)
    return torch.cat([first, *pieces])


def unpack(parcel: Tensor, device: torch.device) -> Any:
    """The inverse of `pack`; tensors that were on an accelerator come to life on `device`."""
    (length,) = struct.unpack("<q", parcel[:8].cpu().numpy().tobytes())
    head = parcel[8 : 8 + length].cpu().numpy().tobytes()
    skeleton, layouts = pickle.loads(head)  # noqa: S301  (written by another rank of this very job)
    body = parcel[8 + length + (-(8 + length) % _LINE) :]
    tensors = [_lay_out(body, layout, device) for layout in layouts]
    return _Assembler(io.BytesIO(skeleton), tensors).load()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors and arrays in a batch, in the order in which they are met."""
    return _take_apart(value)[1]


def _lay_out(body: Tensor, layout: _Layout, device: torch.device) -> Any:
    stretch = body[layout.start : layout.start + layout.nbytes]
    target = torch.device("cpu") if layout.device == "cpu" else device
    if stretch.device.type != target.type:
        stretch = stretch.to(target)
    if layout.nbytes == 0:
        tensor = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=target)
    else:
        tensor = stretch.view(layout.dtype).as_strided(layout.size, layout.stride)
    return tensor.numpy() if layout.is_array else tensor.requires_grad_(layout.requires_grad)


def _stretch(tensor: Tensor) -> Tensor:
    """The bytes of memory from a tensor's first element to its last, gaps included unless they outweigh the tensor."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if extent > 2 * tensor.numel():
        tensor, extent = tensor.contiguous(), tensor.numel()
    return tensor.as_strided((extent,), (1,), tensor.storage_offset()).view(torch.uint8)


def _stride(tensor: Tensor, stretch: Tensor) -> tuple[int, ...]:
    """The strides under which the stretch is read: the tensor's own, or contiguous where the gaps were left out."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if tensor.numel() and stretch.numel() != extent * tensor.element_size():
        return tuple(torch.empty(tensor.size(), device="meta").stride())
    return tuple(tensor.stride())


def _take_apart(value: Any) -> tuple[bytes, list[Tensor], set[int]]:
    stream = io.BytesIO()
    pickler = _Disassembler(stream)
    try:
        pickler.dump(value)
    except WorkloadError:
        raise
    except Exception as error:  # pickle raises whatever an object's own methods raise
        raise WorkloadError(
            f"a batch of type {type(value).__name__} cannot be sent to its witness ({error}): make it of tensors and plain "
            "values, or give rebuild_batch="
        ) from error
    return stream.getvalue(), pickler.tensors, pickler.arrays


class _Disassembler(pickle.Pickler):
    """Pickles everything but tensors and arrays, which it lifts out in the order in which it meets them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.arrays: set[int] = set()
        self._known: dict[int, int] = {}

    def persistent_id(self, item: Any) -> int | None:
        """The index of a tensor or array among those lifted out; None for everything else."""
        if isinstance(item, np.ndarray):
            if item.dtype.hasobject or item.dtype.kind in "USVMm" or not item.dtype.isnative:
                return None
            tensor = torch.from_numpy(
                item if item.flags.writeable and min(item.strides, default=0) >= 0 else item.copy()
            )
        elif isinstance(item, Tensor):
            if item.layout != torch.strided or item.is_quantized or item.device.type == "meta":
                raise WorkloadError(
                    f"a batch holds a tensor of layout {item.layout} on {item.device}, which cannot be sent to its "
                    "witness: use dense tensors, or give rebuild_batch="
                )
            tensor = item
        else:
            return None
        if id(item) not in self._known:
            self._known[id(item)] = len(self.tensors)
            if isinstance(item, np.ndarray):
                self.arrays.add(len(self.tensors))
            self.tensors.append(tensor)
        return self._known[id(item)]


class _Assembler(pickle.Unpickler):
    """Puts the tensors back in their places."""

    def __init__(self, stream: io.BytesIO, tensors: list[Any]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, index: Any) -> Any:
        """The tensor that was lifted out under this index."""
        return self._tensors[index]
