"""On EKS with a real Kubernetes API in front: labels and annotations of HyperPod's, and a person's word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, Call, Cluster, Finishing, Led, Rehearsing, Troubled
from bitwitness.fleet.clusters.hyperpod import HyperPodCluster, from_settings
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from bitwitness.fleet.clusters.hyperpod_words import ASKED, CHECK_LABEL, HEALTH_LABEL, MARK
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from bitwitness.fleet.clusters.kubernetes import from_settings as kubernetes_of
from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi
from tests.fleet.hyperpod.pod import ID, act, words
from tests.fleet.incidents import NOW
from tests.fleet.kubernetes.server import KubernetesServer

JOB = {
    "metadata": {"annotations": {}},
    "spec": {"pytorchReplicaSpecs": {"Worker": {"restartPolicy": "OnFailure", "template": {"spec": {}}}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as made:
        yield made


class Eks:
    """Four nodes, each in Kubernetes and in SageMaker."""

    def __init__(self, folder: Path, fake: FakeSageMaker, api: SageMakerApi, server: KubernetesServer) -> None:
        server.clear()
        self.server, self.api = server, api
        self.world = fake.world = World({"gpu": 4}, lambda: NOW)
        self.machine = self.world.now()[1]
        self.node = self.machine.eks
        for one in self.world.now():
            server.add_node(one.eks, labels={HEALTH_LABEL: "Schedulable"})
        self.config = str(server.kubeconfig(folder / "kubeconfig"))

    def cluster(self, *, kubernetes: dict[str, str] | None = None, **settings: Any) -> HyperPodCluster:
        inner = kubernetes_of({"kind": "kubernetes", "kubeconfig": self.config, **(kubernetes or {})})
        return HyperPodCluster(inner, self.api, **settings)

    def do(self, cluster: HyperPodCluster, asked: Act) -> list[str]:
        calls = cluster.plan(asked, cluster.look(self.node))
        return [cluster.carry_out(call) for call in calls]


@pytest.fixture
def place(tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi, server: KubernetesServer) -> Eks:
    return Eks(tmp_path, fake, api, server)


def test_it_is_every_kind_of_cluster(place: Eks) -> None:
    table = {"kubeconfig": place.config}
    cluster: Cluster = from_settings(
        {"kind": "hyperpod", "cluster_name": "pod", "orchestrator": "eks", "kubernetes": table}
    )
    assert cluster.look(place.node).instance == place.machine.id
    assert (cluster.name, cluster.scheduler) == ("hyperpod", "kubernetes")
    for kind in (Finishing, Led, Rehearsing, Troubled):
        assert isinstance(cluster, kind)


def test_a_node_is_cordoned_and_told_of_before_its_machine_is_replaced(place: Eks) -> None:
    cluster = place.cluster()
    before = cluster.look(place.node)
    assert (before.service, before.instance) == ("in", place.machine.id)
    calls = cluster.plan(act("replace", place.node), before)
    assert words(calls)[0] == f"PATCH /api/v1/nodes/{place.node}"
    assert words(calls)[-1] == "sagemaker BatchReplaceClusterNodes"
    assert cluster.landed(act("replace", place.node), before, before) == "no"
    place.do(cluster, act("replace", place.node))
    now = cluster.look(place.node)
    assert (now.service, now.ours) == ("out", True)
    assert cluster.landed(act("replace", place.node), before, now) == "yes"
    assert cluster.plan(act("replace", place.node), now) == ()
    assert cluster.rest(act("replace", place.node), now) == ()
    place.server.remove("nodes", "", place.node)  # Kubernetes shows it first, and that alone is not enough
    place.world.machines[place.machine.id].status = "Running"
    gone = cluster.look(place.node)
    assert (gone.service, cluster.landed(act("replace", place.node), before, gone)) == ("absent", "unknown")


@pytest.mark.parametrize(
    ("kind", "value"), [("replace", "UnschedulablePendingReplacement"), ("reboot", "UnschedulablePendingReboot")]
)
def test_by_labels_the_node_itself_says_what_it_waits_for(place: Eks, kind: str, value: str) -> None:
    cluster = place.cluster(by="labels")
    before = cluster.look(place.node)
    place.do(cluster, act(kind, place.node))
    assert place.server.node(place.node)["metadata"]["labels"][HEALTH_LABEL] == value
    now = cluster.look(place.node)
    assert (now.awaits, cluster.landed(act(kind, place.node), before, now)) == (value, "yes")
    assert place.world.count("BatchReplaceClusterNodes") + place.world.count("BatchRebootClusterNodes") == 0


def test_a_label_that_we_have_set_is_taken_back_by_a_return_and_no_other(place: Eks) -> None:
    cluster, back = place.cluster(by="labels"), act("clear", place.node, "")
    place.do(cluster, act("replace", place.node))
    calls = cluster.plan(back, cluster.look(place.node))
    place.do(cluster, back)
    assert place.server.node(place.node)["metadata"]["labels"] == {HEALTH_LABEL: "Schedulable"}
    assert ASKED not in place.server.node(place.node)["metadata"]["annotations"]
    assert cluster.look(place.node).service == "in"
    assert cluster.plan(back, cluster.look(place.node)) == ()
    place.do(cluster, act("reboot", place.node, "20991129T120000Z-000001"))
    place.server.change_node(
        place.node, lambda node: node["metadata"]["labels"].update({HEALTH_LABEL: "Unschedulable"})
    )
    assert "says Unschedulable by now, and is left" in cluster.carry_out(calls[0])  # HyperPod's own word
    place.do(cluster, back)
    assert place.server.node(place.node)["metadata"]["labels"] == {HEALTH_LABEL: "Unschedulable"}
    other = place.cluster(by="labels")
    place.server.change_node(
        place.node, lambda node: node["metadata"]["labels"].update({HEALTH_LABEL: "UnschedulablePendingReboot"})
    )
    place.server.change_node(place.node, lambda node: node["metadata"]["annotations"].pop(ASKED, None))
    assert not any(HEALTH_LABEL in str(call) for call in other.plan(back, other.look(place.node)))  # nor somebody's


def test_a_label_is_not_set_on_another_node_of_the_same_name(place: Eks) -> None:
    cluster = place.cluster(by="labels")
    calls = cluster.plan(act("replace", place.node), cluster.look(place.node))
    place.server.remove("nodes", "", place.node)
    place.server.add_node(place.node, labels={HEALTH_LABEL: "Schedulable"})
    with pytest.raises(ClusterError):
        cluster.carry_out(calls[-1])
    assert place.server.node(place.node)["metadata"]["labels"][HEALTH_LABEL] == "Schedulable"


class Drained:
    """A node that was drained, whose deep health check is what is left."""

    def __init__(self, place: Eks, result: str = "Passed") -> None:
        self.place, self.passed, self.asked = place, 0.0, act("drain", place.node)
        self.cluster = self.process()
        self.label(result)  # of long ago, when the machine was new
        place.do(self.cluster, self.asked)

    def process(self) -> HyperPodCluster:
        return self.place.cluster(deep_health_check=["InstanceStress"], ticks=lambda: self.passed)

    def label(self, result: str) -> None:
        self.place.server.change_node(
            self.place.node, lambda node: node["metadata"]["labels"].update({CHECK_LABEL: result})
        )

    def calls(self) -> tuple[Call, ...]:
        return self.cluster.rest(self.asked, self.cluster.look(self.place.node))

    def finish(self) -> list[str]:
        return [self.cluster.carry_out(call) for call in self.calls()]

    def ends(self) -> None:
        self.place.world.machines[self.place.machine.id].status = "Running"

    def told(self) -> str:
        self.cluster.look(self.place.node)
        return self.cluster.troubles().get(f"check:{self.place.node}", "")

    @property
    def requests(self) -> int:
        return self.place.world.count("StartClusterHealthCheck")


def test_a_deep_health_check_is_noted_at_once_and_its_result_is_told_for_as_long_as_it_is_seen(place: Eks) -> None:
    one = Drained(place, "")
    start, note = one.calls()
    assert start.words == ("sagemaker", "StartClusterHealthCheck")
    with pytest.raises(ClusterError, match="not asked for yet") as caught:
        one.cluster.carry_out(note)  # SageMaker has refused
    assert caught.value.refused
    assert one.finish()[0] == "deep health check asked for"
    assert place.server.node(place.node)["metadata"]["annotations"][MARK] == ID
    assert one.calls() == ()
    one.ends()
    assert one.told() == ""
    one.label("Passed")
    assert "a pass does not rule out" in one.told()
    now = one.cluster.look(place.node)
    assert (now.service, now.ours) == ("out", True)
    one.passed += 601.0  # nobody looks any more
    assert one.cluster.troubles() == {}
    assert one.told()
    place.server.uncordon(place.node)
    assert one.told() == ""
    assert one.requests == 1


def test_a_check_is_asked_for_once_though_it_could_not_be_noted(place: Eks) -> None:
    one = Drained(place)
    start, note = one.calls()
    one.cluster.carry_out(start)
    one.ends()
    one.passed += 3600.0
    assert "ago" in one.cluster.carry_out(start)
    one.cluster.look(place.node)
    one.cluster.carry_out(note)
    one.cluster = one.process()
    assert one.calls() == ()
    assert one.requests == 1


def test_an_old_result_is_not_told_for_a_new_one(place: Eks) -> None:
    one = Drained(place, "Passed")
    one.finish()
    one.ends()
    assert place.server.node(place.node)["metadata"]["annotations"][MARK] == f"{ID} after Passed"
    assert one.told() == ""
    one.passed += 1800.0
    assert "nothing shows that one has run" in one.told()
    one.cluster = one.process()  # knows it by the note
    assert one.told() == ""
    one.label("Failed")
    assert "says Failed" in one.told()


def test_the_same_result_again_is_told_where_the_check_was_seen_to_run(place: Eks) -> None:
    one = Drained(place, "Passed")
    one.finish()
    one.passed += 3600.0
    assert one.told() == ""  # it runs, and takes its time
    one.ends()
    assert "says Passed" in one.told()


def test_nothing_is_noted_on_a_node_that_was_returned_meanwhile(place: Eks) -> None:
    one = Drained(place)
    start, note = one.calls()
    one.cluster.carry_out(start)
    place.server.uncordon(place.node)
    with pytest.raises(ClusterError, match="nothing is noted on it"):
        one.cluster.carry_out(note)
    assert MARK not in place.server.node(place.node)["metadata"]["annotations"]


def test_another_node_than_the_one_that_was_seen_is_never_meant(place: Eks) -> None:
    cluster = place.cluster()
    other = cluster.look(place.world.now()[0].eks)
    with pytest.raises(ConfigurationError, match="was given for an act on"):
        cluster.plan(act("replace", place.node), other)


def test_a_node_of_eks_that_is_not_hyperpods_is_drained_and_never_replaced(place: Eks) -> None:
    cluster, name = place.cluster(), place.machine.host  # whose address a machine of HyperPod's has as well
    place.server.add_node(name)
    state = cluster.look(name)
    assert (state.service, state.instance) == ("in", "")
    with pytest.raises(ConfigurationError, match="no node of HyperPod's"):
        cluster.plan(act("replace", name), state)
    assert cluster.plan(act("drain", name), state)[0].words == ("PATCH", f"/api/v1/nodes/{name}")


def test_without_the_lead_nothing_is_asked_of_sagemaker(place: Eks) -> None:
    one = place.cluster(kubernetes={"lease": "bitwitness/fleet"})
    two = place.cluster(kubernetes={"lease": "bitwitness/fleet"})
    assert one.leader() == ""
    calls = two.plan(act("replace", place.node), two.look(place.node))
    assert two.leader() != ""
    with pytest.raises(ClusterError, match="lease") as caught:
        two.carry_out(calls[-1])
    assert caught.value.refused
    assert place.world.count("BatchReplaceClusterNodes") == 0
    one.carry_out(calls[-1])
    one.resign()


def test_while_nobody_can_say_who_leads_a_reboot_is_not_asked_for_and_may_be_later(place: Eks) -> None:
    passed = [0.0]
    inner = KubernetesCluster(KubernetesApi.load(place.config), lease="bitwitness/fleet", ticks=lambda: passed[0])
    cluster = HyperPodCluster(inner, place.api)
    assert cluster.leader() == ""
    (*_, reboot) = cluster.plan(act("reboot", place.node), cluster.look(place.node))
    assert not reboot.repeatable
    passed[0] = 15.0  # the lease is to be renewed
    place.server.down()
    try:
        with pytest.raises(ClusterError) as caught:
            cluster.carry_out(reboot)
    finally:
        place.server.up()
    assert caught.value.refused
    assert place.world.count("BatchRebootClusterNodes") == 0
    cluster.carry_out(reboot)
    assert place.world.done == [("reboot", place.machine.id)]


def test_a_node_is_read_once_so_that_labels_and_cordon_are_of_one_version(place: Eks) -> None:
    cluster = place.cluster()
    place.server.requests.clear()
    cluster.look(place.node)
    assert [path for _, path, _ in place.server.requests].count(f"/api/v1/nodes/{place.node}") == 1


def test_what_the_rehearsal_finds_on_eks(place: Eks) -> None:
    cluster = place.cluster(by="labels")
    place.world.recovery, before = "None", place.server.node(place.node)
    state = cluster.look(place.node)
    asked = act("replace", place.node)
    found = {one.what: one for one in cluster.check(asked, state, cluster.plan(asked, state))}
    assert found["NodeRecovery"].outcome == "bad"
    assert "waits for nobody" in found["NodeRecovery"].text
    assert found["orchestrator"].outcome == "good"
    place.world.orchestrator = "slurm"
    found |= {one.what: one for one in cluster.check(asked, state, ())}
    assert (found["orchestrator"].outcome, found["orchestrator"].remedy) == ("bad", 'orchestrator = "slurm"')
    assert any("nodes" in what for what in found)  # what Kubernetes itself needs
    assert place.server.node(place.node) == before


def test_traps_of_auto_resume_on_a_pytorchjob(place: Eks) -> None:
    cluster = place.cluster()
    place.server.add("pytorchjobs", "ml", "train", metadata={"annotations": {}}, spec=JOB["spec"])
    said = [one for one in cluster.check_job("ml/pytorchjob/train") if one.what.startswith("auto-resume")]
    assert [one.outcome for one in said] == ["good"]
    notes = {"sagemaker.amazonaws.com/enable-job-auto-resume": "true"}
    place.server.add("pytorchjobs", "ml", "trapped", metadata={"annotations": notes}, spec=JOB["spec"])
    bad = {one.what: one.remedy for one in cluster.check_job("ml/pytorchjob/trapped") if one.outcome == "bad"}
    assert bad["auto-resume retries"] == 'sagemaker.amazonaws.com/job-max-retry-count: "2"'
    assert "Schedulable" in bad["auto-resume nodeSelector"]
    assert "auto-resume namespace" in bad
