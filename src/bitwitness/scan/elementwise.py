"""Arithmetic on single numbers: the FP32, FP64 and integer pipes, special functions, and conversions between dtypes.

First among the operations of a scan, because in the field these pipes fail more often than matrix units do (OpGuard, SDCHunter),
and because integer modulo and shifts make the addresses of everything else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor

from bitwitness.scan.operands import Compute, Operands, Operation, dtype_named

_CHAIN = 8
"""Multiplications and additions in a row: one result depends on all of them."""

_Unary = Callable[[Tensor], Tensor]
_Binary = Callable[[Tensor, Tensor], Tensor]

_OF_ANY: dict[str, _Unary] = {
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "silu": F.silu,
}
_OF_POSITIVE: dict[str, _Unary] = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
}
_OF_TWO: dict[str, _Binary] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
}
_BY_NONZERO: dict[str, _Binary] = {
    "div": torch.div,
    "modulo": torch.remainder,
    "floor_div": torch.floor_divide,
}
_BY_BITS: dict[str, _Binary] = {
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}
_CASTS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8")


def _of_any(function: _Unary) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        x = operands.a(*operands.shape)
        return lambda: [function(x)]

    return build


def _of_positive(function: _Unary) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        x = operands.positive(operands.shape, operands.item.alpha)
        return lambda: [function(x)]

    return build


def _of_two(function: _Binary) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        a, b = operands.a(*operands.shape), operands.b(*operands.shape)
        return lambda: [function(a, b)]

    return build


def _by_nonzero(function: _Binary) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        a, b = operands.a(*operands.shape), operands.away_from_zero(operands.shape, operands.item.beta)
        return lambda: [function(a, b)]

    return build


def _by_bits(function: _Binary) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        width = torch.iinfo(operands.dtype).bits
        a, b = operands.a(*operands.shape), operands.integers(operands.shape, 0, width - 1, operands.dtype)
        return lambda: [function(a, b)]

    return build


def _fma(operands: Operands) -> Compute:
    """A sum of products, one after another in the same register; the second factors are read at shifted addresses."""
    (size,) = operands.shape
    a, b, c = operands.a(size), operands.b(size + _CHAIN), operands.values((size,), _product(operands))

    def compute() -> list[Tensor]:
        total = c
        for shift in range(_CHAIN):
            total = torch.addcmul(total, a, b[shift : shift + size])
        return [total]

    return compute


def _product(operands: Operands) -> float:
    return operands.item.alpha * operands.item.beta


def _pow(operands: Operands) -> Compute:
    base = operands.positive(operands.shape, operands.item.alpha)
    exponent = operands.b(*operands.shape)
    return lambda: [torch.pow(base, exponent)]


def _compare(operands: Operands) -> Compute:
    a, b = operands.a(*operands.shape), operands.b(*operands.shape)

    def compute() -> list[Tensor]:
        less = torch.lt(a, b)
        return [less, torch.where(less, a, b), torch.maximum(a, b), torch.eq(a, a.flip(0))]

    return compute


def _cast(operands: Operands) -> Compute:
    """There and back, so that both directions are computed; the numbers fit where the suite gives them such factors."""
    target = dtype_named(operands.item.variant.removeprefix("to_"))
    x = operands.a(*operands.shape)

    def compute() -> list[Tensor]:
        there = x.to(target, copy=True)
        return [there, there.to(x.dtype, copy=True)]

    return compute


OPERATIONS: dict[str, Operation] = {
    **{name: Operation(_of_any(function), (1,)) for name, function in _OF_ANY.items()},
    **{name: Operation(_of_positive(function), (1,)) for name, function in _OF_POSITIVE.items()},
    **{name: Operation(_of_two(function), (1,)) for name, function in _OF_TWO.items()},
    **{name: Operation(_by_nonzero(function), (1,)) for name, function in _BY_NONZERO.items()},
    **{name: Operation(_by_bits(function), (1,)) for name, function in _BY_BITS.items()},
    "fma": Operation(_fma, (1,)),
    "pow": Operation(_pow, (1,)),
    "compare": Operation(_compare, (1,)),
    "cast": Operation(_cast, (1,), frozenset(f"to_{name}" for name in _CASTS), needs_variant=True),
}
