"""Slurm, through slurmrestd: for a controller that does not run on a machine with Slurm's commands.

slurmrestd can show nodes and jobs in every version, and change nodes from v0.0.39 (Slurm 23.02) on. Up to 24.11 it can neither
requeue a job nor reboot a node: for these, and for changes of older versions, the plan says scontrol, as it does without REST.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters import slurm_check, slurm_json, slurm_plan
from bitwitness.fleet.clusters.base import Act, ActKind, Call, Census, Check, JobState, Landed, NodeState, one_line
from bitwitness.fleet.clusters.slurm import SlurmCluster, acts_of, command_of
from bitwitness.fleet.clusters.slurm_arrays import array_of
from bitwitness.fleet.clusters.slurm_command import Runner, run
from bitwitness.fleet.clusters.slurm_http import Http
from bitwitness.fleet.clusters.slurm_names import job_id, node_name

_VERSION = re.compile(r"v0\.0\.([0-9]{2,3})")
_PATH = re.compile(r"/slurm/(v0\.0\.[0-9]{2,3})/node/\{[a-z_]+\}/?")
_CHANGES = 39
"""From which version on nodes can be changed."""
_TRIED = 42
"""The newest version that this was tried with; a newer one is taken only where there is no other."""
_OK = range(200, 300)


class SlurmRest:
    """A Slurm cluster, through slurmrestd.

    Args:
        where: `unix:/PATH` or `http(s)://HOST:PORT`.
        user: sent as X-SLURM-USER-NAME.
        token_file: its content is sent as X-SLURM-USER-TOKEN.
        version: of the paths, e.g. `v0.0.42`; found out where it is not given.
        hyperpod: as for `SlurmCluster`.
        timeout: seconds for one request.
        runner: runs scontrol where REST has no call.
    """

    name = "slurm"
    scheduler = "slurm"

    def __init__(
        self,
        where: str,
        user: str = "",
        token_file: Path | None = None,
        *,
        version: str = "",
        hyperpod: bool = False,
        timeout: float = 30.0,
        runner: Runner = run,
    ) -> None:
        if version and not _VERSION.fullmatch(version):
            raise ConfigurationError(f"a version of slurmrestd reads v0.0.42, not {version!r:.40}")
        self._http = Http(where, user, token_file, timeout)
        self._commands = SlurmCluster(runner, hyperpod=hyperpod, timeout=timeout)
        self._hyperpod, self._version = hyperpod, version
        self.acts: frozenset[ActKind] = acts_of(hyperpod=hyperpod)

    @property
    def version(self) -> str:
        """The version in the paths; slurmrestd is asked once."""
        if not self._version:
            self._version = newest(self._found("/openapi/v3"))
        return self._version

    def look(self, node: str) -> NodeState:
        """The node now; `absent` where there is none of this name."""
        status, answer = self._http.ask("GET", self._path(f"node/{node_name(node)}"))
        absent = (slurm_json.NO_SUCH_NODE, f"Failure to query node {node}")
        if any(number == absent[0] or absent[1] in words for number, words in slurm_json.errors_of(answer)):
            return NodeState(node, "absent")
        return slurm_json.node_state(self._good(status, answer, f"node/{node}"), node)

    def census(self) -> Census:
        """The size of the cluster now; a node that Slurm may not use for any reason counts as out."""
        return slurm_json.census(self._found(self._path("nodes" if self._number < _TRIED - 2 else "nodes/")))

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act; none where it has landed already. Asks for the version where it is not known yet."""
        change = slurm_plan.change(act, state, hyperpod=self._hyperpod)
        if change is None:
            return ()
        if change.reboot or self._number < _CHANGES:
            return (command_of(change),)
        body: dict[str, Any] = {"state": [change.state]} | ({"reason": change.reason} if change.reason else {})
        words = ("POST", self._http.where + self._path(f"node/{change.node}"))
        return (Call(words, body, repeatable=change.state != "FAIL"),)

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act has happened, by what the node shows now."""
        return slurm_plan.landed(act, before, now, hyperpod=self._hyperpod)

    def job(self, job: str) -> JobState:
        """A job now; `absent` where Slurm has forgotten it (MinJobAge after its end).

        Raises:
            ConfigurationError: as for `SlurmCluster`.
        """
        plain = job_id(job)
        status, answer = self._http.ask("GET", self._path(f"job/{array_of(plain)}"))
        if any(number == slurm_json.NO_SUCH_JOB for number, _ in slurm_json.errors_of(answer)):
            return JobState(plain, "absent")
        return slurm_json.job_state(self._good(status, answer, f"job/{plain}"), plain)

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """The exact calls that start an ended job again: commands, since slurmrestd has no request for it."""
        return self._commands.plan_requeue(job, exclude)

    def carry_out(self, call: Call) -> str:
        """Do it; what was answered.

        Raises:
            ClusterError: refused, with the words of Slurm.
            ConfigurationError: it is no call of this cluster.
        """
        if call.words[:1] == ("scontrol",):
            return self._commands.carry_out(call)
        start = self._http.where + "/slurm/"
        if len(call.words) != 2 or call.words[0] != "POST" or not call.words[1].startswith(start):
            raise ConfigurationError(f"not a request to this slurmrestd: {call}")
        status, answer = self._http.ask("POST", call.words[1].removeprefix(self._http.where), call.body)
        self._good(status, answer, call.words[1])
        return f"HTTP {status}"

    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return slurm_json.names(self._found(self._path("nodes" if self._number < _TRIED - 2 else "nodes/")))

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Whether what is called by commands would be let through; slurmrestd tells nobody's rights."""
        found: tuple[Check, ...] = ()
        if any(call.words[0] == "POST" for call in calls):
            text = f"slurmrestd answers in {self.version}, and tells nobody what the owner of a token may do"
            remedy = "see that it is SlurmUser, root or an administrator: sacctmgr show user NAME format=AdminLevel"
            found = (Check(f"right to {act.kind}", "unknown", text, remedy),)
        if any(call.words[0] == "scontrol" for call in calls):
            found = (*found, *self._commands.check(act, state, calls))
        return found

    def check_job(self, job: str) -> tuple[Check, ...]:
        """As for `SlurmCluster`: jobs are started again by commands."""
        return self._commands.check_job(job)

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act."""
        return slurm_check.foreseen(act, state, hyperpod=self._hyperpod)

    @property
    def _number(self) -> int:
        return int(self.version.rpartition(".")[2])

    def _path(self, rest: str) -> str:
        return f"/slurm/{self.version}/{rest}"

    def _found(self, path: str) -> Any:
        status, answer = self._http.ask("GET", path)
        return self._good(status, answer, path)

    def _good(self, status: int, answer: Any, what: str) -> Any:
        """The answer.

        Raises:
            ClusterError: it is an error, or no JSON.
        """
        errors = "; ".join(words or f"error {number}" for number, words in slurm_json.errors_of(answer))
        if errors or status not in _OK or answer is None:
            why = one_line(errors) or ("no JSON" if status in _OK else _hint(status))
            raise ClusterError(f"slurmrestd at {self._http.where} answered {status} to {what}: {why}")
        return answer


def newest(openapi: Any) -> str:
    """The version to speak, from what slurmrestd tells of itself: the newest that was tried, else the oldest of the others.

    Raises:
        ClusterError: it names none.
    """
    paths = openapi.get("paths") if isinstance(openapi, Mapping) else None
    found = {
        match[1]
        for path in (paths if isinstance(paths, Mapping) else ())
        if isinstance(path, str) and (match := _PATH.fullmatch(path))
    }
    if not found:
        raise ClusterError('slurmrestd names no version that shows nodes: say which (version = "v0.0.42")')
    ordered = sorted(found, key=lambda version: int(version.rpartition(".")[2]))
    tried = [version for version in ordered if int(version.rpartition(".")[2]) <= _TRIED]
    return tried[-1] if tried else ordered[0]


def _hint(status: int) -> str:
    if status in {401, 403}:
        return "not allowed: is the token still valid, and the user an administrator of Slurm (adminlevel=Admin)?"
    return "no such request: is the version right?" if status in {404, 405} else "no reason given"
