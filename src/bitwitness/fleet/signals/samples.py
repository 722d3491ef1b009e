"""Prometheus samples, from the text that an exporter serves and from the JSON that the query API answers with.

The official parser raises at the first damaged line and keeps nothing of the others. Here a damaged line is counted, and
the rest is read: half a scrape of a dying node is all there may ever be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from bitwitness.fleet.signals.reading import Unreadable, json_values, number, words

MAX_SAMPLES = 200_000
"""That are kept of one document: a week of a machine's error counters, taken every half minute."""
MAX_LINE = 64 << 10

_LINE = re.compile(
    r"""(?P<name>[a-zA-Z_:][\w:]*+)[ \t]*+
        (?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*+")*+)\})?[ \t]*+
        (?P<value>[^\s#{}]++)(?:[ \t]++(?P<time>-?[0-9.eE+]++))?[ \t]*+(?:\#.*+)?\r?""",
    re.VERBOSE | re.ASCII,
)
_LABEL = re.compile(r'[ \t]*+([a-zA-Z_]\w*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(?:,|$)', re.ASCII)
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_BEGINNING = re.compile(
    rb"^[ \t]*(?:# (?:HELP|TYPE) \w|[a-zA-Z_:][\w:]*(?:\{[a-zA-Z_]\w*=\"|[ \t]+[-+0-9.]))", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series.

    Attributes:
        name: of the metric.
        labels: of the series.
        value: as it was written; None where that is no number, which includes the NaN of a stale series.
        time: in seconds since 1970; None where the text does not say.
    """

    name: str
    labels: Mapping[str, str]
    value: float | None
    time: float | None


@dataclass(slots=True)
class Damage:
    """What of a document could not be read, counted as it is read.

    Attributes:
        lines: how many lines or series are damaged.
        first: the first of them.
        more: there were more samples than are kept.
        warnings: what the other side said of its own answer.
    """

    lines: int = 0
    first: str = ""
    more: bool = False
    warnings: list[str] = field(default_factory=list)

    def note(self, what: object) -> None:
        """Count one more, and keep the first."""
        self.lines += 1
        self.first = self.first or words(what, 120)


def is_text(head: bytes) -> bool:
    """Whether a file begins like the text format of Prometheus."""
    return _BEGINNING.search(head) is not None


def from_text(text: str, wanted: Callable[[str], bool], damage: Damage) -> Iterator[Sample]:
    """The samples of a scrape. A last line without its end is counted as damaged, and read all the same."""
    kept = 0
    for line in _lines(text):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip()) if len(line) <= MAX_LINE else None
        labels = None if found is None else _labels(found["labels"] or "")
        if found is None or labels is None:
            damage.note(line)
        elif wanted(found["name"]):
            if kept == MAX_SAMPLES:
                damage.more = True
                return
            kept += 1
            yield Sample(found["name"], labels, _value(found["value"], line, damage), _seconds(number(found["time"])))
    if text and not text.endswith("\n"):
        damage.note(f"the last line has no end: {text[-80:]}")


def _lines(text: str) -> Iterator[str]:
    """The lines of a text, one at a time: a list of them all would need several times its memory."""
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            return None if text[at:].strip() else labels
        labels[found[1]] = re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), found[2])
        at = found.end()
    return labels


def _value(told: object, whole: object, damage: Damage) -> float | None:
    """A value; what is neither a number nor one of the words for *no number* is damage."""
    value = number(told)
    if value is None and (not isinstance(told, str) or told.lower().lstrip("+-") not in {"nan", "inf"}):
        damage.note(whole)
    return value


def _seconds(time: float | None) -> float | None:
    """The text format counts milliseconds, OpenMetrics seconds; no time of our days can be mistaken for the other."""
    return time if time is None or abs(time) < 1e11 else time / 1000


def from_query(text: str, wanted: Callable[[str], bool], damage: Damage) -> Iterator[Sample]:
    """The samples of an answer of the query API: of a moment (`vector`) or of a range of time (`matrix`).

    Raises:
        Unreadable: it is no such answer, or it says that the query failed.
    """
    answer = next((value for value in json_values(text)[0] if isinstance(value, dict) and "status" in value), None)
    if answer is None:
        raise Unreadable("it is no answer of Prometheus")
    if answer["status"] != "success":
        raise Unreadable(f"the query failed: {words(answer.get('error', answer['status']), 160)}")
    for key in ("warnings", "infos"):
        told = answer.get(key)
        damage.warnings += [words(one, 120) for one in islice(told, 5)] if isinstance(told, list) else []
    data = answer.get("data")
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list):
        raise Unreadable("the answer has no result")
    yield from _of_series(result, wanted, damage)


def _of_series(result: list[Any], wanted: Callable[[str], bool], damage: Damage) -> Iterator[Sample]:
    seen = 0
    for one in result:
        metric = one.get("metric") if isinstance(one, dict) else None
        name = metric.get("__name__") if isinstance(metric, dict) else None
        points = (one.get("values") or [one.get("value")]) if isinstance(one, dict) else None
        if not isinstance(metric, dict) or not isinstance(name, str) or not isinstance(points, list):
            damage.note(one)
            continue
        if not wanted(name):
            continue
        labels = {key: value for key, value in metric.items() if isinstance(value, str)}
        for point in points:
            time = number(point[0]) if isinstance(point, list) and len(point) == 2 else None
            if time is None:
                damage.note(point)
                continue
            if seen == MAX_SAMPLES:
                damage.more = True
                return
            seen += 1
            yield Sample(name, labels, _value(point[1], point, damage), time)
