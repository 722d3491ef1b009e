"""How often a check may cry wolf, given that it did so rarely or never: an upper bound, not the share that was seen.

Apart from the page because a bound that is too low by a mistake would be believed; here it can be tested against its definition.
"""

from __future__ import annotations

import math

_CONFIDENCE = 0.95


def false_alarm_bound(alarms: int, trials: int) -> float | None:
    """The one-sided 95 % upper bound on the probability of a false alarm in one trial; None where there was no trial.

    Without an alarm it is 3/n, the rule of three (J. A. Hanley and A. Lippman-Hand, "If nothing goes wrong, is everything all
    right?", JAMA 249, 1983); otherwise that of C. J. Clopper and E. S. Pearson ("The use of confidence or fiducial limits
    illustrated in the case of the binomial", Biometrika 26, 1934): the p at which as few alarms as these, or fewer, are seen
    with a probability of 5 %.

    Raises:
        ValueError: more alarms than trials, or a negative number.
    """
    if not 0 <= alarms <= trials:
        raise ValueError(f"{alarms} false alarms in {trials} trials")
    if trials == 0:
        return None
    if alarms == 0:
        return min(1.0, 3 / trials)
    if alarms == trials:
        return 1.0
    low, high, target = alarms / trials, 1.0, math.log(1 - _CONFIDENCE)
    for _ in range(200):  # halving a double ends long before
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _log_at_most(alarms, trials, middle) > target else (low, middle)
    return high


def _log_at_most(alarms: int, trials: int, p: float) -> float:
    """The logarithm of the probability of at most so many alarms, by the ratio of neighbouring terms.

    Not by factorials: of 10^12 trials the logarithms of these are so large that their difference has no digit left.
    """
    odds = math.log(p) - math.log1p(-p)
    term = trials * math.log1p(-p)
    terms = [term]
    for seen in range(alarms):
        term += math.log(trials - seen) - math.log(seen + 1) + odds
        terms.append(term)
    largest = max(terms)
    return largest + math.log(math.fsum(math.exp(one - largest) for one in terms))
