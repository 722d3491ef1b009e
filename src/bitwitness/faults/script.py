"""Faults in a training script that knows nothing of them: what `BITWITNESS_FAULT` does under `bitwitness run`.

The worker calls `install` before the script. From then on the first guard that is made, or the first model that is called in
training, is the job that is hit. What landed is appended to the run's own files, so a process that is started again after
the fault was caught knows that a fault of `once` has had its turn, and goes on healthy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwitness.errors import ConfigurationError
from bitwitness.faults import record
from bitwitness.faults.grammar import parse_all
from bitwitness.faults.injector import Faults, Injector
from bitwitness.guard import seams
from bitwitness.guard.job import Job
from bitwitness.mutate import FaultDidNotLand
from bitwitness.topology import node_name

logger = logging.getLogger("bitwitness")

FAULT, SEED, RECORD = "BITWITNESS_FAULT", "BITWITNESS_FAULT_SEED", "BITWITNESS_FAULT_RECORD"
"""The faults, in the grammar or as `@` and a record; the seed of what they draw; the folder of records, by default that of the run."""


def from_environment(environment: Mapping[str, str]) -> tuple[Faults, int]:
    """The faults that are asked for, and the seed.

    Raises:
        ConfigurationError: they cannot be understood; names the variable.
    """
    text = environment.get(FAULT, "")
    try:
        seed = int(environment.get(SEED, "0"))
    except ValueError:
        raise ConfigurationError(f"{SEED}={environment[SEED]!r}: must be a whole number") from None
    try:
        return (record.read(Path(text[1:])) if text.startswith("@") else parse_all(text)), seed
    except ConfigurationError as error:
        raise ConfigurationError(f"{FAULT}: {error}") from error


class Script:
    """Waits for the job of a script, and strikes it.

    Args:
        faults: what to strike with; seed: of what they draw.
        folder: for the records of strikes.
    """

    def __init__(self, faults: Faults, seed: int, folder: Path) -> None:
        self._faults, self._seed = faults, seed
        self._rank = int(os.environ.get("RANK", "0"))
        self._record = folder / f"rank-{self._rank:05d}.jsonl"
        self._optimizers: list[torch.optim.Optimizer] = []
        self._injector: Injector | None = None
        self._leaving: list[Callable[[], object]] = []
        self._watching = seams.watched(_Waiting(self))

    def install(self) -> None:
        """Begin to wait."""
        self._watching.__enter__()
        called = nn.modules.module.register_module_forward_pre_hook(self._called)
        self._leaving = [lambda: self._watching.__exit__(None, None, None), called.remove, _noticed(self._optimizers)]

    def strike(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """This is the job."""
        self._leave()
        self._injector = Injector(
            self._faults,
            model,
            optimizers,
            seed=self._seed,
            rank=self._rank,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            node=node_name(os.environ),
            record=self._record,
            landed=_landed(self._record),
        )
        self._injector.__enter__()

    def finish(self) -> None:
        """The script has come to its end.

        Raises:
            FaultDidNotLand: a fault was to strike here, and did not.
        """
        if self._injector is None:
            self._leave()
            if not _landed(self._record):
                raise FaultDidNotLand(
                    f"{FAULT} was set, and no model was trained on rank {self._rank}: nothing was hit"
                )
            return
        self._injector.__exit__(None, None, None)
        if self._injector.struck:
            logger.warning("%d faults landed on rank %d: %s", self._injector.struck, self._rank, self._record)

    def _called(self, module: nn.Module, args: Any) -> None:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training or not torch.is_grad_enabled() or not trains:
            return
        self.strike(module, list(self._optimizers))
        # The hooks of this very call were looked up before there were any: tell the injector that its first forward runs.
        assert self._injector is not None
        self._injector._before_forward()

    def _leave(self) -> None:
        while self._leaving:
            self._leaving.pop()()


class _Waiting(seams.Probe):
    """A guard tells what the job is."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def guarded(self, job: Job) -> None:
        self._script.strike(job.model, list(job.optimizers))
        assert seams.probe is not None
        seams.probe.guarded(job)


def install() -> Script:
    """Have the script that runs next in this process hit as the environment says; call `finish` of what is returned after it.

    Raises:
        ConfigurationError: the environment says nothing that makes sense, or not where the records are to go.
    """
    faults, seed = from_environment(os.environ)
    folder = os.environ.get(RECORD) or str(Path(os.environ.get("BITWITNESS_RUN_DIR", "."), "faults"))
    logger.warning("%s is set: this job is damaged on purpose, by %s", FAULT, os.environ[FAULT])
    script = Script(faults, seed, Path(folder))
    script.install()
    return script


def _landed(file: Path) -> set[int]:
    """Which faults have struck on this rank before, in a process that was replaced by this one."""
    return {strike.site.fault for strike in record.read(file)} if file.exists() else set()


def _noticed(made: list[torch.optim.Optimizer]) -> Callable[[], None]:
    """Note every optimizer that is made from now on; returns what ends that."""
    original = torch.optim.Optimizer.__init__

    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    def end() -> None:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]
    return end
