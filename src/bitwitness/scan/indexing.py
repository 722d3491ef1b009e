"""Moving numbers by index, ordering them, and adding many of them up.

Scatter and integer index arithmetic are among the operations that were seen to fail in the field, and where they do, a
wrong address looks like a right value in a wrong place. Sums are taken along either dimension, because each has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitwitness.scan.operands import Compute, Operands, Operation

_REDUCTIONS: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
    "sum": lambda x, dim: [x.sum(dim)],
    "mean_var": lambda x, dim: list(torch.var_mean(x, dim)),
    "norm": lambda x, dim: [torch.linalg.vector_norm(x, dim=dim)],
    "logsumexp": lambda x, dim: [torch.logsumexp(x, dim)],
    # Of four at a time: in a whole row one number counts and the others hide their errors.
    "extremes": lambda x, dim: [x.unflatten(dim, (-1, 4)).amax(dim + 1), x.unflatten(dim, (-1, 4)).amin(dim + 1)],
}


def _gather(operands: Operands) -> Compute:
    (size,) = operands.shape
    source, index = operands.a(size), operands.integers((size,), 0, size)
    return lambda: [source.gather(0, index), source.index_select(0, index.flip(0))]


def _scatter(operands: Operands) -> Compute:
    """Each place is written once, so that the order of the writes does not matter."""
    (size,) = operands.shape
    source, index = operands.a(size), operands.permutation(size)
    return lambda: [torch.zeros_like(source).scatter_(0, index, source)]


def _scatter_add(operands: Operands) -> Compute:
    """About four numbers are added up in each place, in the order that deterministic algorithms keep."""
    (size,) = operands.shape
    source, index, start = operands.a(size), operands.integers((size,), 0, size // 4), operands.b(size // 4)
    return lambda: [start.scatter_add(0, index, source)]


def _index_add(operands: Operands) -> Compute:
    rows, width = operands.shape
    source, index, start = (
        operands.a(rows, width),
        operands.integers((rows,), 0, rows // 4),
        operands.b(rows // 4, width),
    )
    return lambda: [start.index_add(0, index, source)]


def _embedding(operands: Operands) -> Compute:
    """Rows by index, and the gradient: rows added up by index."""
    rows, width = operands.shape
    table, index, upstream = operands.a(rows, width), operands.integers((rows,), 0, rows), operands.b(rows, width)

    def compute() -> list[Tensor]:
        found = torch.embedding(table, index)
        return [found, torch.ops.aten.embedding_dense_backward(upstream, index, rows, -1, False)]

    return compute


def _sort(operands: Operands) -> Compute:
    x = operands.a(*operands.shape)
    return lambda: list(torch.sort(x, dim=-1, stable=True))


def _topk(operands: Operands) -> Compute:
    """The values alone: which of equal ones is taken is not said."""
    rows, width = operands.shape
    x = operands.a(rows, width)
    return lambda: [torch.topk(x, width // 2, dim=-1).values]


def _cumsum(operands: Operands) -> Compute:
    x = operands.a(*operands.shape)
    return lambda: [torch.cumsum(x, dim=-1)]


def _reduction(function: Callable[[Tensor, int], list[Tensor]]) -> Callable[[Operands], Compute]:
    def build(operands: Operands) -> Compute:
        x = operands.a(*operands.shape)
        return lambda: [*function(x, 0), *function(x, 1)]

    return build


OPERATIONS: dict[str, Operation] = {
    "gather": Operation(_gather, (1,)),
    "scatter": Operation(_scatter, (1,)),
    "scatter_add": Operation(_scatter_add, (1,)),
    "index_add": Operation(_index_add, (2,)),
    "embedding": Operation(_embedding, (2,)),
    "sort": Operation(_sort, (2,)),
    "topk": Operation(_topk, (2,)),
    "cumsum": Operation(_cumsum, (2,)),
    **{name: Operation(_reduction(function), (2,)) for name, function in _REDUCTIONS.items()},
}
