"""What tests of a suspect alone say: the last word before anybody is named, whatever made it a suspect.

How likely explanations are (`weighing`) depends on which explanations are thought of, and three nodes that are bad only together, or two links
that share a node, are not among them. One thing needs no list of explanations: a group that is nothing but the suspect, and failed. So the planner
asks here, in the one place where it names somebody. Where groups must be larger, the suspect needs company, and each of five companies without a
node in common must have failed with it and passed without it: fewer than five links or nodes could not explain that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bitwitness.scan.groups.model import Fault, Rates, Record, bits, rate_of

_COMPANIES = 5
_CHANCE = 1e-3  # so improbable, few failures alone do not go with many beside others


@dataclass(frozen=True, slots=True)
class Alone:
    """How the tests of a suspect alone ended.

    Attributes:
        passed, failed: how often.
        shown: whether a failure is the suspect's and cannot be that of its company.
    """

    passed: int
    failed: int
    shown: bool


def alone(record: Record, suspect: int, least: int) -> Alone:
    """The tests of a node, or of both ends of a link, alone, or with the fewest nodes that a group of `least` needs."""
    most = max(least, suspect.bit_count())
    if most == suspect.bit_count():
        passed, failed = record.groups.get(suspect, (0, 0))
        return Alone(passed, failed, failed > 0)
    passed = failed = taken = companies = 0
    for group, (right, wrong) in record.groups.items():
        if group & suspect != suspect or group.bit_count() != most:
            continue
        passed, failed = passed + right, failed + wrong
        company = group & ~suspect
        if wrong and not company & taken and _passed_together(record, company, suspect):
            taken |= company
            companies += 1
    return Alone(passed, failed, companies >= _COMPANIES)


def _passed_together(record: Record, company: int, suspect: int) -> bool:
    return any(
        right and group & company == company and group & suspect != suspect
        for group, (right, _) in record.groups.items()
    )


def may_be_named(record: Record, fault: Fault, found: Sequence[Fault], rates: Rates, least: int, doubt: float) -> bool:
    """Whether tests of it alone allow to say that a fault is one: they failed, and as often as those beside others let expect.

    Of a link, both ends must have passed without the other as well, so often that chance explains it with probability `doubt` at most.
    """
    own = alone(record, fault.nodes, least)
    if not own.shown or _chance(record, fault.nodes, found, rates, own, least) < _CHANCE:
        return False
    return not fault.pair or all(end_passed(record, fault, end, rates, least, doubt) for end in bits(fault.nodes))


def end_passed(record: Record, link: Fault, end: int, rates: Rates, least: int, doubt: float) -> bool:
    """Whether an end of a link passed without the other so often that it is not the end alone that fails when both are tested."""
    most = max(least, 2)
    rows = [
        (group, right, wrong)
        for group, (right, wrong) in record.groups.items()
        if group & link.nodes == link.nodes and group.bit_count() == most
    ]
    passed = sum(right for group, (right, _) in record.groups.items() if right and group & link.nodes == 1 << end)
    likely = rate_of(rows, link, rates)
    chances = (chance * _at_most(0, passed, rate) for rate, chance in zip(rates.values, likely, strict=True))
    return passed > 0 and sum(chances) <= doubt


def cleared(record: Record, node: int, found: Sequence[Fault], rates: Rates, least: int, doubt: float) -> bool:
    """Whether a node passed alone so often that it is not what failed beside others, but for a chance of `doubt`."""
    own = alone(record, node, least)
    return own.passed > 0 and not own.failed and _chance(record, node, found, rates, own, least) <= doubt


def _chance(record: Record, suspect: int, found: Sequence[Fault], rates: Rates, own: Alone, least: int) -> float:
    """How probable it is that so few tests of it alone fail, at the rate at which it failed beside others."""
    size = max(least, suspect.bit_count())
    rows = [
        row
        for row in record.without([one for one in found if one.nodes != suspect])
        if row[0] & suspect == suspect and (row[0].bit_count() > size or own.shown)
    ]
    likely = rate_of(rows, Fault(suspect), rates)
    return sum(
        chance * _at_most(own.failed, own.passed + own.failed, rate)
        for rate, chance in zip(rates.values, likely, strict=True)
    )


def _at_most(failed: int, tests: int, rate: float) -> float:
    """Probability of so few failures in these tests."""
    if rate >= 1.0:
        return 1.0 if failed >= tests else 0.0
    if failed > tests * rate:
        return 1.0  # more than the half of it: of no interest
    total = 0.0
    for count in range(failed + 1):
        total += math.exp(
            math.lgamma(tests + 1)
            - math.lgamma(count + 1)
            - math.lgamma(tests - count + 1)
            + count * math.log(rate)
            + (tests - count) * math.log1p(-rate)
        )
    return min(1.0, total)
