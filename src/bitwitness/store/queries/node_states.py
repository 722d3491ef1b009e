"""What a node is called, from what is known of it: pure, because it is what people act upon, and has to be read in a table.

Two rules are above all others. Nobody is `suspected` who was not named: to be involved in an incident that names nobody is no
blame. And nobody is `in service` because nothing is known: only where a run trains on it, or a person has returned it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.store.pages import NodeState
from bitwitness.store.queries.strikes import Held


@dataclass(slots=True)
class Facts:
    """What is known of a node.

    Attributes:
        name: of it.
        devices: how many were seen on it.
        seen: when a rank was last seen on it.
        proposals: those that are not at their end, those that are left to a person, and the one that changed last, newest first.
        returned: when a person last returned it to service, or "".
        held: strikes that count against devices that are in it now.
        left: likewise against devices that were in it when they were named, and were seen elsewhere since.
        involved: unattributed incidents in which it was a candidate.
        denied: runs whose quarantine denies it or a device that is in it now.
        training: runs that train on it now.
    """

    name: str
    devices: int = 0
    seen: str = ""
    proposals: list[Any] = field(default_factory=list)
    returned: str = ""
    held: list[Held] = field(default_factory=list)
    left: list[Held] = field(default_factory=list)
    involved: int = 0
    denied: int = 0
    training: int = 0

    @property
    def strikes(self) -> int:
        """How many incidents name a device that is in it now, and still count."""
        return _many(self.held)


_DEVICES = 3
"""Devices that are told of by name."""
_OUT = ("done", "already out")
_LIVE: dict[str, tuple[NodeState, str]] = {
    "unclear": ("unclear", "It may have been taken out or not, and a person must look"),
    "acting": ("acting", "The cluster was asked for a {act}, and does not show it yet"),
    "failed": ("held", "The cluster refused a {act}, which is tried again"),
    "held": ("held", "A {act} is held"),
    "proposed": ("held", "A {act} is proposed, and not looked at yet"),
}
_URGENCY = ("waits", *_LIVE)


def state_of_node(one: Facts) -> tuple[NodeState, str]:
    """The state of a node, and the same in a sentence; in another one what has left it."""
    state, text = _state(one)
    return state, f"{text} {_left(one.left)}" if one.left else text


def _state(one: Facts) -> tuple[NodeState, str]:
    live = [each for each in one.proposals if _live(each) and each.act]
    if live:
        return _of_live(min(live, key=lambda each: _URGENCY.index(_live(each))))
    newest = one.proposals[0] if one.proposals else None
    if newest is not None and newest.status in _OUT:
        if one.returned < newest.updated:
            return "out", _sentence(f"Taken out of service ({newest.act or newest.action})", newest.reason)
    elif newest is not None and newest.status == "expired" and one.returned < newest.updated:
        return "held", _sentence(
            "It is still in service: it could not be taken out in time, a person must look", newest.why
        )
    left = next((each for each in one.proposals if _is_left(each) and one.returned < each.updated), None)
    if left is not None:
        return "held", _sentence(f"A {left.act} is left to a person", left.why)
    if one.strikes:
        return "suspected", _sentence(_named(one), _so_far(newest, one))
    return _of_nothing(one)


def _is_left(proposal: Any) -> bool:
    """Whether a proposal is not looked at again by the controller, and not answered either: protected, or another's node."""
    return bool(proposal.final and proposal.status == "held" and proposal.act)


def _live(proposal: Any) -> str:
    """How urgent a proposal is, in a word; "" for one at its end."""
    if proposal.waits:
        return "waits"
    return proposal.status if not proposal.final and proposal.status in _LIVE else ""


def _of_live(one: Any) -> tuple[NodeState, str]:
    if one.waits:
        return "waits for approval", _sentence(f"A {one.act} waits for a person's approval", one.reason)
    state, text = _LIVE[one.status]
    return state, _sentence(text.format(act=one.act), one.why)


def _named(one: Facts) -> str:
    """By whom it is named, and what it holds that was named elsewhere."""
    here, brought = ([each for each in one.held if (each.then == one.name) == same] for same in (True, False))
    said = [f"named by {_incidents(_many(here))}"] if here else []
    said += [
        f"holds {each.device}, named by {_incidents(_many([each]))} on {each.then or 'a node that is not on record'}"
        for each in brought[:_DEVICES]
    ]
    more = len(brought) - _DEVICES
    said += (
        [f"holds {more} more device{'s' * (more > 1)} that {'were' if more > 1 else 'was'} named elsewhere"]
        if more > 0
        else []
    )
    text = ", and ".join(said)
    return f"{text[0].upper()}{text[1:]}"  # a word of ours, never a name


def _left(every: Sequence[Held]) -> str:
    """What was named here, and counts against it no more."""
    said = [
        f"{one.device}, which {_incidents(_many([one]))} named here, has left: it was last seen in {one.now}"
        for one in every[:_DEVICES]
    ]
    more = len(every) - _DEVICES
    return "; ".join(said) + (f"; so {'have' if more > 1 else 'has'} {more} more" if more > 0 else "") + "."


def _many(held: Sequence[Held]) -> int:
    return len({incident for one in held for incident in one.incidents})


def _incidents(many: int) -> str:
    return f"{many} incident{'s' * (many != 1)}"


def _so_far(newest: Any, one: Facts) -> str:
    """What is done about a node that was named."""
    if newest is not None and newest.status == "observed":
        return f"the policy only observes, so no {newest.act or newest.action} is asked for"
    if newest is not None and newest.status in ("rejected", "cleared") and newest.why:
        return str(newest.why)
    if newest is not None and newest.status == "nothing":
        return (
            f"proposed is to {newest.action}" if newest.action in ("watch", "re-test") else f"proposed: {newest.action}"
        )
    if one.denied:
        return f"denied by the quarantine of {one.denied} run{'s' * (one.denied != 1)}"
    return "nothing is proposed"


def _of_nothing(one: Facts) -> tuple[NodeState, str]:
    """Nothing is held against it."""
    doubt = ""
    if one.involved:
        which = "incident, which names" if one.involved == 1 else "incidents, which name"
        doubt = f"; it was involved in {one.involved} unattributed {which} nobody"
    if one.denied:
        return "held", _sentence(
            f"No incident that counts names it, and the quarantine of {one.denied} run{'s' * (one.denied != 1)} denies it or a device of it",
            doubt,
        )
    if one.training:
        return "in service", _sentence(
            f"{one.training} run{'s' * (one.training != 1)} train{'s' * (one.training == 1)} on it now", doubt
        )
    if one.returned:
        return "in service", _sentence(f"Returned to service by a person at {one.returned}", doubt)
    return "unknown", _sentence(
        "Nothing is held against it, no run trains on it now, and the fleet has no record of it", doubt
    )


def _sentence(text: str, more: str) -> str:
    rest = more.strip().removesuffix(".")
    between = "" if rest.startswith(";") else ": "
    return f"{text}{between}{rest}." if rest else f"{text}."
