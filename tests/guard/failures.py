"""The guard's own mishaps: a check that raises, that takes too long, or whose rank dies in the middle of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from bitwitness import BitwitnessError, fingerprint_tensors
from bitwitness.guard import replication
from bitwitness.guard.checks import numerics
from bitwitness.runfiles import run as run_files
from tests.guard import models
from tests.guard.faults import Fault
from tests.guard.harness import Rank, Seen
from tests.guard.training import Plan, TrainingRun, described


@dataclass(frozen=True)
class Mishap:
    """What happens, in the middle of what, on which rank and in which step."""

    what: Literal["raise", "sleep", "kill"]
    where: Literal["numerics", "replay", "replicas", "backward", "between", "repeats", "incident"]
    rank: int = 1
    step: int = 2
    timeout: float = 3.0
    seconds: float = 7.5
    faults: tuple[Fault, ...] = field(default=())

    @property
    def name(self) -> str:
        """For the name of a scenario."""
        return f"{self.what} in {self.where} on rank {self.rank}"


class _Trap:
    """Lets the mishap happen once, when it is due."""

    def __init__(self, mishap: Mishap, rank: int) -> None:
        self.mishap, self.mine = mishap, rank == mishap.rank
        self.step = -1
        self.sprung = False

    def spring(self, where: str) -> None:
        """This rank is in the middle of it."""
        if not self.mine or self.sprung or self.step != self.mishap.step or where != self.mishap.where:
            return
        self.sprung = True
        if self.mishap.what == "raise":
            raise ArithmeticError("this check misfires")
        if self.mishap.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.mishap.seconds)


def run_mishap(place: Rank, mishap: Mishap) -> Seen:
    """Train until it happens; what the guard made of it on this rank, and after how long."""
    trap = _Trap(mishap, place.rank)
    plan = Plan(steps=5, policy={"audit": "gradients", "timeout": mishap.timeout}, faults=mishap.faults)
    training = TrainingRun(place, plan)
    training.loss = _trapped_loss(training, trap)
    guard = training.make_guard()
    seen: Seen = {"error": None, "family": [], "step": -1}
    started = time.monotonic()
    with _traps(trap):
        try:
            for step in training.steps():
                trap.step, seen["step"], started = step, step, time.monotonic()
                training.forward_backward(guard, step)
                trap.spring("between")
                guard.step(max_grad_norm=1.0)
        except (BitwitnessError, RuntimeError) as error:
            seen["error"] = described(error, seen["step"])
    seen["waited"] = time.monotonic() - started
    seen["weights"] = training.state()
    guard.close()
    return seen


def _trapped_loss(training: TrainingRun, trap: _Trap) -> Callable[[Any, Any], Tensor]:
    replays = 0

    def loss(model: Any, batch: Any) -> Tensor:
        nonlocal replays
        found = models.token_loss(model, batch)
        if training.injector.training:
            replays = 0
            found.register_hook(lambda gradient: trap.spring("backward"))
        else:
            replays += 1
            trap.spring("replay" if replays == 1 else "repeats")
        return found

    return loss


@contextmanager
def _traps(trap: _Trap) -> Iterator[None]:
    def trapped(where: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fingerprint(*args: Any, **kwargs: Any) -> Tensor:
            trap.spring(where)
            return original(*args, **kwargs)

        return fingerprint

    with (
        patch.object(numerics, "fingerprint_tensors", trapped("numerics", fingerprint_tensors)),
        patch.object(replication, "fingerprint_tensors", _after_update(trap, fingerprint_tensors)),
        patch.object(run_files, "sync_folder", lambda folder: trap.spring("incident")),
    ):
        yield


def _after_update(trap: _Trap, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The comparison of tensors serves premises and replicas; the latter also have optimizer state."""

    def fingerprint(tensors: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if len(tensors) > len([one for one in tensors if one.requires_grad]):
            trap.spring("replicas")
        return original(tensors, *args, **kwargs)

    return fingerprint


def disk_refuses(place: Rank, refused: str) -> Seen:
    """A fault is found, and its incident cannot be written: the corruption must be told all the same."""
    training = TrainingRun(place, Plan(faults=(Fault("matmul", 1),), policy={"audit": "gradients"}))
    with training.make_guard() as guard:
        incidents = place.run_dir / "incidents"
        torch.distributed.barrier()
        if place.rank == 0:
            incidents.rmdir()
            incidents.write_text("a file where the folder was")
        torch.distributed.barrier()
        try:
            for step in training.steps():
                training.forward_backward(guard, step)
                guard.step()
        except BitwitnessError as error:
            return {"error": described(error, step)}
    return {"error": None}
