"""Slurm, through its own commands: scontrol, sinfo and squeue, of 22.05 and later.

It needs no library and no daemon beside the cluster's, only a user whom Slurm lets change nodes (an administrator). Each command is a
list of words; names are checked before they come into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import slurm_check, slurm_plan, slurm_text
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Census,
    Check,
    Cluster,
    JobState,
    Landed,
    NodeState,
    one_line,
)
from bitwitness.fleet.clusters.slurm_command import Answer, Runner, run
from bitwitness.fleet.clusters.slurm_names import job_id, node_name
from bitwitness.fleet.clusters.slurm_states import flags_of

_SETTINGS = {"kind", "hyperpod", "timeout", "rest", "user", "token_file", "version"}
_CALLS = ("update", "reboot", "requeuehold", "release")
_HOLDS_JOBS = {"ALLOCATED", "MIXED", "COMPLETING"}


class SlurmCluster:
    """A Slurm cluster, through its commands.

    Args:
        runner: runs one; another one for tests.
        hyperpod: the nodes are SageMaker HyperPod's, which replaces and reboots what is failed with its words.
        timeout: seconds for one command.
    """

    name = "slurm"
    scheduler = "slurm"

    def __init__(self, runner: Runner = run, *, hyperpod: bool = False, timeout: float = 30.0) -> None:
        if not timeout > 0:
            raise ConfigurationError(f"a command needs more than {timeout:g} s")
        self._run, self._hyperpod, self._timeout = runner, hyperpod, timeout
        self.acts: frozenset[ActKind] = acts_of(hyperpod=hyperpod)

    def look(self, node: str) -> NodeState:
        """The node now; `absent` where there is none of this name."""
        said = self._ask("scontrol", "--all", "show", "node", node_name(node))
        if said.code and f"Node {node} not found" in said.out + said.err:
            return NodeState(node, "absent")
        state = slurm_text.node_state(_good(said, f"scontrol show node {node}"), node)
        if not flags_of(state.raw) & _HOLDS_JOBS:
            return state
        listed = self._ask("squeue", "--noheader", "--all", f"--nodelist={node}", "--states=all", "--format=%A %T")
        jobs = [line.split()[0] for line in listed.out.splitlines() if line.split()[1:] and _runs(line.split()[1])]
        return slurm_text.node_state(said.out, node, tuple(dict.fromkeys(jobs)))

    def census(self) -> Census:
        """The size of the cluster now; a node that Slurm may not use for any reason counts as out."""
        said = self._ask("sinfo", "--all", "--Node", "--noheader", "--Format=NodeList:256,StateComplete:256")
        return slurm_text.census(_good(said, "sinfo"))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act; none where it has landed already."""
        change = slurm_plan.change(act, state, hyperpod=self._hyperpod)
        return () if change is None else (command_of(change),)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act has happened, by what the node shows now."""
        return slurm_plan.landed(act, before, now, hyperpod=self._hyperpod)

    def job(self, job: str) -> JobState:
        """A job now; `absent` where Slurm has forgotten it (MinJobAge after its end).

        Raises:
            ConfigurationError: it is an array, or a job of several parts: what is asked of it would happen to all of them.
        """
        plain = job_id(job)
        said = self._ask("scontrol", "--all", "show", "job", plain)
        if said.code and any(words in said.out + said.err for words in ("Invalid job id", f"Job {plain} not found")):
            return JobState(plain, "absent")
        return slurm_text.job_state(_good(said, f"scontrol show job {plain}"), plain)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """The exact calls that start an ended job again without these nodes."""
        return tuple(Call(words) for words in slurm_plan.requeue(job, exclude))

    def carry_out(self, call: Call) -> str:
        """Do it; what scontrol said, which is nothing where all went well.

        Raises:
            ClusterError: it refused, with its words.
            ConfigurationError: it is no call of this cluster.
        """
        if (
            call.words[:1] != ("scontrol",)
            or call.words[1:2] not in {(one,) for one in _CALLS}
            or call.body is not None
        ):
            raise ConfigurationError(f"not a command of Slurm's: {call}")
        said = self._ask(*call.words)
        return one_line(_good(said, str(call)) + said.err)

    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes."""
        said = self._ask("sinfo", "--all", "--Node", "--noheader", "--Format=NodeList:256")
        return slurm_check.names(_good(said, "sinfo"))

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Whether Slurm answers, lets us do it, and is set up for it."""
        return slurm_check.check(self._ask, act, hyperpod=self._hyperpod)

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether a job would go on without one of its nodes."""
        return slurm_check.check_job(self._ask, self.job(job))

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act."""
        return slurm_check.foreseen(act, state, hyperpod=self._hyperpod)

    def _ask(self, *words: str) -> Answer:
        return self._run(words, self._timeout)


def acts_of(*, hyperpod: bool) -> frozenset[ActKind]:
    """What Slurm can do to a node; only HyperPod replaces it."""
    plain: frozenset[ActKind] = frozenset({"drain", "clear", "reboot"})
    return plain | {"replace"} if hyperpod else plain


def command_of(change: slurm_plan.Change) -> Call:
    """The command for a change."""
    if change.reboot:
        words: tuple[str, ...] = (
            "scontrol",
            "reboot",
            "ASAP",
            f"nextstate={change.state}",
            f"reason={change.reason}",
            change.node,
        )
        return Call(words, repeatable=False)
    if change.state == "FAIL":  # spelt as HyperPod's documentation does
        words = ("scontrol", "update", f"node={change.node}", "state=fail", f"reason={change.reason}")
        return Call(words, repeatable=False)
    reason = (f"Reason={change.reason}",) if change.reason else ()
    return Call(("scontrol", "update", f"NodeName={change.node}", f"State={change.state}", *reason))


def from_settings(settings: Mapping[str, Any]) -> Cluster:
    """The cluster that the table `cluster` of a policy describes: with `rest` through slurmrestd, else by commands.

    Raises:
        ConfigurationError: a setting is unknown or has an impossible value.
    """
    if unknown := sorted(set(settings) - _SETTINGS):
        raise ConfigurationError(f"unknown settings of a Slurm cluster: {', '.join(unknown)}; known: {_known()}")
    hyperpod, timeout = settings.get("hyperpod", False), settings.get("timeout", 30.0)
    if not isinstance(hyperpod, bool):
        raise ConfigurationError(f"cluster.hyperpod is true or false, not {hyperpod!r:.80}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise ConfigurationError(f"cluster.timeout is a number of seconds, not {timeout!r:.80}")
    texts = {name: settings.get(name, "") for name in ("rest", "user", "token_file", "version")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"cluster.{name} is a text, not {value!r:.80}")
    if not texts["rest"]:
        if needless := [name for name, value in texts.items() if value]:
            raise ConfigurationError(f"cluster.{needless[0]} is for slurmrestd: say where it is (rest = ...)")
        return SlurmCluster(hyperpod=hyperpod, timeout=timeout)
    from bitwitness.fleet.clusters.slurm_rest import SlurmRest  # noqa: PLC0415 - needs the extra

    token_file = Path(texts["token_file"]) if texts["token_file"] else None
    return SlurmRest(
        texts["rest"], texts["user"], token_file, version=texts["version"], hyperpod=hyperpod, timeout=timeout
    )


def _known() -> str:
    return ", ".join(sorted(_SETTINGS))


def _runs(word: str) -> bool:
    return word in {
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "STOPPED",
        "SIGNALING",
        "STAGE_OUT",
        "RESIZING",
    }


def _good(said: Answer, what: str) -> str:
    """What a command printed.

    Raises:
        ClusterError: it failed.
    """
    if said.code:
        raise ClusterError(f"{one_line(what)} ended with {said.code}: {one_line(said.err or said.out) or 'no word'}")
    return said.out
