"""How a generation ended, and what follows: pure functions of what was seen.

Nothing here reads a file, a clock or a process, so that every rule of DESIGN section 5 can be tried on every combination
of what can be seen.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from bitwitness import errors
from bitwitness.evidence import Persistence, Verdict
from bitwitness.supervise.settings import Settings

OutcomeKind = Literal[
    "finished", "corruption", "guard_failure", "failed", "node_lost", "hang", "stopped", "port_taken", "unfinished"
]
OUTCOMES: tuple[OutcomeKind, ...] = get_args(OutcomeKind)

FINISHED, ATTRIBUTED, UNATTRIBUTED, GUARD, REFUSED = 0, 160, 3, 4, 2
LOST, HUNG = 137, 124
"""A node that is gone counts as killed; a hang ends as `timeout` of coreutils ends it. 128 and more: try again elsewhere."""

_OURS = {REFUSED, UNATTRIBUTED, GUARD, HUNG, 130, 143, ATTRIBUTED}
"""Exit codes that a scheduler acts upon: a script that ends with one of them by itself means something else."""

_PLACES_SHOWN = 8
PORT_RETRIES = 5
_TELLING = {"GuardFailure", "CheckFailed", "RankLost"}
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|[Ss]ocket [Tt]imeout|[Tt]imed out|remote process exited|"
    r"was aborted|failed to recv|peer.*(gone|closed)"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended without having finished.

    Attributes:
        rank, node: who.
        exit_code: -n for signal n; None where nobody could see it.
        type, text: of the exception that ended it, if one did.
        order: how many of the same node had failed before it.
        time: of the exception, by the clock of its host: only compared where nothing better tells.
        log: what it printed to stderr. `tail`: the end of that.
        incident: the folder of the incident that it raised. `verdict`: in JSON.
    """

    rank: int
    node: str
    exit_code: int | None = None
    type: str = ""
    text: str = ""
    order: int = 0
    time: float = 0.0
    log: str = ""
    tail: tuple[str, ...] = ()
    incident: str = ""
    verdict: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_lost(self) -> bool:
        """Whether it failed only for having lost another."""
        if self.type in ("RankLost", "DistNetworkError"):
            return True
        return bool(self.type and _LOST.search(self.text))

    def headline(self) -> str:
        """One line: who, how."""
        if self.verdict:
            return f"corruption was found: {Verdict.from_json(self.verdict).headline()}"
        who = f"rank {self.rank} on {self.node} {ended(self.exit_code)}"
        said = self.text.strip().partition("\n")[0]
        return f"{who}: {self.type}: {said}" if self.type and self.type != "SystemExit" else who

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; unknown keys are ignored."""
        known = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        known["tail"] = tuple(known.get("tail", ()))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Named:
    """One whom an incident names."""

    rank: int
    node: str
    device: str
    persistence: Persistence


@dataclass(frozen=True, slots=True)
class Hit:
    """An incident of this generation: its id ("" where the disk refused it), its verdict, whom it names, where it lies."""

    id: str
    verdict: Verdict
    named: tuple[Named, ...] = ()
    path: str = ""


Place = tuple[int, str, int, str, float]
"""Where a rank stands: rank, node, step, phase, and for how many seconds."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A job without any sign of progress.

    Attributes:
        quiet: seconds.
        behind: the ranks that stand where the others do not wait for them; empty if all stand at the same place.
        all: where every rank stands that has shown any progress.
        silent: nodes none of whose ranks has shown any, while others have.
    """

    quiet: float
    behind: tuple[Place, ...] = ()
    all: tuple[Place, ...] = ()
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a generation that has ended.

    Attributes:
        world_size: ranks it had.
        marks: by rank, what the ranks said of themselves, durably.
        hits: its incidents.
        failures: its workers that failed, each node's in the order in which they did.
        arrival: node -> when its first failure became known, as a rank among nodes.
        agents: node -> exit code of an agent that ended by itself, other than 0.
        lost: node -> why it counts as lost.
        hang: set where it was ended for that.
        stopping: the signal by which the job was asked to stop, or "".
        port_taken: the first node's agent could not listen.
        trained: whether some rank had begun a step.
    """

    world_size: int
    marks: Mapping[int, str] = field(default_factory=dict)
    hits: tuple[Hit, ...] = ()
    failures: tuple[Failure, ...] = ()
    arrival: Mapping[str, int] = field(default_factory=dict)
    agents: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    hang: Hang | None = None
    stopping: str = ""
    port_taken: bool = False
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended: a sentence, the exit code if nothing more is tried, what to show below it."""

    kind: OutcomeKind
    headline: str
    exit_code: int
    details: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()
    nodes: tuple[str, ...] = ()


def ended(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "disappeared"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_code_of(code: int | None) -> int:
    """The exit code that a process passes on: 128 + n for a signal n, as shells do; never 0."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code or 1


def stop_code(name: str) -> int:
    """The exit code of a job that was stopped by a signal."""
    return 128 + signal.Signals[name].value


def cause(failures: Sequence[Failure], arrival: Mapping[str, int]) -> Failure | None:
    """Whose failure came first, and not for having lost another; None where there is none."""

    def key(one: Failure) -> tuple[bool, int, int, float, int]:
        return one.is_lost, arrival.get(one.node, len(arrival)), one.order, one.time, one.rank

    return min(failures, key=key, default=None)


def judge(seen: Evidence) -> Outcome:
    """How a generation ended."""
    if _all_marked(seen, "finished"):
        return Outcome("finished", f"all {seen.world_size} ranks have finished", FINISHED)
    if seen.hits:
        return _corruption(seen)
    if seen.stopping or _all_marked(seen, "finished", "stopped"):
        return _stopped(seen)
    if seen.port_taken and not seen.marks:
        return Outcome("port_taken", "the port of the rendezvous was taken by somebody else", 1)
    if seen.hang is not None:
        return _hang(seen, seen.hang)
    first = cause(seen.failures, seen.arrival)
    killed = {node: code for node, code in seen.agents.items() if code < 0}
    if seen.lost and (first is None or first.is_lost or first.node in seen.lost):
        return _node_lost(seen)
    if killed and (first is None or first.is_lost or first.exit_code is None):
        node, code = next(iter(killed.items()))
        return Outcome("failed", f"torchrun's agent on {node} {ended(code)}", exit_code_of(code), nodes=(node,))
    if first is not None and (first.exit_code != 0 or first.type):
        return _failed(seen, first)
    if seen.agents:
        node, code = next(iter(seen.agents.items()))
        text = f"torchrun's agent on {node} {ended(code)} before any worker had started"
        return Outcome("failed", text, exit_code_of(code), nodes=(node,))
    missing = [one.rank for one in seen.failures if one.exit_code == 0 and not one.type]
    missing = missing or [rank for rank in range(seen.world_size) if rank not in seen.marks]
    text = f"{_ranks(missing)} ended with exit code 0 without a mark that the script had come to its end: did it leave by os._exit?"
    return Outcome("unfinished", text, 1)


def _all_marked(seen: Evidence, *marks: str) -> bool:
    return all(seen.marks.get(rank) in marks for rank in range(seen.world_size))


def _corruption(seen: Evidence) -> Outcome:
    attributed = all(hit.verdict.status == "attributed" for hit in seen.hits)
    headline = "; ".join(hit.verdict.headline() for hit in seen.hits)
    details = []
    for hit in seen.hits:
        details += [hit.verdict.reason] if hit.verdict.reason else []
        details.append(f"incident: {hit.path}" if hit.path else "the incident could not be written")
    code = ATTRIBUTED if attributed else UNATTRIBUTED
    return Outcome("corruption", headline, code, tuple(details), seen.hits)


def _stopped(seen: Evidence) -> Outcome:
    name = seen.stopping or "SIGTERM"
    left = [rank for rank in range(seen.world_size) if rank not in seen.marks]
    how = "every rank left its loop by itself" if not left else f"ended before they left their loop: {_ranks(left)}"
    return Outcome("stopped", f"stopped by {name}; {how}", stop_code(name))


def _hang(seen: Evidence, hang: Hang) -> Outcome:
    """Waiting for one another, all ranks are equally quiet: only where one stands tells it from those that wait for it."""
    text = f"no progress for {hang.quiet:.0f} s"
    nodes = hang.silent or tuple(dict.fromkeys(node for _, node, *_ in hang.behind))
    if hang.silent:
        text += f"; nothing was heard yet of any rank on {', '.join(hang.silent)}"
    elif hang.behind:
        where = ", ".join(f"rank {rank} on {node}" for rank, node, *_ in hang.behind[:3])
        more = f" and {len(hang.behind) - 3} more" if len(hang.behind) > 3 else ""
        text += f"; the others wait for {where}{more}"
    details = [
        f"rank {rank} on {node} is at step {step}, in {phase or 'no known phase'}, since {age:.0f} s"
        for rank, node, step, phase, age in (hang.behind or hang.all)[:_PLACES_SHOWN]
    ] or ["no rank has shown any progress: it hangs before the first step, or prints nothing and has no guard"]
    if hang.all and not nodes:
        details.insert(0, "all ranks stand at the same place: suspect the network, or what they all wait for")
    details.append("where each stands is at the end of its stderr log; --hang-timeout sets how long is waited")
    return Outcome("hang", text, HUNG, tuple(details), nodes=nodes)


def _node_lost(seen: Evidence) -> Outcome:
    text = "; ".join(f"{node} is lost: {why}" for node, why in sorted(seen.lost.items()))
    return Outcome("node_lost", text, LOST, nodes=tuple(sorted(seen.lost)))


def _failed(seen: Evidence, first: Failure) -> Outcome:
    others = sorted({one.rank for one in seen.failures} - {first.rank})
    details = [*first.tail] or ["(it printed nothing to stderr)"]
    details = [f"    {line}" for line in details]
    if first.log:
        details = [f"the end of {first.log}:", *details]
    if others:
        details.append(f"failed after it: {_ranks(others)}")
    left = sorted(rank for rank, mark in seen.marks.items() if mark == "finished")
    early = f"{_ranks(left)} left the job early, with exit code 0; then " if left and first.is_lost else ""
    headline = f"{early}the guard failed, which says nothing about the numbers: {first.headline()}"
    if first.type in _TELLING:
        return Outcome("guard_failure", headline, GUARD, tuple(details), nodes=(first.node,))
    code = _code_of_job(first, seen.trained)
    if code != exit_code_of(first.exit_code):
        details.append(
            f"the command ends with {code}, because {exit_code_of(first.exit_code)} has a meaning of its own here"
        )
    return Outcome("failed", early + first.headline(), code, tuple(details), nodes=(first.node,))


def _code_of_job(first: Failure, trained: bool) -> int:
    """The job's own exit code, unless a scheduler would take it for one of ours.

    What bitwitness refuses before the first step ends with 2, as everything does that was never started.
    """
    code = exit_code_of(first.exit_code)
    if first.exit_code is None or first.exit_code < 0 or code not in _OURS:
        return code
    family = getattr(errors, first.type, None)
    refused = isinstance(family, type) and issubclass(family, errors.BitwitnessError)
    return REFUSED if refused and code == REFUSED and not trained else 1


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks as text, cut where nobody would read on."""
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


# What follows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blame:
    """What is written into the quarantine.

    Attributes:
        strikes: devices that get a strike, one for each incident that names them as transient or unknown.
        devices, nodes: who is denied, and why.
        exclude: the nodes that do not train on.
        remark: what the strikes taken together look like, or "".
        doubt: why nobody is denied although somebody is named, or "".
    """

    strikes: tuple[tuple[Hit, Named], ...] = ()
    devices: Mapping[str, tuple[Hit, Named, str]] = field(default_factory=dict)
    nodes: Mapping[str, tuple[Hit, str]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    remark: str = ""
    doubt: str = ""


def blame(hits: Sequence[Hit], strikes: Mapping[str, int], settings: Settings, before: Sequence[Named] = ()) -> Blame:
    """Who is denied, and who gets a strike.

    Args:
        hits: the incidents of a generation.
        strikes: by device, how many it already has within the window.
        settings: how many are too many.
        before: whom earlier incidents of this run have named as persistent.
    """
    named = [(hit, one) for hit in hits if hit.verdict.status == "attributed" for one in hit.named]
    devices: dict[str, tuple[Hit, Named, str]] = {}
    struck = [(hit, one) for hit, one in named if one.persistence != "persistent"]
    for hit, one in named:
        if one.persistence == "persistent":
            devices.setdefault(one.device, (hit, one, "persistent corruption"))
    now = Counter(strikes)
    for hit, one in struck:
        now[one.device] += 1
        if now[one.device] >= settings.strikes:
            window = settings.strike_window / 86_400
            devices.setdefault(one.device, (hit, one, f"{now[one.device]} strikes within {window:g} days"))
    doubt = _stays_with_the_rank([one for _, one, _ in devices.values()], before)
    if doubt:
        return Blame(doubt=doubt)
    nodes: dict[str, tuple[Hit, str]] = {}
    for node in dict.fromkeys(one.node for _, one, _ in devices.values()):
        of_node = [(hit, one.device) for hit, one, _ in devices.values() if one.node == node]
        if len(of_node) > 1:
            nodes[node] = (of_node[0][0], f"{len(of_node)} of its devices are denied")
    exclude = tuple(dict.fromkeys(one.node for _, one, _ in devices.values()))
    return Blame(tuple(struck), devices, nodes, exclude, _scattered(now, struck, devices))


def _stays_with_the_rank(denied: Sequence[Named], before: Sequence[Named]) -> str:
    """What moves from device to device with the number of a rank is software: it is no device's fault.

    A loss or a model that treats one rank apart, or two nodes that are wrong in the same way and outvote each healthy
    third, would otherwise put one healthy node after another into quarantine.
    """
    for one in denied:
        other = next((known for known in before if known.rank == one.rank and known.device != one.device), None)
        if other is not None:
            return (
                f"rank {one.rank} was named before, on {other.node} ({other.device}), and now on {one.node} ({one.device}): what "
                "stays with the number of a rank is software, or nodes that are wrong alike, and no proof against this device. "
                f"Nobody more is put in quarantine; the earlier naming of {other.device} is in doubt as well. Look for what the "
                "program does with this rank; if it is this device after all: bitwitness quarantine add"
            )
    return ""


def _scattered(now: Mapping[str, int], struck: Sequence[object], denied: Mapping[str, object]) -> str:
    if not struck or denied or len(now) < 3 or max(now.values()) > 1:
        return ""
    return f"{len(now)} devices have a strike and none has two: this looks like software (a race, a bad batch) more than hardware"


@dataclass(frozen=True, slots=True)
class Past:
    """What this supervised run has been through: restarts after corruption, after other failures, after unattributed
    corruption, after a port that was taken.
    """

    recoveries: int = 0
    restarts: int = 0
    unattributed: int = 0
    ports: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """What to do next.

    Attributes:
        kind: start another generation, or end.
        exit_code: of the end; of a restart: what to end with if too few nodes are left for it.
        reason: why, for people.
        past: what this run will have been through.
        suspicion: audit every step.
        exclude: nodes that do not take part.
    """

    kind: Literal["restart", "stop"]
    exit_code: int
    reason: str
    past: Past
    suspicion: bool = False
    exclude: tuple[str, ...] = ()


def decide(outcome: Outcome, past: Past, blamed: Blame, settings: Settings, stopping: str = "") -> Action:
    """What follows from how a generation ended. `stopping`: the job was asked to end, so nothing is started again."""
    action = _decide(outcome, past, blamed, settings)
    if stopping and action.kind == "restart":
        return Action("stop", stop_code(stopping), f"stopped by {stopping}", past)
    return action


def _decide(outcome: Outcome, past: Past, blamed: Blame, settings: Settings) -> Action:
    if outcome.kind in ("finished", "stopped"):
        return Action("stop", outcome.exit_code, outcome.headline, past)
    if outcome.kind == "corruption":
        return _after_corruption(outcome, past, blamed, settings)
    if outcome.kind == "port_taken":
        if past.ports >= PORT_RETRIES:
            return Action("stop", 1, f"{outcome.headline}, {PORT_RETRIES + 1} times in a row", past)
        return Action(
            "restart", 1, "another port", Past(past.recoveries, past.restarts, past.unattributed, past.ports + 1)
        )
    if past.restarts >= settings.max_restarts:
        used = f"--max-restarts {settings.max_restarts}" + (" used up" if settings.max_restarts else "")
        return Action("stop", outcome.exit_code, f"no restart is left ({used})", past)
    after = Past(past.recoveries, past.restarts + 1, past.unattributed)
    reason = f"restart {after.restarts} of {settings.max_restarts} after: {outcome.headline}"
    return Action("restart", outcome.exit_code, reason, after)


def _after_corruption(outcome: Outcome, past: Past, blamed: Blame, settings: Settings) -> Action:
    if blamed.doubt:
        return Action("stop", UNATTRIBUTED, blamed.doubt, past)
    unattributed = outcome.exit_code == UNATTRIBUTED
    if unattributed and past.unattributed:
        reason = "unattributed again, with every step audited: a person must look"
        return Action("stop", UNATTRIBUTED, reason, past)
    if past.recoveries >= settings.max_recoveries:
        reason = f"corruption again after {past.recoveries} recoveries (--max-recoveries {settings.max_recoveries})"
        return Action("stop", outcome.exit_code, reason, past)
    after = Past(past.recoveries + 1, past.restarts, past.unattributed + unattributed)
    if unattributed:
        reason = "nobody could be named: once more on the same nodes, with every step audited"
    elif blamed.exclude:
        reason = f"without {', '.join(blamed.exclude)}"
    else:
        reason = "a strike, no proof of broken hardware: on the same nodes"
    return Action("restart", outcome.exit_code, reason, after, unattributed, blamed.exclude)


# Who trains ---------------------------------------------------------------------------------------------------------

Status = Literal["ready", "gone", "pending"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who trains, in the order of node ranks, if enough can; else how many are short, and who may still come."""

    nodes: tuple[str, ...] = ()
    short: int = 0
    pending: tuple[str, ...] = ()


def arrange(
    wanted: Sequence[str | None], status: Callable[[str], Status], spares: Sequence[str], hurry: bool = False
) -> Arrangement:
    """Who trains: everybody stays in its place, and a spare takes the place of one that is gone, so that ranks stay.

    Args:
        wanted: who should be in each place; None where nobody has been seen yet.
        status: of a node.
        spares: nodes that are ready and in no place, in the order in which they are taken.
        hurry: do not wait for those that are pending: a spare takes their place.
    """
    states = ["pending" if node is None else status(node) for node in wanted]
    states = ["gone" if hurry and state == "pending" else state for state in states]
    pending = tuple(node or "?" for node, state in zip(wanted, states, strict=True) if state == "pending")
    short = max(0, states.count("gone") - len(spares))
    if pending or short:
        return Arrangement((), short, pending)
    left = iter(spares)
    nodes = [node if state == "ready" else next(left) for node, state in zip(wanted, states, strict=True)]
    return Arrangement(tuple(node for node in nodes if node is not None))
