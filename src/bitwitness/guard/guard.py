"""`Guard`: the order of a step, and nothing of how a check works.

One ordered protocol per step is what makes a hit mean something: what was seen before the all-reduce, after it, before the
update and after it are four different statements about who was wrong. The order is DESIGN section 3; each check has its
own file, `agreement` is how the ranks talk, `verdict` is who is blamed.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from bitwitness.errors import ConfigurationError, CorruptionDetected, GuardFailure, RunFilesError, WorkloadError
from bitwitness.evidence import History, Verdict
from bitwitness.guard import reaction, seams, start
from bitwitness.guard.agreement import Channel
from bitwitness.guard.between import Between
from bitwitness.guard.checkpoints import Keeper, ReadBack, Staged, Standing
from bitwitness.guard.checks.base import Check
from bitwitness.guard.checks.numerics import Numerics
from bitwitness.guard.checks.replay import Replay
from bitwitness.guard.checks.replicas import Replicas
from bitwitness.guard.gradients import LocalGradients
from bitwitness.guard.incidents import write_incident
from bitwitness.guard.job import Job, Outcome, RebuildBatch, Step, draw
from bitwitness.guard.ledger import Ledger
from bitwitness.guard.loop import Micro, begin, clear_gradients, rerun, update, warm_up
from bitwitness.guard.metrics import GUARD, Metrics
from bitwitness.guard.rewind import BufferRecorder, UserGenerator, check_generators, deterministic
from bitwitness.guard.snapshot import restore_buffers
from bitwitness.guard.workload import LossFunction, Workload
from bitwitness.policy import Policy, Reaction
from bitwitness.verdict import decide

logger = logging.getLogger("bitwitness")

CHECKS: tuple[type[Check], ...] = (Numerics, Replay, Replicas)
"""Which checks run, in the order in which they run at each place of a step."""

_LOST_COLLECTIVE = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
"""How the errors of a collective of the job read, when a rank was lost."""

_guarded: WeakSet[nn.Module] = WeakSet()


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
        stateful: what else a checkpoint must hold, by name: anything with `state_dict()` and `load_state_dict()`, e.g. the data
            loader, the scheduler, an average of the weights. Saved for each rank.

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
        stateful: Mapping[str, Any] | None = None,
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
        self._skips = 0
        self._known_incidents: tuple[str, ...] = ()
        self._failed: dict[str, str] = {}  # in shadow mode, where the weights take what is wrong
        self._warm_up_due = False
        self._should_stop = False
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
            start.check_stateful(stateful)
            self._files.create()
            return {**start.facts_of_rank(rank, device), "policy": chosen.to_json(), "seed": secrets.randbits(64)}

        facts = channel.gather("start", check)
        if any(one["policy"] != facts[0]["policy"] for one in facts):
            raise ConfigurationError("the ranks were given different policies: give every rank the same")
        self.topology = channel.topology = start.place(facts)
        channel.gather("start", lambda: start.refuse_quarantined(self._files, self.topology.placements[rank]))
        compiled = start.is_compiled(model, outer, module, loss_fn)
        self.limits = start.limits(self.topology, chosen, rebuild_batch is not None, compiled)
        self.policy = policy = start.allowed(chosen, self.topology, compiled)
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
            can_rerun=loss_fn is not None,
        )
        self._keeper = Keeper(self.job, self._files, stateful or {})
        self._training_model = model
        self._loss_fn = loss_fn
        self._buffers = BufferRecorder(module, compiled)
        self._metrics = Metrics(device, reports=rank == 0)
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
        if seams.probe is not None:
            seams.probe.guarded(self.job)
        # The first step is always audited: what differs between ranks from the beginning is configuration, and whoever
        # differs later did not.
        self._force_audit = True
        self._step = self._new_step()

    # Driving it, the short way ---------------------------------------------------------------------------------------

    def forward_backward(self, batch: Any, last: bool = True) -> Tensor:
        """Run forward and backward of one micro-batch; the loss, detached. Read it after `step()`, which may run the step again.

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
            update(self.job, max_grad_norm, self._step.gradient_norm)
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
        self.job.channel.goes_on()
        if self._warm_up_due:
            self._warm_up(batch)
        mark = self._metrics.begins()
        self.job.channel.beat(step.index, f"micro-batch {index}")
        wanted = any(check.wants_gradients(step, index) for check in self.checks)
        ddp = self.job.ddp
        record = begin(self.job, step, batch)
        self._buffers.arm(ddp)
        self.job.gradients.begin(wanted, last)
        self._metrics.took(GUARD, mark)
        try:
            with ddp.no_sync() if ddp is not None and not last else nullcontext(), deterministic(record.deterministic):
                yield Micro(self.job, record)
            if record.loss is None:
                raise WorkloadError("micro.backward() was not called inside guard.microbatch()")
        except BaseException as error:
            self._abandon_step(error)
            raise
        mark = self._metrics.mark()
        captured = self.job.gradients.end()
        if captured is not None:
            record.gradients, record.gradients_are_finite = captured
        record.buffers, record.changing = self._buffers.take(), self._buffers.changing
        self._metrics.took(GUARD, mark)
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
        self._between.step_ended(self._step_index - 1)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Go on from the newest checkpoint of this run that can be trusted; the step to go on with, 0 if there is none.

        Call it on every rank, before the first step and before an iterator is made of the data loader. It puts back the
        model, the optimizers, the scaler, every rank's random states and what was given as `stateful`. Damaged checkpoints, and
        those that an incident casts doubt on, are refused by name in the log, and the one before is taken.

        Raises:
            CheckpointError: there are checkpoints and none of them can be used; nothing was started.
            ConfigurationError: the checkpoint is of another job (number of ranks, model, optimizers), or a step was run already.
        """
        self._check_usable()
        if self._step_index or self._step.micros:
            raise ConfigurationError("resume() after a step: call it once, before the loop")
        resumed = self._keeper.resume()
        if resumed is None:
            return 0
        label = resumed.label
        self._step_index, self._last_passed = label.step, dict(label.passed)
        if start.is_same_run(label, self.topology):
            # Nothing was moved or changed since: what differs now did not differ then.
            self._compared.update(label.compared)
        self._warm_up_due = label.step > 0
        self._force_audit = not self.policy.deterministic_audits  # a mode that changes bits keeps to the schedule
        self._step = self._new_step()
        refused = [list(one) for one in resumed.refused]
        self._ledger.event("resume", {"step": label.step, "checkpoint": str(resumed.path), "refused": refused})
        if self.job.rank == 0:
            # Whoever supervises waits for this line.
            level = logging.WARNING if label.supervision or refused else logging.INFO
            logger.log(level, "resumed at step %d from %s, saved %s", label.step, resumed.path, label.saved)
        return label.step

    def save_checkpoint(self) -> Path:
        """Save what `resume` restores, between two steps and on every rank; the path of the checkpoint.

        The replicas are compared first, whatever is due: what has parted is not written. The files are read back by ranks on
        other nodes before the checkpoint appears under its name. Older ones are removed as `Policy(keep_checkpoints=)` says.

        Raises:
            CorruptionDetected: the replicas differ; nothing was written.
            CheckpointError: it could not be written or read back; earlier checkpoints and the training are as they were.
            GuardFailure: as `step`.
        """
        path = self._keeper.save(self._standing())
        self._ledger.event("checkpoint", {"step": self._step_index, "checkpoint": str(path)})
        return path

    def stage_checkpoint(self, path: str | os.PathLike[str], read_back: ReadBack | None = None) -> Staged:
        """Veto, and remember the weights: for writers that go on in the background. `Staged.label()` when they are done."""
        return self._keeper.stage(Path(path).absolute(), self._standing(), read_back)

    @contextmanager
    def checkpoint(self, path: str | os.PathLike[str], read_back: ReadBack | None = None) -> Iterator[Staged]:
        """Around somebody else's writer: veto before it, read-back on another node and a label after it.

        Args:
            path: the file or folder that is written, on storage that all nodes share.
            read_back: loads it, so that the stored weights can be compared as well: `path -> tensors`, named as in
                `model.state_dict()`. Without it the files are compared byte by byte as two nodes see them.

        Raises:
            CorruptionDetected: the replicas differ; the writer was not called.
            CheckpointError: what was written is not what was meant, or reads differently elsewhere; there is no label.
        """
        staged = self.stage_checkpoint(path, read_back)
        try:
            yield staged
        except Exception as error:
            staged.abandon(error)
            raise
        except BaseException as error:
            self.job.channel.raised(error)
            raise
        staged.label()

    @property
    def should_stop(self) -> bool:
        """Whether some rank was told to stop (SIGTERM under `bitwitness run`), agreed by all in the last step: save and leave."""
        return self._should_stop

    def _standing(self) -> Standing:
        """Compare the replicas, and say what is known of the weights between two steps."""
        self._check_usable()
        self.job.channel.goes_on()
        if self._step.micros or self._updated:
            raise ConfigurationError("a checkpoint in the midst of a step: save between two steps, after step()")
        self._metrics.pause()
        for check in self.checks:
            if isinstance(check, Replicas):
                outcome = check.look(self._step_index - 1)
                self._conclude([outcome], before_update=False, step=self._step_index - 1)
        return Standing(
            self._step_index,
            dict(self._last_passed),
            dict(self._failed),
            self._known_incidents,
            tuple(sorted(self._compared)),
            start.supervision_id(),
        )

    def _warm_up(self, batch: Any) -> None:
        """See `loop.warm_up`."""
        self._warm_up_due = False
        self.job.channel.beat(self._step_index, "warm-up")
        try:
            warm_up(self.job, self._loss_fn, self._training_model, batch, self._step_index)
        except BaseException as error:
            self._abandon_step(error)
            raise

    def close(self) -> None:
        """Take the guard off the model and close its journal. The model can then be guarded anew."""
        if self._closed:
            return
        self._closed = True
        _guarded.discard(self.job.model)
        self.job.gradients.close()
        self.job.workload.close()
        self._buffers.close()
        if hasattr(self, "_between"):
            self._between.close()
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
            mark = self._metrics.mark()
            for check in self.checks:
                outcome = run(check)
                mark = self._metrics.took(check.name, mark)
                if outcome is not None:
                    outcomes.append(outcome)
            self._should_stop = self._should_stop or step.stop_requested
            return self._conclude(outcomes, before_update, step.index)
        except GuardFailure as failure:
            self._ledger.event("guard_failure", {"step": step.index, "error": str(failure)})
            raise

    def _conclude(self, outcomes: Sequence[Outcome], before_update: bool, step: int) -> bool:
        """Account for what the checks said, and act on the verdict."""
        observations = tuple(seen for outcome in outcomes for seen in outcome.observations)
        overflow = self._step.sum_may_overflow
        history = History(self._last_passed, frozenset(self._compared), self._reductions_agreed, overflow)
        verdict = decide(observations, self.topology, history, step)
        for outcome in outcomes:
            self._ledger.note(step, outcome)
            self._force_audit = self._force_audit or outcome.force_audit
            if outcome.outcome == "passed":
                self._passed(outcome, step)
            elif outcome.check == "numerics" and any(seen.place == "reduced" for seen in outcome.observations):
                self._reductions_agreed = False
        self._ledger.observations(observations, self.job.rank)
        if verdict.status == "clean":
            if before_update:
                self._skips = 0
            return True
        return self._react(verdict, observations, history, before_update)

    def _passed(self, outcome: Outcome, step: int) -> None:
        self._last_passed[outcome.check] = step
        self._compared.add(outcome.check)
        if outcome.check == "replicas":
            self._reductions_agreed = True
        if outcome.check == "replay" and self.job.rebuild_batch is not None:
            self._last_passed["input"] = step
            self._compared.add("input")
        self._recorded = {signature for signature in self._recorded if signature[0] != outcome.check}

    def _react(self, verdict: Verdict, observations: tuple[Any, ...], history: History, before_update: bool) -> bool:
        """Make the incident durable, then do what the policy says."""
        self._ledger.event("verdict", {"step": verdict.step, "verdict": verdict.to_json()})
        signature = (verdict.check, verdict.kind, verdict.ranks, verdict.candidates)
        if self.policy.on_detection == "record" and signature in self._recorded:
            return True
        lost: GuardFailure | None = None
        try:
            path, problem = write_incident(self.job, self._files, self._step, verdict, observations, history)
        except GuardFailure as failure:
            # A rank that dies now must not turn known corruption into a mishap of the guard.
            path, problem, lost = None, f"No incident was written: {failure}", failure
        self._recorded.add(signature)
        if self.job.rank == 0:
            logger.error("%s: %s (incident: %s)", verdict.headline(), verdict.reason, path or problem)
        if lost is None:
            chosen, note = reaction.choose(self.job, self._step, verdict, path, before_update, self._skips)
            problem = ". ".join(part for part in (problem, note) if part)
            if chosen != "raise":
                return self._go_on(chosen, verdict, path)
        elif self.policy.on_detection == "record":
            raise lost
        if before_update:
            clear_gradients(self.job)
            self._end_step()
        raise CorruptionDetected(verdict, path, problem) from lost

    def _go_on(self, chosen: Reaction, verdict: Verdict, path: Path | None) -> bool:
        """Do what the policy says instead of raising. Whether this step's update is to be made."""
        if chosen == "record":
            self._failed[str(verdict.check)] = verdict.headline()
            return True
        if path is not None:
            self._known_incidents = (*self._known_incidents, path.name)
        first, known = self._step, (self._known_incidents, dict(self._failed))
        clear_gradients(self.job)
        restore_buffers(self.job.module, first.micros[0].buffers)
        if chosen == "skip":
            self._skips += 1
            self._note_action(path, "skipped", step=first.index)
            return False
        outcome = "unknown"
        try:
            self._rerun(first)
            made = self._run_checks(lambda check: check.before_update(self._step), before_update=True)
            outcome = "right" if (self._known_incidents, self._failed) == known else "wrong again"
            return made
        except CorruptionDetected:
            outcome = "wrong again"
            raise
        finally:
            self._note_action(path, "retried", step=first.index, outcome=outcome)

    def _rerun(self, first: Step) -> None:
        """Run the micro-batches of this step again, from the same random states, and have them audited."""
        self.job.gradients.abandon()
        self._step = Step(first.index, True, first.audited, deterministic=first.deterministic, retried=True)
        self._last_seen = False
        rerun(self.job, first, self._step, self.forward_backward)

    def _note_action(self, path: Path | None, action: str, **fields: Any) -> None:
        """Leave word in the incident of what was done about it."""
        self._ledger.event("action", {"action": action, **fields})
        if path is not None and self.job.rank == 0:
            with suppress(RunFilesError):
                self._files.note_action(path.name, action, **fields)

    def _new_step(self) -> Step:
        index = self._step_index
        audit = self.policy.audit_due(index) or (self._force_audit and self.policy.audit != "off")
        self._force_audit = False
        self._last_seen = False
        self._updated = False
        audited = draw(self.job.seed, index) % self._expected_micros
        return Step(index, audit, audited, deterministic=audit and self.policy.deterministic_audits)

    def _end_step(self) -> None:
        self._expected_micros = max(1, len(self._step.micros))
        if self._metrics.step_ended(self._step):
            self._ledger.steps()
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

    # Beginnings ------------------------------------------------------------------------------------------------------

    def _start_files(self) -> None:
        job = self.job

        def write() -> tuple[tuple[str, ...], str, str]:
            self._ledger = Ledger(self._files.journal(job.rank), self._metrics)
            if job.rank != 0:
                return (), "", ""
            self._files.discard_staged()
            run = start.run_id(self._files)
            self._files.write_run(start.description(job, self.limits, run))
            return tuple(path.name for path in self._files.incidents()), run, start.start_id()

        # What was found before this start is dealt with: either it starts anew, or resume() keeps clear of it.
        self._known_incidents, self._keeper.run, job.start_id = job.channel.gather("run files", write)[0]
        about = {"world_size": job.channel.world_size, "node": self.topology.node_of(job.rank)}
        self._ledger.event("start", {**about, "start_id": job.start_id, **start.supervision()})
        self._between = Between(job, self._files.path, self._ledger.event)
        if job.rank == 0:
            for limit in self.limits:
                logger.warning("%s", limit)

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigurationError("this guard is closed: make a new one")


def _no_loss_function(model: Any, batch: Any) -> Tensor:
    raise AssertionError("a replay without loss_fn")
