"""Which cluster a policy names: the one place that knows them all, so that none is imported that is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.fake import FakeCluster
from bitwitness.fleet.clusters.local import LocalCluster

if TYPE_CHECKING:
    from bitwitness.fleet.clusters.base import Cluster
    from bitwitness.fleet.policy import FleetPolicy


def cluster_of(policy: FleetPolicy, runs: Sequence[Path], parents: Sequence[Path] = ()) -> Cluster:
    """The cluster of a policy: `local` where it names none.

    Args:
        policy: its table `cluster` says which and how.
        runs: directories of runs, whose quarantines the local cluster is.
        parents: folders of such directories.

    Raises:
        ConfigurationError: there is no such cluster, or a setting of it is wrong.
    """
    kind = str(policy.cluster.get("kind", "local"))
    if kind == "local":
        return LocalCluster(runs, parents)
    if kind == "slurm":
        from bitwitness.fleet.clusters.slurm import from_settings  # noqa: PLC0415  # only where there is one

        made: Cluster = from_settings(policy.cluster)
        return made
    if kind == "kubernetes":
        from bitwitness.fleet.clusters.kubernetes import from_settings as kubernetes  # noqa: PLC0415  # needs the extra

        return kubernetes(policy.cluster)
    if kind == "hyperpod":
        from bitwitness.fleet.clusters.hyperpod import from_settings as hyperpod  # noqa: PLC0415  # needs the extra

        return hyperpod(policy.cluster)
    if kind == "nvsentinel":
        from bitwitness.fleet.clusters.nvsentinel import from_settings as nvsentinel  # noqa: PLC0415  # needs the extra

        return nvsentinel(policy.cluster)
    if kind == "fake":
        file = str(policy.cluster.get("file", ""))
        if not file:
            raise ConfigurationError('a cluster of kind "fake" needs the file in which it lives: file = "cluster.json"')
        return FakeCluster(path=Path(file))
    raise ConfigurationError(
        f'cluster.kind is {kind!r}: there are "local", "slurm", "kubernetes", "hyperpod", "nvsentinel" and, '
        'for rehearsals, "fake"'
    )


def timeout_of(settings: Mapping[str, Any]) -> float:
    """Seconds that one call to the cluster of a table `cluster` may take: the longest of it and of the tables in it."""
    inner = [timeout_of(value) for value in settings.values() if isinstance(value, Mapping)]
    own = settings.get("timeout", 30.0)
    return max(float(own) if isinstance(own, int | float) else 30.0, *inner, 0.0)
