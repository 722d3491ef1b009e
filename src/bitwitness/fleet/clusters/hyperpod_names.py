"""Which machine a node is, and which node a machine: a mistake here replaces a healthy one.

On EKS the name says it (`hyperpod-i-0123456789abcdef0`), and the name goes when the machine goes. On Slurm the name is that of an
address (`ip-10-0-0-7`) and stays when the machine is exchanged, so SageMaker is asked which instance has it now; the copy of
resource_config.json on a node may be stale and is believed only where SageMaker agrees. What is ambiguous is not guessed.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.hyperpod_limits import is_instance_id

_EKS = "hyperpod-"
RESOURCE_CONFIG = Path("/opt/ml/config/resource_config.json")
"""On every node of a HyperPod cluster."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine, as SageMaker shows it.

    Attributes:
        id: `i-...`.
        group: its instance group.
        status: `Running`, `Pending`, ...
        message: what SageMaker says beside the status, often why it failed.
        host: its private DNS name, e.g. `ip-10-0-0-7.us-west-2.compute.internal`.
        address: its private address, where it was asked for.
        launched: when, UTC in ISO 8601; "" where it is not told.
    """

    id: str
    group: str
    status: str
    message: str = ""
    host: str = ""
    address: str = ""
    launched: str = ""


@dataclass(frozen=True, slots=True)
class ResourceConfig:
    """What a node knows of its cluster, which was true when the file was written."""

    name: str = ""
    arn: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Of each machine: its address and its id."""


def instance_in(node: str) -> str:
    """The id of an instance that the name of an EKS node says; "" where it says none."""
    rest = node.removeprefix(_EKS)
    return rest if rest != node and is_instance_id(rest) else ""


def instance_of(record: Mapping[str, Any]) -> Instance:
    """One of ClusterNodeSummaries, or NodeDetails."""
    status = record.get("InstanceStatus") or {}
    launched = record.get("LaunchTime")
    return Instance(
        id=str(record.get("InstanceId") or ""),
        group=str(record.get("InstanceGroupName") or ""),
        status=str(status.get("Status") or ""),
        message=str(status.get("Message") or ""),
        host=str(record.get("PrivateDnsHostname") or ""),
        address=str(record.get("PrivatePrimaryIp") or ""),
        launched=launched.astimezone(UTC).isoformat(timespec="seconds") if isinstance(launched, datetime) else "",
    )


def is_called(instance: Instance, node: str) -> bool | None:
    """Whether an instance is the Slurm node of this name; None where it does not tell, or its name and its address contradict."""
    name, wanted = instance.host.partition(".")[0].lower(), node.lower()
    told = {one for one in (name, _of_address(instance.address)) if one}
    if not told:
        return None
    if wanted not in told and wanted != instance.host.lower():
        return False
    return True if len(told) == 1 else None


def _of_address(address: str) -> str:
    return f"ip-{address.replace('.', '-')}" if address else ""


def find(node: str, instances: Sequence[Instance]) -> Instance | None:
    """The instance that is the Slurm node of this name; None where there is none.

    One that goes and the one that takes its place may both be listed for a while: the one that runs is the node then.

    Raises:
        ConfigurationError: several could be it, or one that tells no name.
    """
    found = [one for one in instances if one.id and is_called(one, node)]
    silent = [one.id for one in instances if one.id and is_called(one, node) is None and one.status not in GOING]
    if not found and silent:
        raise ConfigurationError(
            f"which machine {node} is cannot be told: none has its name, and {', '.join(sorted(silent)[:5])} tell none (yet)"
        )
    if len(found) > 1:
        staying = [one for one in found if one.status not in GOING]
        if len(staying) != 1:
            ids = ", ".join(sorted(one.id for one in found))
            raise ConfigurationError(f"which machine {node} is cannot be told: {ids} have its name. None is touched")
        found = staying
    return found[0] if found else None


GOING = frozenset({"ShuttingDown", "NotFound"})
"""Statuses of a machine that leaves the cluster."""


def address_of(node: str) -> str:
    """The address in the name of a Slurm node (`ip-10-0-0-7`); "" where it is none."""
    text = node.partition(".")[0].removeprefix("ip-").replace("-", ".")
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        return ""


def read_resource_config(path: Path = RESOURCE_CONFIG) -> ResourceConfig:
    """What the file says; nothing where there is no such file.

    Raises:
        ConfigurationError: it is there and cannot be understood.
    """
    if not path.exists():
        return ResourceConfig()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content.get("ClusterConfig") or {}
        addresses = {
            str(one["CustomerIpAddress"]): str(one["InstanceId"])
            for group in content["InstanceGroups"]
            for one in group.get("Instances") or ()
            if one.get("CustomerIpAddress") and is_instance_id(str(one.get("InstanceId")))
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is not understood as HyperPod's resource_config.json: {error!r:.200}"
        ) from error
    return ResourceConfig(str(about.get("ClusterName") or ""), str(about.get("ClusterArn") or ""), addresses)
