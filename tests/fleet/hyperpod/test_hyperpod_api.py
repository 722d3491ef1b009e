"""The real botocore client against the fake: what is refused, how it is said, and what the fake itself holds to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Call
from bitwitness.fleet.clusters.fake import FakeCluster
from bitwitness.fleet.clusters.hyperpod import HyperPodCluster, from_settings
from bitwitness.fleet.clusters.hyperpod_api import NotDone, SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from bitwitness.fleet.clusters.hyperpod_names import ResourceConfig
from bitwitness.fleet.clusters.slurm import SlurmCluster
from bitwitness.fleet.clusters.slurm_command import Answer
from tests.fleet.hyperpod.pod import act, words
from tests.fleet.incidents import NOW

REPLACE, REBOOT, CHECK = "BatchReplaceClusterNodes", "BatchRebootClusterNodes", "StartClusterHealthCheck"
SETTINGS = {"kind": "hyperpod", "cluster_name": "pod", "orchestrator": "slurm"}


class Time:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def world(fake: FakeSageMaker, time: Time) -> World:
    fake.world = World({"gpu": 4, "controller": 1}, time, orchestrator="slurm")
    return fake.world


@pytest.fixture(scope="module")
def raw(shared: SageMakerApi) -> Any:
    """A client as users have it."""
    client: Any = boto3.client
    return client("sagemaker")


def replace(*nodes: str, cluster: str = "pod") -> Call:
    return Call(("sagemaker", REPLACE), {"ClusterName": cluster, "NodeIds": list(nodes)})


# What SageMaker says --------------------------------------------------------------------------------------------------


def test_partial_failure_within_a_success(world: World, api: SageMakerApi) -> None:
    first, second, third, *_ = world.now()
    world.fail(second.id, "InstanceIdInUse")
    with pytest.raises(NotDone, match=rf"{second.id}: InstanceIdInUse.*done: {first.id}, {third.id}") as caught:
        api.carry_out(replace(first.id, second.id, third.id))
    assert caught.value.answer.successful == (first.id, third.id)
    assert not caught.value.refused  # some of it happened
    with pytest.raises(NotDone, match=r"InvalidInstanceStatus: .*tried again") as caught:
        api.carry_out(replace(first.id))
    assert caught.value.refused


def test_a_wrong_id_is_told(world: World, api: SageMakerApi) -> None:
    with pytest.raises(NotDone, match="the cluster has no instance of this id"):
        api.carry_out(replace("i-0badbadbadbadbad0"))
    assert api.instance("i-0badbadbadbadbad0") is None
    world.name, world.arn = "another", ""  # a cluster that is not there says nothing about its machines
    with pytest.raises(ClusterError, match="Cluster pod was not found"):
        api.instance(world.now()[0].id)


def test_an_act_is_never_sent_twice_and_a_read_is(world: World, api: SageMakerApi) -> None:
    machine = world.now()[0]
    for code in ("ThrottlingException", "InternalFailure"):
        world.refuse(code, 1, REPLACE)
        with pytest.raises(ClusterError) as caught:
            api.carry_out(replace(machine.id))
        assert caught.value.refused is (code == "ThrottlingException")
    assert world.count(REPLACE) == 2
    world.refuse("ThrottlingException", 1, "DescribeClusterNode")
    assert api.instance(machine.id) is not None
    assert world.count("DescribeClusterNode") == 2


def test_all_pages_are_listed(world: World, api: SageMakerApi) -> None:
    world.page = 2
    assert [one.id for one in api.instances()] == [one.id for one in world.now()]
    assert world.count("ListClusterNodes") == 3


def test_a_list_without_an_end_is_no_list(world: World, api: SageMakerApi) -> None:
    world.say = '{"ClusterNodeSummaries": [], "NextToken": "1"}'
    with pytest.raises(ClusterError, match="the list does not end"):
        api.instances()
    assert world.count("ListClusterNodes") == 2


def test_an_answer_without_a_list_is_not_that_there_is_nothing(world: World, api: SageMakerApi) -> None:
    for world.say in ("{}", "<html>a proxy</html>"):
        for ask in (api.instances, api.cluster):
            with pytest.raises(ClusterError, match="is not understood"):
                ask()


@pytest.mark.parametrize("nonsense", ["[]", "null", "3", '{"Successful": 3, "Failed": [4]}', '{"InstanceGroups": [3]}'])
def test_no_answer_is_so_strange_that_it_is_no_error_of_the_cluster(
    world: World, api: SageMakerApi, nonsense: str
) -> None:
    machine, world.say = world.now()[0].id, nonsense
    asks: list[Callable[[], object]] = [api.cluster, api.instances, lambda: api.instance(machine)]
    asks.append(lambda: api.carry_out(replace(machine)))
    for ask in asks:
        with suppress(ClusterError):
            ask()


def test_what_is_denied_names_the_action_and_the_cluster(world: World, api: SageMakerApi) -> None:
    api.cluster()
    asks: dict[str, Callable[[], object]] = {
        "ListClusterNodes": api.instances,
        "DescribeCluster": api.cluster,
        REPLACE: lambda: api.carry_out(replace(world.now()[0].id)),
    }
    for operation, ask in asks.items():
        world.denied = {f"sagemaker:{operation}"}
        with pytest.raises(ClusterError, match=f"needs sagemaker:{operation} on arn:aws:sagemaker:us-west-2:1111"):
            ask()


@pytest.mark.parametrize(
    "call",
    [
        Call(("sagemaker", "DeleteCluster"), {"ClusterName": "pod"}),
        Call(("sagemaker", REPLACE)),
        Call(("sagemaker", REPLACE), {"ClusterName": "pod", "NodeIds": []}),
        Call(("sagemaker", REPLACE), {"ClusterName": "pod", "NodeIds": ["gpu-1"]}),
        Call(("sagemaker", REPLACE), {"ClusterName": "pod", "NodeIds": ["i-12345678"], "NodeLogicalIds": ["a"]}),
        Call(
            ("sagemaker", CHECK),
            {
                "ClusterName": "pod",
                "DeepHealthCheckConfigurations": [{"InstanceGroupName": "gpu", "DeepHealthChecks": ["InstanceStress"]}],
            },
        ),
        replace("i-12345678", cluster="other"),
    ],
    ids=str,
)
def test_no_other_request_is_sent(world: World, api: SageMakerApi, call: Call) -> None:
    with pytest.raises(ConfigurationError):
        api.carry_out(call)
    assert world.requests == 0


# Setting up -----------------------------------------------------------------------------------------------------------


def test_without_credentials(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    lonely = SageMakerApi("pod", timeout=5)
    with pytest.raises(ClusterError, match="no credentials of AWS that can be used") as caught:
        lonely.instances()
    assert caught.value.refused


def test_without_a_region_or_with_a_wrong_profile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nobody"):
        SageMakerApi("pod", profile="nobody")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(ConfigurationError, match=r"no region of AWS is known: set cluster\.region"):
        SageMakerApi("pod")


def test_nobody_listens_or_nobody_answers(api: SageMakerApi) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(ClusterError, match="cannot be reached") as caught:
            SageMakerApi("pod", endpoint_url=url, timeout=5).carry_out(replace("i-12345678"))
        assert caught.value.refused
        deaf.listen()
        with pytest.raises(ClusterError, match=r"not answered within 0\.2 s") as caught:
            SageMakerApi("pod", endpoint_url=url, timeout=0.2).carry_out(replace("i-12345678"))
        assert not caught.value.refused  # it may have been done


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nodes": 3}, "unknown settings"),
        ({"orchestrator": "k8s"}, '"eks" or "slurm"'),
        ({"orchestrator": ""}, '"eks" or "slurm"'),
        ({"by": "labels"}, "not for slurm"),
        ({"orchestrator": "eks", "by": "reason"}, "not for eks"),
        ({"deep_health_check": "InstanceStress"}, "list of names"),
        ({"deep_health_check": ["Stress"]}, "no deep health check"),
        ({"timeout": 0}, "number of seconds"),
        ({"region": 3}, "is a text"),
        ({"endpoint_url": "foo"}, "reads https://HOST"),
        ({"endpoint_url": "ftp://host"}, "reads https://HOST"),
        ({"endpoint_url": "http://host:99999"}, "reads https://HOST"),
        ({"cluster_name": "a_b"}, "no name of a HyperPod cluster"),
        ({"cluster_name": "", "resource_config": "/nonexistent/x"}, "which HyperPod cluster"),
        ({"kubernetes": {"taint": ""}}, "is not for orchestrator"),
        ({"slurm": {"hyperpod": True}}, "are set here"),
        ({"slurm": 3}, "is a table"),
        ({"slurm": {"users": "x"}}, "unknown settings of a Slurm cluster"),
    ],
)
def test_wrong_settings(api: SageMakerApi, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_settings(SETTINGS | settings)


def test_no_password_in_an_address(api: SageMakerApi) -> None:
    with pytest.raises(ConfigurationError, match="has a name or a password in it") as caught:
        from_settings(SETTINGS | {"endpoint_url": "http://u:geheim@127.0.0.1:1"})
    assert "geheim" not in str(caught.value)


def test_one_that_hangs_is_not_asked_for_a_minute(world: World, api: SageMakerApi) -> None:
    passed, takes, asked = [0.0], [4.9], [0]
    machine, find = world.now()[0], api.instances
    cluster = HyperPodCluster(FakeCluster([machine.slurm]), api, ticks=lambda: passed[0])
    world.is_away = True

    def slow() -> Any:
        asked[0] += 1
        passed[0] += takes[0]
        return find()

    setattr(api, "instances", slow)  # noqa: B010
    try:
        for later, seconds, count in ((0, 4.9, 1), (0, 5.0, 2), (0, 5.0, 2), (59.9, 5.0, 2), (0.2, 5.0, 3)):
            passed[0] += later
            takes[0] = seconds
            cluster.look(machine.slurm)
            assert asked[0] == count
    finally:
        delattr(api, "instances")


def test_the_name_of_the_cluster_from_resource_config(api: SageMakerApi, tmp_path: Path) -> None:
    path = tmp_path / "resource_config.json"
    path.write_text('{"ClusterConfig": {"ClusterName": "pod"}, "InstanceGroups": []}')
    made = from_settings({"kind": "hyperpod", "orchestrator": "slurm", "resource_config": str(path)})
    assert (made.api.name, made.scheduler, made.orchestrator) == ("pod", "slurm", "slurm")


# Slurm's own words ----------------------------------------------------------------------------------------------------


class Scontrol:
    """As much of Slurm as one node needs."""

    def __init__(self, node: str) -> None:
        self.node, self.state, self.reason, self.said = node, "IDLE", "", list[str]()

    def __call__(self, words: Any, timeout: float) -> Answer:
        if "update" in words:
            self.said.append(" ".join(words))
            self.state, self.reason = "IDLE+FAIL", words[-1].removeprefix("reason=")
            return Answer(0, "")
        reason = f"   Reason={self.reason} [root@2026-11-29T12:00:00]\n" if self.reason else ""
        return Answer(0, f"NodeName={self.node} State={self.state} \n   BootTime=2026-11-29T09:00:00\n{reason}")


def test_by_reason_the_words_are_exact_and_the_machine_tells_the_end(
    world: World, api: SageMakerApi, time: Time
) -> None:
    machine = world.now()[1]
    scontrol = Scontrol(machine.slurm)
    cluster = HyperPodCluster(SlurmCluster(scontrol, hyperpod=True), api, by="reason")
    before = cluster.look(machine.slurm)
    for call in cluster.plan(act("replace", machine.slurm), before):
        cluster.carry_out(call)
    assert scontrol.said == [f"scontrol update node={machine.slurm} state=fail reason=Action:Replace"]
    now = cluster.look(machine.slurm)
    assert (cluster.landed(act("replace", machine.slurm), before, now), now.awaits) == ("yes", "Action:Replace")
    assert world.count(REPLACE) == 0
    world.answer(REPLACE, {"ClusterName": "pod", "NodeIds": [machine.id]})  # HyperPod does what it was told
    time.now += timedelta(hours=1)
    scontrol.state, scontrol.reason = "IDLE", ""
    new = cluster.look(machine.slurm)
    assert new.instance not in ("", machine.id)
    assert (cluster.landed(act("replace", machine.slurm), before, new), new.awaits) == ("yes", "")


def test_a_stale_resource_config_is_not_believed(world: World, api: SageMakerApi) -> None:
    one, two, *_ = world.now()
    inner = FakeCluster([one.slurm])
    stale = ResourceConfig("pod", "", {one.address: two.id})
    assert HyperPodCluster(inner, api, config=stale).look(one.slurm).instance == one.id


def test_a_machine_whose_name_and_address_contradict_is_not_guessed(world: World, api: SageMakerApi) -> None:
    machine = world.now()[1]
    name, other = machine.slurm, "10.0.9.9"
    machine.called, machine.address = machine.address, other  # the list tells only names
    for config in (None, ResourceConfig("pod", "", {machine.called: machine.id})):
        cluster = HyperPodCluster(FakeCluster([name]), api, config=config)
        state = cluster.look(name)
        assert state.instance == ""
        with pytest.raises(ConfigurationError, match=rf"{machine.id} is listed as it, .* the address {other}"):
            cluster.plan(act("replace", name), state)
        assert words(cluster.plan(act("drain", name), state)) == ["fake drain"]


def test_when_a_machine_was_launched_the_list_tells_where_the_details_do_not(world: World, api: SageMakerApi) -> None:
    details, machine = world._node, world.now()[1]

    def without(body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = details(body)["NodeDetails"]
        return {"NodeDetails": {key: part for key, part in found.items() if key != "LaunchTime"}}

    setattr(world, "_node", without)  # noqa: B010
    machine.launched = NOW + timedelta(minutes=5)
    cluster = HyperPodCluster(FakeCluster([machine.slurm]), api)
    with pytest.raises(ConfigurationError, match="not the machine that was blamed"):
        cluster.plan(act("replace", machine.slurm), cluster.look(machine.slurm))


def test_an_answer_about_another_machine_is_none(world: World, api: SageMakerApi) -> None:
    one, two, *_ = world.now()
    world.machines[one.id] = two
    with pytest.raises(ClusterError, match=f"DescribeClusterNode of {one.id}: the answer is about {two.id}"):
        api.instance(one.id)


def test_a_controller_node_is_never_replaced(world: World, api: SageMakerApi) -> None:
    controller = world.now()[-1]
    cluster = HyperPodCluster(FakeCluster([controller.slurm]), api)
    with pytest.raises(ConfigurationError, match="Controller group"):
        cluster.plan(act("replace", controller.slurm), cluster.look(controller.slurm))


def test_a_replacement_that_is_asked_for_late_finds_the_machine_gone(
    world: World, api: SageMakerApi, time: Time
) -> None:
    machine = world.now()[1]
    cluster = HyperPodCluster(FakeCluster([machine.slurm]), api)
    calls = cluster.plan(act("replace", machine.slurm), cluster.look(machine.slurm))
    assert words(calls) == ["fake drain", f"sagemaker {REPLACE}"]
    cluster.carry_out(calls[-1])
    time.now += timedelta(hours=1)
    assert "no more in the cluster" in cluster.carry_out(calls[-1])
    assert world.done == [("replace", machine.id)]  # what has taken its place is not touched
    with pytest.raises(NotDone):  # another process has never seen it
        HyperPodCluster(FakeCluster([machine.slurm]), api).carry_out(calls[-1])


# Beforehand -----------------------------------------------------------------------------------------------------------


def checked(cluster: HyperPodCluster, kind: str, node: str) -> dict[str, tuple[str, str]]:
    state = cluster.look(node)
    found = cluster.check(act(kind, node), state, cluster.plan(act(kind, node), state))
    return {one.what: (one.outcome, one.text + " " + one.remedy) for one in found}


def test_what_would_fail_in_the_night(world: World, api: SageMakerApi) -> None:
    machine = world.now()[0]
    cluster = HyperPodCluster(FakeCluster([machine.slurm]), api)
    found = checked(cluster, "replace", machine.slurm)
    assert found[f"permission sagemaker:{REPLACE}"][0] == "good"
    assert found[f"machine of {machine.slurm}"][0] == "good"
    assert found["platform software"][0] == found["quota"][0] == "unknown"
    assert [what for what, (outcome, _) in found.items() if outcome == "bad"] == []
    world.denied = {f"sagemaker:{REPLACE}"}
    outcome, text = checked(cluster, "replace", machine.slurm)[f"permission sagemaker:{REPLACE}"]
    assert (outcome, f"allow sagemaker:{REPLACE} on arn:aws:sagemaker" in text) == ("bad", True)
    world.denied = {"iam:SimulatePrincipalPolicy"}
    outcome, text = checked(cluster, "replace", machine.slurm)["permissions to act"]
    assert (outcome, f"sagemaker:{REPLACE}" in text) == ("unknown", True)
    world.denied, world.status = {"sagemaker:ListClusterNodes"}, "Updating"
    found = checked(cluster, "drain", machine.slurm)
    assert (found["permission to look"][0], found["HyperPod cluster pod"][0]) == ("bad", "unknown")
    world.denied, world.groups["gpu"] = set(), 5  # one short
    found = checked(cluster, "drain", machine.slurm)
    assert [what for what, (outcome, _) in found.items() if outcome == "bad"] == []
    found = checked(cluster, "replace", machine.slurm)
    assert [what for what, (outcome, _) in found.items() if outcome == "bad"] == ["HyperPod cluster pod", "capacity"]
    world.is_away = True
    assert "can be reached from here" in checked(cluster, "drain", machine.slurm)["HyperPod cluster pod"][1]
    assert world.done == []


def test_a_drain_with_checks_needs_the_permission_for_them(world: World, api: SageMakerApi) -> None:
    machine = world.now()[0]
    cluster = HyperPodCluster(FakeCluster([machine.slurm]), api, deep_health_check=["InstanceStress"])
    assert f"permission sagemaker:{CHECK}" in checked(cluster, "drain", machine.slurm)


@pytest.mark.parametrize(
    ("script", "outcome", "says"),
    [
        ("srun --auto-resume=1 python train.py", "good", "sees none after silent corruption"),
        ("srun python train.py", "good", "does not call srun with"),
        ("# srun --auto-resume=1\nsrun python train.py", "good", "does not call srun with"),
        (None, "unknown", "cannot be seen from here"),
    ],
)
def test_auto_resume_on_slurm(world: World, api: SageMakerApi, script: str | None, outcome: str, says: str) -> None:
    show: Callable[[str], str] | None = None if script is None else lambda job: script
    inner = FakeCluster([world.now()[0].slurm])
    inner.add_job("7")
    (found,) = [one for one in HyperPodCluster(inner, api, script=show).check_job("7") if one.what == "auto-resume"]
    assert (found.outcome, says in found.text) == (outcome, True)


# The fake itself ------------------------------------------------------------------------------------------------------


def refused(ask: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as caught:
        ask()
    return str(caught.value.response["Error"]["Code"])


def test_the_fake_refuses_what_the_service_refuses(world: World, raw: Any) -> None:
    ids = [f"i-{number:017x}" for number in range(1, 27)]
    batch = raw.batch_replace_cluster_nodes
    assert refused(lambda: batch(ClusterName="pod", NodeIds=ids)) == "ValidationException"
    assert refused(lambda: batch(ClusterName="pod", NodeIds=["gpu-1"])) == "ValidationException"
    assert refused(lambda: batch(ClusterName="pod")) == "ValidationException"
    assert refused(lambda: batch(ClusterName="nope", NodeIds=ids[:1])) == "ResourceNotFound"
    wrong = [{"InstanceGroupName": "nope", "DeepHealthChecks": ["InstanceStress"]}]
    check = raw.start_cluster_health_check
    assert refused(lambda: check(ClusterName="pod", DeepHealthCheckConfigurations=wrong)) == "ValidationException"
    controller = world.now()[-1].id
    (failed,) = batch(ClusterName="pod", NodeIds=[controller])["Failed"]
    assert failed["ErrorCode"] == "InvalidInstanceStatus"


def test_the_fake_tells_what_happened_where_provisioning_is_continuous(world: World, raw: Any, time: Time) -> None:
    machine = world.now()[0]
    raw.batch_replace_cluster_nodes(ClusterName="pod", NodeIds=[machine.id])
    time.now += timedelta(hours=1)
    told = [one["Description"] for one in raw.list_cluster_events(ClusterName="pod", NodeId=machine.id)["Events"]]
    assert told == ["the machine is gone", "replacement was asked for"]
    world.continuous = False
    assert refused(lambda: raw.list_cluster_events(ClusterName="pod")) == "ValidationException"


def test_a_failed_deep_health_check_replaces_the_machine(world: World, raw: Any, time: Time) -> None:
    machine = world.now()[0]
    world.fail_checks()
    one = {"InstanceGroupName": "gpu", "InstanceIds": [machine.id], "DeepHealthChecks": ["InstanceStress"]}
    raw.start_cluster_health_check(ClusterName="pod", DeepHealthCheckConfigurations=[one])
    assert raw.describe_cluster_node(ClusterName="pod", NodeId=machine.id)["NodeDetails"]["InstanceStatus"] == {
        "Status": "DeepHealthCheckInProgress"
    }
    time.now += timedelta(hours=1, minutes=1)
    assert machine.id in [one.id for one in world.now()]
    assert world.machines[machine.id].status == "ShuttingDown"
    time.now += timedelta(hours=1)
    assert machine.id not in [one.id for one in world.now()]
