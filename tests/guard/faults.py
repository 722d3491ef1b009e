"""Faults on purpose: deterministic, on one rank, from one step on, once or for good.

`where` says in which runs of a micro-batch a fault strikes: in any, in training only, in replays only, or only in the
repeats that follow a disagreement. Every fault counts how often it struck, and strikes only where it changes bits.
"""

# No postponed annotations here: DDP compares a communication hook's annotations with the types themselves.
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Where = Literal["anywhere", "training", "replays", "repeats"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, from which step on."""

    what: str
    rank: int
    step: int = 2
    persistent: bool = False
    where: Where = "anywhere"

    @property
    def name(self) -> str:
        """For the name of a scenario."""
        where = "" if self.where == "anywhere" else f" in {self.where}"
        return f"{self.what} {'persistent' if self.persistent else 'once'}{where} rank {self.rank}"


class Injector:
    """Puts faults into the job of this rank. The training loop tells it the step and whether it is training.

    Attributes:
        step, training: where the loop is.
        struck: how often a fault has struck here.
    """

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        self.faults = [fault for fault in faults if fault.rank == rank]
        self.step = -1
        self.training = False
        self.struck = 0
        self._spent: set[Fault] = set()
        self._replays = 0
        self._handles: list[Any] = []

    def begin_step(self, step: int) -> None:
        """The loop is about to train on this step's first micro-batch."""
        self.step, self._replays = step, 0

    def strikes(self, *names: str) -> Fault | None:
        """The fault of one of these names that is due now, which then counts as having struck."""
        for fault in self.faults:
            if fault.what in names and self._due(fault):
                self._spent.add(fault)
                self.struck += 1
                return fault
        return None

    def _due(self, fault: Fault) -> bool:
        if self.step < fault.step or (not fault.persistent and (self.step > fault.step or fault in self._spent)):
            return False
        if fault.where == "anywhere":
            return True
        if fault.where == "training":
            return self.training
        return not self.training and (fault.where == "replays" or self._replays > 1)

    # Where they are put ----------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Put the hooks of all faults on a model and its optimizers."""
        if not self.faults:
            return
        site: Any = module.site
        self._handles = [
            module.register_forward_pre_hook(self._count_replays),
            site.register_forward_hook(self._output("matmul", "random matmul")),
            site.register_full_backward_hook(self._input_gradient),
            site.bias.register_hook(self._gradient),
        ]
        if hasattr(module, "norm"):
            norm: Any = module.norm
            self._handles.append(norm.register_forward_hook(self._output("layer norm")))
        self._weight = site.weight
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_post_hook(self._after_update))

    def remove(self) -> None:
        """Take the hooks off again: the device is healthy, or another one."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _count_replays(self, module: nn.Module, inputs: Any) -> None:
        if not self.training:
            self._replays += 1

    def _output(self, *names: str) -> Any:
        def change(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            fault = self.strikes(*names)
            if fault is None:
                return None
            wrong = 1.0 if fault.what != "random matmul" else 1.0 + self.struck
            mask = torch.zeros_like(output)
            mask.view(-1)[5] = wrong
            return output + mask

        return change

    def _input_gradient(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        if grad_input[0] is None or self.strikes("backward matmul") is None:
            return None
        changed = grad_input[0].clone()
        changed.view(-1)[5] += 1.0
        return (changed, *grad_input[1:])

    def _gradient(self, gradient: Tensor) -> Tensor | None:
        fault = self.strikes("gradient x 4", "gradient sign", "nan gradient")
        if fault is None:
            return None
        changed = gradient.clone()
        if fault.what == "gradient x 4":
            changed *= 4
        elif fault.what == "gradient sign":
            changed[int(changed.abs().argmax())] *= -1
        else:
            changed[3] = float("nan")
        return changed

    @torch.no_grad()
    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        fault = self.strikes("weight sign", "weight last bit", "moment x 16")
        if fault is None:
            return
        flat = self._weight.view(-1)
        if fault.what == "weight sign":
            flat[7] *= -1
        elif fault.what == "weight last bit":
            flat[7] = (flat[7:8].view(torch.int32) ^ 1).view(torch.float32)[0]
        else:
            optimizer.state[self._weight]["exp_avg_sq"] *= 16

    def before_verify(self) -> None:
        """Between the backward and the update: what the all-reduce left on this rank."""
        if self.strikes("inf after the all-reduce") is not None:
            self._weight.grad.view(-1)[3] = float("inf")

    def batch(self, batch: Any, name: str = "token") -> Any:
        """A batch as it arrives on this rank."""
        if self.strikes(name) is None:
            return batch
        changed = {key: value.clone() for key, value in batch.items()}
        changed["x"][1, 2] = (changed["x"][1, 2] + 1) % 32
        return changed

    def communication_hook(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook with DDP's own arithmetic, in which the all-reduce can go wrong on this rank."""
        buffer = bucket.buffer().mul_(1.0 / dist.get_world_size())

        def reduced(done: torch.futures.Future[Any]) -> Tensor:
            result: Tensor = done.value()[0]
            if self.strikes("inf in the all-reduce") is not None:
                result.view(-1)[3] = float("inf")
            return result

        future: torch.futures.Future[Tensor] = dist.all_reduce(buffer, async_op=True).get_future().then(reduced)
        return future
