"""From an incident to a machine in the bad one's place, by a controller, behind the real botocore client."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.base import Call
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import NO_CAPACITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Placement, Topology
from tests.fleet.hyperpod.pod import Pod
from tests.fleet.incidents import NOW

REPLACE, REBOOT, CHECK = "BatchReplaceClusterNodes", "BatchRebootClusterNodes", "StartClusterHealthCheck"


def test_on_eks_a_node_goes_and_another_one_comes(eks: Pod) -> None:
    eks.incident()
    eks.minutes(1)
    assert eks.nodes.calls() == [("drain", eks.node)]
    assert eks.world.asked(REPLACE) == [{"ClusterName": "pod", "NodeIds": [eks.machine]}]
    assert eks.statuses() == {eks.node: "done"}
    assert eks.trail("done") == [f"{eks.node} is DRAINED ({eks.machine} ShuttingDown)"]
    eks.minutes(20)  # its node is gone, and none has come
    assert eks.nodes.look(eks.node).service == "absent"
    assert eks.trail("over") == []
    eks.minutes(15)
    assert eks.trail("over") == [f"{eks.node} waits for no replace any more: it is gone ({eks.machine} NotFound)"]
    assert [one.status for one in eks.world.now()] == ["Running"] * 4
    assert eks.machine not in [one.id for one in eks.world.now()]
    assert eks.pod.look(eks.world.now()[-1].eks).service == "in"
    assert eks.world.count(REPLACE) == 1
    asked = eks.world.requests
    eks.rounds(5, timedelta(minutes=10))
    assert eks.world.requests == asked  # it never comes back, and is asked about no more


def test_on_slurm_the_node_stays_out_with_another_machine(slurm: Pod) -> None:
    slurm.incident()
    slurm.minutes(1)
    assert slurm.world.asked(REPLACE) == [{"ClusterName": "pod", "NodeIds": [slurm.machine]}]
    slurm.minutes(40)
    now = slurm.pod.look(slurm.node)
    assert (now.service, now.ours, now.awaits) == ("out", True, "")
    assert now.instance not in ("", slurm.machine)
    assert len(slurm.trail("over")) == 1
    assert slurm.world.count(REPLACE) == 1
    slurm.minutes(5)
    clear(slurm.state, slurm.pod, slurm.node, "another machine", "a person")
    assert slurm.pod.look(slurm.node).service == "in"


def test_a_new_process_knows_for_which_group_it_waits(eks: Pod) -> None:
    eks.world.groups["cpu"] = 2  # short of machines all the time, which is no matter of ours
    eks.incident()
    eks.minutes(20)
    assert eks.nodes.look(eks.node).service == "absent"
    eks.begin()
    eks.minutes(5)
    assert eks.trail("over") == []  # none has come in its place yet
    eks.minutes(10)
    assert eks.trail("over") == [f"{eks.node} waits for no replace any more: it is gone ({eks.machine} NotFound)"]
    eks.begin()  # who was told of no act on it does not guess
    seen = eks.pod.look(eks.node)
    assert (seen.service, seen.awaits) == ("absent", "")
    eks.world.groups["gpu"] = 5
    for intent in eks.controller.book.intents():
        eks.pod.recall(intent.act, intent.before)
    assert eks.pod.look(eks.node).awaits == "a machine in its place: group gpu has 4 of 5 running"
    assert "group it was is not known, so whether another one has come in its place cannot be told" in seen.raw


def test_a_slow_replacement_is_said_after_90_minutes_and_over_when_it_comes(slurm: Pod) -> None:
    slurm.world.coming = timedelta(minutes=110)
    slurm.incident()
    slurm.rounds(17, timedelta(minutes=5))
    before = len(slurm.critical())
    slurm.rounds(2, timedelta(minutes=5))
    assert len(slurm.critical()) == before + 1
    assert "has not replaced it within 90 minutes" in slurm.texts()
    slurm.rounds(6, timedelta(minutes=5))
    assert any("waits for no replace any more" in one for one in slurm.trail("over"))
    assert slurm.world.count(REPLACE) == 1


@pytest.mark.parametrize("where", ["eks", "slurm"])
def test_a_lack_of_capacity_is_said_at_once(where: str, request: pytest.FixtureRequest) -> None:
    pod: Pod = request.getfixturevalue(where)
    pod.world.coming = timedelta(minutes=5)
    pod.world.lack_capacity()
    pod.incident()
    pod.minutes(12)
    said = [one for one in pod.trail("trouble") if NO_CAPACITY in one]
    assert len(said) == 1
    assert "Trying again does not heal this" in said[0]
    pod.world.lack_capacity("")
    pod.minutes(20)
    assert any(NO_CAPACITY in one for one in pod.trail("over"))
    assert any("waits for no replace" in one for one in pod.trail("over"))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("ThrottlingException", "was throttled by AWS"),
        ("ResourceLimitExceeded", "ResourceLimitExceeded: instance-limit"),
    ],
)
def test_what_is_refused_is_asked_for_again(eks: Pod, code: str, says: str) -> None:
    eks.world.refuse(code, 2, REPLACE, "instance-limit")
    eks.incident()
    eks.minutes(1)
    assert eks.nodes.look(eks.node).service == "out"  # that comes first, and stays
    assert eks.statuses() == {eks.node: "failed"}
    assert says in eks.kept()[0].why
    eks.minutes(6)
    assert eks.statuses() == {eks.node: "done"}
    assert eks.world.count(REPLACE) == 3
    assert eks.nodes.calls() == [("drain", eks.node)]


@pytest.mark.parametrize("code", ["InvalidInstanceStatus", "InstanceIdInUse", "InternalServerError"])
def test_a_success_that_did_nothing_is_a_failure(eks: Pod, code: str) -> None:
    eks.world.fail(eks.machine, code)
    eks.incident()
    eks.minutes(1)
    assert eks.statuses() == {eks.node: "failed"}
    assert f"{eks.machine}: {code}" in eks.kept()[0].why
    assert "tried again" in eks.kept()[0].why
    eks.minutes(6)
    assert eks.statuses() == {eks.node: "done"}


def test_a_missing_permission_is_named_and_the_node_is_out_meanwhile(eks: Pod) -> None:
    eks.world.denied.add(f"sagemaker:{REPLACE}")
    eks.incident()
    eks.minutes(3)
    assert "the role needs sagemaker:BatchReplaceClusterNodes on arn:aws:sagemaker:us-west-2:" in eks.kept()[0].why
    assert eks.nodes.look(eks.node).service == "out"
    eks.world.denied.clear()
    eks.minutes(10)
    assert eks.statuses() == {eks.node: "done"}


def test_a_node_is_taken_out_also_while_sagemaker_is_away(slurm: Pod) -> None:
    slurm.world.is_away = True
    slurm.incident()
    slurm.minutes(2)
    assert slurm.nodes.look(slurm.node).service == "out"
    assert any("SageMaker cannot be asked about machines" in one for one in slurm.trail("trouble"))
    slurm.world.is_away = False
    slurm.minutes(6)
    assert slurm.statuses() == {slurm.node: "done"}
    assert slurm.world.count(REPLACE) == 1


@pytest.mark.parametrize("kind", ["drain", "replace"])
def test_a_machine_that_came_after_the_incident_is_left_alone(slurm: Pod, kind: str) -> None:
    slurm.signals = slurm.signals if kind == "replace" else []
    slurm.world.machines[slurm.machine].launched = slurm.clock.wall + timedelta(minutes=5)
    slurm.incident()
    slurm.clock.move(timedelta(minutes=10))
    slurm.minutes(2)
    assert slurm.kept()[0].proposal.act == kind
    assert (slurm.world.count(REPLACE), slurm.nodes.calls()) == (0, [])
    assert "not the machine that was blamed" in slurm.kept()[0].why
    assert slurm.pod.look(slurm.node).service == "in"


def test_a_reboot_is_asked_for_once_and_the_node_stays_out(slurm: Pod) -> None:
    reboot = Signal(
        "nvml",
        "nvml:recovery-action",
        f"GPU-{slurm.node}-0",
        stamp(NOW),
        "loud",
        "weak",
        "the driver asks for: reboot the node;",
        host=slurm.node,
    )
    slurm.signals = [reboot]
    slurm.incident()
    slurm.minutes(1)
    assert slurm.kept()[0].proposal.act == "reboot"
    assert slurm.world.asked(REBOOT) == [{"ClusterName": "pod", "NodeIds": [slurm.machine]}]
    slurm.minutes(5)
    assert slurm.statuses() == {slurm.node: "done"}
    assert slurm.world.count(REBOOT) == 1
    assert slurm.pod.look(slurm.node).service == "out"


def test_the_same_silicon_in_another_node_is_said_loudly(eks: Pod) -> None:
    eks.world.same_silicon = True
    eks.incident()
    eks.rounds(8, timedelta(minutes=5))
    old, new = eks.world.machines, eks.world.now()[-1]
    assert new.silicon == "silicon-2", old
    # A job starts there, and sees which device it has: that of the machine that was taken out.
    device = f"GPU-{eks.node}-0"
    where = Topology((Placement(0, new.eks, device, 0, "H100", "torch 2.13"),))
    record = {"placement": where.to_json(), "started": eks.clock.wall.isoformat()}
    RunFiles(eks.run_dir).write_run(record)
    eks.minutes(2)
    assert any("THE SAME SILICON IS BACK" in one for one in eks.trail("returned"))
    assert eks.pod.look(new.eks).service == "out"  # though its machine came after the incident


@pytest.mark.parametrize("kind", ["eks", "slurm"])
def test_a_deep_health_check_is_asked_for_once_and_a_pass_returns_nothing(
    tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi, kind: str
) -> None:
    pod = Pod(tmp_path, api, kind, deep_health_check=["InstanceStress"])
    fake.world = pod.world
    pod.signals = []  # no sign of bad memory: a drain
    pod.nodes.add_job("7", [pod.node])
    pod.incident()
    pod.minutes(3)
    assert pod.world.count(CHECK) == 0  # a job runs there
    pod.nodes.add_job("7", [pod.node], state="ended")
    with pod.nodes._changing() as cluster:
        cluster["nodes"][pod.node]["service"] = "out"
    pod.minutes(5)
    group = {"InstanceGroupName": "gpu", "InstanceIds": [pod.machine], "DeepHealthChecks": ["InstanceStress"]}
    assert pod.world.asked(CHECK) == [{"ClusterName": "pod", "DeepHealthCheckConfigurations": [group]}]
    pod.begin()
    pod.rounds(9, timedelta(minutes=10))
    assert pod.world.count(CHECK) == 1
    now = pod.pod.look(pod.node)
    assert (now.service, now.ours) == ("out", True)
    assert "Running" in now.raw
    pod.end()


def checking(folder: Path, fake: FakeSageMaker, api: SageMakerApi) -> Pod:
    """On Slurm, with deep health checks and no sign of bad memory."""
    pod = Pod(folder, api, "slurm", deep_health_check=["InstanceStress"])
    fake.world, pod.signals = pod.world, []
    return pod


def test_a_deep_health_check_of_which_nothing_is_seen_is_asked_for_once_and_told(
    tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi
) -> None:
    pod = checking(tmp_path, fake, api)
    pod.world.check_takes = timedelta(0)  # it is over before anybody looks
    pod.incident()
    pod.minutes(25)
    assert pod.trail("trouble") == []
    pod.rounds(2, timedelta(minutes=10))
    assert pod.world.count(CHECK) == 1
    (said,) = pod.trail("trouble")
    assert f"{pod.node} ({pod.machine}), and nothing shows that one has run" in said
    pod.end()


def test_a_controller_that_was_down_during_a_check_asks_for_no_second_one(
    tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi
) -> None:
    pod = checking(tmp_path, fake, api)
    pod.incident()
    pod.minutes(1)
    assert pod.world.count(CHECK) == 1
    pod.clock.move(timedelta(hours=2))
    pod.begin()
    pod.minutes(3)
    assert pod.world.count(CHECK) == 1
    pod.end()


def test_a_node_that_a_person_returns_just_then_is_not_drained_by_a_note(
    tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi
) -> None:
    pod = checking(tmp_path, fake, api)
    carry_out, calls = pod.pod.carry_out, []

    def carried(call: Call) -> str:
        said = carry_out(call)
        calls.append(call.words[1])
        pod.nodes.take_in(pod.node) if call.words[1] == CHECK else None
        return said

    setattr(pod.pod, "carry_out", carried)  # noqa: B010
    pod.incident()
    pod.minutes(4)
    assert calls == ["drain", CHECK]
    assert (pod.nodes.look(pod.node).service, pod.nodes.calls()) == ("in", [("drain", pod.node)])
    pod.end()


@pytest.mark.parametrize("where", ["eks", "slurm"])
def test_a_machine_that_is_only_rebooted_is_not_taken_for_one_that_is_replaced(
    where: str, request: pytest.FixtureRequest
) -> None:
    pod: Pod = request.getfixturevalue(where)
    pod.world.fail(pod.machine, "InvalidInstanceStatus", 9)
    pod.incident()
    pod.minutes(1)
    pod.world.machines[pod.machine].status = "Pending"  # by HyperPod itself
    pod.minutes(4)
    pod.world.machines[pod.machine].status = "Running"
    pod.minutes(6)
    assert (pod.statuses(), pod.trail("done")) == ({pod.node: "failed"}, [])


def test_what_was_asked_for_is_over_only_with_another_machine(slurm: Pod) -> None:
    slurm.incident()
    slurm.minutes(1)
    assert slurm.statuses() == {slurm.node: "done"}
    with slurm.world._lock:
        slurm.world._due.clear()  # SageMaker has given it up
        slurm.world.machines[slurm.machine].status = "Running"
    slurm.begin()
    slurm.rounds(3, timedelta(minutes=20))
    assert slurm.trail("over") == []
    assert slurm.pod.look(slurm.node).awaits == f"another machine than {slurm.machine}"
    slurm.rounds(3, timedelta(minutes=20))
    assert "has not replaced it within 90 minutes" in slurm.texts()


def test_a_machine_of_which_nobody_says_when_it_was_launched_is_not_replaced(slurm: Pod) -> None:
    told = slurm.world._summary
    setattr(slurm.world, "_summary", lambda one: {key: part for key, part in told(one).items() if key != "LaunchTime"})  # noqa: B010
    gone = slurm.world.machines.pop(slurm.machine)  # HyperPod was faster
    slurm.world._make("gpu", slurm.clock.wall + timedelta(minutes=5), gone.address)
    slurm.incident()
    slurm.clock.move(timedelta(minutes=10))
    slurm.minutes(3)
    assert slurm.world.done == []
    assert slurm.world.count(REPLACE) == 0


@pytest.mark.parametrize(
    "nonsense", ["[]", "null", '{"NodeDetails": 3}', '{"NodeDetails": {"InstanceId": "i-1", "LaunchTime": 1e300}}']
)
def test_nodes_are_taken_out_whatever_sagemaker_answers(eks: Pod, nonsense: str) -> None:
    eks.world.say = nonsense
    eks.incident()
    eks.minutes(1)
    assert eks.nodes.calls() == [("drain", eks.node)]
    assert any("SageMaker cannot be asked about machines" in one for one in eks.trail("trouble"))
