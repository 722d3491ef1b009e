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
    # By a sum, not by factorials: of 10^12 trials the logarithms of these are so large that their difference has no digit left.
    ways = math.fsum(math.log(trials - seen) - math.log(seen + 1) for seen in range(alarms))
    low, high, target = alarms / trials, 1.0, math.log(1 - _CONFIDENCE)
    for _ in range(200):  # halving a double ends long before
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _log_at_most(alarms, trials, middle, ways) > target else (low, middle)
    return high


def _log_at_most(alarms: int, trials: int, p: float, ways: float) -> float:
    """The logarithm of the probability of at most so many alarms, fewer than are expected; `ways`: that of choosing so many."""
    term = total = 1.0  # the largest, and down from it by the ratio of neighbours
    for seen in range(alarms, 0, -1):
        term *= seen * (1 - p) / ((trials - seen + 1) * p)
        total += term
        if term < total * 1e-18:
            break
    return ways + alarms * math.log(p) + (trials - alarms) * math.log1p(-p) + math.log(total)
