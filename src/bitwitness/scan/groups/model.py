"""What tests of groups tell: the record of all tests, and how likely it is under an explanation.

The model is one-sided: a *fault* is a bad node, or two nodes whose link is bad; it makes a test of a group fail with its
rate if all of its nodes are in the group, independently of everything else, and a group without a fault passes. Beside it
stands the only other explanation of a failure: a workload that fails by itself, whatever the group. A group is a whole
number whose bit i stands for node i: with a thousand nodes that is what makes planning in plain Python fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RATES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
"""The rates between which a search tells. Finer ones cost time and would not change a plan."""

NEVER = -math.inf
_SURELY = 0.4
_LEARNED = 0.6
_ALMOST_ONE = 1 - 1e-12


def bits(group: int) -> list[int]:
    """The nodes of a group, in order."""
    text = bin(group)[:1:-1]
    found, place = [], text.find("1")
    while place >= 0:
        found.append(place)
        place = text.find("1", place + 1)
    return found


def mask(nodes: Iterable[int]) -> int:
    """The group of these nodes."""
    group = 0
    for node in nodes:
        group |= 1 << node
    return group


def log_pass(rate: float) -> float:
    """Logarithm of the probability that a fault of this rate does not show; finite also for one that always does."""
    return math.log1p(-min(rate, _ALMOST_ONE))


def log_sum(logs: Sequence[float]) -> float:
    """Logarithm of a sum of numbers of which the logarithms are given."""
    top = max(logs)
    return top if top == NEVER else top + math.log(sum(math.exp(value - top) for value in logs))


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that are thought possible, and how probable each is before a test."""

    values: tuple[float, ...]
    prior: tuple[float, ...]

    def learned(self, found: Sequence[Sequence[float]]) -> Rates:
        """What the rates of the faults already found (a distribution each) say about the next one."""
        if not found:
            return self
        mean = [sum(one[i] for one in found) / len(found) for i in range(len(self.values))]
        return Rates(
            self.values, tuple(_LEARNED * m + (1 - _LEARNED) * p for m, p in zip(mean, self.prior, strict=True))
        )


def possible_rates(lowest: float | None) -> Rates:
    """From certainty down to the lowest rate that is to be found.

    Many faults show each time; who asks for a rate has seen one of about that; the others may have any.
    """
    values = RATES if lowest is None else (*(rate for rate in RATES if rate > 1.2 * lowest), lowest)
    if len(values) == 1:
        return Rates(values, (1.0,))
    share = (1 - _SURELY) / (len(values) - 1)
    if lowest is None:
        return Rates(values, (_SURELY, *(share for _ in values[1:])))
    prior = [0.5 * share for _ in values]
    prior[0] += 0.5 * _SURELY
    prior[-1] += 1 - sum(prior)
    return Rates(values, tuple(prior))


@dataclass(frozen=True, slots=True)
class Fault:
    """A bad node (one bit), or a bad link (two)."""

    nodes: int

    @property
    def pair(self) -> bool:
        """Whether it is a link."""
        return self.nodes & (self.nodes - 1) != 0


@dataclass
class Record:
    """All judged tests: per group how often it passed and failed, and per node in how many passed tests it was."""

    size: int
    groups: dict[int, list[int]] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.passes = [0] * self.size

    def add(self, group: int, passed: int, failed: int) -> None:
        """So often this group passed, and failed."""
        counts = self.groups.setdefault(group, [0, 0])
        counts[0] += passed
        counts[1] += failed
        if passed:
            for node in bits(group):
                self.passes[node] += passed

    def without(self, found: Sequence[Fault]) -> list[tuple[int, int, int]]:
        """Group, passes and failures of those that hold none of these faults whole."""
        known = [fault.nodes for fault in found]
        return [
            (group, counts[0], counts[1])
            for group, counts in self.groups.items()
            if not any(nodes & group == nodes for nodes in known)
        ]


Rows = Sequence[tuple[int, int, int]]


def summed(rows: Rows, faults: Sequence[Fault]) -> Rows:
    """The tests by which of these faults they held (bit i: the i-th): all that their likelihood depends on."""
    known = [(1 << i, fault.nodes) for i, fault in enumerate(faults)]
    counts: dict[int, tuple[int, int]] = {}
    for group, passed, failed in rows:
        held = 0
        for bit, nodes in known:
            if nodes & group == nodes:
                held |= bit
        before = counts.get(held, (0, 0))
        counts[held] = (before[0] + passed, before[1] + failed)
    return [(held, passed, failed) for held, (passed, failed) in counts.items()]


def log_likelihood(held: Rows, rates: Sequence[float], by_itself: float = 0.0) -> float:
    """Logarithm of the probability of tests, `summed` up, if just these faults, with these rates, are there.

    `by_itself`: and the workload fails at this rate whatever the group.
    """
    total, base = 0.0, log_pass(by_itself) if by_itself else 0.0
    values = [log_pass(rate) for rate in rates]
    for inside, passed, failed in held:
        quiet = base
        for place in bits(inside):
            quiet += values[place]
        if failed:
            if quiet == 0.0:
                return NEVER
            total += failed * math.log(-math.expm1(quiet))
        total += passed * quiet
    return total


def log_by_itself(rows: Rows) -> float:
    """The same for a workload that only fails by itself, at the rate that fits best."""
    passed, failed = sum(row[1] for row in rows), sum(row[2] for row in rows)
    tests = passed + failed
    return sum(count * math.log(count / tests) for count in (passed, failed) if count)


def rate_of(rows: Rows, fault: Fault, rates: Rates) -> list[float]:
    """How probable each rate of a fault is by the tests in which it was and no other known one."""
    passed = sum(row[1] for row in rows if fault.nodes & row[0] == fault.nodes)
    failed = sum(row[2] for row in rows if fault.nodes & row[0] == fault.nodes)
    logs = [
        math.log(prior) + passed * log_pass(rate) + failed * math.log(rate)
        for rate, prior in zip(rates.values, rates.prior, strict=True)
    ]
    total = log_sum(logs)
    return [math.exp(value - total) for value in logs]
