"""Jobs of four kinds, as the API server shows them, and whether they would go on without a node."""

from __future__ import annotations

from typing import Any

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import Check, JobState
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer

LABELS = {
    "job": "batch.kubernetes.io/job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
}
TOLD = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def condition(kind: str, **more: str) -> dict[str, Any]:
    """One that is true."""
    return {"type": kind, "status": "True", **more}


def pods(server: KubernetesServer, kind: str, *nodes: str, **more: Any) -> None:
    """Pods of the job `j` of a kind, one a node."""
    for number, node in enumerate(nodes):
        server.add_pod(f"j-{number}", node, labels={LABELS[kind]: "j"}, **more)


@pytest.mark.parametrize("kind", LABELS)
def test_a_job_that_runs(server: KubernetesServer, make: Make, kind: str) -> None:
    server.add(f"{kind}s", "ml", "j", spec={}, status={"conditions": [condition("Running")]})
    pods(server, kind, "n2", "n1")
    server.add_pod("old", "n3", labels={LABELS[kind]: "j"}, phase="Failed", exit_code=160)
    server.add_pod("other", "n4", labels={LABELS[kind]: "k"})
    job = make().job(f"ml/{kind}/j")
    assert (job.state, job.nodes, job.exit_code, job.held) == ("running", ("n1", "n2"), None, False)
    assert make().plan_requeue(job, ["n1"]) == ()


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize(("codes", "said"), [((1, 160, 143), 160), ((1,), 1), ((), None)])
def test_a_job_that_has_failed_for_good(
    server: KubernetesServer, make: Make, kind: str, codes: tuple[int, ...], said: int | None
) -> None:
    failed = condition("Failed", reason="BackoffLimitExceeded", message="too many failures")
    server.add(f"{kind}s", "ml", "j", spec={}, status={"conditions": [failed]})
    for number, code in enumerate(codes):
        server.add_pod(f"j-{number}", f"n{number}", labels={LABELS[kind]: "j"}, phase="Failed", exit_code=code)
    job = make().job(f"ml/{kind}/j")
    assert (job.state, job.exit_code, job.requeueable) == ("ended", said, False)
    assert job.raw == "Failed: BackoffLimitExceeded: too many failures"
    with pytest.raises(ConfigurationError, match=r"ml/j has ended, .*: submit it again \(kubectl replace --force"):
        make().plan_requeue(job, ["n1"])


@pytest.mark.parametrize(
    ("kind", "done"),
    [("job", "Complete"), ("jobset", "Completed"), ("pytorchjob", "Succeeded"), ("trainjob", "Complete")],
)
def test_a_job_that_is_done(server: KubernetesServer, make: Make, kind: str, done: str) -> None:
    server.add(f"{kind}s", "ml", "j", spec={}, status={"conditions": [condition(done)]})
    pods(server, kind, "n1", phase="Succeeded", exit_code=0)
    job = make().job(f"ml/{kind}/j")
    assert (job.state, job.raw, job.exit_code) == ("ended", "Completed", 0)


def test_restarts_and_holds(server: KubernetesServer, make: Make) -> None:
    cluster = make()
    server.add("jobs", "ml", "j", spec={"suspend": True}, status={"failed": 2})
    assert cluster.job("ml/job/j") == JobState("ml/job/j", "pending", "Suspended", None, 0, held=True)
    server.add("jobsets", "ml", "j", spec={}, status={"restarts": 3})
    assert cluster.job("ml/jobset/j").restarts == 3
    server.add("trainjobs", "ml", "j", spec={}, status={})
    assert cluster.job("ml/trainjob/j").restarts == 3, "of the JobSet underneath"
    replicas = {"Master": {"failed": 1}, "Worker": {"failed": 3, "active": 4}}
    server.add("pytorchjobs", "ml", "j", spec={"runPolicy": {}}, status={"replicaStatuses": replicas})
    assert (cluster.job("ml/pytorchjob/j").restarts, cluster.job("ml/pytorchjob/j").raw) == (0, "Pending")


@pytest.mark.parametrize("kind", LABELS)
def test_a_pod_that_fails_is_no_restart(server: KubernetesServer, make: Make, kind: str) -> None:
    """The last of them ends the job for good, which must not be told as a job that was started again."""
    server.add(f"{kind}s", "ml", "j", spec={}, status={"active": 1})
    pods(server, kind, "n1")
    before = make().job(f"ml/{kind}/j").restarts
    status = {
        "failed": 1,
        "restarts": 7 if kind in ("job", "pytorchjob") else 0,
        "replicaStatuses": {"Worker": {"failed": 1}},
        "conditions": [condition("Failed")],
    }
    server.change(f"{kind}s", "ml", "j", lambda job: job.update(status=status))
    now = make().job(f"ml/{kind}/j")
    assert (now.state, now.restarts) == ("ended", before)


def test_a_job_that_is_not_there(server: KubernetesServer, make: Make) -> None:
    cluster = make()
    job = cluster.job("ml/job/gone")
    assert (job.state, job.raw) == ("absent", "")
    with pytest.raises(ConfigurationError, match="Job ml/gone is not there any more"):
        cluster.plan_requeue(job, [])
    server.forget_kind("pytorchjobs")
    assert "no objects of the kind PyTorchJob" in cluster.job("ml/pytorchjob/j").raw


@pytest.mark.parametrize("job", ["", "j", "ml/j", "ml/cronjob/j", "ml/job/../nodes/n1", "ml/job/J", "a/b/job/j"])
def test_what_names_no_job(server: KubernetesServer, make: Make, job: str) -> None:
    with pytest.raises(ConfigurationError, match="NAMESPACE/KIND/NAME"):
        make().job(job)
    (check,) = make().check_job(job)
    assert check.outcome == "bad"
    assert not server.requests


def _spec(**more: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", "env": [TOLD]}], "restartPolicy": "Never", **more}


def _job(pod: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "job", {"template": {"spec": pod}, "backoffLimit": 4, **more}


def _jobset(pod: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    replicated = {"name": "workers", "template": {"spec": {"template": {"spec": pod}}}}
    return "jobset", {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": 3}, **more}


def _pytorch(pod: dict[str, Any], policy: str = "ExitCode", **more: Any) -> tuple[str, dict[str, Any]]:
    return "pytorchjob", {
        "pytorchReplicaSpecs": {"Worker": {"restartPolicy": policy, "template": {"spec": pod}}},
        **more,
    }


def found(server: KubernetesServer, make: Make, made: tuple[str, dict[str, Any]], **settings: Any) -> list[Check]:
    """What is said of a job."""
    kind, spec = made
    server.add(f"{kind}s", "ml", "j", spec=spec, status={})
    return list(make(**settings).check_job(f"ml/{kind}/j"))


@pytest.mark.parametrize("made", [_job(_spec()), _jobset(_spec()), _pytorch(_spec())], ids=["job", "jobset", "pytorch"])
def test_a_job_that_would_go_on(server: KubernetesServer, make: Make, made: tuple[str, dict[str, Any]]) -> None:
    checks = found(server, make, made)
    assert {one.outcome for one in checks} == {"good"}, checks
    assert len(checks) >= 3
    assert not server.writes()


EVERYTHING = {"operator": "Exists"}
OURS = {"operator": "Exists", "key": "bitwitness.dev/suspect"}
CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
"""The taint of a cordon has no value, and a toleration that names no operator means equal."""
FAIL = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [42]}}]}
IGNORE = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [160]}}
OTHERS = {"action": "Ignore", "onExitCodes": {"containerName": "log", "operator": "In", "values": [160]}}
EVICTED = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
SIDECAR = {"name": "log", "env": [TOLD]}
TRAINS = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 8}}}
BOUND = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}]}
            ]
        }
    }
}


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (_job(_spec(tolerations=[EVERYTHING])), "pods: kept off a cordoned node"),
        (_job(_spec(tolerations=[CORDON, OURS])), "pods: kept off a cordoned node"),
        (
            _job(_spec(tolerations=[{**CORDON, "operator": "Equal", "value": ""}, OURS])),
            "pods: kept off a cordoned node",
        ),
        (_job(_spec(nodeName="n1")), "pods: kept off a cordoned node"),
        (_job(_spec(containers=[{"name": "main"}], hostNetwork=True)), "pods: knows its node"),
        (_job(_spec(nodeSelector={"kubernetes.io/hostname": "n1"})), "pods: kept off a cordoned node"),
        (_jobset(_spec(affinity=BOUND)), "workers: kept off a cordoned node"),
        (_job(_spec(restartPolicy="OnFailure")), "pods: restart elsewhere"),
        (_pytorch(_spec(), "OnFailure"), "Worker: restart elsewhere"),
        (_pytorch(_spec(), "Never"), "Worker: restart elsewhere"),
        (_job(_spec(), parallelism=5), "restarts left"),
        (_job(_spec(), podFailurePolicy={"rules": [OTHERS, *FAIL["rules"]]}), "exit code 160"),
        (_job(_spec(containers=[SIDECAR, TRAINS])), "pods: knows its node"),
        (_job(_spec(containers=[{"name": "main"}])), "pods: knows its node"),
        (
            _job(_spec(containers=[{"name": "main", "env": [{"name": "NODE_NAME", "value": "x"}]}])),
            "pods: knows its node",
        ),
        (_job(_spec(), backoffLimit=0), "restarts left"),
        (_jobset(_spec(), failurePolicy={}), "restarts left"),
        (_jobset(_spec(), failurePolicy={"maxRestarts": 3, "rules": [{"action": "FailJobSet"}]}), "exit code 160"),
        (_pytorch(_spec(), runPolicy={"backoffLimit": 0}), "restarts left"),
        (_job(_spec(), podFailurePolicy=FAIL), "exit code 160"),
    ],
)
def test_a_job_that_would_not_go_on(
    server: KubernetesServer, make: Make, made: tuple[str, dict[str, Any]], what: str
) -> None:
    bad = [one for one in found(server, make, made) if one.outcome != "good"]
    assert [(one.what, one.outcome) for one in bad] == [(what, "bad")]
    assert bad[0].remedy


def test_what_makes_a_job_go_on(server: KubernetesServer, make: Make) -> None:
    """Tolerating one of two taints, evictions, and a rule before the one that ends the job."""
    others = [
        [OURS],
        [CORDON],
        [{**CORDON, "value": "x"}, OURS],
        [{**CORDON, "effect": "NoExecute"}, OURS],
        [CORDON, {**OURS, "operator": "Equal"}],
        [CORDON, {**OURS, "operator": "Equal", "value": "20261129t093015z-4be1d2"}],
    ]
    for one in others:
        assert {each.outcome for each in found(server, make, _job(_spec(tolerations=one)))} == {"good"}, one
    checks = found(server, make, _job(_spec(tolerations=[CORDON])), taint="")
    assert [each.what for each in checks if each.outcome == "bad"] == ["pods: kept off a cordoned node"]
    assert {each.outcome for each in found(server, make, _job(_spec(restartPolicy="OnFailure")), evict=True)} == {
        "good"
    }
    rules = {"rules": [IGNORE, *FAIL["rules"]]}
    assert {each.outcome for each in found(server, make, _job(_spec(), podFailurePolicy=rules))} == {"good"}


def test_an_eviction_that_ends_a_job(server: KubernetesServer, make: Make) -> None:
    made = _job(_spec(), podFailurePolicy={"rules": [EVICTED]})
    assert [one.what for one in found(server, make, made, evict=True) if one.outcome == "bad"] == ["exit code 160"]
    assert {one.outcome for one in found(server, make, made)} == {"good"}


def test_a_trainjob_is_judged_by_its_jobset(server: KubernetesServer, make: Make) -> None:
    server.add("trainjobs", "ml", "j", spec={}, status={})
    assert [one.outcome for one in make().check_job("ml/trainjob/j")] == ["unknown"]
    kind, spec = _jobset(_spec(nodeName="n1"))
    server.add(f"{kind}s", "ml", "j", spec=spec, status={"restarts": 1})
    checks = make().check_job("ml/trainjob/j")
    assert [one.what for one in checks if one.outcome == "bad"] == ["workers: kept off a cordoned node"]
    assert "2 of failurePolicy.maxRestarts 3" in [one.text for one in checks]
