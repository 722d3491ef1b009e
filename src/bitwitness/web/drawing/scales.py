"""From values to places: one axis of steps for all that a run's page draws, and marks on axes that people can read."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDE = 100.0
"""Places along the axis of steps are in percent of its length, so that a figure fits every width without a script."""
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Steps:
    """The axis of steps; the step `last` is drawn as wide as any other, so the axis ends at `last + 1`."""

    first: int
    last: int

    @classmethod
    def over(cls, steps: Iterable[int]) -> Steps:
        """The axis that shows all of these; of one step where there are none."""
        known = [step for step in steps if step >= 0]
        return cls(min(known), max(known)) if known else cls(0, 0)

    def at(self, step: float) -> float:
        """Where a step begins, in percent; what lies outside is put at the end that it lies beyond."""
        return round(min(max((step - self.first) / (self.last + 1 - self.first), 0.0), 1.0) * WIDE, 4)

    def width(self, first: int, last: int) -> float:
        """How wide a range of steps is, both included."""
        return round(max(self.at(last + 1) - self.at(first), 0.0), 4)

    def ticks(self, most: int = 6) -> tuple[Tick, ...]:
        """Marks at round steps."""
        return tuple(
            Tick(self.at(step), grouped(step))
            for step in round_values(self.first, self.last, most)
            if step == int(step)
        )


def widened(low: float, high: float, share: float = 0.04) -> tuple[float, float]:
    """Both ends with some room beyond them, never the same, and finite for whatever is finite."""
    room = high * share - low * share if high > low else max(abs(low), 1.0) * 0.05
    return max(low - room, -_LARGEST), min(max(low, high) + room, _LARGEST)


def part_of(value: float, low: float, high: float) -> float:
    """How far a value lies on the way from `low` to `high`, which differ: 0 to 1; what lies outside is put at the nearer end.

    The difference of two doubles may be more than a double holds, so that of a fourth of each is taken then; that of the smallest is
    exact, and is taken as it is.
    """
    inside = min(max(value, low), high)
    if math.isinf(high - low):
        return (inside / 4 - low / 4) / (high / 4 - low / 4)
    return (inside - low) / (high - low)


def round_values(low: float, high: float, most: int) -> list[float]:
    """At most so many round values from low to high."""
    if not (math.isfinite(low) and math.isfinite(high)) or high < low:
        return []
    parts = max(most - 1, 1)
    raw = min(high / parts - low / parts, _LARGEST)
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    size = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= raw), power)
    if size <= 0 or low + size == low or math.isinf(size):
        return [low]
    start = math.ceil(low / size)
    found = [(start + place) * size for place in range(most)]
    return [float(f"{value:.12g}") for value in found if math.isfinite(value) and value <= high + size * 1e-9]


def grouped(value: float) -> str:
    """A number for an axis."""
    if not math.isfinite(value):
        return "\u2013"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"


def quantile(values: Sequence[float], share: float) -> float:
    """A value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
