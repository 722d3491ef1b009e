"""Training jobs on Kubernetes, in the words of every cluster: Job, JobSet, PyTorchJob and TrainJob; pure but for the reading.

None is started again by us: each kind restarts its pods by its own policy, and the cordon keeps them off the node. One that has failed
for good stays so, and a person submits it again. The kinds say how they are: `status.conditions`, with types of their own.

    Job         https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
    JobSet      https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
    PyTorchJob  https://www.kubeflow.org/docs/components/trainer/legacy-v1/
    TrainJob    https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import JobState
from bitwitness.fleet.clusters.kubernetes_api import ABSENT, KubernetesApi, Refused
from bitwitness.fleet.clusters.kubernetes_reading import items, part, text

RETRYABLE = 160
"""With which a job of ours ends where somebody is named (DESIGN section 5)."""
_ENDED = ("Succeeded", "Failed")
_DNS = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of job.

    Attributes:
        title: as people write it.
        path: of its API, up to the version.
        plural: in the path.
        label: by which its pods are found.
        done: types of the conditions that mean that it has ended well.
    """

    title: str
    path: str
    plural: str
    label: str
    done: tuple[str, ...]


KINDS = {
    "job": Kind("Job", "/apis/batch/v1", "jobs", "batch.kubernetes.io/job-name", ("Complete",)),
    "jobset": Kind(
        "JobSet", "/apis/jobset.x-k8s.io/v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-name", ("Completed",)
    ),
    "pytorchjob": Kind(
        "PyTorchJob", "/apis/kubeflow.org/v1", "pytorchjobs", "training.kubeflow.org/job-name", ("Succeeded",)
    ),
    "trainjob": Kind(
        "TrainJob",
        "/apis/trainer.kubeflow.org/v1alpha1",
        "trainjobs",
        "jobset.sigs.k8s.io/jobset-name",
        ("Complete",),
    ),
}
"""A TrainJob is a JobSet of the same name underneath, and its pods carry that one's label."""

_JOB = re.compile(rf"({_DNS})/({'|'.join(KINDS)})/({_DNS})")


@dataclass(frozen=True, slots=True)
class Named:
    """The job that an id names: `NAMESPACE/KIND/NAME`."""

    namespace: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.kind.path}/namespaces/{self.namespace}/{self.kind.plural}/{self.name}"

    @property
    def pods(self) -> str:
        """Where its pods are."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def selector(self) -> dict[str, str]:
        """Which of the pods there are its."""
        return {"labelSelector": f"{self.kind.label}={self.name}"}


def named(job: str) -> Named:
    """What an id names.

    Raises:
        ConfigurationError: nothing.
    """
    found = _JOB.fullmatch(job)
    if found is None:
        raise ConfigurationError(
            f"{job!r:.200} names no job: it reads NAMESPACE/KIND/NAME, KIND one of {', '.join(KINDS)}"
        )
    return Named(found[1], KINDS[found[2]], found[3])


def read(api: KubernetesApi, job: str) -> JobState:
    """A job now; `absent` where there is none of this name, or none of this kind in this cluster.

    Raises:
        ConfigurationError: the id names no job.
        ClusterError: the API server cannot say.
    """
    one = named(job)
    try:
        found = api.find(one.path)
    except Refused as error:
        if error.status != ABSENT:
            raise
        return JobState(job, "absent", f"this cluster has no objects of the kind {one.kind.title}", requeueable=False)
    if found is None:
        return JobState(job, "absent", requeueable=False)
    return job_state(job, found, list(api.all(one.pods, one.selector)), inner(api, one))


def inner(api: KubernetesApi, one: Named) -> Mapping[str, Any] | None:
    """The JobSet of a TrainJob, which counts the restarts."""
    if one.kind is not KINDS["trainjob"]:
        return None
    return api.find(Named(one.namespace, KINDS["jobset"], one.name).path)


def job_state(
    job: str, found: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], inner: Mapping[str, Any] | None = None
) -> JobState:
    """A job, by its object and its pods.

    Args:
        job: its id.
        found: the object.
        pods: of it, also those that have ended.
        inner: the JobSet underneath.
    """
    one = named(job)
    types = {
        str(each.get("type")): each for each in items(found, "status", "conditions") if each.get("status") == "True"
    }
    active = [each for each in pods if text(each, "status", "phase") not in _ENDED]
    failed, done = types.get("Failed"), any(kind in types for kind in one.kind.done)
    held = "Suspended" in types or _is_suspended(found)
    state: Literal["pending", "running", "ended"] = "pending"
    if failed is not None or done:
        state = "ended"
    elif any(text(each, "status", "phase") == "Running" for each in active):
        state = "running"
    words = ["Failed" if failed is not None else "Completed" if done else "Suspended" if held else state.capitalize()]
    if failed is not None:
        words += [str(failed.get(key)) for key in ("reason", "message") if failed.get(key)]
    where = active if state != "ended" else list(pods)
    return JobState(
        job,
        state,
        ": ".join(words)[:400],
        (0 if done else exit_code(pods)) if state == "ended" else None,
        _restarts(found, inner) if one.kind in (KINDS["jobset"], KINDS["trainjob"]) else 0,
        nodes=tuple(sorted({name for each in where if (name := text(each, "spec", "nodeName"))})),
        requeueable=state != "ended",
        held=held and state != "ended",
    )


def exit_code(pods: Iterable[Mapping[str, Any]]) -> int | None:
    """With what a job ended, by its pods: ours before others, since those who are stopped because of it end otherwise."""
    codes = [code for pod in pods for status in items(pod, "status", "containerStatuses") for code in _codes(status)]
    bad = [code for code in codes if code]
    return RETRYABLE if RETRYABLE in bad else bad[0] if bad else 0 if codes else None


def refuse_requeue(job: JobState) -> None:
    """Say what a person has to do for a job that has ended.

    Raises:
        ConfigurationError: it has ended for good or is gone.
    """
    if job.state == "absent" or (job.state == "ended" and not job.requeueable):
        one = named(job.job)
        raise ConfigurationError(
            f"{one.kind.title} {one.namespace}/{one.name} {_ENDINGS[job.state]}, and Kubernetes starts none a second time: submit it "
            "again (kubectl replace --force -f, or under a new name); the node stays cordoned, so it starts without it"
        )


_ENDINGS = {"ended": "has ended", "absent": "is not there any more"}


def _codes(status: Mapping[str, Any]) -> list[int]:
    """Exit codes of a container: of its end, or where it was restarted in its place, of the end before."""
    ends = (part(status, "state", "terminated"), part(status, "lastState", "terminated"))
    return [code for end in ends if isinstance(code := end.get("exitCode"), int)][:1]


def _is_suspended(found: Mapping[str, Any]) -> bool:
    return True in (part(found, "spec").get("suspend"), part(found, "spec", "runPolicy").get("suspend"))


def _restarts(found: Mapping[str, Any], inner: Mapping[str, Any] | None) -> int:
    """How often it was started again, which a JobSet alone counts. Pods that failed are no restarts: the last of them ends the job."""
    told = part(found if inner is None else inner, "status").get("restarts")
    return told if isinstance(told, int) else 0
