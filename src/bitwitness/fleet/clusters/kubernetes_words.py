"""What bitwitness writes on a node of Kubernetes and how it is read back: one place, so that every adapter says the same.

Names and values have limits there: a label value has at most 63 characters and no colon, the name of an object is a DNS name of at
most 253 (https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/ and .../names/). What does not fit is cut
and gets a part of its hash, so that two long names stay two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bitwitness.fleet.clusters.base import one_line

DOMAIN = "bitwitness.dev"
SUSPECT = f"{DOMAIN}/suspect"
"""Key of the annotation, and of the taint where the settings name no other."""
CLEARED = f"{DOMAIN}/cleared"
"""Key of the annotation that stays when a person has returned a node: when, and from which incident."""
INCIDENT = f"{DOMAIN}/incident"
"""Key of the label, by which `kubectl get nodes -l bitwitness.dev/incident` finds them."""
CONDITION = "SDCSuspected"
"""Type of the node's condition and reason of the Event."""
COMPONENT = "bitwitness"
"""Who writes: source of the Event and manager of the fields."""
EVENTS = "default"
"""Namespace of Events about nodes, which have none themselves."""
BY_HAND = "by-hand"
"""Stands for the incident where a person asked."""

_LABEL, _NAME, _REASON, _MESSAGE = 63, 253, 1000, 1024
_BAD_LABEL = re.compile(r"[^A-Za-z0-9._-]")
_BAD_NAME = re.compile(r"[^a-z0-9.-]")
_KEY = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a node was taken out, as its annotation keeps it.

    Attributes:
        incident: id of the incident, or `by-hand`.
        reason: a sentence for people.
        devices: those that are named.
        time: when it was written, UTC in ISO 8601.
        cordoned: whether the node was schedulable before, so that returning it makes it so again.
        execute: whether NVSentinel is to act upon it.
        key: of the taint that was written with it; "" for none, or where that is not noted.
    """

    incident: str
    reason: str
    devices: tuple[str, ...] = ()
    time: str = ""
    cordoned: bool = True
    execute: bool = False
    key: str = ""

    def text(self) -> str:
        """As the annotation holds it."""
        values = {
            "incident": self.incident,
            "reason": one_line(self.reason, _REASON),
            "devices": list(self.devices),
            "time": self.time,
            "cordoned": self.cordoned,
            "execute": self.execute,
            **({"taint": self.key} if self.key else {}),
        }
        return json.dumps(values)


@dataclass(frozen=True, slots=True)
class Clearance:
    """A node's last return to service by `bitwitness fleet clear`, as its annotation keeps it.

    Attributes:
        incident: for which it was out; "" where that did not stand there any more.
        time: when, UTC in ISO 8601.
    """

    incident: str
    time: str

    def text(self) -> str:
        """As the annotation holds it."""
        return json.dumps({"incident": self.incident, "time": self.time})


def suspicion_of(text: object) -> Suspicion | None:
    """What an annotation says; None where it is none of ours."""
    found = _values(text)
    if found is None:
        return None
    devices = found.get("devices")
    return Suspicion(
        found["incident"],
        str(found.get("reason", "")),
        tuple(one for one in devices if isinstance(one, str)) if isinstance(devices, list) else (),
        str(found.get("time", "")),
        found.get("cordoned") is not False,
        found.get("execute") is True,
        str(found.get("taint") or ""),
    )


def clearance_of(text: object) -> Clearance | None:
    """The same of a return."""
    found = _values(text)
    return None if found is None else Clearance(found["incident"], str(found.get("time", "")))


def _values(text: object) -> Mapping[str, Any] | None:
    """The values of an annotation that names an incident."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) and isinstance(found.get("incident"), str) else None


def moment(text: object) -> datetime | None:
    """A time as Kubernetes and we write it (RFC 3339); None where it is none."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)


def label_value(text: str) -> str:
    """A text as the value of a label or a taint; as it is where it fits."""
    plain = _BAD_LABEL.sub("-", text).strip("._-")
    if plain == text and len(text) <= _LABEL:
        return text
    return f"{plain[: _LABEL - 9].rstrip('._-')}-{_hash(text, 8)}".lstrip("-")


def is_key(text: str) -> bool:
    """Whether a text can be the key of a label, an annotation or a taint."""
    return bool(_KEY.fullmatch(text))


def event_name(node: str, incident: str) -> str:
    """The name of the Event about a node and an incident: always the same, so that the second one is found to exist."""
    whole = f"{node}.{incident.lower()}"
    plain = _BAD_NAME.sub("-", whole).strip(".-")
    if plain == whole and len(plain) <= _NAME and ".." not in plain and ".-" not in plain and "-." not in plain:
        return plain
    short = re.sub(r"[.-]*\.[.-]*", ".", plain)[: _NAME - 17].rstrip(".-")
    return f"{short}-{_hash(f'{node}/{incident}', 16)}"


def taint(key: str, incident: str) -> dict[str, Any]:
    """The taint that keeps pods away; no `timeAdded`, which Kubernetes sets for `NoExecute` only."""
    return {"key": key, "value": label_value(incident.lower()), "effect": "NoSchedule"}


def is_ours(one: Mapping[str, Any], key: str, found: Suspicion | None) -> bool:
    """Whether a taint is ours: by the key of the settings, or as it was written when the settings named another one."""
    if one.get("effect") != "NoSchedule":
        return False
    written = found is not None and bool(found.key) and one.get("key") == found.key
    return (bool(key) and one.get("key") == key) or (
        written and found is not None and one.get("value") == label_value(found.incident.lower())
    )


def message(incident: str, reason: str, devices: tuple[str, ...]) -> str:
    """One line for the condition and the Event; what stands in the brackets tells whose it is."""
    named = f" ({', '.join(devices)})" if devices else ""
    return one_line(f"{_mark(incident)} {reason}{named}", _MESSAGE)


def condition(status: str, text: str, reason: str, time: str) -> dict[str, Any]:
    """A condition of a node, with the times that kubectl shows."""
    return {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": text,
        "lastHeartbeatTime": time,
        "lastTransitionTime": time,
    }


def says(found: Mapping[str, Any], incident: str) -> bool:
    """Whether a condition is true because of this incident."""
    return found.get("status") == "True" and str(found.get("message", "")).startswith(_mark(incident))


def event(node: str, uid: str, incident: str, text: str, time: str) -> dict[str, Any]:
    """An Event about a node, as `kubectl describe node` shows it."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event_name(node, incident), "namespace": EVENTS},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
        "reason": CONDITION,
        "message": text,
        "type": "Warning",
        "action": "TakenOutOfService",
        "count": 1,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
    }


def _mark(incident: str) -> str:
    return f"[{one_line(incident, 100)}]"


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]
