"""Handwritten digits that come with scikit-learn, and a residual network small enough to train on a processor.

The published outcomes of faults in vision models were measured on convolutions with batch normalisation, whose moving
variance carries a fault on, and without, where NaN comes sooner. Both need a network of that kind on real images, and
these 1797 images of 8 x 8 pixels (UCI, Alpaydin and Kaynak 1998) are on every machine that has scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows it by)
from torch import Tensor, nn

from bitwitness.errors import MissingExtra

TRAINING = 1500
"""The first so many images are for training: the others are by other writers."""


@dataclass(frozen=True)
class Images:
    """Images, float32 `[n, 1, 8, 8]`, of mean about 0 and deviation about 1, and which digits they are, int64 `[n]`."""

    training: Tensor
    training_labels: Tensor
    validation: Tensor
    validation_labels: Tensor


def load_images() -> Images:
    """Read them from scikit-learn.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # noqa: PLC0415  (an extra, and slow to load)
    except ImportError as error:
        raise MissingExtra(
            "the images of digits come with scikit-learn, which is not installed: pip install 'bitwitness[campaign]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(((pixels - 4.9) / 6.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    digits = torch.from_numpy(labels.astype(np.int64))
    return Images(images[:TRAINING], digits[:TRAINING], images[TRAINING:], digits[TRAINING:])


class Residual(nn.Module):
    """Two 3 x 3 convolutions with a connection around them, as in He et al. (2016), with batch normalisation or without."""

    def __init__(self, channels: int, batch_norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=not batch_norm)
        self.norm1 = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=not batch_norm)
        self.norm2 = nn.BatchNorm2d(channels) if batch_norm else nn.Identity()
        if not batch_norm:
            nn.init.zeros_(self.conv2.weight)  # begins as the identity, or it would not train (Zhang et al., 2019)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inner = F.relu(self.norm1(self.conv1(x)))
        added: Tensor = F.relu(x + self.norm2(self.conv2(inner)))
        return added


class DigitsNet(nn.Module):
    """A stem, residual blocks with a halving of the image in their midst, and a head for ten classes."""

    def __init__(self, width: int, blocks: int, batch_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(width) if batch_norm else nn.Identity()
        self.blocks = nn.ModuleList(Residual(width, batch_norm) for _ in range(blocks))
        self.head = nn.Linear(width * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[batch, 10]` of images `[batch, 1, 8, 8]`."""
        x = F.relu(self.norm(self.stem(images)))
        middle = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index == middle:
                x = F.avg_pool2d(x, 2)
            x = block(x)
        scores: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return scores
