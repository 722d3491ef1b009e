"""All nodes of a job on this machine, each played by a process of its own, which dies with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bitwitness.runfiles.supervision import Member, Stop
from bitwitness.supervise.decisions import ended
from bitwitness.supervise.events import Show, tell
from bitwitness.supervise.identity import gpu_uuids
from bitwitness.supervise.leader import Leader, wait_for_vacancy
from bitwitness.supervise.processes import kill, sweep
from bitwitness.supervise.scratch import Scratch
from bitwitness.supervise.settings import Settings
from bitwitness.supervise.wrapper import PLAY, Asked, Patience

_REVIVALS = 10
_GOODBYE = 20.0
"""Seconds for the nodes to end what is left of them when the run has ended."""


def node_of(index: int) -> str:
    """The name of the n-th node that is played: node-0, node-1, ..."""
    return f"node-{index}"


class PlayedNodes:
    """The launcher of a local run."""

    def __init__(self, settings: Settings, everything_to_stderr: bool = False) -> None:
        self._settings, self._to_stderr = settings, everything_to_stderr
        self.patience = 1.0
        self._session = ""
        self._aside = Scratch()
        self._lifeline = os.pipe()  # the nodes have one end, and this process the other, for as long as it lives
        self._revived: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        gpus, needed = gpu_uuids(), (settings.nodes + settings.spares) * settings.nproc_per_node
        self._gpus = gpus if len(gpus) >= needed and "CUDA_VISIBLE_DEVICES" not in os.environ else ()

    def start(self, session: str) -> None:
        """Start all of them, to join a session."""
        self._session = session
        for index in range(self._settings.nodes + self._settings.spares):
            self._start(index)

    @property
    def expected(self) -> int:
        """How many can still answer: those that live."""
        return sum(process.poll() is None for process in self._processes.values())

    def names(self) -> Sequence[str | None]:
        """The nodes that are no spares."""
        return [node_of(index) for index in range(self._settings.nodes)]

    def dead(self, member: Member) -> str:
        """How the process of a wrapper has ended, or "" while it lives."""
        process = self._processes.get(member.node)
        if process is None or process.pid != member.pid:
            return "its wrapper has ended"
        code = process.poll()
        return "" if code is None else f"its wrapper {ended(code)}"

    def exit_code(self, node: str) -> int | None:
        """What the process of that node has ended with; None while it lives."""
        process = self._processes.get(node)
        return None if process is None else process.poll()

    def coming(self, node: str, pid: int) -> bool:
        """Whether another process than this one is about to join as that node."""
        process = self._processes.get(node)
        return process is not None and process.pid != pid and process.poll() is None

    def revive(self, node: str) -> bool:
        """Start it again if it has ended, but not for ever; whether it lives then."""
        process = self._processes.get(node)
        if process is not None and process.poll() is None:
            return True
        self._revived[node] = self._revived.get(node, 0) + 1
        if self._revived[node] > _REVIVALS:
            return False
        self._start(int(node.removeprefix("node-")))
        return True

    def stop(self, patience: float) -> None:
        """Wait for all to end; kill those that have not by then."""
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill([process.pid])
                process.wait()
        self._aside.close()
        for descriptor in self._lifeline:
            os.close(descriptor)
        sweep(self._session)  # what a node that was killed has left, e.g. the workers of a data loader

    def known(self) -> list[str]:
        """What the nodes could not tell the leader by way of the run directory."""
        words: list[str] = []
        for node in self._processes:
            with suppress(OSError):
                words += (self._aside.path / node).read_text(encoding="utf-8").splitlines()
        return words

    def _start(self, index: int) -> None:
        told = {
            "settings": self._settings.to_json(),
            "index": index,
            "session": self._session,
            "to_stderr": self._to_stderr,
            "lifeline": self._lifeline[0],
            "aside": str(self._aside.path),
        }
        environment = {
            **os.environ,
            PLAY: json.dumps(told),
            "BITWITNESS_NODE": node_of(index),
            **self._visible(index),
        }
        self._processes[node_of(index)] = subprocess.Popen(
            [sys.executable, "-P", "-m", "bitwitness.supervise.wrapper"],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._lifeline[0]],
        )

    def _visible(self, index: int) -> Mapping[str, str]:
        """A share of the GPUs for each node, where there are enough for all."""
        if not self._gpus:
            return {}
        first = index * self._settings.nproc_per_node
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[first : first + self._settings.nproc_per_node])}


def run_local(settings: Settings, show: Show, everything_to_stderr: bool = False) -> Stop:
    """Run a job on nodes that are played by processes of this machine.

    Raises:
        BitwitnessError: it could not be started, or not be gone on with.
    """
    wait_for_vacancy(settings)
    nodes, asked = PlayedNodes(settings, everything_to_stderr), Asked()
    stop: Stop | None = None

    def say(text: str) -> None:
        tell(show, "storage", text)

    patience = Patience(settings.lost_after, say, nodes.known)
    with asked.listening():
        try:
            leader = Leader(settings, nodes, show)
            leader.start()
            nodes.start(leader.id)
            while stop is None:
                asked.tell(leader.stop)
                stop = patience(leader.tick)
                time.sleep(0 if stop is not None else settings.tick)
            return stop
        finally:
            nodes.stop(_GOODBYE if stop is not None else 0.0)
