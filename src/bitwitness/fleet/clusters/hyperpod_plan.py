"""What has to be asked for an act on HyperPod, whether it has happened, and what is left of it: pure.

The scheduler takes the node out of service first; only then SageMaker is asked, for the machine by its own id. That id was seen when
the node was looked at, and it names one machine and never another: what has taken its place cannot be hit by a plan that is
old. A machine that was launched after the incident is not the one that was blamed, and nothing is done to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import Act, Call, Cluster, Finishing, Foreseeing, Landed, NodeState, valid_node
from bitwitness.fleet.clusters.hyperpod_names import GOING, Instance, instance_in
from bitwitness.fleet.clusters.hyperpod_words import (
    ASKED,
    CHECKING,
    HEALTH_LABEL,
    LEAVING,
    MARK,
    MARKED,
    PENDING,
    RESULTS,
)

By = Literal["api", "labels", "reason"]

_KEY = "hyperpod"
_OUT = ("out", "draining")
_BATCH = {"replace": "BatchReplaceClusterNodes", "reboot": "BatchRebootClusterNodes"}
_BOOTED = timedelta(seconds=60)
"""Two times of boot further apart are two boots; Slurm computes them anew from the uptime."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a cluster is asked.

    Attributes:
        cluster: name or ARN of the HyperPod cluster.
        by: through its API, by labels of the Kubernetes node, or by the reason of the Slurm node.
        checks: deep health checks that a node that was taken out gets.
    """

    cluster: str
    by: By = "api"
    checks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What SageMaker and HyperPod's labels say of a node, beside what its scheduler says.

    Attributes:
        instance, group, status, message, launched: as in `hyperpod_names.Instance`; "" where it has no machine.
        role: of its group on Slurm: `Controller`, `Login`, `Compute` or "".
        asked: whether SageMaker has answered.
        why: why no machine could be told; "" where one could, or where there is none.
        health, check: values of HyperPod's labels.
        mark: because of which incident a deep health check was asked for, and which result stood there then.
        ran: whether this process has seen something of the check that was asked for.
        asked_for, asked_before: what we have set the label of health to, and what it was before.
        uid: of the Kubernetes node.
        raw, awaits, machine: what the scheduler said, before it was put together with this.
    """

    instance: str = ""
    group: str = ""
    status: str = ""
    message: str = ""
    launched: str = ""
    role: str = ""
    asked: bool = False
    why: str = ""
    health: str = ""
    check: str = ""
    mark: str = ""
    ran: bool = False
    asked_for: str = ""
    asked_before: str = ""
    uid: str = ""
    raw: str = ""
    awaits: str = ""
    machine: str = ""

    def of(self, instance: Instance) -> Seen:
        """The same of a machine."""
        return replace(
            self,
            instance=instance.id,
            group=instance.group,
            status=instance.status,
            message=instance.message,
            launched=instance.launched,
            asked=True,
        )


# Putting together ------------------------------------------------------------------------------------------------------


def together(inner: NodeState, seen: Seen, missing: str = "") -> NodeState:
    """A node as the scheduler and SageMaker show it.

    Args:
        inner: what the scheduler shows.
        seen: what SageMaker shows.
        missing: what is said of a replacement that has not come yet, of a node that is gone.
    """
    kept = replace(seen, raw=inner.raw, awaits=inner.awaits, machine=inner.instance)
    gone = inner.service == "absent" and _is_going(seen) and bool(seen.instance)
    return replace(
        inner,
        raw=f"gone ({_machine(seen)})" if gone else _raw(inner, seen),
        instance=seen.instance,
        awaits=inner.awaits or missing or _awaits(inner, seen),
        more={**inner.more, _KEY: asdict(kept)},
    )


def _raw(inner: NodeState, seen: Seen) -> str:
    """A node that the scheduler does not have, and whose machine nobody says to be gone, is shown as nothing."""
    if inner.service == "absent":
        return inner.raw
    health = f", {seen.health}" if seen.health and seen.health != "Schedulable" else ""
    check = f", deep health check {seen.check}" if seen.check and seen.mark else ""
    return f"{inner.raw or inner.service} ({_machine(seen)}{health}{check})"


def _machine(seen: Seen) -> str:
    status = f"{seen.status}{f': {seen.message}' if seen.message else ''}"
    return f"{seen.instance} {status}".strip() or seen.why or ("no machine" if seen.asked else "machine not known")


def _awaits(inner: NodeState, seen: Seen) -> str:
    """What is still to happen to the machine of a node that is out; one that is in service awaits nothing."""
    if not seen.asked and inner.service in (*_OUT, "absent"):
        return "an answer of SageMaker"
    if inner.service not in _OUT:
        return ""
    if seen.health in PENDING.values():
        return seen.health
    if not seen.instance:
        return seen.why or "a machine"
    # A deep health check is no step of a replacement unless the machine is new, and then it is waited for as well.
    return "" if seen.status == "Running" else f"{seen.instance} is {seen.status or 'unknown'}"


def seen_in(state: NodeState) -> Seen:
    """What `together` has kept."""
    kept = state.more.get(_KEY)
    return (
        Seen(**kept) if isinstance(kept, Mapping) else Seen(raw=state.raw, awaits=state.awaits, machine=state.instance)
    )


def noted(state: NodeState, **more: Any) -> NodeState:
    """The same node, with what else is known of it."""
    return replace(state, more={**state.more, _KEY: asdict(replace(seen_in(state), **more))})


def inner_of(state: NodeState) -> NodeState:
    """The node as its scheduler showed it."""
    seen = seen_in(state)
    more = {key: value for key, value in state.more.items() if key != _KEY}
    return replace(state, raw=seen.raw, awaits=seen.awaits, instance=seen.machine, more=more)


# Planning --------------------------------------------------------------------------------------------------------------


def plan(act: Act, state: NodeState, inner: Cluster, way: Way) -> tuple[Call, ...]:
    """The exact calls of an act; none where it has landed already.

    Raises:
        ConfigurationError: it cannot be done, or which machine is meant cannot be told.
    """
    node = valid_node(act.node)
    if state.node != node:
        raise ConfigurationError(f"the state of {state.node!r:.80} was given for an act on {node}")
    before = inner_of(state)
    if act.kind == "drain":
        _check_blame(act, seen_in(state))
        return inner.plan(act, before)
    if act.kind == "clear":
        return (*_take_back(act, state), *inner.plan(act, before))
    if act.kind not in _BATCH:
        raise ConfigurationError(f"HyperPod cannot {act.kind} a node")
    if state.service == "absent":
        raise ConfigurationError(f"the cluster has no node {node}: nothing is done")
    seen = seen_in(state)
    if act.kind == "replace" and state.service in _OUT and _is_going(seen):
        return _left(act, before, inner)  # the machine is on its way out already
    _check_blame(act, seen)
    _check_machine(act, seen)
    if seen.role in ("Controller", "Login"):
        raise ConfigurationError(
            f"{node} is in {seen.group}, a {seen.role} group: HyperPod does not {act.kind} these for us"
        )
    if way.by == "reason":
        return inner.plan(act, before)
    if state.service in _OUT and not state.ours:
        raise ConfigurationError(
            f"{node} was taken out by {state.reason_by or 'somebody else'} ({state.reason or 'no reason'!r:.200}): it is theirs"
        )
    first = _left(act, before, inner) if state.service in _OUT else inner.plan(replace(act, kind="drain"), before)
    if not seen.instance:
        if seen.asked:
            raise ConfigurationError(f"{node}: {seen.why or 'SageMaker has no machine of this name'}: nothing is done")
        # To be out of service is what protects jobs; which machine it is is asked then, and the rest is planned anew.
        body: dict[str, object] = {"ClusterName": way.cluster, "of": node}
        return (*first, Call(("sagemaker", "ListClusterNodes"), body))
    return (*first, _ask(act, seen, way))


def _left(act: Act, inner: NodeState, cluster: Cluster) -> tuple[Call, ...]:
    """What is left of taking the node out."""
    return cluster.rest(replace(act, kind="drain"), inner) if isinstance(cluster, Finishing) else ()


def _ask(act: Act, seen: Seen, way: Way) -> Call:
    """The request itself. A machine that is named by its id is replaced once however often it is asked for; a reboot is not."""
    again = act.kind == "replace"
    if way.by == "labels":
        wanted = PENDING[act.kind]
        old = seen.asked_before if seen.asked_for and seen.asked_for == seen.health else seen.health
        notes = {ASKED: json.dumps({"wanted": wanted, "before": old})}
        meta = {"uid": seen.uid, "labels": {HEALTH_LABEL: wanted}, "annotations": notes}
        body: dict[str, object] = {"metadata": meta}
        return Call(("PATCH", f"/api/v1/nodes/{act.node}"), body, repeatable=again)
    body = {"ClusterName": way.cluster, "NodeIds": [seen.instance]}
    return Call(("sagemaker", _BATCH[act.kind]), body, repeatable=again)


def _take_back(act: Act, state: NodeState) -> tuple[Call, ...]:
    """A label that we have set, and that still says what we said, would have the machine exchanged under the next job."""
    seen = seen_in(state)
    if not seen.asked_for or seen.health != seen.asked_for:
        return ()
    meta = {"uid": seen.uid, "labels": {HEALTH_LABEL: seen.asked_before or None}, "annotations": {ASKED: None}}
    return (Call(("PATCH", f"/api/v1/nodes/{act.node}"), {"metadata": meta}),)


def _check_blame(act: Act, seen: Seen) -> None:
    """A name of a node says which machine it is only now.

    Raises:
        ConfigurationError: its machine came after the incident.
    """
    if _is_newer(act, seen):
        raise ConfigurationError(
            f"{act.node} is {seen.instance} now, which was launched at {seen.launched}, after the incident {act.incident}: it is "
            "not the machine that was blamed, and nothing is done to it"
        )


def _check_machine(act: Act, seen: Seen) -> None:
    """A name that says no machine may be that of another one by now.

    Raises:
        ConfigurationError: whether its machine is the one that was blamed cannot be told.
    """
    if act.blamed is not None and seen.instance and not seen.launched and instance_in(act.node) != seen.instance:
        raise ConfigurationError(
            f"{act.node} is {seen.instance} now, and SageMaker does not say when that was launched: whether it is the machine that was "
            f"blamed by incident {act.incident} cannot be told, and it is not to {act.kind}"
        )


def _is_newer(act: Act, seen: Seen) -> bool:
    """Whether a machine was launched after the incident."""
    blamed = act.blamed
    return blamed is not None and bool(seen.launched) and datetime.fromisoformat(seen.launched) > blamed


# Telling ---------------------------------------------------------------------------------------------------------------


def landed(act: Act, before: NodeState, now: NodeState, inner: Cluster, way: Way) -> Landed:
    """Whether an act that was intended at `before` has happened, by what the node shows now."""
    was, seen = seen_in(before), seen_in(now)
    if act.kind == "replace" and seen.instance:
        other = bool(was.instance) and was.instance != seen.instance
        if other or (way.by != "reason" and _is_newer(act, seen) and not was.launched):
            return "yes"
    if act.kind in ("drain", "clear") or way.by == "reason":
        return inner.landed(act, inner_of(before), inner_of(now))
    if act.kind == "replace" and now.service == "absent":
        return "yes" if was.instance and was.asked and seen.asked and _is_going(seen) else "unknown"
    if now.service in ("absent", "unknown"):
        return "unknown"
    if now.service not in _OUT:
        return "no"
    if seen.health == PENDING.get(act.kind):
        return "yes"
    if act.kind == "replace":
        if seen.asked and seen.why:
            return "unknown"
        # Where SageMaker has not answered it is not shown, and to ask for a machine by its id once more does no harm.
        return "yes" if (was.instance or seen.instance) and _is_going(seen) else "no"
    if was.instance and seen.instance == was.instance and seen.status in LEAVING:
        return "yes"
    rebooted = _is_rebooted(before.booted, now.booted)
    return "unknown" if rebooted is None else "yes" if rebooted else "no"


def _is_going(seen: Seen) -> bool:
    """Whether SageMaker shows that the machine of a node goes, or that there is none."""
    return seen.asked and not seen.why and (not seen.instance or seen.status in GOING)


def _is_rebooted(before: str, now: str) -> bool | None:
    if not before or not now:
        return None
    try:
        return abs(datetime.fromisoformat(now) - datetime.fromisoformat(before)) > _BOOTED
    except (ValueError, TypeError):
        return before != now


# What is left ----------------------------------------------------------------------------------------------------------


def rest(act: Act, now: NodeState, inner: Cluster, way: Way) -> tuple[Call, ...]:
    """What is left of an act that has landed: none where the node is in service again, or is not ours."""
    before = inner_of(now)
    if act.kind == "clear" or now.service not in _OUT or not now.ours:
        return ()
    left = _left(act, before, inner)
    return (*left, *_checks(act, now, inner, way)) if act.kind == "drain" else left


def _checks(act: Act, now: NodeState, inner: Cluster, way: Way) -> tuple[Call, ...]:
    """The deep health check: it is asked for, and that is noted on the node at once, so that it is asked for once.

    It has no id by which it could be found again, and noting it beforehand would lose it where a process is killed in between; it
    is noted only where it was asked for. That no job runs on the machine any more is seen to then; until then it is what is left to do.
    """
    seen = seen_in(now)
    if not way.checks or is_marked(act, now) or not seen.instance or not seen.group:
        return ()
    if _is_newer(act, seen):
        return ()  # another machine, of which nothing is known
    if seen.status == CHECKING or seen.check == "InProgress":
        return _mark(act, now, inner)
    if seen.status != "Running" or seen.health in PENDING.values():
        return ()
    return start_check(act, now, inner, way)


def start_check(act: Act, now: NodeState, inner: Cluster, way: Way) -> tuple[Call, ...]:
    """The calls that start a deep health check, and note on the node that it was asked for."""
    seen = seen_in(now)
    group: dict[str, object] = {
        "InstanceGroupName": seen.group,
        "InstanceIds": [seen.instance],
        "DeepHealthChecks": list(way.checks),
    }
    body: dict[str, object] = {"ClusterName": way.cluster, "DeepHealthCheckConfigurations": [group]}
    return (Call(("sagemaker", "StartClusterHealthCheck"), body), *_mark(act, now, inner))


def is_marked(act: Act, now: NodeState) -> bool:
    """Whether the deep health check of a node was asked for because of this incident."""
    seen = seen_in(now)
    return seen.mark.partition(" ")[0] == (act.incident or "by-hand") or MARKED in now.reason


def _mark(act: Act, now: NodeState, inner: Cluster) -> tuple[Call, ...]:
    """An annotation, or on a scheduler that has none words in the reason: the call of a drain without the state, which stays as it is."""
    seen = seen_in(now)
    if seen.uid:
        was = f" after {seen.check}" if seen.check in RESULTS else ""
        body = {"metadata": {"uid": seen.uid, "annotations": {MARK: f"{act.incident or 'by-hand'}{was}"}}}
        return (Call(("PATCH", f"/api/v1/nodes/{act.node}"), body),)
    as_if = replace(inner_of(now), service="in", raw="IDLE", reason="", awaits="")
    drain = inner.plan(replace(act, kind="drain", reason=f"{MARKED} {act.reason}"), as_if)
    return tuple(
        replace(
            call,
            words=tuple(word for word in call.words if not word.lower().startswith("state=")),
            body={key: value for key, value in call.body.items() if key != "state"}
            if isinstance(call.body, Mapping)
            else call.body,
        )
        for call in drain
    )


def marks(call: Call) -> bool:
    """Whether a call notes on a node that its deep health check was asked for."""
    if is_patch(call):
        return MARK in call.body["metadata"].get("annotations", {})
    return call.words[:1] != ("sagemaker",) and MARKED in str(call)


def foreseen(act: Act, state: NodeState, inner: Foreseeing, way: Way) -> NodeState:
    """The node after an act that was carried out whole, by what the scheduler's adapter says of the same."""
    severe = act.kind in _BATCH and way.by != "reason"
    after = inner.foreseen(replace(act, kind="drain") if severe else act, inner_of(state))
    seen = replace(seen_in(state), mark=act.incident or "by-hand")
    if act.kind == "clear" and seen.asked_for == seen.health:
        seen = replace(seen, health=seen.asked_before, asked_for="", asked_before="")
    return together(after, seen)


def is_patch(call: Call) -> bool:
    """Whether it is a patch of a Kubernetes node that says something in HyperPod's words, or notes a deep health check."""
    meta = call.body.get("metadata") if isinstance(call.body, Mapping) and set(call.body) == {"metadata"} else None
    if call.words[:1] != ("PATCH",) or len(call.words) != 2 or not isinstance(meta, Mapping) or not meta.get("uid"):
        return False
    labels, notes = meta.get("labels"), meta.get("annotations")
    if not isinstance(notes, Mapping):
        return False
    if set(meta) == {"uid", "labels", "annotations"} and isinstance(labels, Mapping):
        asks = labels.get(HEALTH_LABEL) in PENDING.values()
        return set(labels) == {HEALTH_LABEL} and set(notes) == {ASKED} and asks is (notes[ASKED] is not None)
    return set(meta) == {"uid", "annotations"} and set(notes) == {MARK}
