"""A device that is played: a fault on purpose for one participant, so that a comparison can be tried where no device is broken.

Beside the faults of modules, which the injector knows, a device has such of operations: a multiplier is wrong whoever uses it. These
have the same grammar, with the target `op:GLOB` of names of aten operations (`op:addmm`, `op:*mm*`), and strike what these operations
give out, in the forward, the backward and the update alike. Here and not among the injector's targets, because a dispatch mode around
all of a step costs a job more than a drill may, and a comparison nothing that matters.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitwitness.compare.reproduce import written
from bitwitness.errors import ConfigurationError
from bitwitness.faults.active import Active, Moment
from bitwitness.faults.grammar import parse_all
from bitwitness.faults.injector import Injector
from bitwitness.faults.record import Strike
from bitwitness.faults.spec import Fault

_OPERATION = re.compile(r"(?<!\S)op(?=[:\s]|$)")
"""The target, in the part of a line before its time."""
_STAND_IN = "fwd_out"
"""What the grammar reads in its place."""


class Trained(Protocol):
    """What a fault reaches of a workload."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizers(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer]:
        """What trains it."""


class _Paused(threading.local):
    depth = 0


_paused = _Paused()


@contextmanager
def untouched() -> Iterator[None]:
    """What is computed inside is not the device's work but that of whoever watches it: no operation of this thread is struck.

    For copies to the host and comparisons that are made while a step is under way.
    """
    _paused.depth += 1
    try:
        yield
    finally:
        _paused.depth -= 1


def is_untouched() -> bool:
    """Whether this thread is inside of `untouched`."""
    return _paused.depth > 0


class Simulated:
    """The faults of one participant.

    Args:
        text: one or more in the grammar, joined by ` & `; those with the target `op:GLOB` strike operations. An operation's fault
            strikes at each that matches (`each` is understood), and `if=A..B` looks at the magnitude of what it gives out.
        seed: all that is drawn follows from it, from the text and, where that says `redraw`, from the step.

    Attributes:
        text: as given.

    Raises:
        ConfigurationError: it is no fault, or one that cannot be played on one device beside others (`loss`, `digest`, `rank`).
    """

    def __init__(self, text: str, seed: int) -> None:
        self.text = text
        self._seed = seed
        self._modules, self._operations = read(text)
        self._injector: Injector | None = None
        self._begin()

    def _begin(self) -> None:
        count = len(self._modules)
        self._on_modules: list[Active] = [
            _Unseen(fault, number, self._seed, 0, 1) for number, fault in enumerate(self._modules)
        ]
        self._on_operations = [
            Active(fault, count + number, self._seed, 0, 1) for number, fault in enumerate(self._operations)
        ]

    @property
    def landed(self) -> int:
        """How often bits were changed since `attach`. None at all is no drill: whoever shows the result must say so."""
        return sum(one.landed for one in (*self._on_modules, *self._on_operations))

    @property
    def why_not(self) -> str:
        """If nothing landed, what is known of the reason."""
        return "; ".join(
            f"{one.fault}: {one.why_not}" for one in (*self._on_modules, *self._on_operations) if not one.landed
        )

    def attach(self, workload: Trained, *, fresh: bool = True) -> None:
        """Reach into a workload, before anybody else puts hooks on its model.

        Args:
            workload: which.
            fresh: as a device that has struck nothing yet; False: as the one that it was, in a workload that was made anew.

        Raises:
            ConfigurationError: a fault is impossible in it, e.g. no such module.
        """
        self.detach()
        if fresh:
            self._begin()
        if self._on_modules:
            injector = Injector(
                self._on_modules, workload.model, workload.optimizers, rank=0, world_size=1, listens=False
            )
            self._injector = injector.__enter__()

    def detach(self) -> None:
        """Leave the workload as it was; operations are still struck inside of `during`."""
        if self._injector is not None:
            self._injector.close()
            self._injector = None

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """All that this participant computes in a step, from 0.

        Raises:
            FaultDidNotLand: a fault of a module was to strike in an earlier step and changed no bit.
        """
        if self._injector is not None:
            self._injector.begin(step)
        with ExitStack() as stack:
            if self._on_operations:
                stack.enter_context(_Struck(self._on_operations, step))
            yield


def read(text: str) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """The faults of modules and those of operations, the latter as faults of outputs whose glob is of operations.

    Raises:
        ConfigurationError: a line is no fault, or one that cannot be played on one device beside others.
    """
    modules: list[Fault] = []
    operations: list[Fault] = []
    for line in re.split(r"\s+&\s+|\n", text.strip()):
        where, at, rest = line.partition("@")
        named, count = _OPERATION.subn(_STAND_IN, where)
        try:
            faults = parse_all(named + at + rest)
        except ConfigurationError as error:
            raise ConfigurationError(_as_written(str(error), line, where)) from error
        _check_alone(line, faults)
        if count:
            operations += [
                replace(one, where=replace(one.where, each=True, glob=one.where.glob or "*")) for one in faults
            ]
        else:
            modules += faults
    return tuple(modules), tuple(operations)


def _as_written(objection: str, line: str, where: str) -> str:
    """What the grammar says of a line, with `op` where it was given another word for it, and the caret where that is to be."""
    found = re.fullmatch(r"column (\d+): (.*)\n  [^\n]*\n  [^\n]*\^", objection, re.DOTALL)
    if not (found and _OPERATION.search(where)):
        return objection
    column, left = int(found[1]) - 1, len(line) - len(line.lstrip())
    column += left  # the grammar leaves out what is before a line
    longer = len(_STAND_IN) - len("op")
    for target in _OPERATION.finditer(where):
        if column > target.start():
            column = max(target.start(), column - longer)
    before = "".join("\t" if letter == "\t" else " " for letter in line[left:column])
    said = re.sub(rf"\b{_STAND_IN}\b", "op", found[2])
    return f"column {column - left + 1}: {said}\n  {line.strip()}\n  {before}^"


def _check_alone(line: str, faults: Sequence[Fault]) -> None:
    for fault in faults:
        where = fault.where
        if where.rank is not None or where.node:
            raise ConfigurationError(
                f"{line}: a fault that is played on one device has no rank and no node: leave that out"
            )
        foreign = where.target in ("loss", "digest", "ckpt") or where.target.startswith("comm.")
        if foreign or where.during not in (None, "train", "update"):
            raise ConfigurationError(
                f"{line}: this reaches beyond one device of a comparison: choose a target of a module, of a parameter or op:NAME"
            )


class _Unseen(Active):
    """A fault of a module that strikes without an operation of its own: what it writes was written by no multiplier."""

    def strike(self, tensor: Tensor, name: str, moment: Moment) -> Strike | None:
        with untouched():
            return super().strike(tensor, name, moment)


class _Struck(TorchDispatchMode):
    """Strikes what operations give out. Under a mode entered later, as a device is under whoever watches it."""

    def __init__(self, faults: Sequence[Active], step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._faults, self._moment = faults, Moment(step, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if is_untouched():
            return output
        name = name_of(func)
        for one in self._faults:
            if not fnmatch.fnmatchcase(name, one.fault.where.glob):
                continue
            tensor = _given_out(func, args, kwargs or {}, output)
            if tensor is None:
                continue
            try:
                one.strike(tensor, name, self._moment)
            except (
                ConfigurationError
            ) as error:  # too few elements, or another dtype: a multiplier does not complain either
                one.why_not = str(error)
        return output


def name_of(func: Any) -> str:
    """An operation's name without its namespace and overload: `addmm`."""
    return str(func._schema.name).rpartition("::")[2]


def _given_out(func: Any, args: Any, kwargs: Any, output: Any) -> Tensor | None:
    """The first tensor of numbers that an operation has written; None for one that only looks at memory in another way."""
    if func.is_view:
        return None
    for leaf in written(func, args, kwargs, output):
        if leaf.numel() and (leaf.is_floating_point() or leaf.is_complex()):
            if torch._debug_has_internal_overlap(leaf) != 0:
                return None
            if not func._schema.is_mutable:
                own = leaf.untyped_storage().data_ptr()
                others = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
                if any(one.untyped_storage().data_ptr() == own for one in others):
                    return None  # `_unsafe_view` and its kind
            return leaf
    return None
