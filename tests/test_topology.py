"""Who witnesses whom, what a placement must be, and what a node is called."""

from __future__ import annotations

import json
import pickle
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.topology import (
    UNKNOWN,
    Placement,
    Topology,
    is_kubernetes_job,
    is_same_place,
    machine,
    node_name,
    pod_name,
    scheduler_job,
    unclear_job,
)


def place(nodes: list[int]) -> Topology:
    """Ranks in this order on these nodes."""
    return Topology(
        tuple(Placement(r, f"n{node}", f"gpu-{r}", nodes[:r].count(node), "H", "2") for r, node in enumerate(nodes))
    )


UNIFORM = [[n for n in range(nodes) for _ in range(slots)] for nodes in range(1, 7) for slots in (1, 2, 3, 8)]


@pytest.mark.parametrize("nodes", UNIFORM, ids=lambda nodes: f"{max(nodes) + 1}x{nodes.count(0)}")
def test_alike_nodes_witness_each_other_in_the_same_slot(nodes: list[int]) -> None:
    topology, count = place(nodes), max(nodes) + 1
    for offset in (1, 2):
        witnesses = [topology.witness_of(rank, offset) for rank in range(len(nodes))]
        known = [witness for witness in witnesses if witness is not None]
        assert len(set(known)) == len(known), "a rank replays for one owner at most"
        if count > offset:
            assert len(known) == len(nodes)
            for owner, witness in enumerate(known):
                assert topology.placements[witness].slot == topology.placements[owner].slot
                assert nodes[witness] == (nodes[owner] + offset) % count


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_witnesses_of_any_placement(nodes: list[int]) -> None:
    topology = place(nodes)
    count = len(set(nodes))
    for owner in range(len(nodes)):
        opinions = [topology.witness_of(owner, offset) for offset in (1, 2)]
        others = [other for other in opinions if other is not None]
        assert owner not in others
        assert len(set(others)) == len(others)
        away = {nodes[other] for other in others} - {nodes[owner]}
        assert len(away) == min(2, count - 1)
        if count >= 2:
            assert opinions[0] is not None
            assert nodes[opinions[0]] != nodes[owner]
        mates = nodes.count(nodes[owner]) - 1
        assert len(others) == len(away) + min(mates, 2 - len(away)), "no opinion that could be had is left out"
    for offset in (1, 2):
        pairs = {(w, owner) for owner in range(len(nodes)) if (w := topology.witness_of(owner, offset)) is not None}
        assert pairs == {(w, owner) for w in range(len(nodes)) for owner in topology.owners_of(w, offset)}


def test_uneven_nodes_share_the_work() -> None:
    topology = place([0, 0, 0, 0, 1, 1, 2])
    assert [topology.witness_of(rank) for rank in range(7)] == [4, 5, 4, 5, 6, 6, 0]
    assert topology.owners_of(4) == (0, 2)
    assert topology.owners_of(6) == (4, 5)
    assert topology.owners_of(3) == ()


def test_the_order_of_ranks_within_a_node_is_that_of_its_slots() -> None:
    swapped = (
        Placement(0, "a", "0", 1),
        Placement(1, "a", "1", 0),
        Placement(2, "b", "2", 0),
        Placement(3, "b", "3", 1),
    )
    topology = Topology(swapped)
    assert [topology.witness_of(rank) for rank in range(4)] == [3, 2, 1, 0]


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    topology = place([0, 1, 0, 1])
    assert topology.nodes == ("n0", "n1")
    assert [topology.witness_of(rank) for rank in range(4)] == [1, 0, 3, 2]
    assert topology.nodes_of([3, 1, 0]) == ("n0", "n1")
    assert (topology.node_of(3), topology.device_of(3)) == ("n1", "gpu-3")


@pytest.mark.parametrize("offset", [0, 3, -1])
def test_there_are_two_offsets(offset: int) -> None:
    with pytest.raises(ValueError, match="offset is 1 or 2"):
        place([0, 1]).witness_of(0, offset)


def test_one_rank_has_no_witness() -> None:
    topology = place([0])
    assert (topology.witness_of(0), topology.witness_of(0, 2), topology.owners_of(0)) == (None, None, ())


@pytest.mark.parametrize("ranks", [[1, 0], [0, 2], [1], [0, 0]])
def test_placements_are_those_of_all_ranks_in_order(ranks: list[int]) -> None:
    with pytest.raises(ConfigurationError, match=r"ranks 0\.\.\d in order"):
        Topology(tuple(Placement(rank, "a", str(rank), 0) for rank in ranks))


def test_a_device_on_two_nodes_is_a_wrong_name() -> None:
    with pytest.raises(ConfigurationError, match=r"device gpu-0 is claimed by node n0 and node n1.*BITWITNESS_NODE"):
        Topology((Placement(0, "n0", "gpu-0", 0), Placement(1, "n1", "gpu-0", 0)))
    Topology((Placement(0, "n0", "gpu-0", 0), Placement(1, "n0", "gpu-0", 1)))  # two ranks may share a device


def test_limits_say_what_cannot_be_had() -> None:
    assert place([0, 1, 2]).limits() == ()
    assert "one process" in place([0]).limits()[0]
    assert "one node" in place([0, 0, 0]).limits()[0]
    assert "two nodes" in place([0, 1]).limits()[0]
    mixed = list(place([0, 1, 2]).placements)
    mixed[1] = replace(mixed[1], model="A", software="3")
    topology = Topology(tuple(mixed))
    assert [limit.split(" (")[0] for limit in topology.limits()] == ["mixed device models", "mixed software versions"]
    assert "A, H" in topology.limits()[0]
    assert not topology.is_uniform
    assert place([0, 1]).is_uniform


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_a_topology_survives_json_and_pickle(nodes: list[int]) -> None:
    topology = place(nodes)
    assert topology.nodes  # what it has worked out by now changes nothing
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology


def test_a_topology_from_a_newer_version_can_be_read() -> None:
    record = {"rank": 0, "node": "a", "device": "b", "slot": 0, "rack": "7"}
    assert Topology.from_json([record]) == Topology((Placement(0, "a", "b", 0),))


# Names of nodes ------------------------------------------------------------------------------------------------------

ADDRESS = "10.0.0.7"


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-7")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", (ADDRESS, 0)), (10, 1, 6, "", ("fe80::1", 0, 0, 0))]
    )


def hyperpod(address: object = ADDRESS, instance: object = "i-0abc", groups: object = None) -> str:
    other = {"InstanceName": "a-1", "CustomerIpAddress": "10.0.0.8", "InstanceId": "i-0def"}
    own = {"InstanceName": "a-2", "CustomerIpAddress": address, "InstanceId": instance}
    return json.dumps(
        {"InstanceGroups": groups or [{"Name": "a", "Instances": [other]}, {"Name": "b", "Instances": [own]}]}
    )


def test_the_name_of_a_node_by_precedence(tmp_path: Path) -> None:
    config = tmp_path / "resource_config.json"
    config.write_text(hyperpod())
    environment = {"BITWITNESS_NODE": "one", "NODE_NAME": "two", "SLURMD_NODENAME": "three"}
    for name in ("one", "two", "three"):
        assert node_name(environment, config) == name
        environment = {key: value for key, value in environment.items() if value != name}
    assert node_name(environment, config) == "i-0abc"
    config.unlink()
    assert node_name(environment, config) == "host-7"
    assert node_name({"BITWITNESS_NODE": " ", "NODE_NAME": "", "SLURMD_NODENAME": "three\n"}, config) == "three"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"InstanceGroups": null}',
        '{"InstanceGroups": [{}]}',
        '{"InstanceGroups": [{"Instances": [7]}]}',
        '{"InstanceGroups": {"Instances": 7}}',
        hyperpod(address="10.0.0.9"),
        hyperpod(address=None),
        hyperpod(instance="a-2"),
        hyperpod(instance=None),
        hyperpod(instance=7),
    ],
)
def test_a_damaged_resource_config_falls_back_to_the_host(tmp_path: Path, content: str) -> None:
    config = tmp_path / "resource_config.json"
    config.write_text(content)
    assert node_name({}, config) == "host-7"


def test_a_resource_config_that_cannot_be_read_falls_back_to_the_host(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert node_name({}, tmp_path / "binary") == "host-7"
    assert node_name({}, tmp_path) == "host-7"


def test_a_host_without_an_address_falls_back_to_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise socket.gaierror("no address")

    lookup: Callable[..., Any] = refuse
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    config = tmp_path / "resource_config.json"
    config.write_text(hyperpod())
    assert node_name({}, config) == "host-7"


# In pods -------------------------------------------------------------------------------------------------------------

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def test_a_pod_that_was_not_told_its_node_is_no_node(tmp_path: Path) -> None:
    absent = tmp_path / "resource_config.json"
    assert node_name(IN_POD, absent) == "pod_host-7"
    assert not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", UNKNOWN + "a"), "a node of Kubernetes could be called so"
    assert valid_node("pod_host-7"), "an incident that has it must still reach people"
    assert node_name({**IN_POD, "NODE_NAME": "gpu-3"}, absent) == "gpu-3"
    assert node_name({**IN_POD, "BITWITNESS_NODE": "gpu-4", "NODE_NAME": "gpu-3"}, absent) == "gpu-4"
    assert node_name({**IN_POD, "SLURMD_NODENAME": "s1"}, absent) == "s1"
    absent.write_text(hyperpod())
    assert node_name(IN_POD, absent) == "i-0abc"


def test_the_name_of_the_pod_given_as_that_of_the_node(tmp_path: Path) -> None:
    wrong = {**IN_POD, "NODE_NAME": "train-0-x7k", "POD_NAME": "train-0-x7k"}
    assert node_name(wrong, tmp_path / "absent") == "pod_host-7"


def test_the_name_of_a_pod(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    assert pod_name({"POD_NAME": "a", "POD_NAMESPACE": "b", "HOSTNAME": "c"}, file) == ""
    assert pod_name(IN_POD, file) == "host-7"
    assert pod_name({**IN_POD, "HOSTNAME": "train-0"}, file) == "train-0"
    file.write_text("team\n")
    assert pod_name({**IN_POD, "HOSTNAME": "train-0"}, file) == "team/train-0"
    assert pod_name({**IN_POD, "HOSTNAME": "train-0", "POD_NAME": "train-0-x7k", "POD_NAMESPACE": "lab"}, file) == (
        "lab/train-0-x7k"
    )
    file.write_bytes(b"\xff")
    assert pod_name({**IN_POD, "HOSTNAME": "train-0"}, file) == "train-0"


def test_a_machine_is_told_by_its_kernel(tmp_path: Path) -> None:
    file = tmp_path / "boot_id"
    assert machine({}, file) == ""
    file.write_text("5f0a6b6e-8a5b-4f0c-9d0c-0c5d5d2b7a11\n")
    assert machine({}, file) == "5f0a6b6e-8a5b-4f0c-9d0c-0c5d5d2b7a11"
    assert machine({**IN_POD, "NODE_NAME": "gpu-3"}, file)
    assert machine({"BITWITNESS_NODE": "node-0"}, file) == ""
    assert machine({"SLURMD_NODENAME": "n0"}, file) == ""
    assert machine({"SLURMD_NODENAME": "n0", "BITWITNESS_NODE": "n0"}, file) == ""
    # What a supervisor has found out by itself and tells its workers is nobody's word.
    assert machine({**IN_POD, "BITWITNESS_NODE": "pod_host-7"}, file)
    assert machine({**IN_POD, "BITWITNESS_NODE": "gpu-3", "NODE_NAME": "gpu-3"}, file)
    assert machine({"BITWITNESS_NODE": "host-7"}, file)
    assert machine({**IN_POD, "BITWITNESS_NODE": "kind-worker", "NODE_NAME": ""}, file) == ""
    for garbage in ("", "?", "x" * 36):
        file.write_text(garbage)
        assert machine({}, file) == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the boot id is Linux's")
def test_the_machine_of_this_test() -> None:
    assert machine({}) == machine({}) != ""


def in_pods(nodes: list[str]) -> Topology:
    return Topology(
        tuple(Placement(r, node, f"GPU-{r}", 0, "H", "2", f"lab/train-{r}") for r, node in enumerate(nodes))
    )


def test_pods_are_kept_and_change_no_place() -> None:
    topology = in_pods(["a", "b", "c"])
    assert topology.limits() == ()
    assert topology.pods_of([2, 0]) == ("lab/train-0", "lab/train-2")
    assert place([0, 1, 2]).pods_of([0, 1]) == ()
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology
    assert all("pod" not in record for record in place([0, 1]).to_json()), "as files of older versions"
    moved = Topology(tuple(replace(one, pod=f"{one.pod}-again") for one in topology.placements))
    assert is_same_place(topology.to_json(), moved.to_json())
    older = [{name: value for name, value in record.items() if name != "pod"} for record in topology.to_json()]
    assert is_same_place(older, topology.to_json())
    for name, value in (("node", "d"), ("device", "GPU-9"), ("slot", 1), ("software", "3")):
        other = [dict(record) for record in topology.to_json()]
        other[1][name] = value
        assert not is_same_place(other, topology.to_json())
    assert not is_same_place(topology.to_json()[:2], topology.to_json())


def test_unknown_nodes_are_a_limit_with_its_remedy() -> None:
    (limit,) = in_pods(["a", "pod_train-1", "pod_train-2"]).limits()
    assert "not known in 2 pods (lab/train-1, lab/train-2)" in limit
    assert "no node is taken out" in limit
    assert "{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}" in limit
    assert "in 5 pods (lab/train-0, lab/train-1, lab/train-2, ...)" in in_pods(["pod_t"] * 5).limits()[-1]
    assert place([0, 1, 2]).limits() == ()
    on_slurm = Topology(tuple(Placement(r, f"pod_{r}", f"GPU-{r}", 0) for r in range(3)))
    assert on_slurm.limits() == (), "where there are no pods it is a name like any other"


# Jobs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, "slurm:4711"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "slurm:7_3"),
        ({"SLURM_JOB_ID": "4711; true"}, ""),
        ({"SLURM_JOB_ID": ""}, ""),
        ({"BITWITNESS_JOB": "job/train", "POD_NAMESPACE": "lab"}, "kubernetes:lab/job/train"),
        ({"BITWITNESS_JOB": "PyTorchJob/train.v2", "POD_NAMESPACE": "lab"}, "kubernetes:lab/pytorchjob/train.v2"),
        ({"BITWITNESS_JOB": " JobSet/a ", "POD_NAMESPACE": "lab"}, "kubernetes:lab/jobset/a"),
        ({"BITWITNESS_JOB": "TRAINJOB/a", "POD_NAMESPACE": "lab"}, "kubernetes:lab/trainjob/a"),
        ({"BITWITNESS_JOB": "job/train"}, ""),
        ({"BITWITNESS_JOB": "train", "POD_NAMESPACE": "lab"}, ""),
        ({"BITWITNESS_JOB": "deployment/train", "POD_NAMESPACE": "lab"}, ""),
        ({"BITWITNESS_JOB": "job/Train", "POD_NAMESPACE": "lab"}, ""),
        ({"BITWITNESS_JOB": "job/$(JOB_NAME)", "POD_NAMESPACE": "lab"}, ""),  # a variable that was not there
        ({"BITWITNESS_JOB": "job/a/b", "POD_NAMESPACE": "lab"}, ""),
        ({"BITWITNESS_JOB": "job/" + "a" * 300, "POD_NAMESPACE": "lab"}, ""),
        ({"BITWITNESS_JOB": "job/train", "POD_NAMESPACE": "LAB"}, ""),
        ({"BITWITNESS_JOB": "job/train", "POD_NAMESPACE": "lab", "SLURM_JOB_ID": "7"}, "slurm:7"),
        ({"BITWITNESS_JOB": "job/train", "POD_NAMESPACE": "lab", "SLURM_JOB_ID": "?"}, "kubernetes:lab/job/train"),
    ],
)
def test_the_job_of_a_scheduler(environment: dict[str, str], job: str, tmp_path: Path) -> None:
    assert scheduler_job(environment, tmp_path / "absent") == job


def test_the_namespace_of_a_job_is_that_of_its_pod(tmp_path: Path) -> None:
    file = tmp_path / "namespace"
    file.write_text("team")
    assert scheduler_job({**IN_POD, "BITWITNESS_JOB": "job/train"}, file) == "kubernetes:team/job/train"
    assert scheduler_job({"BITWITNESS_JOB": "job/train"}, file) == "", "outside of a pod the file is somebody else's"


@pytest.mark.parametrize("name", ["a", "a-b", "a.b", "a" * 63, ".".join(["a" * 63] * 3)])
def test_names_of_jobs(name: str) -> None:
    assert is_kubernetes_job(f"kubernetes:lab/job/{name}")


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", ".a", "a.", "a..b", "A", "a_b", "a b", "a\n", "a" * 64, "ä", ".".join(["a" * 63] * 4)]
)
def test_what_is_no_name_of_a_job(name: str) -> None:
    assert not is_kubernetes_job(f"kubernetes:lab/job/{name}")


@pytest.mark.parametrize(
    ("said", "namespace", "wrong"),
    [
        ("", "ml", ""),
        ("PyTorchJob/train", "ml", ""),
        ("train", "ml", "names no job: it is KIND/NAME"),
        ("pytorchjob/$(JOB_NAME)", "ml", "names no job"),
        ("PyTorchJobs/train", "ml", "names no job"),
        ("job/train", "", "names no job, and POD_NAMESPACE"),
    ],
)
def test_a_job_that_is_named_wrongly_is_told(tmp_path: Path, said: str, namespace: str, wrong: str) -> None:
    found = unclear_job({"BITWITNESS_JOB": said, "POD_NAMESPACE": namespace}, tmp_path / "none")
    assert (wrong in found) if wrong else found == ""
