"""What HyperPod on EKS needs of Kubernetes beyond what every cluster can be asked: the labels of its nodes, its jobs, its lease.

It is a protocol, so that HyperPod on Slurm needs no client of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bitwitness.fleet.clusters.base import NodeState
from bitwitness.fleet.clusters.hyperpod_plan import Seen
from bitwitness.fleet.clusters.hyperpod_words import CHECK_LABEL, HEALTH_LABEL, MARK

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
    return Seen(
        health=str(labels.get(HEALTH_LABEL) or ""),
        check=str(labels.get(CHECK_LABEL) or ""),
        mark=str(notes.get(MARK) or ""),
        uid=str(meta.get("uid") or ""),
    )
