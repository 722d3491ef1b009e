"""The loop that carries incidents through: pick up, decide, hold or act, look, tell.

One round does a bit of everything and leaves the database in a state from which any other process can go on. What is wrong
with one run, one node or one message is said once and stops nothing else; only a database that cannot be written stops
everything, because nothing is done that is not noted first.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from bitwitness.errors import BitwitnessError, ConfigurationError, StorageBusy
from bitwitness.fleet.acting import DAMAGE, Actor
from bitwitness.fleet.budget import Hold
from bitwitness.fleet.checked import check_incident
from bitwitness.fleet.clusters.base import Cluster, Troubled
from bitwitness.fleet.decision import Naming, Proposal, namings_of, propose
from bitwitness.fleet.following import Follower
from bitwitness.fleet.identity import Return, Sighting, returned, sightings_in, sightings_of, slices_of, words_of
from bitwitness.fleet.keeping import Keeper
from bitwitness.fleet.kept import RETURNED, Book, Cleared, Kept, Known
from bitwitness.fleet.notify import Notifier
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.patience import Patience, Patient
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.publishing import Publisher
from bitwitness.fleet.reconsidering import Reconsiderer, later_look
from bitwitness.fleet.requeueing import Requeuer
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import ReadSignals, Runs, SignalReader, Stamp, Trouble, stamp_of
from bitwitness.runfiles import Incident, RunFiles, read_incident

logger = logging.getLogger(__name__)

BATCH = 100
"""Incidents that are picked up in one round: acts must not wait for the last of a storm."""
_LONGEST_WAIT = 60.0
_OF_BUDGET = ("nodes-per-hour", "cluster-share", "quiet-hours")


class Controller:
    """Carries incidents through.

    Args:
        runs: directories of runs.
        state: where everything is noted.
        cluster: on which is acted.
        policy: when and how much.
        parents: folders of runs; new ones are picked up as they come.
        inbox: a folder of runs that came over the network.
        notifiers: who is told; something else has to deliver (`outbox.Deliverer`, or `outbox.deliver`).
        publish: a folder on shared storage into which the list of condemned devices is written too.
        read_signals: what the hardware says around an incident; default: as the policy says.
        own: whether the runs are locked against other controllers; False in a rehearsal, which writes nothing to them.
    """

    def __init__(
        self,
        runs: Sequence[Path],
        state: State,
        cluster: Cluster,
        policy: FleetPolicy,
        *,
        parents: Sequence[Path] = (),
        inbox: Path | None = None,
        notifiers: Sequence[Notifier] = (),
        publish: Path | None = None,
        read_signals: ReadSignals | None = None,
        own: bool = True,
    ) -> None:
        self.state, self.cluster, self.policy, self.book = state, cluster, policy, Book(state)
        folders = (*parents, *([inbox] if inbox is not None else []))
        self._runs = Runs(runs, folders, own=own, must_own=policy.act)
        self._signals = read_signals or SignalReader(policy)
        self._outbox = Outbox(state, [one.name for one in notifiers])
        self._teller = Teller(self.book, self._outbox, policy.owner, touching=own)
        process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._patience = Patience(state.clock)
        self._actor = Actor(self.book, cluster, policy, self._teller, process, self._patience)
        self._follower = Follower(self.book, Patient(cluster, self._patience))
        self._keeper = Keeper(self.book, Patient(cluster, self._patience))
        self._requeuer = Requeuer(self.book, cluster, policy, self._teller, self._patience)
        self._reconsiderer = Reconsiderer(self.book, policy, self._teller, self._signals)
        self._known: set[str] = set()
        self._twins: dict[Path, str] = {}
        self._history: list[Naming] = []
        self._cleared: list[Cleared] = []
        self._damaged: dict[Path, Stamp | None] = {}
        self._seen_runs: dict[Path, Stamp | None] = {}
        self._sightings: dict[Path, list[Sighting] | Trouble] = {}
        self._publisher = Publisher(state.folder, publish)
        self.backlog = False
        self._started()

    def _started(self) -> None:
        mode = "act" if self.policy.act else "observe"
        with self.state.change():
            self._outbox.forget_strangers()
            self.state.note("started", f"a controller on {socket.gethostname()}, pid {os.getpid()}, mode {mode}")
            self.state.set_about(
                mode=mode,
                cluster=self.cluster.name,
                started=self.state.stamp(),
                pid=str(os.getpid()),
                host=socket.gethostname(),
                stopped="",
                nodes_per_hour=str(self.policy.nodes_per_hour),
                cluster_share=str(self.policy.cluster_share),
                owner=self.policy.owner,
            )

    # The loop ---------------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event, every: float = 2.0, after: Callable[[Controller], None] | None = None) -> None:
        """Round after round until it is told to stop.

        Args:
            stop: set by whoever wants it to stop; the round that is under way is ended.
            every: seconds between two rounds.
            after: called after each round.

        Raises:
            RunFilesError: the database is damaged or gone. One that only cannot be written for now is waited for, loudly.
        """
        failures = 0
        self._patience.told_to_stop = stop.is_set
        while not stop.is_set():
            try:
                self.round()
                failures = 0
                if after is not None:
                    after(self)
            except StorageBusy as error:
                failures += 1
                logger.error("this round could not be noted, and is tried again: %s", error)  # noqa: TRY400 - it says all there is
            wait = min(_LONGEST_WAIT, every * float(1 << min(failures, 6)))
            stop.wait(0.0 if self.backlog and not failures else wait)
        self.stopped()

    def stopped(self) -> None:
        """Note that it ends because it was told to."""
        with self.state.change():
            self.state.note("stopped", f"the controller on {socket.gethostname()}, pid {os.getpid()}, as it was told")
            self.state.set_about(stopped=self.state.stamp())

    def close(self) -> None:
        """Give up the runs."""
        self._runs.release()

    def round(self) -> None:
        """One pass.

        Raises:
            RunFilesError: the database cannot be read or written.
        """
        began = self.state.clock.ticks()
        self.state.check()
        self._patience.renew()
        self._actor.forget_census()
        self._actor.settle()
        files, troubles = self._runs.now()
        troubles += self._pick_up(files)
        troubles += self._look_for_returns(files)
        self._act()
        self._requeuer.round()
        troubles += self._follower.round()
        troubles += self._keeper.round()
        troubles += self._publisher.round(self.book.condemned())
        self._reconsiderer.round()
        if isinstance(self.cluster, Troubled):
            troubles += [Trouble(f"cluster:{key}", text) for key, text in self.cluster.troubles().items()]
        self._say(troubles)
        with self.state.change():
            took = self.state.clock.ticks() - began
            self.state.set_about(round=self.state.stamp(), round_seconds=f"{took:.3f}")

    def _say(self, troubles: Sequence[Trouble]) -> None:
        """Say what is wrong, once, and that it is over."""
        now = {one.key: one.text for one in troubles}
        severities = {one.key: one.severity for one in troubles}
        before = {key: text for key, (text, _) in self.state.said().items() if not key.startswith("told:")}
        fresh = {key: text for key, text in now.items() if before.get(key) != text}
        over = before.keys() - now.keys()
        if not fresh and not over:
            return
        with self.state.change():
            for key, text in fresh.items():
                logger.warning("%s", text)
                self.state.say_once(key, text)
                self.state.note("trouble", text)
                self._teller.trouble(key, severities[key], f"bitwitness: {text}", text)
            for key in over:
                self.state.unsay(key)
                self.state.note("over", before[key])

    # Incidents --------------------------------------------------------------------------------------------------------

    def _pick_up(self, files: Sequence[RunFiles]) -> list[Trouble]:
        """Read what is new, decide, and note both together; what is wrong with others."""
        if not self._known:
            self._known = self.book.known()
        troubles: list[Trouble] = []
        new: dict[str, tuple[Path, RunFiles]] = {}
        for run in files:
            try:
                for path in run.incidents():
                    if path.name not in self._known:
                        new.setdefault(path.name, (path, run))
                    elif path not in self._twins:
                        self._twins[path] = self._twin(path)
            except (BitwitnessError, OSError) as error:
                troubles.append(
                    Trouble(f"incidents:{run.path}", f"the incidents of {run.path} cannot be read: {error}")
                )
        troubles += [Trouble(f"twin:{path}", text) for path, text in self._twins.items() if text and path.is_dir()]
        if new:
            self._remember()
        taken, said = 0, self.state.said("damaged:")
        for name in sorted(new):
            path, run = new[name]
            key = f"damaged:{path}"
            if taken < BATCH:
                trouble = self._take(path, run)
            elif key in said:  # as far as anybody knows; it is read in its turn
                trouble = Trouble(key, said[key][0])
            else:
                continue
            if trouble is None:
                taken += 1
            else:
                troubles.append(trouble)
        self.backlog = len(new) - len([one for one in troubles if one.key.startswith("damaged:")]) > taken
        return troubles

    def _twin(self, path: Path) -> str:
        """What is wrong where an incident was picked up elsewhere under the same id; "" if it is the same."""
        known = self.book.incident(path.name)
        if known is None or known.path == path:
            return ""
        try:
            other = read_incident(path)
            same = (other.verdict.headline(), str(other.record.get("time", ""))) == (known.headline, known.time)
        except (BitwitnessError, OSError, *DAMAGE):
            same = False
        return (
            ""
            if same
            else f"{path} has the id of another incident, {known.path}: nothing is done about it; a person must look"
        )

    def _remember(self) -> None:
        """What counts against whom, anew: a person may have cleared some of it."""
        self._history, self._cleared = self.book.namings(), self.book.clears()

    def _take(self, path: Path, run: RunFiles) -> Trouble | None:
        """Pick up one incident; what is wrong with it, if it cannot be read. One that is damaged is read again once it changes."""
        key, stamp = f"damaged:{path}", stamp_of(path / "incident.json")
        said = self.state.said(key).get(key)
        if said is not None and path in self._damaged and self._damaged[path] == stamp:
            return Trouble(key, said[0])
        try:
            incident = read_incident(path)
            check_incident(incident.record, self.state.clock.now())
            if incident.record["id"] != path.name:
                raise ConfigurationError(f"it calls itself {incident.record['id']}: was the folder renamed or copied?")
            namings = namings_of(incident, str(run.path))
        except (BitwitnessError, OSError, *DAMAGE) as error:
            self._damaged[path] = stamp
            return Trouble(key, f"incident {path} cannot be read, and nothing is done about it: {error}")
        self._damaged.pop(path, None)
        self._decide(incident, run, namings)
        return None

    def _decide(self, incident: Incident, run: RunFiles, namings: Sequence[Naming]) -> None:
        name, verdict = incident.path.name, incident.verdict
        heard = self._hear(incident) if namings else ()
        proposals = self._proposals(incident, run, namings, heard)
        known = Known(
            name,
            str(run.path),
            incident.path,
            verdict.status,
            verdict.headline(),
            str(incident.record.get("scheduler_job") or ""),
            str(incident.record.get("time", "")),
        )
        with self.state.change():
            if (
                self.book.clears() != self._cleared
            ):  # while it was being decided; nobody is acted upon for what was forgotten
                self._remember()
                proposals = self._proposals(incident, run, namings, heard)
            answered = [one for one in namings if any(clear.answers(one) for clear in self._cleared)]
            later = later_look(known, heard, self.state.clock.now(), self.policy) if namings else None
            self.book.add_incident(known, later)
            self.book.add_namings(namings, answered)
            self.book.add_serials(_serials(heard))
            self.book.add_aliases(_aliases(heard))
            self.state.note("incident", f"{verdict.headline()} in {run.path}", incident=name)
            for number, proposal in enumerate(proposals):
                self._propose(self._unless_answered(proposal, namings), number)
            self._tell_returns(self._returns_in(incident, known, namings))
        self._known.add(name)
        self._history += [one for one in namings if one not in answered]

    def _hear(self, incident: Incident) -> Sequence[Signal]:
        """What the hardware says around an incident."""
        try:
            return self._signals(incident)
        except (BitwitnessError, OSError, *DAMAGE):
            logger.exception("the signals around %s", incident.path)
            return ()

    def _proposals(
        self, incident: Incident, run: RunFiles, namings: Sequence[Naming], heard: Sequence[Signal]
    ) -> tuple[Proposal, ...]:
        """What to do about it; where that cannot be said, that a person must."""
        try:
            return propose(incident, str(run.path), heard, [*self._history, *namings], self.policy)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.exception("incident %s", incident.path)
            text = f"nothing can be decided about it ({error!r:.200}): a person must look"
            return (Proposal(incident.path.name, "", (), "contact", None, "low", text),)

    def _unless_answered(self, proposal: Proposal, namings: Sequence[Naming]) -> Proposal:
        """The proposal, but where a person has returned the node, or all of its devices, since: they have answered it."""
        mine = [one for one in namings if one.node == proposal.node and one.device in proposal.devices]
        by = [next((clear for clear in reversed(self._cleared) if clear.answers(one)), None) for one in mine]
        if not mine or proposal.action in ("none", "contact") or None in by:
            return proposal
        last = max((one for one in by if one is not None), key=lambda one: one.time)
        what = last.device or last.node
        text = f"found before {what} was returned to service at {last.time} by {last.who}, so nothing is done ({proposal.action}: {proposal.reason})"
        return replace(proposal, action="contact", act=None, reason=text)

    def _propose(self, proposal: Proposal, number: int) -> None:
        """Note a proposal, inside `State.change`; where nothing is to be done, that is its end, and is told."""
        self.book.add_proposal(proposal, number)
        record = {"action": proposal.action, "act": proposal.act, "confidence": proposal.confidence}
        self.state.note("proposed", proposal.reason, incident=proposal.incident, node=proposal.node, record=record)
        if proposal.act is None and proposal.action != "none":
            kept = self.book.proposals(incident=proposal.incident)[-1]
            self._teller.ending(kept, "nothing", proposal.reason)

    # Devices that come back -------------------------------------------------------------------------------------------

    def _look_for_returns(self, files: Sequence[RunFiles]) -> list[Trouble]:
        """Compare the devices of every start of a run with those that were taken out; which starts cannot be read."""
        for run in files:
            stamp = stamp_of(run.path / "run.json")
            if run.path not in self._seen_runs or self._seen_runs[run.path] != stamp:
                try:
                    self._sightings[run.path] = sightings_of(run)
                except (BitwitnessError, OSError) as error:
                    self._sightings[run.path] = Trouble(f"start:{run.path}", str(error))
                self._seen_runs[run.path] = stamp
        each = [self._sightings[run.path] for run in files]
        seen = [one for some in each if not isinstance(some, Trouble) for one in some]
        told = {(one["device"], one["incident"], one["node"], one["since"]) for one in self.book.returns()}
        new = [
            back
            for back in self._returned(seen)
            if (back.condemned.device, back.condemned.incident, back.sighting.node, back.condemned.time) not in told
        ]
        if new:
            with self.state.change():
                self._tell_returns(new)
        return [one for one in each if isinstance(one, Trouble)]

    def _returned(self, seen: Sequence[Sighting]) -> list[Return]:
        condemned = self.book.condemned()
        if not condemned or not seen:
            return []
        kin = self.book.kin()
        return returned(condemned, [replace(one, aliases=kin(one.device)) for one in seen])

    def _returns_in(self, incident: Incident, known: Known, namings: Sequence[Naming]) -> list[Return]:
        """Devices that were taken out and that the job of an incident had: one that came over the network has no start to be read.

        In the node that they were taken out of, a job that was there before may still run: there an incident of the same run
        or job is no proof that they came back, and of a run that tells its starts these are the proof.
        """
        try:
            time = namings[0].time if namings else known.time
            found = self._returned(sightings_in(incident, time)) if datetime.fromisoformat(time).tzinfo else []
        except (*DAMAGE, BitwitnessError):
            return []
        return [one for one in found if not self._may_be_there_still(one, known)]

    def _may_be_there_still(self, back: Return, known: Known) -> bool:
        was = self.book.incident(back.condemned.incident)
        same = was is not None and (was.run == known.run or (bool(known.job) and was.job == known.job))
        told = (Path(known.run) / "run.json").exists()
        return back.condemned.node == back.sighting.node and (same or told)

    def _tell_returns(self, found: Sequence[Return]) -> None:
        """Say loudly, and propose, inside `State.change`; once each, and only of what nobody has cleared meanwhile."""
        still = {(one.device, one.incident, one.time) for one in self.book.condemned()} if found else set()
        for back in found:
            if (back.condemned.device, back.condemned.incident, back.condemned.time) not in still:
                continue
            if not self.book.add_return(back):
                continue
            was, now = back.condemned, back.sighting
            logger.critical("%s", back.text)
            record = {"device": was.device, "was": was.node}
            self.state.note("returned", back.text, incident=was.incident, node=now.node, record=record)
            self._teller.back(back)
            number = max(RETURNED, *(one.number + 1 for one in self.book.proposals(incident=was.incident)))
            devices = (now.device or was.device,)
            self._propose(Proposal(was.incident, now.node, devices, "drain", "drain", "high", back.text), number)

    # Acts -------------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Every proposal that waits: hold it, or do it. The surest come first, then the oldest."""
        waiting = self.book.proposals(statuses=("proposed", "observed", "held"), pending=True)
        sure = ("high", "medium", "low")
        held: list[tuple[Kept, Hold]] = []
        for kept in sorted(waiting, key=lambda one: (sure.index(one.proposal.confidence), one.key)):
            if kept.hold == "cluster" and kept.attempts and not self._actor.is_due(kept):
                continue
            why = self._actor.hold(kept)
            if why is None and self._patience.over:
                continue  # in the next round
            if why is None:
                self._actor.act(kept)
            elif not (why.why in _OF_BUDGET and self._actor.is_out_already(kept)):
                held.append((kept, why))
        if held:
            with self.state.change():
                for kept, why in held:
                    self._actor.note_hold(kept, why)


def _serials(signals: Sequence[Signal]) -> dict[str, str]:
    """Serial numbers of devices, from signals that tell which device is where."""
    told = {one.device: words_of(one.evidence).get("serial", "") for one in signals if one.code == IDENTITY}
    return {device: serial for device, serial in told.items() if device and serial}


def _aliases(signals: Sequence[Signal]) -> dict[str, str]:
    """Which slice is of which device, from the same."""
    told = [one for one in signals if one.code == IDENTITY and one.device]
    return {alias: one.device for one in told for alias in slices_of(one.evidence)}
