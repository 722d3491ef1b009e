"""The order of a rehearsal: the policy, the cluster, names, signals, decision, each act, the job, people, and files.

Each part stands alone. What needs the cluster is not tried any more once it hangs, and what needs a node is not where there is none;
that is said, and counts as not tried.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.base import ActKind, Check, Cluster, NodeState, valid_node
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.rehearsing import LIMIT, Part, Result, about_policy, acts_to_try, attempt
from bitwitness.fleet.rehearsing_cluster import about_act, about_cluster, about_job, about_names, choose, nodes_of_run
from bitwitness.fleet.rehearsing_here import about_notify, about_signals, about_state
from bitwitness.fleet.rehearsing_incident import NOBODY, STORIES, Story, carry_through, judge
from bitwitness.fleet.watching import ReadSignals, SignalReader


@dataclass(frozen=True, slots=True)
class Asked:
    """What is rehearsed.

    Attributes:
        policy: as loaded.
        cluster: makes it; what it raises is a finding.
        state: folder of the controller's state.
        node: with which one; "" for any that is in service.
        run: a run whose nodes are looked up; None for none.
        job: `SCHEDULER:ID`, or "".
        acts: which; () for all that the policy may.
        tell: whether people get a message.
        publish: the shared folder for the condemned list; None: as the controller has it.
        limit: seconds for each part.
    """

    policy: FleetPolicy
    cluster: Callable[[], Cluster]
    state: Path
    node: str = ""
    run: Path | None = None
    job: str = ""
    acts: tuple[ActKind, ...] = ()
    tell: bool = False
    publish: Path | None = None
    limit: float = LIMIT


@dataclass(slots=True)
class _Walk:
    asked: Asked
    clock: Clock
    parts: list[Part] = field(default_factory=list)
    cluster: Cluster | None = None
    hangs: bool = False
    state: NodeState | None = None
    incident: str = ""

    def part(self, name: str, what: Callable[[], Part], *, of_cluster: bool = False, of_node: bool = False) -> None:
        """Try a part, if what it needs is there."""
        why = ""
        if of_cluster and self.cluster is None:
            why = "there is no cluster to ask"
        elif of_cluster and self.hangs:
            why = "the cluster has not answered in time, and is not asked again"
        elif of_node and self.state is None:
            why = "there is no node to rehearse with"
        if why:
            self.parts.append(Part(name, (Check(name, "unknown", f"not tried: {why}", "see above"),)))
            return
        found, hung = attempt(name, what, self.asked.limit)
        self.hangs = self.hangs or (hung and of_cluster)
        self.parts.append(found)


def rehearse(asked: Asked, clock: Clock | None = None) -> Result:
    """Walk through all of it, and change nothing.

    Raises:
        ConfigurationError: what was asked for cannot be: no such run, no name of a node, no job.
    """
    names, lost = _checked(asked)
    walk = _Walk(asked, clock or Clock())
    walk.part("policy", lambda: about_policy(asked.policy))
    walk.part("cluster", partial(_open, walk))
    walk.part("cluster", lambda: about_cluster(_cluster(walk), asked.policy), of_cluster=True)
    walk.part("node", partial(_choose, walk, names), of_cluster=True)
    if asked.run is not None:
        walk.part("names", lambda: about_names(_cluster(walk), names, lost), of_cluster=True)
    node = asked.node or (walk.state.node if walk.state else "")
    if node:
        walk.part("signals", lambda: about_signals(asked.policy, node, asked.run, walk.clock.now()))
    else:
        walk.part("signals", lambda: Part("signals", ()), of_node=True)
    kinds = acts_to_try(asked.acts, asked.policy)
    stories = [*(STORIES[kind] for kind in kinds), NOBODY]
    for story in stories:
        walk.part("decision", partial(_decide, walk, story), of_cluster=True, of_node=True)
    for kind in kinds:
        walk.part(f"act {kind}", partial(_act, walk, kind), of_cluster=True, of_node=True)
    if asked.job:
        about = partial(_job, walk, node)
        walk.part("job", about, of_cluster=True, of_node=not node)
    walk.part("notify", lambda: about_notify(asked.policy, node, walk.clock.now(), tell=asked.tell))
    walk.part("state", lambda: about_state(asked.state, asked.publish))
    return Result(node, _joined(walk.parts))


def _checked(asked: Asked) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names in the run, once all that was given is known to make sense."""
    if asked.node:
        valid_node(asked.node)
    scheduler, colon, name = asked.job.partition(":")
    if asked.job and not (colon and scheduler and name):
        raise ConfigurationError(f"{asked.job!r:.120} is no job: give SCHEDULER:ID, such as slurm:1234")
    return ((), ()) if asked.run is None else nodes_of_run(asked.run)


def _cluster(walk: _Walk) -> Cluster:
    assert walk.cluster is not None
    return walk.cluster


def _open(walk: _Walk) -> Part:
    walk.cluster = walk.asked.cluster()
    kind = walk.asked.policy.cluster.get("kind", "local")
    acts = ", ".join(sorted(walk.cluster.acts))
    return Part("cluster", (Check("settings", "good", f"kind = {kind!r}: it can {acts}"),))


def _choose(walk: _Walk, names: Sequence[str]) -> Part:
    walk.state, checks = choose(_cluster(walk), walk.asked.policy, walk.asked.node, names)
    return Part("node", checks)


def _decide(walk: _Walk, story: Story) -> Part:
    """Carry an invented incident through the real controller."""
    assert walk.state is not None
    node, asked = walk.state.node, walk.asked
    reader: ReadSignals = SignalReader(asked.policy)
    with tempfile.TemporaryDirectory(prefix="bitwitness-rehearse-") as name:
        ending = carry_through(
            story,
            node,
            _cluster(walk),
            asked.policy,
            Path(name),
            state=asked.state,
            read_signals=reader,
            clock=walk.clock,
        )
    walk.incident = walk.incident or ending.incident
    return Part("decision", (judge(story, ending, node, asked.policy),))


def _act(walk: _Walk, kind: ActKind) -> Part:
    assert walk.state is not None
    return about_act(_cluster(walk), kind, walk.state, walk.incident, walk.asked.policy)


def _job(walk: _Walk, node: str) -> Part:
    return about_job(_cluster(walk), walk.asked.job, node, walk.asked.policy)


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of one name are one, and what was tried twice in it stands there once."""
    found: dict[str, Part] = {}
    for one in parts:
        old = found.get(one.name)
        found[one.name] = one if old is None else Part(one.name, (*old.checks, *one.checks), (*old.calls, *one.calls))
    return tuple(replace(one, checks=tuple(dict.fromkeys(one.checks))) for one in found.values())
