"""What HyperPod on EKS needs of Kubernetes beyond what every cluster can be asked: the labels of its nodes, its jobs, its lease.

It is a protocol, so that HyperPod on Slurm needs no client of Kubernetes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bitwitness.fleet.clusters.base import Call, NodeState
from bitwitness.fleet.clusters.hyperpod_plan import Seen
from bitwitness.fleet.clusters.hyperpod_words import ASKED, CHECK_LABEL, HEALTH_LABEL, MARK, PENDING

if TYPE_CHECKING:
    from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi


@runtime_checkable
class OnKubernetes(Protocol):
    """The adapter of Kubernetes."""

    api: KubernetesApi

    def read(self, node: str) -> tuple[NodeState, Mapping[str, Any]]:
        """The node now, and the very Node that this was read from."""
        ...

    def must_lead(self) -> None:
        """Refuse where this process is to lead and does not."""
        ...


def labels_of(node: Mapping[str, Any]) -> Seen:
    """What stands on a Node in HyperPod's words and ours."""
    meta = node.get("metadata") or {}
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    asked_for, asked_before = _asked(str(notes.get(ASKED) or ""))
    return Seen(
        health=str(labels.get(HEALTH_LABEL) or ""),
        check=str(labels.get(CHECK_LABEL) or ""),
        mark=str(notes.get(MARK) or ""),
        asked_for=asked_for,
        asked_before=asked_before,
        uid=str(meta.get("uid") or ""),
    )


def patch(cluster: OnKubernetes, call: Call) -> str:
    """Change a Node, once. What we have set is taken back only while it still says what we said."""
    (method, path), body = call.words, call.body
    meta = body["metadata"]
    if ASKED in meta["annotations"] and meta["annotations"][ASKED] is None:
        _, found = cluster.read(path.rpartition("/")[2])
        seen = labels_of(found)
        if not seen.asked_for or (seen.asked_for, seen.uid) != (seen.health, meta["uid"]):
            return f"{HEALTH_LABEL} says {seen.health or 'nothing'} by now, and is left as it is"
        body = {"metadata": {**meta, "resourceVersion": found["metadata"]["resourceVersion"]}}
    cluster.api.ask(method, path, body, query={"fieldManager": "bitwitness"})
    return "done"


def _asked(text: str) -> tuple[str, str]:
    """What our annotation says that we have set the label of health to, and what it was; nothing where it is not ours."""
    try:
        said = json.loads(text)
    except ValueError:
        return "", ""
    if not isinstance(said, Mapping) or said.get("wanted") not in PENDING.values():
        return "", ""
    return str(said["wanted"]), str(said.get("before") or "")
