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


def runs_as_watched(state: State) -> tuple[list[Path], list[Path]]:
    """The runs of a controller, and the folders below which it finds more."""
    known = sources(state.about())
    parents = [Path(path) for path in known.get("parents", ())] + [state.folder / INBOX]
    return [Path(path) for path in known.get("runs", ())], parents


def policy_as_watched(state: State) -> FleetPolicy:
    """A policy with the cluster of a controller: an undo must not depend on what its file says by now."""
    settings = sources(state.about()).get("cluster")
    return replace(FleetPolicy(), cluster=settings) if isinstance(settings, dict) else FleetPolicy()


def cluster_as_watched(state: State, policy: FleetPolicy | None = None) -> Cluster:
    """The cluster of a controller, or of a policy in place of its own; nothing is asked of it.

    Raises:
        ConfigurationError: its settings do not work here.
        MissingExtra: what it needs is not installed here.
    """
    return cluster_of(policy or policy_as_watched(state), *runs_as_watched(state))


def notifiers_as_watched(state: State) -> tuple[str, ...]:
    """The names of those whom a controller tells."""
    return tuple(str(name) for name in sources(state.about()).get("notifiers", ()))


def timeout_as_watched(state: State) -> float:
    """Seconds that one call of a controller to its cluster may take."""
    return timeout_of(policy_as_watched(state).cluster)
