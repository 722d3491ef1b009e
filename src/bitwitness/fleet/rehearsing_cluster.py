"""What a cluster would say to each act, and whether it knows the names that runs go by. It is asked and never told.

Pod names instead of node names, a right that was never given and a node that somebody else has out are what fails at night.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Check,
    Cluster,
    Finishing,
    Foreseeing,
    Listing,
    NodeState,
    Rehearsing,
    one_line,
    valid_node,
)
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.rehearsing import Part, broken, guarded
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Topology

_SLOW = 5.0
"""Seconds after which a controller takes a cluster for one that hangs."""
_LOOKS = 20
"""Nodes that are looked at to find one that is in service."""
_SHOWN = 10
_NAMES = 60.0
"""Seconds for looking up the names of a run."""


def about_cluster(cluster: Cluster, policy: FleetPolicy) -> Part:
    """Whether it answers, how fast, and how many nodes it has."""
    began = time.monotonic()
    counted, wrong = guarded("count the nodes", cluster.census)
    took = time.monotonic() - began
    if wrong is not None or counted is None:
        remedy = "without a census nothing is ever done: see that this host reaches the cluster, and with which rights"
        return Part("cluster", (replace(wrong, remedy=remedy),)) if wrong else Part("cluster", ())
    allowed = policy.allowed_out(counted.total)
    text = (
        f"{cluster.name}: {counted.total} nodes, {counted.out} of them out of service, {allowed} may be (cluster_share)"
    )
    checks = [Check("count the nodes", "good", text)]
    if counted.out >= allowed:
        remedy = "bring nodes back into service, or raise cluster_share: until then no node is taken out"
        checks = [Check("count the nodes", "bad", text, remedy)]
    if counted.total == 0:
        checks = [
            Check(
                "count the nodes",
                "bad",
                text,
                "see that the selector of nodes is right; the quarantine of a run needs --run",
            )
        ]
    slow = took >= _SLOW
    answered = f"it answered within {took:.1f} s"
    remedy = (
        f"a controller gives up a round once one answer fails after {_SLOW:g} s: find out why it is slow"
        if slow
        else ""
    )
    checks.append(Check("how fast it answers", "unknown" if slow else "good", answered, remedy))
    return Part("cluster", tuple(checks))


def choose(
    cluster: Cluster, policy: FleetPolicy, given: str, names: Sequence[str]
) -> tuple[NodeState | None, tuple[Check, ...]]:
    """The node that is rehearsed with, as it is now: the one that was given, else one in service that is not protected."""
    what = "a node"
    if given:
        state, wrong = guarded(f"look at {given}", lambda: cluster.look(given))
        if wrong is not None or state is None:
            return None, (wrong,) if wrong else ()
        return (None if state.service == "absent" else state), (_fitness(state, policy),)
    candidates = [name for name in names if not _protected(name, policy)]
    if not candidates and isinstance(cluster, Listing):
        listed, wrong = guarded("list the nodes", cluster.nodes)
        if wrong is not None:
            return None, (wrong,)
        candidates = [name for name in listed or () if not _protected(name, policy)]
    for name in candidates[:_LOOKS]:
        state, wrong = guarded(f"look at {name}", lambda name=name: cluster.look(name))  # type: ignore[misc]
        if wrong is not None:
            return None, (wrong,)
        if state is not None and state.service == "in":
            return state, (_fitness(state, policy),)
    tried = (
        f"none of {min(len(candidates), _LOOKS)} nodes that were looked at is in service"
        if candidates
        else "no node is known"
    )
    return None, (Check(what, "unknown", f"{tried}, so no act could be rehearsed", "name one: --node NODE"),)


def _protected(name: str, policy: FleetPolicy) -> str:
    return next((pattern for pattern in policy.protect if fnmatchcase(name, pattern)), "")


def _fitness(state: NodeState, policy: FleetPolicy) -> Check:
    what, shown = f"look at {state.node}", f"{state.node} is {state.service} ({state.raw or 'no more is said'})"
    if state.service == "absent":
        text = f"the cluster has no node {state.node}"
        return Check(
            what, "bad", text, "use the name by which the cluster knows it; names of pods and of hosts differ from it"
        )
    if pattern := _protected(state.node, policy):
        return Check(what, "bad", f"{shown}, and protected by {pattern!r}", "give a --node that is not protected")
    if state.service != "in":
        whose = f" by {state.reason_by}" if state.reason_by else ""
        text = f"{shown}: taken out{whose} ({state.reason or 'no reason'})"
        return Check(what, "unknown", text, "give a --node that is in service")
    return Check(what, "good", shown)


def nodes_of_run(run: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of nodes in run.json, and of those that are known to be none: pods that were not told where they run.

    Raises:
        ConfigurationError: there is no such run.
        RunFilesError: it is damaged.
    """
    if not (run / "run.json").is_file():
        raise ConfigurationError(f"{run} holds no run.json: give the directory of a run that has started (--run)")
    try:
        topology = Topology.from_json(RunFiles(run).read_run()["placement"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{run}: who takes part in this run cannot be read: {error}") from error
    lost = {one.node for one in topology.placements if not one.node_is_known}
    return topology.nodes, tuple(sorted(lost))


def about_names(cluster: Cluster, names: Sequence[str], lost: Sequence[str]) -> Part:
    """Whether the cluster knows each node of a run by the name that the run has for it."""
    what, began = "nodes of the run", time.monotonic()
    known, strange, left = 0, list(lost), 0
    for name in (one for one in names if one not in lost):
        if time.monotonic() - began > _NAMES:
            left += 1
            continue
        try:
            absent = cluster.look(valid_node(name)).service == "absent"
        except ConfigurationError:
            absent = True
        if absent:
            strange.append(name)
        else:
            known += 1
    checks = []
    if strange:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        text = f"the cluster has no node {', '.join(one_line(one, 80) for one in strange[:_SHOWN])}{more}: {known} of {len(names)} are known"
        checks.append(Check(what, "bad", text, _NAMING))
    elif not left:
        checks.append(Check(what, "good", f"all {known} are known to the cluster"))
    if left:
        text = f"{left} of {len(names)} were not looked up within {_NAMES:g} s"
        checks.append(Check("the other nodes of the run", "unknown", text))
    return Part("names", tuple(checks))


_NAMING = (
    "a run must go by the names that the cluster has: on Kubernetes pass spec.nodeName to each pod as NODE_NAME (downward API), "
    "elsewhere set BITWITNESS_NODE on every node; until then incidents of this run name nodes that nobody can take out"
)


def about_act(cluster: Cluster, kind: ActKind, state: NodeState, incident: str, policy: FleetPolicy) -> Part:
    """What an act would call, and whether that would be let through; and the same of the return."""
    name = f"act {kind}"
    if kind not in cluster.acts:
        text = f"{cluster.name} cannot {kind} a node: it would only be drained"
        return Part(
            name, (Check(kind, "bad", text, f'take "{kind}" out of may, or say so to the people who wait for it'),)
        )
    act = Act(kind, state.node, incident, "INVENTED by a rehearsal: nothing has happened", ())
    calls, wrong = guarded(f"plan the {kind}", lambda: cluster.plan(act, state))
    if wrong is not None or calls is None:
        return Part(name, (wrong,) if wrong else ())
    checks: list[Check] = []
    if not calls:
        text = f"nothing would be called: {state.node} is {state.raw or state.service}"
        checks.append(Check(f"plan the {kind}", "unknown", text, "give a --node that is in service"))
    else:
        listed = f"{len(calls)} call{'s' if len(calls) != 1 else ''}"
        once = sum(not call.repeatable for call in calls)
        checks.append(
            Check(f"plan the {kind}", "good", f"{listed}{f', {once} of which is never made twice' if once else ''}")
        )
        checks += _tried(cluster, act, state, calls)
    if kind not in policy.may:
        checks.append(
            Check(f"may {kind}", "unknown", f"the policy does not let it {kind}", f'may = ["drain", "{kind}"]')
        )
    back, more = _return(cluster, act, state)
    return Part(name, (*checks, *more), (*calls, *back))


def _tried(cluster: Cluster, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
    if not isinstance(cluster, Rehearsing):
        text = f"{cluster.name} cannot say beforehand whether these calls would be let through"
        return (Check(f"right to {act.kind}", "unknown", text),)
    found, wrong = guarded(f"try the {act.kind}", lambda: cluster.check(act, state, calls))
    return (wrong,) if wrong is not None else found or ()


def _return(cluster: Cluster, act: Act, state: NodeState) -> tuple[tuple[Call, ...], tuple[Check, ...]]:
    """What would be called to bring the node back, as far as that can be known before it is out."""
    what = f"return {act.node} after the {act.kind}"
    if not isinstance(cluster, Foreseeing):
        return (), (Check(what, "unknown", f"what {cluster.name} would call is known only when the node is out"),)
    back = Act("clear", act.node, "", "INVENTED by a rehearsal: it was never out")
    after, wrong = guarded(what, lambda: cluster.foreseen(act, state))
    if wrong is not None or after is None:
        return (), (wrong,) if wrong else ()
    if isinstance(cluster, Finishing) and (left := cluster.rest(act, after)):
        return (), (Check(what, "bad", f"the act would never be whole: {'; '.join(map(str, left))}"),)
    try:
        calls = cluster.plan(back, after)
    except BitwitnessError as error:
        return (), (broken(what, error),)
    if not calls:
        return (), (Check(what, "unknown", f"nothing is planned for a node that is {after.raw or after.service}"),)
    checks = _tried(cluster, back, after, calls)
    return calls, (Check(what, "good", f"{len(calls)} call{'s' if len(calls) != 1 else ''}"), *checks)


def about_job(cluster: Cluster, job: str, node: str, policy: FleetPolicy) -> Part:
    """Whether a job would go on without a node that is taken out."""
    scheduler, _, name = job.partition(":")
    what = f"job {job}"
    if scheduler != cluster.scheduler:
        text = f"this cluster knows jobs of {cluster.scheduler!r} only: it would not be started again"
        return Part("job", (Check(what, "bad", text, f"a run records its job as {cluster.scheduler}:ID"),))
    checks: list[Check] = []
    if not policy.requeue:
        checks.append(Check(what, "good", "the policy says requeue = false: it is left to others to start it again"))
    now, wrong = guarded(what, lambda: cluster.job(name))
    if wrong is not None or now is None:
        return Part("job", (*checks, wrong) if wrong else tuple(checks))
    if now.state == "absent":
        checks.append(Check(what, "bad", "the cluster does not know it", "give the id of a job that runs now"))
        return Part("job", tuple(checks))
    where = f", on {', '.join(now.nodes[:_SHOWN])}" if now.nodes else ""
    checks.append(Check(what, "good", f"it is {now.state} ({now.raw}){where}"))
    ended = replace(now, state="ended", raw=f"{now.raw}, as if it had ended", exit_code=160)
    calls, wrong = guarded("start it again", lambda: cluster.plan_requeue(ended, [node]))
    tried, untried = guarded(
        "try to start it again", lambda: cluster.check_job(name) if isinstance(cluster, Rehearsing) else None
    )
    if wrong is not None:
        checks.append(wrong)
    elif calls:
        checks.append(Check("start it again", "good", f"{len(calls)} calls, without {node}"))
    else:
        # Where the cluster can say what the job's own policy does, that tells whether it goes on.
        goes_on = bool(tried) and all(one.outcome == "good" for one in tried or ())
        planned = "nothing is called: it goes on by itself" + ("" if goes_on else ", or not at all")
        checks.append(Check("start it again", "good" if goes_on else "unknown", planned))
    if untried is not None:
        checks.append(untried)
    elif tried is None:
        checks.append(Check("go on without the node", "unknown", f"{cluster.name} cannot say beforehand"))
    checks += tried or ()
    return Part("job", tuple(checks), calls or ())
