"""The bar of one check: which part of a run's rank-steps it verified, and how much is a gap."""

from __future__ import annotations

from dataclasses import dataclass

from bitwitness.store.pages import Cell, Coverage

_WIDTH = 100.0
_LEAST = 1.5
"""What is there at all is drawn at least as wide as this: one failure among a million would otherwise be no pixel."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar; `x` and `width` in percent of it."""

    cell: Cell
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from left to right.

    Attributes:
        parts: its pieces.
        share: of the rank-steps that passed; None where it is not known how many there are.
        gap: rank-steps that are not on record.
    """

    parts: tuple[Part, ...]
    share: float | None
    gap: int


def bar(one: Coverage) -> Bar:
    """The bar of a check. Where more is on record than the run is known to have made, it is not known how much passed."""
    seen = {"passed": max(0, one.passed), "unverified": max(0, one.unverified), "failed": max(0, one.failed)}
    whole = one.all
    if whole <= 0 or sum(seen.values()) > whole:
        return Bar((Part("gap", 0.0, _WIDTH),), None, 0)
    counts: dict[Cell, int] = {
        "passed": seen["passed"],
        "failed": seen["failed"],
        "unverified": seen["unverified"],
        "gap": whole - sum(seen.values()),
    }
    widths = {cell: max(count / whole * _WIDTH, _LEAST) for cell, count in counts.items() if count > 0}
    scale = _WIDTH / sum(widths.values())
    parts, x = [], 0.0
    for cell, width in widths.items():
        parts.append(Part(cell, round(x, 3), round(width * scale, 3)))
        x += width * scale
    return Bar(tuple(parts), counts["passed"] / whole, counts["gap"])
