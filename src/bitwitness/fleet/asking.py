"""What an act of a person would do, before it is done: the exact calls, and whether they would be let through.

What is shown has a digest, so that whoever says yes to it says yes to that: where another thing would be done by then, it is not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.fleet.clusters.base import Act, Call, Check, Cluster, NodeState, Rehearsing
from bitwitness.fleet.rehearsing import guarded

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,16}(?:Z|\+00:00)")
_VERSION = re.compile(r'\\*"resourceVersion\\*": \\*"[^"\\]*\\*"')
"""What changes whenever a node is looked at, and changes nothing of what would be done."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What would be done.

    Attributes:
        act: what.
        before: the node now.
        calls: the exact calls; none where it is as the act would have it.
        checks: what the calls need, and whether it is there. What could not be tried is unknown.
        warnings: what else whoever decides should know, a sentence each.
    """

    act: Act
    before: NodeState
    calls: tuple[Call, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """What stands for the calls and the machine on which they would be made."""
        return digest_of(self.calls, self.act.kind, self.act.node, self.before.instance)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        checks = [
            {"what": one.what, "outcome": one.outcome, "text": one.text, "remedy": one.remedy} for one in self.checks
        ]
        return {
            "act": self.act.kind,
            "node": self.act.node,
            "before": self.before.raw or self.before.service,
            "machine": self.before.instance,
            "calls": [str(call) for call in self.calls],
            "checks": checks,
            "warnings": list(self.warnings),
            "digest": self.digest,
        }


def digest_of(calls: Sequence[Call], *more: str) -> str:
    """What stands for some calls and what else was shown with them, but for the time and the version that was read. Pure."""
    shown = json.dumps([[[*call.words, call.body, call.repeatable] for call in calls], *more], sort_keys=True)
    steady = _VERSION.sub("version", _TIME.sub("time", shown))
    return hashlib.sha256(steady.encode()).hexdigest()[:32]


def preview(cluster: Cluster, act: Act, before: NodeState | None = None) -> Preview:
    """Look, plan, and try what the calls need; nothing is changed.

    Args:
        cluster: that has the node.
        act: what would be done.
        before: the node now, where it was looked at already.

    Raises:
        ClusterError: the node cannot be looked at.
        ConfigurationError: the cluster cannot do it.
    """
    state = before or cluster.look(act.node)
    calls = cluster.plan(act, state)
    warnings = () if calls else (f"nothing would be called: {act.node} is {state.raw or state.service}",)
    return Preview(act, state, calls, needed(cluster, act, state, calls), warnings)


def needed(cluster: Cluster, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
    """What some calls need, and whether it is there; where the cluster cannot say, that it is not known."""
    if not calls:
        return ()  # of what is not called no right is needed: `allowed: ` of nothing says nothing
    if not isinstance(cluster, Rehearsing):
        text = f"{cluster.name} cannot say beforehand whether these calls would be let through"
        return (Check(f"right to {act.kind}", "unknown", text),)
    found, wrong = guarded(f"try the {act.kind}", lambda: cluster.check(act, state, calls))
    return (wrong,) if wrong is not None else found or ()
