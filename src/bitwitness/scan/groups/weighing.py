"""Whether faults explain the failures, or a workload that fails by itself would as well: whom tests may accuse.

The evidence for a fault is a ratio of likelihoods: of all tests so far under the faults, with their prior, over the same
tests under a workload that fails by itself at whatever rate fits it best. Where the workload does fail by itself, the
probability that this ratio ever reaches 1/a is at most a, however the groups were chosen and whenever one looks (Ville's
inequality for likelihood ratios with the denominator at its maximum; Robbins, Annals of Mathematical Statistics 1970). So an
accusation at 1/(1 - confidence) is wrong at most so often, even for a workload that means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitwitness.scan.groups.model import (
    NEVER,
    Fault,
    Rates,
    Rows,
    log_by_itself,
    log_likelihood,
    log_sum,
    summed,
)

BY_ITSELF = 0.05
"""How probable it is before any test that a workload fails by itself."""

_GRID = tuple(0.9 * 0.62**i for i in range(20))
_SURE = math.log(300)
_ALIKE = 0.6


def log_prior(fault: Fault, size: int, link: float) -> float:
    """Logarithm of how probable this fault is, as one more of `size` nodes."""
    if fault.pair:
        return math.log(0.5 * link / (size * (size - 1) / 2))
    return math.log(0.5 * (1 - link) / size)


def log_rates(chosen: Sequence[float], rates: Rates) -> float:
    """Logarithm of how probable these rates are together: faults in one set of nodes are often of one kind."""
    place = dict(zip(rates.values, rates.prior, strict=True))
    total = 0.0
    for i, rate in enumerate(chosen):
        alike = sum(one == rate for one in chosen[:i]) / i if i else place[rate]
        total += math.log(_ALIKE * alike + (1 - _ALIKE) * place[rate])
    return total


def fit(rows: Rows, faults: Sequence[Fault], rates: Rates) -> tuple[list[float], float]:
    """The rates of these faults that fit best, and the logarithm of prior of the rates times likelihood.

    For one fault the rates are added up, which is what the inequality asks for; for several the best is taken, and less
    evidence is claimed than there is.
    """
    held = summed(rows, faults)
    if not faults:
        return [], log_likelihood(held, ())
    best = [rates.values[0]] * len(faults)
    logs: list[float] = []
    for _ in range(1 if len(faults) == 1 else 3):
        for i in range(len(faults)):
            logs = []
            for rate in rates.values:
                trial = [*best[:i], rate, *best[i + 1 :]]
                value = log_likelihood(held, trial)
                logs.append(value + log_rates(trial, rates))
            best[i] = rates.values[max(range(len(logs)), key=logs.__getitem__)]
    return best, log_sum(logs)


def evidence(rows: Rows, fault: Fault, others: Sequence[Fault], rates: Rates, prior: float) -> float:
    """Logarithm of the ratio for this fault, given the others: with it, over a workload that fails by itself instead."""
    best, with_it = fit(rows, (*others, fault), rates)
    if with_it == NEVER:
        return NEVER
    if not others:
        return prior + with_it - log_by_itself(rows)
    held = summed(rows, others)
    instead = max(log_likelihood(held, best[:-1], chance) for chance in (*_GRID, 1e-4, 1e-5))
    return prior + with_it - instead - log_rates(best[:-1], rates)


def evidence_of_all(rows: Rows, faults: Sequence[Fault], rates: Rates, priors: float) -> float:
    """The same for all of these faults at once, in whatever order they came up, over a workload that fails by itself."""
    _, with_them = fit(rows, faults, rates)
    return with_them + priors + math.lgamma(len(faults) + 1) - log_by_itself(rows) if with_them > NEVER else NEVER


def fails_by_itself(rows: Rows, faults: Sequence[Fault], rates: Rates, priors: float) -> bool:
    """Whether a workload that fails by itself is what explains these tests, and no faults that could."""
    _, with_them = fit(rows, faults, rates)
    held = summed(rows, ())
    instead = log_sum([log_likelihood(held, (), chance) for chance in _GRID]) - math.log(len(_GRID))
    in_any_order = math.lgamma(len(faults) + 1)
    return math.log(BY_ITSELF) + instead - priors - in_any_order - with_them > _SURE
