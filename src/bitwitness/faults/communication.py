"""Faults on the way between ranks and in the loss, for jobs without a guard: there no seam tells of them.

DDP's one communication hook and `torch.autograd.backward` are borrowed for as long as an injector is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import ConfigurationError
from bitwitness.faults.sites import data_parallel
from bitwitness.faults.spec import Fault


class Wire:
    """DDP's communication hook of a job without a guard; it does what DDP does without one, and tells whoever listens.

    DDP keeps its hook for good, so there is one for a model, for all injectors that come.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sends: Callable[[Tensor], None] | None = None
        self.reduced: Callable[[Tensor], None] | None = None

    def remove(self) -> None:
        """Nobody listens any more."""
        self.sends = self.reduced = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """As DDP does: multiply by 1/W, then sum."""
        buffer = bucket.buffer()
        if self.sends is not None:
            self.sends(buffer)
        buffer.mul_(1.0 / dist.get_world_size(self._group))
        future = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        done: torch.futures.Future[Tensor] = future.then(lambda arrived: self._arrived(arrived.value()[0]))
        return done

    def _arrived(self, tensor: Tensor) -> Tensor:
        if self.reduced is not None:
            self.reduced(tensor)
        return tensor


_wires: WeakKeyDictionary[DistributedDataParallel, Wire] = WeakKeyDictionary()


def wire(model: nn.Module, sends: Callable[[Tensor], None], reduced: Callable[[Tensor], None]) -> Wire:
    """Listen to what a model sends and what its reductions return, until `remove` of what is returned.

    Raises:
        ConfigurationError: DDP's one hook is taken already, or DDP does something that a hook cannot.
    """
    ddp = data_parallel(model)
    assert ddp is not None  # or `check` would have refused it
    if ddp.gradient_as_bucket_view:
        raise ConfigurationError(
            "a fault in communication takes the place of DDP's own reduction, which rounds otherwise with gradient_as_bucket_view=True: "
            "leave that out, or put the job under a guard"
        )
    known = _wires.get(ddp)
    if known is None:
        known = Wire(ddp.process_group)
        try:
            ddp.register_comm_hook(known, fault_hook)
        except RuntimeError as error:
            raise ConfigurationError(
                f"a fault in communication needs DDP's communication hook, and it is taken ({error}): give yours to a guard as "
                "inner_hook=, or leave it out"
            ) from error
        _wires[ddp] = known
    known.sends, known.reduced = sends, reduced
    return known


def fault_hook(state: Any, bucket: Any) -> Any:
    """DDP communication hook, to be found by this name in DDP's logs. Without annotations that DDP would compare."""
    return state.reduce(bucket)


fault_hook.__annotations__ = {}


def check(fault: Fault, model: nn.Module, world_size: int) -> None:
    """Raises ConfigurationError where nothing is communicated."""
    if world_size < 2 or data_parallel(model) is None:
        raise ConfigurationError(f"{fault}: nothing is communicated here: it takes DDP, and at least two ranks")


@contextmanager
def backward_watched(told: Callable[[Tensor], None]) -> Iterator[None]:
    """Tell of every scalar that a backward starts from, before it does."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensors, Tensor) and tensors.dim() == 0:
            told(tensors)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original
