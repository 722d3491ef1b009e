"""Whether an act that was decided may be done now: how much at a time, and when not.

Apart from the decision because it has another owner: what is wrong with a node does not depend on the hour, and how many nodes
a cluster can spare does not depend on what is wrong with them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Literal

from bitwitness.fleet.clusters.base import Census
from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.policy import FleetPolicy

HoldReason = Literal[
    "observe",
    "protected",
    "expired",
    "approval",
    "quiet-hours",
    "nodes-per-hour",
    "cluster-share",
    "cluster",
    "not-ours",
]
"""`approval`, `cluster` and `not-ours` are for the controller to say: a person must answer, the cluster cannot be asked, and somebody
else has the node."""

HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Hold:
    """Why an act is not done now.

    Attributes:
        why: in a word.
        text: in a sentence.
        until: when to look again at the earliest; None where a change of something else is waited for.
        final: whether it is never looked at again.
    """

    why: HoldReason
    text: str
    until: datetime | None = None
    final: bool = False


def hold(
    proposal: Proposal,
    *,
    made: datetime,
    acted: Sequence[tuple[datetime, str]],
    census: Census | None,
    now: datetime,
    policy: FleetPolicy,
) -> Hold | None:
    """Why the act of a proposal is not done now; None where it may be.

    Args:
        proposal: one with an act.
        made: when the incident was, or when it was proposed: whichever is earlier.
        acted: when which node was touched: every act that was begun, whatever became of it.
        census: the cluster now; None where it could not be asked, which holds everything.
        now: the time.
        policy: the limits.
    """
    if not policy.act:
        return Hold("observe", "observed only: the policy says act = false")
    pattern = next((one for one in policy.protect if fnmatchcase(proposal.node, one)), None)
    if pattern is not None:
        return Hold(
            "protected", f"{proposal.node} is protected by {pattern!r} in the policy: a person must act", final=True
        )
    if now - made > policy.act_within:
        limit = policy.act_within.total_seconds() / 3600
        text = f"older than {limit:g} h (act_within): what was found may not hold any more, a person must look"
        return Hold("expired", text, final=True)
    for hours in policy.quiet_hours:
        until = hours.until(now)
        if until is not None:
            return Hold("quiet-hours", f"quiet hours until {until:%Y-%m-%d %H:%M} UTC", until)
    return _budget(proposal.node, acted, census, now, policy)


def _budget(
    node: str, acted: Sequence[tuple[datetime, str]], census: Census | None, now: datetime, policy: FleetPolicy
) -> Hold | None:
    """The two limits on how much at a time. An act that a clock dates into the future counts as one of this hour."""
    spent = left(acted, now, policy.nodes_per_hour)
    if not spent.nodes and node not in _recent(acted, now):
        text = f"{spent.used} nodes were touched within the last hour, of {policy.nodes_per_hour} that may be (nodes_per_hour)"
        return Hold("nodes-per-hour", text, spent.until)
    if census is None:
        return Hold("cluster", "the cluster does not say how many nodes are out of service")
    allowed = policy.allowed_out(census.total)
    if census.out >= allowed:
        text = f"{census.out} of {census.total} nodes are out of service, of {allowed} that may be (cluster_share)"
        return Hold("cluster-share", text)
    return None


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of the nodes of an hour.

    Attributes:
        used: nodes that were touched within the last hour.
        nodes: how many more may be.
        until: when the next may be; None where one may now, or none ever may.
    """

    used: int
    nodes: int
    until: datetime | None = None


def left(acted: Sequence[tuple[datetime, str]], now: datetime, limit: int) -> Left:
    """How many more nodes may be touched within this hour, where `limit` may be within any."""
    recent = _recent(acted, now)
    if len(recent) < limit or not limit:
        return Left(len(recent), max(0, limit - len(recent)))
    return Left(len(recent), 0, sorted(recent.values())[len(recent) - limit] + HOUR)


def _recent(acted: Sequence[tuple[datetime, str]], now: datetime) -> dict[str, datetime]:
    """Nodes that were touched within the last hour, and when last."""
    recent: dict[str, datetime] = {}
    for when, name in acted:
        if when > now - HOUR:
            recent[name] = max(when, recent.get(name, when))
    return recent
