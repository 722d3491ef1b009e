"""Striking outputs on purpose, as a drill asks: apart from `drill`, which is read where there is no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from bitwitness.mutate import FlipBits, bits_of, mutated, put_words, words_of
from bitwitness.scan.drill import Drill


class Striker:
    """Strikes the outputs of one rank, with a generator of its own: nothing else that is drawn changes."""

    def __init__(self, drills: Sequence[Drill], rank: int, seed: int) -> None:
        self._probabilities = [drill.probability for drill in drills if drill.rank == rank]
        self._random = random.Random(f"bitwitness drill {seed} {rank}")  # noqa: S311 - no secret is drawn
        self.struck = 0

    def strike(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs, with one bit of one element flipped where the drill strikes; the originals stay as they are."""
        for probability in self._probabilities:
            if self._random.random() < probability:
                outputs = self._flipped(outputs)
        return outputs

    def _flipped(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        struck = list(outputs)
        candidates = [number for number, output in enumerate(struck) if output.numel()]
        if not candidates:
            return outputs
        chosen = self._random.choice(candidates)
        output = struck[chosen].detach().clone()
        where = [self._random.randrange(output.numel())]
        flip = FlipBits((self._random.randrange(bits_of(output.dtype)),))
        put_words(output, where, mutated(words_of(output, where), output.dtype, flip))
        struck[chosen] = output
        self.struck += 1
        return struck
