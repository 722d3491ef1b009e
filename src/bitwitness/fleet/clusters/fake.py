"""A cluster that lives in memory or in one file: what users' tests and ours act upon, with the same rules as a real one.

With a file it outlives the process that acts upon it, so that a controller can be killed at any instant and the next one asks
the same cluster. It counts every call, and can be told to refuse, to be slow to show what was done, or to be unreachable.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bitwitness.errors import ClusterError, ConfigurationError
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

When = Literal["before", "after"]

_ACTS: frozenset[ActKind] = frozenset({"drain", "reboot", "replace", "clear"})
_OUT = ("out", "draining")
_CALLS = ("drain", "reboot", "replace", "clear", "mark", "unmark", "check", "requeue", "release")


def _now() -> datetime:
    return datetime.now(UTC)


class FakeCluster:
    """A cluster of nodes and jobs for tests and rehearsals.

    Args:
        nodes: names of nodes that it has beside those that are in the file already.
        path: the file in which it lives; None: in memory.
        clock: the time, for when a node booted.
        steps: how many calls it takes to take a node out: the first one does it, each of the others leaves a mark on the node. A
            reboot or a replacement takes as many before its own; and a mark that is missing afterwards is what is left to be done.

    Raises:
        ClusterError: the file is no such cluster.
    """

    name = "fake"
    scheduler = "fake"
    acts: frozenset[ActKind] = _ACTS

    def __init__(
        self,
        nodes: Iterable[str] = (),
        path: Path | None = None,
        *,
        clock: Callable[[], datetime] = _now,
        steps: int = 1,
    ) -> None:
        self._path, self._clock, self._marks = path, clock, tuple(str(number) for number in range(2, steps + 1))
        self._memory: dict[str, Any] = {"nodes": {}, "jobs": {}, "calls": [], "looks": 0, "faults": {}}
        self._lock = threading.Lock()
        with self._changing() as world:
            for node in nodes:
                world["nodes"].setdefault(valid_node(node), _fresh())

    # What a cluster is asked ------------------------------------------------------------------------------------------

    def look(self, node: str) -> NodeState:
        """The node now, or as it was where the cluster is slow to show."""
        valid_node(node)
        with self._changing() as world:
            world["looks"] += 1
            _reachable(world)
            seen = world["nodes"].get(node)
            if seen is None:
                return NodeState(node, "absent")
            if seen["hidden"] > 0:
                seen["hidden"] -= 1
                return _state(node, seen["before"])
            return _state(node, seen)

    def census(self) -> Census:
        """How many nodes there are, and how many are out."""
        with self._changing() as world:
            _reachable(world)
            states = [one["service"] for one in world["nodes"].values()]
            return Census(len(states), sum(state in _OUT for state in states))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """One call an act, or more where it takes several steps; none where the node is already as the act would have it."""
        node = valid_node(act.node)
        if act.kind not in self.acts:
            raise ConfigurationError(f"a fake cluster cannot {act.kind} a node")
        if state.node != node or state.service == "absent":
            raise ConfigurationError(f"the fake cluster has no node {node}: nothing is done")
        if act.kind == "clear":
            return self._clear(node, state)
        if act.kind == "drain":
            return () if state.service in _OUT else (_call("drain", act), *self._missing(node, state))
        first = (_call("drain", act),) if self._marks and state.service not in _OUT else ()
        return (*first, *self._missing(node, state), _call(act.kind, act, repeatable=False))

    def _clear(self, node: str, state: NodeState) -> tuple[Call, ...]:
        if state.service == "in":
            return ()
        if state.service in _OUT and not state.ours:
            raise ConfigurationError(f"{node} was taken out by {state.reason_by or 'somebody'}, not by bitwitness")
        marks = state.more.get("marks", ())
        return (*(Call(("fake", "unmark", node, "--number", mark)) for mark in marks), Call(("fake", "clear", node)))

    def _missing(self, node: str, state: NodeState) -> tuple[Call, ...]:
        there = state.more.get("marks", ())
        return tuple(Call(("fake", "mark", node, "--number", mark)) for mark in self._marks if mark not in there)

    def rest(self, act: Act, now: NodeState) -> tuple[Call, ...]:
        """The marks that are missing on a node that is out because of us."""
        if act.kind == "clear" or now.service not in _OUT or not now.ours:
            return ()
        return self._missing(valid_node(act.node), now)

    def plan_check(self, node: str, state: NodeState) -> tuple[Call, ...]:
        """One call, of a node that we have taken out."""
        if state.service != "out" or not state.ours:
            raise ConfigurationError(
                f"{node} is {state.raw or state.service}: only a node that we have taken out is checked"
            )
        return (Call(("fake", "check", valid_node(node)), repeatable=False),)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """By what the node shows: out, another boot, another instance, or in again."""
        if now.service in ("unknown", "absent"):
            return "unknown"
        done = {
            "drain": now.service in _OUT,
            "reboot": now.booted != before.booted,
            "replace": now.instance != before.instance,
            "clear": now.service == "in",
        }
        return "yes" if done[act.kind] else "no"

    def job(self, job: str) -> JobState:
        """A job now."""
        with self._changing() as world:
            _reachable(world)
            seen = world["jobs"].get(job)
            if seen is None:
                return JobState(job, "absent")
            raw = seen["state"] + (" held" if seen.get("held") else "")
            return JobState(
                job,
                seen["state"],
                raw,
                seen["exit"],
                seen["restarts"],
                tuple(seen["excluded"]),
                tuple(seen["nodes"]),
                seen.get("requeueable", True),
                seen.get("by_person", False),
            )

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """Two calls, as with real schedulers: one that holds the job while the nodes are excluded, one that releases it."""
        release = Call(("fake", "release", job.job))
        if job.state == "ended" and not job.requeueable:
            raise ConfigurationError(f"the fake job {job.job} must not be started again, as it was told")
        if job.state == "ended":
            return (Call(("fake", "requeue", job.job, "--exclude", ",".join(map(valid_node, exclude)))), release)
        return (release,) if job.raw == "pending held" else ()

    def carry_out(self, call: Call) -> str:
        """Do it, unless told to refuse.

        Raises:
            ClusterError: it was told to, or there is no such node or job.
            ConfigurationError: it is no call of this cluster.
        """
        if len(call.words) < 3 or call.words[0] != "fake" or call.words[1] not in _CALLS or call.body is not None:
            raise ConfigurationError(f"not a call of a fake cluster: {call}")
        _, kind, name, *rest = call.words
        with self._changing() as world:
            kill = _killing(world)
        if kill == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        with self._changing() as world:
            made = [kind, name, self._clock().isoformat(), "refused"]
            world["calls"].append(made)
            _refuse(world, name)
            if kind in world["faults"].get("forbidden", ()):
                raise ClusterError(f"fake {kind} {name}: forbidden, as it was told")
            if kind == "requeue":
                _requeue(world, name, rest[1])
            elif kind == "release":
                _release(world, name)
            else:
                self._change(world, kind, name, rest[1] if rest else "")
            made[-1] = "granted"
        if kill == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{kind} {name}: done"

    def _change(self, world: dict[str, Any], kind: str, name: str, reason: str) -> None:
        node = world["nodes"].get(name)
        if node is None:
            raise ClusterError(f"fake {kind} {name}: there is no such node")
        node["before"] = {key: value for key, value in node.items() if key != "before"}
        node["hidden"] = world["faults"].get("slow", 0)
        if kind == "drain":
            busy = any(job["state"] == "running" and name in job["nodes"] for job in world["jobs"].values())
            node.update(service="draining" if busy else "out", reason=reason, by="bitwitness")
        elif kind == "clear":
            node.update(service="in", reason="", by="", marks=[])
        elif kind == "mark":
            node["marks"] = sorted({*node.get("marks", ()), reason})
        elif kind == "unmark":
            node["marks"] = sorted({*node.get("marks", ())} - {reason})
        elif kind == "reboot":
            node.update(booted=f"{node['booted']}+")
        elif kind == "replace":
            node.update(instance=f"{node['instance']}+", booted=f"{node['booted']}+")

    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes."""
        with self._changing() as world:
            _reachable(world)
            return tuple(world["nodes"])

    # What is tried without changing anything ---------------------------------------------------------------------------

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act: out with our reason and all marks, or in again."""
        if act.kind == "clear":
            return replace(state, service="in", raw="IDLE", reason="", reason_by="", more={})
        reason = one_line(f"{act.tag}: {act.reason}")
        more = {"marks": list(self._marks)}
        return replace(state, service="out", raw="DRAINED", reason=reason, reason_by="bitwitness", more=more)

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Whether what is called is among what was forbidden."""
        kinds = tuple(dict.fromkeys(call.words[1] for call in calls))
        with self._changing() as world:
            _reachable(world)
            forbidden = [kind for kind in kinds if kind in world["faults"].get("forbidden", ())]
        what = f"right to {act.kind}"
        if forbidden:
            remedy = "have it allowed: this is a fake cluster, in which a test has forbidden it"
            return (Check(what, "bad", f"forbidden: {', '.join(forbidden)}", remedy),)
        return (Check(what, "good", f"allowed: {', '.join(kinds)}"),)

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether it may be started again."""
        now = self.job(job)
        if not now.requeueable or now.held:
            why = "a person holds it" if now.held else "it must not be started again"
            return (Check(f"go on without the node: {job}", "bad", why, "submit it anew"),)
        return (Check(f"go on without the node: {job}", "good", "it may be started again"),)

    # What a test tells it ---------------------------------------------------------------------------------------------

    def add_job(
        self,
        job: str,
        nodes: Sequence[str] = (),
        *,
        state: str = "running",
        exit_code: int | None = None,
        requeueable: bool = True,
        held: bool = False,
    ) -> None:
        """Have a job, or change it: `running`, or `ended` with an exit code; `held`: by a person. How often it was requeued stays."""
        with self._changing() as world:
            old = world["jobs"].get(job, {"restarts": 0, "excluded": [], "nodes": []})
            new = {"state": state, "exit": exit_code, "nodes": list(nodes or old["nodes"])}
            world["jobs"][job] = {**old, **new, "requeueable": requeueable, "by_person": held}

    def take_out(self, node: str, reason: str, by: str = "admin") -> None:
        """Somebody else takes a node out."""
        with self._changing() as world:
            world["nodes"][node].update(service="out", reason=reason, by=by, hidden=0)

    def take_in(self, node: str) -> None:
        """Somebody else returns a node to service."""
        with self._changing() as world:
            world["nodes"][node].update(service="in", reason="", by="", hidden=0)

    def exchange(self, node: str) -> None:
        """Somebody else exchanges the machine of a node, and returns it to service."""
        with self._changing() as world:
            seen = world["nodes"][node]
            seen.update(instance=f"{seen['instance']}+", booted=f"{seen['booted']}+")
            seen.update(service="in", reason="", by="", hidden=0)

    def lose(self, node: str) -> None:
        """Somebody else takes a node out of the cluster altogether."""
        with self._changing() as world:
            del world["nodes"][node]

    def refuse(self, times: int, node: str = "") -> None:
        """Refuse the next calls, of one node or of any."""
        self._tell("refuse", [times, node])

    def forbid(self, *kinds: str) -> None:
        """Refuse all calls of these kinds; none: forbid nothing."""
        self._tell("forbidden", list(kinds))

    def unreachable(self, on: bool = True) -> None:
        """Answer nothing, or answer again."""
        self._tell("unreachable", on)

    def slow_to_show(self, looks: int) -> None:
        """Show so many looks long what a node was before it was changed."""
        self._tell("slow", looks)

    def kill_caller(self, when: When, call: int = 1) -> None:
        """End the process that makes the next but `call - 1` call, before or after what it asks for is done."""
        self._tell("kill", [when, call])

    def calls(self, node: str = "", kind: str = "") -> list[tuple[str, str]]:
        """(kind, node) of every call that was ever made, refused ones included, in order; of a node or kind if given."""
        with self._changing() as world:
            made = [(str(one[0]), str(one[1])) for one in world["calls"]]
        return [one for one in made if one[1] == (node or one[1]) and one[0] == (kind or one[0])]

    def times(self) -> list[tuple[datetime, str]]:
        """(when, node) of every call."""
        with self._changing() as world:
            return [(datetime.fromisoformat(str(one[2])), str(one[1])) for one in world["calls"]]

    def granted(self) -> list[tuple[str, str]]:
        """(kind, node) of every call that has changed something, in order."""
        with self._changing() as world:
            return [(str(one[0]), str(one[1])) for one in world["calls"] if one[3] == "granted"]

    def looks(self) -> int:
        """How often a node was looked at."""
        with self._changing() as world:
            return int(world["looks"])

    def _tell(self, what: str, value: Any) -> None:
        with self._changing() as world:
            world["faults"][what] = value

    # Where it lives ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """The world, changed by nobody else meanwhile. Counters are kept also where a call fails."""
        with self._lock:
            if self._path is None:
                yield self._memory
                return
            with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                world = self._read(self._path)
                try:
                    yield world
                finally:
                    beside = self._path.with_name(f".{self._path.name}.new")
                    beside.write_text(json.dumps(world))
                    beside.replace(self._path)

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {key: type(value)() for key, value in self._memory.items()}
        try:
            world = json.loads(path.read_text())
            if not isinstance(world, dict) or set(world) != set(self._memory):
                raise ValueError("it has other parts")
        except ValueError as error:
            raise ClusterError(f"{path} is no fake cluster: {error}") from error
        return world


def _fresh() -> dict[str, Any]:
    return {"service": "in", "reason": "", "by": "", "booted": "1", "instance": "1", "hidden": 0, "before": None}


def _state(name: str, seen: dict[str, Any]) -> NodeState:
    raw = {"in": "IDLE", "out": "DRAINED", "draining": "DRAINING"}.get(seen["service"], "UNKNOWN")
    more = {"marks": list(seen.get("marks", ()))}
    return NodeState(
        name, seen["service"], raw, seen["reason"], seen["by"], seen["booted"], seen["instance"], more=more
    )


def _call(kind: str, act: Act, *, repeatable: bool = True) -> Call:
    reason = one_line(f"{act.tag}: {act.reason}")
    return Call(("fake", kind, act.node, "--reason", reason), repeatable=repeatable)


def _reachable(world: dict[str, Any]) -> None:
    if world["faults"].get("unreachable"):
        raise ClusterError("the fake cluster cannot be reached, as it was told")


def _refuse(world: dict[str, Any], name: str) -> None:
    _reachable(world)
    times, node = world["faults"].get("refuse", (0, ""))
    if times > 0 and node in ("", name):
        world["faults"]["refuse"] = [times - 1, node]
        raise ClusterError(f"the fake cluster refuses what is asked about {name}, as it was told")


def _killing(world: dict[str, Any]) -> When | None:
    when, calls = world["faults"].get("kill", (None, 0))
    if when is None:
        return None
    world["faults"]["kill"] = [when, calls - 1] if calls > 1 else [None, 0]
    return when if calls <= 1 else None


def _release(world: dict[str, Any], name: str) -> None:
    if name not in world["jobs"]:
        raise ClusterError(f"fake release {name}: there is no such job")
    world["jobs"][name]["held"] = False


def _requeue(world: dict[str, Any], name: str, exclude: str) -> None:
    job = world["jobs"].get(name)
    if job is None or job["state"] != "ended":
        raise ClusterError(f"fake requeue {name}: there is no such job that has ended")
    job.update(
        state="pending",
        held=True,
        exit=None,
        restarts=job["restarts"] + 1,
        excluded=[one for one in exclude.split(",") if one],
    )
