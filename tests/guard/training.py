"""One training job, guarded or plain, with or without faults: the scenario that most tests are made of.

The plain loop is what a user writes without us: native DDP, `clip_grad_norm_`, `optimizer.step()`, `zero_grad()`. What a
run is compared by are digests of everything that is trained, computed here and not by the code under test.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bitwitness import BitwitnessError, CorruptionDetected, Guard, Policy
from tests.guard import models
from tests.guard.faults import Fault, Injector
from tests.guard.harness import Rank, Seen


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer with moments."""
    return [torch.optim.AdamW(module.parameters(), lr=1e-3)]


def two_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """One for matrices, one for the rest."""
    parameters = list(module.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [torch.optim.SGD(matrices, lr=1e-2, momentum=0.9), torch.optim.Adam(others, lr=1e-3)]


def averaging_hook() -> tuple[Any, Any]:
    """PyTorch's own averaging."""
    return None, default_hooks.allreduce_hook


def fp16_hook() -> tuple[Any, Any]:
    """Compresses to fp16."""
    return None, default_hooks.fp16_compress_hook


def power_sgd() -> tuple[Any, Any]:
    """Compresses by a low rank, from the third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


@dataclass(frozen=True)
class Plan:
    """Everything about a run. `hook` makes a DDP communication hook: a state and a function."""

    steps: int = 4
    model: Callable[[], nn.Module] = models.Net
    loss: Callable[[Any, Any], Tensor] = models.token_loss
    batches: Callable[[int, int, int], Any] = models.tokens
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw
    accumulate: int = 1
    clip: float | None = 1.0
    drive: Literal["short", "phases"] = "short"
    guarded: bool = True
    policy: Mapping[str, Any] = field(default_factory=lambda: {"audit": "gradients"})
    ddp: Mapping[str, Any] = field(default_factory=dict)
    hook: Callable[[], tuple[Any, Any]] | None = None
    faulty_hook: bool = False
    scaler: Mapping[str, Any] | None = None
    rebuild: bool = False
    own_generators: bool = False
    set_to_none: bool = True
    autocast_outside: bool = False
    faults: tuple[Fault, ...] = ()
    every_state: bool = True

    def with_faults(self, *faults: Fault, **changes: Any) -> Plan:
        """The same run with faults."""
        return replace(self, faults=faults, **changes)


def run(place: Rank, plan: Plan) -> Seen:
    """Run it: what happened, step by step, as JSON values."""
    return TrainingRun(place, plan).run()


class TrainingRun:
    """The objects of a run; `loss` may be replaced before the guard is made."""

    def __init__(self, place: Rank, plan: Plan) -> None:
        self.place, self.plan, self.loss = place, plan, plan.loss
        self.injector = Injector(plan.faults, place.rank)
        torch.manual_seed(2)
        self.module = plan.model()
        self.model = self._wrap()
        self.optimizers = plan.optimizers(self.module)
        self.scaler = torch.amp.GradScaler("cpu", **plan.scaler) if plan.scaler is not None else None
        self.hook = plan.hook() if plan.hook is not None else None
        if plan.faulty_hook:
            self.hook = (None, self.injector.communication_hook)
        self.injector.attach(self.module, self.optimizers)
        torch.manual_seed(100 + place.rank)
        models.seed_own(200 + place.rank)
        self.held: list[Tensor] = []
        self.seen: Seen = {"states": [], "losses": [], "held": [], "updated": [], "error": None, "logged": []}

    def _wrap(self) -> nn.Module:
        if not dist.is_initialized():
            return self.module
        return DistributedDataParallel(self.module, **self.plan.ddp)

    def run(self) -> Seen:
        with logged(self.seen["logged"]):
            if self.plan.guarded:
                self._guarded()
            else:
                self._plain()
        self.seen["struck"] = self.injector.struck
        self.seen["draws"] = list(models.draws_left())
        self.seen["final"] = self.state()
        return self.seen

    # The loop that a user writes without us ------------------------------------------------------------------------

    def _plain(self) -> None:
        plan = self.plan
        if self.hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(*self.hook)
        parameters = list(self.module.parameters())
        for step in self.steps():
            for micro in range(plan.accumulate):
                last = micro == plan.accumulate - 1
                batch = self.batch(step, micro)
                no_sync = isinstance(self.model, DistributedDataParallel) and not last
                with self.model.no_sync() if no_sync else nullcontext(), self._training():  # type: ignore[operator]
                    loss = self.loss(self.model, batch)
                    (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
                self.seen["losses"].append(loss.item())
            self.injector.before_verify()
            self._update(parameters)
            self._zero()
            self.note_state()

    def _update(self, parameters: Sequence[Tensor]) -> None:
        plain_update(parameters, self.optimizers, self.scaler, self.plan.clip)

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.plan.set_to_none)

    # The guarded loop ----------------------------------------------------------------------------------------------

    def make_guard(self) -> Guard:
        plan = self.plan
        generators = (models.OWN_TORCH, models.OWN_NUMPY, models.OWN_PYTHON) if plan.own_generators else ()
        optimizers = self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers
        settings = {"timeout": 60.0, **plan.policy}
        return Guard(
            self.model,
            optimizers,
            loss_fn=self.loss,
            run_dir=self.place.run_dir,
            policy=Policy.every_step(**settings),
            scaler=self.scaler,
            generators=generators,
            rebuild_batch=self.rebuild if plan.rebuild else None,
            inner_hook=self.hook,
        )

    def rebuild(self, step: int, rank: int, micro: int) -> Any:
        return self.injector.batch(self.plan.batches(step, rank, micro))

    def _guarded(self) -> None:
        try:
            guard = self.make_guard()
        except BitwitnessError as error:
            self.seen["error"] = described(error, -1)
            return
        self.seen["limits"] = list(guard.limits)
        step = -1
        try:
            for step in self.steps():
                self._guarded_step(guard, step)
                self.seen["held"] += [loss.item() for loss in self.held]
                self.held.clear()
                self.note_state()
        except BitwitnessError as error:
            self.seen["error"] = described(error, step)
            self.seen["gradients cleared"] = all(parameter.grad is None for parameter in self.module.parameters())
        self.seen["level"] = next(
            (getattr(check, "level", None) for check in guard.checks if check.name == "replay"), None
        )
        guard.close()

    def forward_backward(self, guard: Guard, step: int) -> None:
        """All micro-batches of a step."""
        plan = self.plan
        for micro in range(plan.accumulate):
            last = micro == plan.accumulate - 1
            batch = self.batch(step, micro)
            with self._training():
                if plan.drive == "short":
                    loss = guard.forward_backward(batch, last=last)
                else:
                    with guard.microbatch(batch, last=last) as part:
                        loss = self.loss(self.model, batch)
                        part.backward(loss)
            self.seen["losses"].append(loss.item())
            self.held.append(loss)
        self.injector.before_verify()

    def _guarded_step(self, guard: Guard, step: int) -> None:
        plan = self.plan
        self.forward_backward(guard, step)
        if plan.drive == "short" and plan.set_to_none:
            self.seen["updated"].append(guard.step(max_grad_norm=plan.clip))
            return
        updated = guard.verify_gradients()
        self.seen["updated"].append(updated)
        if updated:
            self._update(list(self.module.parameters()))
        self._zero()
        guard.verify_weights()

    # Both ------------------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        self.note_state()
        for step in range(self.plan.steps):
            self.injector.begin_step(step)
            yield step

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.injector.training = True
        outside = torch.autocast("cpu", dtype=torch.bfloat16) if self.plan.autocast_outside else nullcontext()
        with outside:
            yield
        self.injector.training = False

    def batch(self, step: int, micro: int) -> Any:
        return self.injector.batch(self.plan.batches(step, self.place.rank, micro))

    def note_state(self) -> None:
        if self.plan.every_state:
            self.seen["states"].append(self.state())

    def state(self) -> str:
        """A digest of parameters, buffers, optimizer state and the loss scale."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.module.state_dict().items()):
            _update_digest(digest, name, tensor)
        for optimizer in self.optimizers:
            for index, state in sorted(optimizer.state_dict()["state"].items()):
                for key, value in sorted(state.items()):
                    _update_digest(digest, f"{index} {key}", value)
        digest.update(repr(self.scaler.state_dict() if self.scaler is not None else None).encode())
        return digest.hexdigest()[:16]


def plain_update(
    parameters: Sequence[Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    clip: float | None,
) -> None:
    """Clip and update as a user's loop does."""
    if scaler is not None and clip is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    for optimizer in optimizers:
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()


def _update_digest(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    if isinstance(value, Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())


def described(error: BaseException, step: int) -> Seen:
    """An exception as JSON values."""
    found: Seen = {
        "type": type(error).__name__,
        "family": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "step": step,
    }
    if isinstance(error, CorruptionDetected):
        found["verdict"] = error.verdict.to_json()
        found["incident"] = str(error.incident_path) if error.incident_path is not None else None
        found["readable"] = error.incident_path is not None and (error.incident_path / "incident.json").is_file()
    return found


@contextmanager
def logged(lines: list[str]) -> Iterator[None]:
    """Collects what bitwitness logs from warnings on."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bitwitness")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
