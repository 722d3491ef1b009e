"""What a resume must put back, kind by kind of model, optimizer and data loader; and what a save must leave as it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from bitwitness import Guard
from bitwitness.runfiles import RunFiles
from tests.guard import models
from tests.guard.harness import Rank, Seen
from tests.guard.saving import Kind, Small, barrier, bits, caught, expected, sources
from tests.guard.training import two_optimizers


class Tied(models.Net):
    """One tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Forgetful(models.Net):
    """A buffer that no state_dict holds, other on each rank, and that the forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drift", torch.zeros(models.WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.drift, Tensor)
        self.drift += tokens.float().mean() / 100
        hidden = self.norm(torch.relu(self.site(self.embedding(tokens)))) + self.drift
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class Careful(torch.optim.Optimizer):
    """Parameters in bf16, momentum and a master copy in fp32."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"], state["momentum"] = parameter.float(), torch.zeros_like(parameter).float()
                    state["step"] = 0
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"] / state["step"] ** 0.5)
                parameter.copy_(state["master"])


def half() -> nn.Module:
    return models.BatchNorm().bfloat16()


def careful(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [Careful(module.parameters())]


def amsgrad(module: nn.Module) -> list[torch.optim.Optimizer]:
    """With a rate that is a tensor, and a group that came later."""
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters[:2], lr=torch.tensor(1e-3), amsgrad=True)
    optimizer.add_param_group({"params": parameters[2:], "lr": torch.tensor(2e-3)})
    return [optimizer]


KINDS = {
    "buffers of each rank": Kind(),
    "broadcast buffers": Kind(ddp={}),
    "accumulated": Kind(accumulate=2),
    "scaler": Kind(scaler=True),
    "two optimizers": Kind(optimizers=two_optimizers),
    "amsgrad": Kind(optimizers=amsgrad),
    "tied weights": Kind(model=Tied),
    "buffers that are not saved": Kind(model=Forgetful),
    "bf16 and fp32": Kind(model=half, optimizers=careful),
    "frozen": Kind(model=models.Frozen, ddp={"find_unused_parameters": True}),
    "static graph": Kind(ddp={"static_graph": True}),
    "bucket views": Kind(ddp={"gradient_as_bucket_view": True}),
}
ELSEWHERE = {"buffers of each rank", "accumulated", "scaler", "two optimizers", "static graph", "bucket views"}
"""What other tests of checkpoints train with as well, or what changes nothing that is saved: with `BITWITNESS_EXHAUSTIVE=1`."""
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    KINDS = {name: kind for name, kind in KINDS.items() if name not in ELSEWHERE}


def put_back(place: Rank, name: str) -> Seen:
    """Two steps, a save, two more; the same from the checkpoint."""
    kind = KINDS[name]
    job = Small(place, kind)
    with job.guard() as guard:
        job.train(guard, 2)
        guard.save_checkpoint()
        job.train(guard, 4)
    seen = Seen(final=job.state())
    again = Small(place, kind)
    with again.guard() as guard:
        seen["from"] = again.resume(guard)
        again.train(guard, 4)
    return seen | {"resumed": again.state(), "expected": expected(place, 4, kind)}


def refuses_its_state(place: Rank, _: None) -> Seen:
    """Somebody's `load_state_dict` raises."""
    job = Small(place)
    with job.guard() as guard:
        job.train(guard, 1)
        guard.save_checkpoint()
    again = Small(place)

    def refuse(state: Any) -> None:
        raise KeyError("no such clock")

    again.counter.load_state_dict = refuse  # type: ignore[method-assign]
    with again.guard() as guard:
        return {"error": caught(guard.resume)}


# Data loaders ---------------------------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Twelve samples with noise from the global generator; in a worker, whose state no loader restores, without it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        sample, here = models.tokens(index, self.rank, 0), torch.utils.data.get_worker_info() is None
        return {"x": sample["x"][0], "y": sample["y"][0], "noise": torch.rand(()) if here else torch.ones(())}


def noisy_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = models.token_loss(model, batch) * (1 + batch["noise"].mean())
    return loss


SHARED = torch.Generator()
LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"shuffle": True},
    "own generator": lambda: {"shuffle": True, "generator": SHARED.manual_seed(5)},
    "one worker": lambda: {"shuffle": True, "num_workers": 1},
}


@dataclass
class Epochs:
    """A loop as users write it: epochs of three batches, saves before, in, at the end of and between them."""

    place: Rank
    name: str

    def __post_init__(self) -> None:
        # One is asked everywhere, the others before it begins and in the midst of an epoch only.
        self.saves: tuple[int, ...]
        self.total, self.saves = (8, (0, 2, 3, 6)) if self.name == "plain" else (4, (0, 2))
        self.job = Small(self.place)
        self.loader = StatefulDataLoader(Noisy(self.place.rank), batch_size=4, **LOADERS[self.name]())
        self.losses: list[float] = []

    def guard(self) -> Guard:
        return self.job.guard(
            loss_fn=noisy_loss,
            stateful={"counter": self.job.counter, "loader": self.loader},
            policy={"keep_checkpoints": 10, "audit": "off"},
        )

    def run(self, step: Callable[[Any], None], save: Callable[[], object]) -> None:
        if self.job.step == 0 and 0 in self.saves:
            save()
        while self.job.step < self.total:
            for batch in self.loader:
                step(batch)
                self.job.step += 1
                if self.job.step in self.saves and self.job.step % 6:
                    save()
                if self.job.step == self.total:
                    break
            if self.job.step == 6 and 6 in self.saves:
                save()

    def plain(self) -> None:
        def step(batch: Any) -> None:
            loss = noisy_loss(self.job.model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.job.module.parameters(), 1.0)
            self.job.optimizers[0].step()
            self.job.optimizers[0].zero_grad()
            self.losses.append(float(loss.detach()))

        self.run(step, lambda: None)

    def guarded(self, guard: Guard, saves: bool = True) -> None:
        def step(batch: Any) -> None:
            self.losses.append(float(guard.forward_backward(batch)))
            guard.step(max_grad_norm=1.0)

        self.run(step, guard.save_checkpoint if saves else lambda: None)

    def outcome(self) -> list[Any]:
        return [self.losses[-1], bits(self.job.module.state_dict(), sources(), SHARED.get_state())]


def loaders(place: Rank, name: str) -> Seen:
    """Saves change no bit, and from each of them the run goes on as if nothing had happened."""
    plain = Epochs(place, name)
    plain.plain()
    seen = Seen(plain=plain.outcome(), resumed={}, losses=plain.losses, saves=plain.saves)
    first = Epochs(place, name)
    with first.guard() as guard:
        first.guarded(guard)
    seen["guarded"] = first.outcome()
    for path in RunFiles(place.run_dir).checkpoints.list():
        again = Epochs(place, name)
        with again.guard() as guard:
            start = again.job.resume(guard)
            if place.rank == 0:
                RunFiles(place.run_dir).checkpoints.remove(path)
            barrier()
            if start == 3:  # a save before the loop goes on must not disturb it either
                guard.save_checkpoint()
            again.guarded(guard, saves=False)
        seen["resumed"][start] = [*again.outcome(), again.losses == plain.losses[start:]]
        barrier()
        if start == 3:
            second = Epochs(place, name)
            with second.guard() as guard:
                assert second.job.resume(guard) == 3
                if place.rank == 0:
                    RunFiles(place.run_dir).checkpoints.remove(path)
                barrier()
                second.guarded(guard, saves=False)
            seen["twice"] = second.outcome()
    return seen
