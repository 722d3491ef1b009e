"""Nodes and pods of Kubernetes, as the API server shows them, in the words of every cluster: pure.

What is read here is what others wrote: a field may be missing, null or of another kind, and that is then as if it were not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from bitwitness.fleet.clusters.base import TAG, Census, NodeState, Service, one_line
from bitwitness.fleet.clusters.kubernetes_words import (
    CLEARED,
    CONDITION,
    INCIDENT,
    SUSPECT,
    Suspicion,
    is_ours,
    suspicion_of,
)

T = TypeVar("T")

_ENDED = ("Succeeded", "Failed")
_MIRROR = "kubernetes.io/config.mirror"
_PODS = 110
"""Pods of a node that are kept at once, as many as a kubelet takes where nobody has raised it; what is left is found at the next look."""


def part(found: Any, *keys: str) -> Mapping[str, Any]:
    """An object within an object; an empty one where there is none."""
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def items(found: Any, *keys: str) -> list[Mapping[str, Any]]:
    """The objects of a list within an object; none where there is no list."""
    values = part(found, *keys[:-1]).get(keys[-1])
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list) else []


def text(found: Any, *keys: str) -> str:
    """A text within an object; "" where there is none."""
    value = part(found, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, str) else ""


def condition_of(found: Any, kind: str) -> Mapping[str, Any]:
    """The condition of this type of an object; an empty one where it has none."""
    return next((one for one in items(found, "status", "conditions") if one.get("type") == kind), {})


def node_state(
    node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], taint: str, now: datetime, *, evict: bool = False
) -> NodeState:
    """A node with the pods on it.

    Args:
        node: as the API server shows it.
        pods: that run there.
        taint: key of ours; "" for none.
        now: when it was looked at, which is kept: what is planned is stamped with it.
        evict: whether its pods are to be evicted, and are kept therefore.
    """
    name = text(node, "metadata", "name")
    found = suspicion_of(text(node, "metadata", "annotations", SUSPECT))
    cordoned = part(node, "spec").get("unschedulable") is True
    tainted = any(is_ours(one, taint, found) for one in items(node, "spec", "taints"))
    closed = cordoned or (tainted and found is not None and not found.cordoned)
    running = [one for one in pods if text(one, "status", "phase") not in _ENDED]
    work = [one for one in running if _is_work(one)]
    service: Service = "in" if not closed else "draining" if work else "out"
    ours = found if found is not None and closed else None
    return NodeState(
        name,
        service,
        _raw(node, cordoned=cordoned, tainted=tainted, found=found, closed=closed),
        _reason(ours) if ours else _foreign(node, taint) if closed else "",
        TAG if ours else "",
        text(node, "status", "nodeInfo", "bootID"),
        text(
            node, "status", "nodeInfo", "systemUUID"
        ),  # the uid is the object's: a kubelet makes it anew for the same machine
        tuple(dict.fromkeys(job for one in work if (job := _job(one)))),
        more={
            "uid": text(node, "metadata", "uid"),
            "created": text(node, "metadata", "creationTimestamp"),
            "version": text(node, "metadata", "resourceVersion"),
            "unschedulable": cordoned,
            "taints": [dict(one) for one in items(node, "spec", "taints")],
            "annotation": text(node, "metadata", "annotations", SUSPECT),
            "cleared": text(node, "metadata", "annotations", CLEARED),
            "label": text(node, "metadata", "labels", INCIDENT),
            "condition": dict(condition_of(node, CONDITION)),
            "pods": [_pod(one) for one in work[:_PODS]] if evict else [],
            "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        },
    )


def census(nodes: Iterable[Mapping[str, Any]]) -> Census:
    """How many nodes there are; one that takes no pods or is not ready counts as out, whoever took it out."""
    states = [part(one, "spec").get("unschedulable") is True or not is_ready(one) for one in nodes]
    return Census(len(states), sum(states))


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether the kubelet says that pods can run there, and has said so lately."""
    return condition_of(node, "Ready").get("status") == "True"


def annotation_of(state: NodeState) -> Suspicion | None:
    """What our annotation on a node says; None where it has none."""
    return suspicion_of(state.more.get("annotation"))


def _reason(found: Suspicion) -> str:
    return one_line(f"{TAG} {found.incident}: {found.reason}", 400)


def _foreign(node: Mapping[str, Any], taint: str) -> str:
    """What can be told of a cordon that is not ours: Kubernetes keeps no reason for one."""
    others = [f"{one.get('key')}={one.get('value') or ''}:{one.get('effect')}" for one in items(node, "spec", "taints")]
    told = [one for one in others if not one.startswith(("node.kubernetes.io/unschedulable=", f"{taint or SUSPECT}="))]
    return one_line(f"cordoned, taints {', '.join(told)}" if told else "cordoned", 400)


def _raw(node: Mapping[str, Any], *, cordoned: bool, tainted: bool, found: Suspicion | None, closed: bool) -> str:
    words = ["Ready" if is_ready(node) else "NotReady"]
    if cordoned:
        words.append("SchedulingDisabled")
    if found is not None and not closed:
        left = " (its taint is still there)" if tainted else ""
        words.append(f"uncordoned by hand after {TAG} {found.incident}{left}")
    elif tainted:
        words.append("suspect")
    return ",".join(words)


def _is_work(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has to go before a node is empty: those of a DaemonSet stay, and mirrors of the kubelet's own files."""
    owners = items(pod, "metadata", "ownerReferences")
    daemon = any(one.get("kind") == "DaemonSet" and one.get("controller") is True for one in owners)
    return not daemon and _MIRROR not in part(pod, "metadata", "annotations")


def _pod(pod: Mapping[str, Any]) -> list[str]:
    leaving = "leaving" if text(pod, "metadata", "deletionTimestamp") else ""
    return [text(pod, "metadata", "namespace"), text(pod, "metadata", "name"), text(pod, "metadata", "uid"), leaving]


_LABELS = {
    "jobset.sigs.k8s.io/jobset-name": "jobset",
    "training.kubeflow.org/job-name": "pytorchjob",
    "batch.kubernetes.io/job-name": "job",
    "job-name": "job",
}
"""By which the pods of a job are known, the outer kind first: a JobSet makes Jobs."""


def _job(pod: Mapping[str, Any]) -> str:
    labels = part(pod, "metadata", "labels")
    kinds = ((kind, labels.get(key)) for key, kind in _LABELS.items())
    found = next(((kind, name) for kind, name in kinds if isinstance(name, str) and name), None)
    return f"{text(pod, 'metadata', 'namespace')}/{found[0]}/{found[1]}" if found else ""
