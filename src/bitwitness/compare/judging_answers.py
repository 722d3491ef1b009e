"""What the task of a comparison gave in the end: right answers, and how many are others than the leader's (Ma et al., ACL 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bitwitness.compare.records import Account

DIVERGENCE = "divergence"
_RIGHT = ".right"


def results(accounts: Sequence[Account], leader: str) -> dict[str, dict[str, float]]:
    """By participant's name, its numbers.

    Of `NAME`, a list of answers, the share of right ones if there is `NAME.right`; of a number, the number. `divergence` is the share
    of answers that are others than the leader's, over all lists; -1, no answer, is an answer of its own, and never a right one.
    """
    own = next((one.results for one in accounts if one.participant.name == leader), {})
    found = {one.participant.name: _numbers(one.results, own) for one in accounts if one.results}
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbers(given: Mapping[str, Any], leader: Mapping[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    other = asked = 0
    for name, value in sorted(given.items()):
        if name.endswith(_RIGHT):
            continue
        if isinstance(value, list):
            right, theirs = given.get(name + _RIGHT), leader.get(name)
            if isinstance(right, list) and len(right) == len(value) > 0:
                numbers[name] = sum(a == b and a != -1 for a, b in zip(value, right, strict=True)) / len(value)
            if isinstance(theirs, list) and len(theirs) == len(value):
                other += sum(a != b for a, b in zip(value, theirs, strict=True))
                asked += len(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            numbers[name] = float(value)
    if asked:
        numbers[DIVERGENCE] = other / asked
    return numbers
