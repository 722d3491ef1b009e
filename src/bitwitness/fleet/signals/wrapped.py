"""Lines of the kernel inside of what forwards them as JSON: journald, container runtimes, and the many collectors of logs.

Every collector has names of its own for the text, the time and the node, and some put many lines into one document. So a text
counts for what it says and not for the field that it stands in; time and node are those of the record that is nearest to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.times import Clock, split

MARKS = (
    r"NVRM|SXid|EDAC M|Hardware Error|fallen off the bus|Memory failure:|Uncorrected hardware memory|XidCriticalError"
    r"|last message repeated"
)
"""What no line is without that the reader of logs takes something from."""
_MARKED = re.compile(MARKS)
_TEXTS = ("MESSAGE", "message", "msg", "log", "line")
_TIMES = ("time", "@timestamp", "timestamp", "ts", "_time", "date", "timeUnixNano", "observedTimeUnixNano")
_HOSTS = ("_HOSTNAME", "hostname", "host", "node", "nodename")
_DEEPEST = 8
_MOST = 2_000
"""Values of one document that are looked at."""
_STAMP = re.compile(r"\d{10}(?:\d{9}|\d{6}|\d{3})?(?:\.\d{1,9})?")

HAS_TEXT = re.compile(rf"\"(?:{'|'.join(_TEXTS)})\"\s*:")
HAS_TIME = re.compile(rf"\"(?:__REALTIME_TIMESTAMP|{'|'.join(_TIMES)})\"\s*:")


@dataclass(frozen=True, slots=True)
class Piece:
    """A text out of a document.

    Attributes:
        text: what it says.
        time: of the record that it stands in, or None.
        sure: whether that time says its zone.
        host: the node of that record, or "".
        program: who wrote it, or "".
    """

    text: str
    time: datetime | None = None
    sure: bool = False
    host: str = ""
    program: str = ""


def pieces(document: object, clock: Clock) -> list[Piece]:
    """The texts in which a driver or the kernel may be quoted; where there is none, the message, for its time and node."""
    found: list[Piece] = []
    plain: list[Piece] = []
    for piece, preferred in _walk(document, Piece(""), clock, 0, [_MOST]):
        if _MARKED.search(piece.text) is None:
            plain += [piece] if preferred and not plain else []
            continue
        # One text in two fields is one; the longer one is the whole.
        same = [one for one in found if one.time == piece.time and one.host == piece.host]
        if any(piece.text.strip() in one.text for one in same):
            continue
        found = [one for one in found if one not in same or one.text.strip() not in piece.text]
        found.append(piece)
    return found or plain


def _walk(value: object, around: Piece, clock: Clock, depth: int, left: list[int]) -> Iterator[tuple[Piece, bool]]:
    left[0] -= 1
    if depth > _DEEPEST or left[0] < 0:
        return
    if isinstance(value, dict):
        here = _record(value, around, clock)
        for key in sorted(value, key=lambda name: name not in _TEXTS):
            text = _message(value[key]) if key == "MESSAGE" else value[key]
            if isinstance(text, str):
                yield Piece(text, here.time, here.sure, here.host, here.program), key in _TEXTS
            else:
                yield from _walk(text, here, clock, depth + 1, left)
    elif isinstance(value, list):
        own = _epoch(value[0]) if len(value) == 2 else None  # fluent-bit and Loki: a time, and what was said then
        here = Piece("", own, True, around.host, around.program) if own is not None else around
        for one in value:
            if isinstance(one, str):
                left[0] -= 1
                yield Piece(one, here.time, here.sure, here.host, here.program), False
            else:
                yield from _walk(one, here, clock, depth + 1, left)


def _record(record: Mapping[str, object], around: Piece, clock: Clock) -> Piece:
    """When, where and by whom a record was written, as far as it says; else as what it stands in."""
    time, sure = _journal_time(record), True
    if time is None:
        time, sure = _time(record, clock)
    if time is None:
        time, sure = around.time, around.sure
    host = next((words(record[key], 253) for key in _HOSTS if isinstance(record.get(key), str)), around.host)
    program = record.get("SYSLOG_IDENTIFIER")
    kernel = record.get("_TRANSPORT") == "kernel"
    named = words(program, 120) if isinstance(program, str) and not kernel else around.program
    return Piece("", time, sure, host, named)


def _message(value: object) -> object:
    """The text of a record: journald writes what is no UTF-8 as a list of bytes."""
    if isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 256 for one in value
    ):
        return bytes(value).decode("utf-8", "replace")
    return value


def _journal_time(record: Mapping[str, object]) -> datetime | None:
    for key in ("_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP"):
        value = record.get(key)
        if isinstance(value, str | int) and str(value).isascii() and str(value).isdigit():
            try:
                return datetime.fromtimestamp(int(value) / 1e6, UTC)
            except (ValueError, OverflowError, OSError):
                continue
    return None


def _time(record: Mapping[str, object], clock: Clock) -> tuple[datetime | None, bool]:
    for key in _TIMES:
        value = record.get(key)
        counted = _epoch(value)
        if counted is not None:
            return counted, True
        if isinstance(value, str):
            found = split(value[:60] + " ", clock)
            if found.time is not None:
                return found.time, found.sure
    return None, False


def _epoch(value: object) -> datetime | None:
    """Seconds, or thousandth, millionth or billionth parts of them, since 1970; by its length, which tells which."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = value if isinstance(value, str) else format(value, "f") if isinstance(value, float) else f"{value:d}"[:30]
    if _STAMP.fullmatch(text) is None:
        return None
    digits = len(text.partition(".")[0])
    try:
        return datetime.fromtimestamp(float(text) / 10 ** (digits - 10), UTC)
    except (ValueError, OverflowError, OSError):
        return None
