"""What Slurm would say to an act, asked beforehand: who we are to it, and what it is set up to do.

To change a node, Slurm wants its own user, root, or an administrator of its accounting database. An *operator* is not enough
(user_permissions.html of Slurm's documentation). Nothing is tried by doing it: only ping, sinfo, the configuration and
the accounting are read.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable
from dataclasses import replace

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import TAG, Act, Check, JobState, NodeState, one_line
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.clusters.slurm_plan import HYPERPOD

Ask = Callable[..., Answer]
"""Runs a command, given as words."""

_USER = re.compile(r"(?P<name>[^\s()]+)\((?P<uid>\d+)\)")
_SECONDS = re.compile(r"(\d+) sec")
_FORGETS = 60
"""Seconds that an ended job must be known for: a controller looks at it every few of them, unless it was restarted meanwhile."""


def check(ask: Ask, act: Act, *, hyperpod: bool) -> tuple[Check, ...]:
    """Whether Slurm answers, lets us do it, and is set up for it."""
    found = [_ping(ask)]
    if found[0].outcome == "bad":
        return tuple(found)
    found.append(_right(ask, f"right to {act.kind}"))
    if act.kind == "reboot" and not hyperpod:
        found.append(_reboots(ask))
    if act.kind in HYPERPOD and hyperpod:
        text = f"whether HyperPod acts on {HYPERPOD[act.kind]} is seen only when it does: it says nothing to words that it does not know"
        found.append(Check(f"HyperPod does {act.kind}", "unknown", text, "try it once on a node that can be spared"))
    return tuple(found)


def check_job(ask: Ask, job: JobState) -> tuple[Check, ...]:
    """Whether a job would go on without one of its nodes."""
    what = f"go on without the node: {job.job}"
    found = []
    if not job.requeueable:
        text = "Slurm starts it no second time (Requeue=0)"
        found.append(Check(what, "bad", text, "submit it with --requeue, or set JobRequeue=1"))
    elif job.held:
        found.append(
            Check(what, "bad", "a person holds it, and only a person lets it go", f"scontrol release {job.job}")
        )
    else:
        found.append(Check(what, "good", "it may be started again"))
    return (*found, _right(ask, "right to start it again"), _remembers(ask), _spare(ask, job))


def foreseen(act: Act, state: NodeState, *, hyperpod: bool) -> NodeState:
    """A node after an act of ours. Pure."""
    if act.kind == "clear":
        return replace(state, service="in", raw="IDLE", reason="", reason_by="", awaits="")
    reason = one_line(f"{act.tag}: {act.reason}" if act.incident else f"{act.tag} {act.reason}")
    if act.kind in HYPERPOD and hyperpod:
        return replace(state, service="out", raw="IDLE+FAIL", reason=HYPERPOD[act.kind], awaits=HYPERPOD[act.kind])
    raw = "DOWN" if act.kind == "reboot" else "IDLE+DRAIN"
    return replace(state, service="out", raw=raw, reason=reason, reason_by=TAG)


def names(text: str) -> tuple[str, ...]:
    """Names of nodes, from lines of one each; a node in several partitions once."""
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.split()))


def _ping(ask: Ask) -> Check:
    said = ask("scontrol", "ping")
    text = one_line(said.out or said.err, 300)
    if said.code or " is UP" not in said.out:
        return Check(
            "slurmctld answers", "bad", text or "no word", "is slurmctld up, and slurm.conf here the right one?"
        )
    return Check("slurmctld answers", "good", text)


def _right(ask: Ask, what: str) -> Check:
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    owner = _USER.search(_setting(ask, "SlurmUser"))
    if uid == 0 or (owner is not None and int(owner["uid"]) == uid):
        return Check(
            what, "good", f"{name} is {'root' if uid == 0 else 'the user of Slurm'}, who may change nodes and jobs"
        )
    remedy = f"sacctmgr modify user {name} set AdminLevel=Administrator, or run the controller as SlurmUser"
    try:
        said = ask("sacctmgr", "--noheader", "--parsable2", "show", "user", name, "format=AdminLevel")
    except ClusterError as error:
        return Check(what, "unknown", f"whether {name} may change nodes cannot be told: {error}", remedy)
    level = said.out.strip()
    if said.code:
        text = f"whether {name} may change nodes cannot be told: {one_line(said.err or said.out)}"
        return Check(what, "unknown", text, remedy)
    if level == "Administrator":
        return Check(what, "good", f"{name} is an administrator of Slurm's")
    return Check(what, "bad", f"{name} may not change nodes: AdminLevel is {one_line(level, 60) or 'not set'}", remedy)


def _reboots(ask: Ask) -> Check:
    program = _setting(ask, "RebootProgram")
    if program in ("", "(null)"):
        remedy = "set RebootProgram in slurm.conf, or take reboot out of may"
        return Check("reboots nodes", "bad", "Slurm has no RebootProgram: a node would wait for ever", remedy)
    return Check("reboots nodes", "good", f"RebootProgram = {one_line(program)}; whether it works was not tried")


def _remembers(ask: Ask) -> Check:
    text = _setting(ask, "MinJobAge")
    found = _SECONDS.search(text)
    if found is None:
        return Check("remembers ended jobs", "unknown", f"MinJobAge = {one_line(text) or 'not told'}")
    if 0 < int(found[1]) < _FORGETS:
        remedy = f"set MinJobAge in slurm.conf to {_FORGETS} or more"
        return Check(
            "remembers ended jobs", "bad", f"only for {text}: a job could be gone before it is started again", remedy
        )
    return Check("remembers ended jobs", "good", f"MinJobAge = {text}")


def _spare(ask: Ask, job: JobState) -> Check:
    said = ask("sinfo", "--all", "--Node", "--noheader", "--states=idle", "--Format=NodeList:256")
    what = "another node for it"
    if said.code:
        return Check(what, "unknown", one_line(said.err or said.out))
    idle = [name for name in names(said.out) if name not in job.nodes]
    if not idle:
        text = f"no node is idle beside the {len(job.nodes)} of the job: it would wait until one is"
        return Check(what, "unknown", text, "keep a spare node in its partition")
    return Check(what, "good", f"{len(idle)} idle now, e.g. {idle[0]}; whether they suit the job was not tried")


def _setting(ask: Ask, name: str) -> str:
    """A setting of the running slurmctld; "" where it is not told.

    Raises:
        ClusterError: it cannot be asked.
    """
    said = ask("scontrol", "show", "config")
    if said.code:
        raise ClusterError(
            f"scontrol show config ended with {said.code}: {one_line(said.err or said.out) or 'no word'}"
        )
    for line in said.out.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip() == name:
            return value.strip()
    return ""
