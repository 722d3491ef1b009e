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
from bitwitness.fleet.clusters.kubernetes_blame import (
    check_blame,
    check_uncordoned,
    cleared_of,
    incident_of,
    is_same_machine,
)
from bitwitness.fleet.clusters.kubernetes_reading import annotation_of, items, part
from bitwitness.fleet.clusters.kubernetes_words import (
    CLEARED,
    EVENTS,
    INCIDENT,
    SUSPECT,
    Clearance,
    Suspicion,
    clearance_of,
    condition,
    event,
    event_name,
    is_ours,
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
        ConfigurationError: the act is none of this cluster's, there is no such node, it is not ours to bring back, or it may not be
            the machine that was blamed, or a person has returned that to service since.
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
    check_uncordoned(act, state)
    check_blame(act, state)
    time = str(state.more.get("time", ""))
    new = Suspicion(incident_of(act), act.reason, act.devices, time, _is_schedulable(state), key=key)
    return (_take_out(node, state, new, key), *_show(node, state, new), *(_evictions(state) if evict else ()))


def rest(act: Act, now: NodeState, *, evict: bool) -> tuple[Call, ...]:
    """What is left of a drain that has landed: none where the node is in service again, or is out for another reason."""
    found = annotation_of(now)
    if act.kind != "drain" or now.service not in _OUT or found is None or found.incident != incident_of(act):
        return ()
    show = _show(now.node, now, found, at=now.more.get("version")) if untold(now) else ()
    if now.more.get("told"):
        show = show[1:]
    return (*show, *(_evictions(now) if evict else ()))


def foreseen(act: Act, state: NodeState, *, key: str) -> NodeState:
    """A node after a drain or a return that was carried out whole."""
    incident, more = incident_of(act), dict(state.more)
    if act.kind == "clear":
        more |= {"annotation": "", "label": "", "unschedulable": False, "taints": _taints(state, key, "")}
        more |= {"cleared": _clearance(state).text()}
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


def landed(act: Act, before: NodeState, now: NodeState) -> Landed:
    """Whether an act has happened, by what the node shows now.

    A node that carries our annotation for this incident was taken out for it, also where a person has uncordoned it since. Of another
    machine that has got the name meanwhile nothing can be told: what was drained may have been the one before.
    """
    if now.service in ("absent", "unknown"):
        return "unknown"
    if act.kind == "clear":
        return "yes" if now.service == "in" else "no"
    if not is_same_machine(before, now):
        return "unknown"
    found = annotation_of(now)
    # Of a device that came back the annotation may be the one of the first time.
    fresh = not act.back or now.more.get("annotation") != before.more.get("annotation")
    if now.service in _OUT or (found is not None and found.incident == incident_of(act) and fresh):
        return "yes"
    return "no"


def again(body: Mapping[str, Any], now: NodeState, key: str) -> dict[str, Any] | None:
    """The same patch of a node that was changed meanwhile; None where it has been made already.

    Raises:
        ConfigurationError: the node is not what it was any more in what concerns us, or the patch is none of ours.
    """
    meta, notes = part(body, "metadata"), part(body, "metadata", "annotations")
    if "status" not in body and (SUSPECT not in notes or not isinstance(body.get("spec"), Mapping)):
        raise ConfigurationError("it is no patch that takes a node out or returns it")
    if meta.get("uid") != now.more.get("uid"):
        raise ConfigurationError("it is another node of the same name")
    fresh = {**meta, "resourceVersion": now.more.get("version")}
    if "status" in body:
        return _status_again(body, fresh, now)
    spec = dict(body["spec"])
    if notes[SUSPECT] is None:
        if _check_return(spec, clearance_of(notes.get(CLEARED)), now):
            return None
        incident = ""
    else:
        if now.more.get("annotation") == notes[SUSPECT]:
            return None
        incident = _check_take_out(notes, now)
        if "unschedulable" not in spec:  # NVSentinel takes it out: only the annotation is ours to write
            return {"metadata": fresh, "spec": spec}
    taints = _taints(now, key, incident)
    if "taints" in spec or taints != now.more.get("taints"):
        spec["taints"] = taints
    return {"metadata": fresh, "spec": spec}


def _check_take_out(notes: Mapping[str, Any], now: NodeState) -> str:
    """Whether a node may still be taken out; for which incident."""
    new, found = suspicion_of(notes[SUSPECT]), annotation_of(now)
    incident = new.incident if new is not None else ""
    if now.service != "in" or (found is not None and found.incident == incident):
        raise ConfigurationError(f"it is {now.raw} now ({now.reason or 'no reason'})")
    if (notes.get(CLEARED) or "") != now.more.get("cleared"):
        raise ConfigurationError("a person has returned it")
    return incident


def _check_return(spec: Mapping[str, Any], wanted: Clearance | None, now: NodeState) -> bool:
    """Whether a node that is to be returned has been; only from the incident for which it was out when that was planned."""
    found, noted = annotation_of(now), cleared_of(now)
    incident = wanted.incident if wanted is not None else ""
    if found is None:
        done = noted is not None and wanted is not None and noted.time >= wanted.time
        return done or bool(incident)
    if found.incident != incident:
        raise ConfigurationError(f"it was taken out for incident {found.incident} meanwhile")
    if "unschedulable" in spec and not now.more.get("unschedulable"):
        raise ConfigurationError("somebody else has uncordoned it")
    return False


def _status_again(body: Mapping[str, Any], meta: dict[str, Any], now: NodeState) -> dict[str, Any] | None:
    """The same condition of a node that was changed meanwhile, while it is true; None where it is shown."""
    wanted = next(iter(items(body, "status", "conditions")), {})
    found = annotation_of(now)
    if not now.ours or found is None or not says(wanted, found.incident):
        raise ConfigurationError(f"it is {now.raw} now ({now.reason or 'no reason'})")
    return None if says(_condition(now), found.incident) else {**body, "metadata": meta}


def _is_schedulable(state: NodeState) -> bool:
    return not state.more.get("unschedulable")


def _condition(state: NodeState) -> Mapping[str, Any]:
    found = state.more.get("condition")
    return found if isinstance(found, Mapping) else {}


def _taints(state: NodeState, key: str, incident: str) -> list[dict[str, Any]]:
    """All taints that a node is to have: those of others as they are, and ours where there is an incident."""
    others = [one for one in state.more.get("taints", ()) if not is_ours(one, key, annotation_of(state))]
    return [*others, *([taint(key, incident)] if key and incident else [])]


def _patch(node: str, state: NodeState, meta: dict[str, Any], spec: dict[str, Any]) -> Call:
    precondition = {"uid": state.more.get("uid"), "resourceVersion": state.more.get("version")}
    return Call(("PATCH", f"/api/v1/nodes/{node}"), {"metadata": {**precondition, **meta}, "spec": spec})


def _take_out(node: str, state: NodeState, new: Suspicion, key: str) -> Call:
    spec: dict[str, Any] = {"unschedulable": True}
    if key:
        spec["taints"] = _taints(state, key, new.incident)
    seen = state.more.get("cleared") or None  # it stays; where it has changed, this patch is not made again
    meta = {"annotations": {SUSPECT: new.text(), CLEARED: seen}, "labels": {INCIDENT: label_value(new.incident)}}
    return _patch(node, state, meta, spec)


def _show(node: str, state: NodeState, found: Suspicion, at: object = None) -> tuple[Call, ...]:
    """The Event and the condition, in this order; `at`: the version of the node for which the condition is true."""
    text, time = message(found.incident, found.reason, found.devices), found.time or str(state.more.get("time", ""))
    happened = event(node, str(state.more.get("uid", "")), found.incident, text, time)
    shown = condition("True", text, "CorruptionAttributed", time)
    return (
        Call(("POST", f"/api/v1/namespaces/{EVENTS}/events"), happened),
        _status(node, state, shown, at),
    )


def _status(node: str, state: NodeState, shown: dict[str, Any], at: object = None) -> Call:
    """Conditions are merged by their type, so that those of others stay; a node that was made anew has another uid, and is refused.

    What is left of an act is said of the version that was looked at: a person may return the node at this moment. In a plan
    that cannot be, because the call before it makes a new version.
    """
    meta = {"uid": state.more.get("uid"), **({"resourceVersion": at} if at else {})}
    body = {"metadata": meta, "status": {"conditions": [shown]}}
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
    """What we wrote is taken back, and nothing else; that it was, and when, is noted in the same patch, for every controller.

    The condition comes last, so that a returned node cannot keep it unseen.
    """
    found, shown = annotation_of(state), _condition(state).get("status") == "True"
    if state.service in _OUT and not state.ours:
        raise ConfigurationError(f"{node} was taken out by somebody else ({state.reason or 'no reason'}), not by {TAG}")
    made: list[Call] = []
    tainted = any(is_ours(one, key, found) for one in state.more.get("taints", ()))
    back = _clearance(state)
    if found is not None or tainted or state.more.get("label") or (shown and not _is_noted(state)):
        spec: dict[str, Any] = {"taints": _taints(state, key, "")} if tainted else {}
        if found is not None and found.cordoned and not _is_schedulable(state):
            spec["unschedulable"] = False
        meta = {"annotations": {SUSPECT: None, CLEARED: back.text()}, "labels": {INCIDENT: None}}
        made.append(_patch(node, state, meta, spec))
    if shown:
        text = f"returned to service by {TAG} fleet clear"
        made.append(_status(node, state, condition("False", text, "Cleared", back.time)))
    return tuple(made)


def _clearance(state: NodeState) -> Clearance:
    found = annotation_of(state)
    return Clearance(found.incident if found else "", str(state.more.get("time", "")))


def _is_noted(state: NodeState) -> bool:
    """Whether the return of what the condition says is noted: only the condition is left of it then."""
    back = cleared_of(state)
    return back is not None and bool(back.incident) and says(_condition(state), back.incident)
