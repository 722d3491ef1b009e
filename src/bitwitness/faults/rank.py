"""One rank of one cell: it trains as any user's script does, and writes down what happened.

What it writes is a line of JSON for each thing, as it happens, because a fault may end it at any moment, and what it had
done until then is a result as well. It judges nothing: the process that forked it puts the ranks' accounts together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import BitwitnessError, CheckpointError, ConfigurationError, CorruptionDetected, GuardFailure
from bitwitness.faults.cells import CellSpec
from bitwitness.faults.injector import Injector
from bitwitness.faults.job import CampaignJob, Shape, find_factory, node_of
from bitwitness.faults.results import account_path, strikes_path
from bitwitness.guard.guard import Guard
from bitwitness.mutate import FaultDidNotLand
from bitwitness.policy import Policy

logger = logging.getLogger(__name__)

GUARD_TIMEOUT = 60.0
"""Seconds that a guard waits for a rank, unless the policy says otherwise. Nobody waits so long for one that has ended, for
which the others are killed soon; it is for a machine with more to do than its cores can."""

_LOST = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
"""How an error of a collective reads whose cause is another rank's end."""


@dataclass(frozen=True)
class Place:
    """Where a rank finds itself: `folder` is the cell's own, `weights` the file of the clean run's parameters, if any."""

    rank: int
    folder: Path
    weights: Path | None

    @property
    def run_dir(self) -> Path:
        """Where the guard writes."""
        return self.folder / "run"


class Account:
    """What a rank has to say, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def add(self, kind: str, **fields: Any) -> None:
        """Write one line; it survives the end of this process."""
        self._file.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()


def run_rank(spec: CellSpec, place: Place, store: dist.Store | None) -> str:
    """Run a cell as one of its ranks, to whatever end; which one, as the account then says as well."""
    account = Account(account_path(place.folder, place.rank))
    end, error = "finished", ""
    try:
        _run(spec, place, store, account)
    except BaseException as problem:
        logger.exception("rank %d of cell %s", place.rank, spec.key)
        end, error = _end_of(problem), f"{type(problem).__name__}: {problem}"
        if isinstance(problem, CorruptionDetected):
            account.add("verdict", verdict=problem.verdict.to_json())
    account.add("end", end=end, error=error)
    return end


def _end_of(problem: BaseException) -> str:
    """How a cell ended, as far as this rank knows; `lost` where it only knows that another one is gone."""
    match problem:
        case CorruptionDetected():
            return "detected"
        case FaultDidNotLand():
            return "not_landed"
        case GuardFailure():
            return "guard_failure"
        case ConfigurationError():
            return "refused"
        case RuntimeError() if any(sign in str(problem) for sign in _LOST):
            return "lost"
        case _:
            return "crash"


def _run(spec: CellSpec, place: Place, store: dist.Store | None, account: Account) -> None:
    shape, options = Shape.split(spec.options)
    os.environ["BITWITNESS_NODE"] = node_of(shape, place.rank)
    if store is not None:
        timeout = timedelta(seconds=2 * GUARD_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=shape.ranks, timeout=timeout)
    seed_all(spec.seed)
    job = find_factory(spec.factory)(options, spec.seed, place.rank, shape.ranks)
    seed_all(spec.seed * 1_000_003 + place.rank + 1)  # dropout: different on each rank
    training = Training(spec, shape, job, place, account)
    training.run()
    if place.rank == 0 and place.weights is not None:
        _compare_or_keep(spec, job.model, place.weights, account)
    account.add("evaluation", values=_plain(job.evaluate()))


def seed_all(seed: int) -> None:
    """Every generator that a job may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global generator is the one that jobs draw from)


class Training:
    """The loop, guarded or not. The guarded one is driven by its phases, because then the norm of the gradient is at hand."""

    def __init__(self, spec: CellSpec, shape: Shape, job: CampaignJob, place: Place, account: Account) -> None:
        self.spec, self.shape, self.job, self.place, self.account = spec, shape, job, place, account
        self.model: nn.Module = DistributedDataParallel(job.model) if dist.is_initialized() else job.model
        self.parameters = [one for one in job.model.parameters() if one.requires_grad]
        self.guard: Guard | None = None
        self.injector = self._make_injector() if spec.faults else None

    def run(self) -> None:
        """All steps, up to the one at which something ends it."""
        with self.injector if self.injector is not None else nullcontext():
            try:
                if self.spec.policy is not None:
                    self.guard = self._make_guard(self.spec.policy)
                for step in range(self.shape.steps):
                    self._step(step)
            finally:
                if self.guard is not None:
                    self.guard.close()

    def _make_injector(self) -> Injector:
        return Injector(
            self.spec.faults,
            self.model,
            self.job.optimizers,
            seed=self.spec.draws,
            rank=self.place.rank,
            world_size=self.shape.ranks,
            node=node_of(self.shape, self.place.rank),
            record=strikes_path(self.place.folder, self.place.rank),
        )

    def _make_guard(self, settings: Mapping[str, Any]) -> Guard:
        optimizers = self.job.optimizers
        chosen = {"timeout": GUARD_TIMEOUT, "checkpoint_every": self.shape.checkpoint_every, **settings}
        return Guard(
            self.model,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            self.job.loss_fn,
            run_dir=self.place.run_dir,
            policy=Policy(**chosen),
            scaler=self.job.scaler,
            rebuild_batch=self.job.batch if self.shape.rebuild else None,
        )

    def _step(self, step: int) -> None:
        if self.injector is not None and self.guard is None:
            self.injector.begin(step)
        losses = [self._micro(step, micro) for micro in range(self.job.micros)]
        made = _Made()
        try:
            self._verify_and_update(made)
        finally:  # also where the guard raises: what was done until then is seen as well
            loss = float(torch.stack([one.double() for one in losses]).sum())
            digest = digest_of(self.job.model, self.job.optimizers) if made.ended else ""
            self.account.add(
                "step", step=step, loss=plain(loss), norm=plain(made.norm), digest=digest, updated=made.updated
            )
        if self.guard is not None and self.shape.checkpoint_every and (step + 1) % self.shape.checkpoint_every == 0:
            self._save(step + 1)

    def _verify_and_update(self, made: _Made) -> None:
        if self.guard is None or self.guard.verify_gradients():
            made.norm = self._update()
            made.updated = True
        for optimizer in self.job.optimizers:
            optimizer.zero_grad()
        made.ended = True
        if self.guard is not None:
            self.guard.verify_weights()

    def _micro(self, step: int, micro: int) -> Tensor:
        last = micro == self.job.micros - 1
        batch = self.job.batch(step, self.place.rank, micro)
        if self.guard is not None:
            return self.guard.forward_backward(batch, last=last)
        if self.injector is not None:
            batch = self.injector.batch(batch)
        quiet = isinstance(self.model, DistributedDataParallel) and not last
        with self.model.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            loss = self.job.loss_fn(self.model, batch)
            (loss if self.job.scaler is None else self.job.scaler.scale(loss)).backward()
        return loss.detach()

    def _update(self) -> float | None:
        """Clip and update as a user's loop does; the norm before clipping."""
        scaler, clip = self.job.scaler, self.job.max_grad_norm
        if scaler is not None:
            for optimizer in self.job.optimizers:
                scaler.unscale_(optimizer)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parameters, clip)
        else:
            gradients = [one.grad for one in self.parameters if one.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        for optimizer in self.job.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        return float(norm)

    def _save(self, step: int) -> None:
        """Save; a save that is refused is a result, and training goes on as the guard says that it can."""
        assert self.guard is not None
        try:
            self.guard.save_checkpoint()
        except CheckpointError as error:
            self.account.add("checkpoint", step=step, published=False, problem=str(error))
            return
        except BitwitnessError as error:
            self.account.add("checkpoint", step=step, published=False, problem=str(error))
            raise
        self.account.add("checkpoint", step=step, published=True, problem="")


@dataclass
class _Made:
    """What became of a step: the norm of its gradient, whether the update was made, whether it came to its end."""

    norm: float | None = None
    updated: bool = False
    ended: bool = False


# What is written -----------------------------------------------------------------------------------------------------


def digest_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Of parameters, buffers and optimizer state, bit for bit: 32 hexadecimal digits.

    Computed without any part of the guard, which it is to judge.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        _add(digest, name, tensor)
    for optimizer in optimizers:
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                _add(digest, f"{index} {key}", value)
    return digest.hexdigest()[:32]


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        digest.update(f"{name} {value!r}\n".encode())


def plain(value: float | None) -> float | str | None:
    """A number as JSON has it: NaN and infinities as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _plain(values: Mapping[str, float]) -> dict[str, float | str | None]:
    return {name: plain(float(value)) for name, value in values.items()}


def _compare_or_keep(spec: CellSpec, model: nn.Module, file: Path, account: Account) -> None:
    """The clean run keeps its final parameters; the others say how far from them theirs are."""
    own = torch.cat([one.detach().double().reshape(-1).cpu() for one in model.parameters()])
    if spec.role == "clean":
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        torch.save(own, staged)
        staged.replace(file)
        return
    try:
        clean = torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001  (a torn file fails in many ways, and is no reason to fail for the run)
        logger.info("no drift: %s cannot be read (%s)", file.name, error)
        return
    if isinstance(clean, Tensor) and clean.shape == own.shape:
        drift = float(torch.linalg.vector_norm(own - clean) / torch.linalg.vector_norm(clean))
        account.add("drift", drift=drift if math.isfinite(drift) else None)
