"""The cluster that every run has: the quarantine in its directory, which `bitwitness run` obeys.

It takes a device or a node out of the runs that are watched and out of nothing else, so it needs no scheduler and no right
on any machine. What the supervisor of a run has denied because of an incident counts as ours: it is the same instance.

A run that cannot be read keeps no other one from being acted upon: what is wrong with it is said, and a node is judged by the
runs that can be read, if one of them has it. Only the run of the incident itself must be readable for an act because of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwitness.errors import BitwitnessError, ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import (
    TAG,
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
from bitwitness.runfiles import Denial, Quarantine, RunFiles
from bitwitness.topology import Topology

_ACTS: frozenset[ActKind] = frozenset({"drain", "clear"})
_ADD = ("bitwitness", "quarantine", "add")
_CLEAR = ("bitwitness", "quarantine", "clear")


class LocalCluster:
    """The quarantines of some runs.

    A node is out where it, or one of its devices, is denied in every run whose last start had it. Taking it out denies the
    devices that are named, or the node where none is, in these runs and in that of the incident.

    Args:
        runs: their directories.
        parents: folders of such directories; runs that appear in them later count as well.
    """

    name = "local"
    scheduler = "local"
    acts: frozenset[ActKind] = _ACTS

    def __init__(self, runs: Sequence[Path], parents: Sequence[Path] = ()) -> None:
        self._runs, self._parents = tuple(path.resolve() for path in runs), tuple(path.resolve() for path in parents)
        self._wrong: dict[Path, str] = {}

    def look(self, node: str) -> NodeState:
        """The node in all runs that can be read: `in` while one of them would have it.

        Raises:
            ClusterError: none of these has it, and others cannot be read.
        """
        there = [denials for one in self._read() if (denials := one.denials(node)) is not None]
        if not there:
            self._complain()
            return NodeState(node, "absent")
        if not all(there):
            return NodeState(node, "in", "may join")
        theirs = [[denial for denial in denials if not _ours(denial)] for denials in there]
        if all(theirs):  # it would be out without us as well
            return NodeState(node, "out", "denied", theirs[0][0].reason)
        first = next(denial for denials in there for denial in denials if _ours(denial))
        return NodeState(node, "out", "denied", _said(first), TAG)

    def census(self) -> Census:
        """All nodes of all runs, and those that are denied in one of them."""
        nodes, out, read = set[str](), set[str](), self._read()
        if not read:
            self._complain()
        for one in read:
            nodes |= {node for node, _ in one.places} | set(one.held.denied_nodes)
            out |= set(one.held.denied_nodes) | {each.node for each in one.held.denied_devices.values() if each.node}
        return Census(len(nodes | out), len(out))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """One command a run whose quarantine is not yet as the act would have it.

        Raises:
            ClusterError: the run of the incident cannot be read.
        """
        valid_node(act.node)
        if act.kind not in self.acts:
            raise ConfigurationError(f"the quarantine of a run cannot {act.kind} a node: only drain and clear")
        calls = []
        for one in self._read(act.incident):
            files, denials = one.files, one.denials(act.node)
            if denials is None:
                continue
            if act.kind == "drain" and not denials:
                names = act.devices or (act.node,)
                kind = () if act.devices else ("--node",)
                words = (*_ADD, str(files.path), *kind, "--reason", one_line(f"{act.tag}: {act.reason}"), "--", *names)
                calls.append(Call(words))
            elif act.kind == "clear" and (names := one.ours(act.node)):
                calls.append(Call((*_CLEAR, str(files.path), "--reason", one_line(act.reason), "--", *names)))
        return tuple(calls)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """By whether the node is denied.

        A spare takes the place of a node that was taken out, so one that is denied no more may be in no run: it is returned.
        """
        if act.kind == "clear" and now.service == "absent":
            return "yes"
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
        """What the command would do, in this process.

        Raises:
            ClusterError: it cannot be written.
            ConfigurationError: it is no call of this cluster.
        """
        command, run, options, names, reason = self._parts(call)
        files = RunFiles(run)
        try:
            if command == _CLEAR:
                files.quarantine.clear(names, who=call.who, reason=reason)
                return f"{run}: {', '.join(names)} may join again"
            if "--node" in options:
                files.quarantine.deny_node(names[0], reason=reason, incident=_incident(reason))
            else:
                self._deny(files, names, reason)
        except (BitwitnessError, OSError) as error:
            raise ClusterError(f"{call}: {error}") from error
        return f"{run}: {', '.join(names)} must not join"

    def _parts(self, call: Call) -> tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...], str]:
        """Command, run, options, names and reason of one of our calls, for a run of ours."""
        words = call.words
        if call.body is None and words[:3] in (_ADD, _CLEAR) and "--reason" in words and "--" in words:
            cut = words.index("--")
            options = words[4:cut]
            if words[3] in {str(one.path) for one in self._files()} and "--reason" in options[:-1]:
                return words[:3], words[3], options, words[cut + 1 :], options[options.index("--reason") + 1]
        raise ConfigurationError(f"no command for the quarantine of one of these runs: {call}")

    def nodes(self) -> tuple[str, ...]:
        """The nodes of all runs that can be read."""
        return tuple(dict.fromkeys(node for one in self._read() for node, _ in one.places))

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Whether the quarantine of each run can be changed by this user."""
        found = []
        for run in dict.fromkeys(Path(call.words[3]) for call in calls):
            what = f"right to change {run / 'quarantine.json'}"
            file = run / "quarantine.json"
            if os.access(run, os.W_OK | os.X_OK) and (not file.exists() or os.access(file, os.R_OK)):
                found.append(Check(what, "good", "this user may"))
            else:
                remedy = "run the controller as a user who may write into the run, such as its owner"
                found.append(Check(what, "bad", f"uid {os.geteuid()} may not write there", remedy))
        return tuple(found)

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Nothing is started again by the controller here."""
        return (
            Check(
                f"go on without the node: {job}",
                "unknown",
                "a quarantine knows no jobs: `bitwitness run` goes on by itself",
            ),
        )

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

    def _read(self, incident: str = "") -> list[_Run]:
        """The runs that can be read; what is wrong with the others is kept. The one of this incident must be among them."""
        found, self._wrong = [], {}
        for files in self._files():
            try:
                found.append(_Run(files, _places(files), _held(files)))
            except ClusterError as error:
                if incident and (files.path / "incidents" / incident).is_dir():
                    raise
                self._wrong[files.path] = str(error)
        return found

    def _complain(self) -> None:
        if self._wrong:
            raise ClusterError("; ".join(self._wrong.values())[:1000])

    def troubles(self) -> Mapping[str, str]:
        """Runs that cannot be read: nobody is kept out of them, and they keep nobody out."""
        if self._wrong:
            self._read()  # it may have been mended since
        return {str(path): f"{text}. No node is judged by this run until then" for path, text in self._wrong.items()}


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that can be read."""

    files: RunFiles
    places: list[tuple[str, str]]
    held: Quarantine

    def denials(self, node: str) -> list[Denial] | None:
        """What denies a node here; None where the node takes no part."""
        denied, devices = self.held.denied_devices, [device for home, device in self.places if home == node]
        found = [self.held.denied_nodes[node]] if node in self.held.denied_nodes else []
        found += [denied[name] for name in self.names(node) if name in denied]
        return found if devices or found else None

    def ours(self, node: str) -> tuple[str, ...]:
        """Those that were not denied by hand."""
        held = self.held
        each = {name: held.denied_nodes.get(name) or held.denied_devices[name] for name in self.names(node)}
        return tuple(name for name, denial in each.items() if _ours(denial))

    def names(self, node: str) -> list[str]:
        """The names under which a node is denied: its own, and those of its devices, wherever they were when they were."""
        denied, here = self.held.denied_devices, {device for home, device in self.places if home == node}
        devices = [name for name, one in denied.items() if one.node == node or name in here]
        return [*([node] if node in self.held.denied_nodes else []), *devices]


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
