"""What Slurm's many words for the state of a node or a job come to, in text and in JSON, from 22.05 on.

The words differ by version and by command: `IDLE+DRAIN` and `["IDLE", "DRAIN"]`, `drained*` and `DOWN*+DRAIN`, `REBOOT@` and
`REBOOT_REQUESTED`. All of them become one set of flags here, so that nothing else needs to know. A word that is not known adds
nothing, unless it begins like one that takes a node out: then, and where no word is known, the state is `unknown`, never `in`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.base import Service

JobPhase = Literal["pending", "running", "ended", "absent"]

_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
    "$": "MAINT",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
"""What a character behind a state means."""

_MEANS: dict[str, tuple[str, ...]] = {
    "ALLOC": ("ALLOCATED",),
    "COMP": ("COMPLETING",),
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "DRNG": ("ALLOCATED", "DRAIN"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FAILG": ("ALLOCATED", "FAIL"),
    "MIX": ("MIXED",),
    "NO_RESPOND": ("NOT_RESPONDING",),
    "REBOOT": ("REBOOT_ISSUED",),
    "RESV": ("RESERVED",),
    "UNK": ("UNKNOWN",),
}
"""Words that are short for others."""

_TAKES = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED", "MAINT"}
_BUSY = {"ALLOCATED", "MIXED", "COMPLETING"}
_OUT = {"DRAIN", "FAIL", "DOWN", "ERROR"}
_GARBLED = "GARBLED"
"""Stands for a word that is not known and begins like one of those: `DRAIN0` is more likely a damaged one than a new one."""
_AWAY = _OUT | {_GARBLED} | {"MAINT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "NOT_RESPONDING", "UNKNOWN"}

_PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE"}
_RUNNING = {"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_ENDED = {
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED",
}  # fmt: skip

PERSON_HOLDS = frozenset({"JobHeldUser", "JobHeldAdmin"})
"""Reasons of a job that waits until a person lets it go."""

_STAMPED = re.compile(r"(?P<text>.*?)\s*\[(?P<by>[^\s\[\]@]*)@(?P<when>[^\s\[\]]*)\]\s*", re.DOTALL)


def flags_of(words: str | Iterable[str]) -> frozenset[str]:
    """The state of a node as a set of flags, from `IDLE+DRAIN`, `drained*`, or the list of JSON."""
    parts = words.split("+") if isinstance(words, str) else [part for word in words for part in word.split("+")]
    found: set[str] = set()
    for part in parts:
        word = part.strip().upper()
        while word and word[-1] in _MARKS:
            found.add(_MARKS[word[-1]])
            word = word[:-1]
        found.update(_MEANS.get(word, (word,) if word else ()))
        if word not in _OUT and word not in _MEANS and word.startswith(tuple(_OUT)):
            found.add(_GARBLED)
    return frozenset(found)


def service_of(flags: frozenset[str]) -> Service:
    """Whether a node takes jobs, by what an administrator or Slurm has decided.

    A reservation for maintenance ends by itself, a node that does not answer may answer again, and one that is powered down is
    powered up for a job: none of these keeps a node out, so that a drain still has to be put on top of them. One that went down
    because it does not answer may be back in service at any time (ReturnToService): it has to be looked at again.
    """
    if "FUTURE" in flags:
        return "absent"
    if flags >= {"DOWN", "NOT_RESPONDING"} and not flags & {"DRAIN", "FAIL"}:
        return "unknown"
    if flags & _OUT:
        return "draining" if flags & _BUSY and not flags & {"DOWN", "ERROR"} else "out"
    return "in" if flags & _TAKES and _GARBLED not in flags else "unknown"


def away(flags: frozenset[str]) -> bool:
    """Whether a node does no work now, for whatever reason: what is counted against the share of a cluster."""
    return bool(flags & _AWAY) or not flags & _TAKES


def awaited(flags: frozenset[str], service: Service, reason: str) -> str:
    """What was asked for and is still to happen to a node: a word of HyperPod's, or a reboot by Slurm.

    HyperPod takes its words away when it is done. Those that it does not know stand for ever.
    """
    if service != "in" and reason.startswith("Action:"):
        return reason
    return "reboot" if flags & {"REBOOT_REQUESTED", "REBOOT_ISSUED"} else ""


def phase_of(words: Iterable[str]) -> JobPhase | None:
    """Where a job is, from the words of its state; None where they say nothing known."""
    found = {word.strip().upper() for word in words}
    if found & _PENDING:
        return "pending"
    if found & _RUNNING:  # COMPLETING beside FAILED: its processes are still being cleaned up
        return "running"
    return "ended" if found & _ENDED else None


def split_reason(text: str) -> tuple[str, str]:
    """The reason of a node, and who gave it, from `bad GPU [root@2026-11-29T09:30:15]`."""
    stamped = _STAMPED.fullmatch(text)
    return (text.strip(), "") if stamped is None else (stamped["text"], stamped["by"])


def moment(text: str) -> str:
    """A time of a command run with TZ=UTC, as UTC in ISO 8601; "" for `None`, `Unknown` and what is no time."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return ""
    return stamp(when if when.tzinfo else when.replace(tzinfo=UTC))
