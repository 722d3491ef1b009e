"""How sure a measured rate is when mismatches come together, and what it goes along with. Pure, and no torch.

A fault strikes in spikes: a step has a thousand mismatches and the next fifty have none (Ma et al., ACL 2025, section 4). Elements are
then no independent trials, and an interval that takes them for such is far too narrow. So the step is the unit: how counts vary from
step to step says what one mismatch is worth (the design effect), and the interval is that of Clopper and Pearson for so many fewer,
with Student's quantile, because the variation is itself an estimate. This is the interval of Korn and Graubard (Survey Methodology 24,
1998) for rare things in clustered samples. Wilson's, of which `faults.statistics` has the plain form, covers too seldom where one or
two independent events are expected, and a spike is one event.

The upper end needs more than that where spikes are of very different sizes: the largest, which makes most of the rate, may not have
come yet, and then neither the mean nor its spread says so. So where mismatches come in spikes, the upper end is no lower than that of a
share of steps that are hit times a mean size that is log-normal: the limits of the three numbers that it is made of are put together
by MOVER (Zou, Taleban and Huo, Computational Statistics and Data Analysis 53, 2009), the spread of the logarithms being estimated
with a little that is known before (`_SPREAD`), as a few sizes alone leave it open altogether.

Coverage of 95 % intervals, 400 seeds a cell, of runs with a hit; in brackets without the bound of sizes; least of 5, 10, 30 and 50 %
of steps hit (`tests/compare/test_intervals.py` repeats a part of it):

    sizes                  12 steps      40 steps      200 steps
    all alike              96.6 (96.6)   94.5 (94.5)   94.2 (94.2)
    exponential            99.2 (96.5)   98.0 (95.2)   97.8 (94.5)
    log-normal, sigma 1    98.8 (94.2)   95.2 (92.5)   96.0 (91.2)
    log-normal, sigma 1.5  93.2 (78.8)   96.1 (84.5)   95.8 (83.2)
    log-normal, sigma 2    91.8 (66.0)   93.5 (72.8)   93.5 (72.5)

Of few spikes whose sizes span decades (sigma 2) it is hence up to 3 % less than promised. No interval can mend that:
for sizes of which nothing is known there is none of finite width (Bahadur and Savage, Ann. Math. Stat. 27, 1956). `caution` has a
sentence for it. The price is width: at 40 steps, 30 % of them hit by exponential sizes, the upper end is about 4 times the rate where it was twice,
and of one or two spikes it says hardly anything. What is scattered, and spikes that are alike, pay nothing once there are some.

What it means where the same elements are wrong in every step: then nothing is random, the rate of this device at this work is known
exactly, and the interval is wider than it need be. It says how far the rate would lie from this at other work of the same kind, if
positions were as good as drawn; whether they are, `patterns` tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from bitwitness.faults.statistics import Share, highest_rate, reach

_FEWEST_POINTS = 8
_TOGETHER = 1.5
"""A design effect from which mismatches come in spikes: their sizes are then known from as many of them as were seen, not from all steps."""
_SPREAD, _SPREAD_FREEDOM = 0.5, 2
"""What is taken to be known of the variance of the logarithms of sizes, and as how many spikes it counts."""
_MOST_OF_ALL = 1 / 3
UNEVEN = (
    "More than a third of all mismatches are of one step: how large spikes can be is not known from so few, and the rate may be higher than "
    "the interval says."
)
"""Of an interval whose upper end does not hold what it promises, see `caution`."""
_MANY = 400
"""Degrees of freedom from which Student's quantile is the normal one."""


def rate(counts: Sequence[tuple[int, int]], confidence: float = 0.95) -> Share:
    """The share of elements that mismatch, with its interval.

    Args:
        counts: by step, mismatches and elements that were compared; steps without a mismatch included.
        confidence: of the interval, in (0, 1).

    Returns:
        With no mismatch, the interval ends at `highest_rate`. Of one step alone all mismatches are one event, so that the interval is
        very wide: nothing tells how the next step would be.

    Raises:
        ValueError: a step has more mismatches than elements, or a confidence is none.
    """
    if any(not 0 <= wrong <= of for wrong, of in counts) or not 0 < confidence < 1:
        raise ValueError(f"counts of steps that are none, at confidence {confidence}")
    steps = [(wrong, of) for wrong, of in counts if of]
    wrong, of = sum(one for one, _ in steps), sum(size for _, size in steps)
    if wrong == 0:
        return Share(0, of, 0.0, highest_rate(of, confidence), confidence)
    effect = design_effect(steps)
    hit = sum(one > 0 for one, _ in steps)
    freedom = len(steps) - 1 if effect <= _TOGETHER else min(len(steps) - 1, hit)
    # A spike that was not seen yet may be larger than all that were; none that was seen can be undone.
    all_steps, spikes = (_quantile(one, confidence) for one in (len(steps) - 1, freedom))
    low, high = _clopper_pearson(wrong / effect, of / effect, all_steps, spikes)
    share = wrong / of
    if effect > _TOGETHER:
        high = max(high, _highest_of_sizes(steps, confidence))
    return Share(wrong, of, min(low, share), max(high, share), confidence)


def caution(counts: Sequence[tuple[int, int]]) -> str:
    """What is to be said beside the interval of `rate`, as a sentence: `UNEVEN`, or nothing.

    Args:
        counts: by step, mismatches and elements that were compared.
    """
    steps = [(wrong, of) for wrong, of in counts if of]
    wrong, largest = sum(one for one, _ in steps), max((one for one, _ in steps), default=0)
    together = wrong > 0 and design_effect(steps) > _TOGETHER
    return UNEVEN if together and largest > _MOST_OF_ALL * wrong else ""


def _highest_of_sizes(steps: Sequence[tuple[int, int]], confidence: float) -> float:
    """The upper end for spikes of log-normal sizes: of the logarithm of (share of steps hit) times (mean size), by MOVER."""
    mean = sum(of for _, of in steps) / len(steps)
    logs = [math.log(wrong / mean) for wrong, _ in steps if wrong]
    hit, middle = len(logs), math.fsum(logs) / len(logs)
    freedom = hit - 1 + _SPREAD_FREEDOM
    squares = math.fsum((one - middle) ** 2 for one in logs)
    variance = (squares + _SPREAD_FREEDOM * _SPREAD) / freedom
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    _, often = _clopper_pearson(hit, len(steps), normal, normal)
    parts = (
        math.log(min(1.0, often) * len(steps) / hit),
        _quantile(freedom, confidence) * math.sqrt(variance / hit),
        variance / 2 * (freedom / _least_of_squares(freedom, (1 - confidence) / 2) - 1),
    )
    reached = math.log(hit / len(steps)) + middle + variance / 2 + math.hypot(*parts)
    return math.exp(min(0.0, reached))


@lru_cache(maxsize=1024)
def _least_of_squares(freedom: int, chance: float) -> float:
    """The value below which chi-square of so many degrees of freedom falls with this chance, by its series (Abramowitz and Stegun, 26.4.6)."""

    def below(value: float) -> float:
        term = math.exp(freedom / 2 * math.log(value / 2) - value / 2 - math.lgamma(freedom / 2 + 1))
        total, number = 0.0, 0
        while term > 1e-12 * total and number < 10_000:
            total += term
            number += 1
            term *= value / (freedom + 2 * number)
        return total

    low, high = 0.0, float(freedom)  # the median lies below the mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < chance else (low, middle)
    return high


def design_effect(counts: Sequence[tuple[int, int]]) -> float:
    """How many mismatches are worth one: the variance of the rate over that of independent elements; at least 1.

    Args:
        counts: by step, mismatches and elements; the elements of each not 0.

    Of a single step, all are worth one. Source: Kish, *Survey Sampling* (1965), sections 2.8 and 8.2; variance of a ratio by clusters.
    """
    wrong, of, number = sum(one for one, _ in counts), sum(size for _, size in counts), len(counts)
    if not wrong:
        return 1.0
    if number < 2:
        return float(wrong)
    share = wrong / of
    spread = number / (number - 1) * math.fsum((one - share * size) ** 2 for one, size in counts)
    alone = of * share * (1 - share)
    return min(float(wrong), max(1.0, spread / alone)) if alone > 0 else 1.0


@lru_cache(maxsize=1024)
def _quantile(freedom: int, confidence: float) -> float:
    if 0 < freedom <= _MANY:
        return reach(freedom, 1, (1 - confidence) / 2)
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _clopper_pearson(count: float, of: float, below: float, above: float) -> tuple[float, float]:
    """The ends, so many standard deviations below and above, for a count that need not be whole, by Paulson's approximation of the quantiles of F (Ann. Math. Stat. 13, 1942)."""
    low, high = 0.0, 1.0
    if count > 0:
        odds = _paulson(2 * count, 2 * (of - count + 1), -below)
        low = count * odds / (of - count + 1 + count * odds)
    if count < of:
        odds = _paulson(2 * (count + 1), 2 * (of - count), above)
        high = 1.0 if math.isinf(odds) else (count + 1) * odds / (of - count + (count + 1) * odds)
    return low, high


def _paulson(above: float, below: float, z: float) -> float:
    """The quantile of F with these degrees of freedom that lies z standard deviations from the middle."""
    a, b = 2 / (9 * above), 2 / (9 * below)
    # ((1 - b) r - (1 - a)) / sqrt(b r^2 + a) = z, solved for r, the cube root of F.
    square = (1 - b) ** 2 - z * z * b
    if square <= 0:
        return math.inf if z > 0 else 0.0
    root = math.sqrt(max(0.0, ((1 - a) * (1 - b)) ** 2 - square * ((1 - a) ** 2 - z * z * a)))
    cube = ((1 - a) * (1 - b) + math.copysign(root, z)) / square
    return max(0.0, cube) ** 3


def spearman(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Spearman's correlation of ranks, -1..1; None of fewer than 8 pairs without a None, or where one of both never changes."""
    whole = [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]
    if len(whole) < _FEWEST_POINTS:
        return None
    first, second = _ranks([x for x, _ in whole]), _ranks([y for _, y in whole])
    middle = (len(whole) + 1) / 2
    across = math.fsum((x - middle) * (y - middle) for x, y in zip(first, second, strict=True))
    spread = math.fsum((x - middle) ** 2 for x in first) * math.fsum((y - middle) ** 2 for y in second)
    return max(-1.0, min(1.0, across / math.sqrt(spread))) if spread > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + 1 + end) / 2
        start = end
    return ranks
