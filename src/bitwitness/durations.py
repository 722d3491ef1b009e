"""Lengths of time as people write them: one reading of `90s` and `7d`, for options of commands and for policy files."""

from __future__ import annotations

import math

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str) -> float:
    """Seconds of a number of seconds, or of minutes, hours or days with `m`, `h` or `d` behind it.

    Raises:
        ValueError: it is none of these, negative, or not finite.
    """
    plain = text.strip()
    unit = _UNITS.get(plain[-1:])
    try:
        seconds = float(plain[:-1]) * unit if unit else float(plain)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{text!r:.40} is no time: give seconds, or e.g. 90s, 30m, 12h, 7d")
    return seconds
