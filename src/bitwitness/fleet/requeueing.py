"""A job that ended because of an incident is started again, once its named nodes are out of service.

Whether that has happened is told by how often the cluster says that the job was started again, so a controller that is killed
between the call and its note does not do it twice. A job that goes on by itself, as under `bitwitness run`, is left alone.
Several incidents of one job are looked after together: it is started again once, without the nodes of all of them.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Cluster, JobState
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.holding import OUT
from bitwitness.fleet.kept import RETURNED, Book, Requeue
from bitwitness.fleet.notify import Severity
from bitwitness.fleet.patience import Patience
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.telling import Teller

logger = logging.getLogger(__name__)

RETRYABLE = 160
"""With which a job ends because of corruption that names somebody (DESIGN section 5)."""
_SETTLED = 300.0
"""Seconds after which a job that runs without a node is taken for one that goes on: ending it takes up to 150 of them."""
_SOON, _REFUSED = timedelta(seconds=5), timedelta(seconds=60)


class Requeuer:
    """Starts jobs again.

    Args:
        book: what is kept.
        cluster: that has the jobs.
        policy: whether, and within which time.
        teller: tells people.
        patience: how long a round may wait for the cluster.
    """

    def __init__(
        self, book: Book, cluster: Cluster, policy: FleetPolicy, teller: Teller, patience: Patience | None = None
    ) -> None:
        self._teller, self._patience = teller, patience or Patience(book.state.clock)
        self._book, self._cluster, self._policy, self._state = book, cluster, policy, book.state
        self._without: dict[str, float] = {}

    def round(self) -> None:
        """Look after every job that waits."""
        for row in self._book.requeues():
            if self._patience.over:
                return  # the rest in the next round
            now = self._state.clock.now()
            if row.due is not None and now < row.due <= now + _REFUSED:
                continue
            try:
                self._look_after(row)
            except ConfigurationError as error:
                self._end(row, "given up", str(error))
            except (ClusterError, OSError, *DAMAGE) as error:
                with self._state.change():
                    if str(error) != row.why:
                        self._note(row, "requeue refused", str(error))
                    self._book.set_requeue(row.incident, why=str(error), due=now + _REFUSED)

    def _look_after(self, row: Requeue) -> None:
        nodes = self._nodes(row)
        if nodes is None:
            return
        job = self._patience.ask(self._cluster.job, row.job)
        if row.restarts is None:
            with self._state.change():
                self._book.set_requeue(row.incident, restarts=job.restarts)
        elif (job.restarts > row.restarts and (job.state != "ended" or job.requeueable)) or (
            row.started and job.state in ("pending", "running")
        ):
            self._complete(row, job)
            return
        if job.state == "absent":
            self._end(row, "given up", f"the cluster knows job {row.job} no more: start it again by hand")
        elif self._runs_on(row, job, nodes):
            self._end(row, "done", f"job {row.job} runs on without {', '.join(nodes)}: {job.raw or job.state}")
        elif job.state != "ended":
            is_held = job.held or "held" in job.raw.lower()
            held = ", held by a person" if is_held else ": it goes on by itself, or ends soon"
            self._wait(row, f"job {row.job} is {job.state}{held}")
        elif "CANCEL" in job.raw.upper():
            self._end(row, "given up", f"job {row.job} was cancelled, so it is not started again")
        elif job.exit_code == 0:
            self._end(
                row, "ended", f"job {row.job} has come to its end by itself, with 0: nothing is left to be started"
            )
        elif job.exit_code != RETRYABLE:
            code = "an exit code that the cluster does not tell" if job.exit_code is None else str(job.exit_code)
            self._end(row, "given up", f"job {row.job} ended with {code}, not with {RETRYABLE}: a person must look")
        elif job.nodes and not set(job.nodes) & set(nodes):
            where = f"it ran on {', '.join(job.nodes)}, and not on {', '.join(nodes)}"
            self._end(row, "given up", f"job {row.job} is not the one of this incident: {where}")
        elif not job.requeueable:
            self._end(row, "given up", f"the cluster starts job {row.job} no second time ({job.raw}): submit it again")
        elif self._policy.act:
            self._start(row, job, nodes)

    def _runs_on(self, row: Requeue, job: JobState, nodes: tuple[str, ...]) -> bool:
        """Whether a job has gone on by itself, as where jobs restart by their own policy: it may have done so before anybody counted.

        Not at once: while its ranks end one after the other, it seems to run without the one that has ended first.
        """
        now = self._state.clock.ticks()
        if job.state != "running" or not job.nodes or set(job.nodes) & set(nodes):
            self._without.pop(row.incident, None)
            return False
        return now - self._without.setdefault(row.incident, now) >= _SETTLED

    def _complete(self, row: Requeue, job: JobState) -> None:
        """It was started again; what an earlier process of ours had begun and left, such as a hold, is brought to its end."""
        left = self._cluster.plan_requeue(job, row.nodes) if row.started and job.state == "pending" else ()
        if left:
            with self._state.change():
                self._note(row, "requeue", f"job {row.job}, which was cut short", calls=[str(call) for call in left])
            for call in left:
                self._patience.ask(self._cluster.carry_out, call)
        self._end(row, "done", f"job {row.job} was started again: {job.raw or job.state}")

    def _nodes(self, row: Requeue) -> tuple[str, ...] | None:
        """The nodes of all incidents of the job since it was last looked after, all of which are out; None while that is not so."""
        names = {row.incident: None} | dict.fromkeys(
            one.id for one in self._book.incidents_of(f"{self._cluster.scheduler}:{row.job}")
        )
        found = [one for name in names for one in self._book.proposals(incident=name)]
        kept = [one for one in found if one.proposal.act is not None and one.number < RETURNED]
        shown = self._state.said(OUT)  # out of service, while a reboot or replacement of it is still to be seen
        if any(not one.final and f"{OUT}{one.key}" not in shown for one in kept):
            self._wait(row, "not all named nodes are out of service yet")
            return None
        out = ("done", "already out", "cleared")
        left = [
            one.proposal.node
            for one in kept
            if one.status not in out and one.hold != "not-ours" and f"{OUT}{one.key}" not in shown
        ]
        if left:
            self._end(row, "given up", f"{', '.join(left)} stays in service, so job {row.job} would start there again")
            return None
        nodes = tuple(dict.fromkeys(one.proposal.node for one in kept if one.status != "cleared"))
        if not nodes:
            text = f"a person has returned its nodes to service: start job {row.job} again by hand, if that is right"
            self._end(row, "given up", text)
        return nodes or None

    def _start(self, row: Requeue, job: JobState, nodes: tuple[str, ...]) -> None:
        calls = self._cluster.plan_requeue(job, nodes)
        if not calls:
            self._end(row, "given up", f"a {self._cluster.name} cluster starts no job again")
            return
        with self._state.change():
            # If this process dies now, the next one waits for the cluster to show what this one may have done.
            due = self._state.clock.now() + _REFUSED
            self._book.set_requeue(row.incident, nodes=nodes, started=row.started + 1, due=due)
            self._note(row, "requeue", f"job {row.job} without {', '.join(nodes)}", calls=[str(call) for call in calls])
        for call in calls:
            self._patience.ask(self._cluster.carry_out, call)
        now = self._patience.ask(self._cluster.job, row.job)
        if now.restarts > job.restarts or now.state in ("pending", "running"):
            self._end(
                row, "done", f"job {row.job} was started again without {', '.join(nodes)}: {now.raw or now.state}"
            )

    def _wait(self, row: Requeue, why: str) -> None:
        now = self._state.clock.now()
        if now - row.made > self._policy.act_within:
            self._end(row, "given up", f"{why}, and that for too long")
            return
        with self._state.change():
            self._book.set_requeue(row.incident, why=why, due=now + _SOON)

    def _end(self, row: Requeue, status: str, why: str) -> None:
        with self._state.change():
            self._book.set_requeue(row.incident, status=status, why=why, ended=self._state.clock.now())
            self._note(row, "requeued" if status == "done" else "not requeued", why)
            severity: Severity = "warning" if status == "given up" else "info"
            what = {"done": "was started again", "ended": "has come to its end"}.get(status, "is NOT started again")
            self._teller.trouble(f"job/{row.job}/{row.incident}", severity, f"bitwitness: job {row.job} {what}", why)

    def _note(self, row: Requeue, what: str, text: str, **record: object) -> None:
        self._state.note(what, text, incident=row.incident, record={"job": row.job, **record})
