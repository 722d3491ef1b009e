"""*replay*: another node recomputes a rank's micro-batch, and must end with the same bits.

It is the only check that sees finite wrong arithmetic on the way to the gradient. First come the premises: owner and
witness must hold the same parameters and the same input, or the comparison would say nothing about the arithmetic. On a
disagreement everybody replays once more for a third node, everybody repeats, and `verdict` judges what came out.

Source: replay by the next node's rank, a third opinion on disagreement and repeats that tell transient from persistent
follow the checks published for SageMaker HyperPod (AWS, 2026). Comparing each parameter's *local* gradient instead of the
loss is ours: it also sees the backward, before the update, on the right rank.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bitwitness.errors import GuardFailure, WorkloadError
from bitwitness.evidence import NONFINITE, Observation
from bitwitness.guard import calibration, parcel, seams
from bitwitness.guard.checks.base import Check
from bitwitness.guard.job import Job, Outcome, Step
from bitwitness.guard.replication import compare
from bitwitness.guard.rewind import random_state_kept
from bitwitness.guard.workload import MicroBatch, Result, out_of_memory_reported

logger = logging.getLogger(__name__)

REPEATS = 3
"""How often every run is repeated once somebody disagrees."""


@dataclass
class _Case:
    """Somebody's micro-batches, to be run again here.

    `run_gradients`: whether the backward runs too, so that it matters whether gradients are finite; `compare_gradients`:
    whether their digests are part of the value as well (not where the gradients of this workload do not repeat).
    """

    owner: int
    states: list[dict[str, Any]]
    expected: list[Result]
    triage: bool
    run_gradients: bool
    compare_gradients: bool

    def value(self) -> str:
        """What the owner's own training produced."""
        return NONFINITE if self.triage else self.value_of(self.expected)

    def value_of(self, results: Sequence[Result]) -> str:
        """The value of these micro-batches, run one after another."""
        if self.run_gradients and not all(one.gradients_are_finite for one in results):
            return NONFINITE
        return _combined([one.value(self.compare_gradients) for one in results])


@dataclass
class _Run:
    """One run of a case: its results, or why there are none. `input` is a digest of the rebuilt batches, if rebuilt."""

    results: list[Result]
    error: str = ""
    input: str = ""
    input_differs: bool = False

    def value(self, case: _Case) -> str:
        """What this run produced; empty where it could not."""
        return case.value_of(self.results) if self.results else ""


class Replay(Check):
    """A witness on another node recomputes one micro-batch of each rank, every `audit_every` steps."""

    name = "replay"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.level: Literal["gradients", "loss", "off"] | None = "off" if job.policy.audit == "off" else None

    def wants_gradients(self, step: Step, micro: int) -> bool:
        """The first micro-batch until it is known what repeats, then the audited one."""
        if self.level is None:
            return micro == 0
        return self.level == "gradients" and step.audit and micro == step.audited

    def before_update(self, step: Step) -> Outcome | None:
        """Find out what repeats, if not known yet; then audit if due, or whatever numerics asks for."""
        if self.level == "off":
            return None
        if step.nonfinite:
            return self._triage(step)
        first = self.level is None
        if first:
            self.level = calibration.calibrate(self.job, step)
        return self._audit(step) if step.audit or first else None

    # The scheduled audit ---------------------------------------------------------------------------------------------

    def _audit(self, step: Step) -> Outcome:
        micro = step.micros[min(step.audited, len(step.micros) - 1)]
        level = "gradients" if self.level == "gradients" and micro.gradients is not None else "loss"
        detail = {"level": level, "micro": micro.index, **self._witnessed()}
        problem = self._unlike_settings([micro])
        if problem:
            return Outcome(self.name, "unverified", reason=problem, detail=detail)
        changed = self._changed_batches(step, [micro])
        if changed:
            return Outcome("input", "failed", changed, "a batch changed after its forward began", detail)
        differing = compare(
            self.job.channel, "replay premises", step.index, lambda: self._premises(step, micro), self.job.seed
        )
        if differing:
            reason = (
                "the ranks hold different parameters or buffers: no replay compares anything until they agree again"
            )
            return Outcome("replicas", "failed", tuple(differing), reason, detail)
        cases = self._send([micro], 1, None)
        runs: list[_Run] = []

        def replay() -> Sequence[int]:
            runs.extend(self._run(step, case, "replay") for case in cases)
            differ = any(_disagree(case, run) for case, run in zip(cases, runs, strict=True))
            return [differ, any(run.error for run in runs), any(case.value() == NONFINITE for case in cases)]

        differ, out_of_memory, nonfinite = self.job.channel.max(self.name, 3, replay).tolist()
        if out_of_memory:
            reason = next((run.error for run in runs if run.error), "out of memory on another rank")
            return Outcome(self.name, "unverified", reason=f"skipped by all ranks: {reason}", detail=detail)
        if not differ and nonfinite:
            reason = "a result is non-finite wherever it was run, which is no evidence of health"
            return Outcome(self.name, "unverified", reason=reason, detail=detail)
        if not differ:
            return Outcome(self.name, "passed", detail=detail)
        return self._escalate(step, [micro], list(zip(cases, runs, strict=True)), None, detail)

    def _unlike_settings(self, micros: Sequence[MicroBatch]) -> str:
        """Why settings forbid a comparison: some ranks have others, or changed theirs since the forward. Else empty."""

        def measure() -> Sequence[int]:
            now = self.job.workload.settings.capture()
            changed = any(micro.settings != now for micro in micros)
            digest = hashlib.blake2b(repr(sorted(now.items())).encode(), digest_size=7).digest()
            value = int.from_bytes(digest, "little")
            return [changed, value, ~value]

        changed, most, least = self.job.channel.max("replay premises", 3, measure).tolist()
        if not changed and most == ~least:
            return ""
        seen = self.job.channel.gather(
            "replay premises", lambda: (micros[0].settings, self.job.workload.settings.capture())
        )
        problem = _unlike(seen)
        if self.job.rank == 0:
            logger.warning("this audit compares nothing: %s", problem)
        return problem

    def _changed_batches(self, step: Step, micros: Sequence[MicroBatch]) -> tuple[Observation, ...]:
        """The ranks whose batch is not what it was on entry; without a batch made anew, a replay would say nothing."""
        if self.job.rebuild_batch is not None:
            return ()
        now: list[Tensor] = []

        def measure() -> Sequence[int]:
            now.extend(self.job.workload.batch_digests(micro.batch).cpu() for micro in micros)
            return [not all(torch.equal(new, micro.digests.cpu()) for new, micro in zip(now, micros, strict=True))]

        if not self.job.channel.max("replay premises", 1, measure)[0]:
            return ()
        seen = self.job.channel.gather(
            "replay premises", lambda: (_input_digest([micro.digests for micro in micros]), _input_digest(now))
        )
        return tuple(
            Observation("input", step.index, rank, "original", value=then, repeats=(later,), owner=rank)
            for rank, (then, later) in enumerate(seen)
            if then != later
        )

    def _premises(self, step: Step, micro: MicroBatch) -> dict[str, Tensor]:
        """What owner and witness must hold alike: parameters, and the buffers that DDP broadcasts."""
        held: dict[str, Tensor] = dict(self.job.module.named_parameters())
        if self.job.broadcasts_buffers:
            changing = micro.buffers_are_shared and step.uniform
            for name, buffer in micro.buffers.items():
                if changing or name not in micro.changing:
                    held[f"buffer {name}"] = buffer
        return held

    # Non-finite numbers: whose are they? -----------------------------------------------------------------------------

    def _triage(self, step: Step) -> Outcome:
        """Replay every micro-batch of the ranks with a non-finite gradient, on two other nodes."""
        detail = {"level": "triage", **self._witnessed()}
        problem = self._unlike_settings(step.micros)
        if problem:
            return Outcome(self.name, "unverified", reason=problem, detail=detail, force_audit=self.level is None)
        changed = self._changed_batches(step, step.micros)
        if changed:
            return Outcome("input", "failed", changed, "a batch changed after its forward began", detail)
        differing = compare(
            self.job.channel,
            "replay premises",
            step.index,
            lambda: dict(self.job.module.named_parameters()),
            self.job.seed,
        )
        if differing:
            return Outcome("replicas", "failed", tuple(differing), "the ranks hold different parameters", detail)
        cases = self._send(step.micros, 1, step.nonfinite)
        firsts: list[tuple[_Case, _Run]] = []

        def replay() -> Sequence[int]:
            firsts.extend((case, self._run(step, case, "replay")) for case in cases)
            return ()

        self.job.channel.max("replay triage", 0, replay)
        outcome = self._escalate(step, step.micros, firsts, step.nonfinite, detail)
        return replace(outcome, force_audit=self.level is None)

    # On a disagreement: a third node, and repeats --------------------------------------------------------------------

    def _escalate(
        self,
        step: Step,
        micros: Sequence[MicroBatch],
        firsts: Sequence[tuple[_Case, _Run]],
        owners: Sequence[int] | None,
        detail: Mapping[str, Any],
    ) -> Outcome:
        """Everybody replays at the second offset, everybody repeats, and every run is shown to every rank."""
        seconds = self._send(micros, 2, owners)

        def examine() -> list[Observation]:
            seen: list[Observation] = []
            if owners is None or self.job.rank in owners:
                seen += self._observe(step, self._own_case(micros, owners is not None), None)
            for case, first in firsts:
                if case.owner != self.job.rank:
                    seen += self._observe(step, case, first)
            for case in seconds:
                seen += self._observe(step, case, self._run(step, case, "arbiter"))
            return seen

        try:
            gathered = [seen for of_rank in self.job.channel.gather("replay repeats", examine) for seen in of_rank]
        except GuardFailure as failure:
            what = "a gradient was not finite" if owners else "a replay had disagreed"
            raise type(failure)(
                f"Before this happened, {what} at step {step.index}: trust no update of it. {failure}"
            ) from failure
        return Outcome(self.name, "failed", tuple(_without_unequal_inputs(gathered)), detail=detail)

    def _observe(self, step: Step, case: _Case, first: _Run | None) -> list[Observation]:
        """This rank's runs of a case as observations: of the result, and of the input where it was rebuilt.

        `first` is a witness's first replay; None where the case is this rank's own, whose first run was training itself.
        """
        repeats = [self._run(step, case, "rerun") for _ in range(REPEATS)]
        runs = repeats if first is None else [first, *repeats]
        seen = Observation(
            "replay",
            step.index,
            self.job.rank,
            "original" if first is None else "witness",
            value=case.value() if first is None else first.value(case),
            repeats=tuple(run.value(case) for run in repeats),
            owner=case.owner,
            micro=None if case.triage else case.states[0]["index"],
            error=next((run.error for run in runs if run.error), ""),
            detail=self._differences(case, runs),
        )
        if self.job.rebuild_batch is None:
            return [seen]
        value = _input_digest([state["digests"] for state in case.states]) if first is None else first.input
        return [seen, replace(seen, check="input", value=value, repeats=tuple(run.input for run in repeats), detail={})]

    def _differences(self, case: _Case, runs: Sequence[_Run]) -> dict[str, Any]:
        """In what these runs differ from training on the owner: the names of parameters, and whether the loss does."""
        names: set[str] = set()
        loss = False
        for run in runs:
            for expected, result in zip(case.expected, run.results, strict=False):
                loss = loss or not torch.equal(expected.loss, result.loss)
                if case.compare_gradients and expected.gradients is not None and result.gradients is not None:
                    rows = (expected.gradients != result.gradients).any(dim=1).tolist()
                    names |= {name for name, differs in zip(self.job.workload.trained, rows, strict=True) if differs}
        ordered = [name for name in self.job.workload.trained if name in names]
        if not ordered and not loss:
            return {}
        return {"loss_differs": loss, "gradients_differing": len(ordered), "differs": ordered[:20]}

    # Sending and running ---------------------------------------------------------------------------------------------

    def _send(self, micros: Sequence[MicroBatch], offset: int, owners: Sequence[int] | None) -> list[_Case]:
        """Ship micro-batches to the witness at this offset; what arrived here, by owner. `owners`: a triage of theirs."""
        job = self.job

        def pack() -> dict[int, Tensor]:
            witness = self._witness(offset)
            if witness is None or (owners is not None and job.rank not in owners):
                return {}
            with_batch = job.rebuild_batch is None
            states = [micro.state(with_batch, ship_all_buffers=not job.broadcasts_buffers) for micro in micros]
            expected = [micro.result(job.seed) for micro in micros]
            return {witness: parcel.pack((job.rank, states, expected), job.channel.device)}

        arrived = job.channel.exchange(f"replay exchange {offset}", pack)
        cases = []
        for _, content in sorted(arrived.items()):
            owner, states, expected = parcel.unpack(content, job.device)
            cases.append(self._case(owner, states, expected, owners is not None))
        return cases

    def _own_case(self, micros: Sequence[MicroBatch], triage: bool) -> _Case:
        states = [micro.state(True, ship_all_buffers=True) for micro in micros]
        return self._case(self.job.rank, states, [micro.result(self.job.seed) for micro in micros], triage)

    def _case(self, owner: int, states: list[dict[str, Any]], expected: list[Result], triage: bool) -> _Case:
        captured = self.level == "gradients" and all(result.gradients is not None for result in expected)
        compare_gradients = self.level != "loss" if triage else captured
        return _Case(owner, states, expected, triage, triage or captured, compare_gradients)

    def _run(self, step: Step, case: _Case, work: seams.Work) -> _Run:
        """Run a case once, here. A lack of memory is reported in the run; other errors are raised.

        A triage needs gradients even where they are known not to replay (reentrant checkpointing): then nobody can tell.
        """
        try:
            with seams.doing(work, step.index):
                return self._run_once(step, case)
        except (WorkloadError, RuntimeError) as error:
            if not case.triage:
                raise
            logger.debug("a triage could not replay", exc_info=True)
            return _Run([], error=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")

    def _run_once(self, step: Step, case: _Case) -> _Run:
        job = self.job
        run = _Run([])
        digests: list[Tensor] = []
        with out_of_memory_reported() as lacking:
            for state in case.states:
                current = dict(state)
                if job.rebuild_batch is not None:
                    current["batch"], rebuilt = self._rebuild(job.rebuild_batch, step, case.owner, state)
                    digests.append(rebuilt)
                # What the owner did not ship is alike everywhere.
                buffers = {**step.micros[0].buffers, **state["buffers"]}
                run.results.append(job.workload.replay(current, buffers, case.run_gradients))
        if lacking:
            return _Run([], error=lacking[0])
        if digests:
            run.input = _input_digest(digests)
            run.input_differs = run.input != _input_digest([state["digests"] for state in case.states])
        return run

    def _rebuild(
        self, rebuild: Callable[[int, int, int], Any], step: Step, owner: int, state: Mapping[str, Any]
    ) -> tuple[Any, Tensor]:
        with random_state_kept(self.job.device, self.job.workload.generators):
            batch = rebuild(step.index, owner, state["index"])
        if seams.probe is not None:
            seams.probe.rebuilt(batch)
        return batch, self.job.workload.batch_digests(batch)

    def _witness(self, offset: int) -> int | None:
        """Who replays for this rank. A single process can only repeat its own work, which is no evidence of health."""
        if self.job.channel.world_size == 1:
            return 0 if offset == 1 else None
        return self.job.topology.witness_of(self.job.rank, offset)

    def _witnessed(self) -> dict[str, Any]:
        witness = self._witness(1)
        if witness == self.job.rank:
            return {"witness": "self: no evidence of health"}
        return {"witness": witness}


def _unlike(seen: Sequence[tuple[dict[str, str], dict[str, str]]]) -> str:
    """In which settings ranks differ, or differ from what they were in the forward, as a sentence."""
    usual = Counter(tuple(sorted(then.items())) for then, _ in seen).most_common(1)[0][0]
    for rank, (then, now) in enumerate(seen):
        for name, value in usual:
            for when, own in (("in the forward", then), ("since the forward", now)):
                if own.get(name, "") != value:
                    mine, others = own.get(name, "") or "none", value or "none"
                    return f"rank {rank} has other settings {when}: {name} {mine[:120]}, elsewhere {others[:120]}"
    return "the ranks have other settings than in the forward"


def _disagree(case: _Case, run: _Run) -> bool:
    return not run.error and (run.input_differs or run.value(case) != case.value())


def _combined(values: Sequence[str]) -> str:
    """The value of several micro-batches run one after another."""
    if NONFINITE in values:
        return NONFINITE
    return values[0] if len(values) == 1 else hashlib.blake2b("".join(values).encode(), digest_size=12).hexdigest()


def _input_digest(digests: Sequence[Tensor]) -> str:
    content = b"".join(table.cpu().numpy().tobytes() for table in digests)
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _without_unequal_inputs(observations: Sequence[Observation]) -> list[Observation]:
    """Leave out replays from unequal inputs, which say nothing, and inputs on which everybody agrees."""
    inputs: dict[int | None, set[str]] = {}
    for seen in observations:
        if seen.check == "input":
            inputs.setdefault(seen.owner, set()).update(seen.runs)
    unequal = {owner for owner, values in inputs.items() if len(values) > 1}
    return [seen for seen in observations if (seen.check == "input") == (seen.owner in unequal)]
