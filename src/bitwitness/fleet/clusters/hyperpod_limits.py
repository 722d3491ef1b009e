"""What SageMaker demands of a request and botocore does not check: told here, before anything is sent.

botocore 1.44 checks that required members are there and that lists are not empty. It lets through 26 nodes where 25 are allowed,
names that match no pattern, and a request without any node (https://docs.aws.amazon.com/sagemaker/latest/APIReference/:
BatchReplaceClusterNodes, BatchRebootClusterNodes, StartClusterHealthCheck). The service refuses them, some minutes too late.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bitwitness.errors import ConfigurationError

MOST_NODES = 25
"""Of one BatchReplaceClusterNodes or BatchRebootClusterNodes."""
CHECKS = ("InstanceStress", "InstanceConnectivity")
"""The deep health checks of one instance. `MultiNodeTrainingValidation`, which newer models have, is about many."""

_INSTANCE = re.compile(r"i-[a-f0-9]{8}(?:[a-f0-9]{9})?")
_GROUP = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_CLUSTER = re.compile(
    r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:cluster/[a-z0-9]{12}|[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
)
_LONGEST_GROUP = 63


def instance_id(text: str) -> str:
    """The id of an EC2 instance, which names one machine and never another one.

    Raises:
        ConfigurationError: it cannot be one.
    """
    if not _INSTANCE.fullmatch(text):
        raise ConfigurationError(f"{text!r:.80} is no id of an instance (i- and 8 or 17 hexadecimal digits)")
    return text


def is_instance_id(text: str) -> bool:
    """Whether it can be one."""
    return _INSTANCE.fullmatch(text) is not None


def cluster_name(text: str) -> str:
    """The name or ARN of a HyperPod cluster.

    Raises:
        ConfigurationError: it cannot be one.
    """
    if not _CLUSTER.fullmatch(text):
        raise ConfigurationError(
            f"{text!r:.120} is no name of a HyperPod cluster (letters, digits and '-', at most 63, or its ARN)"
        )
    return text


def address(text: str) -> str:
    """Where an API is.

    Raises:
        ConfigurationError: it can be no address, or a password stands in it.
    """
    try:
        parts = urlsplit(text)
        told = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, told = urlsplit(""), False
    if "@" in text:
        raise ConfigurationError(
            "cluster.endpoint_url has a name or a password in it: credentials are found as boto3 finds them"
        )
    if not told or parts.scheme not in ("http", "https"):
        raise ConfigurationError(f"cluster.endpoint_url reads https://HOST or http://HOST, not {text!r:.200}")
    return text


def group_name(text: str) -> str:
    """The name of an instance group.

    Raises:
        ConfigurationError: it cannot be one.
    """
    if len(text) > _LONGEST_GROUP or not _GROUP.fullmatch(text):
        raise ConfigurationError(f"{text!r:.80} is no name of an instance group (letters, digits and '-', at most 63)")
    return text


def checks(names: Sequence[str]) -> tuple[str, ...]:
    """Deep health checks, each once.

    Raises:
        ConfigurationError: one is unknown.
    """
    if unknown := [name for name in names if name not in CHECKS]:
        raise ConfigurationError(f"{unknown[0]!r:.80} is no deep health check of one node: {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Failed:
    """A node of which the service said that it did nothing, within an answer that is a success (HTTP 200)."""

    node: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of each node of a request, or of several."""

    successful: tuple[str, ...] = ()
    failed: tuple[Failed, ...] = ()

    def __add__(self, other: Answer) -> Answer:
        return Answer(self.successful + other.successful, self.failed + other.failed)


def answer_of(said: Mapping[str, Any], asked: Sequence[str]) -> Answer:
    """What a Batch call answered. A node that it does not mention is failed: silence is no success."""
    successful = tuple(str(node) for node in said.get("Successful") or () if node in asked)
    failed = tuple(
        Failed(str(one.get("NodeId", "")), str(one.get("ErrorCode", "")), str(one.get("Message", "")))
        for one in said.get("Failed") or ()
    )
    told = {*successful, *(one.node for one in failed)}
    silent = tuple(Failed(node, "", "the answer does not mention it") for node in asked if node not in told)
    return Answer(successful, failed + silent)


def batch(ask: Callable[[list[str]], Mapping[str, Any]], nodes: Sequence[str]) -> Answer:
    """Ask for any number of instances, 25 at a time, and put the answers together.

    Args:
        ask: sends one request for at most 25 of them; what it raises ends the rest, which then was not asked for.
        nodes: ids of instances; each is asked for once.

    Raises:
        ConfigurationError: there is none, or one of them is no id.
    """
    wanted = [instance_id(node) for node in dict.fromkeys(nodes)]
    if not wanted:
        raise ConfigurationError("a request without any instance is refused by SageMaker")
    whole = Answer()
    for start in range(0, len(wanted), MOST_NODES):
        chunk = wanted[start : start + MOST_NODES]
        whole += answer_of(ask(chunk), chunk)
    return whole
