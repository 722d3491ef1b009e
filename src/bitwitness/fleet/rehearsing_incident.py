"""An invented incident, carried through by the real controller in front of a cluster on which nothing is done.

Not a second telling of how a decision is made: the same picker, decision, budget and actor run, on a copy of the controller's state
and with an incident in a temporary folder. Everything in that incident says that it is invented.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from bitwitness.errors import RunFilesError
from bitwitness.evidence import Verdict
from bitwitness.fleet.clock import Clock, stamp
from bitwitness.fleet.clusters.base import ActKind, Check, Cluster
from bitwitness.fleet.clusters.rehearsed import Rehearsed
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Book, Kept
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import NAME, State
from bitwitness.fleet.state_reading import Reading
from bitwitness.fleet.watching import ReadSignals
from bitwitness.runfiles import Incident, RunFiles
from bitwitness.topology import Placement, Topology

INVENTED = "INVENTED by `bitwitness fleet rehearse`: nothing has happened"
DEVICE = "GPU-invented-by-a-rehearsal"


@dataclass(frozen=True, slots=True)
class Story:
    """An invented incident and what must come of it.

    Attributes:
        name: what it is, for people.
        act: what is to be done to the node; None: nobody may be touched.
        persistent: whether somebody is named who was wrong again.
        signals: what the hardware would say; None: it is really asked.
    """

    name: str
    act: ActKind | None
    persistent: bool = True
    signals: Callable[[str, datetime], Sequence[Signal]] | None = None


def _memory(node: str, now: datetime) -> Sequence[Signal]:
    said = f"uncontained memory error ({INVENTED})"
    return [Signal("kernel", "xid:95", DEVICE, stamp(now), "memory", "strong", said, host=node)]


def _wish(node: str, now: datetime) -> Sequence[Signal]:
    said = f"the driver asks for a reboot ({INVENTED})"
    return [Signal("kernel", "xid:154", DEVICE, stamp(now), "loud", "medium", said, host=node)]


NOBODY = Story("nobody can be named", None, persistent=False)
STORIES: dict[str, Story] = {
    "drain": Story("wrong again when the work was repeated", "drain"),
    "reboot": Story("the same, and the driver asks for a reboot", "reboot", signals=_wish),
    "replace": Story("the same, and its memory has failed", "replace", signals=_memory),
}


def tell(story: Story, node: str, folder: Path, now: datetime) -> Incident:
    """Write the incident of a story into a run directory; as it is read again."""
    where = Topology((Placement(0, node, DEVICE, 0), Placement(1, f"{node}-invented-peer", f"{DEVICE}-peer", 0)))
    if story.persistent:
        found = Verdict(
            "attributed",
            1,
            ranks=(0,),
            nodes=(node,),
            devices=(DEVICE,),
            persistence="persistent",
            persistences=("persistent",),
            kind="compute",
            candidates=(0, 1),
            reason=INVENTED,
            check="replay",
            window=(0, 1),
        )
    else:
        found = Verdict("unattributed", 1, kind="compute", candidates=(0, 1), reason=INVENTED, check="replay")
    name = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    record = {
        "id": name,
        "time": stamp(now),
        "bitwitness": "0",
        "invented": INVENTED,
        "verdict": found.to_json(),
        "observations": [],
        "placement": where.to_json(),
        "policy": {"on_detection": "raise"},
        "notes": [INVENTED],
    }
    path = RunFiles(folder).create().commit_incident(name, record)
    return Incident(path, found, (), where, record)


@dataclass(frozen=True, slots=True)
class Ending:
    """Where an invented incident came to.

    Attributes:
        incident: its id.
        proposals: what was proposed.
        calls: what would have been called because of it.
        done: the act that would have been done; "" for none.
    """

    incident: str
    proposals: tuple[Kept, ...]
    calls: tuple[str, ...]
    done: str


def carry_through(
    story: Story,
    node: str,
    cluster: Cluster,
    policy: FleetPolicy,
    folder: Path,
    *,
    state: Path | None = None,
    read_signals: ReadSignals | None = None,
    clock: Clock | None = None,
) -> Ending:
    """Carry a story through, up to the calls.

    Args:
        story: what happens.
        node: to which node.
        cluster: the real one; it is looked at and nothing more.
        policy: as it is, but that it acts.
        folder: an empty one, for the run and the state.
        state: folder of the real controller's state, which is copied: what it has done within the hour counts.
        read_signals: what the hardware says; of a story that has its own, those count.
        clock: the time.
    """
    clock = clock or Clock()
    if state is not None and (state / NAME).exists():
        copy_state(state, folder)
    incident = tell(story, node, folder / "invented-run", clock.now())
    invented = story.signals
    reader: ReadSignals | None = read_signals
    if invented is not None:
        reader = lambda _: invented(node, clock.now())  # noqa: E731
    front = Rehearsed(cluster)
    with State(folder, clock=clock) as copy:
        _close_others(copy)
        run = [folder / "invented-run"]
        controller = Controller(run, copy, front, replace(policy, act=True), read_signals=reader, own=False)
        controller.round()
        book, name = controller.book, incident.path.name
        mine = tuple(one for one in book.proposals() if one.proposal.incident == name)
        calls = tuple(one.text for one in copy.history(incident=name) if one.what == "call")
        done = next((one.act.kind for one in book.intents() if one.act.incident == name and one.outcome == "done"), "")
    return Ending(name, mine, calls, done)


def _close_others(copy: State) -> None:
    """What waits in a copy of the state is not what is rehearsed: carried out first, it would use up what may be done in an hour.

    That an act of the real controller was begun and is not settled yet stays so, and counts.
    """
    book = Book(copy)
    begun = {one.proposal for one in book.intents(unsettled=True) if one.started}
    with copy.change():
        for kept in book.proposals(pending=True):
            if kept.key not in begun:
                book.set_status(kept.key, "expired", "it is not what is rehearsed", final=True)
        for row in book.requeues():
            book.set_requeue(row.incident, status="given up", why="it is not what is rehearsed", ended=copy.clock.now())


def judge(story: Story, ending: Ending, node: str, policy: FleetPolicy) -> Check:
    """Whether it came out as it must. Pure."""
    touched = {one.proposal.node for one in ending.proposals if one.proposal.act is not None}
    if story.act is None:
        if touched or ending.calls:
            text = f"{', '.join(sorted(touched)) or 'somebody'} would be touched although nobody is named"
            return Check(
                story.name, "bad", text, "do not let this controller act, and report this mistake in bitwitness"
            )
        return Check(story.name, "good", "nobody is touched, and a person is told")
    if not ending.proposals:
        return Check(story.name, "bad", "the incident was not picked up", "see the log of this command")
    kept = ending.proposals[0]
    if touched - {node} or len(ending.proposals) != 1:
        return Check(story.name, "bad", f"another node than {node} would be touched: {', '.join(sorted(touched))}")
    proposed = kept.proposal.act or "nothing"
    named = f"{kept.proposal.action} is proposed with {kept.proposal.confidence} confidence"
    if ending.done:
        text = f"{named}: {ending.done} {node}"
        if ending.done != story.act:
            why = f"{text}, and not {story.act}: so say the policy, the signals, or what the cluster can"
            return Check(story.name, "good", why)
        return Check(story.name, "good", text)
    where = f"{kept.status} ({kept.hold})" if kept.hold else kept.status
    text = f"{named} ({proposed}), and now it would be {where}: {kept.why}"
    until = f"; until {stamp(kept.due)}" if kept.due is not None and kept.hold == "nodes-per-hour" else ""
    wanted = kept.hold in ("approval", "quiet-hours", "nodes-per-hour")
    return Check(story.name, "good" if wanted else "bad", text + until, _REMEDIES.get(kept.hold, ""))


_REMEDIES = {
    "cluster-share": "bring nodes back into service, or raise cluster_share: until then no node is taken out",
    "protected": "give a --node that is not protected, or change protect",
    "cluster": "see the part `cluster`",
    "not-ours": "give a --node that is in service",
}


def copy_state(source: Path, folder: Path) -> None:
    """The state as it is at one moment, also while a controller writes it.

    Raises:
        RunFilesError: it cannot be read.
    """
    try:
        with closing(Reading(source / NAME)) as real, closing(sqlite3.connect(folder / NAME)) as copy:
            real.copy_to(copy)
    except (sqlite3.Error, OSError) as error:
        raise RunFilesError(f"{source / NAME} cannot be copied for a rehearsal: {error}") from error
