"""The records of faults that were injected on purpose, read without torch: who reads incidents must know which were drills.

`bitwitness.faults.record` writes them, checks every bit of them, and needs torch for that. Here only what a person must know is
taken from a line: which fault, where, when, and how many elements it changed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
_STEPS = 1 << 40


@dataclass(frozen=True, slots=True)
class Injected:
    """One change that landed.

    Attributes:
        fault: the fault's number in its job.
        spec: the fault, in the grammar.
        node, rank, step, start: where and when; `start` counts the starts of the job, from 1.
        work, target, name: what was hit, in which work.
        count: elements that were changed.
    """

    fault: int
    spec: str
    node: str
    rank: int
    step: int
    start: int
    work: str
    target: str
    name: str
    count: int


def read_injected(line: bytes) -> Injected | None:
    """What a line of a record says; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA or not isinstance(record.get("site"), dict):
        return None
    site = {"start": 1, **record["site"]}
    numbers = [_whole(site.get(name)) for name in ("fault", "rank", "step", "start")] + [_whole(record.get("count"))]
    words = [record.get("spec"), record.get("node"), *(site.get(name) for name in ("work", "target", "name"))]
    if None in numbers or not all(isinstance(word, str) for word in words):
        return None
    fault, rank, step, start, count = (int(number or 0) for number in numbers)
    spec, node, work, target, name = map(str, words)
    return Injected(fault, spec, node, rank, step, start, work, target, name, count)


def _whole(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _STEPS
    return value if whole else None
