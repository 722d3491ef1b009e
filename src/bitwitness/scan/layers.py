"""Matrix products, and the layers that models are made of, forward and backward.

Matrix units are what an accelerator is bought for, and one bad unit shows as a few wrong elements in a tile (AEGIS). So products
come in shapes that fill tiles and in such that leave the last ones part empty, and from either layout in memory. A layer is computed with
its gradients, because backward has kernels of its own, and a fault there does more harm (LLM-PRISM).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor

from bitwitness.scan.operands import Compute, Operands, Operation


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """The result of a function, and the gradients of its inputs for the gradient `upstream` of the result."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        result = function(*leaves)
        gradients = torch.autograd.grad(result, leaves, upstream)
    return [result.detach(), *gradients]


def _matmul(operands: Operands) -> Compute:
    """Of two matrices, or of two stacks of them; `transposed`: both lie in memory with the other dimension first."""
    *stack, rows, inner, columns = operands.shape
    if operands.item.variant == "transposed":
        a = operands.a(*stack, inner, rows).transpose(-1, -2)
        b = operands.b(*stack, columns, inner).transpose(-1, -2)
    else:
        a, b = operands.a(*stack, rows, inner), operands.b(*stack, inner, columns)
    if operands.item.variant == "tf32":
        return lambda: [_in_tf32(a, b)]
    return lambda: [torch.matmul(a, b)]


def _in_tf32(a: Tensor, b: Tensor) -> Tensor:
    """On the matrix units, with operands rounded to 10 bits of mantissa, where the device has that."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        return torch.matmul(a, b)
    finally:
        backend.fp32_precision = before


def _matvec(operands: Operands) -> Compute:
    rows, columns = operands.shape
    a, b = operands.a(rows, columns), operands.b(columns)
    return lambda: [torch.mv(a, b)]


def _int_matmul(operands: Operands) -> Compute:
    """int8 operands, int32 sums: what inference in int8 runs on."""
    rows, inner, columns = operands.shape
    a, b = operands.a(rows, inner), operands.b(inner, columns)
    return lambda: [torch._int_mm(a, b)]


def _fp8_matmul(operands: Operands) -> Compute:
    """Operands of 8 bits with a factor for each matrix; the second lies column by column, as the kernel demands."""
    rows, inner, columns = operands.shape
    a, b = operands.a(rows, inner), operands.b(columns, inner)
    one = operands.put(torch.ones((), dtype=torch.float32, device="cpu"))
    return lambda: [torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)]


def _attention(operands: Operands) -> Compute:
    """Of queries αA, keys βB and values, as `[batch, heads, length, width]`."""
    shape = operands.shape
    query, key, value = operands.a(*shape), operands.b(*shape), operands.values(shape)
    upstream = operands.values(shape)
    causal = operands.item.variant == "causal"

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return lambda: with_gradients(attend, (query, key, value), upstream)


def _softmax(operands: Operands) -> Compute:
    x, upstream = operands.a(*operands.shape), operands.values(operands.shape)
    return lambda: with_gradients(lambda x: F.softmax(x, dim=-1), (x,), upstream)


def _log_softmax(operands: Operands) -> Compute:
    x, upstream = operands.a(*operands.shape), operands.values(operands.shape)
    return lambda: with_gradients(lambda x: F.log_softmax(x, dim=-1), (x,), upstream)


def _layer_norm(operands: Operands) -> Compute:
    rows, width = operands.shape
    x, weight, bias = operands.a(rows, width), operands.b(width), operands.values((width,))
    upstream = operands.values((rows, width))

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias)

    return lambda: with_gradients(norm, (x, weight, bias), upstream)


def _rms_norm(operands: Operands) -> Compute:
    rows, width = operands.shape
    x, weight, upstream = operands.a(rows, width), operands.b(width), operands.values((rows, width))
    return lambda: with_gradients(lambda x, weight: F.rms_norm(x, (width,), weight, 1e-5), (x, weight), upstream)


def _batch_norm(operands: Operands) -> Compute:
    """In training, with the running statistics that it leaves."""
    _, channels, _, _ = operands.shape
    x, weight, bias = operands.a(*operands.shape), operands.b(channels), operands.values((channels,))
    upstream = operands.values(operands.shape)

    def compute() -> list[Tensor]:
        mean, variance = torch.zeros_like(bias), torch.ones_like(bias)

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.batch_norm(x, mean, variance, weight, bias, training=True)

        return [*with_gradients(norm, (x, weight, bias), upstream), mean, variance]

    return compute


def _conv2d(operands: Operands) -> Compute:
    """Of `[batch, channels, side, side]` with so many filters of `[kernel, kernel]`."""
    batch, channels, side, filters, kernel = operands.shape
    stride = 2 if operands.item.variant == "strided" else 1
    groups = channels if operands.item.variant == "depthwise" else 1
    x, weight = operands.a(batch, channels, side, side), operands.b(filters, channels // groups, kernel, kernel)
    bias = operands.values((filters,))
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    upstream = operands.values((batch, filters, out, out))

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, stride=stride, padding=kernel // 2, groups=groups)

    return lambda: with_gradients(convolve, (x, weight, bias), upstream)


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(_matmul, (3, 4), frozenset({"transposed", "tf32"})),
    "matvec": Operation(_matvec, (2,)),
    "int_matmul": Operation(_int_matmul, (3,)),
    "fp8_matmul": Operation(_fp8_matmul, (3,)),
    "attention": Operation(_attention, (4,), frozenset({"causal"})),
    "softmax": Operation(_softmax, (2,)),
    "log_softmax": Operation(_log_softmax, (2,)),
    "layer_norm": Operation(_layer_norm, (2,)),
    "rms_norm": Operation(_rms_norm, (2,)),
    "batch_norm": Operation(_batch_norm, (4,)),
    "conv2d": Operation(_conv2d, (5,), frozenset({"strided", "depthwise"})),
}
