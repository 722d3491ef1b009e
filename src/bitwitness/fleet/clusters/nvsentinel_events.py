"""What NVSentinel is told, and what it shows on a Node; pure, so that it can be read and tested without gRPC or a cluster.

One check of one agent: `bitwitness` / `SilentDataCorruption`. A fault names the suspect devices; the recovery names none, which to
NVSentinel means all that this check has ever said of the node. Facts are from NVIDIA/NVSentinel, read file by file at mixed
commits of 2026: `data-models/protobufs/health_event.proto`, `fault-quarantine/pkg/reconciler/reconciler.go` and
`.../healthEventsAnnotation/health_events_annotation_map.go` (06a6ffd, 30dcebb), `.../common/common.go` (569d1eb).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, cast, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import one_line

Strategy = Literal["STORE_ONLY", "EXECUTE_REMEDIATION"]
"""Whether NVSentinel only keeps an event, or acts on it as well."""

AGENT = "bitwitness"
"""Who says it: what a rule of fault-quarantine must match."""
CHECK = "SilentDataCorruption"
"""Also the type of the condition that NVSentinel gives the node."""
COMPONENT, ERROR = "GPU", "SDC"
VERSION = 1

ACTIONS = (
    "CONTACT_SUPPORT",
    "REPLACE_VM",
    "RESTART_VM",
    "RESTART_BM",
    "COMPONENT_RESET",
    "RUN_FIELDDIAG",
    "RUN_DCGMEUD",
)
"""What may be recommended. Not NONE: newer connectors take what recommends nothing for not fatal, and older ones cordon a fatal
event without an action and never come back to it (NVSentinel #911)."""

MANAGED = "nvsentinel.dgxc.nvidia.com/managed"
"""A label of a node; where it is `false`, NVSentinel only stores what it is told of the node."""
OPTED_OUT = "k8saas.nvidia.com/ManagedByNVSentinel"
"""The older one, which the rules that NVSentinel is shipped with ask for."""

RELEASED = "released"
"""In our annotation: whether the mark of a release by hand was on the node already when NVSentinel was to be asked."""

_EVENT, _CORDONED = "quarantineHealthEvent", "quarantineHealthEventIsCordoned"
_BEFORE, _BY_HAND = "quarantineHealthEventCordonPreExisting", "quarantinedNodeUncordonedManually"

_MESSAGE = 700
"""Characters: what NVSentinel puts into a condition is cut at 1,024, with codes and devices before it."""
_MOST_DEVICES = 64
_TODO = "A diagnostic that passes is no reason to return the node: bitwitness fleet clear returns it"


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a node, as NVSentinel's own monitors name it."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """One event, with the fields of NVSentinel that we set.

    Attributes:
        node: of which it is told; always the one on which it is sent.
        healthy: whether the fault is over.
        message: one line.
        strategy: whether NVSentinel is to act.
        action: what it recommends; `NONE` where the fault is over.
        entities: the suspect devices; none: all of the node.
        metadata: which incident.
        time: when it was told.
    """

    node: str
    healthy: bool
    message: str
    strategy: Strategy
    action: str
    entities: tuple[Entity, ...]
    metadata: Mapping[str, str]
    time: datetime


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What NVSentinel's fault-quarantine shows on a node.

    Attributes:
        agents: whose events hold it, each once.
        incident: of ours, where it is among them.
        cordoned: whether NVSentinel has made the node unschedulable, which it was not before.
        released_by_hand: whether a person has uncordoned a node that NVSentinel held; that stays until it holds it again.
        damaged: whether what it shows cannot be read.
    """

    agents: tuple[str, ...] = ()
    incident: str = ""
    cordoned: bool = False
    released_by_hand: bool = False
    damaged: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether NVSentinel holds the node because of what we said."""
        return AGENT in self.agents

    @property
    def others(self) -> tuple[str, ...]:
        """Who else has a reason to hold it."""
        return tuple(agent for agent in self.agents if agent != AGENT)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a node is suspect, as far as NVSentinel is told.

    Attributes:
        incident: its id.
        reason: a sentence.
        devices: that are named.
    """

    incident: str
    reason: str
    devices: tuple[str, ...] = field(default=())


def valid_strategy(text: str, where: str) -> Strategy:
    """One of the two strategies.

    Raises:
        ConfigurationError: it is another word.
    """
    if text not in get_args(Strategy):
        raise ConfigurationError(f"{where} is {text!r:.80}: there are {' and '.join(get_args(Strategy))}")
    return cast("Strategy", text)


def fault(node: str, what: Suspicion, strategy: Strategy, action: str, now: datetime) -> HealthEvent:
    """That a node is suspect."""
    return HealthEvent(
        node=node,
        healthy=False,
        message=_message(what),
        strategy=strategy,
        action=action,
        entities=entities_of(what.devices),
        metadata={"incident": one_line(what.incident, 120)},
        time=now,
    )


def recovery(node: str, incident: str, strategy: Strategy, now: datetime) -> HealthEvent:
    """That a person has returned a node. Without entities and codes, so that nothing that was ever said of it stays behind."""
    return HealthEvent(
        node=node,
        healthy=True,
        message=_clean(f"cleared: incident {incident or 'unknown'} is answered by a person"),
        strategy=strategy,
        action="NONE",
        entities=(),
        metadata={"incident": one_line(incident, 120)},
        time=now,
    )


def entities_of(devices: Sequence[str]) -> tuple[Entity, ...]:
    """Devices as NVSentinel's monitors for NVIDIA's drivers name them: by UUID. Of a slice (MIG) only the slice is known here."""
    names = dict.fromkeys(one_line(device, 200) for device in devices if device.strip())
    return tuple(Entity("GPU_UUID" if name.startswith("GPU-") else "GPU", name) for name in list(names)[:_MOST_DEVICES])


def _message(what: Suspicion) -> str:
    devices = f" on {', '.join(what.devices[:4])}" if what.devices else ""
    more = f" and {len(what.devices) - 4} more" if len(what.devices) > 4 else ""
    said = f"silent data corruption{devices}{more}, incident {what.incident}: {what.reason}"
    return f"{_clean(said, len(_TODO) + 2)}. {_TODO}"


def _clean(text: str, reserved: int = 0) -> str:
    """One line, and no semicolon: NVSentinel parts the messages of a condition by them."""
    return one_line(text.replace(";", ","), _MESSAGE - reserved).rstrip(". ")


def quarantine_of(annotations: Mapping[str, str]) -> Quarantine:
    """What NVSentinel shows on a node with these annotations. Newer versions keep a list of events there, older ones a single one."""
    by_hand = annotations.get(_BY_HAND, "") == "True"
    cordoned = annotations.get(_CORDONED, "") == "True" and annotations.get(_BEFORE, "") != "True"
    text = annotations.get(_EVENT, "").strip()
    if text in {"", "[]", "{}", "null"}:
        return Quarantine(released_by_hand=by_hand)
    try:
        content = json.loads(text)
        events = content if isinstance(content, list) else [content]
        agents = tuple(dict.fromkeys(_agent(one) for one in events))
    except (ValueError, TypeError, RecursionError):
        return Quarantine(cordoned=cordoned, released_by_hand=by_hand, damaged=True)
    return Quarantine(agents, _incident(events), cordoned, by_hand)


def _agent(event: Any) -> str:
    if not isinstance(event, dict):
        raise TypeError("no event")
    return one_line(str(_any_case(event, "agent")), 120)


def _incident(events: Sequence[Mapping[str, Any]]) -> str:
    for event in events:
        metadata = _any_case(event, "metadata")
        if _any_case(event, "agent") == AGENT and isinstance(metadata, dict):
            return one_line(str(metadata.get("incident", "")), 120)
    return ""


def _any_case(event: Mapping[str, Any], name: str) -> Any:
    """The value of a field; versions differ in whether its name begins with a capital."""
    return event.get(name, event.get(name.capitalize(), ""))


def is_managed(node: Mapping[str, Any]) -> bool:
    """Whether NVSentinel may act on a Node, by its labels."""
    metadata = node.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return not isinstance(labels, Mapping) or all(labels.get(key) != "false" for key in (MANAGED, OPTED_OUT))
