"""One participant in one mode: runs a step, shows it to its tape or compares it with the leader's, and writes its journal.

What is done in a step is the same for the leader and for those who follow; only what happens to a tensor that is shown differs. So
that nobody waits for one that fails, a participant that raises is lost, says so in its journal, and takes no further part.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bitwitness.compare import hooks
from bitwitness.compare.differing import difference, distance, ranges, spread, squares
from bitwitness.compare.records import BORDERS_OF_BACKWARD, Difference, Mode, Participant, Phase, Site, Step
from bitwitness.compare.settings import Settings
from bitwitness.compare.stored import Stored
from bitwitness.compare.tape import Tape, can_be_compared, host, site_of
from bitwitness.compare.users_code import no_exit, said
from bitwitness.compare.workload import Make, Workload
from bitwitness.errors import ConfigurationError
from bitwitness.faults.sites import batch_tensors, buffers_of, inner, parameters_of
from bitwitness.runfiles.journal import Journal
from bitwitness.scan.devices import temperature

logger = logging.getLogger(__name__)

_KEPT_IN_ALL = 500_000
"""Wrong elements that a journal holds at most, a few more: about 15 MB."""
_STORED: tuple[Phase, ...] = ("update", "state")
_BORDERS_SHOWN = 20
"""Where errors spread, the borders of modules are compared in so many steps only: how far an error has come is seen from these, and what
matters there are gradients and parameters."""


class Fault(Protocol):
    """A fault that is played on a participant, see `simulated`."""

    def attach(self, workload: Workload, *, fresh: bool = True) -> None:
        """A mode begins, with a workload that was made anew; or, not `fresh`, it goes on in one."""

    def during(self, step: int) -> AbstractContextManager[None]:
        """Entered around a step, before any hooks are placed."""

    def detach(self) -> None:
        """The mode is over."""


@dataclass(frozen=True)
class Seat:
    """A participant with what it computes on.

    Attributes:
        participant: who. device: on what. make: its workload, with the seed of the comparison or, for a control, another one.
        fault: what is played on it; None for a device that is what it is.
    """

    participant: Participant
    device: torch.device
    make: Make
    fault: Fault | None = None


@dataclass(slots=True)
class _Seen:
    """What a follower has collected in one step."""

    sites: list[Site] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)
    gradient_lost: bool = False
    drift: float = 0.0
    strangers: list[str] = field(default_factory=list)


class Runner:
    """One seat in one mode, from its first step to its last.

    Args:
        seat: who. mode: in which. settings: of the comparison. journal: its own, closed by `end`.

    Attributes:
        lost: why it takes no further part; "" while it does.

    Raises:
        ConfigurationError: the workload cannot be made or watched.
    """

    def __init__(self, seat: Seat, mode: Mode, settings: Settings, journal: Journal | None) -> None:
        self.seat, self.mode, self._settings, self._journal = seat, mode, settings, journal
        self.lost = ""
        self.control = seat.participant.role == "control"
        self._seed = settings.seed + 1 if self.control else settings.seed
        self._make()
        self._sites: dict[Site, int] = {}
        self._layouts: dict[tuple[int, ...], int] = {}
        self._ranges: dict[int, Tensor] = {}
        self._previous: Tape | None = None
        self._stored: dict[Site, Tensor] = {}
        if seat.participant.role == "leader":
            self._show_state(lambda site, tensor: self._stored.update({replace(site, phase="memory"): host(tensor)}))
        self._kept = 0
        if seat.fault is not None:
            seat.fault.attach(self.workload)

    def _make(self) -> None:
        with on(self.seat.device):
            self.workload: Workload = self.seat.make(self.seat.device, self._seed)
        self._model = inner(self.workload.model)
        self._modules = hooks.chosen(self.workload.model, self._settings.globs)

    def begin_anew(self, step: int) -> None:
        """Make the workload anew, with what is stored in parameters, buffers and optimizers as it was (see `records.begins_anew`)."""
        if not self.lost:
            self._guarded(step, self._begin_anew)

    def _begin_anew(self) -> None:
        stored = Stored.of(self.workload)
        if self.seat.fault is not None:
            self.seat.fault.detach()
        del self.workload, self._model, self._modules  # a device need not hold two
        self._make()
        with on(self.seat.device):
            stored.put_back(self.workload)
        if self.seat.fault is not None:
            self.seat.fault.attach(self.workload, fresh=False)

    # A step ----------------------------------------------------------------------------------------------------------

    def record(self, step: int) -> Tape:
        """The leader's part. Never raises for what happens in the step: then the tape says why there is no more."""
        tape, start = Tape(step), time.monotonic()
        if self.lost:
            return Tape(step, lost=self.lost)

        def show(site: Site, tensor: Tensor) -> None:
            copy = host(tensor)
            tape.entries[self._as_computed(site, copy)] = copy

        loss = self._guarded(step, lambda: self.compute(step, show))
        if self.lost:
            return Tape(step, lost=self.lost)
        for site, tensor in tape.entries.items():
            number = self._number(site)
            if self.mode == "lock-step":
                seen = ranges(tensor)
                self._ranges[number] = self._ranges[number] + seen if number in self._ranges else seen
        tape.gradient = _squares(tape, "grad_w")
        tape.weights = _squares(tape, "update")
        spent, layout = time.monotonic() - start, self._layout(tape.entries)
        self._write(Step(step, layout, spent, _finite(loss), weights=math.sqrt(tape.weights)))
        return tape

    def _as_computed(self, site: Site, value: Tensor) -> Site:
        """Of what is stored, whether the step has changed it: a frozen parameter is compared, but nobody has computed it."""
        if site.phase not in _STORED:
            return site
        kept = replace(site, phase="memory")
        before, self._stored[kept] = self._stored.get(kept), value
        return kept if before is not None and distance(value, before) == 0.0 else site

    def follow(self, step: int, tape: Tape) -> None:
        """The part of all others: compare with the tape, and in lock-step go on with what is right."""
        start, seen = time.monotonic(), _Seen()
        if self.lost:
            return
        if tape.lost:
            self.lost = f"the leader takes no further part: {tape.lost}"
            return
        loss = self._guarded(step, lambda: self.compute(step, lambda *shown: self._shown(tape, seen, *shown)))
        if not self.lost and self.mode == "lock-step":
            self.lost = self._went_another_way(step, tape, seen)
        if self.lost and not seen.differences:
            return  # else what was wrong before it broke off must not be lost with it
        drifted = not self.lost and any(site.phase == "update" for site in tape.entries)
        # What was to be computed and never came is no agreement: the layout says what was compared.
        self._write(
            Step(
                step,
                self._layout(seen.sites),
                time.monotonic() - start,
                _finite(loss),
                gradient_noise=None if self.control or self.lost else _ratio(math.fsum(seen.gradient), tape.gradient),
                gradient_lost=seen.gradient_lost,
                drift=_finite(math.sqrt(seen.drift)) if drifted else None,
                weights=math.sqrt(tape.weights) if drifted else None,
                differences=tuple(seen.differences),
            )
        )
        self._previous = tape

    def compute(self, step: int, show: hooks.Show) -> float:
        """One step of training, all of it shown; its loss.

        Raises:
            ConfigurationError: the loss is no scalar.
        """
        workload, model = self.workload, self._model
        self._seed_all(step)
        with ExitStack() as stack:
            stack.enter_context(no_exit())
            stack.enter_context(on(self.seat.device))
            if self.seat.fault is not None:
                stack.enter_context(self.seat.fault.during(step))
            for parameter in model.parameters():
                parameter.grad = None
            batch = workload.batch(step)
            for name, tensor in batch_tensors(batch).items():
                _put(show, "", "batch", name, tensor)
            with hooks.watching(workload.model, self._modules, show, borders=self._shows_borders(step)):
                loss = workload.loss_fn(workload.model, batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                    raise ConfigurationError(f"loss_fn returned {shape}: return a tensor with one element, the loss")
                if not loss.requires_grad:
                    raise ConfigurationError(
                        "loss_fn returned a tensor without a gradient: it is detached, or was computed under no_grad or of other numbers "
                        "than the model's outputs. Return the loss itself, so that a backward can be computed"
                    )
                _put(show, "", "loss", "0", loss)
                number = float(loss.detach())
                loss.backward()
            for optimizer in workload.all_optimizers:
                optimizer.step()
            if self.mode != "free" or (step + 1) % self._settings.every == 0 or step + 1 == self._settings.steps:
                self._show_state(show)
        return number

    def _shows_borders(self, step: int) -> bool:
        return self.mode == "lock-step" or step % max(1, self._settings.steps // _BORDERS_SHOWN) == 0

    def _show_state(self, show: hooks.Show) -> None:
        """Parameters, buffers and, unless nothing is made equal again, the state of optimizers."""
        parameters = parameters_of(self.workload.model)
        for name, parameter in parameters.items():
            self._put_named(show, "update", name, parameter)
        for name, buffer in buffers_of(self.workload.model).items():
            self._put_named(show, "state", name, buffer)
        if self.mode == "free":
            return
        for optimizer in self.workload.all_optimizers:
            for name, parameter in parameters.items():
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        self._put_named(show, "state", f"{name}.{key}", value)

    def _put_named(self, show: hooks.Show, phase: str, name: str, tensor: Tensor) -> None:
        owner = hooks.owner_of(name, self._modules)
        _put(show, owner, phase, name.removeprefix(f"{owner}.") if owner else name, tensor)

    # Comparing -------------------------------------------------------------------------------------------------------

    def _shown(self, tape: Tape, seen: _Seen, site: Site, tensor: Tensor) -> Tensor | None:
        """Compare a tensor with the tape's; what is to stand in its place."""
        if site.phase in _STORED and site not in tape.entries:
            site = replace(site, phase="memory")
        expected = tape.entries.get(site)
        if expected is None:
            seen.strangers.append(str(site))
            return None  # computed here only: what was done is another thing already, and has no right answer
        observed = host(tensor)
        if site.phase == "update":
            seen.drift += distance(observed, expected)
        if self.control:
            return None  # of other data: only its way is compared
        number = self._number(site)
        seen.sites.append(site)
        previous = self._previous.entries.get(site) if self._previous is not None else None
        together = self.mode == "lock-step"
        if together:
            found = difference(number, observed, expected, previous, self._keep())
        else:
            found = spread(number, observed, expected)
        if found is None:
            return None
        self._kept += len(found.elements)
        seen.differences.append(found)
        if site.phase == "grad_w":
            seen.gradient.append(found.noise)
            seen.gradient_lost |= found.nonfinite > 0
        synchronised = together or (self.mode == "parameters" and site.phase in (*_STORED, "memory"))
        return expected if synchronised else None

    def _went_another_way(self, step: int, tape: Tape, seen: _Seen) -> str:
        """Where all results are made equal again, only the control flow between them can part: on a number read from the device."""
        missing = tape.entries.keys() - set(seen.sites)
        if self.seat.participant.simulated:  # what plays it reaches into the backward, and has other borders there
            missing = {site for site in missing if site.phase not in BORDERS_OF_BACKWARD}
            seen.strangers = [one for one in seen.strangers if " grad_" not in one]
        if not missing and not seen.strangers:
            return ""
        what = (
            f"{min(map(str, missing))} never came"
            if missing
            else f"{min(seen.strangers)} came, which the leader has not"
        )
        return f"step {step}: went another way than the leader: {what} ({len(missing)} missing, {len(seen.strangers)} more)"

    def _keep(self) -> int:
        left = max(0, _KEPT_IN_ALL - self._kept)
        return min(self._settings.keep, max(1, left // 64))

    # Writing ---------------------------------------------------------------------------------------------------------

    def _number(self, site: Site) -> int:
        if site not in self._sites:
            self._sites[site] = len(self._sites)
            self._append("site", {"site": asdict(site)})
        return self._sites[site]

    def _layout(self, sites: Iterable[Site]) -> int:
        key = tuple(self._sites[site] for site in sites)
        if key not in self._layouts:
            self._layouts[key] = len(self._layouts)
            self._append("layout", {"sites": key})
        return self._layouts[key]

    def _write(self, step: Step) -> None:
        heat, clock = temperature(self.seat.device), clock_of(self.seat.device)
        self._append("step", {"step": step.to_json() | {"temperature": heat, "clock": clock}})

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(kind, record)

    def end(self, why: str = "done") -> None:
        """Say how it ended, with the task's results if it came to the end."""
        if self.seat.fault is not None:
            self.seat.fault.detach()
        if self._ranges:
            counts = {str(number): seen.tolist() for number, seen in self._ranges.items()}
            self._append("ranges", {"ranges": counts})
        if why == "done" and not self.lost and self.mode == "free" and self.workload.evaluate is not None:
            results = self._guarded(self._settings.steps, self._evaluate)
            if results is not None:
                self._append("results", {"results": results})
        self._append("end", {"why": self.lost or why})
        if self._journal is not None:
            self._journal.close()

    def _evaluate(self) -> dict[str, Any]:
        assert self.workload.evaluate is not None
        self._seed_all(-1)
        with no_exit(), on(self.seat.device):
            return dict(self.workload.evaluate(self.workload.model))

    # Surroundings ----------------------------------------------------------------------------------------------------

    def _guarded(self, step: int, do: Callable[[], Any]) -> Any:
        """Do it; where it raises, this participant is lost, and nobody else is."""
        try:
            return do()
        except Exception as error:
            if isinstance(error, ConfigurationError) and step == 0:
                raise  # later it may be wrong numbers that led there
            self.lost = f"step {step}: {said(error)}"
            logger.warning("%s takes no further part: %s", self.seat.participant.name, self.lost)
            logger.debug("the error of %s", self.seat.participant.name, exc_info=True)
            return None

    def _seed_all(self, step: int) -> None:
        digest = hashlib.blake2b(f"bitwitness compare {self._seed} {step}".encode(), digest_size=4)
        number = int.from_bytes(digest.digest(), "little")
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002  (the generator that users draw from)


def _put(show: hooks.Show, module: str, phase: str, name: str, tensor: Tensor) -> None:
    if can_be_compared(tensor):
        hooks.put(show, site_of(module, phase, name, 0, tensor), tensor)


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Inside, it is the current one of its kind."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def clock_of(device: torch.device) -> float | None:
    """The clock of a GPU's multiprocessors in MHz; None where nothing tells it."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):  # as for its temperature
        return float(torch.cuda.clock_rate(device))
    return None


def _squares(tape: Tape, phase: Phase) -> float:
    return sum(squares(one) for site, one in tape.entries.items() if site.phase == phase)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _ratio(noise: float, signal: float) -> float | None:
    if noise == 0.0:
        return 0.0
    return _finite(math.sqrt(noise / signal)) if signal else None
