"""Whether a job on Kubernetes would go on without a node that is cordoned, by what it asks for: pure.

A cordon keeps new pods off a node, but for those that tolerate it or are bound to the node by name; and it does nothing to a container that
the kubelet restarts where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitwitness.fleet.clusters.base import Check
from bitwitness.fleet.clusters.kubernetes_jobs import KINDS, RETRYABLE, Named
from bitwitness.fleet.clusters.kubernetes_reading import items, part, text

UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""The taint of a cordon; who tolerates it is put on a cordoned node."""
_HOST = "kubernetes.io/hostname"
_ONCE = "Never of a PyTorchJob"
_BACKOFF = 6
"""`backoffLimit` of a Job that names none."""


def checks(
    one: Named, found: Mapping[str, Any], inner: Mapping[str, Any] | None, taint: str, *, evict: bool
) -> tuple[Check, ...]:
    """What would keep a job from going on.

    Args:
        one: which.
        found: its object.
        inner: the JobSet of a TrainJob.
        taint: key of ours; "" for none.
        evict: whether pods are evicted.
    """
    templates = list(_templates(one, inner if one.kind is KINDS["trainjob"] else found))
    if not templates:
        return (Check("pod templates", "unknown", f"{one.kind.title} {one.name} shows no pod template"),)
    made = [check for name, policy, spec in templates for check in _template(name, policy, spec, taint, evict=evict)]
    return (*made, *_restarts(one, found, inner, evict=evict))


def _templates(one: Named, found: Mapping[str, Any] | None) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, restart policy and pod spec of each kind of pod."""
    if one.kind is KINDS["job"]:
        spec = part(found, "spec", "template", "spec")
        yield "pods", text(spec, "restartPolicy"), spec
    elif one.kind is KINDS["pytorchjob"]:
        for name, replica in part(found, "spec", "pytorchReplicaSpecs").items():
            policy = text(replica, "restartPolicy") or "OnFailure"
            yield str(name), _ONCE if policy == "Never" else policy, part(replica, "template", "spec")
    else:
        for each in items(found, "spec", "replicatedJobs"):
            spec = part(each, "template", "spec", "template", "spec")
            yield text(each, "name") or "pods", text(spec, "restartPolicy"), spec


def _template(name: str, policy: str, spec: Mapping[str, Any], taint: str, *, evict: bool) -> Iterator[Check]:
    keys = [UNSCHEDULABLE, *([taint] if taint else [])]
    what = f"{name}: kept off a cordoned node"
    if text(spec, "nodeName") or _HOST in part(spec, "nodeSelector") or _is_bound(spec):
        yield Check(
            what,
            "bad",
            "its pods are bound to a node by name, and start on no other",
            f"remove nodeName, nodeSelector {_HOST} and such affinities",
        )
    elif all(_tolerates(spec, key) for key in keys):
        yield Check(
            what, "bad", f"its pods tolerate {' and '.join(keys)}", "tolerate by name what is needed, and not these"
        )
    else:
        yield Check(what, "good", f"its pods do not tolerate {' and '.join(keys)}")
    yield _policy(name, policy, evict=evict)
    yield _told(name, spec)


def _policy(name: str, policy: str, *, evict: bool) -> Check:
    what = f"{name}: restart elsewhere"
    if policy == _ONCE:
        return Check(
            what, "bad", "restartPolicy Never: no pod is made anew, and the job ends", "restartPolicy: ExitCode"
        )
    if policy in ("OnFailure", "Always") and not evict:
        return Check(
            what,
            "bad",
            f"restartPolicy {policy}: the kubelet restarts a container where it is, on a cordoned node too",
            "restartPolicy: Never (Job, JobSet) or ExitCode (PyTorchJob); or evict = true in the policy",
        )
    then = {"ExitCode": f"{RETRYABLE} is retryable", "Never": "a new pod is made"}.get(policy, "its pods are evicted")
    return Check(what, "good", f"restartPolicy {policy or 'Never'}: {then}")


def _training(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The containers that train: those with GPUs, or where none asks for any all of them."""
    found = items(spec, "containers")
    return [one for one in found if any("gpu" in key for key in part(one, "resources", "limits"))] or found


def _told(name: str, spec: Mapping[str, Any]) -> Check:
    """Whether the pods are told on which node they run: the host's name is not taken for it in a pod, whatever its network."""
    what, containers = f"{name}: knows its node", _training(spec)
    remedy = "env: {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}"
    for each in (env for one in containers for env in items(one, "env")):
        if each.get("name") not in ("NODE_NAME", "BITWITNESS_NODE"):
            continue
        if text(each, "valueFrom", "fieldRef", "fieldPath") == "spec.nodeName":
            return Check(what, "good", f"{each.get('name')} is the node's name")
        return Check(what, "bad", f"{each.get('name')} is not taken from spec.nodeName", remedy)
    return Check(what, "bad", "NODE_NAME is not set: an incident would name the pod, and no node is acted upon", remedy)


def _restarts(one: Named, found: Mapping[str, Any], inner: Mapping[str, Any] | None, *, evict: bool) -> Iterator[Check]:
    """Whether it may still be started again."""
    sets = inner if one.kind is KINDS["trainjob"] else found if one.kind is KINDS["jobset"] else None
    if sets is not None:
        limit, used = part(sets, "spec", "failurePolicy").get("maxRestarts"), part(sets, "status").get("restarts")
        yield _left("failurePolicy.maxRestarts", limit if isinstance(limit, int) else 0, used)
        yield _set_policy(sets, evict=evict)
        return
    if one.kind is KINDS["job"]:
        spec = part(found, "spec")
        per_index = spec.get("backoffLimitPerIndex")
        limit = per_index if isinstance(per_index, int) else spec.get("backoffLimit")
        used = None if isinstance(per_index, int) else part(found, "status").get("failed")
        name = "backoffLimitPerIndex" if isinstance(per_index, int) else "backoffLimit"
        pods = spec.get("parallelism")
        at_once = pods if isinstance(pods, int) and not isinstance(per_index, int) else 1
        yield _left(name, limit if isinstance(limit, int) else _BACKOFF, used, at_once)
        yield _failure_policy(spec, evict=evict)
        return
    limit = part(found, "spec", "runPolicy").get("backoffLimit")
    if isinstance(limit, int):
        failed = [part(each).get("failed") for each in part(found, "status", "replicaStatuses").values()]
        yield _left("runPolicy.backoffLimit", limit, sum(each for each in failed if isinstance(each, int)))


def _set_policy(sets: Mapping[str, Any], *, evict: bool) -> Check:
    """What the rules of a JobSet make of a Job in it that failed because of our exit code; the first that matches counts."""
    jobs = [part(each, "template", "spec") for each in items(sets, "spec", "replicatedJobs")]
    failed = any(_failure_policy(each, evict=evict).outcome == "bad" for each in jobs)
    reason = "PodFailurePolicy" if failed else "BackoffLimitExceeded"
    for rule in items(sets, "spec", "failurePolicy", "rules"):
        reasons = rule.get("onJobFailureReasons")
        if not reasons or (isinstance(reasons, list) and reason in reasons):
            action = str(rule.get("action"))
            bad = action == "FailJobSet"
            remedy = f"no rule FailJobSet for {reason}, or none of podFailurePolicy for {RETRYABLE}" if bad else ""
            return Check("exit code 160", "bad" if bad else "good", f"{reason} means {action}", remedy)
    return Check("exit code 160", "good", f"{reason} starts the set again")


def _left(name: str, limit: int, used: object, at_once: int = 1) -> Check:
    """`at_once`: how many of them one restart of the whole job uses."""
    left = limit - (used if isinstance(used, int) else 0)
    if left >= max(at_once, 1):
        return Check("restarts left", "good", f"{left} of {name} {limit}")
    text = (
        f"{left} of {name} {limit} are left, and one restart uses {at_once}"
        if left > 0
        else f"none is left of {name} {limit}"
    )
    return Check("restarts left", "bad", f"{text}: the job ends for good", f"raise {name}")


def _failure_policy(spec: Mapping[str, Any], *, evict: bool) -> Check:
    """What the rules of a Job make of our exit code, and of an eviction; the first that matches counts."""
    names = {text(each, "name") for each in _training(part(spec, "template", "spec"))}
    for rule in items(spec, "podFailurePolicy", "rules"):
        action, codes = str(rule.get("action")), part(rule, "onExitCodes")
        values = codes.get("values")
        if evict and any(each.get("type") == "DisruptionTarget" for each in items(rule, "onPodConditions")):
            if action in ("FailJob", "FailIndex"):
                remedy = "action Ignore for DisruptionTarget"
                return Check("exit code 160", "bad", f"podFailurePolicy: an eviction means {action}", remedy)
            continue
        container = text(codes, "containerName")
        if not isinstance(values, list) or (container and container not in names):
            continue
        if (RETRYABLE in values) == (codes.get("operator") == "In"):
            bad = action in ("FailJob", "FailIndex")
            remedy = f"before it, a rule for {RETRYABLE} with action Count or Ignore" if bad else ""
            return Check("exit code 160", "bad" if bad else "good", f"podFailurePolicy: {action}", remedy)
    return Check("exit code 160", "good", "no rule of podFailurePolicy ends the job with it")


def _tolerates(spec: Mapping[str, Any], key: str) -> bool:
    """Whether pods tolerate the taint of this key: every one of it, or the very one of a cordon, which has no value.

    The value of ours is another one with each incident, so none that is named beforehand is equal to it. Who names no operator
    means `Equal` (https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/).
    """
    return any(
        one.get("effect") in (None, "", "NoSchedule")
        and (
            (one.get("operator") == "Exists" and one.get("key") in (None, "", key))
            or (one.get("operator") in (None, "", "Equal") and one.get("key") == key and _is_value_equal(one, key))
        )
        for one in items(spec, "tolerations")
    )


def _is_value_equal(toleration: Mapping[str, Any], key: str) -> bool:
    return key == UNSCHEDULABLE and toleration.get("value") in (None, "")


def _is_bound(spec: Mapping[str, Any]) -> bool:
    """Whether a required affinity names hosts that alone may be used."""
    required = part(spec, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = items(required, "nodeSelectorTerms")
    tests = [test for term in terms for test in (*items(term, "matchExpressions"), *items(term, "matchFields"))]
    return any(test.get("key") in (_HOST, "metadata.name") and test.get("operator") == "In" for test in tests)
