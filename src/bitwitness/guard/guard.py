"""`Guard`: the order of a step, and nothing of how a check works.

One ordered protocol per step is what makes a hit mean something: what was seen before the all-reduce, after it, before the
update and after it are four different statements about who was wrong. The order is DESIGN section 3; each check has its
own file, `agreement` is how the ranks talk, `verdict` is who is blamed.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from bitwitness._version import __version__
from bitwitness.errors import ConfigurationError, CorruptionDetected, GuardFailure, WorkloadError
from bitwitness.evidence import Verdict
from bitwitness.guard import start
from bitwitness.guard.agreement import Channel
from bitwitness.guard.checks.base import Check
from bitwitness.guard.checks.numerics import Numerics
from bitwitness.guard.checks.replay import Replay
from bitwitness.guard.checks.replicas import Replicas
from bitwitness.guard.gradients import LocalGradients
from bitwitness.guard.incidents import write_incident
from bitwitness.guard.job import Job, Outcome, RebuildBatch, Step
from bitwitness.guard.ledger import Ledger
from bitwitness.guard.rewind import Ambient, BufferRecorder, RandomState, UserGenerator, check_generators, deterministic
from bitwitness.guard.workload import LossFunction, MicroBatch, Workload, check_loss
from bitwitness.policy import Policy
from bitwitness.runfiles import utc_now
from bitwitness.verdict import History, decide

logger = logging.getLogger("bitwitness")

CHECKS: tuple[type[Check], ...] = (Numerics, Replay, Replicas)
"""Which checks run, in the order in which they run at each place of a step."""

_LOST_COLLECTIVE = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
"""How the errors of a collective of the job read, when a rank was lost."""

_guarded: WeakSet[nn.Module] = WeakSet()


class Micro:
    """What `Guard.microbatch` hands out: the backward of this micro-batch."""

    def __init__(self, guard: Guard, record: MicroBatch) -> None:
        self._guard = guard
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
        self._record.loss = loss.detach().clone()
        scaler = self._guard.job.scaler
        if scaler is not None:
            self._record.scale = scaler.scale(torch.ones((), device=loss.device))
            loss = scaler.scale(loss)
        self._guard.job.gradients.before_backward()
        loss.backward()


class Guard:
    """Has every rank's arithmetic witnessed by another node while the job trains.

    Making a guard is collective: every rank of the job makes one, with the same settings.

    Args:
        model: DDP, or a plain module in a job of one process.
        optimizer: one optimizer or several.
        loss_fn: `compute_loss(model, batch) -> scalar`, shared by training and replay, autocast included. Only
            `Policy(audit="off")` does without it.
        run_dir: directory for journals and incidents, on storage that all nodes share.
        policy: how often to check and what to do on a hit; `Policy.load()` if not given.
        scaler: a GradScaler, if the job has one.
        generators: generators of the user's own that `loss_fn` draws from (torch, numpy, random).
        rebuild_batch: `rebuild_batch(step, rank, micro) -> batch`: with it the witness makes the batch anew, which finds
            corrupted inputs as well; without it the batch travels.
        inner_hook: the user's DDP communication hook, or `(state, hook)`.

    Raises:
        ConfigurationError: something cannot be guarded as it is; nothing was started.
        RunFilesError: `run_dir` cannot be used.
        RankLost: not every rank made a guard within the time-out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_fn: LossFunction | None = None,
        *,
        run_dir: str | os.PathLike[str],
        policy: Policy | None = None,
        scaler: GradScaler | None = None,
        generators: Sequence[UserGenerator] = (),
        rebuild_batch: RebuildBatch | None = None,
        inner_hook: Any = None,
    ) -> None:
        self._closed = False
        self._step_index = 0
        self._expected_micros = 1
        self._last_passed: dict[str, int] = {}
        self._compared: set[str] = set()
        self._reductions_agreed = True
        self._recorded: set[tuple[Any, ...]] = set()
        self._updated = False
        self._last_seen = False
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = dist.get_rank() if world_size > 1 else 0
        try:
            outer, module, device, chosen, self._files = start.look_at(model, policy, run_dir)
        except ConfigurationError as error:
            Channel(rank, world_size, torch.device("cpu"), Policy().timeout, error)
            raise
        channel = Channel(rank, world_size, device, chosen.timeout)

        def check() -> dict[str, Any]:
            if outer in _guarded:
                raise ConfigurationError(
                    "this model is already guarded: close() the other guard first, one guard per model"
                )
            start.check_optimizers(optimizer, module)
            start.check_callables(chosen, loss_fn=loss_fn, rebuild_batch=rebuild_batch)
            start.check_modes(chosen, device, scaler)
            check_generators(generators)
            self._files.create()
            return {**start.facts_of_rank(rank, device), "policy": chosen.to_json(), "seed": secrets.randbits(64)}

        facts = channel.gather("start", check)
        if any(one["policy"] != facts[0]["policy"] for one in facts):
            raise ConfigurationError("the ranks were given different policies: give every rank the same")
        self.topology = channel.topology = start.place(facts)
        self.limits = start.limits(self.topology, chosen, rebuild_batch is not None)
        self.policy = policy = start.allowed(chosen, self.topology)
        seed = facts[0]["seed"]
        workload = Workload(outer, module, loss_fn or _no_loss_function, device, seed, tuple(generators))
        gradients = LocalGradients(outer, workload, inner_hook)
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        optimizers = start.check_optimizers(optimizer, module)
        self.job = Job(
            outer,
            module,
            optimizers,
            enabled,
            policy,
            self.topology,
            channel,
            workload,
            gradients,
            rebuild_batch,
            seed,
            device,
        )
        self._training_model = model
        self._loss_fn = loss_fn
        self._buffers = BufferRecorder(module)
        _guarded.add(outer)
        self.checks = [kind(self.job) for kind in CHECKS if self.topology.is_uniform or kind is not Replicas]
        try:
            self._start_files()
            for one in self.checks:
                one.start()
        except BaseException:
            self.close()
            raise
        self._compared.add("replicas")
        # The first step is always audited: what differs between ranks from the beginning is configuration, and whoever
        # differs later did not.
        self._force_audit = True
        self._step = self._new_step()

    # Driving it, the short way ---------------------------------------------------------------------------------------

    def forward_backward(self, batch: Any, last: bool = True) -> Tensor:
        """Run forward and backward of one micro-batch; the loss, detached.

        Args:
            batch: what `loss_fn` takes.
            last: False on all but the last micro-batch of a step, which then runs under DDP's `no_sync`.
        """
        if self._loss_fn is None:
            raise ConfigurationError("forward_backward() needs loss_fn=; without it use microbatch()")
        with self.microbatch(batch, last=last) as micro:
            loss = self._loss_fn(self._training_model, batch)
            micro.backward(loss)
        return loss.detach()

    def step(self, max_grad_norm: float | None = None) -> bool:
        """Verify, clip, update, zero the gradients, verify the weights. Whether the update was made.

        Args:
            max_grad_norm: clip the gradient to this norm; None clips nothing.

        Raises:
            ConfigurationError: not a number that a norm could be clipped to; nothing was done.
            CorruptionDetected: on every rank at the same step, if the policy says `"raise"`.
            GuardFailure: the guard itself failed; says nothing about the numbers.
        """
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
            raise ConfigurationError(
                f"max_grad_norm is {max_grad_norm!r}: give a positive number, or None to clip nothing"
            )
        updated = self.verify_gradients()
        if updated:
            self._update(max_grad_norm)
        for optimizer in self.job.optimizers:
            optimizer.zero_grad()
        self.verify_weights()
        return updated

    # Driving it phase by phase ---------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, batch: Any, last: bool = True) -> Iterator[Micro]:
        """Around forward and backward of one micro-batch: captures what a replay needs. See `forward_backward`."""
        self._check_usable()
        step = self._step
        index = len(step.micros)
        if index and self._last_seen:
            raise ConfigurationError(
                "a micro-batch after the last one of a step: give last=False to all but the last, or call step()"
            )
        self.job.channel.beat(step.index, f"micro-batch {index}")
        wanted = any(check.wants_gradients(step, index) for check in self.checks)
        ddp = self.job.ddp
        record = MicroBatch(
            index=index,
            batch=batch,
            digests=self.job.workload.batch_digests(batch) if self.policy.audit != "off" else torch.zeros(0, 3),
            random=RandomState.capture(self.job.device, self.job.workload.generators),
            ambient=Ambient.capture(self.job.device),
            deterministic=step.audit and self.policy.deterministic_audits,
            settings=self.job.workload.settings.capture(),
            buffers_are_shared=ddp is not None and self.job.broadcasts_buffers and ddp.require_forward_param_sync,
        )
        self._buffers.arm()
        self.job.gradients.begin(wanted, last)
        try:
            with ddp.no_sync() if ddp is not None and not last else nullcontext(), deterministic(record.deterministic):
                yield Micro(self, record)
            if record.loss is None:
                raise WorkloadError("micro.backward() was not called inside guard.microbatch()")
        except BaseException as error:
            self._abandon_step(error)
            raise
        captured = self.job.gradients.end()
        if captured is not None:
            record.gradients, record.gradients_are_finite = captured
        record.buffers, record.changing = self._buffers.take(), self._buffers.changing
        step.micros.append(record)
        self._last_seen = last

    def verify_gradients(self) -> bool:
        """Everything that is checked before the update. False: drop this update.

        Raises:
            CorruptionDetected, GuardFailure: as `step`.
        """
        self._check_usable()
        if not self._step.micros or not self._last_seen:
            raise ConfigurationError("verify_gradients() before the last micro-batch of a step: run one with last=True")
        self._updated = True
        return self._run_checks(lambda check: check.before_update(self._step), before_update=True)

    def verify_weights(self) -> None:
        """Everything that is checked after the update; ends the step.

        Raises:
            CorruptionDetected, GuardFailure: as `step`.
        """
        self._check_usable()
        if not self._updated:
            raise ConfigurationError("verify_weights() without verify_gradients(): call both, around the update")
        try:
            self._run_checks(lambda check: check.after_update(self._step), before_update=False)
        finally:
            self._end_step()

    def close(self) -> None:
        """Take the guard off the model and close its journal. The model can then be guarded anew."""
        if self._closed:
            return
        self._closed = True
        _guarded.discard(self.job.model)
        self.job.gradients.close()
        self.job.workload.close()
        self._buffers.close()
        if hasattr(self, "_ledger"):
            self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The order of a step ---------------------------------------------------------------------------------------------

    def _run_checks(self, run: Callable[[Check], Outcome | None], before_update: bool) -> bool:
        step = self._step
        self.job.channel.beat(step.index, "verify")
        outcomes: list[Outcome] = []
        try:
            for check in self.checks:
                outcome = run(check)
                if outcome is not None:
                    outcomes.append(outcome)
            return self._conclude(outcomes, before_update)
        except GuardFailure as failure:
            self._ledger.event("guard_failure", {"step": step.index, "error": str(failure)})
            raise

    def _conclude(self, outcomes: Sequence[Outcome], before_update: bool) -> bool:
        """Account for what the checks said, and act on the verdict."""
        step = self._step
        observations = tuple(seen for outcome in outcomes for seen in outcome.observations)
        history = History(self._last_passed, frozenset(self._compared), self._reductions_agreed, step.sum_may_overflow)
        verdict = decide(observations, self.topology, history, step.index)
        for outcome in outcomes:
            self._ledger.note(step.index, outcome)
            self._force_audit = self._force_audit or outcome.force_audit
            if outcome.outcome == "passed":
                self._passed(outcome, step.index)
            elif outcome.check == "numerics" and any(seen.place == "reduced" for seen in outcome.observations):
                self._reductions_agreed = False
        self._ledger.observations(observations, self.job.rank)
        if verdict.status == "clean":
            return True
        return self._react(verdict, observations, before_update)

    def _passed(self, outcome: Outcome, step: int) -> None:
        self._last_passed[outcome.check] = step
        self._compared.add(outcome.check)
        if outcome.check == "replicas":
            self._reductions_agreed = True
        if outcome.check == "replay" and self.job.rebuild_batch is not None:
            self._last_passed["input"] = step
            self._compared.add("input")
        self._recorded = {signature for signature in self._recorded if signature[0] != outcome.check}

    def _react(self, verdict: Verdict, observations: tuple[Any, ...], before_update: bool) -> bool:
        """Make the incident durable, then do what the policy says."""
        self._ledger.event("verdict", {"step": verdict.step, "verdict": verdict.to_json()})
        signature = (verdict.check, verdict.kind, verdict.ranks, verdict.candidates)
        if self.policy.on_detection == "record" and signature in self._recorded:
            return True
        lost: GuardFailure | None = None
        try:
            path, problem = write_incident(self.job, self._files, self._step, verdict, observations)
        except GuardFailure as failure:
            # A rank that dies now must not turn known corruption into a mishap of the guard.
            path, problem, lost = None, f"No incident was written: {failure}", failure
        self._recorded.add(signature)
        if self.job.rank == 0:
            logger.error("%s: %s (incident: %s)", verdict.headline(), verdict.reason, path or problem)
        if self.policy.on_detection == "record":
            if lost is not None:
                raise lost
            return True
        if before_update:
            self._clear_gradients()
            self._end_step()
        raise CorruptionDetected(verdict, path, problem) from lost

    def _update(self, max_grad_norm: float | None) -> None:
        """Clip and update exactly as an unguarded loop does: `clip_grad_norm_` is the norm, then this scaling by it."""
        parameters = list(self.job.workload.trained.values())
        if self.job.scaler is None:
            if max_grad_norm is not None:
                assert self._step.gradient_norm is not None
                torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, self._step.gradient_norm)
            for optimizer in self.job.optimizers:
                optimizer.step()
            return
        if max_grad_norm is not None:
            for optimizer in self.job.optimizers:
                self.job.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        for optimizer in self.job.optimizers:
            self.job.scaler.step(optimizer)
        self.job.scaler.update()

    def _new_step(self) -> Step:
        index = self._step_index
        audit = self.policy.audit_due(index) or (self._force_audit and self.policy.audit != "off")
        self._force_audit = False
        self._last_seen = False
        self._updated = False
        audited = _mix(self.job.seed, index) % self._expected_micros
        return Step(index, audit, audited)

    def _end_step(self) -> None:
        self._expected_micros = max(1, len(self._step.micros))
        self._step_index += 1
        self._step = self._new_step()

    def _abandon_step(self, error: BaseException) -> None:
        """A micro-batch raised: forget the step, tell the others, and if it is they who are missed say what they told."""
        self.job.gradients.abandon()
        self._buffers.take()
        self._step.micros.clear()
        self._last_seen = False
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_COLLECTIVE):
            told = self.job.channel.who_raised()
            error.add_note(f"bitwitness: a collective of the job failed at step {self._step.index}. {told}")
        else:
            self.job.channel.raised(error)

    def _clear_gradients(self) -> None:
        for parameter in self.job.module.parameters():
            parameter.grad = None

    # Beginnings ------------------------------------------------------------------------------------------------------

    def _start_files(self) -> None:
        job = self.job

        def write() -> None:
            if job.rank == 0:
                self._files.discard_staged()
                self._files.write_run(self._description())
            self._ledger = Ledger(self._files.journal(job.rank))

        job.channel.gather("run files", write)
        self._ledger.event("start", {"world_size": job.channel.world_size, "node": self.topology.node_of(job.rank)})
        if job.rank == 0:
            for limit in self.limits:
                logger.warning("%s", limit)

    def _description(self) -> dict[str, Any]:
        return {
            "started": utc_now(),
            "bitwitness": __version__,
            "torch": torch.__version__,
            "world_size": self.job.channel.world_size,
            "placement": self.topology.to_json(),
            "policy": self.policy.to_json(),
            "fingerprint_seed": self.job.seed,
            "limits": list(self.limits),
        }

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigurationError("this guard is closed: make a new one")


def _mix(seed: int, index: int) -> int:
    """A number that looks random, the same on every rank (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _no_loss_function(model: Any, batch: Any) -> Tensor:
    raise AssertionError("a replay without loss_fn")
