"""What would fail in the night on HyperPod, tried without changing anything: permissions, the cluster, the machine, the job.

Whether SageMaker would let an act through can be told only by IAM's simulation of the policies of whoever asks, which needs a
permission of its own and knows nothing of service control policies. Where it may not be asked, the answer is "unknown" and the
exact list of actions, never "good".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, Call, Check, NodeState, Outcome, Rehearsing, one_line
from bitwitness.fleet.clusters.hyperpod_eks import OnKubernetes
from bitwitness.fleet.clusters.hyperpod_plan import Seen, Way, inner_of, is_patch, seen_in
from bitwitness.fleet.clusters.hyperpod_words import ACT_ACTIONS, HEALTH_LABEL, READ_ACTIONS

if TYPE_CHECKING:
    from bitwitness.fleet.clusters.hyperpod import HyperPodCluster
    from bitwitness.fleet.clusters.hyperpod_api import ClusterInfo, SageMakerApi

_ROLE = re.compile(r"arn:(aws[a-z-]*):sts::([0-9]{12}):assumed-role/([^/]+)/.+")
_AUTO_RESUME = re.compile(r"(?m)^[^#\n]*--auto-resume(?:=1|\s+1|\b(?!=0))")
_RESUMES = "sagemaker.amazonaws.com/enable-job-auto-resume"
_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"
_PYTORCHJOB = "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs/{}"


def check(cluster: HyperPodCluster, way: Way, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
    """Everything that an act needs; what the scheduler needs of it is told by its own adapter."""
    found: list[Check] = []
    info, said = _cluster(cluster.api, act)
    found += [said]
    if info is not None:
        found += _about(info, cluster.orchestrator, way, act)
    found += [_reads(cluster.api)]
    found += _permissions(cluster.api, actions_of(way, act, calls))
    found += _machine(state, info, way, act)
    if isinstance(cluster.inner, Rehearsing):
        inner = tuple(call for call in calls if call.words[:1] != ("sagemaker",) and not is_patch(call))
        kind = act if way.by == "reason" or act.kind not in ("reboot", "replace") else _drain(act)
        found += cluster.inner.check(kind, inner_of(state), inner)
    return tuple(found)


def _drain(act: Act) -> Act:
    return Act("drain", act.node, act.incident, act.reason, act.devices)


def actions_of(way: Way, act: Act, calls: Sequence[Call]) -> tuple[str, ...]:
    """The actions of IAM that an act needs, beside those of looking."""
    wanted = [ACT_ACTIONS[call.words[1]] for call in calls if call.words[:1] == ("sagemaker",)]
    if act.kind == "drain" and way.checks:
        wanted.append(ACT_ACTIONS["StartClusterHealthCheck"])
    return tuple(dict.fromkeys(wanted))


def _cluster(api: SageMakerApi, act: Act) -> tuple[ClusterInfo | None, Check]:
    what = f"HyperPod cluster {api.name}"
    try:
        info = api.cluster()
    except (ClusterError, ConfigurationError) as error:
        remedy = f"allow sagemaker:DescribeCluster on {api.arn}, or correct the name"
        asked = getattr(error, "refused", False)
        return None, Check(what, "bad", str(error), remedy if asked else "see that SageMaker can be reached from here")
    if info.status != "InService":
        text = f"its status is {info.status}: SageMaker refuses to reboot and to replace while it is so"
        return info, Check(what, _outcome(act), text, "wait until it is InService, or see its FailureMessage")
    return info, Check(what, "good", f"it is InService in {api.region}, {len(info.groups)} instance groups")


def _outcome(act: Act) -> Outcome:
    """What it means that SageMaker does nothing to a machine now: a drain needs nothing of it."""
    return "bad" if act.kind in ("reboot", "replace") else "unknown"


def _about(info: ClusterInfo, orchestrator: str, way: Way, act: Act) -> list[Check]:
    found = []
    if info.orchestrator != orchestrator:
        text = f"SageMaker says {info.orchestrator}, the settings say {orchestrator}"
        found.append(Check("orchestrator", "bad", text, f'orchestrator = "{info.orchestrator}"'))
    else:
        found.append(Check("orchestrator", "good", info.orchestrator))
    if way.by in ("labels", "reason") and act.kind in ("reboot", "replace"):
        if info.recovery == "Automatic":
            found.append(Check("NodeRecovery", "good", "Automatic: what is asked for by words is acted upon"))
        else:
            text = f"NodeRecovery is {info.recovery or 'not told'}: what is asked for by {way.by} waits for nobody"
            outcome: Outcome = "bad" if info.recovery == "None" else "unknown"
            found.append(
                Check("NodeRecovery", outcome, text, 'by = "api", or UpdateCluster with NodeRecovery=Automatic')
            )
    if way.checks and act.kind == "drain":
        text = (
            f"{', '.join(way.checks)} is asked for by StartClusterHealthCheck once no job runs there any more; a machine that fails is "
            "rebooted or replaced by HyperPod itself, and one that passes stays out"
        )
        found.append(
            Check("deep health check", "unknown", text, "it needs a recent machine image: UpdateClusterSoftware")
        )
    return found


def _reads(api: SageMakerApi) -> Check:
    """Listing is tried, as looking at a node does it."""
    try:
        count = len(api.instances())
    except (ClusterError, ConfigurationError) as error:
        return Check("permission to look", "bad", str(error), f"allow {', '.join(READ_ACTIONS)} on {api.arn}")
    return Check("permission to look", "good", f"{count} machines are listed")


def _permissions(api: SageMakerApi, actions: Sequence[str]) -> list[Check]:
    """One check for each action; IAM is asked where that is allowed."""
    if not actions:
        return []
    remedy = f"allow {', '.join(actions)} on {api.arn} to the role of the controller"
    try:
        caller = api.caller()
    except (ClusterError, ConfigurationError) as error:
        return [
            Check(
                "credentials of AWS", "bad", str(error), "give the controller a role, and see that STS can be reached"
            )
        ]
    who = Check("credentials of AWS", "good", f"this is {caller}")
    try:
        said = api.simulate(principal_of(caller), actions, api.arn if api.arn.endswith(("/*", ")")) is False else "*")
    except (ClusterError, ConfigurationError) as error:
        text = f"IAM cannot be asked whether {caller} may {', '.join(actions)}: {one_line(str(error), 300)}"
        return [who, Check("permissions to act", "unknown", text, remedy)]
    found = [who]
    for action in actions:
        decision = said.get(action, "no word")
        if decision == "allowed":
            found.append(Check(f"permission {action}", "good", f"IAM's simulation allows it to {caller}"))
        else:
            text = f"IAM's simulation for {caller} says {decision}"
            found.append(Check(f"permission {action}", "bad", text, f"allow {action} on {api.arn}"))
    return found


def principal_of(caller: str) -> str:
    """Whose policies are simulated: of a session of a role, the role. A role with a path is not found by this, and IAM says so."""
    match = _ROLE.fullmatch(caller)
    return f"arn:{match[1]}:iam::{match[2]}:role/{match[3]}" if match else caller


def _machine(state: NodeState, info: ClusterInfo | None, way: Way, act: Act) -> list[Check]:
    seen, what = seen_in(state), f"machine of {state.node}"
    if not seen.asked:
        return [Check(what, "unknown", "SageMaker has not said", "see the checks before this one")]
    if not seen.instance or seen.status == "NotFound":
        text = seen.why or f"SageMaker has no machine for {state.node}"
        return [Check(what, "bad", text, "the node's name must be hyperpod-i-... (EKS) or ip-N-N-N-N (Slurm)")]
    found = []
    if seen.status == "Running":
        found.append(Check(what, "good", f"{seen.instance} in group {seen.group} is Running"))
    else:
        text = f"{seen.instance} is {seen.status}{f': {seen.message}' if seen.message else ''}"
        found.append(Check(what, _outcome(act), text, "SageMaker acts on a machine that is Running"))
    found += _group(seen, info, act)
    if act.kind == "replace":
        text = "whether the cluster was ever patched by UpdateClusterSoftware is not told, and BatchReplaceClusterNodes needs it"
        found.append(
            Check(
                "platform software",
                "unknown",
                text,
                f"aws sagemaker update-cluster-software --cluster-name {way.cluster}",
            )
        )
        text = "spare machines and quotas are not told by SageMaker; the old machine goes before the new one comes"
        found.append(
            Check("quota", "unknown", text, "Service Quotas, SageMaker: instances of this type for cluster usage")
        )
    return found


def _group(seen: Seen, info: ClusterInfo | None, act: Act) -> list[Check]:
    group = next((one for one in info.groups if one.name == seen.group), None) if info is not None else None
    if group is None:
        return []
    found = []
    if group.role in ("Controller", "Login"):
        text = f"{seen.group} is a {group.role} group of Slurm's"
        found.append(Check("instance group", _outcome(act), text, "it is never replaced by bitwitness"))
    if group.current < group.target:
        text = f"group {group.name} has {group.current} of {group.target} machines: HyperPod finds no more now"
        found.append(Check("capacity", _outcome(act), text, "free or raise the quota, or ask AWS for capacity"))
    return found


# Jobs ------------------------------------------------------------------------------------------------------------------


def check_job(cluster: HyperPodCluster, job: str, script: Callable[[str], str] | None) -> tuple[Check, ...]:
    """What the scheduler says of a job, and what HyperPod's auto-resume makes of it."""
    found = cluster.inner.check_job(job) if isinstance(cluster.inner, Rehearsing) else ()
    more = _kubernetes_job(cluster, job) if cluster.orchestrator == "eks" else _slurm_job(job, script)
    return (*found, *more)


def _slurm_job(job: str, script: Callable[[str], str] | None) -> tuple[Check, ...]:
    what = "auto-resume"
    if script is None:
        text = "whether srun is called with --auto-resume=1 cannot be seen from here"
        return (Check(what, "unknown", text, _SLURM_REMEDY),)
    try:
        found = _AUTO_RESUME.search(script(job.removeprefix("slurm:")))
    except (ClusterError, ConfigurationError) as error:
        return (Check(what, "unknown", str(error), _SLURM_REMEDY),)
    if found is None:
        return (
            Check(
                what, "good", "the script of the job does not call srun with --auto-resume: the controller requeues it"
            ),
        )
    text = (
        "srun is called with --auto-resume: it asks for faults of the hardware and sees none after silent corruption, so the job only "
        "ends; the controller takes the node out and requeues it"
    )
    return (Check(what, "good", text, "requeue = true, sbatch --requeue and --open-mode=append"),)


_SLURM_REMEDY = "requeue = true in the policy, sbatch --requeue and --open-mode=append: do not rely on --auto-resume"


def _kubernetes_job(cluster: HyperPodCluster, job: str) -> tuple[Check, ...]:
    what = "auto-resume"
    namespace, _, rest = job.removeprefix("kubernetes:").partition("/")
    kind, _, name = rest.partition("/")
    if kind != "pytorchjob" or not isinstance(cluster.inner, OnKubernetes):
        return (Check(what, "good", f"HyperPod resumes no {kind or 'such job'} by itself: its own policy does"),)
    try:
        found = cluster.inner.api.find(_PYTORCHJOB.format(namespace, name))
    except (ClusterError, ConfigurationError) as error:
        return (Check(what, "unknown", str(error), "allow get on it, or look at its annotations"),)
    if found is None:
        return (Check(what, "unknown", f"there is no {kind} {namespace}/{name}"),)
    return tuple(traps_of(found, namespace))


def traps_of(found: Mapping[str, Any], namespace: str) -> list[Check]:
    """What keeps a PyTorchJob from being resumed on other nodes."""
    notes = (found.get("metadata") or {}).get("annotations") or {}
    if str(notes.get(_RESUMES, "")).lower() != "true":
        return [
            Check(
                "auto-resume",
                "good",
                "it is off for this job: its restartPolicy decides",
                f'to have it: {_RESUMES}: "true"',
            )
        ]
    checks = []
    if not str(notes.get(_RETRIES, "")).isdigit():
        checks.append(Check("auto-resume retries", "bad", f"{_RETRIES} is not set", f'{_RETRIES}: "2"'))
    if namespace != "kubeflow" and not namespace.startswith("hyperpod"):
        text = f"namespace {namespace} is neither kubeflow nor hyperpod*: HyperPod does not look there"
        checks.append(Check("auto-resume namespace", "bad", text, "move the job"))
    for name, replica in ((found.get("spec") or {}).get("pytorchReplicaSpecs") or {}).items():
        pod = (replica.get("template") or {}).get("spec") or {}
        policy = replica.get("restartPolicy")
        if policy != "OnFailure":
            text = f"{name}: restartPolicy is {policy}; auto-resume needs OnFailure"
            checks.append(Check("auto-resume restartPolicy", "bad", text, f"{name}.restartPolicy: OnFailure"))
        if (pod.get("nodeSelector") or {}).get(HEALTH_LABEL) != "Schedulable":
            text = f"{name}: its pods may start on a node that HyperPod holds back"
            checks.append(
                Check("auto-resume nodeSelector", "bad", text, f"nodeSelector: {{{HEALTH_LABEL}: Schedulable}}")
            )
    text = "it acts on what HyperPod's own agents see; silent corruption is not that, so the controller cordons the node first"
    return [*checks, Check("auto-resume", "bad" if checks else "good", text)]
