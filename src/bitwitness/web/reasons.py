"""What disagreed with what, and why this rank or why nobody: sentences that say no more than the evidence carries."""

from __future__ import annotations

from collections.abc import Sequence

from bitwitness.evidence import NONFINITE

__all__ = ["NONFINITE", "listed"]


def listed(items: Sequence[object], noun: str = "", most: int = 8) -> str:
    """`rank 3`, `ranks 3, 4 and 5`."""
    words = [str(item) for item in items[:most]]
    if len(items) > most:
        words.append(f"{len(items) - most} more")
    joined = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
    return f"{noun}{'s' if len(items) > 1 else ''} {joined}".strip()
