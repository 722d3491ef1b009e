"""What does this workload repeat bit for bit on one device? Measured in the first step, never assumed.

A replay can only compare what repeats on healthy hardware. Asking the workload itself is the only sure way, and the first
step is the earliest moment at which it can be asked; what cannot be witnessed is then refused by name, before it could
turn into a false alarm.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bitwitness.errors import WorkloadError
from bitwitness.guard import seams
from bitwitness.guard.job import Job, Step
from bitwitness.guard.workload import NoCollectives, Result

logger = logging.getLogger(__name__)

Level = Literal["gradients", "loss"]

_REMEDIES = (
    "Policy(deterministic_audits=True) runs audited steps under deterministic algorithms; atomic additions (scatter, "
    "index_put, embedding and pooling backwards) and attention kernels are the usual causes"
)


@dataclass(frozen=True)
class _Findings:
    """What one rank found when it ran its first micro-batch twice more."""

    mutated: bool
    loss_repeats: bool
    loss_is_original: bool
    restless: tuple[str, ...]
    gradients_are_original: bool
    gradients_failed: str


def calibrate(job: Job, step: Step) -> Level:
    """The strongest level of audit that the policy allows and this workload repeats.

    A few ranks on which something does not repeat while it does elsewhere are suspicious, not a property of the workload:
    the audit that follows at once has a verdict say what it is.

    Raises:
        WorkloadError: on every rank; what the policy asks for does not repeat, or the loss function cannot be replayed.
    """
    found = job.channel.gather("calibration", lambda: _examine_apart(job, step))
    return _decide(found, job)


def _examine_apart(job: Job, step: Step) -> _Findings:
    with seams.doing("rerun", step.index):
        return _examine(job, step)


def _examine(job: Job, step: Step) -> _Findings:
    micro = step.micros[0]
    workload = job.workload
    if not torch.equal(workload.batch_digests(micro.batch).cpu(), micro.digests.cpu()):
        return _Findings(True, True, True, (), True, "")
    state = micro.state(True, ship_all_buffers=True)
    try:
        with NoCollectives():
            workload.replay(state, micro.buffers, with_gradients=False)
    except (AttributeError, LookupError, TypeError, ValueError, StopIteration) as error:
        raise WorkloadError(
            f"loss_fn trained, but cannot be replayed ({type(error).__name__}: {error}): a witness calls it with the inner "
            "module, not with DDP, and with the same batch once more, which must not be used up by the first time"
        ) from error
    failed = ""
    gradients = job.policy.audit != "loss" and micro.gradients is not None
    if gradients:
        try:
            with NoCollectives():
                workload.replay(state, micro.buffers, with_gradients=True)
        except (WorkloadError, RuntimeError) as error:
            failed = str(error).partition("\n")[0]
    once, again = (workload.replay(state, micro.buffers, gradients and not failed) for _ in range(2))
    original = micro.result(job.seed)
    return _Findings(
        mutated=False,
        loss_repeats=once.value(False) == again.value(False),
        loss_is_original=original.value(False) == once.value(False),
        restless=_differing(job, once, again),
        gradients_are_original=not gradients or bool(failed) or original.value(True) == once.value(True),
        gradients_failed=failed if gradients else ("not captured" if job.policy.audit != "loss" else ""),
    )


def _differing(job: Job, once: Result, again: Result) -> tuple[str, ...]:
    if once.gradients is None or again.gradients is None or once.value(True) == again.value(True):
        return ()
    rows = (once.gradients != again.gradients).any(dim=1).tolist()
    return tuple(name for name, differs in zip(job.workload.trained, rows, strict=True) if differs)


def _decide(found: Sequence[_Findings], job: Job) -> Level:
    """Pure: the same decision on every rank."""
    mutated = _ranks([one.mutated for one in found])
    if _widespread([one.mutated for one in found]):
        raise WorkloadError(
            f"the batch changed between the beginning of its micro-batch and step() (ranks {_some(mutated)}): loss_fn changes it "
            "in place, or the loop fills it anew too early. A witness would start from other data: copy what is changed, or "
            'use Policy(audit="off")'
        )
    restless = [not one.loss_repeats for one in found]
    if _widespread(restless):
        raise WorkloadError(
            f"the loss does not repeat: run twice from the same weights, batch and random state it gave different bits on ranks "
            f"{_some(_ranks(restless))}. Give the generators it draws from as generators=, or Policy(deterministic_audits=True), "
            'or turn replays off: Policy(audit="off")'
        )
    other = [not one.loss_is_original for one in found]
    if _widespread(other):
        raise WorkloadError(
            "replaying loss_fn repeats, but gives another loss than training computed: it keeps Python state (a counter, a "
            "schedule), or the loop computes its loss in another way than loss_fn. Let both call one function, autocast "
            'included, or use Policy(audit="off")'
        )
    if job.policy.audit == "loss":
        return "loss"
    problem = _gradient_problem(found)
    if not problem:
        return "gradients"
    if job.policy.audit == "gradients":
        raise WorkloadError(f'{problem}. {_REMEDIES}; or compare the loss only: Policy(audit="loss")')
    if job.rank == 0:
        logger.warning("audits compare the loss only: %s. %s", problem, _REMEDIES)
    return "loss"


def _gradient_problem(found: Sequence[_Findings]) -> str:
    failed = next((one.gradients_failed for one in found if one.gradients_failed), "")
    if failed:
        return f"gradients cannot be replayed: {failed}"
    restless = [bool(one.restless) for one in found]
    if _widespread(restless):
        names = next(one.restless for one in found if one.restless)
        return f"the gradient of {_some(names)} does not repeat bit for bit on ranks {_some(_ranks(restless))}"
    other = [not one.gradients_are_original for one in found]
    if _widespread(other):
        return "replayed gradients repeat, but differ from those of training"
    return ""


def _ranks(wrong: Sequence[bool]) -> list[int]:
    return [rank for rank, is_wrong in enumerate(wrong) if is_wrong]


def _widespread(wrong: Sequence[bool]) -> bool:
    return 2 * sum(wrong) >= len(wrong)


def _some(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "")
