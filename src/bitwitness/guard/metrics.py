"""Loss, gradient norm, wall time and the cost of the checks, step by step, for whoever draws them later.

Rank 0 alone keeps these, and only from what is at hand anyway: the loss and the scale ride in the one value that *numerics* reads
from the device, so a step waits for nothing more. They are no evidence. Whatever fails here is told once and given up; training
and the ledger go on without it.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from bitwitness.guard.job import Job, Step

logger = logging.getLogger("bitwitness")

GUARD = "guard"
"""What costs without belonging to a check: what is kept of a micro-batch so that it can be run again."""

_INTERVAL = 1.0
"""Seconds between two records."""

_PENDING = 1024
"""Stretches of device work whose end has not been seen yet; more means that the device tells nothing."""

Mark = float | torch.cuda.Event | None
"""A moment on the clock of whatever does the work; None where nothing is measured."""

OWN = 2
"""How many numbers of its own a rank has brought along by *numerics*: see `measured`."""


def measured(job: Job, step: Step, device: torch.device) -> Tensor:
    """Mean loss of this rank's micro-batches, and by what the gradient's norm is to be divided: the bits of float64, int64 `[2]`.

    On `device`, without waiting for it. NaN where it cannot be told, e.g. because the loss lives where reading it would wait.
    """
    try:
        losses = [micro.loss for micro in step.micros if micro.loss is not None]
        if losses and (device.type != "cpu" or all(loss.device.type == "cpu" for loss in losses)):
            mean = torch.stack(losses).double().mean().to(device)
            scale = step.micros[-1].scale if job.scaler is not None and not _is_unscaled(job.scaler, job) else None
            divisor = torch.ones_like(mean) if scale is None else scale.detach().double().to(device)
            return torch.stack([mean, divisor]).view(torch.int64)
    except Exception:
        logger.debug("the loss of step %d is not on record", step.index, exc_info=True)
    return torch.full((OWN,), math.nan, dtype=torch.float64, device=device).view(torch.int64)


def numbers(norm: int, loss: int, divisor: int) -> tuple[float | None, float | None]:
    """Loss and norm from the bits of float64 that came back from the device; None for what is not known."""
    total, mean, scale = struct.unpack("<3d", struct.pack("<3q", norm, loss, divisor))
    return (None, None) if math.isnan(scale) else (mean, total / scale if scale else math.inf)


def _is_unscaled(scaler: GradScaler, job: Job) -> bool:
    """Whether the loop has divided the gradient by the scale already, before the guard was asked."""
    states: Any = getattr(scaler, "_per_optimizer_states", {})  # torch has no public word for it
    stages = [states.get(id(optimizer), {}).get("stage") for optimizer in job.optimizers]
    return any(stage in (OptState.UNSCALED, OptState.STEPPED) for stage in stages)


class Metrics:
    """Adds up steps until they are written: `took` and `step_ended` as they happen, `take` for the record.

    Args:
        device: where the model lives.
        reports: whether this rank keeps any; the others do nothing here.
    """

    def __init__(self, device: torch.device, reports: bool) -> None:
        self._reports = reports
        self._clock: Literal["host", "device"] = "device" if device.type == "cuda" else "host"
        self._timed = reports and device.type in ("cpu", "cuda")
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._since: float | None = None
        self._written = -math.inf
        self._open = _Record()

    # As the guard goes along -----------------------------------------------------------------------------------------

    def begins(self) -> Mark:
        """A micro-batch begins. The first one after a start or a checkpoint starts the clock of its step."""
        if self._reports and self._since is None:
            self._since = time.monotonic()
        return self.mark()

    def mark(self) -> Mark:
        """Now, on the clock of whatever does the work."""
        if not self._timed:
            return None
        if self._clock == "host":
            return time.perf_counter()
        mark: torch.cuda.Event | None = self._attempt(_event)
        return mark

    def took(self, what: str, since: Mark) -> Mark:
        """What happened since then belongs to this; the mark for what comes next."""
        now = self.mark()
        if isinstance(since, float) and isinstance(now, float):
            self._open.add_cost(what, now - since)
        elif isinstance(since, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._pending.append((what, since, now))
        return now

    def pause(self) -> None:
        """Something else than a step comes next, e.g. a checkpoint: it counts for none."""
        self._since = None

    def step_ended(self, step: Step) -> bool:
        """Account for a step. Whether a record is due."""
        if not self._reports:
            return False
        now = time.monotonic()
        seconds, self._since = now - self._since if self._since is not None else 0.0, now
        self._attempt(self._look_at_device)
        self._open.add(step.index, step.loss, step.norm, seconds)
        return now - self._written >= _INTERVAL

    def take(self) -> dict[str, Any] | None:
        """What has been added up since the last time, as a record; None where no step has ended since."""
        if not self._open.steps:
            return None
        record, self._open = self._open, _Record()
        self._written = time.monotonic()
        return {**record.to_json(), "clock": self._clock}

    # The device's own clock ------------------------------------------------------------------------------------------

    def _look_at_device(self) -> None:
        """Take the times of what the device has finished by now; it is never waited for."""
        while self._pending:
            what, begin, end = self._pending[0]
            if not end.query():
                break
            self._open.add_cost(what, begin.elapsed_time(end) / 1000)
            self._pending.popleft()
        if len(self._pending) > _PENDING:
            raise RuntimeError(f"{len(self._pending)} stretches have not ended")

    def _attempt(self, measure: Callable[[], Any]) -> Any:
        """A device that does not tell is not asked again."""
        if not self._timed:
            return None
        try:
            return measure()
        except Exception as error:  # noqa: BLE001  (no measurement is worth a job)
            logger.warning("the cost of the checks is not measured from now on: the device's clock failed: %s", error)
            self._timed = False
            self._pending.clear()
            return None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Record:
    """Steps, added up."""

    def __init__(self) -> None:
        self.first = self.last = self.steps = self.nonfinite = 0
        self.seconds = 0.0
        self.loss, self.norm = _Mean(), _Mean()
        self.cost: dict[str, float] = {}

    def add(self, step: int, loss: float | None, norm: float | None, seconds: float) -> None:
        self.first = step if not self.steps else self.first
        self.last = step
        self.steps += 1
        self.seconds += seconds
        known = [value for value in (loss, norm) if value is not None]
        self.nonfinite += not all(map(math.isfinite, known))
        self.loss.add(loss)
        self.norm.add(norm)

    def add_cost(self, what: str, seconds: float) -> None:
        self.cost[what] = self.cost.get(what, 0.0) + seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "last": self.last,
            **self.loss.to_json("loss"),
            **self.norm.to_json("norm"),
            "nonfinite": self.nonfinite,
            "seconds": round(self.seconds, 6),
            "cost": {what: round(seconds, 6) for what, seconds in self.cost.items()},
        }


class _Mean:
    """Mean, least and largest of what is finite."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        self.count += 1
        self.mean += value / self.count - self.mean / self.count  # no sum, which could overflow
        self.low, self.high = min(self.low, value), max(self.high, value)

    def to_json(self, name: str) -> dict[str, float | None]:
        if not self.count:
            return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
        short = [float(f"{value:.9g}") for value in (self.mean, self.low, self.high)]
        return dict(zip((name, f"{name}_low", f"{name}_high"), short, strict=True))
