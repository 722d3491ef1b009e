"""`Injector`: strikes a training job with faults, and proves that each of them landed.

It works on any job: the hooks of PyTorch reach the model, and the guard's seams tell it what no hook sees. An injector that
silently did nothing would make every detector look perfect, so a fault that was due and changed no bit is an error, and what
has landed is recorded bit for bit. Random numbers come from generators of its own: the job's are never touched, except by a
fault whose target they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import fingerprint
from bitwitness.errors import ConfigurationError
from bitwitness.faults import communication, files, random_state, sites
from bitwitness.faults.active import Active, Moment, Recorded
from bitwitness.faults.grammar import parse, parse_all
from bitwitness.faults.record import Strike, append, read
from bitwitness.faults.spec import MEMORY_TARGETS, MODULE_TARGETS, Fault, Work
from bitwitness.guard import seams
from bitwitness.guard.job import Job
from bitwitness.mutate import FaultDidNotLand

Faults = str | Fault | Sequence[str | Fault | Strike | Active]

RECORD = "@"
"""Before a path in the place of a fault: a record, whose strikes are to be done again."""

_KEPT = 1000
"""Strikes that are kept in memory; a record has all."""


class Injector:
    """Strikes a job with faults, as a context manager around its training.

    Args:
        faults: in the grammar, parsed, or strikes of a record (`@PATH` or read) to be done again. Several may be joined by ` & `.
        model: DDP or plain, compiled or not.
        optimizers: one or several; may be empty where no fault is about memory.
        seed: of all that is drawn: rank, site, elements, bits, chance.
        rank, world_size: of this process; by default those of the process group.
        node: of this process, for faults that belong to a node.
        record: file to which each strike is appended, as a line of JSON.
        landed: numbers of faults that have landed before, in a process that this one takes the place of.

    Attributes:
        strikes: what has landed here, in order; the last thousand. struck: how many there were.
        moment: where the job is.

    Raises:
        ConfigurationError: a fault is impossible in this job: no such module, a bit outside the dtype, a moment that the optimizer
            does not keep, code that is compiled. Raised on entering, or where the shape is first seen, before anything is hit.
        FaultDidNotLand: on leaving, or in the first step in which it cannot strike any more: a fault was to strike and
            changed no bit.
    """

    def __init__(
        self,
        faults: Faults,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        node: str = "",
        record: Path | None = None,
        landed: Iterable[int] = (),
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else (dist.get_rank() if grouped else 0)
        self.world_size = world_size if world_size is not None else (dist.get_world_size() if grouped else 1)
        self.model = model
        self.optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
        self.strikes: list[Strike] = []
        self.struck = 0
        self.moment = Moment()
        self._record = record
        self._guarded = False
        self._wire: communication.Wire | None = None
        self._failure: Exception | None = None
        self._spoilt: list[tuple[Tensor, Tensor]] = []
        self._stack = ExitStack()
        before = set(landed)
        self._set(activate(faults, seed, self.rank, self.world_size, node))
        for one in self._active:
            one.landed = int(one.number in before)

    def _set(self, active: Iterable[Active]) -> None:
        self._active = [one for one in active if one.here]
        self._of: dict[str, list[Active]] = {}
        for one in self._active:
            self._of.setdefault(one.target, []).append(one)
        self._in_memory = [one for one in self._active if one.target in MEMORY_TARGETS]

    # Context ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._place()
            self._stack.enter_context(seams.watched(_Probe(self)))
            if "digest" in self._of or any(one.fault.where.during == "fingerprint" for one in self._in_memory):
                self._stack.enter_context(fingerprint.tapped(_Tap(self)))
            if "loss" in self._of:
                self._stack.enter_context(communication.backward_watched(self._unguarded_loss))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self._raise_failure()
            self._require_landed(self.moment.step + 1, final=True)

    def _place(self) -> None:
        modules, parameters = sites.modules_of(self.model), sites.parameters_of(self.model)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        for one in self._active:
            if one.target in MODULE_TARGETS:
                self._place_on_modules(one, modules)
            elif one.target == "grad_w":
                for name in one.names(trained):
                    one.check(trained[name])
                    self._keep(sites.hook_gradient(trained[name], self._wanted(one), self._changer(one, name, trained)))
            elif one in self._in_memory:
                self._check_memory(one)
            elif one.target.startswith("comm."):
                communication.check(one.fault, self.model, self.world_size)
            elif one.target == "rng":
                one.names(random_state.SOURCES)
        for optimizer in self.optimizers[-1:]:
            self._keep(optimizer.register_step_pre_hook(lambda *_: self._hit_memory("update")))
            self._keep(optimizer.register_step_post_hook(self._after_update))
        if self._active:
            self._keep(self.model.register_forward_pre_hook(self._before_forward))

    def _place_on_modules(self, one: Active, modules: Mapping[str, nn.Module]) -> None:
        chosen = one.names(modules)
        sites.check_reachable(one.fault, self.model, chosen)
        for name in chosen:
            change = self._changer(one, name, modules)
            for handle in sites.hook_module(one.target, modules[name], self._wanted(one), change):
                self._keep(handle)

    def _check_memory(self, one: Active) -> None:
        if not self.optimizers:
            raise ConfigurationError(f"{one.fault}: memory is hit around the update: give the injector the optimizers")
        if one.target not in ("param", "buffer"):
            sites.check_keeps(one.fault, self.optimizers)
        tensors = self._candidates(one)
        for name in one.names(tensors):
            one.check(tensors[name])

    def _keep(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    # Where the job is ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins. Only for loops without a guard whose steps are not their updates, counted from 0."""
        self._require_landed(step)
        self.moment = Moment(step, -1)

    def batch(self, batch: Any) -> Any:
        """The batch as it arrives, hit in place if that is due. Only for loops without a guard, before the forward."""
        if not self._guarded:
            moment, self.moment = self.moment, self._next()
            self._hit_batch(batch)
            self.moment = moment
        return batch

    def _next(self) -> Moment:
        """The micro-batch that comes, in a loop without a guard."""
        return Moment(max(self.moment.step, 0), self.moment.micro + 1)

    def _before_forward(self, *_: Any) -> None:
        self._raise_failure()
        if self._guarded or not self.model.training:
            return
        if self._wire is None and self._communicates() and isinstance(self.model, DistributedDataParallel):
            self._wire = communication.Wire(self._sends, self._reduced)
            self._wire.register(self.model)
            self._keep(self._wire)
        self._micro_batch(self._next())

    def _communicates(self) -> bool:
        return any(target.startswith("comm.") for target in self._of)

    def _micro_batch(self, moment: Moment) -> None:
        if moment.step != self.moment.step:
            self._require_landed(moment.step)
        self.moment = moment
        if moment.micro == 0:
            self._hit_memory("train")
        for one in self._of.get("rng", ()):
            for name in one.names(random_state.SOURCES, moment.step):
                random_state.hit(name, self._changer(one, name, random_state.SOURCES))

    def _after_update(self, *_: Any) -> None:
        self._hit_memory(None)
        if not self._guarded:
            self.begin(self.moment.step + 1)

    def _begins(self, work: Work) -> None:
        self.moment = Moment(self.moment.step, self.moment.micro, work)
        if work == "save":
            self._hit_memory("save")

    def _ends(self) -> None:
        self.moment = Moment(self.moment.step, self.moment.micro)
        while self._spoilt:  # what was read wrongly is as it was
            tensor, kept = self._spoilt.pop()
            tensor.data.copy_(kept)

    # Striking --------------------------------------------------------------------------------------------------------

    def _wanted(self, one: Active) -> Callable[[], bool]:
        return lambda: one.wants(self.moment.step)

    def _changer(self, one: Active, name: str, among: Iterable[str]) -> sites.Change:
        """Strikes at this name; where the name is drawn anew in each step, only if it is this one's turn."""
        candidates = tuple(among)

        def change(tensor: Tensor) -> bool:
            redrawn = one.fault.persist.redraw and name not in one.names(candidates, self.moment.step)
            return not redrawn and self._strike(one, tensor, name)

        return change

    def _strike(self, one: Active, tensor: Tensor, name: str) -> bool:
        strike = one.strike(tensor, name, self.moment)
        if strike is None:
            return False
        self.struck += 1
        self.strikes = [*self.strikes[1 - _KEPT :], strike]
        if self._record is not None:
            append(self._record, strike)
        return True

    def _hit_memory(self, instant: Work | None) -> None:
        """Hit what is stored: before the first forward (train), before the update, while saving, or (None) after the update."""
        before = self.moment
        for one in self._in_memory:
            if one.fault.where.during != instant or not one.may_be_due(before.step):
                continue
            self.moment = Moment(before.step, before.micro, instant or "train")
            tensors = self._candidates(one)
            for name in one.names(tensors, before.step):
                kept = tensors[name].detach().clone() if instant == "save" else None
                if self._strike(one, tensors[name], name) and kept is not None:
                    self._spoilt.append((tensors[name], kept))
        self.moment = before

    def _candidates(self, one: Active) -> dict[str, Tensor]:
        """What is stored of this kind, by name. Moments that do not exist yet are stood for by their parameters."""
        if one.target == "buffer":
            return sites.buffers_of(self.model)
        parameters = sites.parameters_of(self.model)
        if one.target == "param":
            return parameters
        states = {name: sites.state_tensor(self.optimizers, tensor, one.target) for name, tensor in parameters.items()}
        kept = {name: state for name, state in states.items() if state is not None}
        return kept or parameters

    def _hit_batch(self, batch: Any) -> None:
        for one in self._of.get("input", ()):
            if one.may_be_due(self.moment.step):
                tensors = sites.batch_tensors(batch)
                for name in one.names(tensors, self.moment.step):
                    self._strike(one, tensors[name], name)

    def _hit_loss(self, loss: Tensor) -> None:
        for one in self._of.get("loss", ()):
            self._strike(one, loss, "loss")

    def _unguarded_loss(self, loss: Tensor) -> None:
        if not self._guarded:
            self._hit_loss(loss)

    def _sends(self, bucket: Tensor) -> None:
        self._on_the_wire("comm.pre", bucket)

    def _reduced(self, bucket: Tensor) -> None:
        self._on_the_wire("comm.reduce", bucket)
        self._on_the_wire("comm.post", bucket)

    def _on_the_wire(self, target: str, bucket: Tensor) -> None:
        """Never raises: the other ranks would wait. What went wrong is raised at the next forward."""
        try:
            for one in self._of.get(target, ()):
                self._strike(one, bucket, "bucket")
        except Exception as error:  # noqa: BLE001
            self._failure = self._failure or error

    def _hit_files(self, folder: Path, while_saving: bool) -> None:
        before = self.moment
        self.moment = Moment(before.step, before.micro, "save" if while_saving else "train")
        for one in self._of.get("ckpt", ()):
            if (one.fault.where.during == "save") == while_saving and one.may_be_due(self.moment.step):
                found = files.names(folder, self.rank)
                for name in one.names(found, self.moment.step) if found else ():
                    files.hit(folder / name if folder.is_dir() else folder, self._changer(one, name, found))
        self.moment = before

    def _hashes(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a fingerprint reads: copies of what is hit while it is hashed."""
        before = self.moment
        self.moment = Moment(before.step, before.micro, "fingerprint")
        for one in self._in_memory:
            if one.fault.where.during == "fingerprint" and one.may_be_due(before.step):
                stored = self._candidates(one)
                places = {stored[name].data_ptr(): name for name in one.names(stored, before.step)}
                for index, tensor in enumerate(tensors):
                    if tensor.data_ptr() in places and tensor.numel():
                        copy = tensor.clone()
                        if self._strike(one, copy, places[tensor.data_ptr()]):
                            tensors[index] = copy
        self.moment = before
        return tensors

    def _hashed(self, digests: Tensor) -> Tensor:
        for one in self._of.get("digest", ()):
            self._strike(one, digests, "digest")
        return digests

    # Proof -----------------------------------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _require_landed(self, step: int, final: bool = False) -> None:
        for one in self._active:
            why = one.missing(step, final)
            if why:
                raise FaultDidNotLand(
                    f"the fault {one.fault} did not land on rank {self.rank}: {why}. Nothing is proved by this run"
                )


class _Probe(seams.Probe):
    """What the guard tells, in the injector's terms."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def guarded(self, job: Job) -> None:
        self._injector._guarded = True

    def micro_batch(self, step: int, micro: int, batch: Any) -> None:
        self._injector._guarded = True
        self._injector._raise_failure()
        self._injector._micro_batch(Moment(step, micro))
        self._injector._hit_batch(batch)

    def begins(self, work: seams.Work, step: int) -> None:
        self._injector._begins(work)

    def ends(self, work: seams.Work, step: int) -> None:
        self._injector._ends()

    def rebuilt(self, batch: Any) -> None:
        self._injector._hit_batch(batch)

    def loss(self, loss: Tensor) -> None:
        self._injector._hit_loss(loss)

    def sends(self, bucket: Tensor) -> None:
        self._injector._sends(bucket)

    def reduced(self, bucket: Tensor) -> None:
        self._injector._reduced(bucket)

    def written(self, folder: Path) -> None:
        self._injector._hit_files(folder, while_saving=True)

    def published(self, folder: Path) -> None:
        self._injector._hit_files(folder, while_saving=False)


class _Tap(fingerprint.Tap):
    """Faults in the fingerprint itself."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector

    def hashes(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._injector._hashes(tensors)

    def hashed(self, digests: Tensor) -> Tensor:
        return self._injector._hashed(digests)


def activate(faults: Faults, seed: int, rank: int, world_size: int, node: str) -> list[Active]:
    """The faults of a job on this rank, in whatever form they were given."""
    if isinstance(faults, str | Fault):
        faults = (faults,)
    recorded: dict[int, list[Strike]] = {}
    made: list[Active] = []
    for one in faults:
        if isinstance(one, Active):
            made.append(one)
        elif isinstance(one, Strike):
            recorded.setdefault(one.site.fault, []).append(one)
        elif isinstance(one, str) and one.startswith(RECORD):
            for strike in read(Path(one.removeprefix(RECORD))):
                recorded.setdefault(strike.site.fault, []).append(strike)
        else:
            for fault in parse_all(one) if isinstance(one, str) else (one,):
                made.append(Active(fault, len(made), seed, rank, world_size, node))
    made += [Recorded(parse(strikes[0].spec), number, strikes, rank, node) for number, strikes in recorded.items()]
    return made
