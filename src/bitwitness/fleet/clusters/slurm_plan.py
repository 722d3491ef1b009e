"""What has to be changed for an act on Slurm, and whether it has been: pure, and the same for scontrol and slurmrestd.

Whatever we put a node out for begins its reason with `bitwitness` and the incident, by which it is known again. HyperPod is
the exception: it acts on `Action:Replace` and `Action:Reboot` only where nothing else stands in the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import TAG, Act, JobState, Landed, NodeState, one_line
from bitwitness.fleet.clusters.slurm_names import job_id, node_name
from bitwitness.fleet.clusters.slurm_states import flags_of

HYPERPOD = {"reboot": "Action:Reboot", "replace": "Action:Replace"}
"""Matched exactly: in another case, or with anything behind it, HyperPod ignores it and says nothing."""

_REASON = 400
_BOOTED = timedelta(seconds=60)
"""Two times of boot further apart are two boots; Slurm computes them anew from the uptime, give or take seconds."""


@dataclass(frozen=True, slots=True)
class Change:
    """A new state of a node; where `reboot`, the one that it has after it was booted, once it has no job."""

    node: str
    state: Literal["DRAIN", "UNDRAIN", "FAIL", "RESUME", "DOWN"]
    reason: str = ""
    reboot: bool = False


def change(act: Act, state: NodeState, *, hyperpod: bool) -> Change | None:
    """What has to be changed; None where the act has landed already.

    Raises:
        ConfigurationError: the act is none of this cluster's, there is no such node, or it is not ours to bring back.
    """
    node = node_name(act.node)
    if state.node != node:
        raise ConfigurationError(f"the state of {state.node!r:.80} was given for an act on {node}")
    if state.service == "absent":
        raise ConfigurationError(f"the cluster has no node {node}: nothing is done")
    flags = flags_of(state.raw)
    reason = one_line(f"{act.tag}: {act.reason}" if act.incident else f"{act.tag} {act.reason}", _REASON)
    match act.kind:
        case "drain":
            return None if flags & {"DRAIN", "FAIL"} else Change(node, "DRAIN", reason)
        case "clear":
            return _clear(node, state, flags, hyperpod=hyperpod)
        case "reboot" if not hyperpod:
            wanted = flags & {"REBOOT_REQUESTED", "REBOOT_ISSUED"}
            return None if wanted and _tagged(act, state) else Change(node, "DOWN", reason, reboot=True)
        case "reboot" | "replace" if hyperpod:
            done = "FAIL" in flags and state.reason == HYPERPOD[act.kind]
            return None if done else Change(node, "FAIL", HYPERPOD[act.kind])
        case _:
            raise ConfigurationError(f"Slurm by itself cannot {act.kind} a node (only HyperPod can: hyperpod = true)")


def _clear(node: str, state: NodeState, flags: frozenset[str], *, hyperpod: bool) -> Change | None:
    """Undrain takes back a drain and nothing else: a node that is down as well stays down.

    One that is down because we had it rebooted has nothing else to wait for.
    """
    rebooted = "DOWN" in flags and state.service == "out" and state.ours
    if not flags & {"DRAIN", "FAIL"} and not rebooted:
        return None
    if not state.ours and not (hyperpod and state.reason in HYPERPOD.values()):
        by = state.reason_by or "somebody"
        raise ConfigurationError(f"{node} was taken out by {by} ({state.reason or 'no reason'!r:.200}), not by {TAG}")
    return Change(node, "UNDRAIN" if flags & {"DRAIN", "FAIL"} else "RESUME")


def landed(act: Act, before: NodeState, now: NodeState, *, hyperpod: bool) -> Landed:
    """Whether an act that was intended at `before` has happened, by what the node shows now.

    A reboot or a replacement counts from when it is asked for, because from then on the node is out. Whether it comes about is
    watched after that (`NodeState.awaits`).
    """
    flags = flags_of(now.raw)
    if now.service == "absent" or (now.service == "unknown" and "DOWN" not in flags):
        return "unknown"
    if act.kind == "drain":
        return "yes" if flags & {"DRAIN", "FAIL"} else "no"  # by whom, the reason says
    if act.kind == "clear":
        if not flags & {"DRAIN", "FAIL"} and not (now.service == "out" and now.ours):
            return "yes"
        return "no" if (now.raw, now.reason) == (before.raw, before.reason) else "unknown"
    if act.kind == "replace" and before.instance and now.instance and before.instance != now.instance:
        return "yes"
    if act.kind == "reboot" and _booted(before, now):
        return "yes"
    if hyperpod:
        asked = "FAIL" in flags and now.reason == HYPERPOD.get(act.kind)
    else:
        asked = bool(flags & {"REBOOT_REQUESTED", "REBOOT_ISSUED"}) and _tagged(act, now)
    if asked:
        return "yes"
    same = (now.raw, now.reason) == (before.raw, before.reason) and not _booted(before, now)
    return "no" if same and before.booted and now.booted else "unknown"


def requeue(job: JobState, exclude: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The words of scontrol that start a job again without these nodes; none where it waits without them already.

    It is held while the nodes are excluded: a job that may start could start on them. One that was requeued and held, and
    whose requeue was then cut short, is carried on with.

    Raises:
        ConfigurationError: it still runs, is not known any more, or is one that Slurm starts no second time.
    """
    name = job_id(job.job)
    if job.state == "running":
        raise ConfigurationError(f"job {job.job} still runs ({job.raw}): nothing is requeued")
    if job.state == "absent":
        raise ConfigurationError(f"Slurm does not know job {job.job} any more (MinJobAge): submit it again")
    if job.state == "ended" and not job.requeueable:
        raise ConfigurationError(
            f"job {name} must not be started again (Requeue=0): submit it again by hand, next time with --requeue"
        )
    names = tuple(dict.fromkeys((*job.excluded, *(node_name(node) for node in exclude))))
    calls: list[tuple[str, ...]] = []
    if job.state == "ended":
        calls.append(("scontrol", "requeuehold", name))
    if set(names) != set(job.excluded):
        calls.append(("scontrol", "update", f"JobId={name}", f"ExcNodeList={','.join(names)}"))
    if job.state == "ended" or "requeued_in_held_state" in job.raw.replace(" ", "_"):
        calls.append(("scontrol", "release", name))
    return tuple(calls)


def _tagged(act: Act, state: NodeState) -> bool:
    return state.reason == act.tag or state.reason.startswith((f"{act.tag}:", f"{act.tag} "))


def _booted(before: NodeState, now: NodeState) -> bool:
    if not before.booted or not now.booted:
        return False
    return datetime.fromisoformat(now.booted) - datetime.fromisoformat(before.booted) > _BOOTED
