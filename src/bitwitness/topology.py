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
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Drawn anew at each boot of a kernel (random(4)); containers see that of their machine."""
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where Kubernetes tells a pod its namespace, unless it was asked not to."""

UNKNOWN = "pod_"
"""What the name of a node begins with in a pod that was not told it. No node of Kubernetes can be called so, because its names
have no `_` (RFC 1123): the name of a pod alone could be that of somebody else's node."""
NODE_NAME_YAML = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"
"""What a container of a pod template needs to know its node (Kubernetes' downward API)."""

_KINDS = ("job", "jobset", "pytorchjob", "trainjob")
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*"


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
        pod: `NAMESPACE/NAME` of the Kubernetes pod in which the rank runs, for people; it names no place, because the next start
            has another.
    """

    rank: int
    node: str
    device: str
    slot: int
    model: str = ""
    software: str = ""
    pod: str = ""

    @property
    def node_is_known(self) -> bool:
        """Whether `node` is the name of a node, and not that of a pod which was not told it."""
        return not (self.pod and self.node.startswith(UNKNOWN))


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

    def pods_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The pods of some ranks, each once, in order of rank; none outside of Kubernetes."""
        return tuple(dict.fromkeys(self.placements[rank].pod for rank in sorted(ranks) if self.placements[rank].pod))

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
        lost = self.pods_of(place.rank for place in self.placements if not place.node_is_known)
        if lost:
            found.append(
                f"which node it runs on is not known in {len(lost)} pod{'s' * (len(lost) > 1)} ({', '.join(lost[:3])}"
                f"{', ...' * (len(lost) > 3)}): the pod is named in its place, no node is taken out because of it, and two pods of one "
                f"machine may count as two nodes. Add to the container in the pod template: {NODE_NAME_YAML}"
            )
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
        """One dictionary a rank; a pod only where there is one."""
        return [
            {name: value for name, value in asdict(place).items() if name != "pod" or value}
            for place in self.placements
        ]

    @classmethod
    def from_json(cls, records: Iterable[Mapping[str, Any]]) -> Topology:
        """The inverse of `to_json`."""
        names = ("rank", "node", "device", "slot", "model", "software", "pod")
        return cls(tuple(Placement(**{name: record[name] for name in names if name in record}) for record in records))


def is_same_place(one: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> bool:
    """Whether two lists of `to_json` have every rank on the same device of the same node, in whatever pods."""
    first, second = (
        [{name: value for name, value in record.items() if name != "pod"} for record in records]
        for records in (one, other)
    )
    return first == second


def node_name(environment: Mapping[str, str], resource_config: Path = RESOURCE_CONFIG) -> str:
    """The name of this node as the cluster knows it (DESIGN section 5).

    In order: `BITWITNESS_NODE`, `NODE_NAME` (Kubernetes' downward API), `SLURMD_NODENAME`, HyperPod's
    resource_config.json (matched by this host's own addresses), the host's name. In a pod the host's name is the pod's, which names no
    node: there it is `pod_` and that name, which no node can have (`UNKNOWN`). So is a NODE_NAME that is in truth the name of the pod.
    """
    for variable in ("BITWITNESS_NODE", "NODE_NAME", "SLURMD_NODENAME"):
        name = environment.get(variable, "").strip()
        if name and not (variable == "NODE_NAME" and name == environment.get("POD_NAME", "").strip()):
            return name
    host = f"{UNKNOWN}{socket.gethostname()}" if _in_pod(environment) else socket.gethostname()
    return _hyperpod_node(resource_config) or host


def pod_name(environment: Mapping[str, str], namespace: Path = NAMESPACE) -> str:
    """`NAMESPACE/NAME` of the pod in which this process runs, for people; empty outside of Kubernetes.

    From `POD_NAMESPACE` and `POD_NAME` (downward API), else from what every pod is told: its namespace by a file, its name as that of
    the host. Where the namespace is not told there is no `NAMESPACE/`.
    """
    if not _in_pod(environment):
        return ""
    name = environment.get("POD_NAME", "").strip() or environment.get("HOSTNAME", "").strip() or socket.gethostname()
    return f"{_pod_namespace(environment, namespace)}/{name}".removeprefix("/")


def machine(environment: Mapping[str, str], boot_id: Path = BOOT_ID, resource_config: Path = RESOURCE_CONFIG) -> str:
    """What all containers of this machine have in common and no other machine has, by which two names for one machine show.

    Empty where it cannot be told, and where somebody has said which node this is and must know: `SLURMD_NODENAME` (several slurmd
    on one machine), and `BITWITNESS_NODE` (nodes that are played on one). A supervisor sets that for its workers to what it has found
    out itself: one that says what would be found without it is nobody's word.
    """
    said = environment.get("BITWITNESS_NODE", "").strip()
    rest = {name: value for name, value in environment.items() if name != "BITWITNESS_NODE"}
    if environment.get("SLURMD_NODENAME", "").strip() or (said and said != node_name(rest, resource_config)):
        return ""
    try:
        found = boot_id.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if re.fullmatch(r"[0-9a-fA-F-]{32,36}", found) else ""


def scheduler_job(environment: Mapping[str, str], namespace: Path = NAMESPACE) -> str:
    """The job of the scheduler that this process belongs to, e.g. `slurm:4711`; empty where none says so.

    Whoever repairs the cluster needs it: the job that has ended is to be started again without the node. A task of an array is
    `slurm:4711_3`: by the number alone of its last task, which is that of the array, all of them would be started again.

    On Kubernetes nothing says it by itself: a pod template sets `BITWITNESS_JOB=KIND/NAME`, of which with the namespace of the pod it
    is `kubernetes:NAMESPACE/KIND/NAME`. Slurm prevails where both are told: its variables come with the process, and a job of Slurm in
    a pod would otherwise be taken for the pod's.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{name}_ID", "").strip() for name in ("JOB", "TASK"))
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "").strip()
    if re.fullmatch(r"[0-9]{1,18}(_[0-9]{1,18})?", job):
        return f"slurm:{job}"
    kind, _, name = environment.get("BITWITNESS_JOB", "").strip().partition("/")
    found = f"kubernetes:{_pod_namespace(environment, namespace)}/{kind.lower()}/{name}"
    return found if is_kubernetes_job(found) else ""


def unclear_job(environment: Mapping[str, str], namespace: Path = NAMESPACE) -> str:
    """What is wrong with BITWITNESS_JOB, in a sentence; "" where it names a job, or is not set."""
    said = environment.get("BITWITNESS_JOB", "").strip()
    if not said or scheduler_job(environment, namespace):
        return ""
    missing = (
        ""
        if _pod_namespace(environment, namespace)
        else ", and POD_NAMESPACE (downward API: metadata.namespace) is not set"
    )
    return (
        f"BITWITNESS_JOB={said!r:.120} names no job{missing}: it is KIND/NAME, e.g. pytorchjob/train, of {', '.join(_KINDS)}; until it "
        "does, nobody follows whether the job goes on without a node that was taken out"
    )


def is_kubernetes_job(text: str) -> bool:
    """Whether this is `kubernetes:NAMESPACE/KIND/NAME` of a kind that is known, with names that Kubernetes allows (RFC 1123)."""
    return re.fullmatch(rf"kubernetes:{_LABEL}/({'|'.join(_KINDS)})/{_SUBDOMAIN}", text) is not None


def _in_pod(environment: Mapping[str, str]) -> bool:
    """Kubernetes tells every container where its API is, also one without an account."""
    return bool(environment.get("KUBERNETES_SERVICE_HOST", "").strip())


def _pod_namespace(environment: Mapping[str, str], file: Path) -> str:
    if told := environment.get("POD_NAMESPACE", "").strip():
        return told
    try:
        return file.read_text(encoding="ascii").strip() if _in_pod(environment) else ""
    except (OSError, ValueError):
        return ""


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
