"""Making a case smaller while it still goes wrong: which parts of it are needed for that.

Pure search, apart from whoever is asked: a question is answered `yes` by devices and may cost thousands of calls, so that the order of
questions must be the same on every node, and their number has an end. The algorithm is ddmin (Zeller and Hildebrandt, IEEE TSE 28(2),
2002): first over positions along the axes, then over elements that are not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from bitwitness.compare.cases import Case

T = TypeVar("T")

_CONFIDENCE = 0.95
"""With which a question to an intermittent fault is answered no rightly. A wrong no makes the result larger, and never wrong."""


class Spent(Exception):
    """No more questions may be asked."""


@dataclass(slots=True)
class Budget:
    """How many questions there may be, of a case's size or of its elements.

    Attributes:
        left: so many.
        asked: so many were.
    """

    left: int
    asked: int = 0

    def take(self) -> None:
        """Ask one.

        Raises:
            Spent: there is none left.
        """
        if self.left <= 0:
            raise Spent
        self.left -= 1
        self.asked += 1


def trials(lowest_rate: float, most: int, confidence: float = _CONFIDENCE) -> int:
    """How often a device that is wrong at this rate must be asked, to be seen wrong with this confidence: ln(1-c)/ln(1-q)."""
    if lowest_rate >= 1.0:
        return 1
    if lowest_rate <= 0.0:
        return most
    return max(1, min(most, math.ceil(math.log(1.0 - confidence) / math.log1p(-lowest_rate))))


def ddmin(items: Sequence[T], needed: Callable[[Sequence[T]], bool]) -> list[T]:
    """A part of these without which it no longer happens; 1-minimal if all answers are right.

    Args:
        items: with all of which it happens.
        needed: whether it still happens with only these. It may raise `Spent`: then what was found up to there is returned.
    """
    kept, parts = list(items), 2
    try:
        while len(kept) >= 2:
            chunks = _split(kept, parts)
            smaller = next((one for one in chunks if needed(one)), None)
            if smaller is not None:
                kept, parts = smaller, 2
                continue
            rest = None
            if parts > 2:
                complements = ([x for j, one in enumerate(chunks) if j != i for x in one] for i in range(len(chunks)))
                rest = next((one for one in complements if needed(one)), None)
            if rest is not None:
                kept, parts = rest, max(parts - 1, 2)
            elif parts >= len(kept):
                break
            else:
                parts = min(len(kept), 2 * parts)
    except Spent:
        pass
    return kept


def _split(items: Sequence[T], parts: int) -> list[list[T]]:
    edges = [len(items) * number // parts for number in range(parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(edges) if high > low]


def minimised(case: Case, wrong: Callable[[Case], bool], budget: Budget) -> Case:
    """The smallest case found that is still wrong; the case itself where nothing smaller is.

    Args:
        case: that is wrong.
        wrong: whether a case still is. Deterministic questions: the same answers give the same result.
        budget: of questions. Half of what is there is for sizes, what is left then for elements.
    """
    sizes = Budget(budget.left // 2)
    small = _narrowed(case, wrong, sizes)
    budget.left -= sizes.asked
    budget.asked += sizes.asked
    return _cleared(small, wrong, budget)


def _narrowed(case: Case, wrong: Callable[[Case], bool], budget: Budget) -> Case:
    """Axis after axis, the largest first, and again as long as that helps: what one allows may depend on another."""
    best = case
    for _ in range(3):
        before = best.elements
        for size in best.sizes():
            if size not in best.sizes():
                continue  # became equal to another one
            start = best

            def needed(kept: Sequence[int], start: Case = start, size: int = size) -> bool:
                budget.take()
                return wrong(start.narrowed({size: kept}))

            kept = ddmin(range(size), needed)
            if len(kept) < size:
                best = start.narrowed({size: kept})
        if best.elements == before or budget.left <= 0:
            break
    return best


def _cleared(case: Case, wrong: Callable[[Case], bool], budget: Budget) -> Case:
    """With as few elements that are not zero as it takes."""
    places = case.places()

    def needed(kept: Sequence[tuple[int, int]]) -> bool:
        budget.take()
        return wrong(case.cleared(kept))

    try:
        if not places or needed(()):
            return case.cleared(()) if places else case
    except Spent:
        return case
    kept = ddmin(places, needed)
    return case.cleared(kept) if len(kept) < len(places) else case
