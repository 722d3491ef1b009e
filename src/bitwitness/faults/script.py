"""Faults in a training script that knows nothing of them: what `BITWITNESS_FAULT` does under `bitwitness run`.

The worker calls `install` before the script. From then on the first guard that is made, or the first model that is called in
training, is the job that is hit. What landed is appended to the run's own files, so a process that is started again after
the fault was caught knows that a fault of `once` has had its turn, wherever its rank is now, and goes on healthy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwitness import preemption
from bitwitness.faults import record
from bitwitness.faults.asked import FAULT, RECORD, asked
from bitwitness.faults.injector import Injector
from bitwitness.faults.record import Strike
from bitwitness.faults.spec import Fault
from bitwitness.guard import seams
from bitwitness.guard.job import Job
from bitwitness.mutate import FaultDidNotLand
from bitwitness.topology import node_name

logger = logging.getLogger("bitwitness")


class Script:
    """Waits for the job of a script, and strikes it.

    Args:
        faults: what to strike with; seed: of what they draw.
        folder: for the records of strikes.
        environment: tells who this process is.

    Raises:
        ConfigurationError: what has landed before cannot be read.
    """

    def __init__(
        self, faults: Sequence[Fault | Strike], seed: int, folder: Path, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._faults, self._seed, self._folder = faults, seed, folder
        self._rank, self._world_size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        self._start = int(environment.get("BITWITNESS_GENERATION", "1"))
        self._node = node_name(environment)
        # Now, before the script: once it runs, another rank of this very start may have struck.
        self._before = record.landed(folder)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: set[int] = set()
        self._injector: Injector | None = None
        self._guarded = False
        self._waiting: list[Callable[[], object]] = []
        self._noticing: Callable[[], object] | None = None

    def install(self) -> None:
        """Begin to wait."""
        watching = seams.watched(_Waiting(self))
        watching.__enter__()
        self._waiting = [lambda: watching.__exit__(None, None, None), _watched_calls(self._called)]
        self._noticing = _noticed(self._made)

    def guarded(self, job: Job) -> None:
        """A guard was made: this is the job."""
        self._guarded = True
        if self._rank == 0:
            for text in absent(self._faults, job.topology.nodes):
                logger.warning("%s", text)
        self.strike(job.model, list(job.optimizers))

    def strike(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """This is the job."""
        self._wait_no_more()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        landed = had_their_turn(self._faults, self._before, self._rank, self._node)
        for number in sorted(landed):
            logger.warning(
                "%s has struck in this run before: if it strikes once, it has had its turn", self._faults[number]
            )
        self._injector = Injector(
            self._faults,
            model,
            optimizers or None,
            seed=self._seed,
            rank=self._rank,
            world_size=self._world_size,
            node=self._node,
            record=self._folder / f"rank-{self._rank:05d}.jsonl",
            landed=landed,
            start=self._start,
        )
        self._injector.__enter__()

    def finish(self) -> None:
        """The script has come to its end.

        Raises:
            FaultDidNotLand: a fault was to strike here, and did not.
        """
        self._wait_no_more()
        if self._noticing is not None:
            self._noticing()
            self._noticing = None
        if self._injector is None:
            if self._is_owed():
                raise FaultDidNotLand(
                    f"{FAULT} was set, and no model was trained on rank {self._rank}: nothing was hit"
                )
            return
        if preemption.requested():
            self._injector.close()  # the job goes on another time, and so may the fault
        else:
            self._injector.__exit__(None, None, None)
        if self._injector.struck:
            logger.warning("%d faults landed on rank %d: %s", self._injector.struck, self._rank, self._folder)

    def _is_owed(self) -> bool:
        """Whether a process that has trained nothing should have been hit: not where a start before it has done all there was."""
        here = (self._rank, self._start)
        if any(isinstance(one, Strike) and (one.site.rank, one.site.start) == here for one in self._faults):
            return True
        asked_for = {str(one) for one in self._faults if isinstance(one, Fault)}
        return bool(asked_for) and asked_for.isdisjoint(strike.spec for strike in self._before)

    def _called(self, module: nn.Module) -> None:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if not module.training or not torch.is_grad_enabled() or not trains:
            return
        self._parameters = {id(parameter) for parameter in module.parameters()}
        made, self._optimizers = self._optimizers, []
        self.strike(module, [one for one in made if self._trains(one)] or made)

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the job, or perhaps of a job to come. A guard is told by its script which are the job's."""
        if self._injector is None:
            self._optimizers.append(optimizer)
        elif not self._guarded and self._trains(optimizer):
            self._injector.watch(optimizer)

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return any(id(parameter) in self._parameters for parameter in held)

    def _wait_no_more(self) -> None:
        while self._waiting:
            self._waiting.pop()()


class _Waiting(seams.Probe):
    """A guard tells what the job is."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def guarded(self, job: Job) -> None:
        self._script.guarded(job)
        assert seams.probe is not None
        seams.probe.guarded(job)


def install() -> Script:
    """Have the script that runs next in this process hit as the environment says; call `finish` of what is returned after it.

    Raises:
        ConfigurationError: the environment says nothing that makes sense, or what has landed before cannot be read.
    """
    faults, seed = asked(os.environ, int(os.environ.get("WORLD_SIZE", "1")))
    folder = os.environ.get(RECORD) or str(Path(os.environ.get("BITWITNESS_RUN_DIR", "."), "faults"))
    logger.warning("%s is set: this job is damaged on purpose, by %s", FAULT, os.environ[FAULT])
    script = Script(faults, seed, Path(folder))
    script.install()
    return script


def had_their_turn(
    faults: Sequence[Fault | Strike], before: Sequence[Strike], rank: int, node: str
) -> dict[int, set[str]]:
    """The faults that have struck here in an earlier start of the job, by number, and at which names.

    The very same fault: a run directory may be used again with another. One that belongs to a node has had its turn on
    whichever rank that node had then.
    """
    specs = [str(one) if isinstance(one, Fault) else "" for one in faults]
    found: dict[int, set[str]] = {}
    for number, fault in enumerate(faults):
        if not isinstance(fault, Fault):
            continue
        alone = specs.count(specs[number]) == 1
        names = {
            strike.site.name
            for strike in before
            if strike.spec == specs[number]
            and (alone or strike.site.fault == number)
            and (strike.node == node if fault.where.node else strike.site.rank == rank)
        }
        if names:
            found[number] = names
    return found


def absent(faults: Sequence[Fault | Strike], nodes: Sequence[str]) -> list[str]:
    """What to say of faults on nodes that the job is not on: no error, for the node may have been left out since."""
    return [
        f"{one}: the job has no node {one.where.node!r}, so nothing is hit; it is on {', '.join(nodes)}"
        for one in faults
        if isinstance(one, Fault) and one.where.node and one.where.node not in nodes
    ]


def _watched_calls(called: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Tell of every call of a module, before its hooks are looked up, so that those placed then see this very call.

    A global hook would be looked up with them, and become part of code that is compiled. Returns what ends it.
    """
    original = nn.Module.__call__

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            called(self)
        return original(self, *args, **kwargs)

    def end() -> None:
        nn.Module.__call__ = original  # type: ignore[method-assign]

    nn.Module.__call__ = watched  # type: ignore[method-assign]
    return end


def _noticed(made: Callable[[torch.optim.Optimizer], None]) -> Callable[[], None]:
    """Tell of every optimizer that is made from now on; returns what ends that."""
    original = torch.optim.Optimizer.__init__

    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made(self)

    def end() -> None:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]
    return end
