"""How many tests any search would need: beside what one used, so that "many" has a measure.

Three parts.

*Counting.* Which of the sum of C(n, i), i <= k, sets is bad takes log2 of that number in bits, and a test tells at most so
many bits as its channel carries. With k bad nodes of rate q and groups in which each is with probability p, that is I(k, q) = max over p of the mutual
information of the number of bad ones inside, binomial, and the outcome: the dilution model of Atia and Saligrama (IEEE Trans. Inf. Theory 58, 2012),
which is 1 bit for q = 1 and q / (e ln 2) for one bad node of a small rate.

*Accusing nobody for nothing.* If under a workload that fails by itself somebody is accused with probability at most a, then log2(1/a) bits more
must be told: with the outcome's distribution at capacity, the tests of each of the sets must end in an accusation of just that set, and all of these endings
together may have probability a. The same inequality (the divergence of a test is at most the capacity) gives (bits + log2(1/a)) / I.

*Seeing nothing.* To say that no node of rate Q is left takes ln(1 - c) / ln(1 - Q) passed tests of each.

What is proven. Counting: for k = 1 and every q, for every search, adaptive ones too (Baldassini, Johnson and Aldridge, ISIT 2013). Accusing: for k = 1
and q = 1, as a search is a decision tree. Let it accuse node x on leaves l, each of which has probability
2^-T(l) under a workload that fails at random in half of its tests. With q = 1 each x ends in one leaf, at depth T_x, and sum of 2^-T_x <= a,
so by convexity the mean of T_x over n nodes is at least log2(n / a). Seeing nothing: for all. Everything else is a measure and not a proof: for k > 1 it
holds for groups drawn alike for all nodes, and a search that had all bad nodes cornered in one group could in principle do better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from bitwitness.scan.groups.model import log_pass
from bitwitness.scan.groups.narrowing import entropy

_STEPS = 60


@dataclass(frozen=True, slots=True)
class Bound:
    """Tests that are needed: `tests` is the largest of what follows; `counting` is the first part alone."""

    tests: float
    counting: float
    accusing: float
    certifying: float


def capacity(bad: int, rate: float) -> float:
    """Most bits that one test tells about `bad` nodes of this rate."""

    def told(share: float) -> float:
        fails = noise = 0.0
        for inside in range(bad + 1):
            chance = math.comb(bad, inside) * share**inside * (1 - share) ** (bad - inside)
            failing = -math.expm1(inside * log_pass(rate))
            fails += chance * failing
            noise += chance * entropy(failing)
        return entropy(fails) - noise

    low, high = 1e-6, 1.0
    for _ in range(_STEPS):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, b) if told(a) > told(b) else (a, high)
    return told((low + high) / 2)


def sets(size: int, bad: int) -> int:
    """How many sets of at most so many nodes there are."""
    return sum(math.comb(size, i) for i in range(bad + 1))


def bound(size: int, bad: int, rate: float, confidence: float, certify: float | None) -> Bound:
    """For `bad` nodes of this rate among `size`; `certify`: the rate at which nothing else is left, None if nothing is said."""
    alpha = 1 - confidence
    certifying = 0.0 if certify is None else max(1.0, math.log(alpha) / log_pass(certify))
    if bad == 0:
        return Bound(certifying, 0.0, 0.0, certifying)
    carries = capacity(bad, rate)
    count = math.log2(sets(size, bad))
    counting, accusing = count / carries, (count - math.log2(alpha)) / carries
    return Bound(max(accusing, certifying), counting, accusing, certifying)


@cache
def one_more(size: int, found: int, rate: float, confidence: float) -> float:
    """Tests that any search needs for one more bad node than is found, and for what is said about the rest."""
    return bound(size, min(found + 1, size), rate, confidence, rate).tests
