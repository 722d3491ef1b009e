"""The process that stands for a node, on a cluster or played on one machine; on the first of a cluster it leads as well."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from bitwitness.errors import BitwitnessError, RunFilesError
from bitwitness.runfiles.supervision import Stop
from bitwitness.supervise.decisions import LOST
from bitwitness.supervise.events import Event, Show, tell
from bitwitness.supervise.identity import Identity, identify
from bitwitness.supervise.launch import echoes
from bitwitness.supervise.launchers import Scattered
from bitwitness.supervise.leader import Leader, wait_for_vacancy
from bitwitness.supervise.member import NodeMember
from bitwitness.supervise.processes import sweep, when_closed
from bitwitness.supervise.settings import Settings

PLAY = "BITWITNESS_PLAY"
"""Holds, for a process that plays a node: the settings, its index, the session to join, where output goes, a pipe that is
closed when the process ends that has started it, and a folder to leave word in that the run directory does not take."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_Result = TypeVar("_Result")


class Asked:
    """The signals that this process got: the first asks for a stop, a second for an immediate one."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals for as long as this lasts."""
        # What whoever started this one has ignored, as nohup does with SIGHUP, stays ignored.
        heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tell(self, stop: Callable[[str, bool], None]) -> None:
        """Pass on what has come."""
        if self.names:
            stop(self.names[0], len(self.names) > 1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Slurm's early warning is often SIGUSR1, and asks for the same.
        self.names.append("SIGTERM" if number == signal.SIGUSR1 else signal.Signals(number).name)


_LATER = 10.0


class RunDirLost(RunFilesError):
    """The run directory could be used when the run began, and cannot any more."""

    exit_code = 1


class Patience:
    """Shared storage has bad moments: an error of it counts only once it has lasted as long as a node may be silent.

    Args:
        tell: told at once what fails, and what is known meanwhile and cannot be passed on.
        known: what that is, in sentences.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None], known: Callable[[], Sequence[str]] = tuple) -> None:
        self._seconds, self._tell, self._known = seconds, tell, known
        self._since: float | None = None
        self._told: set[str] = set()

    def __call__(self, tick: Callable[[], _Result]) -> _Result | None:
        """The result of a tick; None where the run directory failed, if it has not failed for long.

        Raises:
            RunDirLost: it has.
        """
        try:
            result = tick()
        except RunFilesError as error:
            now = time.monotonic()
            if self._since is None:
                self._since, self._told = now, set()
                self._tell(f"the run directory fails, which is borne for {self._seconds:.0f} s: {error}")
            known = self._known()
            for sentence in dict.fromkeys(known):
                if sentence not in self._told:
                    self._told.add(sentence)
                    self._tell(f"known, and not to be written: {sentence}")
            if now - self._since > self._seconds:
                words = [f"the run directory has failed for {self._seconds:.0f} s: {error}", *dict.fromkeys(known)]
                raise RunDirLost("; ".join(words)) from error
            return None
        self._since = None
        return result


def run_node(settings: Settings, identity: Identity, show: Show, everything_to_stderr: bool = False) -> Stop:
    """Be one node of a cluster until the run has ended; the first leads.

    Raises:
        BitwitnessError: it could not be started, or not be gone on with.
    """
    leader: Leader | None = None
    if identity.index == 0:
        wait_for_vacancy(settings)
        leader = Leader(settings, Scattered(_expected(settings)), show)
        leader.start()
    member = NodeMember(settings, identity, echoes(everything_to_stderr), show, leader.id if leader is not None else "")

    def say(text: str) -> None:
        tell(show, "storage", f"{identity.node}: {text}")

    return _serve(member, leader, settings, say, settings.lost_after)


def _expected(settings: Settings) -> int:
    """How many wrappers will come, spares included: Slurm knows; elsewhere, at least those that train."""
    text = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    return max(settings.nodes, int(text) if text.isdecimal() else 0)


def _serve(
    member: NodeMember, leader: Leader | None, settings: Settings, say: Callable[[str], None], patience: float
) -> Stop:
    def quiet(text: str) -> None:
        """The member of the same process says it."""

    asked = Asked()
    of_member = Patience(patience, say, member.known)
    of_leader = Patience(settings.lost_after, quiet, member.known)
    with asked.listening():
        try:
            while True:
                asked.tell(member.stop)
                if leader is not None:
                    asked.tell(leader.stop)
                    of_leader(leader.tick)
                stop = of_member(member.tick)
                if stop is not None:
                    return stop
                time.sleep(settings.tick)
        finally:
            member.close()


def _end_all(session: str) -> None:
    """The one that plays this node is gone: end what is left of the job, and this process."""
    sweep(session)
    os._exit(LOST)


def play() -> None:
    """Play a node, for the process that was started to do so."""
    told = json.loads(os.environ.pop(PLAY))
    when_closed(told["lifeline"], lambda: _end_all(told["session"]))
    settings = Settings.from_json(told["settings"])
    identity = identify(told["index"], settings.nproc_per_node, os.environ, "127.0.0.1")

    def quiet(event: Event) -> None:
        """The leader, who is told all the same, speaks for all."""

    def aside(text: str) -> None:
        """What the leader cannot be told by way of the run directory; that this one fails it says itself."""
        with suppress(OSError):
            aside_file.write_text("\n".join(member.known()), encoding="utf-8")

    aside_file = Path(told["aside"]) / identity.node
    member = NodeMember(settings, identity, echoes(told["to_stderr"]), quiet, told["session"])
    try:
        # Longer than the command, which sees the same files, and ends all nodes with what is known when it gives up.
        patience = 2 * settings.lost_after + _LATER
        sys.exit(_serve(member, None, settings, aside, patience).exit_code)
    except BitwitnessError as error:
        sys.stderr.write(f"{identity.node}: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    play()
