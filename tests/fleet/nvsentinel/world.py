"""A cluster of Kubernetes with NVSentinel and an agent on each node: all that lies between a controller and a node that is out."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError
from bitwitness.fleet.agent_memory import MemoryFile
from bitwitness.fleet.agent_node import NodeReader
from bitwitness.fleet.agent_rounds import Reporter
from bitwitness.fleet.clusters.base import Call
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi
from bitwitness.fleet.clusters.nvsentinel import NVSentinelCluster
from bitwitness.fleet.clusters.nvsentinel_events import Strategy
from bitwitness.fleet.clusters.nvsentinel_fake import FakePlatformConnector
from bitwitness.fleet.clusters.nvsentinel_socket import Connector
from tests.fleet.kubernetes.conftest import NOW
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.nvsentinel.quarantine import FaultQuarantine


class World:
    """The API server, one agent for each node, a platform connector for all of them, and fault-quarantine.

    Args:
        server: the API server.
        folder: for sockets and memories.
        nodes: names of nodes.
        allowed: the most that the agents ask of NVSentinel.
    """

    def __init__(
        self, server: KubernetesServer, folder: Path, nodes: tuple[str, ...], allowed: Strategy = "EXECUTE_REMEDIATION"
    ) -> None:
        self.server, self.folder, self.nodes, self.allowed = server, folder, nodes, allowed
        self.connector = FakePlatformConnector(folder / "s", "", pinned=False)
        self.connector.start()
        self.quarantine = FaultQuarantine(server, self.connector)
        self.config = server.kubeconfig(folder / "config")
        self.api = KubernetesApi.load(str(self.config))
        self._agents: dict[str, Reporter] = {}
        self._seen: dict[str, str] = {}
        self._now = NOW
        self.acts = True
        """Whether agents and NVSentinel do their work."""

    def now(self) -> datetime:
        """The time of day, which goes on with every look."""
        self._now += timedelta(seconds=1)
        return self._now

    def agent(self, node: str) -> Reporter:
        """The agent of a node, as it is started anew."""
        memory = MemoryFile(self.folder / f"memory-{node}", node)
        return Reporter(
            node, NodeReader(self.api, node), Connector(str(self.folder / "s")), memory, allowed=self.allowed
        )

    def forget(self) -> None:
        """All agents have lost their memory, and are started anew."""
        self._agents.clear()
        self._seen.clear()
        for node in self.nodes:
            (self.folder / f"memory-{node}").unlink(missing_ok=True)

    def work(self) -> None:
        """Every agent does a round, and NVSentinel what follows."""
        if not self.acts:
            return
        for node in self.nodes:
            version = str(self.server.node(node)["metadata"]["resourceVersion"])
            if self._seen.get(node) == version:
                continue  # a look would show what it showed before
            agent = self._agents.get(node) or self._agents.setdefault(node, self.agent(node))
            with suppress(ClusterError):
                agent.round()
                self._seen[node] = version
        self.quarantine.work()

    def client(self, strategy: Strategy, **more: Any) -> NVSentinelCluster:
        """A client behind whose every call the world does its work, as it does by itself within seconds."""
        made = NVSentinelCluster(
            KubernetesCluster(self.api, **{"now": self.now, **more}),
            strategy,
            returns=0.2,
            pause=lambda seconds: self.work(),
        )
        carry_out = made.carry_out

        def carried(call: Call) -> str:
            said = carry_out(call)
            self.work()
            return said

        setattr(made, "carry_out", carried)  # noqa: B010
        return made

    def end(self) -> None:
        self.connector.stop()
