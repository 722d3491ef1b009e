"""The examples of jobs: each pod knows its node and its job, and what our exit codes mean is what its kind of job does with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.kubernetes_jobs import KINDS
from bitwitness.fleet.received import valid_run
from bitwitness.supervise.identity import INDICES, index_of
from bitwitness.topology import node_name, pod_name, scheduler_job
from tests.deploy.manifests import EXAMPLES, Manifest, documents, pods, rendered, the
from tests.deploy.test_manifests import parsed

FILES = sorted(file.name for file in EXAMPLES.glob("*.yaml") if file.name != "start.yaml")
PERMANENT, ELSEWHERE = (2, 3), 160


def job(file: str) -> Manifest:
    """The manifest that has the pods."""
    return next(one for one in documents(EXAMPLES / file) if list(pods(one)))


def environment(pod: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """What a container is given, as a kubelet fills it in: in order, and `$(NAME)` only of what stands before."""
    fields = {
        "spec.nodeName": "gpu-3",
        "metadata.name": "train-2-x7k",
        "metadata.namespace": "research",
        "status.podIP": "10.0.0.7",
    }
    fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
    found: dict[str, str] = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for one in pod["containers"][0]["env"]:
        if "valueFrom" in one:
            found[one["name"]] = fields.get(one["valueFrom"]["fieldRef"]["fieldPath"], "")
        else:
            found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), one["value"])
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_pod_knows_its_node_and_its_job(file: str) -> None:
    made = job(file)
    kind = {"TrainingRuntime": "trainjob"}.get(made["kind"], made["kind"].lower())
    for pod in pods(made):
        told = environment(pod, {KINDS[kind].label: "train"})
        assert node_name(told, Path("/absent")) == "gpu-3"
        assert pod_name(told) == "research/train-2-x7k"
        assert scheduler_job(told) == f"kubernetes:research/{kind}/train"
        assert scheduler_job(environment(pod, {})) == "", "without its label it names no job, and no wrong one"
        assert valid_run(f"{told['POD_NAMESPACE']}.{Path(told['RUN_DIR']).name}")


@pytest.mark.parametrize("file", FILES)
def test_our_own_program_understands_the_command(file: str) -> None:
    for pod in pods(job(file)):
        (container,) = pod["containers"]
        assert container["command"] == ["/bin/sh", "/bitwitness/start.sh"]
        told = environment(pod, {})
        params = parsed(["run", "--run-dir", told["RUN_DIR"], *container["args"]])[1].params
        assert params["nodes"] == 4
        assert params["nproc_per_node"] == container["resources"]["limits"]["nvidia.com/gpu"]
        assert pod["terminationGracePeriodSeconds"] >= params["grace"] + 30 + 30
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert set(mounts.values()) == {one["name"] for one in pod["volumes"]}
        assert {"/bitwitness", told["CREDENTIALS_DIRECTORY"], "/" + told["RUN_DIR"].split("/")[1]} <= set(mounts)
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert (
            volumes[mounts["/bitwitness"]]["configMap"]["name"]
            == documents(EXAMPLES / "start.yaml")[0]["metadata"]["name"]
        )


@pytest.mark.parametrize("file", FILES)
def test_it_may_reach_the_controller(file: str) -> None:
    base = rendered("base")
    service = the(base, "Service", "bitwitness-fleet")
    (port,) = service["spec"]["ports"]
    address = f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    allowed = the(base, "NetworkPolicy", "bitwitness-fleet")["spec"]["ingress"][0]["from"][0]["podSelector"][
        "matchLabels"
    ]
    templates = list(_templates(job(file)))
    assert templates
    for template in templates:
        assert allowed.items() <= template["metadata"]["labels"].items()
        assert environment(template["spec"], {})["BITWITNESS_FLEET"] == address


def _templates(value: Any) -> Any:
    if isinstance(value, dict):
        if "spec" in value and "containers" in (value["spec"] or {}):
            yield value
        for one in value.values():
            yield from _templates(one)
    elif isinstance(value, list):
        for one in value:
            yield from _templates(one)


def after_exit(spec: dict[str, Any], code: int) -> str:
    """What a Job does with a pod that ended so: the first rule that matches, else it counts."""
    main = spec["template"]["spec"]["containers"][0]["name"]
    for rule in spec["podFailurePolicy"]["rules"]:
        asked = rule.get("onExitCodes")
        if asked and asked["containerName"] == main and asked["operator"] == "In" and code in asked["values"]:
            return str(rule["action"])
    return "Count"


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """The spec of the Job in each example that has one."""
    made = job("jobset.yaml")["spec"], job("trainjob.yaml")["spec"]["template"]["spec"]
    sets = [("jobset", made[0]), ("trainjob", made[1])]
    return [("job", job("job.yaml")["spec"])] + [(n, one["replicatedJobs"][0]["template"]["spec"]) for n, one in sets]


@pytest.mark.parametrize(("name", "spec"), jobs(), ids=[name for name, _ in jobs()])
def test_exit_codes_of_jobs(name: str, spec: dict[str, Any]) -> None:
    assert [after_exit(spec, code) for code in PERMANENT] == ["FailJob", "FailJob"]
    assert [after_exit(spec, code) for code in (ELSEWHERE, 143, 137, 1, 4)] == ["Count"] * 5
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy needs it"
    assert spec["completionMode"] == "Indexed"
    for rule in spec["podFailurePolicy"]["rules"]:
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values
        assert all(one["status"] == "True" for one in rule.get("onPodConditions", ()))
    disrupted = [one for one in spec["podFailurePolicy"]["rules"] if "onPodConditions" in one]
    assert [one["action"] for one in disrupted] == ["Ignore"]
    # A Job by itself makes pods anew; inside a set it must fail with the first, so that the set does.
    assert (spec["backoffLimit"] == 0) == (name != "job")
    if "completions" in spec:
        assert spec["completions"] == spec["parallelism"] == 5


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_exit_codes_of_sets(file: str) -> None:
    """JobSet's API: actions, and the pattern of names (jobset_types.go); PodFailurePolicy is the reason of batch/v1."""
    spec = job(file)["spec"] if file == "jobset.yaml" else job(file)["spec"]["template"]["spec"]
    policy = spec["failurePolicy"]
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert policy["maxRestarts"] >= 1, "160 is tried again"


def test_exit_codes_of_a_pytorchjob() -> None:
    """Training Operator: ExitCode retries from 128 on, and 1 to 127 are permanent (pkg/util/train/train_util.go)."""
    for file, expected in (("pytorchjob.yaml", "ExitCode"), ("hyperpod-pytorchjob.yaml", "OnFailure")):
        spec = job(file)["spec"]
        replicas = spec["pytorchReplicaSpecs"]
        assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 4}
        assert {one["restartPolicy"] for one in replicas.values()} == {expected}
        assert spec["runPolicy"]["backoffLimit"] > 0
        assert all(pod["containers"][0]["name"] == "pytorch" for pod in pods(spec)), "as the operator calls it"
    assert max(PERMANENT) < 128 <= ELSEWHERE


def test_auto_resume_of_hyperpod() -> None:
    """As AWS asks for it: docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-run-jobs-kubectl.html."""
    made = job("hyperpod-pytorchjob.yaml")
    assert made["metadata"]["annotations"] == {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": "2",
    }
    assert re.fullmatch(r"kubeflow|hyperpod.*", made["metadata"]["namespace"])
    for pod in pods(made):
        assert pod["nodeSelector"] == {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}


def test_a_trainjob_names_the_runtime_beside_it() -> None:
    """Trainer finds what trains by the names `node` and by this label (Kubeflow Trainer, runtime guide)."""
    runtime, train = documents(EXAMPLES / "trainjob.yaml")
    ref = train["spec"]["runtimeRef"]
    assert (ref["kind"], ref["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert ref["apiGroup"] == runtime["apiVersion"].partition("/")[0]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [one["name"] for pod in pods(runtime) for one in pod["containers"]] == ["node"]
    assert train["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 5


def test_the_place_of_a_pod_is_told_by_the_script() -> None:
    script = documents(EXAMPLES / "start.yaml")[0]["data"]["start.sh"]
    assert f"export {INDICES[0]}=" in script
    assert index_of(None, {INDICES[0]: "3", "JOB_COMPLETION_INDEX": "1"}) == 3
