"""Who stands where, and who witnesses whom.

A rank is a number that changes at every restart; a node and a device are things that can be broken. Every rule of blame
needs the map between them, and the choice of witnesses follows from it alone, so both are here, pure and free of torch.
"""

from __future__ import annotations

import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError

RESOURCE_CONFIG = Path("/opt/ml/config/resource_config.json")
"""Where SageMaker HyperPod describes its cluster on every node."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's place.

    Attributes:
        rank: the global rank.
        node: name of the node, as the cluster knows it.
        device: identity of the device that survives renaming and re-ranking: the GPU's UUID where there is one.
        slot: position within the node, from 0 (torchrun's LOCAL_RANK).
        model: what the device is; only devices of one model compute the same bits.
        software: what must be the same for the same bits, e.g. the version of torch.
    """

    rank: int
    node: str
    device: str
    slot: int
    model: str = ""
    software: str = ""


@dataclass(frozen=True)
class Topology:
    """The placement of every rank of a job, in order of rank.

    Raises:
        ConfigurationError: ranks are not 0..W-1, or two ranks share a device identity on different nodes.
    """

    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        ranks = [place.rank for place in self.placements]
        if ranks != list(range(len(ranks))):
            raise ConfigurationError(f"placements must be those of ranks 0..{len(ranks) - 1} in order, got {ranks}")
        node_of_device: dict[str, str] = {}
        for place in self.placements:
            other = node_of_device.setdefault(place.device, place.node)
            if other != place.node:
                raise ConfigurationError(
                    f"device {place.device} is claimed by node {other} and node {place.node}: node names or device "
                    "identities are wrong; set BITWITNESS_NODE on every node"
                )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.placements)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in order of their lowest rank."""
        return tuple(dict.fromkeys(place.node for place in self.placements))

    @cached_property
    def _ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        ranks: dict[str, list[int]] = defaultdict(list)
        for place in sorted(self.placements, key=lambda place: (place.slot, place.rank)):
            ranks[place.node].append(place.rank)
        return tuple(tuple(ranks[node]) for node in self.nodes)

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (node, position)
            for node, ranks in enumerate(self._ranks_of_node)
            for position, rank in enumerate(ranks)
        }

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.placements[rank].node

    def device_of(self, rank: int) -> str:
        """The device of a rank."""
        return self.placements[rank].device

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes of some ranks, each once, in order."""
        wanted = {self.node_of(rank) for rank in ranks}
        return tuple(node for node in self.nodes if node in wanted)

    def witness_of(self, owner: int, offset: int = 1) -> int | None:
        """The rank that replays for `owner`: in the same slot, `offset` nodes further (1: first witness, 2: second).

        With two nodes there is no third: the second opinion is then another device of the owner's own node, and with
        one node both are. What such opinions are worth is for the verdict to say. None where there is nobody else.
        """
        if offset not in (1, 2):
            raise ValueError(f"offset is 1 or 2, got {offset}")
        node, position = self._coordinates[owner]
        count = len(self.nodes)
        if offset < count:
            ranks = self._ranks_of_node[(node + offset) % count]
            return ranks[position % len(ranks)]
        ranks = self._ranks_of_node[node]
        shift = offset if count == 1 else 1
        if shift % len(ranks) == 0 or shift >= len(ranks):
            return None
        return ranks[(position + shift) % len(ranks)]

    def owners_of(self, witness: int, offset: int = 1) -> tuple[int, ...]:
        """The ranks for which `witness` replays; one where nodes are alike, any number where they are not."""
        return self._owners[offset].get(witness, ())

    @cached_property
    def _owners(self) -> dict[int, dict[int, tuple[int, ...]]]:
        owners: dict[int, dict[int, tuple[int, ...]]] = {1: {}, 2: {}}
        for offset, table in owners.items():
            for owner in range(self.world_size):
                witness = self.witness_of(owner, offset)
                if witness is not None:
                    table[witness] = (*table.get(witness, ()), owner)
        return owners

    def limits(self) -> tuple[str, ...]:
        """What cannot be had on this placement, each a sentence; empty where everything can."""
        found: list[str] = []
        count = len(self.nodes)
        if self.world_size == 1:
            found.append(
                "one process: no other device can witness this one. Only non-finite numbers are found, and nobody is named"
            )
        elif count == 1:
            found.append("one node: witnesses sit on the same node, so corruption is found but nobody can be named")
        elif count == 2:
            found.append("two nodes: one opinion against another names nobody; three nodes are needed to name a rank")
        for name, what in (("model", "device models"), ("software", "software versions")):
            kinds = sorted({getattr(place, name) for place in self.placements})
            if len(kinds) > 1:
                found.append(f"mixed {what} ({', '.join(kinds)}): their results need not agree bit for bit")
        return tuple(found)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices and software are alike, so that healthy ranks compute the same bits."""
        return len({(place.model, place.software) for place in self.placements}) == 1

    def to_json(self) -> list[dict[str, Any]]:
        """One dictionary a rank."""
        return [asdict(place) for place in self.placements]

    @classmethod
    def from_json(cls, records: Iterable[Mapping[str, Any]]) -> Topology:
        """The inverse of `to_json`."""
        names = ("rank", "node", "device", "slot", "model", "software")
        return cls(tuple(Placement(**{name: record[name] for name in names if name in record}) for record in records))


def node_name(environment: Mapping[str, str], resource_config: Path = RESOURCE_CONFIG) -> str:
    """The name of this node as the cluster knows it (DESIGN section 5).

    In order: `BITWITNESS_NODE`, `NODE_NAME` (Kubernetes' downward API), `SLURMD_NODENAME`, HyperPod's
    resource_config.json (matched by this host's own addresses), the host's name.
    """
    for variable in ("BITWITNESS_NODE", "NODE_NAME", "SLURMD_NODENAME"):
        if name := environment.get(variable, "").strip():
            return name
    return _hyperpod_node(resource_config) or socket.gethostname()


def scheduler_job(environment: Mapping[str, str]) -> str:
    """The job of the scheduler that this process belongs to, e.g. `slurm:4711`; empty where none says so.

    Whoever repairs the cluster needs it: the job that has ended is to be started again without the node. A task of an array is
    `slurm:4711_3`: by the number alone of its last task, which is that of the array, all of them would be started again.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID", "").strip() for name in ("JOB", "TASK"))
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "").strip()
    return f"slurm:{job}" if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,18})?", job) else ""


def _hyperpod_node(resource_config: Path) -> str | None:
    """The instance whose address is one of this host's; None where the file is absent, damaged or names no match."""
    try:
        groups = json.loads(resource_config.read_text())["InstanceGroups"]
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        for group in groups:
            for instance in group["Instances"]:
                if instance.get("CustomerIpAddress") in own and re.fullmatch(r"i-[0-9a-f]+", instance["InstanceId"]):
                    return str(instance["InstanceId"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None
