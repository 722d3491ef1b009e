"""What has to be written for an act on a node of Kubernetes, and whether it has been: pure.

The first call is one patch of the node with all that takes it out of service, and it carries the `resourceVersion` that was read: the
API server refuses it (409) where anybody has changed the node since. So foreign taints, which a patch can only replace as a
whole list, are never lost. After it come what people look at (an Event, then the condition: where the condition is seen, the
Event was made before, and is not looked for) and evictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import TAG, Act, Call, Landed, NodeState, one_line, valid_node
from bitwitness.fleet.clusters.kubernetes_reading import annotation_of
from bitwitness.fleet.clusters.kubernetes_words import (
    BY_HAND,
    EVENTS,
    INCIDENT,
    SUSPECT,
    Suspicion,
    condition,
    event,
    event_name,
    label_value,
    message,
    says,
    suspicion_of,
    taint,
)

_OUT = ("out", "draining")


def calls(act: Act, state: NodeState, *, key: str, evict: bool) -> tuple[Call, ...]:
    """The exact calls of an act; none where nothing is left.

    Args:
        act: what.
        state: of the node, as it was read.
        key: of our taint; "" for none.
        evict: whether pods are to go.

    Raises:
        ConfigurationError: the act is none of this cluster's, there is no such node, it is not ours to bring back, or a person
            has returned it to service after this very incident.
    """
    node = valid_node(act.node)
    if state.node != node:
        raise ConfigurationError(f"the state of {state.node!r:.80} was given for an act on {node}")
    if state.service == "absent":
        raise ConfigurationError(f"the cluster has no node {node}: nothing is done")
    if act.kind == "clear":
        return _clear(node, state, key)
    if act.kind != "drain":
        raise ConfigurationError(f"Kubernetes by itself cannot {act.kind} a node: its provider can")
    if state.service in _OUT:
        return rest(act, state, evict=evict)
    found = annotation_of(state)
    if found is not None and found.incident == _incident(act):
        raise ConfigurationError(
            f"{node} was taken out for incident {found.incident}, and a person has returned it to service: it is left alone"
        )
    new = Suspicion(_incident(act), act.reason, act.devices, str(state.more.get("time", "")), _is_schedulable(state))
    return (_take_out(node, state, new, key), *_show(node, state, new), *(_evictions(state) if evict else ()))


def rest(act: Act, now: NodeState, *, evict: bool) -> tuple[Call, ...]:
    """What is left of a drain that has landed: none where the node is in service again, or is out for another reason."""
    found = annotation_of(now)
    if act.kind != "drain" or now.service not in _OUT or found is None or found.incident != _incident(act):
        return ()
    show = _show(now.node, now, found) if untold(now) else ()
    if now.more.get("told"):
        show = show[1:]
    return (*show, *(_evictions(now) if evict else ()))


def foreseen(act: Act, state: NodeState, *, key: str) -> NodeState:
    """A node after a drain or a return that was carried out whole."""
    incident, more = _incident(act), dict(state.more)
    if act.kind == "clear":
        more |= {"annotation": "", "label": "", "unschedulable": False, "taints": _taints(state, key, "")}
        shown = condition("False", "", "Cleared", "")
        return replace(state, service="in", reason="", reason_by="", more={**more, "condition": shown, "told": False})
    new = Suspicion(incident, act.reason, act.devices, str(more.get("time", "")), _is_schedulable(state))
    more |= {"annotation": new.text(), "label": label_value(incident), "unschedulable": True, "pods": []}
    shown = condition("True", message(incident, act.reason, act.devices), "CorruptionAttributed", "")
    more |= {"taints": _taints(state, key, incident), "condition": shown, "told": True}
    reason = one_line(f"{TAG} {incident}: {act.reason}", 400)
    return replace(state, service="out", reason=reason, reason_by=TAG, more=more)


def untold(now: NodeState) -> str:
    """The name of the Event of a node that we took out and that does not show its condition yet; "" where all is told."""
    found = annotation_of(now)
    if not now.ours or found is None or says(_condition(now), found.incident):
        return ""
    return event_name(now.node, found.incident)


def landed(act: Act, now: NodeState) -> Landed:
    """Whether an act has happened, by what the node shows now.

    A node that carries our annotation for this incident was taken out for it, also where a person has uncordoned it since.
    """
    if now.service in ("absent", "unknown"):
        return "unknown"
    if act.kind == "clear":
        return "yes" if now.service == "in" else "no"
    found = annotation_of(now)
    if now.service in _OUT or (found is not None and found.incident == _incident(act)):
        return "yes"
    return "no"


def again(body: Mapping[str, Any], now: NodeState, key: str) -> dict[str, Any] | None:
    """The same patch of a node that was changed meanwhile; None where it has been made already.

    Raises:
        ConfigurationError: the node is not what it was any more in what concerns us, or the patch is none of ours.
    """
    meta, spec = body.get("metadata"), body.get("spec")
    if not isinstance(meta, Mapping) or not isinstance(spec, Mapping) or SUSPECT not in meta.get("annotations", {}):
        raise ConfigurationError("it is no patch that takes a node out or returns it")
    if meta.get("uid") != now.more.get("uid"):
        raise ConfigurationError("it is another node of the same name")
    wanted, found = meta["annotations"][SUSPECT], annotation_of(now)
    if wanted is not None and now.more.get("annotation") == wanted:
        return None
    if wanted is None:
        if found is None:
            return None
        if "unschedulable" in spec and not now.more.get("unschedulable"):
            raise ConfigurationError("somebody else has uncordoned it")
        old = None
    else:
        old = suspicion_of(wanted)
        same = found is not None and old is not None and found.incident == old.incident
        if now.service != "in" or same:
            raise ConfigurationError(f"it is {now.raw} now ({now.reason or 'no reason'})")
        if "unschedulable" not in spec:  # NVSentinel takes it out: only the annotation is ours to write
            return {"metadata": {**meta, "resourceVersion": now.more.get("version")}, "spec": dict(spec)}
    taints = _taints(now, key, old.incident if old else "")
    return {
        "metadata": {**meta, "resourceVersion": now.more.get("version")},
        "spec": {**spec, **({"taints": taints} if "taints" in spec or taints != now.more.get("taints") else {})},
    }


def _incident(act: Act) -> str:
    return act.incident or BY_HAND


def _is_schedulable(state: NodeState) -> bool:
    return not state.more.get("unschedulable")


def _condition(state: NodeState) -> Mapping[str, Any]:
    found = state.more.get("condition")
    return found if isinstance(found, Mapping) else {}


def _taints(state: NodeState, key: str, incident: str) -> list[dict[str, Any]]:
    """All taints that a node is to have: those of others as they are, and ours where there is an incident."""
    others = [one for one in state.more.get("taints", ()) if not _is_our_taint(one, key)]
    return [*others, *([taint(key, incident)] if key and incident else [])]


def _is_our_taint(one: Mapping[str, Any], key: str) -> bool:
    return bool(key) and one.get("key") == key and one.get("effect") == "NoSchedule"


def _patch(node: str, state: NodeState, meta: dict[str, Any], spec: dict[str, Any]) -> Call:
    precondition = {"uid": state.more.get("uid"), "resourceVersion": state.more.get("version")}
    return Call(("PATCH", f"/api/v1/nodes/{node}"), {"metadata": {**precondition, **meta}, "spec": spec})


def _take_out(node: str, state: NodeState, new: Suspicion, key: str) -> Call:
    spec: dict[str, Any] = {"unschedulable": True}
    if key:
        spec["taints"] = _taints(state, key, new.incident)
    meta = {"annotations": {SUSPECT: new.text()}, "labels": {INCIDENT: label_value(new.incident)}}
    return _patch(node, state, meta, spec)


def _show(node: str, state: NodeState, found: Suspicion) -> tuple[Call, ...]:
    """The Event and the condition, in this order."""
    text, time = message(found.incident, found.reason, found.devices), found.time or str(state.more.get("time", ""))
    happened = event(node, str(state.more.get("uid", "")), found.incident, text, time)
    shown = condition("True", text, "CorruptionAttributed", time)
    return (
        Call(("POST", f"/api/v1/namespaces/{EVENTS}/events"), happened),
        _status(node, state, shown),
    )


def _status(node: str, state: NodeState, shown: dict[str, Any]) -> Call:
    """Conditions are merged by their type, so that those of others stay; a node that was made anew has another uid, and is refused."""
    body = {"metadata": {"uid": state.more.get("uid")}, "status": {"conditions": [shown]}}
    return Call(("PATCH", f"/api/v1/nodes/{node}/status"), body)


def _evictions(state: NodeState) -> tuple[Call, ...]:
    """Each names the pod by its uid as well: one of the same name may run elsewhere by now."""
    found = [one for one in state.more.get("pods", ()) if not one[3]]
    return tuple(
        Call(
            ("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction"),
            {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
                "deleteOptions": {"preconditions": {"uid": uid}},
            },
        )
        for namespace, name, uid, _ in found
    )


def _clear(node: str, state: NodeState, key: str) -> tuple[Call, ...]:
    """What we wrote is taken back, and nothing else; the condition last, so that a returned node cannot keep it unseen."""
    found = annotation_of(state)
    if state.service in _OUT and not state.ours:
        raise ConfigurationError(f"{node} was taken out by somebody else ({state.reason or 'no reason'}), not by {TAG}")
    made: list[Call] = []
    tainted = any(_is_our_taint(one, key) for one in state.more.get("taints", ()))
    if found is not None or tainted or state.more.get("label"):
        spec: dict[str, Any] = {"taints": _taints(state, key, "")} if tainted else {}
        if found is not None and found.cordoned and not _is_schedulable(state):
            spec["unschedulable"] = False
        meta = {"annotations": {SUSPECT: None}, "labels": {INCIDENT: None}}
        made.append(_patch(node, state, meta, spec))
    if _condition(state).get("status") == "True":
        text, time = f"returned to service by {TAG} fleet clear", str(state.more.get("time", ""))
        made.append(_status(node, state, condition("False", text, "Cleared", time)))
    return tuple(made)
