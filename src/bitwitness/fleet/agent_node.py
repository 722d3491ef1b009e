"""A node's own Node object, read by its agent: one GET, and no other right in the cluster.

It is read from the API server and not from a cache of it: an annotation that an older copy does not have yet would look as if a person
had answered it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from bitwitness.errors import ClusterError
from bitwitness.fleet.agent import Seen
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.clusters.kubernetes_reading import part, text
from bitwitness.fleet.clusters.kubernetes_words import SUSPECT, suspicion_of
from bitwitness.fleet.clusters.nvsentinel_events import RELEASED, Suspicion, is_managed, quarantine_of


class Api(Protocol):
    """What is needed of `kubernetes_api.KubernetesApi`."""

    host: str

    def find(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """An object; None where there is none of this name."""
        ...


class NodeReader:
    """Reads the Node of this machine.

    Args:
        api: the API server.
        node: its name.

    Raises:
        ConfigurationError: it can be no name of a node.
    """

    def __init__(self, api: Api, node: str) -> None:
        self._api, self.node = api, valid_node(node)

    def look(self) -> Seen:
        """The node now.

        Raises:
            ClusterError: nobody answers, it is not allowed, or there is no such node.
        """
        path = f"/api/v1/nodes/{self.node}"
        found = self._api.find(path)
        if found is None:
            raise ClusterError(
                f"GET {self._api.host}{path}: the cluster has no node {self.node}: is --node the name that Kubernetes has for it "
                "(NODE_NAME by fieldRef spec.nodeName)?"
            )
        if text(found, "metadata", "name") != self.node or not text(found, "metadata", "uid"):
            raise ClusterError(f"GET {self._api.host}{path} answered something else than the node {self.node}")
        return seen_of(found)


def seen_of(node: Mapping[str, Any]) -> Seen:
    """What of a Node concerns its agent."""
    annotations = {key: value for key, value in part(node, "metadata", "annotations").items() if isinstance(value, str)}
    uid, held, managed = text(node, "metadata", "uid"), quarantine_of(annotations), is_managed(node)
    said = annotations.get(SUSPECT)
    if said is None:
        return Seen(uid, quarantine=held, managed=managed)
    found = suspicion_of(said)
    if found is None:
        return Seen(uid, quarantine=held, managed=managed, unreadable=f"{SUSPECT} is none of bitwitness's words")
    return Seen(
        uid,
        Suspicion(found.incident, found.reason, found.devices),
        found.time,
        found.execute,
        bool(json.loads(said).get(RELEASED)),
        held,
        managed=managed,
    )
