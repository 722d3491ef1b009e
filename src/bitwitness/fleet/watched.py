"""The cluster and the people of a controller, as its state tells them: what a person does must reach the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.settings import cluster_of, timeout_of
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.state import State
from bitwitness.fleet.view import sources

INBOX = "inbox"
"""In the folder of the state: runs whose incidents came over the network."""


def cluster_as_watched(state: State) -> Cluster:
    """The cluster of a controller; nothing is asked of it.

    Raises:
        ConfigurationError: its settings do not work here.
        MissingExtra: what it needs is not installed here.
    """
    known = sources(state.about())
    runs = [Path(path) for path in known.get("runs", ())]
    parents = [Path(path) for path in known.get("parents", ())] + [state.folder / INBOX]
    return cluster_of(_policy(known.get("cluster")), runs, parents)


def notifiers_as_watched(state: State) -> tuple[str, ...]:
    """The names of those whom a controller tells."""
    return tuple(str(name) for name in sources(state.about()).get("notifiers", ()))


def timeout_as_watched(state: State) -> float:
    """Seconds that one call of a controller to its cluster may take."""
    return timeout_of(_policy(sources(state.about()).get("cluster")).cluster)


def _policy(settings: object) -> FleetPolicy:
    return replace(FleetPolicy(), cluster=settings) if isinstance(settings, dict) else FleetPolicy()
