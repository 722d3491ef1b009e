"""Whether faults are possible in a job, found out before any of them is tried: `python -m bitwitness.faults.survey`.

A campaign that stops after an hour because a bit lies outside of a dtype has wasted the hour. Shapes and dtypes of
activations are known to nobody but the model, under autocast least of all, so one step of the job is run, in a process of
its own, and every site is looked at.
"""

from __future__ import annotations

from bitwitness.supervise.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before torch, whose import takes seconds

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.faults import damage
from bitwitness.faults.active import Surveyed
from bitwitness.faults.cells import CellSpec
from bitwitness.faults.grammar import parse
from bitwitness.faults.injector import Injector
from bitwitness.faults.job import CampaignJob, Shape, find_factory, search_path
from bitwitness.faults.runner import environment
from bitwitness.faults.sites import modules_of
from bitwitness.faults.spec import MODULE_TARGETS, Fault

_DTYPES = {"ckpt": torch.uint8, "digest": torch.int64, "rng": torch.int32}
"""Of what is hit by a fault that no step of one process reaches."""


def problems(
    factory: str, options: Mapping[str, Any], runs: Sequence[tuple[str, Sequence[str], int]]
) -> dict[str, str]:
    """What is impossible about the faults of runs of one job.

    Args:
        factory: of the job.
        options: its own.
        runs: each with its key, its faults and the seed of what they draw.

    Returns:
        What is wrong, by key; runs that can be made are left out.

    Raises:
        ConfigurationError: the job itself cannot be made or does not train.
    """
    shape, rest = Shape.split(options)
    try:
        torch.manual_seed(0)
        job = find_factory(factory)(rest, 0, 0, shape.ranks)
        _one_step(job)
    except BitwitnessError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the job {factory} cannot be run: {type(error).__name__}: {error}") from error
    found: dict[str, str] = {}
    surveyed: list[tuple[str, Surveyed]] = []
    for key, lines, seed in runs:
        for number, line in enumerate(lines):
            one = Surveyed(parse(line), number, seed)
            problem = _impossible(one.fault, shape, job) or _misplaced(one, job)
            if problem:
                found.setdefault(key, problem)
            elif one.target not in _DTYPES and not one.target.startswith("comm."):
                surveyed.append((key, one))
    with Injector([one for _, one in surveyed], job.model, job.optimizers, rank=0, world_size=1) as injector:
        injector.batch(job.batch(0, 0, 0))
        _one_step(job)
    for key, one in surveyed:
        if one.problem:
            found.setdefault(key, one.problem)
        elif one.target in MODULE_TARGETS and not one.reached:
            found.setdefault(
                key,
                f"{one.fault}: it draws {', '.join(one.names(modules_of(job.model)))}, which has no {one.target} in this job",
            )
    return found


def _one_step(job: CampaignJob) -> None:
    loss = job.loss_fn(job.model, job.batch(0, 0, 0))
    (loss if job.scaler is None else job.scaler.scale(loss)).backward()
    for optimizer in job.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _impossible(fault: Fault, shape: Shape, job: CampaignJob) -> str:
    """What the numbers of the job rule out."""
    where, when = fault.where, fault.when
    if isinstance(where.rank, int) and where.rank >= shape.ranks:
        return f"{fault}: there is no rank {where.rank}, the job has {shape.ranks}"
    if when.first >= shape.steps:
        return f"{fault}: there is no step {when.first}, the job has {shape.steps}"
    if when.micro is not None and when.micro >= job.micros:
        return f"{fault}: there is no micro-batch {when.micro}, a step of the job has {job.micros}"
    if where.target.startswith("comm.") and shape.ranks < 2:
        return f"{fault}: a job of one rank communicates nothing"
    dtype = _DTYPES.get(where.target)
    if where.target.startswith("comm."):
        dtype = next(parameter.dtype for parameter in job.model.parameters())
    try:
        if dtype is not None:
            damage.check(fault.mutate, dtype)
    except ConfigurationError as error:
        return f"{fault}: {error}"
    return ""


def _misplaced(one: Surveyed, job: CampaignJob) -> str:
    """Why it cannot be put on this model, if so."""
    if one.target.startswith("comm."):
        return ""
    try:
        with Injector([one], job.model, job.optimizers, rank=0, world_size=1):
            return ""
    except ConfigurationError as error:
        return str(error)


def ask(cells: Sequence[CellSpec], path: Sequence[str] | None = None, timeout: float = 600.0) -> dict[str, str]:
    """As `problems`, for runs of one job, in a process of its own.

    Args:
        cells: the runs.
        path: where modules are looked for; None: `search_path()`.
        timeout: seconds.

    Raises:
        ConfigurationError: the job cannot be made.
    """
    factory = cells[0].factory
    runs = [(cell.key, cell.faults, cell.draws) for cell in cells]
    places = search_path() if path is None else list(path)
    request = json.dumps({"factory": factory, "options": dict(cells[0].options), "runs": runs, "path": places})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bitwitness.faults.survey"],
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the job {factory} made no step within {timeout:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        raise ConfigurationError(f"the job {factory} cannot be looked at: {lines[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise ConfigurationError(answer["error"])
    found: dict[str, str] = answer["problems"]
    return found


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.read())
    sys.path += [place for place in request["path"] if place not in sys.path]  # as a forker does
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        answer: dict[str, Any] = {"problems": problems(request["factory"], request["options"], request["runs"])}
    except ConfigurationError as error:
        answer = {"error": str(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
