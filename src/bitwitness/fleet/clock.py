"""The time as the controller has it: what the wall says, and what has really passed since this machine was started.

A budget of nodes an hour must hold when somebody sets the clock, and across a restart of the controller. So each act is kept
with both times, and what has really passed counts where it is known.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """The time of this machine; tests have one of their own."""

    def now(self) -> datetime:
        """What the wall says, in UTC."""
        return datetime.now(UTC)

    def boot(self) -> str:
        """Which start of this machine this is; "" where nobody knows."""
        return _boot_id()

    def ticks(self) -> float:
        """Seconds since this machine was started, whatever the wall says."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def since(self, wall: datetime, boot: str, ticks: float) -> timedelta:
        """How long ago something was that was noted with these times; never negative."""
        if boot and boot == self.boot():
            return timedelta(seconds=max(0.0, self.ticks() - ticks))
        return max(timedelta(0), self.now() - wall)


@cache
def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def stamp(moment: datetime) -> str:
    """UTC in ISO 8601, to the millisecond, as everything here is stored: sorts by time."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str) -> datetime:
    """The inverse of `stamp`."""
    return datetime.fromisoformat(text)
