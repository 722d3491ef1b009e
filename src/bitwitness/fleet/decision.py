"""From an incident, what the hardware says of itself and what happened before, to one proposal a node.

Pure, and apart from everything that acts: whoever owns the nodes must be able to read here, and to test in a table, when one of
them is touched. The rules come before any signal: nobody is proposed for an act whom the verdict does not name, and signals
only change *what* is proposed and how sure it is, never *who*.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal, get_args

from bitwitness.evidence import Kind, Persistence, Verdict
from bitwitness.fleet.clusters.base import ActKind
from bitwitness.fleet.identity import slices_of
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.merging import same_host
from bitwitness.fleet.signals.reading import parent_of
from bitwitness.fleet.signals.record import WEIGHTS, Signal, Weight, within
from bitwitness.runfiles import Incident

Action = Literal["none", "watch", "re-test", "reset", "reboot", "replace", "drain", "contact"]
"""What is proposed.

    none      nothing happened
    watch     leave the node in service, and count the strike
    re-test   leave it in service, and test it when it is next idle
    reset     take it out; its device needs a reset before anybody gets it back
    reboot    take it out; it needs a reboot before anybody gets it back
    replace   take it out; its device or the whole node should be exchanged
    drain     take it out, and diagnose it
    contact   a person must look; no node is touched
"""

Confidence = Literal["low", "medium", "high"]

_LEAVES: dict[Action, ActKind | None] = {
    "none": None,
    "watch": None,
    "re-test": None,
    "contact": None,
    "reset": "drain",  # no cluster resets a device: it takes the node out, and a person does
    "reboot": "reboot",
    "replace": "replace",
    "drain": "drain",
}
_LOGS = ("kernel", "edac", "mce")
_ASKED = re.compile(r"the driver asks (?:for|to):? ([^;:]*)")
"""How readers of signals tell what recovery action a driver wants."""

_OF_SHADOW = (
    'the job runs in shadow mode (on_detection="record") and was not stopped: it may be training on wrong numbers. A person must decide '
    "what becomes of it"
)


@dataclass(frozen=True, slots=True)
class Naming:
    """One incident that named one device.

    Attributes:
        time: of the incident, UTC in ISO 8601.
        incident: its id.
        run: which run it was in; a rank has a meaning only there.
        rank, device, node: who was named.
        persistence: whether the rank was wrong again when it repeated its work.
        shadow: whether the job was in shadow mode.
    """

    time: str
    incident: str
    run: str
    rank: int
    device: str
    node: str
    persistence: Persistence
    shadow: bool = False

    @property
    def moment(self) -> datetime:
        """The time as a datetime."""
        return datetime.fromisoformat(self.time)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is proposed about one node because of one incident.

    Attributes:
        incident: its id.
        node: its name; empty where nobody is to be acted upon.
        devices: of that node, those that are named.
        action: what is proposed.
        act: what the cluster is asked for; None: nothing.
        confidence: that this is right.
        reason: why, in a sentence or two.
        signals: what the hardware said that bears on it.
    """

    incident: str
    node: str
    devices: tuple[str, ...]
    action: Action
    act: ActKind | None
    confidence: Confidence
    reason: str
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        if self.action not in get_args(Action) or self.confidence not in get_args(Confidence):
            raise ValueError(f"no such proposal: {self.action!r} with {self.confidence!r} confidence")
        if self.act is not None and not self.node:
            raise ValueError("an act needs a node")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        return {
            **asdict(self),
            "devices": list(self.devices),
            "signals": [one.to_json(details=True) for one in self.signals],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Proposal:
        """The inverse of `to_json`; unknown keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it is not one of these.
        """
        names = ("incident", "node", "action", "act", "confidence", "reason")
        signals = tuple(Signal.from_json(one) for one in record["signals"])
        return cls(**{name: record[name] for name in names}, devices=tuple(record["devices"]), signals=signals)


def namings_of(incident: Incident, run: str) -> list[Naming]:
    """Whom an incident names, one record a rank; empty unless it is attributed."""
    verdict, where = incident.verdict, incident.topology
    if verdict.status != "attributed":
        return []
    time, shadow = _time_of(incident), _is_shadow(incident)
    return [
        Naming(time, incident.path.name, run, rank, where.device_of(rank), where.node_of(rank), how, shadow)
        for rank, how in zip(verdict.ranks, _persistences(verdict), strict=True)
    ]


def propose(
    incident: Incident, run: str, signals: Sequence[Signal], history: Sequence[Naming], policy: FleetPolicy
) -> tuple[Proposal, ...]:
    """What to do about an incident: one proposal for each node that it names, else one for nobody.

    Args:
        incident: as it was read.
        run: which run it is of.
        signals: what the hardware said; those outside of the policy's window do not count.
        history: whom incidents named, in any run; this incident may be among them.
        policy: the thresholds.
    """
    verdict = incident.verdict
    if verdict.status == "clean":
        return (_nobody(incident, "none", "the verdict is clean"),)
    if verdict.status == "unattributed":
        return (_nobody(incident, "contact", _why_nobody(verdict)),)
    mine = namings_of(incident, run)
    at = mine[0].moment
    # What tells which device is where is of no time: a slice and its parent are one piece of silicon whenever somebody looked.
    sitting = [one for one in signals if one.code == IDENTITY]
    heard = [*sitting, *within(_without(signals), at, policy.signals_before, policy.signals_after)]
    before = [one for one in history if one.incident != incident.path.name]
    if policy.shadow != "act":
        before = [one for one in before if not one.shadow]
    return tuple(
        _about(verdict, [one for one in mine if one.node == node], heard, before, policy)
        for node in dict.fromkeys(one.node for one in mine)
    )


# Nobody -------------------------------------------------------------------------------------------------------------


def _nobody(incident: Incident, action: Action, reason: str) -> Proposal:
    return Proposal(incident.path.name, "", (), action, None, "low", reason)


def _why_nobody(verdict: Verdict) -> str:
    if verdict.kind == "software":
        return (
            "nobody is named, and it looks like software or data, not like a device: the owner of the job should look"
        )
    links = " Look at the network between the candidates." if verdict.kind == "collective" else ""
    return f"corruption that is attributed to nobody: no node is touched, a person must look.{links}"


# One node -----------------------------------------------------------------------------------------------------------


def _about(
    verdict: Verdict, named: Sequence[Naming], heard: Sequence[Signal], before: Sequence[Naming], policy: FleetPolicy
) -> Proposal:
    """What to do about one node, of which `named` are the ranks that the incident names."""
    first = named[0]
    devices = tuple(dict.fromkeys(one.device for one in named))
    proposal = Proposal(first.incident, first.node, devices, "watch", None, "low", "")
    bearing = _bearing(verdict.kind, first.node, devices, heard)
    if first.shadow and policy.shadow != "act":
        return replace(proposal, action="contact", reason=_OF_SHADOW, signals=bearing)
    case, firm = _case(verdict, named, before, policy)
    if not case:
        return _left_in_service(proposal, verdict, named, before, bearing, policy)
    doubt = _doubt(named, before)
    if doubt:
        return replace(proposal, action="contact", reason=doubt, signals=bearing)
    action, why = _remedy(bearing)
    supported = any(one.kind == "memory" and one.weight in ("strong", "medium") for one in bearing)
    doubtful = verdict.kind in ("collective", "numeric", "memory") and any(one.kind == "link" for one in bearing)
    level = int(firm) + int(supported) - int(doubtful)
    confidence: Confidence = ("low", "medium", "high")[max(0, min(2, level))]
    return replace(
        proposal,
        action=action,
        act=_allowed(action, policy),
        confidence=confidence,
        reason=f"{case}. {why}{_about_links(doubtful)}",
        signals=bearing,
    )


def _case(verdict: Verdict, named: Sequence[Naming], before: Sequence[Naming], policy: FleetPolicy) -> tuple[str, bool]:
    """Why the node is to be taken out, and whether that was seen in this very incident; "" where it is not to be."""
    lasting = [one for one in named if one.persistence == "persistent"]
    if lasting and verdict.kind != "collective":
        what = _and(dict.fromkeys(f"{one.device} (rank {one.rank})" for one in lasting))
        where = " The batch was wrong, so look at storage and host memory first." if verdict.kind == "input" else ""
        return f"{what} gave wrong results again when the work was repeated{where}", True
    for one in named:
        strikes = _strikes(one, before, policy)
        if strikes >= policy.strikes:
            days = policy.strike_window.total_seconds() / 86_400
            return f"{strikes} incidents named {one.device} within {days:g} days", False
    return "", False


def _strikes(one: Naming, before: Sequence[Naming], policy: FleetPolicy) -> int:
    """How many incidents named this device in the window that ends with this one; one that a clock dates later counts too."""
    earliest = one.moment - policy.strike_window
    return 1 + len({other.incident for other in before if other.device == one.device and other.moment >= earliest})


def _doubt(named: Sequence[Naming], before: Sequence[Naming]) -> str:
    """Why nobody is acted upon although somebody is named and would be, or ""."""
    for one in named:
        other = next((known for known in before if _same_rank_elsewhere(one, known)), None)
        if other is not None:
            return (
                f"rank {one.rank} of this run was named before, on {other.node} ({other.device}), and now on {one.node} "
                f"({one.device}): what stays with the number of a rank is software, or nodes that are wrong alike, and no proof "
                "against either device"
            )
    return ""


def _same_rank_elsewhere(one: Naming, known: Naming) -> bool:
    same = (known.run, known.rank) == (one.run, one.rank)
    return same and known.device != one.device and known.persistence == "persistent"


def _left_in_service(
    proposal: Proposal,
    verdict: Verdict,
    named: Sequence[Naming],
    before: Sequence[Naming],
    bearing: tuple[Signal, ...],
    policy: FleetPolicy,
) -> Proposal:
    """What is proposed where nothing lasting was seen."""
    struck = Counter(
        other.device
        for other in {(one.incident, one.device): one for one in (*before, *named)}.values()
        if other.moment >= named[0].moment - policy.strike_window
    )
    count = max(struck[one.device] for one in named)
    tally = f"{count} of {policy.strikes} strikes"
    if verdict.kind == "collective":
        reason = f"what came out of the all-reduce was wrong there alone: test the link into the device before the device ({tally})"
        return replace(proposal, action="re-test", reason=reason, signals=bearing)
    if len(struck) >= 3 and max(struck.values()) == 1:
        reason = f"{len(struck)} devices have a strike and none has two: this looks like software (a race, a bad batch) more than hardware"
        return replace(proposal, action="contact", reason=reason, signals=bearing)
    right = "was right when it repeated its work" if named[0].persistence == "transient" else "was wrong once"
    if any(one.kind == "memory" and one.weight == "strong" for one in bearing):
        reason = f"{_and(proposal.devices)} {right} ({tally}), but its memory has reported errors: test it before the next long job"
        return replace(proposal, action="re-test", confidence="medium", reason=reason, signals=bearing)
    reason = f"{_and(proposal.devices)} {right}: a strike, no proof of broken hardware ({tally})"
    return replace(proposal, reason=reason, signals=bearing)


# Signals ------------------------------------------------------------------------------------------------------------


def _bearing(kind: Kind | None, node: str, devices: Sequence[str], heard: Sequence[Signal]) -> tuple[Signal, ...]:
    """The signals about these devices or their node, the weightiest first.

    One about another device of the node is left out. One that names no device, or names it by an address that nobody has tied
    to a device, may be about the suspect, so it counts as weak; so does host memory where what was wrong is an accelerator's
    arithmetic, and not its input; and so does a line of a log that does not say when it was, which may be years old.
    """
    accelerated = any(_is_accelerator(device) for device in devices)
    mine = [one for one in heard if not one.host or same_host(one.host, node)]
    about = {*devices, *_parents(devices, mine)}
    found = []
    for one in _without(mine):
        told = one.device in about
        if told or (one.host and not _is_accelerator(one.device)):
            aside = not told and accelerated and (_is_of_accelerator(one) or kind != "input")
            undated = one.time is None and one.source in _LOGS
            weight: Weight = "weak" if (aside or undated) and one.weight != "none" else one.weight
            found.append(replace(one, weight=weight))
    return tuple(sorted(found, key=lambda one: (WEIGHTS[one.weight], one.code, one.time or "")))


def _parents(devices: Sequence[str], heard: Sequence[Signal]) -> set[str]:
    """The devices that these are slices of: a fault is in the silicon, which all slices share, and is told of the parent."""
    named = {parent for device in devices if (parent := parent_of(device))}
    told = {
        one.device for one in heard if one.code == IDENTITY and not set(slices_of(one.evidence)).isdisjoint(devices)
    }
    return named | told


def _without(signals: Sequence[Signal]) -> list[Signal]:
    """All but those that only tell which device is where: these bear on nothing."""
    return [one for one in signals if one.code != IDENTITY]


def _is_accelerator(device: str) -> bool:
    return device.startswith(("GPU-", "MIG-"))


def _is_of_accelerator(one: Signal) -> bool:
    return one.source not in ("edac", "rasdaemon", "mce")


def _remedy(bearing: Sequence[Signal]) -> tuple[Action, str]:
    """What the node needs, by what its hardware said, and why."""
    memory = [one for one in bearing if one.kind == "memory"]
    strong = [one for one in memory if one.weight == "strong"]
    if strong:
        return "replace", f"Its hardware says so too: {_codes(strong)}, {strong[0].reason}"
    wishes: tuple[Action, ...] = ("reboot", "reset")
    for wish in wishes:
        asked = [one for one in bearing if _asks_for(one, wish)]
        if asked:
            return wish, f"The driver asks for a {wish}: {_codes(asked)}, {asked[0].reason}"
    if memory:
        return "drain", f"Its memory has reported something: {_codes(memory)}, {memory[0].reason}"
    if any(one.kind != "no-evidence" for one in bearing):
        return "drain", f"What the hardware reported does not explain it: {_codes(bearing)}"
    return "drain", "No hardware signal was found, which is no sign of health: silent corruption is silent"


def _asks_for(one: Signal, word: str) -> bool:
    """Whether the driver's own recovery action, or a pending remapping of rows, asks for this."""
    if one.code in ("xid:154", "dcgm:1523", "nvml:recovery-action"):
        asked = _ASKED.search(one.reason)
        return asked is not None and word in asked[1].lower()
    return word == "reset" and one.code in ("xid:63", "dcgm:396", "nvml:row-remap-pending")


def _codes(signals: Sequence[Signal]) -> str:
    return ", ".join(dict.fromkeys(one.code for one in signals if one.kind != "no-evidence"))


def _about_links(doubtful: bool) -> str:
    return (
        ". A link reported errors as well, which can explain it too: look at it before the device" if doubtful else ""
    )


def _allowed(action: Action, policy: FleetPolicy) -> ActKind | None:
    """What the cluster is asked for: what the policy does not allow becomes the mildest act that protects the next job."""
    act = _LEAVES[action]
    return act if act is None or act in policy.may else "drain"


# Shared -------------------------------------------------------------------------------------------------------------


def _persistences(verdict: Verdict) -> tuple[Persistence, ...]:
    each = verdict.persistences
    return each if len(each) == len(verdict.ranks) else (verdict.persistence,) * len(verdict.ranks)


def _time_of(incident: Incident) -> str:
    """When: as the record says; of one that does not say, as its name does."""
    try:
        said = datetime.fromisoformat(str(incident.record.get("time", "")))
    except ValueError:
        said = None
    if said is None or said.tzinfo is None:
        said = datetime.strptime(incident.path.name.partition("-")[0], "%Y%m%dT%H%M%S%z")
    return said.isoformat()


def _is_shadow(incident: Incident) -> bool:
    policy = incident.record.get("policy")
    return isinstance(policy, Mapping) and policy.get("on_detection") == "record"


def _and(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(names)
