"""The leader: decides who trains in each generation, sees how it ends, and what follows.

It holds three states: gathering nodes, a generation that runs, one that is being stopped. All it knows of other nodes it
reads from their files, and all it decides is in `decisions`; between them this is the order of things, above all that a
quarantine is on the disk before anybody is started again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.runfiles import RunFiles, new_incident_id
from bitwitness.runfiles.supervision import Generation, Mark, Member, Session, Stop, SupervisionFiles
from bitwitness.supervise import findings
from bitwitness.supervise.decisions import (
    LOST,
    REFUSED,
    Action,
    Blame,
    Evidence,
    Failure,
    Hang,
    Hit,
    Outcome,
    Past,
    Status,
    arrange,
    blame,
    decide,
    ended,
    judge,
    stop_code,
)
from bitwitness.supervise.events import Events, Show
from bitwitness.supervise.launchers import Launcher
from bitwitness.supervise.processes import started
from bitwitness.supervise.settings import Settings

logger = logging.getLogger(__name__)

_WAITING_TOLD = 30.0
_STOP_PATIENCE = 30.0
"""Seconds beyond their grace that nodes have to stop what runs on them."""

Phase = Literal["gather", "run", "drain"]


@dataclass
class _Seen:
    """A member as last seen, since when it says the same, and whether that has been told."""

    member: Member
    changed: float
    refusal_told: int = 0
    lost_told: bool = False


class Leader:
    """Leads one supervised run. `tick` is called again and again; it never waits.

    Args:
        launcher: who starts the wrappers.
        show: told of every event.
    """

    def __init__(
        self, settings: Settings, launcher: Launcher, show: Show, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.id = new_incident_id()
        self._settings, self._launcher, self._clock = settings, launcher, clock
        self._files, self._run_files = SupervisionFiles(settings.run_dir), RunFiles(settings.run_dir)
        self.events = Events(self._files, self.id, show)
        self._session = Session(self.id, socket.gethostname(), os.getpid(), job=settings.job, preparing=1)
        self._spoken: Session | None = None
        self._spoke_at = 0.0
        self._began = self._looked = self._phase_since = self._news_at = self._waiting_told = clock()
        self._phase: Phase = "gather"
        self._seen: dict[str, _Seen] = {}
        self._left: dict[str, str] = {}  # nodes of this generation whose wrapper has left it, and why
        self._places: list[str | None] = []
        self._excluded: set[str] = set()
        self._next = Action("restart", REFUSED, "", Past())
        self._past = Past()
        self._suspicion = False
        self._marks: dict[int, Mark] = {}
        self._arrival: dict[str, int] = {}
        self._trouble_at: float | None = None
        self._hang: Hang | None = None
        self._stopping, self._kill = "", False
        self._outcome: Outcome | None = None
        self._hits: tuple[Hit, ...] = ()
        self._recoveries: list[dict[str, Any]] = []
        self._ending: Stop | None = None  # how it will have ended, once that is written
        self._stop: Stop | None = None

    def start(self) -> None:
        """Take the lead: settle what an earlier supervisor that died has left, and say that there is a session.

        Raises:
            RunFilesError: the run directory cannot be written.
        """
        self._run_files.create()
        self._files.create(self.id)
        job = self._settings
        self.events(
            "session",
            f"supervised run {self.id}: {job.nodes} nodes with {job.nproc_per_node} processes each, {job.script}",
            **self._settings.to_json(),
        )
        self._settle_old()
        self._speak(force=True)

    def stop(self, name: str, kill: bool = False) -> None:
        """The job shall end: gracefully, or at once."""
        if not self._stopping:
            self.events("stopping", f"{name}: workers are asked to stop and have {self._settings.grace:.0f} s to save")
        elif kill and not self._kill:
            self.events("stopping", f"{name} again: ending everything at once")
        self._stopping, self._kill = self._stopping or name, self._kill or kill

    def tick(self) -> Stop | None:
        """Look and act once; how the run ended, once it has.

        Raises:
            BitwitnessError: another leader has taken this run directory.
            RunFilesError: the run directory cannot be written.
        """
        if self._stop is not None:
            self._speak(force=not self._spoken or not self._spoken.ended)
            return self._stop
        self._check_alone()
        now = self._clock()
        if now - self._looked > self._settings.lost_after / 2:
            self._forgive()  # it was this process that slept
        self._looked = now
        try:
            if self._ending is not None:
                self._end(self._ending)
            else:
                self._look()
                {"gather": self._gather, "run": self._watch, "drain": self._drain}[self._phase]()
            self._speak()
        except RunFilesError:
            self._forgive()  # others cannot write either
            raise
        return self._stop

    # What is seen

    def _check_alone(self) -> None:
        other = self._files.read_session()
        if other is not None and other.id != self.id and self._spoken is not None:
            kind = BitwitnessError if self._session.generation else ConfigurationError  # started at the same instant
            raise kind(
                f"another `bitwitness run` (process {other.pid} on {other.host}) has taken {self._settings.run_dir}: this one stops"
            )

    def _look(self) -> None:
        now = self._clock()
        for member in self._files.read_members(self.id):
            seen = self._seen.get(member.node)
            if seen is None or seen.member.token != member.token:
                self._seen[member.node] = seen = _Seen(member, now)
                self._news_at = now
                self.events(
                    "joined", f"{member.node} has joined ({member.host}, process {member.pid})", node=member.node
                )
            elif (member.beat, member.state) != (seen.member.beat, seen.member.state):
                if (member.state, member.generation) != (seen.member.state, seen.member.generation):
                    self._news_at = now
                seen.member, seen.changed = member, now
            self._note_left(member)
            if member.state == "refused" and member.generation > seen.refusal_told:
                seen.refusal_told = member.generation
                others = (one for one in self._seen.values() if one is not seen)
                if all((one.refusal_told, one.member.why) != (member.generation, member.why) for one in others):
                    self.events(
                        "refused", f"{member.node} does not take part: {member.why}", node=member.node, why=member.why
                    )
            if member.signal and not self._stopping:
                self.events("signal", f"{member.node} was told to stop by {member.signal}", node=member.node)
                self.stop(member.signal)

    def _forgive(self) -> None:
        """Nobody's silence up to now says anything."""
        for seen in self._seen.values():
            seen.changed = self._clock()

    def _note_left(self, member: Member) -> None:
        """It goes on living, may have joined again meanwhile, and yet its workers are gone."""
        if self._phase == "gather" or member.node not in self._places:
            return
        why = member.why if member.state in ("running", "stopped") else ""
        if member.generation < self._session.generation:
            why = why or "its wrapper has left the job, or was started anew"
        if why and member.node not in self._left:
            self._left[member.node] = why
            self.events("lost", f"{member.node} has ended its workers: {why}", node=member.node, why=why)

    def _lost(self, node: str) -> str:
        """Why a node counts as lost, or ""."""
        seen = self._seen.get(node)
        if seen is None:
            return ""
        dead = self._launcher.dead(seen.member)
        silent = self._clock() - seen.changed
        why = dead or (
            f"nothing was heard of its wrapper on {seen.member.host} for {silent:.0f} s"
            if silent > self._settings.lost_after
            else ""
        )
        if why and not seen.lost_told:
            seen.lost_told = True
            self.events("lost", f"{node} is lost: {why}", node=node, why=why)
        return why

    def _members(self) -> list[Member]:
        """Those who train, in order, as last seen."""
        return [self._seen[node].member for node in self._places if node is not None and node in self._seen]

    # Gathering

    def _gather(self) -> None:
        if self._stopping:
            self._conclude(stop_code(self._stopping), "stopped", f"stopped by {self._stopping}")
            return
        number, now = self._session.preparing, self._clock()
        wanted = self._wanted()
        ready = [one for one in self._seen.values() if self._status(one.member.node) == "ready"]
        spares = [one.member.node for one in sorted(ready, key=lambda one: one.member.index)]
        spares = [node for node in spares if node not in wanted]
        hurry = number == 1 and now - self._news_at > self._launcher.patience
        found = arrange(wanted, self._status, spares, hurry)
        if found.nodes:
            self._launch(found.nodes)
            return
        gone = [node for node in wanted if node is not None and self._status(node) == "gone"]
        lost = [node for node in gone if self._lost(node) and node not in self._excluded] if found.short else []
        coming = [self._launcher.revive(node) for node in lost]
        self._wait(found.short, found.pending, any(coming))

    def _wanted(self) -> list[str | None]:
        if self._places:
            return list(self._places)
        names = list(self._launcher.names()) or [None] * self._settings.nodes
        for seen in self._seen.values():
            if seen.member.index < len(names) and names[seen.member.index] is None:
                names[seen.member.index] = seen.member.node
        return names

    def _status(self, node: str) -> Status:
        seen = self._seen.get(node)
        if self._launcher.coming(node, seen.member.pid if seen is not None else 0):
            return "pending"
        if node in self._excluded or seen is None or self._lost(node):
            return "gone"
        if seen.member.generation != self._session.preparing:
            return "pending"
        return {"ready": "ready", "refused": "gone"}.get(seen.member.state, "pending")  # type: ignore[return-value]

    def _wait(self, short: int, pending: Sequence[str], may_return: bool) -> None:
        now = self._clock()
        text = f"{self._settings.nodes} nodes are needed: {self._account()}"
        if now - self._waiting_told > _WAITING_TOLD:
            self._waiting_told = now
            self.events("waiting", f"waiting for nodes; {text}")
        answered = sum(seen.member.generation == self._session.preparing for seen in self._seen.values())
        all_there = answered >= self._launcher.expected and now - self._news_at > self._launcher.patience
        given_up = short and not pending and all_there and not may_return and self._settings.when_short == "stop"
        late = now - self._phase_since > self._settings.join_timeout
        if not given_up and not late:
            return
        waited = f" (waited {self._settings.join_timeout:.0f} s, --join-timeout)" if late else ""
        text = f"too few nodes: {text}{waited}"
        try:
            self._run_files.quarantine.read()
        except RunFilesError as error:
            text = str(error)  # which every node would say alike
        if self._outcome is None:
            killed = any((self._launcher.exit_code(node) or 0) < 0 for node in self._absent())
            code, kind = (LOST, "node_lost") if killed else (REFUSED, "short")
            self._conclude(code, self._kind(kind), f"{text}; nothing was started")
        else:
            self._conclude(self._next.exit_code, self._kind(self._outcome.kind), f"{self._outcome.headline}; {text}")

    def _absent(self) -> list[str]:
        """The nodes that should have come and have not joined."""
        return [node for node in self._launcher.names() if node is not None and node not in self._seen]

    def _account(self) -> str:
        """Which nodes there are, and why some do not count."""
        codes = {node: self._launcher.exit_code(node) for node in self._absent()}
        words = [
            f"{node} has not joined" + (f" (its wrapper {ended(code)})" if code is not None else "")
            for node, code in codes.items()
        ]
        for node, seen in sorted(self._seen.items(), key=lambda item: item[1].member.index):
            lost = self._lost(node)
            if lost:
                words.append(f"{node} is lost ({lost})")
            elif seen.member.state == "refused":
                words.append(f"{node} is refused ({seen.member.why})")
            elif node in self._excluded:
                words.append(f"{node} is left out")
            else:
                words.append(f"{node} is {seen.member.state}")
        return "; ".join(words) if words else "none has joined"

    def _launch(self, nodes: Sequence[str]) -> None:
        number, first = self._session.preparing, self._seen[nodes[0]].member
        moved = [
            f"{new} in the place of {old}"
            for old, new in zip(self._places, nodes, strict=False)
            if old is not None and old != new
        ]
        self._places = list(nodes)
        self._marks, self._arrival, self._left, self._trouble_at, self._hang = {}, {}, {}, None, None
        generation = Generation(
            number, tuple(nodes), first.address, first.port, suspicion=self._suspicion, reason=self._next.reason
        )
        self._files.write_generation(self.id, generation)
        self._note("restarted", self._next.reason, nodes)
        self._session = replace(self._session, generation=number)
        self._enter("run")
        words = [f"generation {number} on {', '.join(nodes)}", *moved]
        words += ["every step is audited"] if self._suspicion else []
        self.events("started", "; ".join(words), generation=number, nodes=list(nodes), suspicion=self._suspicion)

    # Running

    def _watch(self) -> None:
        number = self._session.generation
        self._marks = self._files.read_marks(self.id, number, self._marks)
        if self._all_finished():
            self._judge()
            return
        if self._stopping:
            self._session = replace(self._session, stopping=self._stopping, kill=self._kill)
            self._enter("drain")
            return
        trouble = self._trouble()
        if trouble is None:
            self._trouble_at = None
            return
        kind, reason, patient = trouble
        now = self._clock()
        self._trouble_at = now if self._trouble_at is None else self._trouble_at
        if patient and now - self._trouble_at < self._settings.settle:
            return  # the cause, or the rest of the same, may still come
        self._files.write_abort(self.id, number, kind, reason)
        self._session = replace(self._session, abort=number)
        self.events("abort", f"generation {number} is stopped: {reason}", generation=number, reason=reason)
        self._enter("drain")

    def _all_finished(self) -> bool:
        return all(self._marks.get(rank) == "finished" for rank in range(self._settings.world_size))

    def _trouble(self) -> tuple[str, str, bool] | None:
        """Why the generation cannot go on, if so: kind, reason, and whether more may become known by waiting."""
        size = self._settings.nproc_per_node
        for place, node in enumerate(self._places):
            lost = self._left.get(node or "") or self._lost(node or "")
            if lost and any(rank not in self._marks for rank in range(place * size, (place + 1) * size)):
                return "lost", f"{node} is lost: {lost}", False
        mine = [one for one in self._members() if one.generation == self._session.generation]
        failures = self._failures(mine)
        over = [one for one in mine if one.state in ("ended", "stopped")]
        hang = findings.hang_of(mine, self._marks, self._settings.hang_timeout)
        if failures:
            telling = all(one.is_lost or one.verdict or one.type in ("RankLost", "CheckFailed") for one in failures)
            first = failures[0] if telling else next(one for one in failures if not one.is_lost)
            return "failed", first.headline(), telling and len(over) < len(self._places)
        if hang is not None:
            self._hang = hang
            return "hang", f"no progress for {hang.quiet:.0f} s", False
        bad = [one for one in over if one.code != 0]
        if bad:
            return "failed", f"the agent on {bad[0].node} has ended", False
        if len(self._marks) == self._settings.world_size:
            return "stopped", "every rank left its loop when asked to stop", False
        if over:
            return "ended", f"the agent on {over[0].node} has ended, and its ranks left no mark", True
        return None

    def _failures(self, members: Sequence[Member]) -> list[Failure]:
        found = []
        for member in members:
            failures = [Failure.from_json(record) for record in member.failures]
            failures = [one for one in failures if one.rank not in self._marks]
            if failures:
                self._arrival.setdefault(member.node, len(self._arrival))
            found += failures
        return found

    # Stopping

    def _drain(self) -> None:
        number, now = self._session.generation, self._clock()
        if self._stopping and (self._session.stopping, self._session.kill) != (self._stopping, self._kill):
            self._session = replace(self._session, stopping=self._stopping, kill=self._kill)
        self._marks = self._files.read_marks(self.id, number, self._marks)
        running = [one for one in self._members() if one.generation == number and one.state in ("running", "ready")]
        running = [one for one in running if one.state == "running" and not self._lost(one.node)]
        patience = (self._settings.grace if self._session.abort != number else 0.0) + _STOP_PATIENCE
        if not running:
            self._judge()
        elif now - self._phase_since > patience:
            names = ", ".join(one.node for one in running)
            self.events("stuck", f"{names}: what runs there does not end, not even when killed; left out", nodes=names)
            self._excluded |= {one.node for one in running}
            self._judge()

    def _judge(self) -> None:
        """The generation is over: how, what is done about it, what is next."""
        evidence = self._evidence()
        outcome = judge(evidence)
        self._outcome = outcome
        number = self._session.generation
        self.events("outcome", f"generation {number}: {outcome.headline}", *outcome.details, outcome=outcome.kind)
        blamed = Blame()
        try:
            hits = (*outcome.hits, *findings.survived(self._run_files, self.id, number, outcome.hits))
            if hits:
                strikes = findings.strikes_within(self._run_files, self._settings)
                before = findings.named_before(self._run_files, hits)
                blamed = blame(hits, strikes, self._settings, before)
                self._punish(blamed)
        except RunFilesError as error:
            # Whoever is started again without a quarantine on the disk may be the same bad device.
            self._conclude(
                outcome.exit_code,
                outcome.kind,
                f"the quarantine could not be kept, so nothing is started again: {error}",
            )
            return
        action = decide(outcome, self._past, blamed, self._settings, self._stopping)
        self._hits = outcome.hits
        if action.kind == "stop":
            reason = action.reason if action.reason == outcome.headline else f"{outcome.headline}; {action.reason}"
            self._conclude(action.exit_code, self._kind(outcome.kind), reason)
            return
        self.events("restart", f"restarting: {action.reason}", reason=action.reason, exclude=list(action.exclude))
        self._next, self._past = action, action.past
        self._suspicion = self._suspicion or action.suspicion
        self._excluded |= set(action.exclude)
        self._session = replace(self._session, preparing=number + 1)
        self._enter("gather")

    def _evidence(self) -> Evidence:
        number = self._session.generation
        mine = [one for one in self._members() if one.generation == number]
        failures = self._failures(mine)
        over = {one.node: one.code for one in mine if one.state == "ended" and one.code}
        lost = {node: self._lost(node) for node in self._places if node is not None and self._lost(node)} | self._left
        return Evidence(
            world_size=self._settings.world_size,
            marks=self._marks,
            hits=findings.incidents_of(self._run_files, self.id, number, failures),
            failures=tuple(failures),
            arrival=self._arrival,
            agents=over,
            lost=lost,
            hang=self._hang,
            stopping=self._stopping,
            port_taken=any(one.port_taken for one in mine),
            trained=any(int(step) >= 0 for one in mine for step, *_ in one.progress.values()),
        )

    def _punish(self, blamed: Blame) -> None:
        for sentence in findings.punish(self._run_files, blamed):
            self.events("quarantine", sentence)
        for remark in filter(None, (blamed.remark, blamed.doubt)):
            self.events("remark", remark)

    def _note(self, what: str, reason: str, nodes: Sequence[str] = ()) -> None:
        """Beside the incidents that are being dealt with, and in the summary: what came of them."""
        findings.note(self._run_files, self._hits, what, reason=reason, supervision=self.id, nodes=list(nodes))
        for hit in self._hits if nodes else ():
            named = [{"rank": one.rank, "node": one.node, "device": one.device} for one in hit.named]
            excluded, status = list(self._next.exclude), hit.verdict.status
            self._recoveries.append(
                {"incident": hit.id, "status": status, "named": named, "excluded": excluded, "nodes": list(nodes)}
            )
        self._hits = ()

    def _settle_old(self) -> None:
        """What an earlier supervisor knew of a bad device and could not write any more."""
        hits = findings.unsettled(self._run_files, self.id)
        if not hits:
            return
        before = findings.named_before(self._run_files, hits)
        blamed = blame(hits, findings.strikes_within(self._run_files, self._settings), self._settings, before)
        for hit in hits:
            self.events(
                "unsettled", f"an earlier run ended before it could act on {hit.path}: {hit.verdict.headline()}"
            )
        self._punish(blamed)
        findings.note(self._run_files, hits, "settled at the next start", supervision=self.id)

    def _enter(self, phase: Phase) -> None:
        self._phase, self._phase_since = phase, self._clock()
        self._news_at = self._waiting_told = self._phase_since

    def _kind(self, kind: str) -> str:
        return "stopped" if self._stopping and kind not in ("finished", "corruption") else kind

    def _conclude(self, exit_code: int, outcome: str, reason: str) -> None:
        incidents = [hit.path for hit in self._hits if hit.path]
        self._note("stopped", reason)
        seconds = round(self._clock() - self._began, 1)
        summary: Mapping[str, Any] = {
            "exit_code": exit_code,
            "outcome": outcome,
            "reason": reason,
            "session": self.id,
            "run_dir": str(self._settings.run_dir),
            "generations": self._session.generation,
            "incidents": incidents,
            "recoveries": self._recoveries,
            "restarts": self._past.restarts,
            "nodes": [node for node in self._places if node is not None],
            "seconds": seconds,
        }
        self._ending = Stop(exit_code, outcome, reason, summary)
        self._end(self._ending)

    def _end(self, stop: Stop) -> None:
        """May be tried again, where the disk refuses."""
        self._files.write_stop(self.id, stop)
        text = f"{stop.outcome} (exit code {stop.exit_code}): {stop.reason}"
        self.events("ended", text, exit_code=stop.exit_code, outcome=stop.outcome)
        self._session = replace(self._session, ended=True)
        self._stop = stop

    def _speak(self, force: bool = False) -> None:
        now = self._clock()
        if not (force or self._session != self._spoken or now - self._spoke_at >= self._settings.beat):
            return
        self._session = replace(self._session, beat=self._session.beat + 1)
        self._files.write_session(self._session)
        self._spoken, self._spoke_at = self._session, now


def wait_for_vacancy(settings: Settings, sleep: Callable[[float], None] = time.sleep) -> None:
    """Make sure that nobody else leads in this run directory. What a dead leader left delays nobody on its own host.

    Raises:
        ConfigurationError: somebody does.
    """
    files = SupervisionFiles(settings.run_dir)
    first = files.read_session()
    if first is None or first.ended or (first.host == socket.gethostname() and started(first.pid) is None):
        return
    deadline = time.monotonic() + 3.5 * settings.beat
    while time.monotonic() < deadline:
        sleep(min(0.1, settings.beat))
        now = files.read_session()
        if now is not None and not now.ended and (now.id != first.id or now.beat > first.beat):
            raise ConfigurationError(
                f"another `bitwitness run` (process {now.pid} on {now.host}) is at work in {settings.run_dir}: stop it, or give "
                "another --run-dir"
            )
