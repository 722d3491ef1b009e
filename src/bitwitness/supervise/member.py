"""The wrapper of one node: it joins a session, starts one agent a generation, watches it, and stops it.

It decides nothing about the job. It answers what the leader asks, and sees to it that nothing of the job outlives it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TextIO

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import Generation, Mark, Member, MemberState, Session, Stop, SupervisionFiles
from bitwitness.supervise.decisions import LOST, Failure, stop_code
from bitwitness.supervise.events import Show, tell
from bitwitness.supervise.identity import Identity, free_port
from bitwitness.supervise.launch import AgentRun
from bitwitness.supervise.scratch import Scratch
from bitwitness.supervise.settings import Settings

logger = logging.getLogger(__name__)

_EXIT_PATIENCE = 10.0
"""Seconds for agents whose workers have all finished to say good-bye to one another."""


class LeaderLost(BitwitnessError):
    """No leader came, or it went and none came back."""

    exit_code = LOST


class NodeMember:
    """One node's part in a supervised run. `tick` is called again and again; it never waits.

    Args:
        identity: who this node is.
        echo: where to pass on what the agent prints.
        show: told of events of this node.
        session: id of the session to join without further proof, from whoever started both.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        echo: tuple[TextIO, TextIO],
        show: Show,
        session: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._identity, self._echo, self._show, self._clock = settings, identity, echo, show, clock
        self._files, self._run_files = SupervisionFiles(settings.run_dir), RunFiles(settings.run_dir)
        self._trusted = session
        self._session = ""
        self._heard: tuple[str, int] = ("", -1)  # the session's id and beat as last seen
        self._heard_at = self._since = clock()
        self._waited_at = clock()
        self._rival: tuple[str, int, float] | None = None
        self._said = Member(identity.node, secrets.token_hex(4), socket.gethostname(), os.getpid())
        self._spoken: Member | None = None
        self._spoke_at = 0.0
        self._run: AgentRun | None = None
        self._marks: dict[int, Mark] = {}
        self._signal, self._signal_at = "", 0.0
        self._leaving = False
        self._ended_at: float | None = None

    def tick(self) -> Stop | None:
        """Look and act once; how the session ended, once it has and nothing of it is left here.

        Raises:
            LeaderLost: there is no leader.
            ConfigurationError: this wrapper was started with something else than the leader, or twice.
            RunFilesError: the run directory cannot be written.
        """
        if self._run is not None:
            self._run.look()
        session = self._hear()
        if self._leaving:
            self._leave()
            return None
        if not self._session:
            return self._join(session)
        if session is not None and session.id != self._session:
            self._start_leaving("another leader has taken over: stopping to join it")
            return None
        if self._clock() - self._heard_at > self._settings.lost_after and not self._settings.local:
            silent = self._clock() - self._heard_at
            self._start_leaving(
                f"nothing heard of the leader for {silent:.0f} s: stopping", f"the leader was silent for {silent:.0f} s"
            )
            return None
        if self._signal and self._left_alone():
            return Stop(stop_code(self._signal), "stopped", f"stopped by {self._signal}")
        if session is not None and session.ended:
            return self._finish()
        if session is not None:
            self._follow(session)
        self._speak()
        return None

    def stop(self, name: str, kill: bool = False) -> None:
        """Take note of a signal: this node's workers are asked to stop at once, and the leader is told."""
        if not self._signal:
            self._signal, self._signal_at = name, self._clock()
        if self._run is not None:
            if kill:
                self._run.end()
            else:
                self._run.ask(self._settings.grace)

    def known(self) -> list[str]:
        """How the workers that failed here have ended, in a sentence each."""
        failures = [Failure.from_json(record) for record in self._said.failures]
        return list(dict.fromkeys(one.headline() for one in failures if one.type or one.exit_code is not None))

    def close(self) -> None:
        """End what is left of the job on this node, at once."""
        if self._run is not None:
            self._run.close()
            self._run = None

    # Joining and leaving

    def _hear(self) -> Session | None:
        session = self._files.read_session()
        now = self._clock()
        if session is not None and (session.id, session.beat) != self._heard:
            first = session.id != self._heard[0]
            self._heard, self._heard_at = (session.id, session.beat), now
            if first:
                self._since = now
        return session

    def _join(self, session: Session | None) -> Stop | None:
        """Join a session whose leader is seen to live: what a dead one left must never be joined."""
        if self._signal:
            return Stop(stop_code(self._signal), "stopped", f"stopped by {self._signal} before it had joined")
        now = self._clock()
        if now - self._waited_at > self._settings.join_timeout:
            raise LeaderLost(
                f"no leader in {self._files.folder} for {self._settings.join_timeout:.0f} s (--join-timeout): the wrapper with "
                "node rank 0 leads; is it running, with the same --run-dir, on storage that both see?"
            )
        alive = session is not None and not session.ended and self._heard_at > self._since
        if session is None or not (alive or (self._trusted and session.id == self._trusted)):
            return None
        self._check_job(session)
        if session.id != self._trusted and self._rivals(session.id):
            return None
        self._session, self._trusted = session.id, ""
        mine, token = self._identity, self._said.token
        self._said = Member(mine.node, token, self._said.host, self._said.pid, mine.index, mine.address, mine.devices)
        self._spoken = None
        self._speak(force=True)
        return None

    def _check_job(self, session: Session) -> None:
        own = self._settings.job
        other = [name for name in own if name in session.job and session.job[name] != own[name]]
        if other:
            told = "; ".join(f"{name} {own[name]!r} here, {session.job[name]!r} there" for name in other)
            raise ConfigurationError(
                f"this wrapper was started with something else than the leader on {session.host}: {told}. Give all the same"
            )

    def _rivals(self, session: str) -> bool:
        """Whether somebody who may live has this node's name: if so, wait until it is clear."""
        other = self._files.read_member(session, self._identity.node)
        if other is None or other.token == self._said.token:
            return False
        now = self._clock()
        if self._rival is None or self._rival[0] != other.token:
            self._rival = (other.token, other.beat, now)
        if other.beat > self._rival[1]:
            raise self._namesake(other)
        return now - self._rival[2] < 3.5 * self._settings.beat

    def _namesake(self, other: Member) -> ConfigurationError:
        return ConfigurationError(
            f"two wrappers call themselves node {other.node!r} (the other: process {other.pid} on {other.host}): start one a "
            "machine. In Kubernetes let no two pods of a job share one (podAntiAffinity); only where nodes are played on one machine set "
            "BITWITNESS_NODE to another name on each"
        )

    def _start_leaving(self, text: str, why: str = "") -> None:
        """End what runs here. `why`: for the leader, should it come back."""
        tell(self._show, "left", f"{self._identity.node}: {text}")
        self._leaving = True
        if why and self._said.state in ("running", "ended", "stopped"):
            self._said = replace(self._said, why=why)
        if self._run is not None:
            self._run.end()

    def _leave(self) -> None:
        over = self._run is None or self._run.is_over
        if self._said.why and self._said.state == "running":
            self._said = replace(self._said, state="stopped" if over else "running")
            with suppress(RunFilesError):  # what keeps the leader silent may well be this
                self._speak()
        if not over:
            return
        self.close()
        self._session, self._leaving, self._marks = "", False, {}
        self._waited_at = self._since = self._clock()
        self._heard = ("", -1)

    def _left_alone(self) -> bool:
        """Whether this node has stopped on a signal and no leader has taken notice of it."""
        patience = self._settings.grace + 2 * _EXIT_PATIENCE
        return self._run is None and self._clock() - self._signal_at > patience

    # Following the leader

    def _follow(self, session: Session) -> None:
        run = self._run
        if run is None:
            if session.preparing > self._said.generation:
                self._answer(session.preparing)
            elif self._said.state == "ready" and session.generation == self._said.generation and not self._signal:
                self._launch(session.generation)
            return
        number = run.generation.number
        if session.abort >= number:
            run.end(stacks=self._files.read_abort(session.id, number).get("kind") == "hang")
        elif session.kill:
            run.end()
        elif session.stopping:
            run.ask(self._settings.grace)
        self._report(run)
        if run.is_over:
            self.close()

    def _answer(self, generation: int) -> None:
        """Say whether this node may take part: asked of the quarantine anew before each generation."""
        try:
            why = self._run_files.quarantine.read().why_denied(self._identity.node, self._identity.devices)
        except RunFilesError as error:
            why = str(error)
        state: MemberState = "refused" if why else "ready"
        port = 0 if why else free_port()
        self._said = replace(
            self._said, state=state, why=why, port=port, generation=generation, code=None, failures=(), port_taken=False
        )
        self._speak(force=True)

    def _launch(self, number: int) -> None:
        generation = self._files.read_generation(self._session, number)
        if generation is None or self._identity.node not in generation.nodes:
            return
        self._marks = {}
        self._run = self._start(generation)
        self._said = replace(self._said, state="running", progress={}, quiet=0.0)
        self._speak(force=True)

    def _start(self, generation: Generation) -> AgentRun:
        logs, scratch = self._files.logs(self._session, generation.number, self._identity.node), Scratch()
        try:
            return AgentRun(self._settings, self._identity, self._session, generation, logs, scratch, self._echo)
        except BaseException:
            scratch.close()
            raise

    def _report(self, run: AgentRun) -> None:
        """Put into words how the agent and its workers do."""
        now = self._clock()
        failures: Sequence[Failure] = ()
        if run.somebody_left:
            self._marks = self._files.read_marks(self._session, run.generation.number, self._marks)
            failures = run.failures(self._marks)
        progress = {
            str(rank): (step, phase, round(now - at, 1)) for rank, (step, phase, at) in run.progress.beats.items()
        }
        own = range(run.node_rank * self._settings.nproc_per_node, (run.node_rank + 1) * self._settings.nproc_per_node)
        done = all(rank in self._marks for rank in own)
        self._said = replace(
            self._said,
            state=("ended" if run.ended_by_itself else "stopped") if run.is_over else "running",
            code=run.code if run.is_over and run.ended_by_itself else None,
            failures=tuple(one.to_json() for one in failures),
            port_taken=run.is_over and run.port_taken(),
            progress=progress,
            quiet=0.0 if done else round(now - run.progress.changed, 1),
        )

    def _finish(self) -> Stop | None:
        """The session has ended: see to it that nothing of it is left here."""
        now = self._clock()
        self._ended_at = now if self._ended_at is None else self._ended_at
        stop = self._files.read_stop(self._session)
        if self._run is not None:
            finished = stop is not None and stop.outcome == "finished"
            if not finished or now - self._ended_at > _EXIT_PATIENCE:
                self._run.end()
            if not self._run.is_over:
                self._speak()
                return None
            self.close()
        if stop is None and now - self._ended_at > self._settings.lost_after:
            raise RunFilesError(f"the leader says that the run has ended, but {self._files.folder} does not say how")
        return stop

    def _speak(self, force: bool = False) -> None:
        """Write what this wrapper has to say: when it is new, and at each beat."""
        said, now = replace(self._said, signal=self._signal), self._clock()
        if not (force or _news(said) != self._spoken or now - self._spoke_at >= self._settings.beat):
            return
        other = self._files.read_member(self._session, self._identity.node)
        if other is not None and other.token != said.token and self._spoken is not None:
            raise self._namesake(other)
        self._said = replace(said, beat=said.beat + 1)
        self._files.write_member(self._session, self._said)
        self._spoken, self._spoke_at = _news(self._said), now


def _news(said: Member) -> Member:
    """What of it is worth saying before the next beat is due."""
    return replace(said, progress={}, quiet=0.0, beat=0)
