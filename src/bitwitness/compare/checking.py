"""What is refused before a comparison begins: participants that cannot be compared, and work that does not repeat.

All that follows rests on one sentence: on healthy devices of one kind this work gives the same bits each time. A comparison of work for
which it is false would find everybody faulty, hours later. So each healthy participant computes two steps twice, from the beginning,
and the first tensor that comes out otherwise is named, with what to do. Nothing has been written by then.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwitness.compare import hooks
from bitwitness.compare.exchange import Exchange
from bitwitness.compare.lineup import settled
from bitwitness.compare.participant import Runner, Seat
from bitwitness.compare.records import Participant, Site
from bitwitness.compare.settings import Settings
from bitwitness.compare.tape import can_be_compared, host
from bitwitness.compare.users_code import no_exit, said
from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.faults.sites import batch_tensors, parameters_of

logger = logging.getLogger(__name__)

STEPS = 2
"""Computed twice each: the second one begins from parameters and states of the optimizer that the first has made."""

_WEIGHTS = "initial weights"

_NO_OTHER_DATA = (
    "with another seed the first batch is the same: if the workload does not use its seed, the control shows nothing of how far a healthy "
    "run drifts"
)

_Digests = dict[str, bytes]
"""By step and site, in the order in which they were computed."""


@dataclass(slots=True)
class Checked:
    """What a participant found when it tried the work.

    Attributes:
        name, role: who.
        problem: why nothing can be compared; "" where something can.
        here: it is about this participant, and may be otherwise on others.
        digests: of all it computed, for comparing it with others.
        warnings: for people.
    """

    name: str
    role: str
    problem: str = ""
    here: bool = False
    digests: _Digests = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


# Who --------------------------------------------------------------------------------------------------------------


def check_participants(participants: Sequence[Participant]) -> None:
    """Refuse who cannot be compared with one another.

    Raises:
        ConfigurationError: there are fewer than two healthy ones, no suspect, two of one device, or two kinds of devices.
    """
    healthy = [one for one in participants if one.role in ("leader", "reference")]
    suspects = [one for one in participants if one.role == "suspect"]
    compared = [*suspects, *healthy]
    if not suspects:
        raise ConfigurationError("there is no suspect: say with --suspect which device is under suspicion")
    if len(healthy) < 2 or not any(one.role == "leader" for one in healthy):
        raise ConfigurationError(
            f"a suspect needs at least two healthy references of its kind, and there are {len(healthy)}: where one differs from one, "
            "nobody knows which of them is wrong. Name more with --reference, or start on more nodes"
        )
    _refuse_twice(compared)
    _refuse_other_kinds(compared)


def _refuse_twice(compared: Sequence[Participant]) -> None:
    known: dict[str, Participant] = {}
    for one in compared:
        other = known.setdefault(one.device.device, one)
        if other is not one:
            raise ConfigurationError(
                f"{other.name} and {one.name} are the same device, {one.device.device} on {one.device.node}: a device that is compared "
                "with itself repeats its mistakes and agrees. Name another one"
            )


def _refuse_other_kinds(compared: Sequence[Participant]) -> None:
    first = compared[0]
    for one in compared[1:]:
        mine, theirs = first.device.kind, one.device.kind
        differing = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
        if differing:
            shown = "; ".join(f"{name}: {mine.get(name, '-')} and {theirs.get(name, '-')}" for name in differing[:6])
            raise ConfigurationError(
                f"{first.name} ({first.device.node}) and {one.name} ({one.device.node}) are not of one kind, so that other bits would be "
                f"no fault: {shown}. Take devices of one model, with the same driver, software and settings"
            )


# What -------------------------------------------------------------------------------------------------------------


def check_work(seats: Sequence[Seat], settings: Settings, exchange: Exchange) -> list[str]:
    """Try the work on all participants of all processes; warnings for people.

    Args:
        seats: of this process.
        settings: of the comparison.
        exchange: with the other processes.

    Raises:
        ConfigurationError: nothing can be compared. The same on all ranks, so that all end.
        RankLost: a rank did not answer.
    """
    found: list[Checked] = []
    with settled(seats):
        # References first: what is wrong with the work is then not said of the suspect.
        for seat in sorted(seats, key=lambda one: one.participant.role == "suspect"):
            found.append(check_seat(seat, settings))
            if found[-1].problem and not found[-1].here:
                break  # others of this process would mostly say the same
    everybody = [one for answers in exchange.gather(found) for one in answers]
    refused = [one for one in everybody if one.problem]
    if refused:
        raise ConfigurationError(_refusal(refused, everybody))
    return [text for one in everybody for text in one.warnings] + _differences(everybody)


def check_seat(seat: Seat, settings: Settings) -> Checked:
    """Try the work on one participant: whether it can be made, watched and computed, and repeats. Never raises for the work's sake."""
    who = seat.participant
    checked = Checked(who.name, who.role)
    try:
        if who.role == "control":
            checked.warnings = _check_control(seat, settings)
        elif who.role == "suspect":
            _made(seat, settings).end("tried")  # what it computes is what is in question
        else:
            checked.digests = _tried(seat, settings, evaluate=who.role == "leader" and "free" in settings.modes)
            again = _tried(seat, settings, evaluate=False)
            checked.problem = _first_difference(checked.digests, again)
            if who.role == "leader" and not checked.problem:
                _check_watching(seat, settings)
            checked.here = True
    except BitwitnessError as error:
        checked.problem = str(error)
    except Exception as error:  # whatever a user's own code raises: it is named, and nothing is begun
        logger.debug("the work cannot be done on %s", who.name, exc_info=True)
        checked.problem, checked.here = said(error), True
    return checked


def repeats(seat: Seat, settings: Settings) -> str:
    """Whether two steps give the same bits when they are computed a second time from the beginning; "" where they do, else why not.

    Raises:
        ConfigurationError: the work cannot be compared at all.
    """
    with settled([seat]):
        return _first_difference(
            _tried(seat, settings, evaluate=False),
            _tried(seat, settings, evaluate=False),
        )


def _made(seat: Seat, settings: Settings) -> Runner:
    runner = Runner(seat, "parameters", settings, None)
    if not any(parameter.requires_grad for parameter in parameters_of(runner.workload.model).values()):
        raise ConfigurationError("the model has no parameters that are trained, so there is no backward to compare")
    return runner


def _tried(seat: Seat, settings: Settings, *, evaluate: bool) -> _Digests:
    """The digests of all that two steps compute."""
    runner = _made(seat, settings)
    found = _weights(runner)
    at = 0

    def show(site: Site, tensor: Tensor) -> None:
        found[f"step {at}: {site}"] = _digest(tensor)

    try:
        for at in range(STEPS):
            loss = runner.compute(at, show)
            if not math.isfinite(loss):
                raise ConfigurationError(
                    f"the loss is {loss} in step {at}: what comes after it is NaN on all devices alike, and shows no fault. Give work "
                    "whose loss is finite"
                )
        with no_exit():
            again = _batch(runner.workload.batch(0))
        if again != [digest for key, digest in found.items() if key.startswith("step 0: outside batch")]:
            raise ConfigurationError(f"batch(0) gives other data when it is asked a second time. {_advice(' batch')}")
        if evaluate and runner.workload.evaluate is not None:
            with no_exit():
                results = runner.workload.evaluate(runner.workload.model)
            _check_results(results)
    finally:
        runner.end("tried")
    return found


def _check_watching(seat: Seat, settings: Settings) -> None:
    """Whether the work is the same when nobody looks.

    Raises:
        ConfigurationError: it is not.
    """
    watched, plain = _made(seat, settings), _made(seat, settings)
    try:
        for at in range(STEPS):
            watched.compute(at, _nothing)
            with hooks.unwatched():
                plain.compute(at, _nothing)
        hooks.check_unchanged(parameters_of(watched.workload.model), parameters_of(plain.workload.model))
    finally:
        watched.end("tried")
        plain.end("tried")


def _nothing(site: Site, tensor: Tensor) -> None:
    """Shown, and left as it is."""


def _weights(runner: Runner) -> _Digests:
    parameters = parameters_of(runner.workload.model)
    return {f"{_WEIGHTS}: {name}": _digest(parameter) for name, parameter in parameters.items()}


def _digest(tensor: Tensor) -> bytes:
    flat = host(tensor).reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=8).digest()


def _check_results(results: object) -> None:
    if not isinstance(results, Mapping):
        raise ConfigurationError(
            f"evaluate gives a {type(results).__name__}: give a dictionary, by name a list of answers or a number; or leave evaluate out"
        )
    for name, value in results.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        whole = all(isinstance(one, int) for one in value) if listed else isinstance(value, int | float)
        if not isinstance(name, str) or not whole:
            raise ConfigurationError(
                f"evaluate gives {str(name)!r:.40} as {type(value).__name__}: give a list of ints, an answer a question and -1 for none, "
                "or a number"
            )


def _check_control(seat: Seat, settings: Settings) -> tuple[str, ...]:
    """A control must differ by its data, and by nothing else."""
    own = _made(seat, settings)
    with_seed = seat.make(seat.device, settings.seed)
    plain = parameters_of(with_seed.model)
    for key, digest in _weights(own).items():
        name = key.removeprefix(f"{_WEIGHTS}: ")
        if name not in plain or _digest(plain[name]) != digest:
            raise ConfigurationError(
                f"with another seed the workload has other initial weights ({name}), so that it would be no control: the seed is of the "
                "order of data; draw weights from a seed that is always the same, or give --no-control"
            )
    with no_exit():
        batches = [_batch(own.workload.batch(0)), _batch(with_seed.batch(0))]
    own.end("tried")
    if batches[0] and batches[0] == batches[1]:
        return (_NO_OTHER_DATA,)
    return ()


def _batch(batch: Any) -> list[bytes]:
    return [_digest(tensor) for tensor in batch_tensors(batch).values() if can_be_compared(tensor)]


# In words ---------------------------------------------------------------------------------------------------------


def _first_difference(one: _Digests, other: _Digests) -> str:
    """What came out otherwise the second time, and what to do; "" for nothing."""
    for key, digest in one.items():
        if other.get(key) == digest:
            continue
        what = "was not computed at all" if key not in other else "came out otherwise"
        return f"{key} {what} when the same was computed a second time. {_advice(key)}"
    more = [key for key in other if key not in one]
    return f"{more[0]} was computed only the second time. {_advice(more[0])}" if more else ""


def _advice(key: str) -> str:
    if key.startswith(_WEIGHTS):
        return "Set a fixed seed in the function that makes the workload, before it makes the model"
    if " batch" in key:
        return (
            "Make batch(step) a function of the step alone: a generator that is seeded by it, no loader that shuffles or goes on where it "
            "was"
        )
    return (
        "Deterministic algorithms are switched on here; what may be left are kernels of your own or Triton's, the backward of fused "
        "attention, atomic additions, or random numbers that come from elsewhere than torch, numpy and random"
    )


def _refusal(refused: Sequence[Checked], everybody: Sequence[Checked]) -> str:
    first = refused[0]
    where = f"on {first.name}: " if first.here else ""
    text = f"nothing can be compared: {where}{first.problem}"
    others = [one.name for one in everybody if one.role in ("leader", "reference") and not one.problem and one.digests]
    if first.here and first.role != "suspect" and len(others) >= 2 and len(refused) == 1:
        text += f". It does repeat on {', '.join(others)}: then {first.name} itself is under suspicion; take another reference"
    return text


def _differences(everybody: Sequence[Checked]) -> list[str]:
    """Where healthy ones do not even agree in the first steps: no refusal, for which of them is to be left out nobody can tell."""
    leader = next((one for one in everybody if one.role == "leader"), None)
    found = []
    for one in everybody:
        if leader is None or one.role != "reference":
            continue
        differing = next((key for key, digest in leader.digests.items() if one.digests.get(key) != digest), "")
        if differing:
            found.append(
                f"{one.name} and {leader.name} differ in {differing}: one of them is no healthy reference of this kind. Nothing is counted "
                "where they differ"
            )
    return found
