"""Which single operation of a step goes wrong: every aten operation of the leader's step against the suspect's, bit for bit.

A module that gives out wrong numbers computes dozens of operations, and a vendor can repeat one. The leader writes down a digest of what
each operation gives out; the suspect, in the same step and from the same state, is compared as it goes, and where it differs first it
has just been given right operands: those are kept. Another reference then computes the step as well and keeps what it was given there,
because only what two healthy devices agree upon is right, and only an operation with equal operands is to blame for its output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bitwitness.compare import cases, reproduce
from bitwitness.compare.cases import CannotBeRepeated, Case
from bitwitness.compare.exchange import Exchange
from bitwitness.compare.participant import Fault, Runner, Seat
from bitwitness.compare.records import Step
from bitwitness.compare.settings import Settings
from bitwitness.compare.simulated import is_untouched, name_of, untouched
from bitwitness.compare.tape import Tape
from bitwitness.compare.workload import Workload

MOST_CAUGHT = 6
"""Operations of one step whose operands are kept: behind the first, others are wrong because of it."""
LARGEST = 256 << 20
"""Bytes of operands and outputs of one operation that are kept: they are sent to all nodes and to a vendor."""

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""They give out memory as it is found: its bits are nobody's."""
_OF_TORCH = ("aten", "prims", "mkldnn")
"""What whoever has torch, and nothing else, can compute."""
_WRITE_ONLY = ("copy_", "fill_", "zero_")
"""What they write over they do not read."""


@dataclass(frozen=True, slots=True)
class Done:
    """One operation of a step, as it was done: its name, and a digest of what it gave out ("": nothing to compare)."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Caught:
    """One operation with its operands.

    Attributes:
        number: how many operations the step had before it.
        operands: digest of them. outputs: of what was given out.
        case: with `observed` what was given out here; None where it cannot be repeated, and why.
    """

    number: int
    operands: str
    outputs: str
    case: Case | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Culprit:
    """An operation that was given right operands and gave out wrong bits.

    Attributes:
        step, number: where in the run.
        case: the operation; `observed` is what the suspect gave.
        right: digest of what references gave.
        references: how many devices gave that, the leader included.
    """

    step: int
    number: int
    case: Case
    right: str
    references: int


class Recording(TorchDispatchMode):
    """What the operations of one step give out, and the operands of some.

    Args:
        right: what the leader has done; where this step differs from it, operands are kept.
        wanted: numbers of operations whose operands are kept in any case.

    Attributes:
        done: all of them, in order.
        caught: those that were kept.
        parted: number of the first operation that is another one than the leader's; None: there is none. Nothing is kept behind it.
    """

    def __init__(self, right: Sequence[Done] | None = None, wanted: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[Done] = []
        self.caught: list[Caught] = []
        self.parted: int | None = None
        self._right, self._wanted = right, frozenset(wanted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_untouched():
            return func(*args, **kwargs)
        with untouched():
            early = self._operands(func, args, kwargs) if func._schema.is_mutable and self._may_keep() else None
        result = func(*args, **kwargs)
        with untouched():
            self._note(func, args, kwargs, result, early)
        return result

    def _may_keep(self) -> bool:
        number = len(self.done)
        suspected = self._right is not None and self.parted is None and len(self.caught) < MOST_CAUGHT
        return suspected or number in self._wanted

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, early: Case | str | None) -> None:
        number, name = len(self.done), str(func)
        skipped = func.is_view or name_of(func) in _UNWRITTEN
        outputs = [] if skipped else reproduce.written(func, args, kwargs, result)
        seen = Done(name, cases.digest(outputs) if outputs else "")
        keeps = self._may_keep()
        self.done.append(seen)
        right = None
        if self._right is not None:
            right = self._right[number] if number < len(self._right) else Done("", "")
            if self.parted is None and right.name != name:
                self.parted = number
        differs = right is not None and self.parted is None and right.digest != seen.digest
        if keeps and outputs and (differs or number in self._wanted):
            operands = early if early is not None else self._operands(func, args, kwargs)
            self.caught.append(_caught(number, seen, operands, outputs))

    def _operands(self, func: Any, args: Any, kwargs: Any) -> Case | str:
        """What an operation is given, or why it cannot be had."""
        if _draws(func, args, kwargs):
            return f"{func} draws random numbers"
        if func.namespace not in _OF_TORCH:
            return f"{func} is no operation of torch itself"
        try:
            self._check_size((args, kwargs))
            return Case(
                f"{func._schema.name.replace('::', '.')}.{func._overloadname}",
                tuple(cases.host(one) for one in args),
                {name: cases.host(value) for name, value in kwargs.items()},
            )
        except CannotBeRepeated as error:
            return f"{func} has {error}"

    def _check_size(self, given: Any) -> None:
        size = sum(one.numel() * one.element_size() for one in reproduce.tensors_of((given[0], *given[1].values())))
        if size > LARGEST:
            raise CannotBeRepeated(f"{size} bytes of operands, more than the {LARGEST} that are kept")


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers. Attention may, and does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    named = {one.name: one.default_value for one in func._schema.arguments}
    given = named | dict(zip(named, args, strict=False)) | kwargs
    return bool(given.get("dropout_p") != 0.0)


def _caught(number: int, seen: Done, operands: Case | str, outputs: Sequence[Tensor]) -> Caught:
    if isinstance(operands, str):
        return Caught(number, "", seen.digest, None, operands)
    observed = tuple(cases.host(one) for one in outputs)
    compared = operands
    if operands.operation.split(".")[1] in _WRITE_ONLY:
        compared = replace(operands, args=operands.args[1:])
    return Caught(number, cases.operands_digest(compared), seen.digest, replace(operands, observed=observed))


class Watched:
    """A device under a recording, as a `Fault`: whatever is played on it stands behind the recording, as the device does."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self.recording: Recording | None = None

    def attach(self, workload: Workload, *, fresh: bool = True) -> None:
        """See `Fault`."""
        if self._fault is not None:
            self._fault.attach(workload, fresh=fresh)

    def detach(self) -> None:
        """See `Fault`."""
        if self._fault is not None:
            self._fault.detach()

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """A step, recorded if a recording is set."""
        with (
            self._fault.during(step) if self._fault is not None else nullcontext(),
            self.recording if self.recording is not None else nullcontext(),
        ):
            yield


class Traced(Runner):
    """A runner in lock-step, without a journal, whose steps can be recorded."""

    def __init__(self, seat: Seat, settings: Settings) -> None:
        self._watched = Watched(seat.fault)
        self.mismatches = 0
        """Tensors that differed at the borders of modules in the step before."""
        super().__init__(replace(seat, fault=self._watched), "lock-step", settings, None)

    def _write(self, step: Step) -> None:
        self.mismatches = len(step.differences)

    @contextmanager
    def recorded(self, recording: Recording | None) -> Iterator[None]:
        """Record the step that is run inside."""
        self._watched.recording = recording
        try:
            yield
        finally:
            self._watched.recording = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What the search for an operation found.

    Attributes:
        culprit: the first one; None: no single operation shows it.
        why: if there is none, what was seen instead, in words for people.
        steps: how many steps were recorded.
    """

    culprit: Culprit | None
    why: str
    steps: int


def trace(seats: Sequence[Seat], settings: Settings, exchange: Exchange, suspect: str, first: int, steps: int) -> Trace:
    """Run the workload again in lock-step and look at every operation of some steps, until one is found. A collective.

    Args:
        seats: of this process.
        settings: of the comparison.
        exchange: with the others.
        suspect: whose operation is looked for.
        first: the first step in which a mismatch was seen; what comes before is run and not recorded.
        steps: so many are recorded at most, within those of the comparison.
    """
    runners = [Traced(seat, settings) for seat in seats if _takes_part(seat, suspect)]
    last = min(settings.steps, first + max(1, steps))
    seen: list[str] = []
    recorded = wrong = 0
    try:
        for step in range(last):
            found, why = _step(runners, exchange, suspect, step, record=step >= first)
            if found is not None:
                return Trace(found, "", recorded + 1)
            if step >= first:
                recorded += 1
                mine = sum(one.mismatches for one in runners if one.seat.participant.name == suspect)
                wrong += any(exchange.gather(mine))
            if why and why not in seen:
                seen.append(why)
    finally:
        for runner in runners:
            runner.end("traced")
    return Trace(None, "; ".join(seen) or _nothing(recorded, wrong), recorded)


def _nothing(recorded: int, wrong: int) -> str:
    if not wrong:
        return f"in {recorded} steps that were run again with all operations recorded, nothing was wrong"
    return (
        f"in {wrong} of {recorded} recorded steps a module gave out wrong numbers, and none of its operations did: what was wrong is not "
        "what an operation computed, but its memory or what happened between operations"
    )


def _takes_part(seat: Seat, suspect: str) -> bool:
    return seat.participant.role in ("leader", "reference") or seat.participant.name == suspect


def _step(
    runners: Sequence[Traced], exchange: Exchange, suspect: str, step: int, *, record: bool
) -> tuple[Culprit | None, str]:
    leader = next((one for one in runners if one.seat.participant.role == "leader"), None)
    mine = Recording() if record and leader is not None else None
    tape: Tape | None = None
    if leader is not None:
        with leader.recorded(mine):
            tape = leader.record(step)
    tape = exchange.share(tape)
    if tape.lost or not record:
        for runner in runners:
            if runner is not leader:
                runner.follow(step, tape)
        return None, f"the leader takes no further part: {tape.lost}" if tape.lost else ""
    right = _first(exchange.gather(mine.done if mine is not None else None)) or []
    of_suspect = Recording(right)
    here = _follow(runners, step, tape, lambda one: one.seat.participant.name == suspect, lambda: of_suspect)
    said = _first(exchange.gather((of_suspect.caught, of_suspect.parted) if here else None))
    caught, parted = said if said is not None else ([], None)
    checks: list[Recording] = []

    def check() -> Recording:
        checks.append(Recording(right, [one.number for one in caught]))
        return checks[-1]

    _follow(runners, step, tape, lambda one: one.seat.participant.role == "reference", check)
    second = [one for found in exchange.gather([(_brief(check)) for check in checks]) for one in found]
    return _judged(step, right, caught, parted, second)


def _follow(
    runners: Sequence[Traced], step: int, tape: Tape, who: Callable[[Traced], bool], make: Callable[[], Recording]
) -> bool:
    chosen = [one for one in runners if who(one)]
    for runner in chosen:
        with runner.recorded(make()):
            runner.follow(step, tape)
    return bool(chosen)


def _first(found: Sequence[Any]) -> Any:
    return next((one for one in found if one is not None), None)


_Brief = dict[int, tuple[str, str]]


def _brief(recording: Recording) -> _Brief:
    """Of a reference: by number of an operation, the digests of operands and outputs."""
    return {one.number: (one.operands, one.outputs) for one in recording.caught}


def _judged(
    step: int, right: Sequence[Done], caught: Sequence[Caught], parted: int | None, second: Sequence[_Brief]
) -> tuple[Culprit | None, str]:
    """The first operation with the operands of all references, and an output that none of them has. Pure."""
    why = ""
    for one in caught:
        name = right[one.number].name
        agree = [brief for brief in second if brief.get(one.number, ("", ""))[1] == right[one.number].digest]
        if not second or len(agree) < len(second):
            why = why or f"references disagree about {name}: it is no evidence"
            continue
        if one.case is None:
            why = why or f"an operation gives out other bits and cannot be repeated: {one.why}"
            continue
        if any(brief[one.number][0] != one.operands for brief in agree):
            why = (
                why
                or f"before {name} numbers had changed that no operation had written: memory, or a copy outside of operations"
            )
            continue
        return Culprit(step, one.number, one.case, right[one.number].digest, 1 + len(agree)), ""
    if parted is not None:
        before = right[parted].name if parted < len(right) else "the end"
        why = why or f"from operation {parted} ({before}) on the suspect does other operations than the leader"
    return None, why
