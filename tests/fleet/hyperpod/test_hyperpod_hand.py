"""What a person asks of HyperPod: a health check, and a replacement that was approved; each is exactly one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.answering import answer
from bitwitness.fleet.approving import act_of
from bitwitness.fleet.asking import preview
from bitwitness.fleet.checking import preview_check, start_check
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.kept_answers import Questions
from tests.fleet.hyperpod.pod import Pod

REPLACE, CHECK = "BatchReplaceClusterNodes", "StartClusterHealthCheck"
ALL = frozenset({"drain", "reboot", "replace"})


@pytest.mark.parametrize("kind", ["eks", "slurm"])
def test_an_approved_replacement_is_asked_for_once(kind: str, request: pytest.FixtureRequest) -> None:
    pod: Pod = request.getfixturevalue(kind)
    pod.begin(approve=ALL)
    pod.incident()
    pod.minutes(3)
    assert (pod.world.count(REPLACE), pod.nodes.calls()) == (0, [])
    (question,) = Questions(pod.state).waiting()
    assert (question.act, question.machine) == ("replace", pod.machine)
    shown = preview(pod.pod, act_of(pod.state, question))
    checks = {one.what: one.outcome for one in shown.checks}
    assert checks["permission sagemaker:BatchReplaceClusterNodes"] == "good"
    assert any(REPLACE in str(call) for call in shown.calls)
    for _ in range(2):
        answer(pod.state, question.name, "approved", "kim@head", "uncorrectable errors")
    pod.minutes(5)
    assert pod.world.asked(REPLACE) == [{"ClusterName": "pod", "NodeIds": [pod.machine]}]


@pytest.fixture(params=["eks", "slurm"])
def drained(request: pytest.FixtureRequest, tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi) -> Pod:
    """A node that was drained, with no health check in the settings."""
    pod: Pod = request.getfixturevalue(request.param)
    pod.begin(may=frozenset({"drain"}))
    pod.incident()
    pod.minutes(2)
    assert pod.pod.look(pod.node).service == "out"
    return pod


def test_a_health_check_is_started_once(drained: Pod) -> None:
    pod = drained
    shown = preview_check(pod.pod, pod.node)
    checks = {one.what: one.outcome for one in shown.checks}
    assert checks["permission sagemaker:StartClusterHealthCheck"] == "good"
    first = start_check(pod.state, pod.pod, pod.node, "vendor", "kim@head", shown=shown.digest)
    again = start_check(pod.state, pod.pod, pod.node, "vendor", "lee@head")
    assert (first.new, again.new) == (True, False)
    (asked,) = pod.world.asked(CHECK)
    (group,) = asked["DeepHealthCheckConfigurations"]
    assert (group["InstanceIds"], group["DeepHealthChecks"]) == (
        [pod.machine],
        ["InstanceStress", "InstanceConnectivity"],
    )
    pod.minutes(5)
    assert pod.world.count(CHECK) == 1, "the controller takes it for the one that it would ask for"


def test_who_may_not_is_told_by_the_name_of_the_permission(drained: Pod) -> None:
    drained.world.denied = {"sagemaker:StartClusterHealthCheck"}
    checks = {one.what: one for one in preview_check(drained.pod, drained.node).checks}
    found = checks["permission sagemaker:StartClusterHealthCheck"]
    assert (found.outcome, "sagemaker:StartClusterHealthCheck" in found.remedy) == ("bad", True)


def test_a_node_in_service_is_not_checked(eks: Pod) -> None:
    with pytest.raises(ConfigurationError, match="only a node that is out of service"):
        preview_check(eks.pod, eks.node)
    assert eks.world.count(CHECK) == 0
