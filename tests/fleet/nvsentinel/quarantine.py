"""NVSentinel's fault-quarantine for tests: what it does to a Node with what the platform connector has taken.

As NVSentinel 06a6ffd does: a fatal event that is to be acted upon cordons, with the events that hold the node in an annotation; a
recovery takes away the events of its check (of its entities, where it names some), and the last one uncordons, unless the node was
cordoned before. What is only to be stored, and what no rule is about, changes nothing.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Self

from bitwitness.fleet.clusters.nvsentinel_fake import FakePlatformConnector, Taken
from tests.fleet.kubernetes.server import KubernetesServer

HELD, CORDONED = "quarantineHealthEvent", "quarantineHealthEventIsCordoned"
BEFORE, BY_HAND = "quarantineHealthEventCordonPreExisting", "quarantinedNodeUncordonedManually"


class FaultQuarantine:
    """Acts upon the Nodes of a server, by what a connector has taken.

    Args:
        server: that has the Nodes.
        connector: of the node.
        rules: agents about which there is a rule.
    """

    def __init__(
        self,
        server: KubernetesServer,
        connector: FakePlatformConnector,
        rules: tuple[str, ...] = ("bitwitness", "gpu-health-monitor"),
    ) -> None:
        self._server, self._connector, self.rules, self._done = server, connector, rules, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Act by itself, until the end."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self.work()

    def work(self) -> None:
        """Act upon what was taken since the last time."""
        taken = self._connector.taken
        for event in taken[self._done :]:
            self.act(event.node, event)
        self._done = len(taken)

    def act(self, node: str, event: Taken) -> None:
        """Act upon one event."""
        if (
            event.strategy == "STORE_ONLY"
            or self._server.node(node)["metadata"]["labels"].get("nvsentinel.dgxc.nvidia.com/managed") == "false"
        ):
            return
        if event.healthy:
            self._server.change_node(node, lambda found: _recover(found, event))
        elif event.fatal and event.agent in self.rules:
            self._server.change_node(node, lambda found: _hold(found, event))

    def hold_for(self, node: str, agent: str) -> None:
        """Another monitor has found something."""
        self._server.change_node(
            node,
            lambda found: _add(
                found, {"agent": agent, "componentClass": "GPU", "checkName": "GpuMemWatch", "isFatal": True}
            ),
        )

    def uncordon_by_hand(self, node: str) -> None:
        """A person uncordons, and fault-quarantine cleans up behind them."""

        def change(found: dict[str, Any]) -> None:
            found["spec"].pop("unschedulable", None)
            for key in (HELD, CORDONED, BEFORE):
                found["metadata"]["annotations"].pop(key, None)
            found["metadata"]["annotations"][BY_HAND] = "True"

        self._server.change_node(node, change)


def _events(found: dict[str, Any]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(found["metadata"]["annotations"].get(HELD, "[]"))
    return events


def _hold(found: dict[str, Any], event: Taken) -> None:
    same = [one for one in _events(found) if (one["agent"], one["checkName"]) == (event.agent, event.check)]
    if any(one.get("metadata", {}) == event.metadata for one in same):
        return
    made = {
        "version": 1,
        "agent": event.agent,
        "componentClass": event.component,
        "checkName": event.check,
        "isFatal": True,
        "message": event.message,
        "recommendedAction": 5,
        "errorCode": list(event.errors),
        "entitiesImpacted": [{"entityType": kind, "entityValue": value} for kind, value in event.entities],
        "metadata": event.metadata,
        "nodeName": event.node,
    }
    _add(found, made)


def _add(found: dict[str, Any], event: dict[str, Any]) -> None:
    annotations, events = found["metadata"]["annotations"], _events(found)
    if not events:
        annotations.pop(BY_HAND, None)
        if found["spec"].get("unschedulable"):
            annotations[BEFORE] = "True"
    annotations[HELD], annotations[CORDONED] = json.dumps([*events, event]), "True"
    found["spec"]["unschedulable"] = True


def _recover(found: dict[str, Any], event: Taken) -> None:
    annotations, events = found["metadata"]["annotations"], _events(found)
    left = [one for one in events if (one["agent"], one["checkName"]) != (event.agent, event.check)]
    assert not event.entities  # of ours none names any
    if len(left) == len(events):
        return
    annotations[HELD] = json.dumps(left)
    if not left:
        if annotations.pop(BEFORE, "") != "True":
            found["spec"].pop("unschedulable", None)
        for key in (HELD, CORDONED):
            annotations.pop(key, None)
