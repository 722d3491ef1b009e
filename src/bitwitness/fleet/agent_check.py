"""Whether a node's agent does its work, for a probe: by what it leaves behind, so that an agent that hangs is not asked about itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from bitwitness.fleet.agent_memory import Noted
from bitwitness.fleet.agent_signals import signals_file

_LEAST = timedelta(minutes=2)
_AHEAD = timedelta(minutes=5)
"""How far off the clocks of a node and of a file server may be."""


def wrong_with_reports(noted: Noted, look: float, now: datetime) -> str:
    """Why the reports cannot be relied on; "" where they can."""
    if noted.looked is None:
        return "the node was never seen, or NVSentinel never reached"
    if noted.troubles:
        return "; ".join(noted.troubles)
    return _age("the node was last seen, and NVSentinel told all,", noted.looked, max(_LEAST, 4 * _seconds(look)), now)


def wrong_with_signals(folder: Path, node: str, every: float, now: datetime) -> str:
    """Why the file of signals cannot be relied on; "" where it can."""
    path = signals_file(folder, node)
    try:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return _age(f"{path} was last written", written, max(_LEAST, 3 * _seconds(every)), now)


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _age(what: str, then: datetime, limit: timedelta, now: datetime) -> str:
    age = now - then
    if age > limit:
        return f"{what} {age.total_seconds():.0f} s ago, and should be within {limit.total_seconds():.0f} s"
    if -age > _AHEAD:
        return f"{what} {-age.total_seconds():.0f} s from now: the clock was set back"
    return ""
