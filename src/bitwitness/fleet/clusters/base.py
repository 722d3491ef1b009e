"""What every cluster can be asked, so that the controller knows none of them.

An act is planned as the exact calls that it takes, before anything is done: `--dry-run` prints them, and the audit log keeps
them. Whether an act has landed is told by looking at the node again, never by the success of a call, because the process
that called may have been killed before it could note that it had.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, runtime_checkable

from bitwitness.errors import ConfigurationError

ActKind = Literal["drain", "reboot", "replace", "clear"]
Service = Literal["in", "draining", "out", "absent", "unknown"]
"""`in`: takes jobs. `draining`: takes no new job, one still runs. `out`: takes none. `absent`: the cluster has no such node."""
Landed = Literal["yes", "no", "unknown"]

TAG = "bitwitness"
"""What the reason of everything we do to a node begins with; a node that somebody else took out is not ours to touch."""

_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_INCIDENT = re.compile(r"([0-9]{8}T[0-9]{6}Z)-[0-9a-z]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Act:
    """One thing to be done to one node.

    Attributes:
        kind: what.
        node: its name, checked by `valid_node`.
        incident: id of the incident because of which; empty for what a person asked for by hand.
        reason: a sentence for people.
        devices: of that node, those that are named; a cluster that knows only nodes ignores them.
        back: whether it is about a device that was taken out because of the incident, and was seen on this node after that.
    """

    kind: ActKind
    node: str
    incident: str
    reason: str
    devices: tuple[str, ...] = ()
    back: bool = False

    @property
    def blamed(self) -> datetime | None:
        """When the node had the machine that is blamed: one that was made later is another. None where that cannot be told.

        A device that came back may be in a newer machine, and is blamed there.
        """
        return None if self.back else found_at(self.incident)

    @property
    def tag(self) -> str:
        """By which the act is recognised on the node afterwards: `bitwitness 20261129T093015Z-4be1d2`."""
        return f"{TAG} {self.incident}".strip()


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node as the cluster shows it now.

    Attributes:
        node: its name.
        service: whether it takes jobs.
        raw: the state in the cluster's own words, e.g. `IDLE+DRAIN`. Of one that is absent, why, where the cluster knows: its machine
            was exchanged for another under another name.
        reason: why it is out, in the words of whoever took it out.
        reason_by: who did; empty where the cluster does not say.
        booted: when it booted, UTC in ISO 8601, or what changes with every boot; or "".
        instance: what stays with the machine and changes with its replacement, or "".
        jobs: ids of jobs that run there, where the cluster says.
        awaits: what was asked for and is still to happen to it, in the cluster's words, e.g. `Action:Replace`; "" for nothing.
        more: what the adapter itself needs of it to plan, JSON values and no secret; kept with what was intended, and shown to nobody.
    """

    node: str
    service: Service
    raw: str = ""
    reason: str = ""
    reason_by: str = ""
    booted: str = ""
    instance: str = ""
    jobs: tuple[str, ...] = ()
    awaits: str = ""
    more: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ours(self) -> bool:
        """Whether it was taken out by bitwitness."""
        return self.reason == TAG or self.reason.startswith(TAG + " ")


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as the cluster shows it now.

    Attributes:
        job: its id.
        state: `pending`, `running`, `ended`, or `absent` where the cluster does not know it (any more).
        raw: in the cluster's own words.
        exit_code: of one that has ended; None where the cluster does not say.
        restarts: how often it was requeued.
        excluded: nodes on which it must not start.
        nodes: on which it runs or ran last; () where the cluster does not say.
        requeueable: False where the cluster says that it starts it no second time.
        held: whether a person holds it back.
    """

    job: str
    state: Literal["pending", "running", "ended", "absent"]
    raw: str = ""
    exit_code: int | None = None
    restarts: int = 0
    excluded: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    requeueable: bool = True
    held: bool = False


@dataclass(frozen=True, slots=True)
class Census:
    """How many nodes there are, and how many of them are out of service, whoever took them out."""

    total: int
    out: int


@dataclass(frozen=True, slots=True)
class Call:
    """One exact call: a command as a list of words that never passes a shell, or a request.

    Attributes:
        words: the command; for a request its method and address.
        body: of a request, JSON values; it holds no secret.
        repeatable: whether making it twice does what making it once does, also long after and on whatever the node is by then.
            A drain is; a reboot is not. The replacement of a machine that is named by its own id is, that of a name is not.
        who: the person who has it made, for a cluster that keeps a name; "" where it is this program's own.
    """

    words: tuple[str, ...]
    body: Any = None
    repeatable: bool = True
    who: str = field(default="", compare=False)

    def __str__(self) -> str:
        """As a person would type it."""
        return shlex.join(self.words) + ("" if self.body is None else f" {json.dumps(self.body)}")


class Cluster(Protocol):
    """A cluster. Every method may raise `ClusterError`: unreachable, refused, or an answer that is not understood."""

    name: str
    """`slurm`, `local`, ..."""
    scheduler: str
    """Which jobs are its: what stands before the colon of `scheduler_job`, e.g. `slurm`, `kubernetes`."""
    acts: frozenset[ActKind]
    """What it can do; `drain` and `clear` always."""

    def look(self, node: str) -> NodeState:
        """The node now. One that the cluster does not have is `absent`, not an error."""
        ...

    def census(self) -> Census:
        """The size of the cluster now."""
        ...

    def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
        """The exact calls of an act on a node in this state; none where it has landed already. Pure.

        Where a process was killed between two of them, the next one plans anew from what the node shows, as long as none was
        begun that is not `repeatable`.

        Raises:
            ConfigurationError: this cluster cannot do it, or the name of the node is not valid.
        """
        ...

    def landed(self, act: Act, before: NodeState, now: NodeState) -> Landed:
        """Whether an act that was intended at `before` has happened, by what the node shows now. Pure."""
        ...

    def job(self, job: str) -> JobState:
        """A job now."""
        ...

    def plan_requeue(self, job: JobState, exclude: Sequence[str]) -> tuple[Call, ...]:
        """The exact calls that start a job again without these nodes; none where the cluster has no jobs. Pure."""
        ...

    def carry_out(self, call: Call) -> str:
        """Do it; what the cluster answered."""
        ...


@runtime_checkable
class Finishing(Protocol):
    """A cluster on which an act has landed before all of it is done: the node takes no jobs, and its pods are still there."""

    def rest(self, act: Act, now: NodeState) -> tuple[Call, ...]:
        """The calls that are left of an act that has landed, each of which may be repeated; none where all is done. Pure."""
        ...


@runtime_checkable
class Led(Protocol):
    """A cluster on which one of several controllers leads, by a lease that the cluster keeps."""

    def leader(self) -> str:
        """Take the lead or keep it; "" where this process has it, else who has it. From then on nothing is carried out without it.

        Raises:
            ClusterError: nobody can say now.
        """
        ...

    def resign(self) -> None:
        """Give it up, so that another one need not wait; never raises."""
        ...


@runtime_checkable
class Recalling(Protocol):
    """A cluster that needs to know what a node was to tell whether what was asked for it is over: a new process has never seen it."""

    def recall(self, act: Act, before: NodeState) -> None:
        """What a node was before an act that is followed up; asks nobody anything."""
        ...


Outcome = Literal["good", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried without changing anything.

    Attributes:
        what: in a few words, e.g. `permission to patch nodes`.
        outcome: `bad` would fail in the night; `unknown` could not be tried, which is no sign that it works.
        text: what was found.
        remedy: what to do about it, as exactly as it can be said; "" where nothing.
    """

    what: str
    outcome: Outcome
    text: str
    remedy: str = ""


@runtime_checkable
class Rehearsing(Protocol):
    """A cluster that can say beforehand whether calls would be let through."""

    def check(self, act: Act, state: NodeState, calls: Sequence[Call]) -> tuple[Check, ...]:
        """Try everything that these calls need, and change nothing: permissions, names, limits, quotas. Does not raise for what is `bad`."""
        ...

    def check_job(self, job: str) -> tuple[Check, ...]:
        """Whether a job would go on without a node that is taken out."""
        ...


@runtime_checkable
class Listing(Protocol):
    """A cluster that can name its nodes."""

    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes that a controller may act upon; () where nobody can name them.

        Raises:
            ClusterError: it cannot be asked.
        """
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A cluster that can say how a node would look after an act, by which its return can be rehearsed."""

    def foreseen(self, act: Act, state: NodeState) -> NodeState:
        """The node after an act that was carried out whole in this state. Pure."""
        ...


@runtime_checkable
class Checking(Protocol):
    """A cluster that can check the health of a node that is out of service."""

    def plan_check(self, node: str, state: NodeState) -> tuple[Call, ...]:
        """The exact calls that start a health check of a node in this state. Pure.

        Raises:
            ConfigurationError: it cannot be checked now, or at all; says why.
        """
        ...


@runtime_checkable
class Troubled(Protocol):
    """A cluster that can say what is wrong with a part of it while the rest goes on."""

    def troubles(self) -> Mapping[str, str]:
        """What is wrong now: by what it is recognised, and a sentence."""
        ...


def valid_node(name: str) -> str:
    """The name of a node, if it can be one: names come from incidents, which come from other machines, and go into commands.

    Letters, digits, `_`, `.` and `-`, not beginning with a `-` or `.`, and at most 253 characters (RFC 1123 host names, and
    what Slurm's NodeName and Kubernetes' object names allow); no list or range of nodes.

    Raises:
        ConfigurationError: it cannot.
    """
    if not _NODE.fullmatch(name):
        raise ConfigurationError(
            f"{name!r:.120} is no name of a node (letters, digits, '_', '.', '-'): nothing is done to it"
        )
    return name


def found_at(incident: str) -> datetime | None:
    """When an incident was, by its id; None where the id does not say.

    It stands there to the second, rounded down, so what happened within a second of it may have been before or after.
    """
    match = _INCIDENT.fullmatch(incident)
    try:
        return datetime.strptime(match[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) if match else None
    except ValueError:  # e.g. the 31st of February
        return None


def one_line(text: str, limit: int = 200) -> str:
    """A sentence as clusters store it: one line without control characters or halves of one, cut where it is too long."""
    plain = _CONTROL.sub(" ", text).strip()
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
