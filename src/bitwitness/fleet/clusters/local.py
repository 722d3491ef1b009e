"""The cluster that every run has: the quarantine in its directory, which `bitwitness run` obeys.

It takes a device or a node out of the runs that are watched and out of nothing else, so it needs no scheduler and no right
on any machine. What the supervisor of a run has denied because of an incident counts as ours: it is the same instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bitwitness.errors import BitwitnessError, ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import (
    TAG,
    Act,
    ActKind,
    Call,
    Census,
    JobState,
    Landed,
    NodeState,
    one_line,
    valid_node,
)
from bitwitness.runfiles import Denial, Quarantine, RunFiles
from bitwitness.topology import Topology

_ACTS: frozenset[ActKind] = frozenset({"drain", "clear"})
_ADD = ("bitwitness", "quarantine", "add")
_CLEAR = ("bitwitness", "quarantine", "clear")


class LocalCluster:
    """The quarantines of some runs.

    A node is out where it, or one of its devices, is denied in every run that it takes part in. Taking it out denies the
    devices that are named, or the node where none is.

    Args:
        runs: their directories.
        parents: folders of such directories; runs that appear in them later count as well.
    """

    name = "local"
    acts: frozenset[ActKind] = _ACTS

    def __init__(self, runs: Sequence[Path], parents: Sequence[Path] = ()) -> None:
        self._runs, self._parents = tuple(path.resolve() for path in runs), tuple(path.resolve() for path in parents)

    def look(self, node: str) -> NodeState:
        """The node in all runs: `in` while one of them would have it."""
        seen = [self._seen(files, node) for files in self._files()]
        there = [one for one in seen if one is not None]
        if not there:
            return NodeState(node, "absent")
        foreign = [denial for denials in there for denial in denials if not _ours(denial)]
        if foreign:
            return NodeState(node, "out", "denied", foreign[0].reason)
        if not all(there):
            return NodeState(node, "in", "may join")
        first = there[0][0]
        return NodeState(node, "out", "denied", _said(first), TAG)

    def census(self) -> Census:
        """All nodes of all runs, and those that are denied in one of them."""
        nodes, out = set[str](), set[str]()
        for files in self._files():
            places, held = _places(files), _held(files)
            nodes |= {node for node, _ in places} | set(held.denied_nodes)
            out |= set(held.denied_nodes) | {one.node for one in held.denied_devices.values() if one.node}
        return Census(len(nodes | out), len(out))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """One command a run whose quarantine is not yet as the act would have it."""
        valid_node(act.node)
        if act.kind not in self.acts:
            raise ConfigurationError(f"the quarantine of a run cannot {act.kind} a node: only drain and clear")
        calls = []
        for files in self._files():
            denials = self._seen(files, act.node)
            if denials is None:
                continue
            if act.kind == "drain" and not denials:
                names = act.devices or (act.node,)
                kind = () if act.devices else ("--node",)
                words = (*_ADD, str(files.path), *kind, "--reason", one_line(f"{act.tag}: {act.reason}"), "--", *names)
                calls.append(Call(words))
            elif act.kind == "clear" and denials:
                names = tuple(_names(_held(files), act.node))
                calls.append(Call((*_CLEAR, str(files.path), "--reason", one_line(act.reason), "--", *names)))
        return tuple(calls)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """By whether the node is denied."""
        if now.service in ("absent", "unknown"):
            return "unknown"
        return "yes" if (now.service == "out") == (act.kind == "drain") else "no"

    def job(self, job: str) -> JobState:
        """There are no jobs."""
        return JobState(job, "absent", "a quarantine knows no jobs")

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """Nothing: `bitwitness run` goes on by itself."""
        return ()

    def carry_out(self, call: Call) -> str:
        """What the command would do, in this process."""
        cut = call.words.index("--")
        command, run, options, names = call.words[:3], call.words[3], call.words[4:cut], call.words[cut + 1 :]
        reason = options[options.index("--reason") + 1]
        files = RunFiles(run)
        try:
            if command == _CLEAR:
                files.quarantine.clear(names, reason=reason)
                return f"{run}: {', '.join(names)} may join again"
            if "--node" in options:
                files.quarantine.deny_node(names[0], reason=reason, incident=_incident(reason))
            else:
                self._deny(files, names, reason)
        except (BitwitnessError, OSError) as error:
            raise ClusterError(f"{call}: {error}") from error
        return f"{run}: {', '.join(names)} must not join"

    def _deny(self, files: RunFiles, devices: Sequence[str], reason: str) -> None:
        homes = {device: node for node, device in _places(files)}
        for device in devices:
            files.quarantine.deny_devices(
                [device], node=homes.get(device, ""), reason=reason, incident=_incident(reason)
            )

    def _files(self) -> Iterable[RunFiles]:
        listed = [path for parent in self._parents if parent.is_dir() for path in sorted(parent.iterdir())]
        paths = dict.fromkeys((*self._runs, *(path for path in listed if (path / "run.json").is_file())))
        return [RunFiles(path) for path in paths if path.is_dir()]

    def _seen(self, files: RunFiles, node: str) -> list[Denial] | None:
        """What denies a node in a run; None where the node takes no part in it."""
        held = _held(files)
        denials = [_denial(held, name) for name in _names(held, node)]
        devices = [device for home, device in _places(files) if home == node]
        denials += [held.denied_devices[one] for one in devices if one in held.denied_devices]
        return denials if devices or denials else None


def _names(held: Quarantine, node: str) -> list[str]:
    """The names under which a node is denied: its own, and those of its devices."""
    devices = [name for name, one in held.denied_devices.items() if one.node == node]
    return [*([node] if node in held.denied_nodes else []), *devices]


def _denial(held: Quarantine, name: str) -> Denial:
    return held.denied_nodes[name] if name in held.denied_nodes else held.denied_devices[name]


def _ours(denial: Denial) -> bool:
    """Whether it was denied because of an incident, by the supervisor or here, and not by hand."""
    return bool(denial.incident) or denial.reason == TAG or denial.reason.startswith(TAG + " ")


def _said(denial: Denial) -> str:
    return denial.reason if denial.reason.startswith(TAG) else f"{TAG} {denial.incident}: {denial.reason}"


def _incident(reason: str) -> str:
    """The id in `bitwitness 20261129T093015Z-4be1d2: ...`."""
    tag = reason.partition(":")[0]
    return tag.removeprefix(TAG).strip() if tag.startswith(TAG + " ") else ""


def _held(files: RunFiles) -> Quarantine:
    try:
        return files.quarantine.read()
    except (BitwitnessError, OSError) as error:
        raise ClusterError(str(error)) from error


def _places(files: RunFiles) -> list[tuple[str, str]]:
    """(node, device) of every rank of a run; none where it has not started."""
    try:
        if not (files.path / "run.json").exists():
            return []
        topology = Topology.from_json(files.read_run()["placement"])
    except (BitwitnessError, OSError, KeyError, TypeError) as error:
        raise ClusterError(f"{files.path}: who takes part in this run cannot be read: {error}") from error
    return [(place.node, place.device) for place in topology.placements]
