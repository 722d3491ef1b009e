"""Which machine a node is: told for sure, or not at all."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters import hyperpod_limits as limits
from bitwitness.fleet.clusters.hyperpod_names import (
    Instance,
    address_of,
    find,
    instance_in,
    instance_of,
    is_called,
    read_resource_config,
)

A, B = "i-0123456789abcdef0", "i-0fedcba9876543210"


def machine(id: str = A, status: str = "Running", host: str = "ip-10-0-0-7.ec2.internal", **more: str) -> Instance:  # noqa: A002
    return Instance(id, "gpu", status, host=host, **more)


@pytest.mark.parametrize(
    ("node", "instance"),
    [
        (f"hyperpod-{A}", A),
        ("hyperpod-i-12345678", "i-12345678"),
        (A, ""),
        ("hyperpod-i-123", ""),
        ("hyperpod-i-0123456789ABCDEF0", ""),
        (f"hyperpod-{A}.internal", ""),
        (f"x-hyperpod-{A}", ""),
        ("ip-10-0-0-7", ""),
        ("", ""),
    ],
)
def test_the_name_of_an_eks_node_says_its_machine(node: str, instance: str) -> None:
    assert instance_in(node) == instance


def test_a_slurm_node_is_the_machine_with_its_name_or_address() -> None:
    assert is_called(machine(), "ip-10-0-0-7") is True
    assert is_called(machine(), "ip-10-0-0-70") is False
    assert is_called(machine(host="", address="10.0.0.7"), "ip-10-0-0-7") is True
    assert is_called(machine(host=""), "ip-10-0-0-7") is None
    assert is_called(machine(address="10.0.0.7"), "ip-10-0-0-7.ec2.internal") is True
    assert is_called(machine(address="10.0.0.8"), "ip-10-0-0-8") is None  # its name says otherwise
    assert is_called(machine(address="10.0.0.8"), "ip-10-0-0-9") is False
    found = find("ip-10-0-0-7", [machine(), machine(B, host="ip-10-0-0-8.ec2.internal")])
    assert found == machine()
    assert find("ip-10-0-0-9", [machine()]) is None


def test_what_is_ambiguous_is_not_guessed() -> None:
    with pytest.raises(ConfigurationError, match=f"{A}, {B} have its name"):
        find("ip-10-0-0-7", [machine(), machine(B)])
    with pytest.raises(ConfigurationError, match="tell none"):
        find("ip-10-0-0-7", [machine(host="")])
    assert find("ip-10-0-0-7", [machine(status="ShuttingDown"), machine(B)]) == machine(B)
    with pytest.raises(ConfigurationError):
        find("ip-10-0-0-7", [machine(status="ShuttingDown"), machine(B, "NotFound")])


def test_a_record_of_sagemaker() -> None:
    when = datetime(2026, 11, 1, 12, tzinfo=UTC)
    record = {
        "InstanceId": A,
        "InstanceGroupName": "gpu",
        "InstanceStatus": {"Status": "Failure", "Message": "no capacity"},
        "LaunchTime": when,
        "PrivatePrimaryIp": "10.0.0.7",
    }
    found = instance_of(record)
    assert found == Instance(A, "gpu", "Failure", "no capacity", "", "10.0.0.7", "2026-11-01T12:00:00+00:00")
    assert instance_of({}) == Instance("", "", "")


def test_resource_config(tmp_path: Path) -> None:
    path = tmp_path / "resource_config.json"
    assert read_resource_config(path).addresses == {}
    one = {"InstanceName": "gpu-1", "InstanceId": A, "CustomerIpAddress": "10.0.0.7", "AgentIpAddress": "169.254.0.1"}
    arn = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghij12"
    groups = [{"Name": "gpu", "InstanceType": "ml.p5.48xlarge", "Instances": [one, {"InstanceId": "bad"}]}]
    path.write_text(json.dumps({"ClusterConfig": {"ClusterName": "pod", "ClusterArn": arn}, "InstanceGroups": groups}))
    found = read_resource_config(path)
    assert (found.name, found.arn, found.addresses) == ("pod", arn, {"10.0.0.7": A})
    assert address_of("ip-10-0-0-7.ec2.internal") == "10.0.0.7"
    assert [address_of(name) for name in ("gpu-1", "ip-10-0-0", "ip-10-0-0-700", "")] == [""] * 4
    for damage in ("{", "[]", '{"InstanceGroups": 3}', '{"InstanceGroups": [3]}'):
        path.write_text(damage)
        with pytest.raises(ConfigurationError, match=r"resource_config\.json"):
            read_resource_config(path)


# Limits that botocore lets through -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["i-123", "i-0123456789abcdefg", "I-12345678", "i-12345678 ", "i-12345678\n", "", "gpu-1"]
)
def test_no_other_id_of_a_machine(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no id of an instance"):
        limits.instance_id(text)


def test_names_of_clusters_and_groups() -> None:
    assert limits.cluster_name("my-pod") == "my-pod"
    assert limits.cluster_name("arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghij12").startswith("arn")
    for text in ("", "-pod", "pod-", "p" * 64, "a_b", "arn:aws:sagemaker:us-west-2:1:cluster/x"):
        with pytest.raises(ConfigurationError, match="no name of a HyperPod cluster"):
            limits.cluster_name(text)
    assert limits.group_name("worker-group-1") == "worker-group-1"
    for text in ("", "-g", "g" * 64, "g h"):
        with pytest.raises(ConfigurationError):
            limits.group_name(text)
    assert limits.checks(["InstanceStress", "InstanceStress"]) == ("InstanceStress",)
    with pytest.raises(ConfigurationError, match="MultiNodeTrainingValidation"):
        limits.checks(["MultiNodeTrainingValidation"])


@given(count=st.integers(1, 130), seed=st.integers(0, 2**32))
def test_a_batch_is_chunked_and_every_machine_is_accounted_for(count: int, seed: int) -> None:
    chance = random.Random(seed)
    nodes = [f"i-{number:017x}" for number in range(count)]
    fate = {node: chance.choice(["done", "failed", "silent"]) for node in nodes}
    sizes: list[int] = []

    def ask(some: list[str]) -> dict[str, Any]:
        sizes.append(len(some))
        failed = [
            {"NodeId": one, "ErrorCode": "InstanceIdInUse", "Message": "m"} for one in some if fate[one] == "failed"
        ]
        return {"Successful": [one for one in some if fate[one] == "done"], "Failed": failed}

    answer = limits.batch(ask, [*nodes, nodes[0]])
    assert max(sizes) <= 25
    assert sum(sizes) == count
    assert set(answer.successful) == {node for node in nodes if fate[node] == "done"}
    codes = {one.node: one.code for one in answer.failed}
    assert codes == {node: "InstanceIdInUse" if how == "failed" else "" for node, how in fate.items() if how != "done"}


def test_a_machine_that_was_not_asked_about_is_no_success() -> None:
    answer = limits.batch(lambda some: {"Successful": [B]}, [A])
    assert (answer.successful, [one.node for one in answer.failed]) == ((), [A])


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        limits.batch(lambda some: {}, [])
