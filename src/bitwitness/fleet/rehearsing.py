"""What a rehearsal found, and how its parts are tried: the night it matters is the wrong one to learn of a missing right.

Pure but for `attempt`. A part that hangs or breaks is one that would do so at night, and hides none of the others. What could not be
tried is `unknown`, and never good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.clusters.base import ActKind, Call, Check, Outcome, one_line
from bitwitness.fleet.policy import FleetPolicy

T = TypeVar("T")

LIMIT = 120.0
"""Seconds that one part may take; a cluster that needs longer holds up every round of a controller."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a rehearsal.

    Attributes:
        name: in a word or two.
        checks: what was tried.
        calls: what would be called on the cluster, exactly.
    """

    name: str
    checks: tuple[Check, ...]
    calls: tuple[Call, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        checks = [
            {"what": one.what, "outcome": one.outcome, "text": one.text, "remedy": one.remedy} for one in self.checks
        ]
        calls = [{"words": list(one.words), "body": one.body, "repeatable": one.repeatable} for one in self.calls]
        return {"part": self.name, "checks": checks, "calls": calls}


@dataclass(frozen=True, slots=True)
class Result:
    """All of it."""

    node: str
    parts: tuple[Part, ...]

    def count(self, outcome: Outcome) -> int:
        """How many checks came out so."""
        return sum(one.outcome == outcome for part in self.parts for one in part.checks)

    @property
    def summary(self) -> str:
        """In a line."""
        return f"{self.count('bad')} would fail, {self.count('unknown')} could not be tried"

    @property
    def code(self) -> int:
        """The exit code: 1 where something would fail."""
        return 1 if self.count("bad") else 0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        counts = {"good": self.count("good"), "bad": self.count("bad"), "unknown": self.count("unknown")}
        return {"node": self.node, **counts, "parts": [one.to_json() for one in self.parts]}


def attempt(name: str, what: Callable[[], Part], limit: float = LIMIT) -> tuple[Part, bool]:
    """Try a part, in a thread of its own; and whether it hangs. Whatever it raises is something that would fail."""
    found: list[Part] = []

    def run() -> None:
        try:
            found.append(what())
        except Exception as error:  # noqa: BLE001 - a part with a mistake in it must not hide the others
            found.append(Part(name, (broken(name, error),)))

    thread = threading.Thread(target=run, daemon=True, name=f"bitwitness-rehearse-{name}")
    thread.start()
    thread.join(limit)
    if found:
        return found[0], False
    text = f"it did not end within {limit:g} s, and was given up"
    return Part(name, (Check(name, "bad", text, "find out what does not answer, or shorten its time-out"),)), True


def broken(what: str, error: BaseException) -> Check:
    """Something that raised."""
    foreseen = isinstance(error, BitwitnessError | OSError)
    text = str(error) if foreseen else f"{type(error).__name__}: {error}"
    remedy = "" if foreseen else "this is a mistake in bitwitness: please report it"
    return Check(what, "bad", one_line(text, 1000), remedy)


def guarded(what: str, ask: Callable[[], T]) -> tuple[T | None, Check | None]:
    """The answer, or what it means that there is none."""
    try:
        return ask(), None
    except Exception as error:  # noqa: BLE001 - as above
        return None, broken(what, error)


def about_policy(policy: FleetPolicy) -> Part:
    """What a policy means now, in words. Pure."""
    mode = (
        "acts by itself"
        if policy.act
        else "only observes (act = false): what follows is what it would do with act = true"
    )
    limits = (
        f"at most {policy.nodes_per_hour} nodes an hour, and {policy.cluster_share:.0%} of all out of service; nothing that is older "
        f"than {policy.act_within.total_seconds() / 3600:g} h"
    )
    may = ", ".join(sorted(policy.may))
    checks = [
        Check("mode", "good", mode),
        Check("may", "good", f"{may}; anything graver becomes a drain"),
        Check("limits", "good", limits),
    ]
    if policy.approve:
        checks.append(_about_approval(policy))
    if policy.protect:
        checks.append(Check("protected", "good", f"never touched: {', '.join(policy.protect)}"))
    owner = policy.owner or "nobody is named"
    remedy = "" if policy.owner else 'say in the policy whom to ask: owner = "..."'
    checks.append(Check("owner", "good" if policy.owner else "unknown", owner, remedy))
    return Part("policy", tuple(checks))


def _about_approval(policy: FleetPolicy) -> Check:
    waits = f"{', '.join(sorted(policy.approve))}: waits for a person's answer, and is done by nobody without one"
    if policy.notify:
        return Check("approve", "good", waits)
    remedy = "add [[notify]], or have somebody look at `bitwitness fleet status` or the console"
    return Check("approve", "unknown", f"{waits}; nobody is told that an answer is wanted", remedy)


def acts_to_try(asked: Sequence[ActKind], policy: FleetPolicy) -> tuple[ActKind, ...]:
    """Which acts are rehearsed: those that were asked for, else all that the policy may, the mildest first. Pure."""
    order: tuple[ActKind, ...] = ("drain", "reboot", "replace")
    return tuple(one for one in order if one in (asked or policy.may))
