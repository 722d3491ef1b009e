"""The tape: all that the leader computed in one step, on the host, for everybody else to be compared with.

A tape, and not two steps that run hand in hand, because of what overwriting means: a follower whose every result is made equal to the
leader's never changes what comes next, so the leader needs nothing of it. One process with several devices and many nodes are then
the same thing, and a step has one collective. The price is memory on the host: all compared tensors of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitwitness.compare.records import Site
from bitwitness.errors import ConfigurationError


@dataclass(slots=True)
class Tape:
    """One step of the leader.

    Attributes:
        step: which.
        entries: what was compared, in the order in which it was computed; contiguous, on the CPU, complex numbers as pairs.
        lost: why the leader computes no more; "" while it does. Then there are no entries.
        gradient, weights: ‖g‖² and ‖w‖² of the step, summed once for all who follow.
    """

    step: int
    entries: dict[Site, Tensor] = field(default_factory=dict)
    lost: str = ""
    gradient: float = 0.0
    weights: float = 0.0


def host(tensor: Tensor) -> Tensor:
    """A copy of its bits in memory of the host: contiguous, without gradient, complex numbers as pairs in a last axis."""
    plain = _plain(tensor).resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    copy = plain.to(device="cpu", copy=True)
    return copy.contiguous()


def overwrite(tensor: Tensor, right: Tensor) -> None:
    """Write other bits into the memory of a tensor, unseen by autograd and its version counters, as hardware would.

    What shares that memory gets them too. That is meant: in the leader it is shared in the same way.

    Args:
        tensor: of any strided layout and device.
        right: what `host` made of the leader's.
    """
    target, source = _plain(tensor), right
    if target.is_complex():
        source = torch.view_as_complex(source.contiguous())
    for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded axis: one element in memory stands for all
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    target.copy_(source)


def like(tensor: Tensor, right: Tensor) -> Tensor:
    """The leader's bits as a new tensor beside this one, laid out as it is: in another layout kernels add in another order."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    overwrite(other, right)
    return other


def _plain(tensor: Tensor) -> Tensor:
    """The same memory, without gradient, version counter and whatever a subclass does."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data.as_subclass(Tensor)


def site_of(module: str, phase: str, name: str, call: int, tensor: Tensor) -> Site:
    """The site of a tensor, named as it will be on the host."""
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if tensor.is_complex():
        dtype, shape = tensor.dtype.to_real(), (*shape, 2)
    return Site(module, phase, name, call, str(dtype).removeprefix("torch."), shape)  # type: ignore[arg-type]


def can_be_compared(tensor: Tensor) -> bool:
    """Whether it has memory to be compared: strided and not empty.

    Raises:
        ConfigurationError: it is sharded over ranks, so that what one participant holds is no result of its own; or it only wraps others.
    """
    if type(tensor).__name__ == "DTensor":  # its module is slow to import
        raise ConfigurationError(
            "this workload shards its tensors (DTensor): each participant of a comparison computes a whole model on one device. "
            "Give a model that is not wrapped in FSDP or tensor parallelism"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ConfigurationError(
            "this workload calls its modules inside of a transformation of torch.func, where a tensor stands for others and has no memory "
            "of its own: compute gradients by backward() or torch.autograd.grad"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.numel() == 0:
        return False
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigurationError(
            f"this workload computes with tensors of the class {type(tensor).__name__}, which keep their numbers in others: give a workload "
            "of plain tensors"
        )
    return True
