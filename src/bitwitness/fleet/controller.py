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
from pathlib import Path

from bitwitness.errors import ClusterError, StorageBusy
from bitwitness.fleet.acting import Actor
from bitwitness.fleet.budget import Hold
from bitwitness.fleet.clusters.base import Cluster, Finishing, Led, Recalling, Troubled
from bitwitness.fleet.finishing import Finisher
from bitwitness.fleet.following import Follower
from bitwitness.fleet.judgements import Judges
from bitwitness.fleet.keeping import Keeper
from bitwitness.fleet.kept import Book, Kept
from bitwitness.fleet.notify import Notifier
from bitwitness.fleet.outbox import Outbox
from bitwitness.fleet.patience import Patience, Patient
from bitwitness.fleet.picking import Picker
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.publishing import Publisher
from bitwitness.fleet.reconsidering import Reconsiderer
from bitwitness.fleet.requeueing import Requeuer
from bitwitness.fleet.returning import Returns
from bitwitness.fleet.state import State
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import ReadSignals, Runs, SignalReader, Trouble

logger = logging.getLogger(__name__)

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
        self._judges = Judges(self.book, policy, self._teller)
        self._actor = Actor(self.book, cluster, policy, self._teller, process, self._judges, self._patience)
        recall = cluster.recall if isinstance(cluster, Recalling) else None
        self._follower = Follower(self.book, Patient(cluster, self._patience), recall)
        rest = cluster if isinstance(cluster, Finishing) else None
        self._finisher = Finisher(self.book, Patient(cluster, self._patience), rest, policy, self._teller)
        self._keeper = Keeper(self.book, Patient(cluster, self._patience))
        self._requeuer = Requeuer(self.book, cluster, policy, self._teller, self._patience)
        self._reconsiderer = Reconsiderer(self.book, policy, self._teller, self._signals)
        self._returns = Returns(self.book, self._teller)
        self._picker = Picker(self.book, policy, self._teller, self._returns, self._judges, self._signals)
        self._publisher = Publisher(state.folder, publish)
        self._led_by, self._lead_error = "", ""
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
                leader="",
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

    @property
    def backlog(self) -> bool:
        """Whether the next round has more incidents to pick up already."""
        return self._picker.backlog

    @property
    def led_by(self) -> str:
        """Which other controller leads, as far as is known; "" where this one acts."""
        return self._led_by

    def close(self) -> None:
        """Give up the runs, and the lead."""
        self._runs.release()
        if isinstance(self.cluster, Led):
            self.cluster.resign()

    def round(self) -> None:
        """One pass.

        Raises:
            RunFilesError: the database cannot be read or written.
        """
        began = self.state.clock.ticks()
        self.state.check()
        self._patience.renew()
        if leader := self._leader():
            self._stand_by(leader, began)
            return
        self._actor.renew()
        self._actor.settle()
        files, troubles = self._runs.now()
        troubles += self._judges.round()
        troubles += self._picker.round(files)
        troubles += self._returns.round(files)
        self._act()
        self._requeuer.round()
        troubles += self._follower.round()
        troubles += self._finisher.round()
        troubles += self._keeper.round()
        troubles += self._publisher.round(self.book.condemned())
        self._reconsiderer.round()
        troubles += [Trouble("cluster:lead", self._lead_error)] if self._lead_error else []
        if isinstance(self.cluster, Troubled):
            troubles += [Trouble(f"cluster:{key}", text) for key, text in self.cluster.troubles().items()]
        self._say(troubles)
        self._has_ended(began)

    def _has_ended(self, began: float, leader: str = "") -> None:
        with self.state.change():
            took = self.state.clock.ticks() - began
            self.state.set_about(round=self.state.stamp(), round_seconds=f"{took:.3f}", leader=leader)

    def _leader(self) -> str:
        """Which other controller leads on this cluster; "" where none does.

        Where the cluster cannot be asked it is as it was: who leads picks up and tells, which needs no cluster, while an act would be
        refused; who stands by would tell everything a second time.
        """
        if not self.policy.act or not isinstance(self.cluster, Led):
            return ""
        try:
            self._led_by, self._lead_error = self._patience.ask(self.cluster.leader), ""
        except (ClusterError, OSError) as error:
            self._lead_error = f"who leads cannot be told, so nothing is done to a node: {error}"
        return self._led_by

    def _stand_by(self, leader: str, began: float) -> None:
        """Do nothing, and be there when the other one ends: what is found is on its list as well."""
        if self.state.about().get("leader", "") != leader:
            with self.state.change():
                self.state.note("stands by", f"{leader} leads on this cluster: nothing is done here until it ends")
        self._has_ended(began, leader)

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

    # Acts -------------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Every proposal that waits: hold it, or do it. The surest come first, then the oldest."""
        waiting = self.book.proposals(statuses=("proposed", "observed", "held"), pending=True)
        sure = ("high", "medium", "low")
        held: list[tuple[Kept, Hold]] = []
        for kept in sorted(waiting, key=lambda one: (sure.index(one.proposal.confidence), one.key)):
            if kept.hold == "cluster" and kept.attempts and not self._actor.is_due(kept):
                continue
            why = self._actor.holder.hold(kept)
            if why is None or why.why in _OF_BUDGET:
                why = self._actor.approver.hold(kept) or why
            if why is None and self._patience.over:
                continue  # in the next round
            if why is None:
                self._actor.act(kept)
            elif why.why in (*_OF_BUDGET, "approval") and self._actor.is_out_already(kept):
                continue
            elif not (why.why in _OF_BUDGET and self._actor.asks_early(kept)):
                held.append((kept, why))
        if held:
            with self.state.change():
                for kept, why in held:
                    self._actor.note_hold(kept, why)
