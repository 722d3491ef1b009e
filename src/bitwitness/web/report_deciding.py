"""The verdict, decided again from what is on record: whoever is shown it need not believe the process that wrote it.

`verdict.decide` is a pure function of observations, placement and history. Incidents of older versions do not say what was known
before; then the histories that fit are tried, the usual one first, and which one it took is said. A history that is on record and
cannot be read is another matter: that file was damaged or changed, and nothing is assumed in its place.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

from bitwitness._version import __version__
from bitwitness.evidence import History, Verdict
from bitwitness.runfiles import Incident
from bitwitness.verdict import decide

_COMPARED = frozenset({"numerics", "replay", "replicas", "input"})
_MOST = 20_000
"""Observations beyond which only the usual history is tried."""
_TEXTS = ("reason", "nodes", "devices")
"""Fields of a verdict that hold names or sentences: that they differ is said, not how."""

Outcome = Literal["same", "same, assumed", "different", "impossible"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the verdict that came out otherwise; what it is on record and what it is now, "" of names and sentences."""

    field: str
    recorded: str
    again: str


@dataclass(frozen=True, slots=True)
class Decided:
    """What deciding again came to.

    Attributes:
        outcome: `same`; `same, assumed`: under a history that is not on record; `different`; `impossible`: what is on record
            cannot be decided.
        text: the same in a sentence.
        code: Python that does it again, for whoever has the files; "" where it cannot be done.
        observations: how many it was decided from.
        by: the version of bitwitness that wrote the incident.
        differing: the fields that came out otherwise.
        history: what was taken as known before, as `History.to_json`; None where that is damaged.
        assumed: whether that is not on record.
        why: what went wrong, where it is impossible.
    """

    outcome: Outcome
    text: str
    code: str
    observations: int
    by: str
    differing: tuple[Difference, ...]
    history: Mapping[str, Any] | None
    assumed: bool
    why: str


def decide_again(found: Incident) -> Decided:
    """Decide again what was decided in the job."""
    path, count, by = (
        str(found.path),
        len(found.observations),
        str(found.record.get("bitwitness", "an unknown version")),
    )
    try:
        recorded = _recorded(found.record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return made(
            "impossible", path, count, by, why=f"what was known before is on record, but damaged: {error!r:.200}"
        )
    assumed = recorded is None
    history = next(_likely(found)) if recorded is None else recorded
    try:
        for known in _likely(found) if recorded is None else [recorded]:
            if _decide(found, known) == found.verdict:
                return made("same, assumed" if assumed else "same", path, count, by, history=known, assumed=assumed)
        differing = tuple(_differing(found.verdict, _decide(found, history)))
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"the observations on record do not go together: {error!r:.200}"
        return made("impossible", path, count, by, history=history, assumed=assumed, why=why)
    return made("different", path, count, by, differing=differing, history=history, assumed=assumed)


def made(
    outcome: Outcome,
    path: str,
    observations: int,
    by: str,
    *,
    differing: tuple[Difference, ...] = (),
    history: History | None = None,
    assumed: bool = False,
    why: str = "",
) -> Decided:
    """What deciding again came to, with its sentence and its code.

    `path` is the directory of the incident, all else is as in `Decided`.
    """
    text = _text(outcome, observations, by, differing, history, assumed, why)
    code = _code(path, history, assumed) if history is not None else ""
    known = None if history is None else history.to_json()
    return Decided(outcome, text, code, observations, by, differing, known, assumed, why)


def _decide(found: Incident, history: History) -> Verdict:
    return decide(found.observations, found.topology, history, found.verdict.step)


def _recorded(record: Mapping[str, Any]) -> History | None:
    """What is on record; None where nothing is.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    if "history" not in record:
        return None
    said = record["history"]
    passed, before, flags = said["last_passed"], said["compared_before"], ("reductions_agreed", "sum_may_overflow")
    if not isinstance(passed, dict) or not all(type(step) is int for step in passed.values()):
        raise TypeError("last_passed")
    if not isinstance(before, list) or not all(isinstance(check, str) for check in before):
        raise TypeError("compared_before")
    for name in flags:
        if not isinstance(said[name], bool):
            raise TypeError(name)
    return History.from_json(said)


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


def _differing(recorded: Verdict, again: Verdict) -> Iterator[Difference]:
    for one in fields(Verdict):
        old, new = getattr(recorded, one.name), getattr(again, one.name)
        if old != new:
            shown = ("", "") if one.name in _TEXTS else (_shown(old), _shown(new))
            yield Difference(one.name, *shown)


def _shown(value: object) -> str:
    """A value in words: `none` for nothing."""
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value[:12]) or "none"
    return "none" if value is None else str(value)


# Words ----------------------------------------------------------------------------------------------------------------


def _text(
    outcome: Outcome,
    observations: int,
    by: str,
    differing: tuple[Difference, ...],
    history: History | None,
    assumed: bool,
    why: str,
) -> str:
    if outcome == "impossible":
        return f"The verdict cannot be decided again: {why or 'what is on record is damaged'}."
    rules = f"the rules of bitwitness {__version__}"
    before = (
        f" What was known before is not in this file; it was assumed that {_assumed(history)}."
        if assumed and history is not None
        else ""
    )
    if outcome != "different":
        return (
            f"Decided again from the {observations} observations in incident.json by {rules}: the same verdict.{before}"
        )
    words = (
        "Only its words differ; who, what and when are the same."
        if [one.field for one in differing] == ["reason"]
        else f"These fields differ: {'; '.join(map(_difference, differing))}."
    )
    return (
        f"Decided again by {rules}, the verdict is another one. {words} The incident was written by bitwitness {by:.40}. "
        f"Either the rules have changed since, or incident.json was: rely on neither before somebody has looked.{before}"
    )


def _difference(one: Difference) -> str:
    return f"{one.field} (on record {one.recorded}, now {one.again})" if one.recorded or one.again else one.field


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


def _code(path: str, history: History, assumed: bool) -> str:
    known = (
        f"History({json.dumps(dict(history.last_passed))}, frozenset({json.dumps(sorted(history.compared_before))}), "
        f"{history.reductions_agreed}, {history.sum_may_overflow})"
        if assumed
        else 'History.from_json(found.record["history"])'
    )
    shown = "f'{name}: {getattr(found.verdict, name)} on record, {getattr(again, name)} now'"
    differ = "getattr(found.verdict, name) != getattr(again, name)"
    lines = (
        "from bitwitness import read_incident",
        "from bitwitness.evidence import History",
        "from bitwitness.verdict import decide",
        f"found = read_incident({json.dumps(path)})",
        f"again = decide(found.observations, found.topology, {known}, found.verdict.step)",
        "print(again == found.verdict, again.headline())",
        f"print(*({shown} for name in found.verdict.to_json() if {differ}), sep=chr(10))",
    )
    return f"python -c {shlex.quote('; '.join(lines))}"
