"""Whether a controller does its rounds: said once, for `/healthz`, which a machine asks, and for `fleet status`, which a person does."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

SILENT_AFTER = timedelta(minutes=2)
"""A round takes seconds; one that waits for a cluster that does not answer may take a minute."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How long ago a controller has shown that it lives.

    Attributes:
        age: seconds since its last round, or since its start where it has done none; None where it was never started.
        first: whether its first round has not come to its end yet.
        silent: whether that is too long ago.
    """

    age: float | None
    first: bool
    silent: bool


def pulse(started: float | None, last_round: float | None, now: float, limit: timedelta = SILENT_AFTER) -> Pulse:
    """The pulse of a controller that was started and has ended its last round at these unix times. Pure.

    The end of a round that an earlier process did says nothing of this one, which may hang in its first.
    """
    first = last_round is None or (started is not None and last_round < started)
    since = started if first else last_round
    if since is None:
        return Pulse(None, first, True)
    age = max(0.0, now - since)
    return Pulse(age, first, age > limit.total_seconds())
