"""The verdict, decided again from what is on record: whoever is shown it need not believe the process that wrote it.

`verdict.decide` is a pure function of observations, placement and history. Incidents of older versions do not say what was known
before; then the histories that fit are tried, the usual one first, and which one it took is said.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from bitwitness._version import __version__
from bitwitness.evidence import History, Verdict
from bitwitness.runfiles import Incident
from bitwitness.verdict import decide

_COMPARED = frozenset({"numerics", "replay", "replicas", "input"})
_MOST = 20_000
"""Observations beyond which only the usual history is tried."""

Outcome = Literal["same", "same, assumed", "different", "impossible"]


@dataclass(frozen=True, slots=True)
class Decided:
    """What deciding again came to.

    Attributes:
        outcome: `same`; `same, assumed`: under a history that is not on record; `different`; `impossible`: what is on record
            cannot be decided.
        text: the same in a sentence.
        code: Python that does it again, for whoever has the files.
    """

    outcome: Outcome
    text: str
    code: str


def decide_again(found: Incident) -> Decided:
    """Decide again what was decided in the job."""
    recorded = _recorded(found.record.get("history"))
    code = _code(found, recorded)
    rules = f"the rules of bitwitness {__version__}"
    try:
        if recorded is not None:
            again = _decide(found, recorded)
            if again == found.verdict:
                said = f"Decided again from the {len(found.observations)} observations in incident.json by {rules}: the same verdict."
                return Decided("same", said, code)
            return Decided("different", _other(found, again, rules), code)
        for history in _likely(found):
            if _decide(found, history) == found.verdict:
                said = (
                    f"Decided again from the {len(found.observations)} observations in incident.json by {rules}: the same verdict. What "
                    f"was known before is not in this file; it was assumed that {_assumed(history)}."
                )
                return Decided("same, assumed", said, _code(found, history))
        again = _decide(found, next(_likely(found)))
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"The verdict cannot be decided again: the observations on record do not go together ({error!r:.200})."
        return Decided("impossible", said, code)
    return Decided("different", _other(found, again, rules), code)


def _decide(found: Incident, history: History) -> Verdict:
    return decide(found.observations, found.topology, history, found.verdict.step)


def _recorded(record: Any) -> History | None:
    try:
        return History.from_json(record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _likely(found: Incident) -> Iterator[History]:
    """Histories that agree with the suspect window, the usual one first."""
    last, check = found.verdict.window[0], found.verdict.check
    passed = {str(check): last} if last >= 0 and check is not None else {}
    yield History(passed, _COMPARED)
    if len(found.observations) > _MOST:
        return
    flags = product((True, False), (False, True), *((True, False) for _ in _COMPARED))
    for agreed, overflow, *before in flags:
        compared = frozenset(name for name, done in zip(sorted(_COMPARED), before, strict=True) if done)
        yield History(passed, compared, agreed, overflow)


def _assumed(history: History) -> str:
    missing = sorted(_COMPARED - history.compared_before)
    said = (
        "every check had compared the ranks before"
        if not missing
        else f"{', '.join(missing)} had compared nothing before"
    )
    if not history.reductions_agreed:
        said += ", that reduced gradients had differed since the last passed check of the replicas"
    if history.sum_may_overflow:
        said += ", and that the gradients were large enough for their sum to overflow"
    return said


def _other(found: Incident, again: Verdict, rules: str) -> str:
    by = found.record.get("bitwitness", "an unknown version")
    return (
        f"Decided again by {rules}, the verdict is another one: {again.headline()}. The incident was written by bitwitness {by!s:.40}. "
        "Either the rules have changed since, or incident.json was: rely on neither before somebody has looked."
    )


def _code(found: Incident, history: History | None) -> str:
    known = 'History.from_json(found.record["history"])'
    if history is not None and _recorded(found.record.get("history")) is None:
        known = (
            f"History({json.dumps(dict(history.last_passed))}, frozenset({json.dumps(sorted(history.compared_before))}), {history.reductions_agreed}, "
            f"{history.sum_may_overflow})"
        )
    lines = (
        "from bitwitness import read_incident",
        "from bitwitness.evidence import History",
        "from bitwitness.verdict import decide",
        f"found = read_incident({json.dumps(str(found.path))})",
        f"again = decide(found.observations, found.topology, {known}, found.verdict.step)",
        "print(again == found.verdict, again.headline())",
    )
    return f"python -c {shlex.quote('; '.join(lines))}"
