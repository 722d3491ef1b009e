"""A small GPT over bytes: the model of the demo, the tests and the benchmarks.

What is shown on it should hold for the models people train, so it is built of what these are built of: embeddings, causal
attention by `scaled_dot_product_attention`, LayerNorm, dropout, residual streams, a head that may share the embedding's
weight. The layout is that of GPT-2 (Radford et al., 2019): normalisation before each half of a block, GELU, learned
positions, output projections initialised smaller with depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn

VOCABULARY = 256
"""Bytes."""


@dataclass(frozen=True)
class GPTConfig:
    """The size of a model.

    Attributes:
        blocks: transformer blocks.
        heads: attention heads; `width` must be a multiple of it.
        width: of the residual stream.
        context: the longest sequence.
        dropout: probability, after embedding, attention and each half of a block.
        tied: whether the head shares the embedding's weight.
    """

    blocks: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    dropout: float = 0.1
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.heads} heads")


class Attention(nn.Module):
    """Causal self-attention over `[batch, length, width]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class MLP(nn.Module):
    """Two matrix products with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        projected: Tensor = self.down(F.gelu(self.up(x)))
        return projected


class Block(nn.Module):
    """Attention and MLP, each with a residual connection around it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        mixed: Tensor = x + self.dropout(self.attention(self.norm_attention(x)))
        added: Tensor = mixed + self.dropout(self.mlp(self.norm_mlp(mixed)))
        return added


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Initialised from torch's global generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[batch, length, 256]` for tokens `[batch, length]`, int64."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of each next byte, a scalar. `batch`: `[size, length + 1]`, int64."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
