"""Faults in the random state: the one target whose change is meant to change what the job draws.

What is hit are the words from which numbers are made, and not the bookkeeping beside them, which would fail loudly.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SOURCES = ("torch", "cuda", "numpy", "python") if torch.cuda.is_available() else ("torch", "numpy", "python")

_HEADER, WORDS = 24, 624
"""Of a state of PyTorch's CPU generator: the bytes before the 624 words of its Mersenne twister (at::mt19937_data_pod)."""


def like(source: str) -> Tensor:
    """A tensor like the one that `hit` has changed."""
    return torch.zeros(2, dtype=torch.int64) if source == "cuda" else torch.zeros(WORDS, dtype=torch.int32)


def hit(source: str, strike: Callable[[Tensor], bool]) -> None:
    """Have the state of a source changed: int32 `[624]`, of CUDA int64 `[2]`, seed and offset."""
    match source:
        case "torch":
            state = torch.get_rng_state()
            words = state[_HEADER : _HEADER + 8 * WORDS].view(torch.int32)[::2].clone()
            if strike(words):
                state[_HEADER : _HEADER + 8 * WORDS].view(torch.int32)[::2] = words
                torch.set_rng_state(state)
        case "cuda":
            state = torch.cuda.get_rng_state()
            words = state.view(torch.int64).clone()
            if strike(words):
                torch.cuda.set_rng_state(words.view(torch.uint8))
        case "numpy":
            kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  (the one that users draw from)
            words = torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy())
            if strike(words):
                np.random.set_state((kind, words.numpy().view(np.uint32), *rest))  # noqa: NPY002
        case _:
            version, keys, gauss = random.getstate()
            words = torch.from_numpy(np.array(keys[:WORDS], dtype=np.uint32).view(np.int32).copy())
            if strike(words):
                changed = words.numpy().view(np.uint32).tolist()
                random.setstate((version, (*changed, *keys[WORDS:]), gauss))
