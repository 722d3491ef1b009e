"""The quarantine of a run keeps the contract of clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.local import LocalCluster
from bitwitness.runfiles import RunFiles
from tests.fleet.clusters.bench import JobPhase
from tests.fleet.clusters.contract import Contract
from tests.fleet.incidents import topology

NODES = ("n0", "n1", "n2")


class LocalBench:
    """The directory of one run on three nodes."""

    nodes: tuple[str, ...] = NODES
    once = frozenset({"deny device", "deny node"})

    def __init__(self, folder: Path) -> None:
        self._files = RunFiles(folder).create()
        self._files.write_run({"placement": topology(NODES, per_node=1).to_json()})
        self._file, self._lock = folder / "quarantine.json", folder / ".quarantine.json.lock"
        self._whole = b""

    def reset(self) -> None:
        self._file.unlink(missing_ok=True)

    def client(self) -> Cluster:
        return LocalCluster([self._files.path])

    def take_out(self, node: str) -> None:
        self._files.quarantine.deny_node(node, reason="bad fan", who="anna")

    def take_in(self, node: str) -> None:
        here = {node, f"GPU-{node}-0"} & set(self._files.quarantine.read().names())
        self._files.quarantine.clear(here, reason="repaired", who="anna")

    def refuse(self, on: bool) -> None:
        if on:
            self._lock.unlink(missing_ok=True)
            self._lock.mkdir()
        else:
            self._lock.rmdir()

    def unreachable(self, on: bool) -> None:
        if on:
            self._whole = self._file.read_bytes() if self._file.exists() else b""
            self._file.write_text("half a quaran")
        elif self._whole:
            self._file.write_bytes(self._whole)
        else:
            self._file.unlink()

    def traffic(self) -> int:
        return 0

    def changes(self) -> Sequence[tuple[str, str]]:
        ours = [one for one in self._files.quarantine.read().log if one["who"] != "anna"]
        return [(str(one["what"]), str(one.get("name", ""))) for one in ours]

    def shown(self, node: str) -> Any:
        held = self._files.quarantine.read()
        denials = {**held.denied_nodes, **held.denied_devices}
        return {name: (one.reason, one.incident, one.node) for name, one in denials.items() if node in name}

    def finish(self) -> None:
        pass

    def job(self, phase: JobPhase) -> str | None:
        return None


class TestQuarantine(Contract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> LocalBench:
        return LocalBench(tmp_path / "quarantined")
