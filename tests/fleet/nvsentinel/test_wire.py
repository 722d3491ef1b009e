"""What NVSentinel is told, as bytes over a real gRPC server on a Unix socket."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory, timestamp_pb2

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import nvsentinel_events, nvsentinel_socket, nvsentinel_wire
from bitwitness.fleet.clusters.nvsentinel_events import (
    ACTIONS,
    Entity,
    Suspicion,
    entities_of,
    fault,
    quarantine_of,
    recovery,
    valid_strategy,
)
from bitwitness.fleet.clusters.nvsentinel_fake import FakePlatformConnector
from bitwitness.fleet.clusters.nvsentinel_socket import Connector
from bitwitness.fleet.clusters.nvsentinel_wire import decode, encode

NOW = datetime(2026, 11, 29, 9, 30, 15, 250_000, UTC)
WHAT = Suspicion("20261129T093015Z-4be1d2", "replay differs at step 4100; twice", ("GPU-11111111-2222", "cpu:0"))
FOLDER = Path(nvsentinel_events.__file__).parent


# The messages ---------------------------------------------------------------------------------------------------------


def test_the_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    made = tmp_path / "made.binpb"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{FOLDER}",
        f"--descriptor_set_out={made}",
        "nvsentinel_events.proto",
    ]
    subprocess.run(command, check=True)
    fresh = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes())
    kept = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / nvsentinel_wire.DESCRIPTORS).read_bytes())
    assert kept == fresh, "make it anew: the command stands in nvsentinel_events.proto"


def _whole() -> Any:
    """`HealthEvents` with all 18 fields of NVSentinel, by their numbers (recovery.md 3.2), and Google's own times."""
    file = descriptor_pb2.FileDescriptorProto(name="whole.proto", package="datamodels", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    field = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[int, str, int, int, str]) -> descriptor_pb2.DescriptorProto:
        made = file.message_type.add(name=name)
        for number, its, kind, label, of in fields:
            made.field.add(name=its, number=number, type=kind, label=label)
            if of:
                made.field[-1].type_name = of
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    text, truth, number, part, choice = (
        field.TYPE_STRING,
        field.TYPE_BOOL,
        field.TYPE_UINT32,
        field.TYPE_MESSAGE,
        field.TYPE_ENUM,
    )
    for enum, values in {
        "ProcessingStrategy": {"UNSPECIFIED": 0, "EXECUTE_REMEDIATION": 1, "STORE_ONLY": 2},
        "RecommendedAction": {
            "NONE": 0, "COMPONENT_RESET": 2, "CONTACT_SUPPORT": 5, "RUN_FIELDDIAG": 6, "RESTART_VM": 15, "RESTART_BM": 24,
            "REPLACE_VM": 25, "RUN_DCGMEUD": 26, "CUSTOM": 27, "REMEDIATE": 28, "UNKNOWN": 99,
        },
    }.items():  # fmt: skip
        made = file.enum_type.add(name=enum)
        for name, value in values.items():
            made.value.add(name=name, number=value)
    message("Entity", (1, "entityType", text, one, ""), (2, "entityValue", text, one, ""))
    message("BehaviourOverrides", (1, "force", truth, one, ""), (2, "skip", truth, one, ""))
    event = message(
        "HealthEvent",
        (1, "version", number, one, ""),
        (2, "agent", text, one, ""),
        (3, "componentClass", text, one, ""),
        (4, "checkName", text, one, ""),
        (5, "isFatal", truth, one, ""),
        (6, "isHealthy", truth, one, ""),
        (7, "message", text, one, ""),
        (8, "recommendedAction", choice, one, ".datamodels.RecommendedAction"),
        (9, "errorCode", text, many, ""),
        (10, "entitiesImpacted", part, many, ".datamodels.Entity"),
        (11, "metadata", part, many, ".datamodels.HealthEvent.MetadataEntry"),
        (12, "generatedTimestamp", part, one, ".google.protobuf.Timestamp"),
        (13, "nodeName", text, one, ""),
        (14, "quarantineOverrides", part, one, ".datamodels.BehaviourOverrides"),
        (15, "drainOverrides", part, one, ".datamodels.BehaviourOverrides"),
        (16, "processingStrategy", choice, one, ".datamodels.ProcessingStrategy"),
        (17, "id", text, one, ""),
        (18, "customRecommendedAction", text, one, ""),
    )
    entry = event.nested_type.add(name="MetadataEntry")
    entry.options.map_entry = True
    for position, its in ((1, "key"), (2, "value")):
        entry.field.add(name=its, number=position, type=text, label=one)
    message("HealthEvents", (1, "version", number, one, ""), (2, "events", part, many, ".datamodels.HealthEvent"))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("datamodels.HealthEvents"))


def test_nvsentinel_reads_every_field_of_our_bytes() -> None:
    batch = _whole().FromString(encode(fault("n1", WHAT, "EXECUTE_REMEDIATION", "REPLACE_VM", NOW)))
    assert batch.version == 1
    (event,) = batch.events
    assert (event.version, event.agent, event.componentClass, event.checkName) == (
        1,
        "bitwitness",
        "GPU",
        "SilentDataCorruption",
    )
    assert (event.isFatal, event.isHealthy, event.recommendedAction, event.processingStrategy) == (True, False, 25, 1)
    assert list(event.errorCode) == ["SDC"]
    assert [(one.entityType, one.entityValue) for one in event.entitiesImpacted] == [
        ("GPU_UUID", "GPU-11111111-2222"),
        ("GPU", "cpu:0"),
    ]
    assert dict(event.metadata) == {"incident": WHAT.incident}
    assert event.generatedTimestamp.ToDatetime(UTC) == NOW
    assert (event.nodeName, event.id, event.customRecommendedAction) == ("n1", "", "")
    assert not event.HasField("quarantineOverrides")
    assert not event.HasField("drainOverrides")
    assert event.SerializeToString(deterministic=True) in encode(
        fault("n1", WHAT, "EXECUTE_REMEDIATION", "REPLACE_VM", NOW)
    )


def test_nothing_that_nvsentinel_would_send_is_unknown_to_the_fake() -> None:
    whole = _whole()(version=1)
    whole.events.add(nodeName="n1", id="assigned", customRecommendedAction="x", recommendedAction=27, agent="other")
    (event,) = decode(whole.SerializeToString()).events
    assert (event.nodeName, event.agent, event.recommendedAction) == ("n1", "other", 27)


def test_the_answer_is_googles_empty() -> None:
    assert nvsentinel_wire.classes()["Empty"]().SerializeToString() == empty_pb2.Empty().SerializeToString()


def test_another_package_may_have_the_same_names_in_the_default_pool() -> None:
    file = descriptor_pb2.FileDescriptorProto(
        name="data-models/health_event.proto", package="datamodels", syntax="proto3"
    )
    file.message_type.add(name="HealthEvents")
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    assert decode(encode(recovery("n1", "i", "STORE_ONLY", NOW))).events[0].isHealthy


def test_a_recovery_names_nothing_so_that_nothing_stays_behind() -> None:
    (event,) = decode(encode(recovery("n1", WHAT.incident, "STORE_ONLY", NOW))).events
    assert (event.isHealthy, event.isFatal, event.recommendedAction, event.processingStrategy) == (True, False, 0, 2)
    assert (list(event.errorCode), list(event.entitiesImpacted)) == ([], [])
    assert event.metadata["incident"] == WHAT.incident


def test_a_message_is_one_line_without_what_nvsentinel_parts_conditions_by() -> None:
    what = Suspicion("i1", "a;b\nc" + "x" * 3000, tuple(f"GPU-{number}" for number in range(100)))
    event = fault("n1", what, "STORE_ONLY", "CONTACT_SUPPORT", NOW)
    assert ";" not in event.message
    assert "\n" not in event.message
    assert len(event.message) <= 700
    assert "and 96 more" in event.message
    assert "bitwitness fleet clear" in event.message
    assert len(event.entities) == 64


def test_devices_are_named_as_nvsentinels_monitors_name_them() -> None:
    assert entities_of(["GPU-1", "GPU-1", " ", "MIG-2"]) == (Entity("GPU_UUID", "GPU-1"), Entity("GPU", "MIG-2"))


def test_no_action_by_which_nothing_would_happen_can_be_recommended() -> None:
    assert not {"NONE", "UNKNOWN", "CUSTOM", ""} & set(ACTIONS)


def test_a_strategy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cluster\.strategy is 'store'.*STORE_ONLY and EXECUTE_REMEDIATION"):
        valid_strategy("store", "cluster.strategy")


# What NVSentinel shows on a Node --------------------------------------------------------------------------------------


def test_a_quarantine_tells_whose_it_is() -> None:
    events = '[{"agent":"gpu-health-monitor"},{"agent":"bitwitness","metadata":{"incident":"i1"}}]'
    held = quarantine_of({"quarantineHealthEvent": events, "quarantineHealthEventIsCordoned": "True"})
    assert (held.is_ours, held.incident, held.others, held.cordoned) == (True, "i1", ("gpu-health-monitor",), True)


def test_older_versions_keep_one_event_and_write_names_with_a_capital() -> None:
    held = quarantine_of({"quarantineHealthEvent": '{"Agent":"bitwitness","Metadata":{"incident":"i1"}}'})
    assert (held.is_ours, held.incident, held.cordoned) == (True, "i1", False)


def test_a_cordon_that_was_there_before_is_not_nvsentinels() -> None:
    events = '[{"agent":"bitwitness"}]'
    annotations = {"quarantineHealthEvent": events, "quarantineHealthEventIsCordoned": "True"}
    assert quarantine_of(annotations).cordoned
    assert not quarantine_of({**annotations, "quarantineHealthEventCordonPreExisting": "True"}).cordoned


@pytest.mark.parametrize("text", ["{", "[1]", '"bitwitness"', "[" * 100_000])
def test_what_cannot_be_read_is_nobodys(text: str) -> None:
    held = quarantine_of({"quarantineHealthEvent": text})
    assert (held.damaged, held.is_ours) == (True, False)


@pytest.mark.parametrize("text", ["", "[]", "null", " "])
def test_an_empty_quarantine_is_none(text: str) -> None:
    assert quarantine_of({"quarantineHealthEvent": text, "quarantinedNodeUncordonedManually": "True"}).agents == ()


# The socket -----------------------------------------------------------------------------------------------------------


def test_events_arrive(tmp_path: Path) -> None:
    with FakePlatformConnector(tmp_path / "s", "n1") as connector:
        Connector(f"unix://{tmp_path}/s").tell(fault("n1", WHAT, "STORE_ONLY", "CONTACT_SUPPORT", NOW))
        (event,) = connector.taken
    assert (event.node, event.healthy, event.fatal, event.strategy, event.action) == (
        "n1", False, True, "STORE_ONLY", "CONTACT_SUPPORT",
    )  # fmt: skip
    assert event.time == NOW.timestamp()


def test_who_names_another_node_is_refused_and_told_so(tmp_path: Path) -> None:
    with FakePlatformConnector(tmp_path / "s", "n1") as connector:
        with pytest.raises(ClusterError, match=rf"{tmp_path}/s: PERMISSION_DENIED: .*its own node only: is --node"):
            Connector(str(tmp_path / "s")).tell(fault("n2", WHAT, "STORE_ONLY", "CONTACT_SUPPORT", NOW))
        assert connector.taken == []


def test_no_socket_is_told_without_waiting(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=rf"{tmp_path}/s: UNAVAILABLE: there is no socket: does NVSentinel"):
        Connector(str(tmp_path / "s")).tell(recovery("n1", "i", "STORE_ONLY", NOW))


def test_a_socket_behind_which_nobody_is(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))  # and no listen: as after a kill -9
        with pytest.raises(ClusterError, match="UNAVAILABLE"):
            Connector(str(tmp_path / "s"), timeout=5).tell(recovery("n1", "i", "STORE_ONLY", NOW))


@pytest.mark.parametrize("code", ["UNIMPLEMENTED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_an_error_names_the_socket_and_the_code_and_is_not_repeated(code: str, tmp_path: Path) -> None:
    with FakePlatformConnector(tmp_path / "s", "n1") as connector:
        connector.answer(code, "because\nof this")
        with pytest.raises(ClusterError, match=rf"{tmp_path}/s: {code}: because of this: \w"):
            Connector(str(tmp_path / "s")).tell(recovery("n1", "i", "STORE_ONLY", NOW))
        assert connector.calls == 1


def test_a_connector_that_hangs_is_left_after_the_deadline(tmp_path: Path) -> None:
    with FakePlatformConnector(tmp_path / "s", "n1") as connector:
        connector.be_slow(0.4)
        with pytest.raises(ClusterError, match="DEADLINE_EXCEEDED"):
            Connector(str(tmp_path / "s"), timeout=0.2).tell(recovery("n1", "i", "STORE_ONLY", NOW))
        assert connector.calls == 1


def test_a_call_is_made_once_where_it_is_refused_for_now(tmp_path: Path) -> None:
    assert ("grpc.enable_retries", 0) in nvsentinel_socket._OPTIONS  # what may be transparent is no decision of ours
    with FakePlatformConnector(tmp_path / "s", "n1") as connector:
        connector.answer("UNAVAILABLE")
        with pytest.raises(ClusterError, match="UNAVAILABLE"):
            Connector(str(tmp_path / "s")).tell(recovery("n1", "i", "STORE_ONLY", NOW))
        assert connector.calls == 1


def test_a_server_that_knows_another_method_only(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    server.start()
    try:
        with pytest.raises(ClusterError, match=r"UNIMPLEMENTED.*this version of NVSentinel"):
            Connector(str(tmp_path / "s")).tell(recovery("n1", "i", "STORE_ONLY", NOW))
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    "socket", ["", "run/nvsentinel.sock", "tcp://x:1", "/tmp/", "/" + "x" * 200, "unix://host/x", "/a\nb"]
)
def test_what_can_be_no_socket_is_refused(socket: str) -> None:
    with pytest.raises(ConfigurationError):
        Connector(socket)


def test_a_call_needs_time() -> None:
    with pytest.raises(ConfigurationError, match="more than 0 s"):
        Connector("/s", timeout=0)


def test_the_fake_refuses_what_is_no_event(tmp_path: Path) -> None:
    import grpc

    with (
        FakePlatformConnector(tmp_path / "s", "n1") as connector,
        grpc.insecure_channel(f"unix:{tmp_path}/s") as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        channel.unary_unary(nvsentinel_wire.METHOD)(b"\xff\xff", timeout=5)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert connector.taken == []
