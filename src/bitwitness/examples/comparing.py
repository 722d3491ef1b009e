"""What devices are compared on when nobody brings a workload: a language model, and fine-tuning on images of digits.

Both repeat bit for bit on one device: attention is computed by plain matrix products, since the fused backward of a GPU adds up in
an order that changes. The second one is for the question that drift cannot answer, what a wrong device does to a task: its network
has been trained on some of the images, is fine-tuned on others, and is asked about those of writers whom it has never seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bitwitness.compare.lineup import one_thread
from bitwitness.compare.workload import Workload
from bitwitness.errors import ConfigurationError
from bitwitness.examples import gpt as language
from bitwitness.examples.digits import Images, load_images
from bitwitness.examples.gpt import GPT, Block, GPTConfig
from bitwitness.examples.text import Corpus

TEXT = 1_000_000
"""Bytes of the standard library's source: a comparison is short."""

ASKED = 64
"""Sequences of held-out text whose next bytes are asked for at the end."""

PRETRAINED = 750
"""The first so many images of digits are what the network knows before the comparison; the other ones of the training are new to it."""

PRETRAINING_STEPS = 80

Option = str | int | float
"""From the command line options come as text."""


# Language ------------------------------------------------------------------------------------------------------------


def gpt(
    device: torch.device,
    seed: int,
    *,
    width: Option = 32,
    blocks: Option = 2,
    heads: Option = 4,
    context: Option = 32,
    batch: Option = 4,
    dropout: Option = 0.0,
    lr: Option = 3e-3,
    dtype: str = "float32",
) -> Workload:
    """A GPT over bytes learns the source of Python's standard library, under AdamW.

    Args:
        device: of model and batches.
        seed: of the order of the text; the initial weights are always the same.
        width: of the residual stream.
        blocks: transformer blocks.
        heads: of attention.
        context: length of a sequence.
        dropout: probability of it.
        batch: sequences of a step.
        lr: the learning rate, constant.
        dtype: `float32`, or `bfloat16` by autocast.

    Raises:
        ConfigurationError: an option is impossible; names it and what to give.
    """
    read = _Options("gpt")
    size, length = read.whole("batch", batch), read.whole("context", context)
    config = read.config(
        blocks=read.whole("blocks", blocks),
        heads=read.whole("heads", heads),
        width=read.whole("width", width),
        context=length,
        dropout=read.probability("dropout", dropout),
    )
    precision = read.dtype(dtype)
    with _always_alike():
        model = GPT(config).to(device)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with _arithmetic(device, precision):
            return language.compute_loss(model, batch)

    def evaluate(model: nn.Module) -> dict[str, Any]:
        text = _corpus().validation_batch(0, size=ASKED, length=length).to(device)
        with _arithmetic(device, precision):
            return _answers("next byte", model, text[:, :-1], text[:, 1:])

    return Workload(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=read.rate("lr", lr)),
        loss_fn=loss_fn,
        batch=lambda step: _corpus().batch(seed, step, size=size, length=length).to(device),
        evaluate=evaluate,
    )


@cache
def _corpus() -> Corpus:
    return Corpus.standard_library(TEXT)


# Digits --------------------------------------------------------------------------------------------------------------


class RowReader(nn.Module):
    """Reads an image of 8 x 8 pixels row by row, by the blocks of the language model, and gives scores of the ten digits.

    Built of the same blocks so that a fault of attention or of the MLP is the same fault in both workloads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.rows = nn.Linear(8, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[batch, 10]` of images `[batch, 1, 8, 8]`."""
        rows = images.squeeze(1)
        x = self.rows(rows) + self.positions(torch.arange(rows.shape[1], device=rows.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x).mean(dim=1))
        return scores


def digits(
    device: torch.device,
    seed: int,
    *,
    width: Option = 32,
    blocks: Option = 2,
    heads: Option = 4,
    batch: Option = 16,
    dropout: Option = 0.0,
    lr: Option = 1e-3,
    dtype: str = "float32",
) -> Workload:
    """A network that knows some handwritten digits is fine-tuned on others, under AdamW, and asked about 297 that it never saw.

    Its initial weights are trained here, on the host and always alike, once in a process: about a second.

    Args:
        device: of model and batches.
        seed: of the order of the images; the initial weights are always the same.
        width: of the residual stream.
        blocks: transformer blocks.
        heads: of attention.
        dropout: probability of it.
        batch: images of a step.
        lr: the learning rate, constant.
        dtype: `float32`, or `bfloat16` by autocast.

    Raises:
        ConfigurationError: an option is impossible; names it and what to give.
        MissingExtra: scikit-learn, which the images come with, is not installed.
    """
    read = _Options("digits")
    size = read.whole("batch", batch)
    config = read.config(
        blocks=read.whole("blocks", blocks),
        heads=read.whole("heads", heads),
        width=read.whole("width", width),
        context=8,
        dropout=read.probability("dropout", dropout),
    )
    precision = read.dtype(dtype)
    images = _images()
    with _always_alike():
        model = RowReader(config)
    model.load_state_dict(_pretrained(config))
    model.to(device)
    new, labels = images.training[PRETRAINED:], images.training_labels[PRETRAINED:]

    def draw(step: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(new), (size,), generator=_generator("digits", seed, step))
        return new[drawn].to(device), labels[drawn].to(device)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with _arithmetic(device, precision):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    def evaluate(model: nn.Module) -> dict[str, Any]:
        with _arithmetic(device, precision):
            return _answers("digits", model, images.validation.to(device), images.validation_labels)

    return Workload(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=read.rate("lr", lr)),
        loss_fn=loss_fn,
        batch=draw,
        evaluate=evaluate,
    )


@cache
def _images() -> Images:
    return load_images()


@cache
def _pretrained(config: GPTConfig) -> dict[str, Tensor]:
    """Weights that were trained on the first images; not more than that, so that there is something left to learn."""
    images = _images()
    with _always_alike(), one_thread(), sdpa_kernel(SDPBackend.MATH):
        model = RowReader(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(PRETRAINING_STEPS):
            drawn = torch.randint(PRETRAINED, (32,), generator=_generator("pretraining", step))
            F.cross_entropy(model(images.training[drawn]), images.training_labels[drawn]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# Both ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _always_alike() -> Iterator[None]:
    """What is initialised here draws the same numbers each time, and takes none from the generator of others."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        yield


@contextmanager
def _arithmetic(device: torch.device, precision: torch.dtype) -> Iterator[None]:
    """Attention as plain matrix products and, where it is asked for, autocast."""
    mixed = torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
    with mixed, sdpa_kernel(SDPBackend.MATH):
        yield


def _answers(name: str, model: nn.Module, inputs: Tensor, right: Tensor) -> dict[str, list[int]]:
    """The likeliest class of each question, -1 where a score is not finite: a model that computes NaN has no answer."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            scores = model(inputs).float().flatten(0, -2)
    finally:
        model.train(was_training)
    chosen = torch.where(scores.isfinite().all(-1), scores.argmax(-1), -1)
    return {name: chosen.tolist(), f"{name}.right": right.flatten().tolist()}


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class _Options:
    """Reads the options of a workload, which may be text."""

    workload: str

    def whole(self, name: str, given: Option) -> int:
        try:
            value = int(given) if isinstance(given, str | int) else 0
        except ValueError:
            value = 0
        if not 1 <= value <= 1 << 20:
            raise self._refused(name, given, "a whole number from 1 on")
        return value

    def probability(self, name: str, given: Option) -> float:
        value = self._float(given)
        if not 0 <= value < 1:
            raise self._refused(name, given, "a number from 0 up to but not including 1")
        return value

    def rate(self, name: str, given: Option) -> float:
        value = self._float(given)
        if not 0 < value < math.inf:
            raise self._refused(name, given, "a number above 0")
        return value

    def dtype(self, given: str) -> torch.dtype:
        known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        if given not in known:
            raise self._refused("dtype", given, " or ".join(known))
        return known[given]

    def config(self, *, blocks: int, heads: int, width: int, context: int, dropout: float) -> GPTConfig:
        try:
            return GPTConfig(blocks, heads, width, context, dropout)
        except ValueError as error:
            raise ConfigurationError(f"the workload {self.workload} cannot be made: {error}") from error

    def _float(self, given: Option) -> float:
        try:
            return float(given)
        except ValueError:
            return math.nan

    def _refused(self, name: str, given: Option, take: str) -> ConfigurationError:
        return ConfigurationError(f"the option {name} of the workload {self.workload} is {given!r}: give {take}")
