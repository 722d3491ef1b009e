"""A case: one operation with all that it was given, what it should have given out, and what the suspect gave out.

Apart from how cases are found and made smaller, because it is what is left in the end: plain data that can be sent to another node,
computed on any device, and read by a vendor who has torch and nothing of this project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitwitness.compare import reproduce
from bitwitness.errors import BitwitnessError

_PLAIN = (int, float, complex, bool, str, type(None))


class CannotBeRepeated(BitwitnessError):
    """An operation needs something that cannot be handed on, e.g. a random state."""


@dataclass(frozen=True)
class Case:
    """One operation and its operands.

    Attributes:
        operation: e.g. `aten.addmm.default`.
        args, kwargs: operands: tensors on the CPU, plain values, lists of such; a dtype as `{"torch": NAME}`, a device as
            `{"device": ""}`.
        expected: what references agreed upon; () before they were asked.
        observed: one wrong answer of the suspect; () before it was asked.
    """

    operation: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    expected: tuple[Tensor, ...] = ()
    observed: tuple[Tensor, ...] = ()

    def tensors(self) -> list[Tensor]:
        """All operands that are tensors, in order."""
        return list(reproduce.tensors_of((self.args, *self.kwargs.values())))

    @property
    def elements(self) -> int:
        """How many numbers it is given in tensors."""
        return sum(one.numel() for one in self.tensors())

    @property
    def nonzero(self) -> int:
        """How many of them are not zero."""
        return sum(int(torch.count_nonzero(one)) for one in self.tensors())

    def shapes(self) -> list[tuple[int, ...]]:
        """Of all operands that are tensors."""
        return [tuple(one.shape) for one in self.tensors()]

    def stored(self) -> dict[str, Any]:
        """As `torch.load(..., weights_only=True)` reads it back."""
        return {
            "operation": self.operation,
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
            "expected": list(self.expected),
            "observed": list(self.observed),
        }

    # Smaller ---------------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """The different sizes of its tensors' axes, the largest first; those of 1 cannot be smaller."""
        return sorted({size for one in self.tensors() for size in one.shape if size > 1}, reverse=True)

    def narrowed(self, keep: Mapping[int, Sequence[int]]) -> Case:
        """The same operation on less: of each axis of one of these sizes only these positions are kept.

        Axes of equal size are taken to be one and the same, as the inner ones of two factors are; where that makes no sense, the
        operation says so when it is computed. Numbers in lists that are equal to the size (a shape that is normalised over) follow.
        """

        def smaller(value: Any, within: bool = False) -> Any:
            if isinstance(value, Tensor):
                sizes = tuple(value.shape)
                for axis, size in enumerate(sizes):
                    if size in keep:
                        value = value.index_select(axis, torch.tensor(keep[size], dtype=torch.int64))
                return value
            if isinstance(value, list | tuple):
                return [smaller(one, True) for one in value]
            if within and type(value) is int and value in keep:
                return len(keep[value])
            return value

        def kept(value: Any) -> Any:
            return _compact(value, smaller(value)) if isinstance(value, Tensor) else _as(value, smaller(value))

        return self._with(kept)

    def cleared(self, keep: Sequence[tuple[int, int]]) -> Case:
        """The same with 0 in all elements of floating-point operands but these: (number of the tensor, logical index)."""
        places: dict[int, list[int]] = {}
        for number, index in keep:
            places.setdefault(number, []).append(index)
        numbers = iter(range(len(self.tensors())))

        def zeroed(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [zeroed(one) for one in value]
            if not isinstance(value, Tensor):
                return value
            number = next(numbers)
            if not value.is_floating_point():
                return value
            flat = value.contiguous().reshape(-1)
            where = torch.tensor(places.get(number, []), dtype=torch.int64)
            made = torch.zeros_like(flat)
            made[where] = flat[where]
            return _compact(value, made.reshape(value.shape))

        return self._with(zeroed)

    def places(self) -> list[tuple[int, int]]:
        """The elements of floating-point operands that are not zero: (number of the tensor, logical index)."""
        return [
            (number, int(index))
            for number, one in enumerate(self.tensors())
            if one.is_floating_point()
            for index in one.contiguous().reshape(-1).nonzero().flatten().tolist()
        ]

    def _with(self, change: Any) -> Case:
        args = tuple(change(one) for one in self.args)
        kwargs = {name: change(one) for name, one in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, expected=(), observed=())


def _as(value: Any, made: Any) -> Any:
    return made if isinstance(value, list | tuple) else value


def _compact(before: Tensor, tensor: Tensor) -> Tensor:
    """A tensor with its axes in memory in the order of another's: which of two factors is transposed decides the kernel."""
    strides = before.stride()
    order = sorted(range(before.dim()), key=lambda axis: -strides[axis] if before.shape[axis] > 1 else 0)
    if tensor.dim() != len(order):
        return tensor
    back = [order.index(axis) for axis in range(len(order))]
    return tensor.permute(order).contiguous().permute(back) if order else tensor.clone()


def host(value: Any) -> Any:
    """An operand as a case keeps it.

    Raises:
        CannotBeRepeated: it is nothing that can be handed on.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta:
            raise CannotBeRepeated(f"an operand of layout {value.layout}")
        copy = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        return copy if torch._debug_has_internal_overlap(copy) == 0 else copy.contiguous()
    if isinstance(value, torch.device):
        return {"device": ""}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [host(one) for one in value]
    if isinstance(value, _PLAIN):
        return value
    raise CannotBeRepeated(f"an operand that is a {type(value).__name__}")


def digest(tensors: Sequence[Tensor]) -> str:
    """Of the bits of tensors, with their shapes and dtypes."""
    seen = hashlib.blake2b(digest_size=16)
    plain = [one.detach().to("cpu") for one in tensors]
    for one, content in zip(plain, reproduce.bits(plain), strict=True):
        seen.update(f"{one.dtype} {tuple(one.shape)};".encode())
        seen.update(content)
    return seen.hexdigest()


def operands_digest(case: Case) -> str:
    """Of all that an operation is given."""
    return (
        digest(case.tensors())
        + hashlib.blake2b(
            repr([_without(one) for one in (*case.args, *sorted(case.kwargs.items()))]).encode(), digest_size=8
        ).hexdigest()
    )


def _without(value: Any) -> Any:
    """What is no tensor of a value."""
    if isinstance(value, Tensor):
        return None
    return [_without(one) for one in value] if isinstance(value, list | tuple) else value
