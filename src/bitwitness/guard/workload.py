"""A micro-batch as something that can be run again: by its owner, or by a witness on another node.

The replay must do what training did and touch nothing that training owns. It runs the loss function on the inner module
(outside DDP's reducer), with the parameters replaced by leaves of its own that share their memory, and the buffers by
copies: so gradients land in those leaves, are hashed and freed one by one, and neither `.grad`, nor DDP's hooks, nor any
running statistic of the job sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from bitwitness.errors import WorkloadError
from bitwitness.evidence import NONFINITE
from bitwitness.fingerprint import fingerprint_tensors
from bitwitness.guard import parcel, seams
from bitwitness.guard.rewind import (
    Ambient,
    RandomState,
    Settings,
    UserGenerator,
    clones,
    deterministic,
    random_state_kept,
)

LossFunction = Callable[[Any, Any], Tensor]
"""`compute_loss(model, batch) -> scalar`, shared by training and replay, autocast included."""

_FLUSH_BYTES = 16 << 20
"""Small gradients are gathered up to this size before they are hashed together, in one table."""


@dataclass(slots=True)
class Result:
    """What a run of a micro-batch produced, as digests. `gradients` is int64 `[parameters, 3]` or None, on the CPU."""

    loss: Tensor
    loss_is_finite: bool
    gradients: Tensor | None = None
    gradients_are_finite: bool = True

    def value(self, with_gradients: bool) -> str:
        """The value that is compared: a digest in hexadecimal, or NONFINITE."""
        if not self.loss_is_finite or (with_gradients and not self.gradients_are_finite):
            return NONFINITE
        digest = hashlib.blake2b(self.loss.numpy().tobytes(), digest_size=12)
        if with_gradients and self.gradients is not None:
            digest.update(self.gradients.numpy().tobytes())
        return digest.hexdigest()


@dataclass(slots=True)
class MicroBatch:
    """What is kept of a micro-batch until the step ends, so that it can be run again.

    Attributes:
        index: position within the step, from 0.
        batch: what the loss function was given; referred to, not copied.
        digests: fingerprints of the batch's tensors on entry, int64 `[tensors, 3]`, on the batch's device.
        random: random state on entry; ambient: autocast on entry.
        buffers: as they were inside the forward; changing: names of those that forwards change.
        deterministic: whether it ran under deterministic algorithms.
        settings: what else decides its bits, and is no part of its state.
        scale: the loss scale it was multiplied by before the backward, or None.
        loss: the loss as computed, detached, before scaling.
        handed: the same numbers where the caller holds them, to be set right if the step is run again.
        gradients: digests of its own local gradient, where they were captured; as in Result.
    """

    index: int
    batch: Any
    digests: Tensor
    random: RandomState
    ambient: Ambient
    deterministic: bool
    settings: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    buffers_are_shared: bool = False
    scale: Tensor | None = None
    loss: Tensor | None = None
    handed: Tensor | None = None
    gradients: Tensor | None = None
    gradients_are_finite: bool = True

    def result(self, seed: int) -> Result:
        """What training itself produced."""
        assert self.loss is not None
        return Result(
            loss=fingerprint_tensors([self.loss], seed).cpu(),
            loss_is_finite=bool(torch.isfinite(self.loss)),
            gradients=self.gradients,
            gradients_are_finite=self.gradients_are_finite,
        )

    def state(self, with_batch: bool, ship_all_buffers: bool) -> dict[str, Any]:
        """What a witness needs to run it: without the batch where it rebuilds that, without buffers it holds as well."""
        shipped = self.buffers if ship_all_buffers else self.changing
        return {
            "index": self.index,
            "batch": self.batch if with_batch else None,
            "digests": self.digests,
            "random": self.random,
            "ambient": self.ambient,
            "deterministic": self.deterministic,
            "buffers": {name: self.buffers[name] for name in sorted(shipped)},
            "scale": self.scale,
        }


class Workload:
    """The inner module, the loss function and how to run them again.

    Args:
        model: the model as it is trained, DDP or plain.
        module: the module inside DDP (or the plain module).
        loss_fn: shared by training and replay.
        device: where the module lives.
        seed: seed of the fingerprints, the same on every rank.
        generators: the user's own generators.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        loss_fn: LossFunction,
        device: torch.device,
        seed: int,
        generators: Sequence[UserGenerator],
    ) -> None:
        self.module = module
        self.settings = Settings(module, device)
        self._replaying = False
        self._refusal = model.register_forward_pre_hook(self._refuse_in_replay) if model is not module else None
        self.device = device
        self.seed = seed
        self.generators = generators
        self.trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
        self._whole = _LossModule(module, loss_fn)
        self._zero_rows: dict[str, Tensor] = {}

    def batch_digests(self, batch: Any) -> Tensor:
        """Fingerprints of the tensors in a batch, int64 `[tensors, 3]`, on the CPU."""
        tensors = parcel.tensors_in(batch)
        if not tensors:
            return torch.zeros(0, 3, dtype=torch.int64)
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        digests = torch.empty(len(tensors), 3, dtype=torch.int64)
        if len(by_device) == 1:
            return fingerprint_tensors(tensors, self.seed)
        for indices in by_device.values():
            digests[indices] = fingerprint_tensors([tensors[index] for index in indices], self.seed).cpu()
        return digests

    def replay(self, state: Mapping[str, Any], buffers: Mapping[str, Tensor], with_gradients: bool) -> Result:
        """Run a micro-batch again, here.

        Args:
            state: what `MicroBatch.state` gave, its batch in place.
            buffers: the module's buffers inside the original forward, by name.
            with_gradients: run the backward too; without it a replay costs one forward.
        """
        sink = _GradientSink(self) if with_gradients else None
        parameters = self.module.named_parameters()
        leaves = {name: param.detach().requires_grad_(param.requires_grad) for name, param in parameters}
        with (
            random_state_kept(self.device, self.generators),
            deterministic(state["deterministic"]),
            state["ambient"].restored(),
        ):
            state["random"].restore(self.device, self.generators)
            # What was frozen since the guard was made has no gradient; its row is that of zeros, as in DDP's bucket.
            wanted = {name: leaves[name] for name in self.trained if leaves[name].requires_grad}
            if sink is not None:
                sink.attach(wanted)

            def backward(loss: Tensor) -> None:
                if sink is not None:
                    scaled = loss if state["scale"] is None else loss * state["scale"].to(loss.device)
                    torch.autograd.backward(scaled, inputs=list(wanted.values()))

            replaced = {f"inner.{name}": tensor for name, tensor in (leaves | clones(buffers)).items()}
            self._replaying = True
            try:
                loss = functional_call(self._whole, replaced, (state["batch"], backward))
            finally:
                self._replaying = False
        result = Result(loss=fingerprint_tensors([loss], self.seed).cpu(), loss_is_finite=bool(torch.isfinite(loss)))
        if sink is not None:
            result.gradients, result.gradients_are_finite = sink.finish()
        return result

    def zero_row(self, name: str) -> Tensor:
        """The digest of a gradient that is zero everywhere: what DDP reduces for a parameter that was not used."""
        if name not in self._zero_rows:
            zeros = torch.zeros_like(self.trained[name], requires_grad=False)
            self._zero_rows[name] = fingerprint_tensors([zeros], self.seed)[0].cpu()
        return self._zero_rows[name]

    def close(self) -> None:
        """Remove the hook that keeps replays away from DDP."""
        if self._refusal is not None:
            self._refusal.remove()

    def _refuse_in_replay(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if self._replaying:
            raise WorkloadError(
                "loss_fn uses a DDP model of its own instead of the model it is given: a replay must run outside DDP. Write "
                "compute_loss(model, batch) so that it calls its argument"
            )


class GradientTable:
    """Digests and finiteness of one gradient, filled in parameter by parameter."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._rows: dict[str, Tensor] = {}
        self._largest: list[Tensor] = []

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Hash some gradients; only device work is enqueued."""
        if not gradients:
            return
        rows = fingerprint_tensors(list(gradients.values()), self._workload.seed)
        for name, row in zip(gradients, rows, strict=True):
            if name in self._rows:
                raise WorkloadError(
                    f"the gradient of {name} arrives in several pieces (reentrant activation checkpointing does that): "
                    'use torch.utils.checkpoint with use_reentrant=False, or Policy(audit="loss")'
                )
            self._rows[name] = row
        self._largest += [largest_magnitude(gradient) for gradient in gradients.values() if gradient.numel()]

    def finish(self) -> tuple[Tensor, bool]:
        """The table, int64 `[trained parameters, 3]` on the CPU, and whether every element is finite."""
        names = self._workload.trained
        rows = [self._rows[name] if name in self._rows else self._workload.zero_row(name) for name in names]
        table = torch.stack([row.cpu() for row in rows]) if rows else torch.zeros(0, 3, dtype=torch.int64)
        largest = torch.stack(self._largest) if self._largest else torch.zeros(1)
        return table, bool(torch.isfinite(largest).all())


class _GradientSink:
    """Hashes a replay's gradients as they arrive, and frees them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._table = GradientTable(workload)
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0

    def attach(self, leaves: Mapping[str, Tensor]) -> None:
        """Watch these leaves, and put the user's own gradient hooks of the real parameters on them."""
        for name, leaf in leaves.items():
            for hook in user_hooks(self._workload.trained[name]):
                leaf.register_hook(hook)
            leaf.register_post_accumulate_grad_hook(self._collector(name))

    def finish(self) -> tuple[Tensor, bool]:
        """Hash what is still waiting and return the table."""
        self._flush()
        return self._table.finish()

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            if name in self._waiting:
                self._flush()
            self._waiting[name] = gradient
            self._bytes += gradient.numel() * gradient.element_size()
            if self._bytes >= _FLUSH_BYTES:
                self._flush()

        return collect

    def _flush(self) -> None:
        self._table.add(self._waiting)
        self._waiting, self._bytes = {}, 0


class _LossModule(nn.Module):
    """Forward and backward as one call, so that both run while the parameters are replaced."""

    def __init__(self, inner: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.inner = inner
        self._loss_fn = loss_fn

    def forward(self, batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
        """The loss, detached, after `backward` has seen it."""
        loss = check_loss(self._loss_fn(self.inner, batch))
        backward(loss)
        return loss.detach()


class NoCollectives(TorchDispatchMode):
    """Raises WorkloadError where the code inside starts a collective: replays run at different times on each rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything through but collectives."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "symm_mem"):
            name = str(func).partition(".")[2]
            raise WorkloadError(
                f"loss_fn issues a collective ({name}): a witness replays it alone and would wait for ever. Move the collective "
                'out of loss_fn (e.g. into the batch), replace SyncBatchNorm, or use Policy(audit="off")'
            )
        return func(*args, **(kwargs or {}))


def check_loss(loss: Any) -> Tensor:
    """Raise WorkloadError unless this is a loss that can be trained on."""
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"loss_fn returned a {type(loss).__name__}: it must return one scalar tensor, the loss")
    if loss.numel() != 1 or loss.dim() != 0:
        shape = list(loss.shape)
        raise WorkloadError(
            f"loss_fn returned a tensor of shape {shape}: it must return a scalar; take its mean or sum"
        )
    if not loss.is_floating_point():
        raise WorkloadError(f"loss_fn returned a tensor of {loss.dtype}: the loss must be of a floating-point dtype")
    if not loss.requires_grad:
        raise WorkloadError(
            "loss_fn returned a loss that requires no gradient: is the model frozen, or the loss detached or under no_grad?"
        )
    if seams.probe is not None:
        seams.probe.loss(loss)
    return loss


def largest_magnitude(tensor: Tensor) -> Tensor:
    """The largest magnitude in a non-empty tensor, as float32 or float64; Inf or NaN if any element is not finite."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if flat.element_size() == 1:
        flat = flat.float()  # the 8-bit formats have no such operation
    largest = torch.stack(torch.aminmax(flat)).abs().max()
    return largest if largest.dtype == torch.float64 else largest.float()


OWN_HOOK = "_bitwitness_hook"
"""Marks the guard's own tensor hooks, which a replay does not repeat."""


def user_hooks(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """The gradient hooks that somebody else has put on a parameter; they are part of the arithmetic."""
    hooks = parameter._backward_hooks or {}
    return [hook for hook in hooks.values() if not getattr(hook, OWN_HOOK, False)]


@contextmanager
def out_of_memory_reported() -> Iterator[list[str]]:
    """Swallow a lack of memory, and leave its message in the list: such an audit is skipped by all, and a gap."""
    message: list[str] = []
    try:
        yield message
    except (torch.OutOfMemoryError, MemoryError) as error:
        message.append(str(error).partition("\n")[0] or "out of memory")
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        message.append(str(error).partition("\n")[0])
