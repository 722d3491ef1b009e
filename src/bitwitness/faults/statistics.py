"""How sure a share is: no number of a campaign is shown without its interval.

Wilson's interval, because shares near 0 and 1 are the rule here and the textbook interval has no width there: 40 of 40
faults caught does not mean that all are.

Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927); recommended
for small samples by Brown, Cai and DasGupta, Statistical Science 16 (2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a sample and where the true one lies.

    Attributes:
        count, of: so many of so many.
        low, high: ends of the interval, 0..1.
        confidence: of the interval.
    """

    count: int
    of: int
    low: float
    high: float
    confidence: float = 0.95

    @property
    def share(self) -> float | None:
        """0..1; None of an empty sample."""
        return self.count / self.of if self.of else None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        share = self.share
        return {"count": self.count, "of": self.of, "share": share, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        if not self.of:
            return "0 of 0"
        return f"{self.count} of {self.of} ({100 * self.low:.1f} to {100 * self.high:.1f} %)"


def wilson(count: int, of: int, confidence: float = 0.95) -> Share:
    """The Wilson score interval of `count` successes in `of` independent trials; of no trial, everything.

    Raises:
        ValueError: more successes than trials, a negative number, or a confidence outside (0, 1).
    """
    if not 0 <= count <= of or not 0 < confidence < 1:
        raise ValueError(f"{count} of {of} at confidence {confidence} is no share")
    if of == 0:
        return Share(0, 0, 0.0, 1.0, confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = count / of, z * z / of
    center = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / of + weight / (4 * of)) / (1 + weight)
    # The ends are exact where rounding would leave 1e-17.
    low = 0.0 if count == 0 else max(0.0, center - half)
    high = 1.0 if count == of else min(1.0, center + half)
    return Share(count, of, low, high, confidence)


def highest_rate(of: int, confidence: float = 0.95) -> float:
    """The highest rate that `of` trials without one occurrence leave possible: 1 - (1 - c)^(1/n), about 3/n at 95 %."""
    if of < 0 or not 0 < confidence < 1:
        raise ValueError(f"{of} trials at confidence {confidence}")
    return 1.0 if of == 0 else -math.expm1(math.log1p(-confidence) / of)


@lru_cache(maxsize=4096)
def reach(freedom: float, looks: float, chance: float) -> float:
    """How many standard deviations chance alone reaches, where the standard deviation is an estimate.

    One estimate with `freedom` degrees of freedom is the unit of `looks` independent normal draws; of such families a share
    `chance` has a draw beyond what is returned. With one look it is the one-sided quantile of Student's distribution (Biometrika
    6, 1908); with more it allows for looking more than once, without taking the estimate to be wrong anew at each look.

    Raises:
        ValueError: a number is not positive, or a chance not below 1/2.
    """
    if not (freedom > 0 and looks > 0 and 0 < chance < 0.5):
        raise ValueError(f"{freedom} degrees of freedom, {looks} looks and a chance of {chance} have no limit")
    # The logarithm of the estimate's variance, over all that is likely; its density is smooth, so the sum is its integral.
    half = freedom / 2
    wide = 12 / math.sqrt(half) + 12 / half
    logs = [wide * (number / 200 - 1) for number in range(301)]
    weights = [math.exp(half * (log - math.exp(log) + 1)) for log in logs]
    spreads = [math.exp(log / 2) for log in logs]
    total = math.fsum(weights)

    def beyond(limit: float) -> float:
        tails = (min(1.0, looks * 0.5 * math.erfc(limit * spread / math.sqrt(2))) for spread in spreads)
        return math.fsum(weight * tail for weight, tail in zip(weights, tails, strict=True)) / total

    low, high = 0.0, 1.0
    while beyond(high) > chance and high < 1e6:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > chance else (low, middle)
    return high
