"""Asking the guard for what cannot be, in every way we could think of; and training with it afterwards, as it should be."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bitwitness import BitwitnessError, Guard, Policy
from tests.guard import models
from tests.guard.harness import Rank, Seen
from tests.guard.training import described

POLICY = Policy.every_step(timeout=20.0)


class Asking:
    """A job that is about to be guarded, and the arguments."""

    def __init__(self, place: Rank) -> None:
        torch.manual_seed(3)
        self.place = place
        self.module = models.Net()
        self.ddp = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.arguments: dict[str, Any] = {
            "model": self.ddp,
            "optimizer": self.optimizer,
            "loss_fn": models.token_loss,
            "run_dir": place.run_dir,
            "policy": POLICY,
        }
        self.guards: list[Guard] = []

    def guard(self, **changes: Any) -> Guard:
        made = Guard(**{**self.arguments, **changes})
        self.guards.append(made)
        return made

    def train(self, guard: Guard, steps: int = 2) -> None:
        for step in range(steps):
            guard.forward_backward(models.tokens(step, self.place.rank, 0))
            guard.step()

    def only_here(self, rank: int, **wrong: Any) -> Guard:
        """One rank asks for something wrong, the others for nothing special."""
        return self.guard(**(wrong if self.place.rank == rank else {}))


@dataclass(frozen=True)
class Refusal:
    """A way to ask, and words of the answer. `again`: whether the same model can be guarded afterwards."""

    ask: Callable[[Asking], object]
    error: str
    words: tuple[str, ...]
    again: bool = True
    leaves_files: bool = False


def ask(place: Rank, name: str) -> Seen:
    """Ask, remember the answer, and train as one should."""
    asking, refusal = Asking(place), REFUSALS[name]
    seen: Seen = {"error": None, "afterwards": None}
    started = time.monotonic()
    try:
        refusal.ask(asking)
    except BitwitnessError as error:
        seen["error"] = described(error, -1)
    seen["waited"] = time.monotonic() - started
    seen["files"] = sorted(str(file.relative_to(place.folder)) for file in place.folder.rglob("*") if file.is_file())
    for guard in asking.guards:
        guard.close()
    if refusal.again:
        dist.barrier()
        before = torch.cat([parameter.detach().flatten().clone() for parameter in asking.module.parameters()])
        asking.optimizer.zero_grad()
        try:
            with asking.guard(run_dir=place.folder / "afterwards") as guard:
                asking.train(guard)
        except BitwitnessError as error:
            seen["afterwards"] = described(error, -1)
        after = torch.cat([parameter.detach().flatten() for parameter in asking.module.parameters()])
        seen["trained"] = not torch.equal(before, after)
    return seen


def _below_a_file(asking: Asking) -> object:
    file = asking.place.folder / "file"
    if asking.place.rank == 0:
        file.write_text("")
    dist.barrier()
    return asking.guard(run_dir=file / "run")


def _second_guard(asking: Asking) -> object:
    asking.guard(run_dir=asking.place.folder / "first")
    return asking.guard()


def _own_hook(asking: Asking) -> object:
    asking.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return asking.guard()


def _two_devices(asking: Asking) -> object:
    asking.module.head.to("meta")
    return asking.guard()


def _sharded(asking: Asking) -> object:
    model = models.Net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return asking.guard(model=model)


def _frozen(asking: Asking) -> object:
    asking.module.requires_grad_(False)
    return asking.guard()


def _other_weights(asking: Asking) -> object:
    with torch.no_grad():
        asking.module.head.bias[0] += asking.place.rank == 1
    return asking.guard()


def _ignored(asking: Asking) -> object:
    module = models.Net()
    module._ddp_params_and_buffers_to_ignore = ["head.bias"]  # type: ignore[assignment]
    return asking.guard(model=DistributedDataParallel(module), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


def _losing(loss: Callable[[Any, Any], Any], **changes: Any) -> Callable[[Asking], object]:
    def ask_with(asking: Asking) -> object:
        guard = asking.guard(loss_fn=loss, **changes)
        asking.train(guard)
        return guard

    return ask_with


def _driving(drive: Callable[[Asking, Guard, Mapping[str, Tensor]], object]) -> Callable[[Asking], object]:
    def ask_with(asking: Asking) -> object:
        return drive(asking, asking.guard(), models.tokens(0, asking.place.rank, 0))

    return ask_with


_counter = itertools.count()
_first_seen: dict[int, bool] = {}


def _counting_loss(model: Any, batch: Any) -> Tensor:
    return models.token_loss(model, batch) * (1.0 + 0.01 * next(_counter))


def _remembering_loss(model: Any, batch: Any) -> Tensor:
    again = _first_seen.setdefault(id(batch["x"]), False)
    _first_seen[id(batch["x"])] = True
    return models.token_loss(model, batch) * (0.5 if again else 1.0)


def _collective_loss(model: Any, batch: Any) -> Tensor:
    loss = models.token_loss(model, batch)
    shared = loss.detach().clone()
    dist.all_reduce(shared)
    return loss


def _mutating_loss(model: Any, batch: Any) -> Tensor:
    batch["x"].remainder_(3)
    return models.token_loss(model, batch)


def _vector_loss(model: Any, batch: Any) -> Tensor:
    return models.token_loss(model, batch).repeat(3)


def _backward_twice(asking: Asking, guard: Guard, batch: Any) -> None:
    with guard.microbatch(batch) as micro:
        loss = models.token_loss(asking.ddp, batch)
        micro.backward(loss)
        micro.backward(loss)


def _no_backward(asking: Asking, guard: Guard, batch: Any) -> None:
    with guard.microbatch(batch):
        models.token_loss(asking.ddp, batch)


def _micro_after_last(asking: Asking, guard: Guard, batch: Any) -> None:
    guard.forward_backward(batch)
    guard.forward_backward(batch)


def _only_partial(asking: Asking, guard: Guard, batch: Any) -> None:
    guard.forward_backward(batch, last=False)
    guard.step()


def _weights_first(asking: Asking, guard: Guard, batch: Any) -> None:
    guard.forward_backward(batch)
    guard.verify_weights()


def _closed(asking: Asking, guard: Guard, batch: Any) -> None:
    guard.close()
    guard.close()
    guard.forward_backward(batch)


class _Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")


def _unpicklable_batch(asking: Asking, guard: Guard, batch: Any) -> None:
    guard.forward_backward({**batch, "extra": _Unpicklable()})
    guard.step()


C, W = "ConfigurationError", "WorkloadError"
OFF = 'Policy(audit="off")'
REFUSALS = {
    "no loss_fn": Refusal(lambda a: a.guard(loss_fn=None), C, ("loss_fn=", OFF)),
    "loss_fn is text": Refusal(lambda a: a.guard(loss_fn="loss"), C, ("loss_fn is a str", "callable")),
    "policy is a dictionary": Refusal(lambda a: a.guard(policy={"audit": "off"}), C, ("dict", "bitwitness.Policy")),
    "different policies": Refusal(
        lambda a: a.guard(policy=POLICY.replace(check_every=1 + a.place.rank)), C, ("different policies", "every rank")
    ),
    "optimizer is a model": Refusal(lambda a: a.guard(optimizer=a.module), C, ("optimizer", "torch.optim.Optimizer")),
    "no optimizer": Refusal(lambda a: a.guard(optimizer=[]), C, ("optimizer is empty", "at least one")),
    "optimizer of another model": Refusal(
        lambda a: a.guard(optimizer=torch.optim.SGD(models.Net().parameters(), lr=0.1)),
        C,
        ("no parameter of this model",),
    ),
    "scaler is a number": Refusal(lambda a: a.guard(scaler=2.0), C, ("scaler is a float", "GradScaler")),
    "generator is a number": Refusal(
        lambda a: a.guard(generators=[3]), C, ("generators[0] is a int", "torch.Generator")
    ),
    "generator is a number on rank 1": Refusal(
        lambda a: a.only_here(1, generators=[3]), C, ("generators[0] is a int", "ranks 1")
    ),
    "policy is a dictionary on rank 1": Refusal(
        lambda a: a.only_here(1, policy={}), C, ("bitwitness.Policy", "ranks 1")
    ),
    "model is plain on rank 1": Refusal(
        lambda a: a.only_here(1, model=a.module), C, ("DistributedDataParallel", "ranks 1")
    ),
    "rebuild_batch is text": Refusal(
        lambda a: a.guard(rebuild_batch="again"), C, ("rebuild_batch is a str", "callable")
    ),
    "run_dir is empty": Refusal(lambda a: a.guard(run_dir=""), C, ("run_dir", "storage that all nodes share")),
    "run_dir below a file": Refusal(_below_a_file, "RunFilesError", ("file/run", "Not a directory")),
    "second guard": Refusal(_second_guard, C, ("already guarded", "close()"), leaves_files=True),
    "a hook of one's own": Refusal(_own_hook, C, ("communication hook", "inner_hook="), again=False),
    "model is None": Refusal(lambda a: a.guard(model=None), C, ("model is a NoneType", "torch.nn.Module")),
    "plain module": Refusal(lambda a: a.guard(model=a.module), C, ("plain Net", "DistributedDataParallel")),
    "sharded module": Refusal(_sharded, C, ("sharded", "only DDP")),
    "two devices": Refusal(_two_devices, W, ("several devices (cpu, meta)", "model.to(device)"), again=False),
    "nothing to train": Refusal(_frozen, W, ("no parameter that requires a gradient",), again=False),
    "ignored parameters": Refusal(_ignored, C, ("DDP ignores", "head.bias")),
    "other weights on one rank": Refusal(
        _other_weights, C, ("ranks [1]", "head.bias", "same checkpoint"), again=False, leaves_files=True
    ),
    "vector loss": Refusal(_losing(_vector_loss), W, ("shape [3]", "mean or sum"), leaves_files=True),
    "loss is a number": Refusal(
        _losing(lambda m, b: models.token_loss(m, b).item()), W, ("float", "scalar tensor"), leaves_files=True
    ),
    "loss without gradient": Refusal(
        _losing(lambda m, b: models.token_loss(m, b).detach()),
        W,
        ("requires no gradient", "detached"),
        leaves_files=True,
    ),
    "loss does not repeat": Refusal(
        _losing(_counting_loss), W, ("does not repeat", "generators=", OFF), leaves_files=True
    ),
    "loss keeps state": Refusal(_losing(_remembering_loss), W, ("keeps Python state", OFF), leaves_files=True),
    "loss with a collective": Refusal(
        _losing(_collective_loss), W, ("collective", "allreduce_", OFF), leaves_files=True
    ),
    "loss changes its batch": Refusal(
        _losing(_mutating_loss), W, ("the batch changed", "in place", OFF), leaves_files=True
    ),
    "batch cannot travel": Refusal(
        _driving(_unpicklable_batch), W, ("cannot be sent", "not this one", "rebuild_batch="), leaves_files=True
    ),
    "backward twice": Refusal(_driving(_backward_twice), W, ("twice", "add the losses"), leaves_files=True),
    "no backward": Refusal(_driving(_no_backward), W, ("micro.backward() was not called",), leaves_files=True),
    "micro-batch after the last": Refusal(_driving(_micro_after_last), C, ("last=False", "step()"), leaves_files=True),
    "step too early": Refusal(_driving(_only_partial), C, ("last=True",), leaves_files=True),
    "step without a micro-batch": Refusal(_driving(lambda a, g, b: g.step()), C, ("last=True",), leaves_files=True),
    "weights before gradients": Refusal(_driving(_weights_first), C, ("verify_gradients()", "both"), leaves_files=True),
    "closed": Refusal(_driving(_closed), C, ("closed", "make a new one"), leaves_files=True),
}
TRIED_AGAIN = {
    "no loss_fn",
    "different policies",
    "model is plain on rank 1",
    "run_dir below a file",
    "second guard",
    "vector loss",
    "loss keeps state",
    "loss with a collective",
    "backward twice",
    "step too early",
    "closed",
}
"""After these the model is guarded and trained by default, after all others with `BITWITNESS_EXHAUSTIVE=1`."""
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    REFUSALS = {name: replace(one, again=one.again and name in TRIED_AGAIN) for name, one in REFUSALS.items()}


def absent(place: Rank, missing: int) -> Seen:
    """One rank makes no guard at all."""
    asking = Asking(place)
    started = time.monotonic()
    error = None
    if place.rank != missing:
        try:
            asking.guard(policy=POLICY.replace(timeout=3.0))
        except BitwitnessError as caught:
            error = described(caught, -1)
    waited = time.monotonic() - started
    dist.barrier()
    return {"error": error, "waited": waited}
