"""How much time and memory the parts of a guarded step take, told apart from the training around them.

A step that is guarded differs by a percent or less from one that is not, which is less than two steps differ by
themselves. So the parts of the guard are measured where they run: its methods are wrapped for as long as the measurement
lasts, and each wrapper counts what its method does itself; what that calls counts for what is called, so that a forward
inside a check is training's and a look at a bucket inside a backward is the check's.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bitwitness.guard import gradients, loop, rewind, workload
from bitwitness.guard.agreement import Channel
from bitwitness.guard.guard import Guard

MIB = 1 << 20

TRAINING = "training"
"""What the unguarded step does as well."""
NORM = "norm"
"""The gradient norm: computed by *numerics*, but needed for clipping all the same, so part of an unguarded step too."""
COLLECTIVES = "collectives"
CAPTURES = "captures"
"""What is kept of a micro-batch so that it can be replayed: digests of the batch, random state, buffers."""
ORDER = "order"
"""The guard's own bookkeeping: the order of a step, the verdict, the journal."""
HOOK = "hook"
"""The communication hook apart from its look at the bucket: what DDP's own code does faster when there is no hook."""
REPLAY_DIGESTS = "replay digests"
"""Labels that begin with "replay" are phases of an audit; this one is the owner's digests of its own gradient."""


@dataclass
class Seconds:
    """Time, on the clock and of all processors together."""

    wall: float = 0.0
    processor: float = 0.0


class Meter(ABC):
    """Attributes something to labelled stretches of code, each without the stretches inside it."""

    def __init__(self) -> None:
        self._labels: list[str] = []

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """A stretch. Inside a replay everything belongs to the replay."""
        if self._labels and self._labels[-1].startswith("replay"):
            label = self._labels[-1]
        self._cut(self._labels[-1] if self._labels else None)
        self._labels.append(label)
        try:
            yield
        finally:
            self._cut(label)
            self._labels.pop()

    @abstractmethod
    def _cut(self, label: str | None) -> None:
        """A stretch begins or ends: what happened since the last call belongs to `label`."""


class Clock(Meter):
    """Measures time."""

    def __init__(self) -> None:
        super().__init__()
        self._spent: defaultdict[str, Seconds] = defaultdict(Seconds)
        self._last = Seconds()

    def take(self) -> dict[str, Seconds]:
        """Seconds by label since the last call."""
        spent, self._spent = self._spent, defaultdict(Seconds)
        return spent

    def _cut(self, label: str | None) -> None:
        now = Seconds(time.perf_counter(), time.process_time())
        if label is not None:
            self._spent[label].wall += now.wall - self._last.wall
            self._spent[label].processor += now.processor - self._last.processor
        self._last = now


class Scale(Meter):
    """Measures resident memory, by the kernel's high-water mark of this process, which can be reset (Linux only).

    Whatever allocates is seen, libraries below torch too. Memory that was freed but not returned would hide what is
    allocated next, so it is returned to the kernel at every cut, which is why time is not measured in the same run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._peaks: dict[str, float] = {}
        self._held: defaultdict[str, float] = defaultdict(float)
        self._start = 0.0
        self._trim: Any = None
        with suppress(OSError, AttributeError):
            self._trim = ctypes.CDLL(None).malloc_trim

    def works(self) -> bool:
        """Whether this system can tell."""
        try:
            self._cut(None)
        except (OSError, TypeError):
            return False
        return self._trim is not None

    def begin(self) -> None:
        """Before a step: what earlier ones left behind is not this one's."""
        gc.collect()
        self._held.clear()
        self._peaks = {}

    def take(self) -> dict[str, float]:
        """The peaks since `begin` in MiB, by label."""
        return self._peaks

    def _cut(self, label: str | None) -> None:
        if label is not None:
            highest = self._held[label] + _status("VmHWM") - self._start
            self._peaks[label] = max(self._peaks.get(label, 0.0), highest)
        if self._trim is not None:
            self._trim(0)
        resident = _status("VmRSS")  # after the trim: what was freed is not held
        if label is not None:
            self._held[label] += resident - self._start
        Path("/proc/self/clear_refs").write_text("5")
        self._start = resident


def _status(field: str) -> float:
    """A field of the kernel's account of this process, in MiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise TypeError(f"no {field} in /proc/self/status")
    return int(found[1]) / 1024


class Probe:
    """The meter in use, which can be exchanged while the wrappers stay."""

    def __init__(self) -> None:
        self.meter: Meter = Clock()

    def wrap(self, function: Callable[..., Any], label: str | Callable[..., str]) -> Callable[..., Any]:
        """The same function, counted under `label`, or under what `label` makes of its arguments."""

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.meter.span(label if isinstance(label, str) else label(*args)):
                return function(*args, **kwargs)

        return counted


@contextmanager
def watched(one: Guard, optimizer: torch.optim.Optimizer, probe: Probe) -> Iterator[None]:
    """While inside, what `one` does is counted. Call `forward_backward` in a span of training, `step` in one of order."""
    places: list[tuple[Any, str, str | Callable[..., str]]] = [
        (one.job.gradients, "see_bucket", "numerics"),
        (gradients, "_native_all_reduce", HOOK),
        (rewind.BufferRecorder, "_copy", CAPTURES),
        (workload.GradientTable, "add", REPLAY_DIGESTS),
        (workload.GradientTable, "finish", REPLAY_DIGESTS),
        (loop.Micro, "backward", CAPTURES),
        *((Channel, name, _of_phase) for name in ("max", "gather", "exchange")),
        *((Channel, name, COLLECTIVES) for name in ("_complete", "_wait_for_device")),
        (dist, "all_reduce", COLLECTIVES),
        (torch.nn.utils, "get_total_norm", NORM),
        (torch.nn.utils, "clip_grads_with_norm_", TRAINING),
        (torch.autograd, "backward", TRAINING),
        (optimizer, "step", TRAINING),
        (optimizer, "zero_grad", TRAINING),
    ]
    with ExitStack() as stack:
        for owner, name, label in places:
            stack.enter_context(_replaced(owner, name, probe.wrap(getattr(owner, name), label)))
        micro_batch = one.microbatch
        stack.enter_context(
            _replaced(one, "microbatch", lambda *args, **kwargs: _Ends(probe, micro_batch(*args, **kwargs)))
        )
        yield


class _Ends:
    """Counts what a micro-batch's context does on entry and exit; what is inside is the caller's."""

    def __init__(self, probe: Probe, context: AbstractContextManager[loop.Micro]) -> None:
        self._probe = probe
        self._context = context

    def __enter__(self) -> loop.Micro:
        with self._probe.meter.span(CAPTURES):
            return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with self._probe.meter.span(CAPTURES):
            return self._context.__exit__(kind, error, trace)


def _of_phase(channel: Channel, phase: str, *rest: object) -> str:
    if phase.startswith("replay"):
        return phase
    return next((name for name in ("numerics", "replicas") if phase.startswith(name)), ORDER)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
