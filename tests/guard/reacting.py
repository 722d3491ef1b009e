"""What is done instead of raising: steps that are run again or dropped, and functions of the user's that say which."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bitwitness import BitwitnessError, Guard
from bitwitness.evidence import Verdict
from bitwitness.runfiles import RunFiles
from tests.guard import models
from tests.guard.faults import Fault
from tests.guard.harness import Rank, Seen
from tests.guard.training import Plan, TrainingRun, described, logged, two_optimizers

RETRY = {"audit": "gradients", "on_detection": "retry"}
SKIP = {"audit": "gradients", "on_detection": "skip"}


def drawing_tokens(step: int, rank: int, micro: int) -> Any:
    """A batch that is a function of step and rank, and draws although it need not."""
    torch.rand(()), random.random()
    return models.tokens(step, rank, micro)


RETRIED = {
    "matmul": Plan(faults=(Fault("matmul", 1),)),
    "gradient": Plan(faults=(Fault("gradient x 4", 0),)),
    "nan": Plan(faults=(Fault("nan gradient", 1),)),
    "by phases": Plan(drive="phases", faults=(Fault("matmul", 1),)),
    "accumulated": Plan(accumulate=3, faults=(Fault("nan gradient", 1),)),
    "accumulated by phases": Plan(accumulate=2, drive="phases", faults=(Fault("nan gradient", 0),)),
    "batch norm": Plan(model=models.BatchNorm, faults=(Fault("matmul", 1),)),
    "batch norm of each rank": Plan(
        model=models.BatchNorm, ddp={"broadcast_buffers": False}, faults=(Fault("matmul", 1),)
    ),
    "every source of randomness": Plan(loss=models.random_loss, own_generators=True, faults=(Fault("matmul", 2),)),
    "scaler": Plan(loss=models.fp16_loss, scaler={"init_scale": 2.0**8}, faults=(Fault("matmul", 1),)),
    "autocast around": Plan(autocast_outside=True, drive="phases", faults=(Fault("gradient x 4", 1),)),
    "two optimizers": Plan(optimizers=two_optimizers, faults=(Fault("matmul", 1),)),
    "static graph": Plan(ddp={"static_graph": True}, faults=(Fault("matmul", 1),)),
    "bucket views": Plan(ddp={"gradient_as_bucket_view": True}, faults=(Fault("gradient x 4", 1),)),
    "the first step": Plan(faults=(Fault("nan gradient", 1, step=0),)),
    "input": Plan(rebuild=True, faults=(Fault("token", 1),)),
    "drawn batches": Plan(
        loss=models.random_loss,
        own_generators=True,
        batches=drawing_tokens,
        rebuild=True,
        faults=(Fault("matmul", 0),),
    ),
    "all-reduce": Plan(faulty_hook=True, faults=(Fault("inf in the all-reduce", 1),)),
}
"""Transient faults: the step is run again, and in the end nothing has happened."""

NEARLY_OTHERS = {
    "gradient",
    "by phases",
    "accumulated",
    "batch norm",
    "autocast around",
    "two optimizers",
    "static graph",
    "bucket views",
}
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    RETRIED = {name: plan for name, plan in RETRIED.items() if name not in NEARLY_OTHERS}

RAISED = {
    "persistent": (Plan(faults=(Fault("matmul", 1, persistent=True),)), 2, "the fault persists"),
    "after the update": (Plan(faults=(Fault("weight sign", 1),)), 2, "so the step could not be run again"),
}
"""With the step at which it must raise and words that the error must have."""


def reference(place: Rank, plan: Plan) -> Seen:
    """The same run that nobody guards and nothing befalls."""
    _seed()
    return TrainingRun(place, replace(plan, guarded=False, faults=())).run()


def _seed() -> None:
    """What a run itself does not seed."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  (one of the sources)


def retried(place: Rank, name: str) -> Seen:
    plan = RETRIED[name]
    _seed()
    hit = TrainingRun(place, replace(plan, policy=RETRY)).run()
    actions = _actions(place)
    return {"hit": hit, "reference": reference(place, plan), "actions": actions}


def raised(place: Rank, name: str) -> Seen:
    plan = RAISED[name][0]
    hit = TrainingRun(place, replace(plan, policy={**RETRY, **plan.policy})).run()
    return hit | {"actions": _actions(place)}


def _actions(place: Rank) -> list[Any]:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    files = RunFiles(place.run_dir)
    return [[(one["action"], one.get("outcome", "")) for one in files.actions(path.name)] for path in files.incidents()]


def wrong_twice(place: Rank, _: None) -> Seen:
    """Right in every replay, wrong in training and in training again."""
    run = TrainingRun(place, Plan(policy=RETRY, faults=(Fault("matmul", 1, persistent=True, where="training"),)))
    original = Guard.forward_backward

    def in_training(guard: Guard, batch: Any, last: bool = True) -> Any:
        run.injector.training = True
        try:
            return original(guard, batch, last)
        finally:
            run.injector.training = False

    with patch.object(Guard, "forward_backward", in_training):
        seen = run.run()
    return seen | {"actions": _actions(place)}


def without_loss_fn(place: Rank, _: None) -> Seen:
    """There is nothing to run again."""
    run = TrainingRun(place, Plan(drive="phases", faults=(Fault("nan gradient", 1),)))
    loss, seen = run.loss, Seen(error=None)
    run.loss = None  # type: ignore[assignment]
    run.plan = replace(run.plan, policy={"audit": "off", "on_detection": "retry"})
    with run.make_guard() as guard:
        run.loss = loss
        step = -1
        try:
            for step in run.steps():
                run._guarded_step(guard, step)
        except BitwitnessError as error:
            seen["error"] = described(error, step)
    return seen


# Skipped --------------------------------------------------------------------------------------------------------------

SKIPPED = {
    "nan": Plan(faults=(Fault("nan gradient", 1),)),
    "matmul": Plan(faults=(Fault("matmul", 1),)),
    "statistics": Plan(model=models.BatchNorm, faults=(Fault("matmul", 2),)),
    "statistics of each rank": Plan(
        model=models.BatchNorm, ddp={"broadcast_buffers": False}, drive="phases", faults=(Fault("matmul", 2),)
    ),
    "scaler": Plan(loss=models.fp16_loss, scaler={"init_scale": 2.0**8}, faults=(Fault("matmul", 1),)),
    "accumulated": Plan(accumulate=2, faults=(Fault("nan gradient", 0),)),
}


class Skipping(TrainingRun):
    """The plain loop of somebody who knows that step 2 is to be dropped."""

    def _update(self, parameters: Any) -> None:
        if self.injector.step == 2:
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._before[name])
        else:
            super()._update(parameters)

    def batch(self, step: int, micro: int) -> Any:
        if micro == 0:
            self._before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return super().batch(step, micro)


def skipped(place: Rank, name: str) -> Seen:
    plan = SKIPPED[name]
    _seed()
    hit = TrainingRun(place, replace(plan, policy=SKIP)).run()
    _seed()
    plain = Skipping(place, replace(plan, guarded=False, faults=())).run()
    return {"hit": hit, "reference": plain, "actions": _actions(place)}


@dataclass(frozen=True)
class TooMany:
    """Faults in many steps, and how many updates may be dropped in a row."""

    steps: tuple[int, ...]
    max_skips: int


def too_many(place: Rank, given: TooMany) -> Seen:
    faults = tuple(Fault("nan gradient", 1, step=step) for step in given.steps)
    return TrainingRun(place, Plan(steps=6, policy={**SKIP, "max_skips": given.max_skips}, faults=faults)).run()


def skipped_after_the_update(place: Rank, _: None) -> Seen:
    return TrainingRun(place, Plan(policy=SKIP, faults=(Fault("weight sign", 1),))).run()


# Functions of the user's ----------------------------------------------------------------------------------------------


class Callback:
    """An object that can be called, with an address in its repr."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, verdict: Verdict, incident: Path | None) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def if_transient(verdict: Verdict, incident: Path | None, otherwise: str = "raise") -> Any:
    """What a user might write."""
    return "retry" if verdict.persistence == "transient" else otherwise


class Repellent:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


CALLBACKS: dict[str, tuple[Callable[[Rank], Any], list[Any], str]] = {
    "a function": (lambda place: if_transient, ["retried"], ""),
    "a partial one": (lambda place: functools.partial(if_transient, otherwise="skip"), ["retried"], ""),
    "a lambda": (lambda place: lambda verdict, incident: "skip", ["skipped"], ""),
    "an object": (lambda place: Callback("record"), [], ""),
    "says raise": (lambda place: Callback("raise"), [], ""),
    "raises": (lambda place: Callback(ValueError("my mistake")), [], "raised ValueError: my mistake"),
    "says nothing": (lambda place: Callback(None), [], "returned None: it must return one of raise, record"),
    "says something else": (lambda place: Callback("pray"), [], "returned 'pray'"),
    "says a list": (lambda place: Callback(["skip"]), [], "returned ['skip']"),
    "says an array": (lambda place: Callback(np.zeros(3)), [], "returned array"),
    "says what cannot be shown": (lambda place: Callback(Repellent()), [], "raised RuntimeError: no"),
    "differs": (
        lambda place: Callback("skip" if place.rank == 2 else "record"),
        [],
        "did not say the same on every rank (record, skip)",
    ),
    "raises on one rank": (
        lambda place: Callback(ValueError("mine") if place.rank == 0 else "skip"),
        [],
        "did not say the same on every rank",
    ),
}
"""What is given, the actions that must be noted, and words of the error; "says raise" is an error without any."""

MUCH_ALIKE = ("a partial one", "says something else", "says a list", "raises on one rank")
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    CALLBACKS = {name: one for name, one in CALLBACKS.items() if name not in MUCH_ALIKE}


def asked(place: Rank, name: str) -> Seen:
    run = TrainingRun(
        place,
        Plan(policy={"audit": "gradients", "on_detection": CALLBACKS[name][0](place)}, faults=(Fault("matmul", 1),)),
    )
    seen = run.run()
    return seen | {"actions": _actions(place), "policy": RunFiles(place.run_dir).read_run()["policy"]["on_detection"]}


def told_where(place: Rank, _: None) -> Seen:
    """The function is given the verdict and the incident, which is on the disk by then."""
    told: list[Any] = []

    def note(verdict: Verdict, incident: Path | None) -> Any:
        drawing_tokens(0, 0, 0)
        told.append([verdict.ranks, incident is not None and (incident / "incident.json").is_file()])
        return "skip"

    _seed()
    with logged([]):
        seen = TrainingRun(
            place, Plan(policy={"audit": "gradients", "on_detection": note}, faults=(Fault("matmul", 1),))
        ).run()
    return seen | {"told": told}
