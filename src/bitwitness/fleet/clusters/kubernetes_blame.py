"""Whether a node is still the machine that was blamed, and whether a person has answered for it since: pure.

A name of a node is no machine: one that is made anew gets the name of the one before. And a controller has only its own state, while a person's
answer must count for every controller that comes after. So both are told by the node itself: by when it was made, and by
what stands on it of the last return.
"""

from __future__ import annotations

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import Act, NodeState
from bitwitness.fleet.clusters.kubernetes_words import (
    BY_HAND,
    CLEARED,
    SUSPECT,
    Clearance,
    clearance_of,
    moment,
    suspicion_of,
)


def check_blame(act: Act, state: NodeState) -> None:
    """Whether an incident can be of the machine that a node in service is now. One without a time in its id is, and one of a device that came back.

    Times within one second may have come in either order, and then it cannot.

    Raises:
        ConfigurationError: the node was made after the incident, or a person has returned it since.
    """
    found = act.blamed
    if found is None:
        return
    created, cleared = moment(state.more.get("created")), cleared_of(state)
    if created is not None and created >= found:
        raise ConfigurationError(
            f"the Node {act.node} was made at {state.more.get('created')}, after the incident {act.incident}: whether it is the machine "
            "that was blamed cannot be told, and nothing is done to it. If it is, cordon it by hand"
        )
    returned = moment(cleared.time) if cleared is not None else None
    if cleared is not None and returned is not None and returned >= found:
        raise ConfigurationError(
            f"a person has returned {act.node} to service at {cleared.time}, after the incident {act.incident}: it is left alone (its "
            f"annotation {CLEARED} says so)"
        )


def check_uncordoned(act: Act, state: NodeState) -> None:
    """The same of a node in service that a person has uncordoned, where what had taken it out still stands on it.

    Raises:
        ConfigurationError: it was taken out for this incident, or after it, and was returned.
    """
    old = suspicion_of(state.more.get("annotation"))
    if old is None or act.back:  # a job has shown that the device is still in it, which the person may not have known
        return
    if old.incident == incident_of(act):
        raise ConfigurationError(
            f"{act.node} was taken out for incident {old.incident}, and a person has returned it to service: it is left alone"
        )
    found, taken = act.blamed, moment(old.time)
    if found is not None and taken is not None and taken >= found:
        raise ConfigurationError(
            f"{act.node} was taken out at {old.time} for incident {old.incident}, after the incident {act.incident}, and a person has "
            f"returned it to service: it is left alone (its annotation {SUSPECT} says so)"
        )


def is_same_machine(before: NodeState, now: NodeState) -> bool:
    """Whether a name still means what it meant; where one of them does not say, it does.

    A Node that was made anew may be the same machine, whose kubelet has registered it again: if that has not booted since, it is.
    """
    if before.booted and before.booted == now.booted:
        return True
    pairs = ((before.instance, now.instance), (before.more.get("uid"), now.more.get("uid")))
    return all(not old or not new or old == new for old, new in pairs)


def cleared_of(state: NodeState) -> Clearance | None:
    """The last return by a person that stands on a node; None where there was none."""
    return clearance_of(state.more.get("cleared"))


def incident_of(act: Act) -> str:
    """What stands on the node for the incident."""
    return act.incident or BY_HAND
