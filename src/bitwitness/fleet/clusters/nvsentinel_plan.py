"""What stands on a node that NVSentinel takes out because of us, what has to be written for it, and whether it has happened: pure.

An annotation says which of two ways a node went. With `execute` it is NVSentinel's to cordon and to uncordon, and ours is one word on the
Node, which its agent passes on; without, we have cordoned it and NVSentinel only knows. What NVSentinel holds because of us is told
by its own annotation, `quarantineHealthEvent`, in which the events stand for which it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import TAG, Act, Call, Landed, NodeState, one_line
from bitwitness.fleet.clusters.kubernetes_blame import check_blame, check_uncordoned, incident_of, is_same_machine
from bitwitness.fleet.clusters.kubernetes_reading import annotation_of
from bitwitness.fleet.clusters.kubernetes_words import CLEARED, INCIDENT, SUSPECT, Suspicion, label_value
from bitwitness.fleet.clusters.nvsentinel_events import (
    AGENT,
    MANAGED,
    OPTED_OUT,
    RELEASED,
    Quarantine,
    is_managed,
    quarantine_of,
)

WHO = "NVSentinel"
AWAIT = "AWAIT"
"""Stands for the method of a request: look at the node until NVSentinel has returned it."""

_OUT = ("out", "draining")
_MORE = "nvsentinel"


def with_quarantine(state: NodeState, node: Mapping[str, Any]) -> NodeState:
    """A node as the Kubernetes adapter reads it, with what NVSentinel shows on it.

    Args:
        state: as the adapter reads it.
        node: the same Node.
    """
    metadata = node.get("metadata")
    found = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    annotations = {key: value for key, value in (found or {}).items() if isinstance(value, str)}
    held, managed = quarantine_of(annotations), is_managed(node)
    more = {
        "agents": list(held.agents),
        "incident": held.incident,
        "cordoned": held.cordoned,
        "released": held.released_by_hand,
        "damaged": held.damaged,
        "managed": managed,
    }
    reason, by = _whose(state, held)
    words = [word for word in state.raw.split(",") if asked(state) is None or not word.startswith("uncordoned by hand")]
    shown = replace(state, reason=reason, reason_by=by, more={**state.more, _MORE: more})
    if shown.service in _OUT and held.is_ours and asked(shown) is None and annotation_of(shown) is None:
        shown = replace(shown, awaits=f"{WHO}, which was told that it is over and has not returned it yet")
    return replace(shown, raw=",".join([*words, *_words(shown, held, managed)]))


def quarantine(state: NodeState) -> Quarantine:
    """What NVSentinel shows on a node."""
    found = state.more.get(_MORE)
    more: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    return Quarantine(
        tuple(map(str, more.get("agents", ()))),
        str(more.get("incident", "")),
        bool(more.get("cordoned")),
        bool(more.get("released")),
        bool(more.get("damaged")),
    )


def managed(state: NodeState) -> bool:
    """Whether NVSentinel may act on a node."""
    found = state.more.get(_MORE)
    return not isinstance(found, Mapping) or found.get("managed") is not False


def asked(state: NodeState) -> Suspicion | None:
    """Why NVSentinel was asked to take a node out; None where it was not, or we have done it ourselves."""
    found = annotation_of(state)
    return found if found is not None and found.execute else None


def goes_through_nvsentinel(state: NodeState, *, execute: bool) -> bool:
    """Whether what happens to a node is for NVSentinel: what was begun in one way ends in it, whatever the settings say now."""
    found = annotation_of(state)
    if found is not None and (found.execute or state.service in _OUT):
        return found.execute
    return execute or (state.service in _OUT and quarantine(state).is_ours)


def released(state: NodeState) -> bool:
    """Whether a person has returned a node that NVSentinel had taken out as we asked."""
    found = asked(state)
    if found is None or state.service != "in" or not quarantine(state).released_by_hand:
        return False
    return not json.loads(str(state.more.get("annotation"))).get(RELEASED)


def drain(act: Act, state: NodeState) -> tuple[Call, ...]:
    """The one call by which NVSentinel is asked, through the node's agent; none where the node is out.

    Raises:
        ConfigurationError: NVSentinel leaves this node alone, or it may not be the machine that was blamed, or a person has
            returned that since.
    """
    if state.service in _OUT:
        return ()
    found, incident = annotation_of(state), incident_of(act)
    if found is not None and (not found.execute or released(state)):
        check_uncordoned(act, state)
    check_blame(act, state)
    if not managed(state):
        raise ConfigurationError(
            f"{act.node} is labelled {MANAGED}=false or {OPTED_OUT}=false: {WHO} takes it out for nobody, and has to. Remove the "
            "label, or cordon the node by hand"
        )
    new = Suspicion(incident, act.reason, act.devices, str(state.more.get("time", "")), cordoned=False, execute=True)
    text = json.dumps({**json.loads(new.text()), RELEASED: quarantine(state).released_by_hand})
    meta = {
        "uid": state.more.get("uid"),
        "resourceVersion": state.more.get("version"),
        "annotations": {SUSPECT: text, CLEARED: state.more.get("cleared") or None},
        "labels": {INCIDENT: label_value(incident)},
    }
    return (Call(("PATCH", f"/api/v1/nodes/{act.node}"), {"metadata": meta, "spec": {}}),)


def waiting(node: str, state: NodeState, seconds: float) -> tuple[Call, ...]:
    """The look that ends when NVSentinel has returned a node; none where it need not."""
    if state.service not in _OUT:
        return ()
    return (Call((AWAIT, f"/api/v1/nodes/{node}"), {"until": "schedulable", "seconds": seconds}),)


def landed(act: Act, before: NodeState, now: NodeState) -> Landed:
    """Whether what NVSentinel was asked for has happened, by what the node shows now; not where that may be another machine."""
    if now.service in ("absent", "unknown"):
        return "unknown"
    if act.kind == "clear":
        # What is ours is taken back; that NVSentinel takes its time to uncordon, `awaits` says.
        return "yes" if asked(now) is None and (now.service == "in" or quarantine(now).is_ours) else "no"
    if not is_same_machine(before, now):
        return "unknown"
    if now.service in _OUT:
        # What somebody else has cordoned meanwhile is still to be taken out by NVSentinel, as long as that is asked for.
        waits = asked(now) is not None and not quarantine(now).is_ours
        return "no" if waits else "yes"
    found = annotation_of(now)  # of a node in service: a person has returned it since
    same = found is not None and found.incident == incident_of(act)
    return "yes" if found is not None and same and (not found.execute or released(now)) else "no"


def _whose(state: NodeState, held: Quarantine) -> tuple[str, str]:
    """Why a node is out, and who took it out."""
    found = annotation_of(state)
    if state.service not in _OUT or (found is not None and not found.execute):
        return state.reason, state.reason_by
    if held.is_ours and held.cordoned:
        incident = found.incident if found is not None else held.incident
        why = found.reason if found is not None else f"{WHO} holds it because of what {AGENT} has told"
        return one_line(f"{TAG} {incident}: {why}", 400), WHO
    if held.cordoned or held.damaged:
        why = (
            "because of what cannot be read"
            if held.damaged
            else f"because of {', '.join(held.agents) or 'nothing it names'}"
        )
        return one_line(f"{WHO} has taken it out {why}", 400), WHO
    return ("cordoned" if found is not None else state.reason), ""


def _words(state: NodeState, held: Quarantine, may: bool) -> list[str]:
    words = []
    if held.damaged:
        words.append(f"{WHO}:unreadable")
    elif held.agents:
        words.append(f"{WHO}:{'+'.join(held.agents)}")
    if not may:
        words.append(f"not managed by {WHO}")
    if state.service == "in" and asked(state) is not None:
        words.append(f"uncordoned by hand after {WHO} had it" if released(state) else f"{WHO} was asked")
    return words
