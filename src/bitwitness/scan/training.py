"""A few steps of training from end to end: what the device is there for, and what leads to faults that single operations do not show.

Two small models that between them use what most models use. They are functions of plain tensors and not modules, because a
module draws its weights from the global random state. Batches lie on the host and are copied, as a data loader does; dropout multiplies
by masks that were drawn beforehand, because a generator on the device need not draw the same elsewhere. What comes out is the losses,
the final weights and the optimizer's moments: every step passes through all of them, so an error anywhere is still there at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor

from bitwitness.scan.operands import Compute, Operands, Operation

Weights = dict[str, Tensor]
Loss = Callable[[Weights, int], Tensor]
"""(weights, number of the step) -> loss."""
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

_VOCABULARY = 128
_HEADS = 4
"""At least; wide models have one for each 64 of their width."""
_CLASSES = 16
_KEEP = 0.9


def _transformer(operands: Operands) -> Compute:
    """`[batch, length, width, blocks, steps]`: causal attention, GELU, dropout, a tied head; clipping and AdamW."""
    batch, length, width, blocks, steps = operands.shape
    weights = _transformer_weights(operands, length, width, blocks)
    tokens = operands.host_integers((steps, batch, length + 1), 0, _VOCABULARY)
    masks = operands.mask((steps, 2 * blocks + 1, length, width), _KEEP)

    def loss(weights: Weights, step: int) -> Tensor:
        tokens_here = tokens[step].to(operands.device)
        x = F.embedding(tokens_here[:, :-1], weights["tokens"]) + weights["positions"]
        x = x * masks[step, 0]
        for block in range(blocks):
            mine = {name.partition(".")[2]: one for name, one in weights.items() if name.startswith(f"{block}.")}
            x = x + _attention(mine, x) * masks[step, 2 * block + 1]
            hidden = F.gelu(F.linear(_norm(x, mine["norm2"]), mine["up"], mine["up_bias"]))
            x = x + F.linear(hidden, mine["down"], mine["down_bias"]) * masks[step, 2 * block + 2]
        logits = F.linear(_norm(x, weights["norm"]), weights["tokens"])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens_here[:, 1:].flatten())

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    return _trained(operands, weights, loss, optimizer, steps)


def _transformer_weights(operands: Operands, length: int, width: int, blocks: int) -> Weights:
    def drawn(*shape: int) -> Tensor:
        return operands.values(shape, width**-0.5, torch.float32)

    def norm() -> Tensor:
        return operands.values((width,), 0.1, torch.float32).add_(1)

    weights = {"tokens": drawn(_VOCABULARY, width), "positions": drawn(length, width), "norm": norm()}
    for block in range(blocks):
        weights |= {
            f"{block}.norm1": norm(),
            f"{block}.qkv": drawn(3 * width, width),
            f"{block}.out": drawn(width, width),
            f"{block}.norm2": norm(),
            f"{block}.up": drawn(4 * width, width),
            f"{block}.up_bias": drawn(4 * width),
            f"{block}.down": drawn(width, 4 * width),
            f"{block}.down_bias": drawn(width),
        }
    return weights


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight)


def _attention(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    batch, length, width = x.shape
    qkv = F.linear(_norm(x, weights["norm1"]), weights["qkv"])
    heads = max(_HEADS, width // 64)
    query, key, value = qkv.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), weights["out"])


def _convnet(operands: Operands) -> Compute:
    """`[batch, channels, side, steps]`: convolutions, batch normalisation, pooling, a residual; clipping and SGD with momentum."""
    batch, channels, side, steps = operands.shape

    def drawn(*shape: int) -> Tensor:
        return operands.values(shape, channels**-0.5, torch.float32)

    weights = {
        "first": drawn(channels, 3, 3, 3),
        "second": drawn(channels, channels, 3, 3),
        "third": drawn(2 * channels, channels, 3, 3),
        "head": drawn(_CLASSES, 2 * channels),
        "head_bias": drawn(_CLASSES),
    }
    for name, count in (("first", channels), ("second", channels), ("third", 2 * channels)):
        weights[f"{name}.scale"] = operands.values((count,), 0.1, torch.float32).add_(1)
        weights[f"{name}.shift"] = drawn(count)
    images = operands.host_values((steps, batch, 3, side, side), torch.float32)
    labels = operands.host_integers((steps, batch), 0, _CLASSES)

    def loss(weights: Weights, step: int) -> Tensor:
        x = images[step].to(operands.device)
        x = _halved(_normalised(F.conv2d(x, weights["first"], padding=1), weights, "first"))
        x = x + _normalised(F.conv2d(x, weights["second"], padding=1), weights, "second")
        x = _normalised(F.conv2d(x, weights["third"], padding=1, stride=2), weights, "third")
        logits = F.linear(x.mean((2, 3)), weights["head"], weights["head_bias"])
        return F.cross_entropy(logits.float(), labels[step].to(operands.device))

    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)

    return _trained(operands, weights, loss, optimizer, steps)


def _normalised(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weights[f"{name}.scale"], weights[f"{name}.shift"], training=True))


def _halved(x: Tensor) -> Tensor:
    """Maxima over 2 × 2; not `max_pool2d`, whose backward adds up in any order on some devices."""
    batch, channels, height, width = x.shape
    return x.reshape(batch, channels, height // 2, 2, width // 2, 2).amax((3, 5))


def _trained(operands: Operands, weights: Weights, loss: Loss, make_optimizer: MakeOptimizer, steps: int) -> Compute:
    """Trains copies of the weights. α multiplies the weights at the start, β the loss."""
    alpha, beta = operands.item.alpha, operands.item.beta

    def compute() -> list[Tensor]:
        mine = {name: (alpha * one).detach().clone().requires_grad_() for name, one in weights.items()}
        parameters = list(mine.values())
        optimizer = make_optimizer(parameters)
        losses = []
        with torch.enable_grad(), _precision(operands):
            for step in range(steps):
                with _autocast(operands):
                    one = loss(mine, step)
                optimizer.zero_grad()
                torch.autograd.backward(one * beta)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                losses.append(one.detach())
        state = [optimizer.state[one] for one in parameters]
        moments = [one[name] for one in state for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in one]
        return [torch.stack(losses).cpu(), *(one.detach() for one in parameters), *moments]

    return compute


def _autocast(operands: Operands) -> torch.autocast:
    """In the item's dtype, off for float32. Without its cache, which would outlive the weights that are cast."""
    half = operands.dtype != torch.float32
    dtype = operands.dtype if half else torch.bfloat16
    return torch.autocast(operands.device.type, dtype=dtype, enabled=half, cache_enabled=False)


@contextmanager
def _precision(operands: Operands) -> Iterator[None]:
    """`tf32`: as most people train in float32, with products and convolutions on the matrix units."""
    if operands.item.variant != "tf32":
        yield
        return
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


OPERATIONS: dict[str, Operation] = {
    "transformer": Operation(_transformer, (5,), frozenset({"tf32"})),
    "convnet": Operation(_convnet, (4,), frozenset({"tf32"})),
}
