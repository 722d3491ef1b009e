# No postponed annotations here: DDP compares the hook's annotations with the types themselves.
"""Seeing a rank's own gradient before it is averaged with the others'.

DDP offers one place where that is possible without changing a bit: its communication hook. Ours looks at each bucket,
then does what DDP would have done without a hook, in DDP's own arithmetic (it *multiplies* by 1/W while it fills the
bucket, where `allreduce_hook` divides; at 3 or 6 ranks the bits differ), or calls the user's own hook.

Where several micro-batches are accumulated the bucket holds their sum, so the audited micro-batch is then seen by tensor
hooks, the last on each parameter. What happens to a gradient between that hook and the bucket is not covered.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import ConfigurationError, WorkloadError
from bitwitness.guard import seams
from bitwitness.guard.workload import OWN_HOOK, GradientTable, Workload

logger = logging.getLogger(__name__)

CommHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


class _HookState:
    """What DDP's one communication hook refers to: the guard at work, if any. It outlives a guard that is closed."""

    def __init__(self) -> None:
        self.tap: LocalGradients | None = None
        self.inner: CommHook | None = None
        self.inner_state: Any = None

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError("a guarded model cannot be pickled: save its state_dict()")


_states: "WeakKeyDictionary[DistributedDataParallel, _HookState]" = WeakKeyDictionary()


def bitwitness_hook(state: _HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: look at the local gradient, then reduce it as DDP would have done, or as the user says."""
    if state.tap is not None and state.tap.discarding:
        return _native_all_reduce(state.tap, bucket)
    if state.tap is not None:
        state.tap.see_bucket(bucket)
    told = seams.probe
    if told is not None:
        told.sends(bucket.buffer())
    if state.inner is not None:
        future = state.inner(state.inner_state, bucket)
    else:
        future = _native_all_reduce(state.tap, bucket)
    return future if told is None else future.then(lambda done: _shown(told, done.value()))


def _shown(told: seams.Probe, reduced: Any) -> Any:
    tensor = reduced[0] if isinstance(reduced, list | tuple) else reduced
    told.reduced(tensor)
    return reduced


def _native_all_reduce(tap: "LocalGradients | None", bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP's reducer does without a hook (torch/csrc/distributed/c10d/reducer.cpp), bit for bit."""
    buffer = bucket.buffer()
    group = tap.group if tap is not None else dist.distributed_c10d._get_default_group()
    world_size = dist.get_world_size(group)
    if tap is None or not tap.accumulates_in_buckets(buffer):
        buffer.mul_(1.0 / world_size)
    else:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # A gradient that already lived in the bucket before this backward is divided there; others are multiplied.
            if tap.lived_in(buffer, parameter):
                gradient.div_(world_size)
            else:
                gradient.mul_(1.0 / world_size)
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
    reduced: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return reduced


class LocalGradients:
    """Statistics of the local gradient at every step, and digests of one micro-batch's where they are wanted.

    Args:
        model: DDP, or a plain module in a job of one process.
        workload: the work whose gradients these are.
        inner_hook: the user's communication hook, or `(state, hook)`.
    """

    def __init__(self, model: nn.Module, workload: Workload, inner_hook: Any = None) -> None:
        self._workload = workload
        self._name_of = {id(parameter): name for name, parameter in workload.trained.items()}
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self.group = self._ddp.process_group if self._ddp is not None else None
        self._extremes: list[Tensor] = []
        self.failure: Exception | None = None
        self.discarding = False
        """Set while a backward runs whose gradients nobody will use: not looked at, and no hook of the user's sees them."""
        self._table: GradientTable | None = None
        self._from_bucket = False
        self._storages: dict[int, int] = {}
        self._handles: list[Any] = []
        self.inner_hook = inner_hook is not None
        if self._ddp is not None:
            self._register(self._ddp, inner_hook)
        elif inner_hook is not None:
            raise ConfigurationError("inner_hook= is a communication hook of DDP, and the model is not DDP")

    # Called by the guard ---------------------------------------------------------------------------------------------

    def begin(self, wanted: bool, last: bool) -> None:
        """Before a micro-batch's forward. `wanted`: digest its gradient; `last`: it will be reduced."""
        parameters = self._workload.trained.values()
        self._table = GradientTable(self._workload) if wanted else None
        fresh = all(parameter.grad is None for parameter in parameters)
        self._from_bucket = wanted and last and fresh and self._ddp is not None
        if wanted and not self._from_bucket:
            for name, parameter in self._workload.trained.items():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(self._tensor_hook(name)))

    def before_backward(self) -> None:
        """After a micro-batch's forward, in which DDP may have moved the gradients to other buckets: note where they are."""
        self._storages = {}
        if self._ddp is not None and self._ddp.gradient_as_bucket_view:
            for parameter in self._workload.trained.values():
                if parameter.grad is not None:
                    self._storages[id(parameter)] = parameter.grad.untyped_storage().data_ptr()

    def end(self) -> tuple[Tensor, bool] | None:
        """After a micro-batch's backward: the digests of its own gradient and whether it is finite, if wanted."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        table, self._table = self._table, None
        return table.finish() if table is not None and self.failure is None else None

    def take_largest(self) -> Tensor:
        """The largest magnitude of the local gradient of this step, a scalar on the device; forgets it.

        Raises:
            the error that a look at a bucket has caused, if any: a hook must not raise inside a backward.
        """
        failure, self.failure = self.failure, None
        extremes, self._extremes = self._extremes, []
        if failure is not None:
            raise failure
        if self._ddp is None:
            gradients = (parameter.grad for parameter in self._workload.trained.values())
            extremes = [one for gradient in gradients if gradient is not None for one in _extremes(gradient)]
        if not extremes:
            return torch.zeros((), device=self._workload.device)
        return torch.stack([value.double() for value in extremes]).abs().max()

    def abandon(self) -> None:
        """Forget everything of a step that did not come to its end."""
        self.end()
        self._extremes, self.failure = [], None

    def close(self) -> None:
        """Take the guard off the model. DDP keeps the hook, which then does what DDP does."""
        self.abandon()
        if self._ddp is not None:
            _states[self._ddp].tap = None

    # Called by the hooks ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def see_bucket(self, bucket: dist.GradBucket) -> None:
        """Enqueue the statistics of a bucket, and its digests if wanted. Only device work; never raises."""
        try:
            buffer = bucket.buffer()
            if buffer.layout != torch.strided:
                raise WorkloadError("sparse gradients cannot be witnessed: use nn.Embedding(sparse=False)")
            self._extremes += _extremes(buffer)
            if self._table is not None and self._from_bucket:
                pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
                self._table.add({self._name_of[id(parameter)]: gradient for parameter, gradient in pairs})
        except Exception as error:  # raising here would leave the other ranks in the all-reduce
            logger.debug("the communication hook failed", exc_info=True)
            self.failure = error

    def accumulates_in_buckets(self, buffer: Tensor) -> bool:
        """Whether some gradient lived in this bucket before the backward began."""
        return buffer.untyped_storage().data_ptr() in self._storages.values()

    def lived_in(self, buffer: Tensor, parameter: Tensor) -> bool:
        """Whether this parameter's gradient did."""
        return self._storages.get(id(parameter)) == buffer.untyped_storage().data_ptr()

    def _tensor_hook(self, name: str) -> Callable[[Tensor], None]:
        def see_gradient(gradient: Tensor) -> None:
            try:
                assert self._table is not None
                self._table.add({name: gradient})
            except Exception as error:  # noqa: BLE001  # as in see_bucket
                self.failure = error

        setattr(see_gradient, OWN_HOOK, True)
        return see_gradient

    def _register(self, ddp: DistributedDataParallel, inner_hook: Any) -> None:
        state = _states.get(ddp)
        if state is None:
            state = _HookState()
            try:
                ddp.register_comm_hook(state, bitwitness_hook)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"DDP accepts one communication hook and already has one ({error}): do not register yours, give it to "
                    "the guard: Guard(..., inner_hook=(state, hook))"
                ) from error
            _states[ddp] = state
        state.inner_state, state.inner = inner_hook if isinstance(inner_hook, tuple) else (None, inner_hook)
        state.tap = self


def _extremes(tensor: Tensor) -> tuple[Tensor, ...]:
    """The least and the greatest element, of which one has the largest magnitude; NaN if there is one. Nothing if empty.

    One pass at the speed of memory; `torch.linalg.vector_norm` of order infinity was measured to take 12 times as long on
    a CPU.
    """
    if not tensor.numel():
        return ()
    flat = tensor.detach()
    return torch.aminmax(torch.view_as_real(flat) if flat.is_complex() else flat)


def named_gradients(workload: Workload) -> Mapping[str, Tensor]:
    """The gradients that the optimizer is about to use, by parameter."""
    return {name: p.grad for name, p in workload.trained.items() if p.grad is not None}
