"""A job that saves, is hit, and goes on elsewhere: what a user writes, from beginning to end, in one process a rank.

Everything that a real job has and that a resume must put back is here: a model of more than 1 MiB (DDP then has several
buckets, which it regroups after its first backward), dropout, generators of the user's own, a shuffling loader with workers
that is in the midst of an epoch, a scheduler, an average of the weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from bitwitness import BitwitnessError, Guard, Policy
from tests.guard.faults import Fault, Injector
from tests.guard.harness import Rank, Seen
from tests.guard.training import described, plain_update

WORDS, WIDTH, LENGTH, BATCH = 512, 192, 8, 4
OWN = torch.Generator()


class Large(nn.Module):
    """1.3 MiB of parameters, dropout, running statistics, and noise from a generator of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.site = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.site(self.embedding(tokens)).flatten(0, 1)
        hidden = self.batch_norm(hidden) + 0.1 * torch.rand(WIDTH, generator=OWN)
        logits: Tensor = self.head(self.dropout(torch.relu(self.middle(hidden))))
        return logits


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Twenty-eight short sequences, seven batches of them an epoch; each a function of its index and of the rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.rank + index)
        return torch.randint(WORDS, (LENGTH + 1,), generator=generator)


@dataclass(frozen=True)
class Course:
    """A job and what befalls it.

    `fault`: strikes on the rank's node, and is gone where the rank runs elsewhere. `workers`: of the loader. `every`: steps
    between saves. `guarded`: False is the loop that a user writes without us.
    """

    steps: int = 9
    every: int = 3
    workers: int = 1
    accumulate: int = 1
    fault: Fault | None = None
    guarded: bool = True
    scaler: bool = False
    per_node: int = 1


class Job:
    """The objects of one start of the job."""

    def __init__(self, place: Rank, course: Course, fault: Fault | None) -> None:
        self.place, self.course = place, course
        torch.manual_seed(2)
        self.module = Large()
        self.model = DistributedDataParallel(self.module) if dist.is_initialized() else self.module
        matrices = [one for one in self.module.parameters() if one.dim() > 1]
        others = [one for one in self.module.parameters() if one.dim() <= 1]
        self.optimizers = [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(others, lr=1e-2, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], step_size=4, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) if course.scaler else None
        self.average = torch.optim.swa_utils.AveragedModel(self.module)
        torch.manual_seed(100 + place.rank)
        OWN.manual_seed(200 + place.rank)
        self.loader = StatefulDataLoader(Sentences(place.rank), BATCH, shuffle=True, num_workers=course.workers)
        self.injector = Injector([fault] if fault is not None else [], place.rank)
        self.injector.attach(self.module, self.optimizers)

    def batches(self) -> Iterator[Tensor]:
        while True:
            yield from self.loader

    def guard(self, **policy: Any) -> Guard:
        settings = {"audit": "gradients", "timeout": 60.0, "checkpoint_every": self.course.every, **policy}
        return Guard(
            self.model,
            self.optimizers,
            loss_of,
            run_dir=self.place.run_dir,
            policy=Policy.every_step(**settings),
            scaler=self.scaler,
            generators=[OWN],
            stateful={"loader": self.loader, "scheduler": self.scheduler, "average": self.average},
        )

    def train(self, guard: Guard) -> Seen:
        """From where it can go on to the end."""
        start = guard.resume()
        seen: Seen = {"from": start, "losses": [], "error": None, "saved": []}
        batches = self.batches()
        step = start
        try:
            for step in range(start, self.course.steps):
                self.injector.begin_step(step)
                for micro in range(self.course.accumulate):
                    self.injector.training = True
                    loss = guard.forward_backward(next(batches), last=micro == self.course.accumulate - 1)
                    self.injector.training = False
                    seen["losses"].append(float(loss))
                guard.step(max_grad_norm=1.0)
                self.after_update()
                if (step + 1) % self.course.every == 0 and step + 1 < self.course.steps:
                    seen["saved"].append(guard.save_checkpoint().name)
        except BitwitnessError as error:
            seen["error"] = described(error, step)
        finally:
            self.injector.remove()
            guard.close()
        return seen | {"final": self.state(), "struck": self.injector.struck}

    def train_plain(self) -> Seen:
        """Without us: no guard, no save, nothing goes wrong."""
        batches = self.batches()
        losses = []
        for _ in range(self.course.steps):
            for micro in range(self.course.accumulate):
                last = micro == self.course.accumulate - 1
                self.model.require_backward_grad_sync = last
                loss = loss_of(self.model, next(batches))
                (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
                losses.append(float(loss.detach()))
            plain_update(list(self.module.parameters()), self.optimizers, self.scaler, 1.0)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.after_update()
        return {"from": 0, "losses": losses, "final": self.state()}

    def after_update(self) -> None:
        self.scheduler.step()
        self.average.update_parameters(self.module)

    def state(self) -> str:
        """A digest of everything that is trained, of the average, and of what every generator draws next."""
        digest = hashlib.sha256()
        states: list[Any] = [self.module.state_dict(), self.average.state_dict(), self.scheduler.state_dict()]
        states += [optimizer.state_dict() for optimizer in self.optimizers]
        states += [self.scaler.state_dict() if self.scaler is not None else None]
        states += [torch.get_rng_state(), OWN.get_state()]
        _update(digest, states)
        return digest.hexdigest()[:16]


def _update(digest: Any, value: Any) -> None:
    """Every bit of nested states, written down here and not by the code under test."""
    if isinstance(value, Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _update(digest, one)
    else:
        digest.update(repr(value).encode())


def never_hit(place: Rank, course: Course) -> Seen:
    """The reference: the loop of a user without us."""
    return Job(place, course, None).train_plain()


def recovered(place: Rank, course: Course) -> Seen:
    """Hit, caught, moved to another node, resumed, finished."""
    hit = Job(place, course, course.fault)
    seen: Seen = {"hit": hit.train(hit.guard())}
    if course.fault is not None and place.rank // course.per_node == course.fault.rank // course.per_node:
        os.environ["BITWITNESS_NODE"] += "-spare"
    again = Job(place, course, None)
    seen["resumed"] = again.train(again.guard())
    return seen
