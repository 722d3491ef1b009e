"""`Injector`: strikes a training job with faults, and proves that each of them landed.

It works on any job: the hooks of PyTorch reach the model, and the guard's seams tell it what no hook sees. An injector that
silently did nothing would make every detector look perfect, so a fault that was due and changed no bit is an error, and what
has landed is recorded bit for bit. Random numbers come from generators of its own: the job's are never touched, except by a
fault whose target they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitwitness import fingerprint
from bitwitness.errors import ConfigurationError
from bitwitness.faults import communication, files, random_state, sites
from bitwitness.faults.active import Active, Moment, Recorded, matching
from bitwitness.faults.grammar import parse, parse_all
from bitwitness.faults.record import Strike, append, read
from bitwitness.faults.spec import MEMORY_TARGETS, MODULE_TARGETS, Fault, Work
from bitwitness.guard import seams
from bitwitness.guard.job import Job
from bitwitness.guard.start import supervision
from bitwitness.mutate import FaultDidNotLand
from bitwitness.runfiles.drills import start_of

Faults = str | Fault | Sequence[str | Fault | Strike | Active]

RECORD = "@"
"""Before a path in the place of a fault: a record, whose strikes are to be done again."""

_KEPT = 1000
"""Strikes that are kept in memory; a record has all."""


class Injector:
    """Strikes a job with faults, as a context manager around its training.

    One at a time in a process: it listens to the one guard that there is. Such as do not listen may be beside each other, each with
    a model of its own.

    Args:
        faults: in the grammar, parsed, or strikes of a record (`@PATH` or read) to be done again. Several may be joined by ` & `.
        model: DDP or plain, compiled or not.
        optimizers: one or several; may be empty where no fault is about memory; None: `watch` will tell of them.
        seed: of all that is drawn: rank, site, elements, bits, chance.
        rank, world_size: of this process; by default those of the process group.
        node: of this process, for faults that belong to a node.
        record: file to which each strike is appended, as a line of JSON.
        start: which start of the job this is, for records of jobs that are started again.
        landed: faults that have landed before, by number, and at which names, in a process that this one takes the place of.
        listens: whether it is told what a guard does. False: of a loop without a guard, beside other injectors in one process; the
            targets `loss` and `digest`, which are no model's own, are refused.

    Attributes:
        strikes: what has landed here, in order; the last thousand. struck: how many there were.
        moment: where the job is.

    Raises:
        ConfigurationError: a fault is impossible in this job: no such module, a bit outside the dtype, a moment that the optimizer
            does not keep, code that is compiled. Raised on entering, or where the shape is first seen, before anything is hit.
        FaultDidNotLand: on leaving, or in the first step in which it cannot strike any more: a fault was to strike and
            changed no bit.
        RuntimeError: on entering, inside of another one.
    """

    def __init__(
        self,
        faults: Faults,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = (),
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        node: str = "",
        record: Path | None = None,
        start: int = 1,
        landed: Mapping[int, Iterable[str]] | None = None,
        listens: bool = True,
    ) -> None:
        grouped = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else (dist.get_rank() if grouped else 0)
        self.world_size = world_size if world_size is not None else (dist.get_world_size() if grouped else 1)
        self.model = model
        self.optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers or ())
        self._optimizers_come = optimizers is None
        self.strikes: list[Strike] = []
        self.struck = 0
        self.moment = Moment()
        self._record = record
        self._listens = listens
        self._guarded = False
        self._start_id = start_of(supervision())
        self._trains = True
        self._updated = False
        self._calls = 0
        self._by_hand = False
        self._wired = False
        self._failure: Exception | None = None
        self._spoilt: list[tuple[Tensor, Tensor]] = []
        self._operands = sites.Operands()
        self._stack = ExitStack()
        self._set(activate(faults, seed, self.rank, self.world_size, node, start))
        for one in self._active:
            if landed and one.number in landed:
                one.had_its_turn(landed[one.number])

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
            if self._listens:
                self._stack.enter_context(seams.watched(_Probe(self)))
            else:
                self._check_alone()
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
        self.close()
        if error is None:
            self._raise_failure()
            self._require_landed(self.moment.step + 1, final=True)

    def close(self) -> None:
        """Leave the job as it would have been, and ask not what has landed."""
        self._stack.close()
        self._operands.restore()
        self._ends()

    def _check_alone(self) -> None:
        for one in self._active:
            if one.target in ("loss", "digest", "ckpt") or one.fault.where.during == "fingerprint":
                raise ConfigurationError(
                    f"{one.fault}: beside other injectors only what belongs to one model can be hit: choose e.g. fwd_out"
                )

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
                for name in one.names(random_state.SOURCES):
                    one.check(random_state.like(name))
        for optimizer in self.optimizers:
            self._watch(optimizer)
        if self._active:
            self._stack.callback(sites.watch_calls(self.model, self._before_forward, self._after_forward))

    def _place_on_modules(self, one: Active, modules: Mapping[str, nn.Module]) -> None:
        chosen = one.names(modules)
        sites.check_reachable(one.fault, self.model, chosen)
        for name in chosen:
            if one.target == "fwd_w" and (name in one.names(modules, 0) or not one.fault.persist.redraw):
                one.check(sites.check_operand(one.fault, name, modules[name]))
            change, wanted = self._changer(one, name, modules), self._wanted_forward(one)
            for handle in sites.hook_module(one.target, modules[name], wanted, change, self._operands):
                self._keep(handle)

    def _check_memory(self, one: Active) -> None:
        if not self.optimizers and not self._optimizers_come:
            raise ConfigurationError(f"{one.fault}: memory is hit around the update: give the injector the optimizers")
        if one.target not in ("param", "buffer") and self.optimizers:
            sites.check_keeps(one.fault, self.optimizers)
        tensors = self._will_be_stored(one)
        for name in one.names(tensors):
            one.check(tensors[name])

    def _keep(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that was made after the injector."""
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers = (*self.optimizers, optimizer)
            self._watch(optimizer)
            for one in self._in_memory if self._optimizers_come else ():
                self._check_memory(one)
            self._optimizers_come = False

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._keep(optimizer.register_step_pre_hook(lambda *_: self._hit_memory("update", optimizer)))
        self._keep(optimizer.register_step_post_hook(lambda *_: self._after_update(optimizer)))

    # Where the job is ------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins. Only for loops without a guard in which a forward after an update is not the next step, from 0 on."""
        self._updated = False
        self._begin_step(step)
        self.moment = Moment(step, -1)

    def batch(self, batch: Any) -> Any:
        """The batch as it arrives, hit in place if that is due. Only for loops without a guard, before the forward."""
        self._by_hand = True
        if not self._guarded:
            moment, self.moment = self.moment, self._next()
            if moment.step != self.moment.step:
                self._begin_step(self.moment.step)
            self._hit_batch(batch)
            if self._updated:
                self.begin(self.moment.step)
            else:
                self.moment = Moment(self.moment.step, moment.micro)
        return batch

    def _next(self) -> Moment:
        """The micro-batch that comes, in a loop without a guard: of the next step, if an update was made since the last."""
        if self._updated:
            return Moment(self.moment.step + 1, 0)
        return Moment(max(self.moment.step, 0), self.moment.micro + 1)

    def _before_forward(self, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> None:
        """The model is called. Without gradients it does not train: an evaluation counts for nothing and is not hit."""
        self._calls += 1
        if self._calls > 1 or torch._C._current_graph_task_id() != -1:
            return  # inside of itself, or a forward that is computed again in the backward
        self._operands.restore()
        self._raise_failure()
        self._trains = torch.is_grad_enabled()
        if self._guarded or not self._trains:
            return
        if not self._wired and self._communicates():
            self._wired = True
            self._keep(communication.wire(self.model, self._sends, self._reduced))
        self._micro_batch(self._next())
        if not self._by_hand:
            self._hit_batch(sites.given(args, kwargs or {}))

    def _after_forward(self) -> None:
        self._calls = max(0, self._calls - 1)
        if not self._calls:
            self._trains = True

    def _communicates(self) -> bool:
        return any(target.startswith("comm.") for target in self._of)

    def _begin_step(self, step: int) -> None:
        self._require_landed(step)
        for one in self._active:
            one.begin(step)

    def _micro_batch(self, moment: Moment) -> None:
        if moment.step != self.moment.step:
            self._begin_step(moment.step)
        self._updated = False
        self.moment = moment
        if moment.micro == 0:
            self._hit_memory("train")
        for one in self._of.get("rng", ()):
            for name in one.names(random_state.SOURCES, moment.step):
                random_state.hit(name, self._changer(one, name, random_state.SOURCES))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._hit_memory(None, optimizer)
        self._updated = not self._guarded
        self._calls = 0  # a forward that was interrupted is over

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
        return lambda: self._trains and one.wants(self.moment.step)

    def _wanted_forward(self, one: Active) -> Callable[[], bool]:
        def wanted() -> bool:
            # A part of the model that is called by itself, without gradients, is evaluated.
            trains = self._trains and (self._calls > 0 or torch.is_grad_enabled())
            return trains and one.wants(self.moment.step)

        return wanted

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
            append(self._record, strike, self._start_id)
        return True

    @contextmanager
    def _doing(self, work: Work) -> Iterator[None]:
        """At the same place in the job, other work."""
        before = self.moment
        self.moment = Moment(before.step, before.micro, work)
        try:
            yield
        finally:
            self.moment = before

    def _hit_memory(self, instant: Work | None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Hit what is stored: before the first forward (train), before the update, while saving, or (None) after the update.

        `optimizer`: whose update it is, where there are several: each has its own parameters, and buffers go with the first.
        """
        for one in self._in_memory:
            if one.fault.where.during == instant and one.may_be_due(self.moment.step):
                with self._doing(instant or "train"):
                    self._hit_stored(one, optimizer, keep=instant == "save")

    def _hit_stored(self, one: Active, optimizer: torch.optim.Optimizer | None, keep: bool) -> None:
        stored = self._stored(one)
        for name in one.names(self._will_be_stored(one), self.moment.step):
            if optimizer is not None and not self._belongs(name, one, optimizer):
                continue
            if name not in stored:
                one.why_not = f"the optimizer kept no {one.target} of {name} yet"
                continue
            kept = stored[name].detach().clone() if keep else None
            if self._strike(one, stored[name], name) and kept is not None:
                self._spoilt.append((stored[name], kept))

    def _belongs(self, name: str, one: Active, optimizer: torch.optim.Optimizer) -> bool:
        if one.target == "buffer":
            return optimizer is self.optimizers[0]
        return len(self.optimizers) == 1 or id(sites.parameters_of(self.model)[name]) in sites.parameters_in(
            [optimizer]
        )

    def _stored(self, one: Active) -> dict[str, Tensor]:
        """What is stored of this kind, by name; without what an optimizer has not begun to keep."""
        if one.target == "buffer":
            return sites.buffers_of(self.model)
        parameters = sites.parameters_of(self.model)
        if one.target == "param":
            return parameters
        states = {name: sites.state_tensor(self.optimizers, tensor, one.target) for name, tensor in parameters.items()}
        return {name: state for name, state in states.items() if state is not None}

    def _will_be_stored(self, one: Active) -> dict[str, Tensor]:
        """What is stored sooner or later, by name: a moment has the shape and the dtype of its parameter."""
        if one.target in ("buffer", "param"):
            return self._stored(one)
        updated = sites.parameters_in(self.optimizers)
        trained = {name: tensor for name, tensor in sites.parameters_of(self.model).items() if tensor.requires_grad}
        kept = {name: tensor for name, tensor in trained.items() if id(tensor) in updated}
        return kept if matching(one.fault.where.glob, kept) else trained  # another optimizer may come

    def _hit_batch(self, batch: Any) -> None:
        for one in self._of.get("input", ()):
            if one.may_be_due(self.moment.step):
                tensors = sites.batch_tensors(batch)
                for name in one.names(tensors, self.moment.step) if tensors else ():
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
        with self._doing("save" if while_saving else "train"):
            for one in self._of.get("ckpt", ()):
                if (one.fault.where.during == "save") == while_saving and one.may_be_due(self.moment.step):
                    self._hit_file(one, folder)

    def _hit_file(self, one: Active, folder: Path) -> None:
        found = files.names(folder, self.rank)
        if not matching(one.fault.where.glob, found):
            one.why_not = f"this rank writes {', '.join(found) or 'no file'}; what all ranks share is written by rank 0"
            return
        for name in one.names(found, self.moment.step):
            files.hit(folder / name if folder.is_dir() else folder, self._changer(one, name, found))

    def _hashes(self, tensors: list[Tensor]) -> list[Tensor]:
        """What a fingerprint reads: copies of what is hit while it is hashed."""
        with self._doing("fingerprint"):
            for one in self._in_memory:
                if one.fault.where.during == "fingerprint" and one.may_be_due(self.moment.step):
                    self._misread(one, tensors)
        return tensors

    def _misread(self, one: Active, tensors: list[Tensor]) -> None:
        stored = self._stored(one)
        chosen = [name for name in one.names(self._will_be_stored(one), self.moment.step) if name in stored]
        places = {stored[name].data_ptr(): name for name in chosen}
        for index, tensor in enumerate(tensors):
            if tensor.data_ptr() in places and tensor.numel():
                copy = tensor.clone()
                if self._strike(one, copy, places[tensor.data_ptr()]):
                    tensors[index] = copy

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
        self._injector._start_id = job.start_id

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


def activate(faults: Faults, seed: int, rank: int, world_size: int, node: str, start: int = 1) -> list[Active]:
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
                made.append(Active(fault, len(made), seed, rank, world_size, node, start))
    for number, strikes in recorded.items():
        made.append(Recorded(parse(strikes[0].spec), number, strikes, rank, node, start))
    return made
