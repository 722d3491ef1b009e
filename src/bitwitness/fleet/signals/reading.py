"""What every reader of a document needs: input of bounded size, JSON that cannot crash, and numbers that are numbers.

The readers below parse what other programs wrote, on machines that are suspected to be broken. Nothing about the input may
be trusted: not its size, not its shape, not its numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

MAX_CHARACTERS = 64 << 20
"""Of one document. A scrape of a large machine has a megabyte; what is larger by far is no such document."""
MAX_JSON = 16 << 20
"""Of one document that is one piece of JSON, which takes several times its size in memory."""
MAX_RECORDS = 10_000
"""That one document may yield; what is beyond is said in one record, and not listed."""
EVIDENCE_CHARACTERS = 240

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_LOGIN, _QUERY = re.compile(r"//[^/\s@]*+@"), re.compile(r"(https?://[^\s?]*+)\?\S*+")
_SLICE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+")
_BEGINNING = re.compile(r"""\{\s*+["}]|\[\s*+[\[{\]]""")
_KEY = re.compile(r"\"\s*+:")
_OWN = (b'"source"', b'"code"', b'"weight"')


class Unreadable(Exception):
    """A document that is none; the message says why, for the reason of a no-evidence record."""


def document(source: str | bytes | Path, limit: int = MAX_CHARACTERS) -> str:
    """The text of a document, or of the file of that name.

    Raises:
        Unreadable: the file cannot be read, or it is larger than any document of this kind.
    """
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                source = file.read(limit + 1)
        except (OSError, ValueError) as error:
            raise Unreadable(f"it cannot be read: {error}") from error
    if len(source) > limit:
        raise Unreadable(f"it is larger than {limit >> 20} MiB")
    return source.decode("utf-8", errors="replace") if isinstance(source, bytes) else source


def json_values(text: str) -> tuple[list[Any], bool]:
    """The JSON objects and lists of objects in a text that may say other things too; and whether one is broken.

    Programs print warnings before their JSON, with brackets in them. Where something begins like JSON and is none, or a key
    stands outside of all JSON, a document is damaged: then what was found may be a part of what there was. How much is tried
    is bounded, because a text can be made of beginnings.
    """
    decoder, at, left = json.JSONDecoder(), 0, 8 * len(text) + 1000
    values, broken, end = [], False, 0
    while left > 0 and (found := _BEGINNING.search(text, at)) is not None:
        start = found.start()
        try:
            value, at = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # Making the error counts the lines up to it, which is what a late failure costs.
            at, left, broken = start + 1, left - (error.pos - start) - error.pos // 64 - 100, True
        except (ValueError, RecursionError):
            at, left, broken = start + 1, left - len(text) // 10 - 1000, True
        else:
            values.append(value)
            broken |= _KEY.search(text, end, start) is not None
            end = at
    return values, broken or left <= 0 or _KEY.search(text, end) is not None


def damaged(source: str, origin: str) -> Signal:
    """Of a document that has damaged JSON beside what could be read."""
    why = "a part of it is damaged JSON, so it may have said more than what was read"
    return no_evidence(source, f"{source}:damaged", why, origin=origin)


def read_json(
    source: str | bytes | Path,
    origin: str,
    says: str,
    nothing: str,
    lacks: str,
    parts: Callable[[list[Any]], list[Any]],
    signals: Callable[[list[Any]], Iterator[Signal]],
) -> Iterator[Signal]:
    """The signals of a document in JSON, whatever it is of. Never raises on what it reads.

    Args:
        source: the text, or the file that has it.
        origin: the file, for the records.
        says: who says it, the source of the signals.
        nothing: what there is not, where it cannot be read.
        lacks: why, where it has no parts that are known.
        parts: takes those that are known out of the values.
        signals: reads these.
    """
    try:
        values, broken = json_values(document(source, MAX_JSON))
        known = parts(values)
        if not known:
            raise Unreadable(lacks)
    except Unreadable as error:
        yield no_evidence(says, f"{says}:unreadable", f"{nothing}: {error}", origin=origin)
        return
    if broken:
        yield damaged(says, origin)
    yield from bounded(signals(known), says, origin)


def is_ours(head: bytes) -> bool:
    """Whether a file begins like the list that `fleet signals --json` prints, which quotes the words of all others."""
    return all(word in head for word in _OWN)


def begins_json(head: bytes) -> bool:
    """Whether there is a bracket at all at which JSON could begin."""
    return b"{" in head or b"[" in head


def number(value: object) -> float | None:
    """A finite number that is written as one, also as text; None for all else, so that damage is never read as 0."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or (isinstance(value, str) and "_" in value):
        return None
    try:
        result = float(value)
    except (ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


def whole(value: object) -> int | None:
    """A count: a whole number from 0 on; None for all else."""
    result = number(value)
    return int(result) if result is not None and result >= 0 and result == int(result) else None


def words(value: object, limit: int = EVIDENCE_CHARACTERS) -> str:
    """What was read, on one line and of a readable length, without characters that steer a terminal."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(_CONTROL.sub(" ", text[: 4 * limit]).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def parent_of(device: str) -> str:
    """The device that a slice is cut from, as drivers before 470 name slices; "" where the name does not say."""
    found = _SLICE.fullmatch(device)
    return "" if found is None else found[1]


def shown_address(url: str) -> str:
    """An address for people: without user, password, and what stands behind a `?`, where tokens stand."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the address given"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def masked(text: str) -> str:
    """A text in which addresses have no user, password, or what stands behind a `?`."""
    return _QUERY.sub(r"\1", _LOGIN.sub("//", text))


def stamp(seconds: float | None) -> str | None:
    """Seconds since 1970 as the time of a record; None for what is no time that a record can have."""
    if seconds is None:
        return None
    try:
        return iso(datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def bounded(signals: Iterable[Signal], source: str, origin: str) -> Iterator[Signal]:
    """The first of many records; that there are more is said, because silence about the rest would read as health."""
    for count, one in enumerate(signals):
        if count == MAX_RECORDS:
            why = f"it has more than {MAX_RECORDS} records; those beyond were not read"
            yield no_evidence(source, f"{source}:more", why, origin=origin)
            return
        yield one
