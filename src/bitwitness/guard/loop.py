"""The pieces of a training loop that the guard runs itself: the capture before a forward, backward, update, the pass after a resume.

Each must do, bit for bit, what an unguarded loop does at that place; that is all they have in common.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import WorkloadError
from bitwitness.guard import seams
from bitwitness.guard.job import Job, Step
from bitwitness.guard.rewind import Ambient, RandomState, random_state_kept
from bitwitness.guard.snapshot import restore_buffers
from bitwitness.guard.workload import LossFunction, MicroBatch, check_loss

logger = logging.getLogger("bitwitness")


def begin(job: Job, step: Step, batch: Any) -> MicroBatch:
    """Capture what a replay of the micro-batch that is about to run will need."""
    index = len(step.micros)
    if seams.probe is not None:
        seams.probe.micro_batch(step.index, index, batch)
    ddp = job.ddp
    return MicroBatch(
        index=index,
        batch=batch,
        digests=job.workload.batch_digests(batch) if job.policy.audit != "off" else torch.zeros(0, 3),
        random=RandomState.capture(job.device, job.workload.generators),
        ambient=Ambient.capture(job.device),
        deterministic=step.deterministic,
        settings=job.workload.settings.capture(),
        buffers_are_shared=ddp is not None and job.broadcasts_buffers and ddp.require_forward_param_sync,
    )


class Micro:
    """What `Guard.microbatch` hands out: the backward of this micro-batch."""

    def __init__(self, job: Job, record: MicroBatch) -> None:
        self._job = job
        self._record = record

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the loss, scaled if the guard was given a scaler. Once per micro-batch.

        Raises:
            WorkloadError: not a scalar loss that requires a gradient, or called twice.
        """
        if self._record.loss is not None:
            raise WorkloadError(
                "micro.backward() was called twice for one micro-batch: add the losses, then call it once"
            )
        check_loss(loss)
        self._record.handed, self._record.loss = loss.detach(), loss.detach().clone()
        scaler = self._job.scaler
        if scaler is not None:
            self._record.scale = scaler.scale(torch.ones((), device=loss.device))
            loss = scaler.scale(loss)
        self._job.gradients.before_backward()
        loss.backward()


def rerun(job: Job, first: Step, again: Step, run: Callable[[Any, bool], object]) -> None:
    """Run the micro-batches of a step again, from the same random states; the losses that the caller holds become the new ones.

    `run(batch, last)` runs one, and leaves its record in `again`.
    """
    with random_state_kept(job.device, job.workload.generators):
        for record in first.micros:
            batch = record.batch
            if job.rebuild_batch is not None:
                batch = job.rebuild_batch(first.index, job.rank, record.index)
            record.random.restore(job.device, job.workload.generators)
            with record.ambient.restored():
                run(batch, record is first.micros[-1])
    with torch.no_grad():
        for record, new in zip(first.micros, again.micros, strict=True):
            assert record.handed is not None
            assert new.loss is not None
            record.handed.copy_(new.loss)


def warm_up(job: Job, loss_fn: LossFunction | None, model: Any, batch: Any, steps: int) -> None:
    """A forward and backward whose result is thrown away, so that DDP regroups its buckets as it did in the first step.

    DDP does that once, after its first backward (torch/csrc/distributed/c10d/reducer.cpp, `rebuild_buckets`), with a static graph
    after its second, and its sums round differently before and after. Whatever a pass changes is put back: random states,
    buffers, gradients. `steps`: those that were made before, of which no more than that have to be made up for.
    """
    if job.ddp is None:
        return
    if loss_fn is None:
        logger.warning("resumed without loss_fn: the first step may round its sums differently than it would have")
        return
    buffers = {name: one.clone() for name, one in job.module.named_buffers()}
    job.gradients.discarding = True
    try:
        with random_state_kept(job.device, job.workload.generators):
            for _ in range(min(steps, 2 if job.ddp.static_graph else 1)):
                loss_fn(model, batch).backward()
                restore_buffers(job.module, buffers)
                clear_gradients(job)
    finally:
        job.gradients.discarding = False


def clear_gradients(job: Job) -> None:
    """As `zero_grad()`."""
    for parameter in job.module.parameters():
        parameter.grad = None


def update(job: Job, max_grad_norm: float | None, gradient_norm: Tensor | None) -> None:
    """Clip and update exactly as an unguarded loop does: `clip_grad_norm_` is the norm, then this scaling by it."""
    parameters = list(job.workload.trained.values())
    if job.scaler is None:
        if max_grad_norm is not None:
            assert gradient_norm is not None
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, gradient_norm)
        for optimizer in job.optimizers:
            optimizer.step()
        return
    if max_grad_norm is not None:
        for optimizer in job.optimizers:
            job.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for optimizer in job.optimizers:
        job.scaler.step(optimizer)
    job.scaler.update()
