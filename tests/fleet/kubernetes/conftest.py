"""What tests of Kubernetes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi
from tests.fleet.kubernetes.server import KubernetesServer

NOW = datetime(2026, 11, 29, 10, tzinfo=UTC)
"""Half an hour after the incident of most tests."""
Make = Callable[..., KubernetesCluster]


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    """An API server with nothing in it."""
    with KubernetesServer() as made:
        yield made


@pytest.fixture
def make(server: KubernetesServer, tmp_path: Path) -> Make:
    """Makes clients of it, as `KubernetesCluster` takes its settings."""

    def made(**more: Any) -> KubernetesCluster:
        config = server.kubeconfig(tmp_path / "config", more.pop("token_file", None))
        api = KubernetesApi.load(str(config), timeout=more.pop("timeout", 30.0))
        return KubernetesCluster(api, **{"now": lambda: NOW, **more})

    return made
