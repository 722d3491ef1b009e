"""Whether the API server would let an act through: tried beforehand, without changing anything.

It is asked whether we may (SelfSubjectAccessReview), and to do it without keeping it (`dryRun=All`), which runs its validation and the
webhooks of the cluster as well. Evictions are not tried so: a server that knew no dry run would evict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Call, Check, NodeState, one_line
from bitwitness.fleet.clusters.kubernetes_api import CONFLICT, KubernetesApi, Permission, Refused, permission_for
from bitwitness.fleet.clusters.kubernetes_reading import part, text
from bitwitness.fleet.clusters.kubernetes_words import EVENTS

_TOLD = Permission("get", "events", "", EVENTS)
"""With which a look sees whether an Event was made before a kill. Without it the Event is made again, which is refused: no harm."""
_BAD = 400
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def permissions(calls: Sequence[Call], lease: str, *, evict: bool = False) -> tuple[Permission, ...]:
    """All that is needed: to look, to lead, and for the calls."""
    needed = [Permission("get", "nodes"), Permission("list", "nodes"), Permission("list", "pods")]
    if lease:
        namespace = lease.partition("/")[0]
        needed += [Permission(verb, "leases", "coordination.k8s.io", namespace) for verb in ("get", "create", "update")]
    needed += [permission_for(call.words[0], call.words[1]) for call in calls]
    needed += [_TOLD] if any(call.words[1].endswith("/events") for call in calls) else []
    needed += [Permission("create", "pods/eviction")] if evict else []  # also where no pod runs there at this moment
    return tuple(dict.fromkeys(needed))


def check_permissions(api: KubernetesApi, needed: Sequence[Permission], lease: str) -> Iterator[Check]:
    """Ask for each."""
    for one in needed:
        what = f"permission to {one.verb} {one.resource}"
        name = lease.partition("/")[2] if one.resource == "leases" and one.verb != "create" else ""
        try:
            allowed = _may(api, one, name)
        except ClusterError as error:
            yield Check(what, "unknown", one_line(str(error), 400))
            continue
        if allowed:
            yield Check(what, "good", "allowed")
        elif one == _TOLD:
            yield Check(
                what, "unknown", "forbidden: after a kill an Event is made again, and refused", f"add a rule ({one})"
            )
        else:
            yield Check(what, "bad", "forbidden", f"add a rule ({one})")


def try_calls(api: KubernetesApi, calls: Sequence[Call]) -> Iterator[Check]:
    """Have every call made without being kept; of evictions only say that they are not tried."""
    pods = [call for call in calls if call.words[1].endswith("/eviction")]
    for call in calls:
        if call not in pods:
            yield _try(api, call)
    if pods:
        text = f"{len(pods)} pods would be evicted; whether budgets for disruptions let them go is not tried"
        yield Check("evictions", "unknown", text, "kubectl get poddisruptionbudgets --all-namespaces")


def check_lease(api: KubernetesApi, path: str, name: str) -> Check:
    """Who leads now."""
    what = f"lease {name}"
    try:
        found = api.find(path)
    except ClusterError as error:
        return Check(what, "bad", one_line(str(error), 400), "let the controller get, create and update it")
    holder = text(found, "spec", "holderIdentity")
    return Check(what, "good", f"{holder} leads" if holder else "nobody leads")


def check_node(state: NodeState) -> Check:
    """Whether the node is there and could be taken out."""
    what = f"node {state.node}"
    if state.service == "absent":
        remedy = "nodes are named as `kubectl get nodes` names them; pods learn theirs from spec.nodeName"
        return Check(what, "bad", state.raw or "the cluster has no such node", remedy)
    if state.service != "in" and not state.ours:
        return Check(what, "bad", f"somebody else has taken it out ({state.reason}): it would be left alone")
    return Check(what, "good", state.raw)


def _try(api: KubernetesApi, call: Call) -> Check:
    method, path = call.words
    what = f"dry run of {method} {path}"
    try:
        api.ask(method, path, call.body, query={"dryRun": "All", "fieldManager": "bitwitness"})
    except Refused as error:
        if error.status == CONFLICT and error.reason == "AlreadyExists":
            return Check(what, "good", "it is there already")
        if "dry run" in str(error).lower() and error.status == _BAD:
            remedy = "its owner declares sideEffects: None or NoneOnDryRun"
            return Check(
                what, "unknown", one_line(str(error), 400), remedy
            )  # a webhook that may do more than it is asked
        if error.status == CONFLICT:
            return Check(what, "unknown", "somebody else changed the node at this moment", "try again")
        return Check(what, "bad", one_line(str(error), 400), _remedy(error))
    except ClusterError as error:
        return Check(what, "unknown", one_line(str(error), 400))
    return Check(what, "good", "the API server would do it")


def _remedy(error: Refused) -> str:
    return {
        403: "see the permissions above, and the admission policies of the cluster",
        404: "the node or the namespace is not there",
        422: "the API server finds a value invalid: its words say which",
    }.get(error.status, "")


def _may(api: KubernetesApi, one: Permission, name: str) -> bool:
    resource, _, sub = one.resource.partition("/")
    asked: dict[str, Any] = {"verb": one.verb, "group": one.group, "resource": resource}
    asked |= {
        key: value for key, value in (("subresource", sub), ("namespace", one.namespace), ("name", name)) if value
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    return part(api.ask("POST", _REVIEW, body), "status").get("allowed") is True
