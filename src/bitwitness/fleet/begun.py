"""What was called for an act so far, by whichever process: read from the audit trail, which is written before each call.

Whether an act may be asked for again, and how long a cluster may take to show it, follows from that and not from what this process
remembers: the one that called may have been killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from bitwitness.fleet.kept import Intent
from bitwitness.fleet.state import State

SHOWN = {"drain": timedelta(minutes=1), "reboot": timedelta(minutes=30), "replace": timedelta(minutes=90)}
"""How long a cluster may take to show an act that it was asked for (recovery.md section 2.2)."""
AGAIN = {"drain": timedelta(minutes=1), "reboot": timedelta(minutes=5), "replace": timedelta(minutes=5)}
"""How long it is waited for where it may be asked for again: API and scheduler disagree for 1 to 5 minutes (the same section)."""
CALL, NO = "call", "no"
"""Kinds of lines of the trail: a call is about to be made, and the cluster has certainly not done it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What was called for an act.

    Attributes:
        once: whether a call was begun that must not be made twice, and that was not refused for certain.
        refused: whether the last call was refused for certain, so that nothing is under way.
        shown: how long the cluster may take to show what was called.
    """

    once: bool
    refused: bool
    shown: timedelta


def begun(state: State, intent: Intent) -> Begun:
    """What was called for an act. Of one that an older version noted, only a drain may be repeated."""
    act = intent.act
    trail = state.history(incident=act.incident, node=act.node)
    records = [(one.what, one.record) for one in trail if one.record.get("intent") == intent.key]
    called = [record for what, record in records if what == CALL]
    refused = sum(what == NO and bool(record.get("once")) for what, record in records)
    once = sum(bool(record.get("once", act.kind != "drain")) for record in called)
    last = bool(records) and records[-1][0] == NO
    if once > refused:
        return Begun(True, last, SHOWN[act.kind])
    # Cut off before its last call, or refused, it has nothing to show, however slow the cluster is.
    whole = any(record.get("last", True) for record in called) and not last
    return Begun(False, last, AGAIN[act.kind if whole else "drain"])
