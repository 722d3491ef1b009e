"""SageMaker HyperPod: a scheduler that takes nodes out of service, and SageMaker's API that exchanges their machines.

Two systems are put together: Kubernetes (EKS) or Slurm is asked about nodes and jobs, and takes a node out; SageMaker reboots and
replaces its machine, and checks it. Where SageMaker cannot be asked, nodes can still be taken out, which is what protects jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import hyperpod_check, hyperpod_hand, hyperpod_plan
from bitwitness.fleet.clusters import hyperpod_limits as limits
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Census,
    Check,
    Cluster,
    Foreseeing,
    JobState,
    Landed,
    Led,
    Listing,
    NodeState,
    Troubled,
    one_line,
    valid_node,
)
from bitwitness.fleet.clusters.hyperpod_api import NotDone, SageMakerApi
from bitwitness.fleet.clusters.hyperpod_deep import DeepChecks
from bitwitness.fleet.clusters.hyperpod_eks import OnKubernetes, labels_of, patch
from bitwitness.fleet.clusters.hyperpod_names import (
    GOING,
    RESOURCE_CONFIG,
    Instance,
    ResourceConfig,
    address_of,
    find,
    instance_in,
    is_called,
    read_resource_config,
)
from bitwitness.fleet.clusters.hyperpod_plan import By, Seen, Way, together
from bitwitness.fleet.clusters.hyperpod_words import lacks_capacity

_BY: dict[str, tuple[By, ...]] = {"eks": ("api", "labels"), "slurm": ("api", "reason")}
_HANGS, _PAUSE = 5.0, 60.0
"""Seconds after which SageMaker hangs where it then fails, and for which it is not asked about machines after that."""
_FRESH = 600.0
"""Seconds for which what was read of a machine counts as what is wrong now."""
_GROUP_UNKNOWN = (
    "in which instance group it was is not known, so whether another one has come in its place cannot be told"
)


class HyperPodCluster:
    """A HyperPod cluster.

    Args:
        inner: its scheduler.
        api: SageMaker.
        by: how reboots and replacements are asked for: `api`; `labels` of a Kubernetes node; the `reason` of a Slurm node.
        deep_health_check: checks of which a node that was taken out gets one round: `InstanceStress`, `InstanceConnectivity`.
        orchestrator: `eks` or `slurm`; told from the scheduler where it is not given.
        config: what a node's resource_config.json says.
        script: shows the batch script of a Slurm job; None where nobody can.
        ticks: seconds that pass, for tests.
    """

    name = "hyperpod"

    def __init__(
        self,
        inner: Cluster,
        api: SageMakerApi,
        *,
        by: By = "api",
        deep_health_check: Sequence[str] = (),
        orchestrator: str = "",
        config: ResourceConfig | None = None,
        script: Callable[[str], str] | None = None,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.api = inner, api
        self.scheduler = inner.scheduler
        self.orchestrator = orchestrator or ("eks" if inner.scheduler == "kubernetes" else "slurm")
        if by not in _BY.get(self.orchestrator, ()):
            allowed = ", ".join(_BY.get(self.orchestrator, ()))
            raise ConfigurationError(
                f"by = {by!r:.40} is not for {self.orchestrator!r:.40}: {allowed or 'eks or slurm'}"
            )
        self._way = Way(api.name, by, limits.checks(deep_health_check))
        asked: tuple[ActKind, ...] = ("drain", "clear", "reboot", "replace")
        self.acts: frozenset[ActKind] = frozenset(asked)
        self._config, self._script, self._ticks = config or ResourceConfig(), script, ticks
        self._kubernetes = inner if isinstance(inner, OnKubernetes) else None
        self._deep = DeepChecks(ticks, _FRESH)
        self._machines: dict[str, str] = {}
        self._groups: dict[str, str] = {}
        self._replacing: dict[str, str] = {}
        self._known: dict[str, tuple[Instance, float]] = {}
        self._roles: dict[str, str] = {}
        self._gone: set[str] = set()
        self._trouble, self._asked_from = ("", 0.0), float("-inf")

    # Looking ----------------------------------------------------------------------------------------------------------

    def look(self, node: str) -> NodeState:
        """The node now, as its scheduler and SageMaker show it; where only the latter cannot be asked, that stands in it."""
        return self._deep.see(self._look(valid_node(node)))

    def _look(self, node: str) -> NodeState:
        inner, seen = self._scheduled(node)
        if inner.service == "absent" and node in self._gone:
            # It never comes back, and SageMaker need not be asked for ever.
            return together(inner, replace(seen, asked=True, instance=self._named(node), status="NotFound"))
        named, began = self._named(node), self._ticks()
        if began < self._asked_from:
            return together(inner, replace(seen, instance=named))
        try:
            found = self._machine(node)
            role = self._role(found.group) if found is not None else ""
            lost = inner.service == "absent" and bool(named) and (found is None or found.status in GOING)
            missing = self._missing(named) if lost else ""
        except ClusterError as error:
            now = self._ticks()
            self._trouble = one_line(f"SageMaker cannot be asked about machines: {error}", 500), now
            if now - began >= _HANGS:
                self._asked_from = now + _PAUSE
            return together(inner, replace(seen, instance=named))
        except ConfigurationError as error:
            return together(inner, replace(seen, asked=True, why=one_line(str(error), 400)))
        self._trouble = "", 0.0
        if found is not None:
            same = found.id == self._replacing.get(node) and found.status == "Running"
            other = f"another machine than {found.id}" if same and inner.service in ("out", "draining") else ""
            return together(inner, replace(seen.of(found), role=role), missing or other)
        if lost and not missing and named in self._groups:
            self._gone.add(node)
        said = _GROUP_UNKNOWN if lost and named not in self._groups else ""
        status = "NotFound" if named else ""
        return together(inner, replace(seen, asked=True, instance=named, status=status, message=said), missing)

    def _scheduled(self, node: str) -> tuple[NodeState, Seen]:
        """The node as its scheduler shows it, and what stands on it in HyperPod's words and ours: both of one version of it."""
        if self._kubernetes is None:
            return self.inner.look(node), Seen()
        inner, found = self._kubernetes.read(node)
        return inner, labels_of(found)

    def recall(self, act: Act, before: NodeState) -> None:
        """What a node was before an act: a process that began after it had gone has not seen which machine that was, of which group."""
        seen = hyperpod_plan.seen_in(before)
        if seen.instance and seen.group:
            self._groups.setdefault(seen.instance, seen.group)
        if act.kind == "replace" and seen.instance:
            self._replacing[act.node] = seen.instance

    def _named(self, node: str) -> str:
        """The machine that the name of a node says; "" where it says none."""
        return instance_in(node) if self.orchestrator == "eks" else ""

    def _machine(self, node: str) -> Instance | None:
        """The machine that a node is now; None where there is none.

        Raises:
            ClusterError: SageMaker cannot be asked.
            ConfigurationError: it cannot be told.
        """
        named = self._named(node)
        if self.orchestrator == "eks" and not named:
            raise ConfigurationError(f"{node} is no node of HyperPod's, which are called hyperpod-i-... on EKS")
        guess = named or self._machines.get(node) or self._config.addresses.get(address_of(node), "")
        found = self.api.instance(guess) if guess else None
        if found is not None and (named or (is_called(found, node) and found.status == "Running")):
            return self._remember(node, found)
        if named:
            return None
        self._machines.pop(node, None)
        listed = find(node, self.api.instances())
        found = self.api.instance(listed.id) if listed is not None else None
        if found is not None and is_called(found, node) is not True:
            raise ConfigurationError(
                f"which machine {node} is cannot be told: {found.id} is listed as it, and has the name {found.host or 'none'} and the "
                f"address {found.address or 'none'}"
            )
        return None if found is None else self._remember(node, found)

    def _remember(self, node: str, found: Instance) -> Instance:
        self._machines[node] = found.id
        self._groups[found.id] = found.group
        self._known[found.id] = (found, self._ticks())
        return found

    def _role(self, group: str) -> str:
        """On Slurm, what the machines of a group are: `Controller`, `Login` or `Compute`; "" where it is not told."""
        if self.orchestrator != "slurm":
            return ""
        if group not in self._roles:
            self._roles = {group: ""} | {one.name: one.role for one in self.api.cluster().groups}
        return self._roles[group]

    def _missing(self, instance: str) -> str:
        """What is said of the group of a machine that is gone, as long as it has not all its machines again; "" where nobody knows its group.

        Any group may be short of machines for reasons of its own.
        """
        group = self._groups.get(instance)
        listed, now = self.api.instances(), self._ticks()
        self._known |= {one.id: (one, now) for one in listed if one.group == group or one.message}
        if group is None:
            return ""
        target = next((one.target for one in self.api.cluster().groups if one.name == group), 0)
        running = sum(one.group == group and one.status == "Running" for one in listed)
        return f"a machine in its place: group {group} has {running} of {target} running" if running < target else ""

    def census(self) -> Census:
        """The size of the cluster now, as its scheduler counts it."""
        return self.inner.census()

    def troubles(self) -> Mapping[str, str]:
        """What is wrong: SageMaker cannot be asked, machines that fail for want of capacity, and what the scheduler says."""
        now = self._ticks()
        found: dict[str, str] = {}
        if isinstance(self.inner, Troubled):
            found.update(self.inner.troubles())
        if self._trouble[0] and now - self._trouble[1] < _FRESH:
            found["sagemaker"] = self._trouble[0]
        for one in [one for one, when in self._known.values() if now - when < _FRESH]:
            if one.message and lacks_capacity(one.message) and one.status != "Running":
                found[f"capacity:{one.group}"] = (
                    f"instance group {one.group}: {one.id or 'a machine'} is {one.status}: {one_line(one.message, 300)}. Trying again "
                    "does not heal this: free or raise the quota, or ask AWS for capacity"
                )
        return found | dict(self._deep.troubles())

    # Acting -----------------------------------------------------------------------------------------------------------

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act; none where it has landed already."""
        return hyperpod_plan.plan(act, state, self.inner, self._way)

    def plan_check(self, node: str, state: NodeState) -> tuple[Call, ...]:
        """The deep health check of a node that is out: those of the settings, else all of one machine."""
        return hyperpod_hand.plan_check(node, state, self.inner, self._way)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act has happened, by what the node and its machine show now."""
        return hyperpod_plan.landed(act, before, now, self.inner, self._way)

    def rest(self, act: Act, now: NodeState) -> tuple[Call, ...]:
        """What is left of an act that has landed."""
        return hyperpod_plan.rest(act, now, self.inner, self._way)

    def carry_out(self, call: Call) -> str:
        """Do it, once; what was answered.

        Raises:
            ClusterError: refused, also where SageMaker answers with a success and says that it did nothing.
            ConfigurationError: it is no call of this cluster.
        """
        if call.words[:1] == ("sagemaker",):
            self._must_lead()
            return self._sagemaker(call)
        if hyperpod_plan.marks(call):
            self._check_mark(call)
        if self._kubernetes is not None and hyperpod_plan.is_patch(call):
            self._must_lead()
            return patch(self._kubernetes, call)
        return self.inner.carry_out(call)

    def _check_mark(self, call: Call) -> None:
        """A note of a deep health check is made of one that was asked for, on a node that is still out.

        Raises:
            ClusterError: it is not to be made.
        """
        node = self._deep.node_of(call)
        now = self.inner.look(node)
        if now.service not in ("out", "draining") or not now.ours:
            raise ClusterError(f"{node} is {now.raw or now.service} now: nothing is noted on it", refused=True)

    def _sagemaker(self, call: Call) -> str:
        if call.words[1:] == ("ListClusterNodes",):
            node = call.body.get("of") if isinstance(call.body, Mapping) else ""
            found = self._machine(valid_node(str(node)))
            raise ClusterError(
                f"{node} is {found.id if found else 'no machine'}: what is left is planned anew", refused=True
            )
        if said := self._deep.before(call):
            return said
        try:
            said = self.api.carry_out(call)
        except NotDone as error:
            # An id names one machine: one that was there and is not is gone, which is what was asked for.
            failed = [one.node for one in error.answer.failed]
            if call.words[1] == "BatchReplaceClusterNodes" and error.gone and all(one in self._known for one in failed):
                return f"{', '.join(failed)}: no more in the cluster"
            raise
        self._deep.after(call)
        return said

    # Leading ----------------------------------------------------------------------------------------------------------

    def leader(self) -> str:
        """As the scheduler's cluster has it; "" where it keeps no lease."""
        return self.inner.leader() if isinstance(self.inner, Led) else ""

    def resign(self) -> None:
        """Give the lead up."""
        if isinstance(self.inner, Led):
            self.inner.resign()

    def _must_lead(self) -> None:
        if self._kubernetes is not None:
            self._kubernetes.must_lead()

    # Jobs and rehearsals ----------------------------------------------------------------------------------------------

    def job(self, job: str) -> JobState:
        """A job now."""
        return self.inner.job(job)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """The exact calls that start a job again without these nodes."""
        return self.inner.plan_requeue(job, exclude)

    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes, as the scheduler has them; () where it cannot name them."""
        return self.inner.nodes() if isinstance(self.inner, Listing) else ()

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act that was carried out whole.

        Raises:
            ConfigurationError: the scheduler's adapter cannot say it.
        """
        if not isinstance(self.inner, Foreseeing):
            raise ConfigurationError(f"how a node looks after a {act.kind} cannot be said for {self.inner.name}")
        return hyperpod_plan.foreseen(act, state, self.inner, self._way)

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Try everything that an act needs of SageMaker and of the scheduler, and change nothing."""
        return hyperpod_check.check(self, self._way, act, state, calls)

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether a job would go on without a node that is taken out, and what HyperPod's auto-resume makes of it."""
        return hyperpod_check.check_job(self, job, self._script)


_SETTINGS = frozenset(
    {
        "kind",
        "cluster_name",
        "region",
        "profile",
        "orchestrator",
        "by",
        "deep_health_check",
        "endpoint_url",
        "timeout",
        "resource_config",
        "kubernetes",
        "slurm",
    }
)


def from_settings(settings: Mapping[str, Any]) -> HyperPodCluster:
    """The cluster that the table `cluster` of a policy describes.

    Raises:
        ConfigurationError: a setting is unknown or has an impossible value; no cluster or no region is named.
    """
    if unknown := sorted(set(settings) - _SETTINGS):
        known = ", ".join(sorted(_SETTINGS))
        raise ConfigurationError(f"unknown settings of a HyperPod cluster: {', '.join(unknown)}; known: {known}")
    names = ("cluster_name", "region", "profile", "orchestrator", "by", "endpoint_url", "resource_config")
    texts = {name: settings.get(name, "") for name in names}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"cluster.{name} is a text, not {value!r:.80}")
    timeout, checks = settings.get("timeout", 30.0), settings.get("deep_health_check", [])
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise ConfigurationError(f"cluster.timeout is a number of seconds, not {timeout!r:.80}")
    if not isinstance(checks, list | tuple) or not all(isinstance(one, str) for one in checks):
        raise ConfigurationError(f"cluster.deep_health_check is a list of names, not {checks!r:.80}")
    orchestrator, by = texts["orchestrator"], texts["by"] or "api"
    if orchestrator not in _BY:
        raise ConfigurationError(f'cluster.orchestrator is "eks" or "slurm", not {orchestrator!r:.40}')
    if by not in _BY[orchestrator]:
        raise ConfigurationError(f"cluster.by = {by!r:.40} is not for {orchestrator}: {', '.join(_BY[orchestrator])}")
    limits.checks(checks)
    config = read_resource_config(Path(texts["resource_config"]) if texts["resource_config"] else RESOURCE_CONFIG)
    name = texts["cluster_name"] or config.name
    if not name:
        raise ConfigurationError("which HyperPod cluster? cluster_name = ..., or its resource_config.json")
    inner, script = _inner(orchestrator, settings, by=by, timeout=timeout)
    api = SageMakerApi(
        name,
        region=texts["region"],
        profile=texts["profile"],
        endpoint_url=texts["endpoint_url"],
        timeout=float(timeout),
        arn=config.arn if config.name == name else "",
    )
    return HyperPodCluster(
        inner, api, by=by, deep_health_check=checks, orchestrator=orchestrator, config=config, script=script
    )


def _inner(
    orchestrator: str, settings: Mapping[str, Any], *, by: str, timeout: float
) -> tuple[Cluster, Callable[[str], str] | None]:
    """The scheduler, and what shows the script of a job of Slurm's."""
    own, other = ("kubernetes", "slurm") if orchestrator == "eks" else ("slurm", "kubernetes")
    table = settings.get(own, {})
    if settings.get(other):
        raise ConfigurationError(f"cluster.{other} is not for orchestrator = {orchestrator!r}")
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"cluster.{own} is a table, not {table!r:.80}")
    if "hyperpod" in table or "kind" in table:
        raise ConfigurationError(
            f"cluster.{own} is about the scheduler only: kind and hyperpod are set here (by = ...)"
        )
    inner = {"timeout": timeout, **table, "kind": own}
    if own == "kubernetes":
        from bitwitness.fleet.clusters.kubernetes import from_settings as kubernetes  # noqa: PLC0415 - needs the extra

        return kubernetes(inner), None
    from bitwitness.fleet.clusters import slurm_command  # noqa: PLC0415
    from bitwitness.fleet.clusters.slurm import from_settings as slurm  # noqa: PLC0415

    def script(job: str) -> str:
        said = slurm_command.run(("scontrol", "write", "batch_script", job, "-"), timeout)
        if said.code:
            raise ClusterError(f"scontrol write batch_script {job}: {one_line(said.err or said.out)}")
        return said.out

    return slurm({**inner, "hyperpod": by == "reason"}), None if table.get("rest") else script
