"""The jobs that campaigns train when nobody brings one: a language model, images of digits, and a tiny network.

They are small, real, and need no download: the text is the source of Python's standard library, the images come with
scikit-learn. What a real job may have is an option here: mixed precision with or without a loss scale, accumulation,
activation checkpointing, compilation, several optimizers to choose from. For a fault behaves differently in each.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint

from bitwitness.errors import ConfigurationError
from bitwitness.examples.digits import DigitsNet, Images, load_images
from bitwitness.examples.gpt import GPT, GPTConfig
from bitwitness.examples.text import Corpus

Precision = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adam", "sgd"]
_CHOICES: dict[str, tuple[str, ...]] = {"precision": get_args(Precision), "optimizer": get_args(OptimizerName)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every job can be told.

    Attributes:
        batch: examples in a micro-batch of a rank.
        accumulate: micro-batches in a step.
        precision: `fp32`; `bf16` by autocast; `fp16` by autocast and with a loss scale.
        optimizer: `sgd` has a momentum of 0.9.
        lr: the learning rate, constant.
        max_grad_norm: the norm that gradients are clipped to; 0: they are not.
        compile: by torch.compile.
    """

    batch: int = 8
    accumulate: int = 1
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    lr: float = 3e-3
    max_grad_norm: float = 1.0
    compile: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], job: str) -> Self:
        """Check options and fill in the defaults.

        Raises:
            ConfigurationError: unknown, or of the wrong type; names it and what there is.
        """
        known = {one.name: one.default for one in fields(cls)}
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigurationError(
                f"the job {job} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        for name, value in options.items():
            assert known[name] is not MISSING
            _check(job, name, value, known[name])
        return cls(**options)


def _check(job: str, name: str, value: Any, default: Any) -> None:
    where = f"the option {name} of the job {job} is {value!r}"
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigurationError(f"{where}: give one of {', '.join(_CHOICES[name])}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{where}: give true or false")
    elif isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else int | float):
        raise ConfigurationError(f"{where}: give a number")
    elif value < 0 or (value == 0 and isinstance(default, int)):
        raise ConfigurationError(f"{where}: give a positive number")


class Trained(ABC):
    """What the jobs here have in common: see `bitwitness.faults.job.CampaignJob`.

    Args:
        model: to train; initialised.
        options: of the job.
        seed: of the job, which decides its batches.
    """

    def __init__(self, model: nn.Module, options: Options, seed: int) -> None:
        self.model, self.seed, self._options = model, seed, options
        self.optimizers = [_make_optimizer(model, options)]
        self.scaler = GradScaler("cpu", init_scale=2.0**12) if options.precision == "fp16" else None
        self.micros = options.accumulate
        self.max_grad_norm = options.max_grad_norm or None
        if options.compile:
            model.compile()

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over a micro-batch, of which a step adds up so many."""
        with self._autocast():
            loss = self._loss(model, batch)
        return loss / self.micros if self.micros > 1 else loss

    @abstractmethod
    def batch(self, step: int, rank: int, micro: int) -> Any:
        """A micro-batch, in memory of its own."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """How good the model is now."""

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).float(), targets)

    def _autocast(self) -> AbstractContextManager[Any]:
        match self._options.precision:
            case "bf16":
                return torch.autocast("cpu", dtype=torch.bfloat16)
            case "fp16":
                return torch.autocast("cpu", dtype=torch.float16)
            case _:
                return nullcontext()

    def _scores(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """Loss and accuracy without dropout, of class scores whose last axis is the classes."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self._autocast():
                scores = self.model(inputs).float().flatten(0, -2)
        finally:
            self.model.train(was_training)
        flat = targets.flatten()
        return float(F.cross_entropy(scores, flat)), float((scores.argmax(-1) == flat).double().mean())


def _make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    match options.optimizer:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=options.lr)
        case "adam":
            return torch.optim.Adam(model.parameters(), lr=options.lr)
        case _:
            return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


# Language ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LanguageOptions(Options):
    """Beside `Options`: the size of the model, see `GPTConfig`; `length`: of a sequence; `checkpointing`: of activations."""

    blocks: int = 3
    heads: int = 4
    width: int = 64
    length: int = 32
    dropout: float = 0.0
    tied: bool = True
    checkpointing: bool = False


@cache
def _corpus() -> Corpus:
    return Corpus.standard_library()


class Language(Trained):
    """A GPT over bytes learns the source of Python's standard library."""

    def __init__(self, options: LanguageOptions, seed: int) -> None:
        try:
            config = GPTConfig(
                options.blocks, options.heads, options.width, options.length, options.dropout, options.tied
            )
        except ValueError as error:
            raise ConfigurationError(f"the job language cannot be made: {error}") from error
        model = GPT(config)
        if options.checkpointing:
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        super().__init__(model, options, seed)
        self._size, self._length = options.batch, options.length

    def batch(self, step: int, rank: int, micro: int) -> Tensor:
        """Bytes, int64 `[batch, length + 1]`."""
        return _corpus().batch(self.seed, step, rank, micro, size=self._size, length=self._length)

    def evaluate(self) -> dict[str, float]:
        """Loss, and how often the likeliest next byte is the right one, on text that nobody trains on."""
        text = _corpus().validation_batch(0, size=64, length=self._length)
        loss, accuracy = self._scores(text[:, :-1], text[:, 1:])
        return {"loss": loss, "accuracy": accuracy}

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())


def language(options: Mapping[str, Any], seed: int, rank: int, world_size: int) -> Language:
    """A small GPT over bytes; options: `LanguageOptions`."""
    return Language(LanguageOptions.of(options, "language"), seed)


# Digits --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DigitsOptions(Options):
    """Beside `Options`: `width`: channels of the first stage; `blocks`: residual blocks; `batch_norm`: with or without."""

    batch: int = 32
    optimizer: OptimizerName = "sgd"
    lr: float = 0.05
    max_grad_norm: float = 0.0
    width: int = 16
    blocks: int = 2
    batch_norm: bool = True


@cache
def _images() -> Images:
    return load_images()


class Digits(Trained):
    """A small residual network learns to tell handwritten digits apart."""

    def __init__(self, options: DigitsOptions, seed: int) -> None:
        super().__init__(DigitsNet(options.width, options.blocks, options.batch_norm), options, seed)
        self._size = options.batch

    def batch(self, step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
        """Images, float32 `[batch, 1, 8, 8]`, and their digits, int64 `[batch]`."""
        images = _images()
        drawn = torch.randint(
            len(images.training), (self._size,), generator=_generator("digits", self.seed, step, rank, micro)
        )
        return images.training[drawn], images.training_labels[drawn]

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on images that nobody trains on, and the accuracy on those of the training."""
        images = _images()
        loss, accuracy = self._scores(images.validation, images.validation_labels)
        _, of_training = self._scores(images.training, images.training_labels)
        return {"loss": loss, "accuracy": accuracy, "training_accuracy": of_training}


def digits(options: Mapping[str, Any], seed: int, rank: int, world_size: int) -> Digits:
    """A small ResNet on scikit-learn's digits; options: `DigitsOptions`."""
    return Digits(DigitsOptions.of(options, "digits"), seed)


# Tiny ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MlpOptions(Options):
    """Beside `Options`: `width`: of the hidden layer; `inputs`: how many numbers an example has; `classes`: how many there are."""

    width: int = 16
    inputs: int = 8
    classes: int = 4


class Mlp(Trained):
    """Two matrices learn which of some random directions a point is nearest to: for tests, where a step must cost nothing."""

    def __init__(self, options: MlpOptions, seed: int) -> None:
        layers = [nn.Linear(options.inputs, options.width), nn.GELU(), nn.Linear(options.width, options.classes)]
        super().__init__(nn.Sequential(*layers), options, seed)
        self._size, self._inputs = options.batch, options.inputs
        self._directions = torch.randn(options.inputs, options.classes, generator=_generator("mlp", "directions"))

    def batch(self, step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
        """Points, float32 `[batch, inputs]`, and their classes, int64 `[batch]`."""
        return self._draw(self._size, self.seed, step, rank, micro)

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on points that nobody trains on."""
        loss, accuracy = self._scores(*self._draw(256, "validation"))
        return {"loss": loss, "accuracy": accuracy}

    def _draw(self, size: int, *key: object) -> tuple[Tensor, Tensor]:
        points = torch.randn(size, self._inputs, generator=_generator("mlp", *key))
        return points, (points @ self._directions).argmax(-1)


def mlp(options: Mapping[str, Any], seed: int, rank: int, world_size: int) -> Mlp:
    """Two linear layers on drawn points; options: `MlpOptions`."""
    return Mlp(MlpOptions.of(options, "mlp"), seed)


language.prepare = _corpus  # type: ignore[attr-defined]  # loaded once, before the ranks are forked
digits.prepare = _images  # type: ignore[attr-defined]
