"""What a node's agent tells NVSentinel, and when: pure decisions, from what the Node shows and what was told before.

NVSentinel takes what is said of a node from that node alone, and a controller reaches it through the Node object, which outlives
both. So the agent compares two things: the annotation that says why its node is suspect, and what NVSentinel has taken last. It
speaks on transitions only, and where it does not know it says nothing: silence returns no node, and no data is never health.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from bitwitness.fleet.clusters.nvsentinel_events import Quarantine, Strategy, Suspicion

AGAIN = timedelta(minutes=5)
"""After which NVSentinel is told once more of a recovery, while it still holds the node because of us."""


@dataclass(frozen=True, slots=True)
class Seen:
    """This node, as the API server shows it.

    Attributes:
        uid: of the Node object; another one is another object, whatever its name.
        suspicion: why it is suspect; None: nobody says so.
        asked: when the controller asked, in its own words.
        execute: whether it asks that NVSentinel acts.
        was_released: whether NVSentinel's mark of a release by hand was there already when it asked.
        quarantine: what NVSentinel shows.
        unreadable: why the annotation cannot be read; "" where it can, or is absent.
        managed: whether NVSentinel may act on the node.
    """

    uid: str
    suspicion: Suspicion | None = None
    asked: str = ""
    execute: bool = False
    was_released: bool = False
    quarantine: Quarantine = field(default_factory=Quarantine)
    unreadable: str = ""
    managed: bool = True


@dataclass(frozen=True, slots=True)
class Said:
    """What NVSentinel has taken last.

    Attributes:
        healthy: whether that was a recovery.
        incident, devices: which fault.
        strategy: whether NVSentinel was to act.
        asked: of the request that asked it to act; a request that is made anew is told anew.
        uid: of the Node object of which it was told.
        at: when.
    """

    healthy: bool
    incident: str
    devices: tuple[str, ...]
    strategy: Strategy
    asked: str
    uid: str
    at: datetime

    def is_about(self, suspicion: Suspicion) -> bool:
        """Whether it is a fault with this incident and these devices."""
        return not self.healthy and (self.incident, self.devices) == (suspicion.incident, suspicion.devices)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the agent remembers.

    Attributes:
        said: what NVSentinel has taken last; None: nothing yet.
        lost: whether there is no memory: it may have been told anything.
    """

    said: Said | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done now.

    Attributes:
        tell: a fault or a recovery; "": nothing.
        strategy: with which it is told.
        trouble: what a person should know for as long as it is so; "" where nothing.
        forget: whether what was said before is void.
        adopt: whether NVSentinel shows that it was told already, by an agent whose memory is lost.
    """

    tell: Literal["fault", "recovery", ""] = ""
    strategy: Strategy = "STORE_ONLY"
    trouble: str = ""
    forget: bool = False
    adopt: bool = False


def step(seen: Seen, memory: Memory, allowed: Strategy, now: datetime) -> Step:
    """What to do about this node.

    Args:
        seen: the node now.
        memory: what was told before.
        allowed: the most that this agent may ask of NVSentinel.
        now: the time.
    """
    if seen.unreadable:
        return Step(trouble=f"the annotation cannot be read ({seen.unreadable}): NVSentinel is told nothing")
    if seen.suspicion is not None:
        return _suspect(seen, seen.suspicion, memory, allowed)
    said = memory.said
    if said is None or said.healthy:
        return _held_for_nothing(seen, said, allowed, now)
    return _answered(seen, said, allowed)


def _suspect(seen: Seen, suspicion: Suspicion, memory: Memory, allowed: Strategy) -> Step:
    acts = seen.execute and allowed == "EXECUTE_REMEDIATION"
    trouble = ""
    if seen.execute and not acts:
        trouble = (
            "the controller asks NVSentinel to take this node out, and this agent may only have it stored: NVSentinel does nothing. "
            "Start the agent with --strategy EXECUTE_REMEDIATION, or have the controller cordon (strategy STORE_ONLY)"
        )
    elif acts and not seen.managed:
        trouble = "the node is labelled as not managed by NVSentinel, which only stores what it is told of it"
    said, held = memory.said, seen.quarantine
    if acts and held.released_by_hand and not seen.was_released:
        # NVSentinel had it, so whoever forgot that it was told knows it again.
        return Step(strategy="EXECUTE_REMEDIATION", trouble=_returned_by_hand(suspicion.incident), adopt=True)
    if said is not None and said.is_about(suspicion) and said.uid == seen.uid:
        if not acts:  # what was said more strongly stays
            return Step(trouble=trouble)
        if said.strategy == "EXECUTE_REMEDIATION" and said.asked == seen.asked:
            return Step(trouble=trouble)
    if not acts:
        return Step("fault", trouble=trouble)
    if memory.lost and held.released_by_hand:  # before the request, or since: nobody can tell
        return Step(trouble=_returned_by_hand(suspicion.incident))
    if memory.lost and held.is_ours and held.incident == suspicion.incident:
        return Step(strategy="EXECUTE_REMEDIATION", trouble=trouble, adopt=True)
    return Step("fault", "EXECUTE_REMEDIATION", trouble)


def _returned_by_hand(incident: str) -> str:
    return (
        f"a person has uncordoned the node after NVSentinel took it out (incident {incident}): it is not asked again. If that is right: "
        "bitwitness fleet clear; if not, cordon it by hand"
    )


def _answered(seen: Seen, said: Said, allowed: Strategy) -> Step:
    """The annotation is gone: a person has answered, unless the whole object is another one."""
    if said.uid != seen.uid:
        text = (
            f"the Node object is another one than that of which incident {said.incident} was told, so nobody has cleared it: NVSentinel "
            "is not told that the node is healthy"
        )
        return Step(trouble=text, forget=not seen.quarantine.is_ours)
    if said.strategy == "STORE_ONLY" and not seen.quarantine.is_ours:
        return Step("recovery", "STORE_ONLY")
    if allowed == "EXECUTE_REMEDIATION":
        return Step("recovery", "EXECUTE_REMEDIATION")
    return Step(trouble=_may_not_release(said.incident)) if seen.quarantine.is_ours else Step("recovery", "STORE_ONLY")


def _held_for_nothing(seen: Seen, said: Said | None, allowed: Strategy, now: datetime) -> Step:
    """Nobody suspects the node. Where NVSentinel holds it because of us all the same, it has lost what it was told, or we have."""
    if not seen.quarantine.is_ours:
        return Step()
    if said is not None and timedelta(0) <= now - said.at < AGAIN:
        return Step()
    if allowed == "EXECUTE_REMEDIATION":
        return Step("recovery", "EXECUTE_REMEDIATION")
    return Step(trouble=_may_not_release(seen.quarantine.incident))


def _may_not_release(incident: str) -> str:
    return (
        f"NVSentinel holds the node because of incident {incident or 'unknown'}, which is answered, and this agent may only have it "
        "stored: start it with --strategy EXECUTE_REMEDIATION, or uncordon the node by hand"
    )


def remembered(seen: Seen, memory: Memory, done: Step, now: datetime) -> Memory:
    """The memory after a step that NVSentinel has taken."""
    if done.forget:
        return Memory()
    if done.tell == "recovery":
        incident = memory.said.incident if memory.said is not None else seen.quarantine.incident
        return Memory(Said(True, incident, (), done.strategy, "", seen.uid, now))
    if (done.tell == "fault" or done.adopt) and seen.suspicion is not None:
        what = seen.suspicion
        return Memory(Said(False, what.incident, what.devices, done.strategy, seen.asked, seen.uid, now))
    if done.trouble:
        return memory
    return Memory(memory.said)
