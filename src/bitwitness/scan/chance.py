"""How probable it is that wrong answers gather in one place by chance: whoever accuses a device or a link asks the same question."""

from __future__ import annotations

import math

CHANCE = 1e-3
"""An accusation needs that what is wrong had gathered there by chance with at most this probability."""
LEAST = 3
"""Nobody fails with fewer wrong transfers, or sets of operands with a wrong answer, whatever the shares: one or two are an accident of anything."""

_NEGLIGIBLE = 1e-12
"""Of the sum so far: a term below it ends the sum, for those after it are smaller still."""


def tail(trials: int, least: int, share: float) -> float:
    """P(X >= least) for X binomial over so many trials with this share; 1.0 for what is no more than the mean."""
    if least <= 0 or share >= 1 or least <= trials * share:
        return 1.0
    if share <= 0 or least > trials:
        return 0.0
    ways = math.lgamma(trials + 1) - math.lgamma(least + 1) - math.lgamma(trials - least + 1)
    term = math.exp(ways + least * math.log(share) + (trials - least) * math.log1p(-share))
    total, odds = 0.0, share / (1 - share)
    for count in range(least, trials + 1):
        total += term
        term *= (trials - count) / (count + 1) * odds
        if term <= total * _NEGLIGIBLE:
            break
    return min(1.0, total)


def chernoff(least: int, mean: float) -> float:
    """Upper bound of P(X >= least) for a sum of independent trials with this mean; 1.0 for what is no more than the mean.

    Mitzenmacher and Upfal, *Probability and Computing*, theorem 4.4: (e^d / (1 + d)^(1 + d))^mean with least = (1 + d) mean.
    """
    if least <= mean:
        return 1.0
    if mean <= 0:
        return 0.0
    return math.exp(least - mean - least * math.log(least / mean))


def gathers(wrong: int, looked_at: int, all_wrong: int, all_looked_at: int, places: int) -> bool:
    """Whether more of what is wrong lies in one place than chance would have put there, had it been as frequent everywhere.

    Args:
        wrong: transfers in this place.
        looked_at: likewise, wrong ones or not.
        all_wrong: in this and all other places.
        all_looked_at: likewise.
        places: how many might have been accused.
    """
    if wrong < LEAST or all_looked_at <= 0:
        return False
    return places * tail(all_wrong, wrong, looked_at / all_looked_at) <= CHANCE
