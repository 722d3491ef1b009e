"""Tiny models, losses and batches. Each model has a linear layer `site` and where it makes sense a LayerNorm `norm`, where
faults are placed. Batches are functions of (step, rank, micro), so that they can be made anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its name everywhere)
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH, WIDTH = 32, 6, 16


class Net(nn.Module):
    """Embedding, LayerNorm, Dropout and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.site = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.site(self.embedding(tokens))))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class Frozen(Net):
    """With a frozen embedding, and a layer that is used on some ranks and steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if int(tokens.sum()) % 2:
            hidden = self.rare(hidden)
        logits: Tensor = self.head(self.norm(self.site(hidden)))
        return logits


class BatchNorm(Net):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.site(self.embedding(tokens))
        hidden = self.batch_norm(hidden.flatten(0, 1)).view_as(hidden) * self.mask
        logits: Tensor = self.head(self.dropout(self.norm(hidden)))
        return logits


class Transformer(Net):
    """One block of attention and one of two linear layers, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.reentrant: bool | None = None

    def block(self, hidden: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(hidden)).view(*hidden.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed: Tensor = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(hidden.shape)
        result: Tensor = hidden + self.dropout(F.gelu(self.site(self.second_norm(hidden))))
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.reentrant is None:
            hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        logits: Tensor = self.head(hidden)
        return logits


class Checkpointed(Transformer):
    """The same, computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant = False


class Reentrant(Transformer):
    """The same in the old way, in which the gradients of a replay cannot be had."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant = True


class Convolutional(nn.Module):
    """Two convolutions over images made of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, stride=2)
        self.site = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        images = (tokens.float() / VOCABULARY).unsqueeze(1)
        hidden = torch.relu(self.second(torch.relu(self.first(images))))
        logits: Tensor = self.site(hidden.flatten(1))
        return logits


class Hooked(Net):
    """With gradient hooks of the user's own on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.site.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class Untidy(Net):
    """Adds up rows in an order that changes: its gradient does not repeat, its loss does."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        untidy: Tensor = _Untidy.apply(logits, self.head.bias)  # type: ignore[no-untyped-call]
        return untidy


class _Untidy(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        _Untidy.calls += 1
        noise = torch.full((VOCABULARY,), 1e-6 * (1 + _Untidy.calls % 7))
        return gradients[0], noise


# Batches -------------------------------------------------------------------------------------------------------------


def tokens(step: int, rank: int, micro: int) -> Any:
    """A dictionary of inputs and targets, int64 `[4, LENGTH]`."""
    generator = torch.Generator().manual_seed(7_919 * step + 101 * rank + micro)
    drawn = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    return {"x": drawn[:, :-1], "y": drawn[:, 1:]}


def squares(step: int, rank: int, micro: int) -> Any:
    """For the convolutions: images of `LENGTH` × `LENGTH` tokens, one target each."""
    generator = torch.Generator().manual_seed(7_919 * step + 101 * rank + micro)
    drawn = torch.randint(0, VOCABULARY, (4, LENGTH, LENGTH), generator=generator)
    return {"x": drawn, "y": drawn[:, 0, 0]}


@dataclass
class Sample:
    """A batch as a class of the user's own."""

    parts: list[dict[str, Any]]
    weight: Any
    flags: Tensor
    name: str


def nested(step: int, rank: int, micro: int) -> Any:
    """A data class with lists, dictionaries and arrays in it; strided, expanded, integer and boolean tensors."""
    plain = tokens(step, rank, micro)
    wide = torch.zeros(4, 2 * LENGTH, dtype=torch.int32)
    strided = wide[:, ::2]
    strided.copy_(plain["x"])
    random_numbers = np.random.default_rng(step + rank)
    return Sample(
        parts=[{"x": strided, "y": plain["y"].t().contiguous().t()}],
        weight=random_numbers.random((4, 1), dtype=np.float32)[::1],
        flags=torch.ones(1, 1, dtype=torch.bool).expand(4, LENGTH),
        name=f"step {step}",
    )


# Losses --------------------------------------------------------------------------------------------------------------


def token_loss(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def bf16_loss(model: Any, batch: Any) -> Tensor:
    """Under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return token_loss(model, batch)


def fp16_loss(model: Any, batch: Any) -> Tensor:
    """Under autocast; to be scaled."""
    with torch.autocast("cpu", dtype=torch.float16):
        return token_loss(model, batch)


def nested_loss(model: Any, batch: Any) -> Tensor:
    """For `nested`."""
    logits = model(batch.parts[0]["x"].long())
    losses = F.cross_entropy(logits.flatten(0, 1), batch.parts[0]["y"].reshape(-1), reduction="none").view(4, LENGTH)
    weighted: Tensor = losses * torch.from_numpy(np.ascontiguousarray(batch.weight)) * batch.flags
    return weighted.mean()


OWN_TORCH, OWN_NUMPY, OWN_PYTHON = torch.Generator(), np.random.default_rng(0), random.Random(0)
"""Generators of the user's own; a rank's scenarios share them, and seed them anew."""


def seed_own(seed: int) -> None:
    """Seed the generators above."""
    OWN_TORCH.manual_seed(seed)
    OWN_NUMPY.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    OWN_PYTHON.seed(seed)


def random_loss(model: Any, batch: Any) -> Tensor:
    """Draws from every source of randomness there is."""
    draws = (
        float(torch.rand(())),
        random.random(),
        float(np.random.random()),  # noqa: NPY002
        float(torch.rand((), generator=OWN_TORCH)),
        float(OWN_NUMPY.random()),
        OWN_PYTHON.random(),
    )
    return token_loss(model, batch) * (1.0 + sum(draws) / len(draws))


def draws_left() -> Iterator[float]:
    """The next number of every source, which tells whether two runs left them alike."""
    yield float(torch.rand(()))
    yield random.random()
    yield float(np.random.random())  # noqa: NPY002
    yield float(torch.rand((), generator=OWN_TORCH))
    yield float(OWN_NUMPY.random())
    yield OWN_PYTHON.random()


# Numbers that are not finite, by the user's own doing -----------------------------------------------------------------


@dataclass(frozen=True)
class Flawed:
    """Batches with a flaw on some ranks in some steps, for `flawed_loss`."""

    flaw: str
    ranks: tuple[int, ...] = (1,)
    steps: tuple[int, ...] = (2,)
    micro: int = 0

    def __call__(self, step: int, rank: int, micro: int) -> Any:
        here = rank in self.ranks and step in self.steps and micro == self.micro
        return {**tokens(step, rank, micro), "flaw": self.flaw if here else "none", "weight": torch.ones(())}


def flawed_loss(model: Any, batch: Any) -> Tensor:
    """What goes wrong in loss functions and data."""
    logits = model(batch["x"])
    weight = batch["weight"]
    if batch["flaw"] == "all-masked softmax":
        mask = torch.zeros_like(logits)
        mask[0, 0] = float("-inf")
        logits = (logits + mask).softmax(-1)
    if batch["flaw"] == "bad sample":
        weight = weight * float("nan")
    loss: Tensor = F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten()) * weight
    if batch["flaw"] == "log of zero":
        loss = loss + (loss * 0).log()
    if batch["flaw"] == "root of zero":  # the loss stays finite
        loss = loss + (loss * 0).sqrt()
    if batch["flaw"] == "too large":  # and so does every gradient
        loss = loss * 1e7
    return loss


def flawed_fp16_loss(model: Any, batch: Any) -> Tensor:
    """The same under autocast."""
    with torch.autocast("cpu", dtype=torch.float16):
        return flawed_loss(model, batch)
