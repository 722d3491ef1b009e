"""Real text that is on every machine: the source of Python's standard library.

A demo that had to download its data would not run where clusters are, and random tokens teach a model nothing, so nobody
would see the damage that a fault does. Which bytes a batch holds is a pure function of (seed, step, rank, micro), so any
rank can make any other rank's batch anew: what `Guard(rebuild_batch=...)` asks for.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
"""What is not the library itself, or not on every machine."""

DEFAULT_LIMIT = 4_000_000
"""Bytes of text; the standard library has several times as many."""


def standard_library_text(limit: int = DEFAULT_LIMIT, folder: Path | None = None) -> bytes:
    """The first `limit` bytes of the standard library's source, files in order of their names.

    Raises:
        ConfigurationError: there is no source there, e.g. because this Python keeps its library in an archive.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: list[bytes] = []
    missing = limit
    for name in sorted(_sources(root)):
        if missing <= 0:
            break
        parts.append((root / name).read_bytes()[:missing])
        missing -= len(parts[-1])
    text = b"".join(parts)
    if len(text) < min(limit, 10_000):
        raise ConfigurationError(
            f"{root} holds {len(text)} bytes of Python source, too little to train on: this example reads the source of the "
            "standard library, so use a Python that has it"
        )
    return text


def _sources(root: Path) -> Iterator[str]:
    """Source files by path relative to a folder; what is skipped is not even looked into: each rank does this."""
    for where, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(where, name).relative_to(root).as_posix() for name in files if name.endswith(".py"))


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 `[n]`; the last tenth is held back for validation."""

    training: Tensor
    validation: Tensor

    @classmethod
    def of(cls, text: bytes) -> Corpus:
        """Split a text."""
        content = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
        split = len(content) * 9 // 10
        return cls(content[:split], content[split:])

    @classmethod
    def standard_library(cls, limit: int = DEFAULT_LIMIT) -> Corpus:
        """The source of Python's standard library."""
        return cls.of(standard_library_text(limit))

    def batch(self, *key: int, size: int, length: int) -> Tensor:
        """A training batch, int64 `[size, length + 1]`: a pure function of `key`, e.g. (seed, step, rank, micro)."""
        return _draw(self.training, ("training", *key), size, length)

    def validation_batch(self, *key: int, size: int, length: int) -> Tensor:
        """Likewise, of the text that is held back."""
        return _draw(self.validation, ("validation", *key), size, length)


def _draw(text: Tensor, key: tuple[object, ...], size: int, length: int) -> Tensor:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
