"""Putting the world back as it was: random state, buffers, autocast, deterministic mode.

A replay is only worth something if it starts from exactly what the original started from, and leaves exactly what it
found. Both need the same captures, so they are here, apart from what is done between them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import ConfigurationError

UserGenerator = torch.Generator | np.random.Generator | random.Random
"""A generator of the user's own, from which the loss function may draw."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of every source of randomness that a loss function may draw from.

    `torch_cpu` is uint8; `torch_device` likewise for the current CUDA device; `python` and `numpy` are the states of the
    global generators; `own` those of the user's generators, in the order in which the guard was given them.
    """

    torch_cpu: Tensor
    torch_device: Tensor | None
    python: Any
    numpy: Any
    own: tuple[Any, ...]

    @classmethod
    def capture(cls, device: torch.device, generators: Sequence[UserGenerator]) -> RandomState:
        """The state now. Nothing is drawn."""
        return cls(
            torch_cpu=torch.get_rng_state(),
            torch_device=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            python=random.getstate(),
            numpy=np.random.get_state(),
            own=tuple(_state_of(generator) for generator in generators),
        )

    def restore(self, device: torch.device, generators: Sequence[UserGenerator]) -> None:
        """Make this the state now."""
        # A state that travelled is a view into a parcel, and PyTorch reads from the beginning of the storage: clone.
        torch.set_rng_state(self.torch_cpu.clone())
        if self.torch_device is not None:
            torch.cuda.set_rng_state(self.torch_device.clone(), device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in zip(generators, self.own, strict=True):
            _set_state(generator, state)


def check_generators(generators: object) -> None:
    """Raise ConfigurationError for what is not a generator whose state can be captured."""
    if not isinstance(generators, list | tuple):
        raise ConfigurationError(f"generators is a {type(generators).__name__}: give a list of generators")
    for index, generator in enumerate(generators):
        if not isinstance(generator, UserGenerator):
            raise ConfigurationError(
                f"generators[{index}] is a {type(generator).__name__}: give torch.Generator, numpy.random.Generator or "
                "random.Random objects"
            )


def _state_of(generator: UserGenerator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate()


def _set_state(generator: UserGenerator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.clone())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


@contextmanager
def random_state_kept(device: torch.device, generators: Sequence[UserGenerator]) -> Iterator[None]:
    """Whatever is drawn inside, the state afterwards is the state before."""
    state = RandomState.capture(device, generators)
    try:
        yield
    finally:
        state.restore(device, generators)


@dataclass(frozen=True, slots=True)
class Ambient:
    """The modes around a micro-batch that change its bits: autocast, by device type."""

    autocast: tuple[tuple[str, bool, str], ...]
    cache: bool

    @classmethod
    def capture(cls, device: torch.device) -> Ambient:
        """The modes now."""
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        states = tuple(
            (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
            for kind in kinds
        )
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """These modes inside, gradients enabled as they were in the original."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self.autocast:
                mode = torch.autocast(kind, enabled=enabled, dtype=getattr(torch, dtype), cache_enabled=self.cache)
                stack.enter_context(mode)
            yield


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Deterministic algorithms inside, if enabled.

    Attention follows by itself: in this mode PyTorch leaves out the kernels that have no deterministic backward and
    keeps the fastest that has. Filling every new tensor is switched off: it costs a pass over memory and changes
    nothing that is computed.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_UNVERSIONED = frozenset({"running_mean", "running_var"})
"""What batch normalisation changes without telling the version counter (seen in torch 2.13)."""


class Settings:
    """What else decides the bits of a forward and backward: settings of the process, and the modes of the modules.

    They are no part of a replay's state, because a witness should have the same ones: where it has not, or where they
    were changed after the forward, a comparison would say nothing about the devices.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._modules = dict(module.named_modules())
        self._parameters = dict(module.named_parameters())
        self._device = device

    def capture(self) -> dict[str, str]:
        """The settings now, by name; what is long is a list of what is unusual in it."""
        evaluating = [name or "(model)" for name, one in self._modules.items() if not one.training]
        frozen = [name for name, one in self._parameters.items() if not one.requires_grad]
        return {
            "modules in eval mode": ", ".join(evaluating),
            "frozen parameters": ", ".join(frozen),
            "default dtype": str(torch.get_default_dtype()),
            "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
            **process_settings(self._device),
        }


def process_settings(device: torch.device) -> dict[str, str]:
    """The settings of the process that change what kernels compute on a kind of device."""
    found = {"float32 matmul precision": torch.get_float32_matmul_precision()}
    if device.type != "cuda":
        # The number of threads divides sums, and so decides their bits.
        return {**found, "threads": str(torch.get_num_threads()), "oneDNN": str(torch.backends.mkldnn.enabled)}
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    return {
        **found,
        "cuDNN": str((cudnn.enabled, cudnn.benchmark, cudnn.deterministic)),
        "attention kernels": str(attention),
    }


class BufferRecorder:
    """Keeps a module's buffers as they were inside the forward.

    DDP broadcasts buffers when a forward begins, so what the arithmetic really used can only be seen from a pre-hook of
    the inner module, which runs after that. A buffer that no forward changes (a mask, a table of positions) is copied
    once and not again: its version counter tells. The module's parts are listed once, because a walk through a large
    model at every micro-batch takes milliseconds; buffers may come and go, modules may not.

    A hook inside a module makes torch.compile build other code, with other bits. So there is none where there are no buffers;
    and of a `compiled` model they are taken before the forward, after a broadcast of our own that DDP's then repeats.
    """

    def __init__(self, module: nn.Module, compiled: bool = False) -> None:
        self._module, self._compiled = module, compiled
        self._parts = [(f"{prefix}." if prefix else "", part) for prefix, part in module.named_modules()]
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._changing: set[str] = set()
        self._captured: dict[str, Tensor] | None = None
        self._armed = False
        self._handle: Any = None

    def arm(self, ddp: DistributedDataParallel | None = None) -> None:
        """Capture at the next forward, which is that of `ddp` if it is given."""
        self._armed, self._captured = True, None
        if not any(part._buffers for _, part in self._parts):
            return
        if self._compiled:
            if ddp is not None and ddp.will_sync_module_buffers() and not hasattr(ddp, "buffer_hook"):
                ddp._sync_buffers()
            self._captured, self._armed = self._copy(), False
        elif self._handle is None:
            self._handle = self._module.register_forward_pre_hook(self._before_forward, prepend=True)

    def take(self) -> dict[str, Tensor]:
        """The buffers by name as the first forward since `arm` found them, or as they are where there was none."""
        captured = self._captured if self._captured is not None else self._copy()
        self._armed, self._captured = False, None
        return captured

    @property
    def changing(self) -> frozenset[str]:
        """Names of the buffers that have changed since the first capture: running statistics and the like."""
        return frozenset(self._changing)

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._armed:
            self._captured, self._armed = self._copy(), False

    @torch.no_grad()
    def _copy(self) -> dict[str, Tensor]:
        current: dict[str, Tensor] = {}
        for name, buffer, part in self._named_buffers():
            known = self._copies.get(name)
            unversioned = name.rpartition(".")[2] in _UNVERSIONED
            changed = known is None or known[0] is not buffer or known[1] != buffer._version
            if known is not None and (changed or (unversioned and part.training)):
                self._changing.add(name)
            if known is None or changed or unversioned:
                known = (buffer, buffer._version, buffer.detach().clone())
                self._copies[name] = known
            current[name] = known[2]
        return current

    def _named_buffers(self) -> Iterator[tuple[str, Tensor, nn.Module]]:
        """As `nn.Module.named_buffers`, each with its module: one that several modules share comes once."""
        seen: set[int] = set()
        for prefix, part in self._parts:
            for name, buffer in part._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield prefix + name, buffer, part


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that a replay may change."""
    return {name: tensor.clone() for name, tensor in tensors.items()}
