"""What the controller keeps of incidents, proposals and acts, as records: the only place that knows their rows.

Everything that changes something is called inside `State.change`, so that what belongs together is written together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from bitwitness.fleet.clock import moment
from bitwitness.fleet.clusters.base import Act, Call, NodeState
from bitwitness.fleet.decision import Naming, Proposal
from bitwitness.fleet.kept_devices import Devices
from bitwitness.fleet.kept_judgements import JUDGED_AWAY

Status = Literal[
    "proposed",
    "observed",
    "held",
    "acting",
    "failed",
    "done",
    "already out",
    "unclear",
    "expired",
    "nothing",
    "rejected",
    "cleared",
]
"""Where a proposal stands.

    proposed     not looked at yet
    observed     nothing is done because the policy says so
    held         waits; or, where a person must act, stays for that person
    acting       asked of the cluster, which does not show it yet
    failed       the cluster refused or did not answer; tried again, until it expires
    done         the cluster shows it
    already out  bitwitness had taken the node out before
    unclear      it may have happened or not, and nobody but a person may try again
    expired      could not be done in time; a person must look
    nothing      nothing is to be done to any node
    rejected     a person was asked, and has said no
    cleared      before it was done a person returned the node to service, or judged the incident a false alarm or a drill
"""

_WAITING = "node = ? AND act IS NOT NULL AND status NOT IN ('done', 'already out', 'rejected', 'cleared', 'nothing')"
RETURNED = 1000
"""Numbers of proposals from here on are those of devices that came back."""


_SKEW, _LATELY = timedelta(minutes=5), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Known:
    """An incident that was picked up.

    Attributes:
        id: its id.
        run: the directory of its run.
        path: its own.
        status: of the verdict.
        headline: of the verdict, a line.
        job: of the scheduler, e.g. `slurm:1234`, or "".
        time: when it was found.
    """

    id: str
    run: str
    path: Path
    status: str
    headline: str
    job: str
    time: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A proposal and where it stands.

    Attributes:
        key: of its row.
        number: which of its incident.
        proposal: what is proposed.
        made: when.
        waited: how long ago that is, whatever the wall clock did since.
        status: where it stands.
        hold: what holds it, in a word; "" if nothing.
        why: the same in a sentence, or what the cluster said.
        attempts: how often the cluster was asked for it.
        due: when it is looked at again at the earliest; None: at the next round.
        updated: when it last changed.
        final: whether it is not looked at again.
    """

    key: int
    number: int
    proposal: Proposal
    made: datetime
    waited: timedelta
    status: Status
    hold: str
    why: str
    attempts: int
    due: datetime | None
    updated: str
    final: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {
            "key": self.key,
            **self.proposal.to_json(),
            "status": self.status,
            "hold": self.hold,
            "why": self.why,
            "attempts": self.attempts,
            "made": self.made.isoformat(),
            "due": None if self.due is None else self.due.isoformat(),
            "updated": self.updated,
        }


@dataclass(frozen=True, slots=True)
class Intent:
    """An act that is about to be asked of the cluster, or was.

    Attributes:
        key: of its row.
        proposal: key of the proposal.
        act: what is asked for.
        before: the node when it was decided.
        tried: how long ago the cluster was last asked, or the intent was written.
        started: how many calls were begun; 0: certainly nothing has happened.
        process: which process wrote it.
        outcome: `done`, `not done`, `unclear` or `not ours`; None: not known yet.
        text: what the cluster said.
    """

    key: int
    proposal: int
    act: Act
    before: NodeState
    tried: timedelta
    started: int
    process: str
    outcome: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """A job that may have to be started again without the nodes of an incident."""

    incident: str
    job: str
    nodes: tuple[str, ...]
    restarts: int | None
    status: str
    why: str
    due: datetime | None
    made: datetime
    started: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """A node, or with `device` a device, that a person returned to service, and when."""

    node: str
    device: str
    time: str
    who: str

    def answers(self, one: Naming, now: datetime) -> bool:
        """Whether what was found there was found before.

        What is dated after now was found by a clock that is ahead, and cannot be told from that: of a node that was returned
        lately it is for a person to say.
        """
        same = self.device == one.device if self.device else self.node == one.node
        cleared = min(moment(self.time), now)
        ahead = one.moment - now > _SKEW and now - cleared < _LATELY
        return same and (one.moment < cleared or ahead)


def found_at(known: Known, otherwise: datetime) -> datetime:
    """When an incident was found, as far as it says so."""
    try:
        said = datetime.fromisoformat(known.time)
    except ValueError:
        return otherwise
    return said if said.tzinfo is not None else otherwise


class Book(Devices):
    """The records of a state."""

    # Incidents --------------------------------------------------------------------------------------------------------

    def known(self) -> set[str]:
        """Ids of all incidents that were picked up."""
        return {row[0] for row in self.state.read("SELECT id FROM incidents")}

    def add_incident(self, one: Known, later: datetime | None = None) -> None:
        """Note an incident, and when the hardware is asked about it once more."""
        due = None if later is None else self.state.stamp(later)
        row = (one.id, one.run, str(one.path), one.status, one.headline, one.job, one.time, self.state.stamp(), due)
        self.state.write("INSERT OR IGNORE INTO incidents VALUES (?,?,?,?,?,?,?,?,?)", row)

    def incident(self, name: str) -> Known | None:
        """What is known of an incident."""
        return next(iter(self._incidents("id = ?", name)), None)

    def to_reconsider(self, most: int) -> list[Known]:
        """Incidents about which the hardware is to be asked once more now, oldest first."""
        return self._incidents("later <= ? ORDER BY later LIMIT ?", self.state.stamp(), most)

    def reconsidered(self, name: str, later: datetime | None) -> None:
        """It was asked; when it is to be asked yet again, if at all."""
        due = None if later is None else self.state.stamp(later)
        self.state.write("UPDATE incidents SET later = ? WHERE id = ?", (due, name))

    def _incidents(self, which: str, *values: Any) -> list[Known]:
        query = f"SELECT id, run, path, status, headline, job, time FROM incidents WHERE {which}"  # noqa: S608
        return [Known(key, run, Path(path), *rest) for key, run, path, *rest in self.state.read(query, values)]

    def incidents(self) -> dict[str, int]:
        """How many there were, by the status of the verdict."""
        return dict(self.state.read("SELECT status, COUNT(*) FROM incidents GROUP BY status ORDER BY status"))

    # Namings ----------------------------------------------------------------------------------------------------------

    def add_namings(self, namings: Iterable[Naming], answered: Iterable[Naming] = ()) -> None:
        """Note whom an incident names; what a person had answered before it came is no strike."""
        over = list(answered)
        for one in namings:
            cleared = self.state.stamp() if one in over else None
            row = (one.incident, one.device, one.node, json.dumps(asdict(one)), cleared)
            self.state.write("INSERT OR IGNORE INTO namings VALUES (?,?,?,?,?)", row)

    def namings(self) -> list[Naming]:
        """Whom incidents named, without what was cleared by hand, and without drills and false alarms."""
        rows = self.state.read(
            f"SELECT record FROM namings WHERE cleared IS NULL AND NOT {JUDGED_AWAY} ORDER BY incident, record"  # noqa: S608
        )
        return [Naming(**json.loads(row[0])) for row in rows]

    def named_after(self, last: str, most: int) -> list[str]:
        """So many incidents that name somebody, those with the next ids after this one."""
        query = "SELECT DISTINCT incident FROM namings WHERE incident > ? ORDER BY incident LIMIT ?"
        return [str(row[0]) for row in self.state.read(query, (last, most))]

    # What a person has answered ---------------------------------------------------------------------------------------

    def add_clear(self, node: str, devices: Iterable[str], who: str) -> str:
        """A person returns a node and these devices to service now; when that is."""
        now = self.state.stamp()
        for device in dict.fromkeys(("", *devices)):
            self.state.write("INSERT OR REPLACE INTO clears VALUES (?,?,?,?)", (node, device, now, who))
        return now

    def take_back_clear(self, node: str, time: str, who: str, before: Iterable[Cleared]) -> None:
        """It did not come to that: as it was before, but for what somebody else has returned meanwhile."""
        self.state.write("DELETE FROM clears WHERE node = ? AND time = ? AND who = ?", (node, time, who))
        for one in before:
            if one.node == node:
                row = (one.node, one.device, one.time, one.who)
                self.state.write("INSERT OR IGNORE INTO clears VALUES (?,?,?,?)", row)

    def clears(self) -> list[Cleared]:
        """When which node and device were returned to service last."""
        return [Cleared(*row) for row in self.state.read("SELECT node, device, time, who FROM clears ORDER BY time")]

    def waiting(self, node: str) -> int:
        """How many proposals wait for a node, or for a person who looks at it."""
        return int(self.state.read(f"SELECT COUNT(*) FROM proposals WHERE {_WAITING}", (node,))[0][0])  # noqa: S608

    def close_proposals(self, node: str, why: str) -> int:
        """Close these; how many there were."""
        return self.state.write(
            f"UPDATE proposals SET status = 'cleared', hold = '', why = ?, due = NULL, final = 1, updated = ? WHERE {_WAITING}",  # noqa: S608
            (why, self.state.stamp(), node),
        )

    def end_unbegun(self, key: int, why: str) -> bool:
        """End a proposal of whose act nothing was begun, because it is answered; False where something was, or it is done."""
        begun = (
            "SELECT 1 FROM intents WHERE proposal = ? AND (outcome = 'unclear' OR (outcome IS NULL AND started > 0))"
        )
        changed = self.state.write(
            "UPDATE proposals SET status = 'cleared', hold = '', why = ?, due = NULL, final = 1, updated = ? WHERE key = ? AND act IS NOT NULL "  # noqa: S608
            f"AND status IN ('proposed', 'observed', 'held', 'acting', 'failed', 'expired') AND NOT EXISTS ({begun})",
            (why, self.state.stamp(), key, key),
        )
        if changed:
            over = "UPDATE intents SET outcome = 'not done', text = ? WHERE proposal = ? AND outcome IS NULL"
            self.state.write(over, (why, key))
        return changed > 0

    # Proposals --------------------------------------------------------------------------------------------------------

    def add_proposal(self, proposal: Proposal, number: int) -> None:
        """Note what is proposed; one that is there already stays."""
        clock, status = self.state.clock, "nothing" if proposal.act is None else "proposed"
        now = self.state.stamp()
        record = json.dumps(proposal.to_json())
        self.state.write(
            "INSERT OR IGNORE INTO proposals (incident, number, node, act, made, boot, ticks, record, status, updated) "
            "VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                proposal.incident,
                number,
                proposal.node,
                proposal.act,
                now,
                clock.boot(),
                clock.ticks(),
                record,
                status,
                now,
            ),
        )

    def proposals(
        self,
        *,
        statuses: Sequence[str] = (),
        node: str = "",
        incident: str = "",
        key: int = 0,
        pending: bool = False,
        last: int = 0,
    ) -> list[Kept]:
        """Proposals, oldest first. `pending`: only those that are looked at again; `last`: those that changed last."""
        marks = ",".join("?" * len(statuses))
        rows = self.state.read(
            "SELECT key, number, record, made, boot, ticks, status, hold, why, attempts, due, updated, final FROM proposals "  # noqa: S608
            f"WHERE (? OR status IN ({marks})) AND (? = '' OR node = ?) AND (? = '' OR incident = ?) "
            "AND (? = 0 OR key = ?) AND (NOT ? OR (final = 0 AND act IS NOT NULL)) ORDER BY CASE WHEN ? THEN updated END DESC, key LIMIT ?",
            (not statuses, *statuses, node, node, incident, incident, key, key, pending, last > 0, last or -1),
        )
        return [self._kept(row) for row in rows]

    def _kept(self, row: tuple[Any, ...]) -> Kept:
        key, number, record, made, boot, ticks, status, hold, why, attempts, due, updated, final = row
        when = moment(made)
        return Kept(
            key,
            number,
            Proposal.from_json(json.loads(record)),
            when,
            self.state.clock.since(when, boot, ticks),
            status,
            hold,
            why,
            attempts,
            None if due is None else moment(due),
            updated,
            bool(final),
        )

    def set_status(
        self,
        key: int,
        status: Status,
        why: str = "",
        *,
        hold: str = "",
        due: datetime | None = None,
        final: bool = False,
        attempt: bool = False,
    ) -> bool:
        """Note where a proposal stands now; False where it has come to its end meanwhile, e.g. because a person has answered it."""
        later = None if due is None else self.state.stamp(due)
        changed = self.state.write(
            "UPDATE proposals SET status = ?, hold = ?, why = ?, due = ?, final = ?, attempts = attempts + ?, updated = ? "
            "WHERE key = ? AND final = 0",
            (status, hold, why, later, final, attempt, self.state.stamp(), key),
        )
        return changed > 0

    def set_act(self, key: int, act: str) -> None:
        """Note what the cluster is really asked for: one that cannot reboot drains."""
        self.state.write("UPDATE proposals SET act = ? WHERE key = ? AND final = 0", (act, key))

    def kept_out(self) -> dict[str, tuple[int, str]]:
        """Of each node that was taken out, by us or where we would have: its last such proposal, and when that came to its end."""
        rows = self.state.read(
            "SELECT node, key, MAX(updated) FROM proposals WHERE final = 1 AND act IS NOT NULL "  # noqa: S608
            f"AND (status IN ('done', 'already out') OR (status = 'held' AND hold = 'not-ours')) AND NOT {JUDGED_AWAY} GROUP BY node"
        )
        return {str(node): (int(key), str(updated)) for node, key, updated in rows}

    def reword(self, key: int, proposal: Proposal) -> None:
        """Replace what is proposed, of the same node, where nothing was done about it yet."""
        record = json.dumps(proposal.to_json())
        query = "UPDATE proposals SET record = ?, act = ?, updated = ? WHERE key = ? AND node = ? AND final = 0"
        self.state.write(query, (record, proposal.act, self.state.stamp(), key, proposal.node))

    def tally(self) -> list[tuple[str, str, str, int]]:
        """(action, status, hold, how many) of all proposals."""
        rows = self.state.read(
            "SELECT json_extract(record, '$.action'), status, hold, COUNT(*) FROM proposals GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
        )
        return [(str(action), str(status), str(hold), int(count)) for action, status, hold, count in rows]

    # Intents ----------------------------------------------------------------------------------------------------------

    def add_intent(self, proposal: int, act: Act, before: NodeState, calls: Sequence[Call], process: str) -> int:
        """Note what is about to be done; its key."""
        clock = self.state.clock
        return self.state.write(
            "INSERT INTO intents (proposal, node, act, before, calls, tried, boot, ticks, process) VALUES (?,?,?,?,?,?,?,?,?)",
            (
                proposal,
                act.node,
                json.dumps(asdict(act)),
                json.dumps(asdict(before)),
                json.dumps([str(call) for call in calls]),
                self.state.stamp(),
                clock.boot(),
                clock.ticks(),
                process,
            ),
        )

    def set_started(self, key: int, process: str) -> bool:
        """A call is begun; from now on it may have happened. False where the act has ended meanwhile: it must not be begun."""
        clock = self.state.clock
        changed = self.state.write(
            "UPDATE intents SET started = started + 1, tried = ?, boot = ?, ticks = ?, process = ? "
            "WHERE key = ? AND outcome IS NULL",
            (self.state.stamp(), clock.boot(), clock.ticks(), process, key),
        )
        return changed > 0

    def set_outcome(self, key: int, outcome: str | None, text: str) -> bool:
        """How it ended; None: not known, but this was said. False where it has ended already, and for certain."""
        changed = self.state.write(
            "UPDATE intents SET outcome = ?, text = ? WHERE key = ? AND (outcome IS NULL OR (outcome = 'unclear' AND ?))",
            (outcome, text, key, outcome is not None),
        )
        return changed > 0

    def intents(self, *, unsettled: bool = False, node: str = "", proposal: int = 0) -> list[Intent]:
        """Acts, oldest first. `unsettled`: those without an outcome, or with one that is unclear."""
        rows = self.state.read(
            "SELECT key, proposal, act, before, tried, boot, ticks, started, process, outcome, text FROM intents "
            "WHERE (NOT ? OR outcome IS NULL OR outcome = 'unclear') AND (? = '' OR node = ?) AND (? = 0 OR proposal = ?) ORDER BY key",
            (unsettled, node, node, proposal, proposal),
        )
        return [self._intent(row) for row in rows]

    def _intent(self, row: tuple[Any, ...]) -> Intent:
        key, proposal, act, before, tried, boot, ticks, started, process, outcome, text = row
        made = json.loads(act)
        seen = json.loads(before)
        return Intent(
            key,
            proposal,
            Act(**{**made, "devices": tuple(made["devices"])}),
            NodeState(**{**seen, "jobs": tuple(seen["jobs"])}),
            self.state.clock.since(moment(tried), boot, ticks),
            started,
            process,
            outcome,
            text,
        )

    def acted(self, within: timedelta, *, but: int = 0) -> list[tuple[datetime, str]]:
        """(when, node) of what was begun within so long, whatever became of it; without one intent.

        The times are as if the clock had always been as it is now, so that setting it neither refills a budget nor stops it.
        """
        clock, found = self.state.clock, []
        rows = self.state.read(
            "SELECT node, tried, boot, ticks FROM intents WHERE (started > 0 OR outcome IS NULL) AND key != ? "
            "ORDER BY key DESC LIMIT 5000",
            (but,),
        )
        now = clock.now()
        for node, tried, boot, ticks in rows:
            age = clock.since(moment(tried), boot, ticks)
            if age <= within:
                found.append((now - age, str(node)))
        return found

    def acts(self) -> dict[tuple[str, str], int]:
        """(act, how it ended) -> how many proposals with an act have ended so."""
        rows = self.state.read(
            "SELECT act, status, COUNT(*) FROM proposals WHERE act IS NOT NULL "
            "AND status IN ('done', 'already out', 'failed', 'unclear', 'expired') GROUP BY 1, 2"
        )
        return {(str(act), str(status)): int(count) for act, status, count in rows}

    # Requeues ---------------------------------------------------------------------------------------------------------

    def add_requeue(self, incident: str, job: str, found: datetime) -> None:
        """A job to look after; none where it is looked after already, or was since the incident was found."""
        if self.state.read(
            "SELECT 1 FROM requeues WHERE job = ? AND (status = 'waiting' OR ended >= ?)",
            (job, self.state.stamp(found)),
        ):
            return
        self.state.write(
            "INSERT OR IGNORE INTO requeues (incident, job, nodes, status, made) VALUES (?,?,'[]','waiting',?)",
            (incident, job, self.state.stamp()),
        )

    def incidents_of(self, job: str) -> list[Known]:
        """The incidents of a job, as `scheduler:id`, that were not looked after before."""
        plain = job.partition(":")[2]
        rows = self.state.read("SELECT MAX(ended) FROM requeues WHERE job = ? AND ended IS NOT NULL", (plain,))
        last = rows[0][0]
        found = self._incidents("job = ? ORDER BY seen, id", job)
        return [one for one in found if last is None or self.state.stamp(found_at(one, self.state.clock.now())) > last]

    def requeues(self, *, waiting: bool = True) -> list[Requeue]:
        """Jobs to look after, oldest first."""
        rows = self.state.read(
            "SELECT incident, job, nodes, restarts, status, why, due, made, started FROM requeues "
            "WHERE (NOT ? OR status = 'waiting') ORDER BY made, incident",
            (waiting,),
        )
        return [self._requeue(*row) for row in rows]

    @staticmethod
    def _requeue(
        incident: str,
        job: str,
        nodes: str,
        restarts: int | None,
        status: str,
        why: str,
        due: str | None,
        made: str,
        started: int,
    ) -> Requeue:
        later = None if due is None else moment(due)
        return Requeue(incident, job, tuple(json.loads(nodes)), restarts, status, why, later, moment(made), started)

    def set_requeue(self, incident: str, **values: Any) -> None:
        """Note something about a job."""
        for name, value in values.items():
            assert name in ("nodes", "restarts", "status", "why", "due", "started", "ended")
            plain = json.dumps(list(value)) if name == "nodes" else value
            plain = self.state.stamp(value) if isinstance(value, datetime) else plain
            self.state.write(f"UPDATE requeues SET {name} = ? WHERE incident = ?", (plain, incident))  # noqa: S608
