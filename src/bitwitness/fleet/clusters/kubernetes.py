"""Kubernetes, through the official client: a node that is suspect is cordoned, tainted and told about, and pods leave it when asked.

Kubernetes knows no reason for a cordon and no owner of one. So what we do to a node stands on it, in one annotation that is written with the
cordon in the same request, and a node without it is somebody else's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import (
    kubernetes_checks,
    kubernetes_job_checks,
    kubernetes_jobs,
    kubernetes_plan,
    kubernetes_reading,
)
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Census,
    Check,
    JobState,
    Landed,
    NodeState,
    one_line,
    valid_node,
)
from bitwitness.fleet.clusters.kubernetes_api import (
    ABSENT,
    CONFLICT,
    TOO_MANY,
    KubernetesApi,
    Refused,
    in_cluster,
    own_namespace,
)
from bitwitness.fleet.clusters.kubernetes_lease import TICKS, Lease
from bitwitness.fleet.clusters.kubernetes_words import COMPONENT, EVENTS, SUSPECT, is_key, is_ours
from bitwitness.topology import UNKNOWN

_SETTINGS = {"kind", "kubeconfig", "context", "timeout", "taint", "evict", "lease", "nodes"}
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_CALLS = {
    "node": re.compile(rf"PATCH /api/v1/nodes/({_NAME})"),
    "status": re.compile(rf"PATCH /api/v1/nodes/({_NAME})/status"),
    "event": re.compile(rf"POST /api/v1/namespaces/{EVENTS}/events"),
    "evict": re.compile(rf"POST /api/v1/namespaces/{_NAME}/pods/({_NAME})/eviction"),
}
_TRIES, _PAUSE = 4, 0.05
_OBSERVED, _LATELY = 64, 3600.0


class KubernetesCluster:
    """A cluster of Kubernetes.

    Args:
        api: its API server.
        taint: key of the taint that a suspect node gets, with the effect NoSchedule; "" for none.
        evict: whether its pods are evicted as well.
        lease: `namespace/name` of the lease by which one controller leads; "" for none.
        nodes: a label selector of the nodes that count as the size of the cluster; "" for all.
        identity: of this process in the lease; made up where it is empty.
        ticks: seconds that pass; another one for tests.
        now: the time of day, which is written on nodes; another one for tests.
        pause: waits before a change is tried again; another one for tests.
    """

    name = "kubernetes"
    scheduler = "kubernetes"
    acts: frozenset[ActKind] = frozenset({"drain", "clear"})

    def __init__(
        self,
        api: KubernetesApi,
        *,
        taint: str = SUSPECT,
        evict: bool = False,
        lease: str = "",
        nodes: str = "",
        identity: str = "",
        ticks: Callable[[], float] = TICKS,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if taint and not is_key(taint):
            raise ConfigurationError(f"{taint!r:.80} cannot be the key of a taint (e.g. {SUSPECT})")
        self.api = api
        self._taint, self._evict, self._nodes, self._pause = taint, evict, nodes, pause
        self._lease = Lease(api, lease, identity, ticks) if lease else None
        self._ticks, self._now = ticks, now
        self._misnamed: dict[str, tuple[float, str]] = {}

    # Looking ----------------------------------------------------------------------------------------------------------

    def look(self, node: str) -> NodeState:
        """The node now; `absent` where there is none of this name, with what is known about why."""
        return self.read(node)[0]

    def read(self, node: str) -> tuple[NodeState, Mapping[str, Any]]:
        """The node now, and the very Node that this was read from, on which others write as well; {} where there is none."""
        found = None
        if not valid_node(node).startswith(UNKNOWN):
            found = self.api.find(f"/api/v1/nodes/{node}")
        if found is None:
            return NodeState(node, "absent", self._why_absent(node)), {}
        if kubernetes_reading.text(found, "metadata", "name") != node:
            raise ClusterError(f"the API server at {self.api.host} answered for another node than {node}")
        self._misnamed.pop(node, None)
        pods = self.api.all("/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"})
        state = kubernetes_reading.node_state(found, pods, self._taint, self._now(), evict=self._evict)
        self._note_left(state)
        event = kubernetes_plan.untold(state)
        if event:
            state = replace(state, more={**state.more, "told": self._is_told(event)})
        return state, found

    def _note_left(self, state: NodeState) -> None:
        """A node that a person has uncordoned, and that our taint still keeps pods off: it is theirs, but nothing would start there."""
        old = kubernetes_reading.annotation_of(state)
        left = [one for one in state.more.get("taints", ()) if is_ours(one, self._taint, old)]
        if state.service == "in" and left and (len(self._misnamed) < _OBSERVED):
            text = (
                f"{state.node} is uncordoned, and takes no pods all the same: our taint is still there. Return it with bitwitness fleet "
                f"clear, or remove it: kubectl taint node {state.node} {left[0].get('key')}:NoSchedule-"
            )
            self._misnamed[state.node] = (self._ticks(), text)

    def _is_told(self, event: str) -> bool:
        """Whether an Event is there; one that we may not read is made again, which is refused where it is."""
        try:
            return self.api.find(f"/api/v1/namespaces/{EVENTS}/events/{event}") is not None
        except Refused:
            return False

    def census(self) -> Census:
        """The size of the cluster now."""
        return kubernetes_reading.census(self._counted())

    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that count."""
        return tuple(kubernetes_reading.text(one, "metadata", "name") for one in self._counted())

    def _counted(self) -> Iterator[Mapping[str, Any]]:
        return self.api.all("/api/v1/nodes", {"labelSelector": self._nodes} if self._nodes else None)

    def troubles(self) -> Mapping[str, str]:
        """Names of nodes that are names of pods, and nodes that only our taint keeps closed, which were asked for lately."""
        now = self._ticks()
        return {name: text for name, (since, text) in self._misnamed.items() if now - since < _LATELY}

    def _why_absent(self, node: str) -> str:
        """Whether the name is that of a pod, which was not told its node: runs put `pod_` before it, which no Node has in its name.

        The pod's node of today is not taken in its place: it may run elsewhere than when the incident was.
        """
        pod = node.removeprefix(UNKNOWN)
        try:
            pods = list(self.api.all("/api/v1/pods", {"fieldSelector": f"metadata.name={pod}"}))
        except ClusterError:
            pods = []
        if not pods and pod == node:
            return ""
        where = sorted({kubernetes_reading.text(one, "metadata", "namespace") for one in pods})
        named = f"{pod} is a pod{f' in namespace {where[0]}' if len(where) == 1 else ''}, and no node"
        said = (
            f"{named}: its job was not told where it runs, and where it was then nobody can tell. Set NODE_NAME in its pod template, by "
            "fieldRef: {fieldPath: spec.nodeName}"
        )
        if len(self._misnamed) < _OBSERVED or node in self._misnamed:
            self._misnamed[node] = (self._ticks(), f"an incident names {node}: {said}")
        return said

    # Acting -----------------------------------------------------------------------------------------------------------

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act; none where nothing is left of it."""
        return kubernetes_plan.calls(act, state, key=self._taint, evict=self._evict)

    def rest(self, act: Act, now: NodeState) -> tuple[Call, ...]:
        """What is left of an act that has landed."""
        return kubernetes_plan.rest(act, now, evict=self._evict)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act has happened, by what the node shows now."""
        return kubernetes_plan.landed(act, before, now)

    def carry_out(self, call: Call) -> str:
        """Do it; what was answered.

        Raises:
            ClusterError: refused, with the words of the server and the permission that is missing; or the node was changed
                meanwhile in what concerns us.
            ConfigurationError: it is no call of this cluster.
        """
        kind = _kind(call)
        if kind in ("node", "status"):
            return self._patch(call)
        self.must_lead()
        method, path = call.words
        try:
            query = {"fieldManager": COMPONENT} if kind != "evict" else None
            self.api.ask(method, path, call.body, query=query)
        except Refused as error:
            if (done := _done_already(kind, error)) is not None:
                return done
            if kind == "evict" and error.status == CONFLICT and self._is_gone(call):
                return "the pod is gone"
            if kind == "evict" and error.status == TOO_MANY:
                raise Refused(f"the pod may not go yet: {error}", error.status, error.reason) from error
            raise
        return "done"

    def _is_gone(self, call: Call) -> bool:
        """Whether the pod that was to go is not there any more: a conflict may also be one about a budget for disruptions."""
        meta, wanted = (
            kubernetes_reading.part(call.body, "metadata"),
            kubernetes_reading.part(call.body, "deleteOptions"),
        )
        query = {"fieldSelector": f"metadata.name={meta.get('name')},metadata.namespace={meta.get('namespace')}"}
        uid = kubernetes_reading.text(wanted, "preconditions", "uid")
        return all(
            kubernetes_reading.text(one, "metadata", "uid") != uid for one in self.api.all("/api/v1/pods", query)
        )

    def _patch(self, call: Call) -> str:
        """Change a node; where somebody else was faster, read it again, and only if it still is as it was for us, once more."""
        method, path = call.words
        body = call.body
        for tried in range(1, _TRIES + 1):
            self.must_lead()  # each time: the tries before may have taken long
            try:
                self.api.ask(method, path, body, query={"fieldManager": COMPONENT})
            except Refused as error:
                if error.status != CONFLICT or tried == _TRIES:
                    raise
            else:
                return "done" if tried == 1 else f"done, at the {tried}. try: somebody else was changing the node"
            self._pause(_PAUSE * tried)
            node = path.split("/")[4]
            try:
                changed = kubernetes_plan.again(body, self.look(node), self._taint)
            except ConfigurationError as error:
                raise ClusterError(f"{node} changed meanwhile, so nothing is done to it: {error}") from error
            if changed is None:
                return "it was so already"
            body = changed
        raise AssertionError("unreachable")  # pragma: no cover

    # Jobs -------------------------------------------------------------------------------------------------------------

    def job(self, job: str) -> JobState:
        """A job now, by its id `NAMESPACE/KIND/NAME`; `absent` where there is none of this name or kind."""
        return kubernetes_jobs.read(self.api, job)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """None: jobs restart by their own policy, and the cordon keeps them off the nodes.

        Raises:
            ConfigurationError: it has ended, so a person has to submit it again.
        """
        del exclude
        kubernetes_jobs.refuse_requeue(job)
        return ()

    # Rehearsing -------------------------------------------------------------------------------------------------------

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Try everything that these calls need, and change nothing."""
        del act  # the calls say it all
        needed = kubernetes_checks.permissions(calls, self._lease.name if self._lease else "", evict=self._evict)
        lease = (kubernetes_checks.check_lease(self.api, self._lease.path, self._lease.name),) if self._lease else ()
        return (
            kubernetes_checks.check_node(state),
            *kubernetes_checks.check_permissions(self.api, needed, self._lease.name if self._lease else ""),
            *kubernetes_checks.try_calls(self.api, calls),
            self._check_census(),
            *lease,
        )

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act."""
        return kubernetes_plan.foreseen(act, state, key=self._taint)

    def _check_census(self) -> Check:
        what = "size of the cluster"
        try:
            found = self.census()
        except ClusterError as error:
            return Check(what, "bad", one_line(str(error), 400), "let the controller list nodes")
        if not found.total:
            return Check(
                what, "bad", f"no node has the labels {self._nodes!r}", "nodes = the labels of the nodes that train"
            )
        return Check(what, "good", f"{found.total} nodes, {found.out} of them out of service")

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether a job would go on without a node that is taken out."""
        try:
            one = kubernetes_jobs.named(job)
            found = self.api.find(one.path)
            inner = kubernetes_jobs.inner(self.api, one) if found else None
        except (ClusterError, ConfigurationError) as error:
            return (Check(f"job {job:.200}", "bad", one_line(str(error), 400)),)
        if found is None:
            return (Check(f"job {job}", "bad", "the cluster has no such job"),)
        return kubernetes_job_checks.checks(one, found, inner, self._taint, evict=self._evict)

    # Leading ----------------------------------------------------------------------------------------------------------

    def leader(self) -> str:
        """Take the lead or keep it; "" where this process has it, or where there is no lease."""
        return self._lease.leader() if self._lease else ""

    def must_lead(self) -> None:
        """Refuse where this process is to lead and does not, now; a person's command, which never asked to, is not hindered.

        Raises:
            ClusterError: another one leads, or nobody can say. Nothing was done, whatever was to be.
        """
        if self._lease is None:
            return
        try:
            self._lease.check()
        except ClusterError as error:
            raise ClusterError(str(error), refused=True) from error

    def resign(self) -> None:
        """Give the lead up."""
        if self._lease:
            self._lease.resign()


def from_settings(settings: Mapping[str, Any]) -> KubernetesCluster:
    """The cluster that the table `cluster` of a policy describes.

    Raises:
        ConfigurationError: a setting is unknown or has an impossible value, or there is no configuration of the client.
    """
    if unknown := sorted(set(settings) - _SETTINGS):
        known = ", ".join(sorted(_SETTINGS))
        raise ConfigurationError(f"unknown settings of a Kubernetes cluster: {', '.join(unknown)}; known: {known}")
    evict, timeout = settings.get("evict", False), settings.get("timeout", 30.0)
    if not isinstance(evict, bool):
        raise ConfigurationError(f"cluster.evict is true or false, not {evict!r:.80}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise ConfigurationError(f"cluster.timeout is a number of seconds, not {timeout!r:.80}")
    elsewhere = bool(settings.get("kubeconfig") or settings.get("context"))
    lease = "" if elsewhere else _own_lease()
    defaults = {"kubeconfig": "", "context": "", "taint": SUSPECT, "lease": lease, "nodes": ""}
    texts = {name: settings.get(name, default) for name, default in defaults.items()}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"cluster.{name} is a text, not {value!r:.80}")
    api = KubernetesApi.load(texts["kubeconfig"], texts["context"], float(timeout))
    return KubernetesCluster(api, taint=texts["taint"], evict=evict, lease=texts["lease"], nodes=texts["nodes"])


def _own_lease() -> str:
    """The lease of a controller that runs in the cluster on which it acts; "" outside of one."""
    namespace = own_namespace() if in_cluster() else ""
    return f"{namespace}/bitwitness-fleet" if namespace else ""


def _kind(call: Call) -> str:
    """Which of our calls it is.

    Raises:
        ConfigurationError: none.
    """
    words = " ".join(call.words)
    found = next((kind for kind, shape in _CALLS.items() if shape.fullmatch(words)), "")
    if len(call.words) != 2 or not found or not isinstance(call.body, Mapping):
        raise ConfigurationError(f"not a request of this cluster: {one_line(str(call))}")
    return found


def _done_already(kind: str, error: Refused) -> str | None:
    """What is said where an answer is an error and means that it is so already."""
    if kind == "event" and error.status == CONFLICT:
        return "it was told before"
    if kind == "evict" and error.status == ABSENT:
        return "the pod is gone"
    return None
