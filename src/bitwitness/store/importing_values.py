"""Values from files that anybody may have written, as the database takes them.

PostgreSQL refuses NUL in text and rows of an index that are too long, neither database holds a number of more than 64 bits,
and half of a character cannot be encoded. None of that may stop an import, so every value passes through here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LARGEST_STEP = 1 << 40
"""No training makes as many steps, and the sum of as many over a million ranks still fits into 64 bits."""
NAME, SENTENCE = 250, 4000
"""Characters of a name that is looked for, and of a text."""

_BAD = re.compile("[\0\ud800-\udfff]")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
_DEEPEST, _MOST = 20, 10_000


def text(value: Any, most: int = SENTENCE) -> str:
    """A text; "" for anything else. What is cut off is replaced by a digest of the whole, so that two do not become one."""
    if not isinstance(value, str):
        return ""
    if len(value) > most:
        digest = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:12]
        value = f"{value[: most - 14]}~{digest}"
    return _BAD.sub("\ufffd", value) if not value.isascii() or "\0" in value else value


def name(value: Any) -> str:
    """A name that is looked for: of a node, a device, a check."""
    return text(value, NAME)


def whole(value: Any, least: int = 0, most: int = LARGEST_STEP) -> int | None:
    """A whole number within bounds; None for anything else."""
    return value if type(value) is int and least <= value <= most else None


def real(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is not float and type(value) is not int:
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def moment(value: Any) -> str:
    """A time as UTC in ISO 8601, to the millisecond, so that times sort as text; "" for anything else."""
    if not isinstance(value, str) or len(value) > 60:
        return ""
    if _MOMENT.fullmatch(value):
        return value
    try:
        found = datetime.fromisoformat(value)
        return "" if found.tzinfo is None else stamp(found)
    except (ValueError, OverflowError):
        return ""


def stamp(at: datetime) -> str:
    """A time as text."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value that every reader takes: no NaN, no number beyond 64 bits, no bottomless nesting."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else text(f"{value:#x}", 100)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {text(str(key), 500): plain(one, depth + 1) for key, one in list(value.items())[:_MOST]}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in value[:_MOST]]
    return text(str(value))


def digest(value: str) -> str:
    """What stands for a text that may be longer than an index takes."""
    return hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()[:32]
