"""The faults of the demo: wrong bits from one device, from one step on.

Each stands for something that is seen in the field: a matrix unit that returns wrong products, a gradient that is wrong but
looks right, a NaN, a cell of memory under a weight or an optimizer moment. How bits are changed is `mutate`'s business;
here it is only decided where and when. Hooks are used because a replay runs through them as well, as it would run through
a broken device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bitwitness import mutate
from bitwitness.examples.gpt import GPT, Block
from bitwitness.mutate import FaultDidNotLand, FlipSign, Landed, Mutation, Scale, SetTo

FaultKind = Literal["matmul", "gradient", "nan", "weight", "moment"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which device, from which step on. `transient`: once only; memory is changed once in any case.

    It belongs to the device, as in the field: the rank that trains on another one after a restart is well.
    """

    kind: FaultKind
    device: str
    step: int
    transient: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"no such fault: {self.kind}")


class Injection:
    """A fault at work in one rank's training.

    Args:
        fault: what, where and when; on other devices this does nothing.
        device: the one that this rank trains on.
        model: the module inside DDP.
        optimizer: AdamW, or another that keeps `exp_avg_sq`.
        landed: told of every change: where, and what `mutate` says of it.
    """

    def __init__(
        self,
        fault: Fault | None,
        device: str,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        landed: Callable[[str, Landed], None],
    ) -> None:
        self._fault = fault if fault is not None and fault.device == device else None
        self._landed = landed
        self._step = -1
        self._strikes = 0
        self._handles: list[Any] = []
        if self._fault is not None:
            self._place(self._fault.kind, model, optimizer)

    def begin(self, step: int) -> None:
        """A step begins: from now on it counts as this one."""
        self._step = step

    def remove(self) -> None:
        """The device is healthy again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _place(self, kind: FaultKind, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        middle = len(model.blocks) // 2
        block = model.blocks[middle]
        assert isinstance(block, Block)
        weight = block.mlp.up.weight
        site = f"blocks.{middle}.mlp.up.weight"
        if kind == "matmul":
            self._handles.append(model.head.register_forward_hook(self._watch_product))
        elif kind in ("gradient", "nan"):
            where = f"gradient of {site}"
            self._handles.append(weight.register_hook(lambda gradient: self._in_gradient(where, kind, gradient)))
        else:
            where = site if kind == "weight" else f"exp_avg_sq of {site}"

            def strike(*_: Any) -> None:
                tensor = weight if kind == "weight" else optimizer.state[weight]["exp_avg_sq"]
                self._in_memory(where, tensor, FlipSign() if kind == "weight" else Scale(16.0))

            self._handles.append(optimizer.register_step_post_hook(strike))

    def _due(self, once: bool) -> bool:
        assert self._fault is not None
        if once:
            return self._step == self._fault.step and not self._strikes
        return self._step >= self._fault.step

    def _watch_product(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        """Of the products of a linear layer, hit the one of the backward that carries the gradient on to what was given.

        A wrong product in the forward of one rank in eight is mostly normalised away, and its loss shows it at once. This
        one spreads through the rest of the backward while the loss of its step is right.
        """
        if args[0].requires_grad:
            args[0].register_hook(self._in_product)

    def _in_product(self, product: Tensor) -> Tensor | None:
        """One column comes out 4096 times too large, for every token: a lane of a matrix unit."""
        if not self._due(once=self._is_transient()):
            return None
        wrong = product.clone()
        column = torch.arange(wrong.numel() // wrong.shape[-1]) * wrong.shape[-1] + 1
        self._strike("matrix product in the backward of head", wrong, Scale(4096.0), column)
        return wrong

    def _in_gradient(self, where: str, kind: FaultKind, gradient: Tensor) -> Tensor | None:
        if not self._due(once=self._is_transient()):
            return None
        wrong = gradient.clone()
        if kind == "nan":
            self._strike(where, wrong, SetTo(math.nan), torch.tensor([0]))
        else:
            self._strike(where, wrong, Scale(4.0), torch.arange(wrong.numel()))
        return wrong

    def _in_memory(self, where: str, tensor: Tensor, mutation: Mutation) -> None:
        """The largest element, where it is sure to matter."""
        if self._due(once=True):
            self._strike(where, tensor, mutation, tensor.detach().abs().argmax().reshape(1))

    def _is_transient(self) -> bool:
        return self._fault is not None and self._fault.transient

    def _strike(self, where: str, tensor: Tensor, mutation: Mutation, elements: Tensor) -> None:
        try:
            landed = mutate.apply_(tensor, mutation, elements)
        except FaultDidNotLand:
            if not self._strikes:
                raise
            return  # what is left of the numbers after earlier strikes, e.g. NaN, cannot get worse
        self._strikes += 1
        self._landed(where, landed)
