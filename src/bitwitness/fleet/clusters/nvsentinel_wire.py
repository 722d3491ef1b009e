"""NVSentinel's messages as bytes: a descriptor of our own, in a pool of our own, loaded when it is needed.

No generated module: those are bound to one version of protobuf, and a second package that registers `datamodels` in the default
pool, such as NVSentinel's own, would collide with it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from bitwitness.errors import MissingExtra
from bitwitness.fleet.clusters.nvsentinel_events import AGENT, CHECK, COMPONENT, ERROR, VERSION, HealthEvent

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("NVSentinel is told through protobuf: pip install 'bitwitness[nvsentinel]'") from error

METHOD = "/datamodels.PlatformConnector/HealthEventOccurredV1"
DESCRIPTORS = "nvsentinel_events.binpb"


@cache
def classes() -> dict[str, Any]:
    """The message classes by their short name."""
    content = files("bitwitness.fleet.clusters").joinpath(DESCRIPTORS).read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
    names = ("HealthEvents", "HealthEvent", "Entity", "Timestamp", "Empty")
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"datamodels.{name}")) for name in names}


def encode(*events: HealthEvent) -> bytes:
    """The request that tells these events."""
    batch = classes()["HealthEvents"](version=VERSION)
    for event in events:
        _fill(batch.events.add(), event)
    content: bytes = batch.SerializeToString(deterministic=True)
    return content


def _fill(made: Any, event: HealthEvent) -> None:
    enums = made.DESCRIPTOR.fields_by_name
    made.version, made.agent, made.componentClass, made.checkName = VERSION, AGENT, COMPONENT, CHECK
    made.isFatal, made.isHealthy, made.message = not event.healthy, event.healthy, event.message
    made.recommendedAction = enums["recommendedAction"].enum_type.values_by_name[event.action].number
    made.processingStrategy = enums["processingStrategy"].enum_type.values_by_name[event.strategy].number
    made.nodeName = event.node
    if not event.healthy:
        made.errorCode.append(ERROR)
    for entity in event.entities:
        made.entitiesImpacted.add(entityType=entity.kind, entityValue=entity.value)
    for key, value in event.metadata.items():
        made.metadata[key] = value
    made.generatedTimestamp.seconds = int(event.time.timestamp() // 1)
    made.generatedTimestamp.nanos = event.time.microsecond * 1000


def decode(content: bytes) -> Any:
    """The inverse of `encode`, as messages.

    Raises:
        ValueError: these are no such bytes.
    """
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - beside what it guards

    try:
        return classes()["HealthEvents"].FromString(content)
    except DecodeError as error:
        raise ValueError(f"no health events: {error}") from error
