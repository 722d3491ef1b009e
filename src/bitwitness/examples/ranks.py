"""Ranks of a job as processes of this machine, some of which stand for other nodes.

Nothing of it may outlive the command that started it: not on Ctrl-C, not when that is killed by `kill -9`, not when one
rank crashes and the others wait for it in a collective. So each rank asks the kernel to be killed with its parent, is in a
session of its own that is killed as a whole, and the first that fails ends them all. No torch here: the parent trains
nothing and should start at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bitwitness.errors import BitwitnessError
from bitwitness.supervise.processes import PARENT

LISTENER = "BITWITNESS_EXAMPLE_LISTENER"
"""Names the file descriptor, in rank 0, of the socket that already listens on MASTER_PORT."""

_TAIL = 15
_GRACE = 5.0
"""Seconds to wait for the rank whose failure made the others fail."""


def node_name(index: int) -> str:
    """The name of the n-th node of this machine, as `bitwitness run` calls those that it plays: node-0, node-1, ..."""
    return f"node-{index}"


class Ranks:
    """The processes of a job, from entering to leaving the context.

    Args:
        command: arguments for this Python, e.g. `["-m", "module"]`.
        nodes, ranks_per_node: how many processes, and which pretend to share a node.
        log_dir: where each rank's output goes, `rank-00000.log`; must exist.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        nodes: int,
        ranks_per_node: int,
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = nodes * ranks_per_node
        self._command = [sys.executable, "-P", *command]
        self._ranks_per_node = ranks_per_node
        self._log_dir = log_dir
        self._environment = dict(environment or {})
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # The socket listens before rank 0 exists and is handed down to it, so nobody can take the port in between.
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            try:
                for rank in range(self.world_size):
                    self._processes.append(self._start(rank, listener))
            except BaseException:
                self.stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether some rank has not ended yet.

        Raises:
            BitwitnessError: one has ended with an error, which is shown; all others are then stopped.
        """
        codes = [process.poll() for process in self._processes]
        if any(codes):
            failed = self._wait_for_cause()
            self.stop()
            raise self._failure(failed)
        return None in codes

    def stop(self) -> None:
        """End every process that still runs, and wait until it has ended."""
        for process in self._processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    process.kill()  # not yet the leader of its session
        for process in self._processes:
            process.wait()

    def log(self, rank: int) -> Path:
        """What a rank has printed."""
        return self._log_dir / f"rank-{rank:05d}.log"

    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes]

    def _start(self, rank: int, listener: socket.socket) -> subprocess.Popen[bytes]:
        node, slot = divmod(rank, self._ranks_per_node)
        environment = {
            **os.environ,
            # One thread each, or eight ranks on two cores mostly wait for one another.
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            "GLOO_SOCKET_IFNAME": "lo",  # a container's own name need not resolve
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "BITWITNESS_NODE": node_name(node),
            PARENT: str(os.getpid()),
        }
        handed_down = (listener.fileno(),) if rank == 0 else ()
        if rank == 0:
            environment[LISTENER] = str(listener.fileno())
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=handed_down,
                start_new_session=True,
            )

    def _wait_for_cause(self) -> dict[int, int]:
        """The exit codes of the ranks that failed, as soon as one did for another reason than having lost a rank.

        The rank whose failure made the others fail need not be the first to have ended: it may still print its traceback.
        """
        deadline = time.monotonic() + _GRACE
        while True:
            codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
            failed = {rank: code for rank, code in codes.items() if code}
            over = time.monotonic() > deadline or None not in codes.values()
            if over or not all(_is_lost(self.log(rank)) for rank in failed):
                return failed
            time.sleep(0.1)

    def _failure(self, failed: Mapping[int, int]) -> BitwitnessError:
        rank = min(failed, key=lambda rank: (_is_lost(self.log(rank)), rank))
        code = failed[rank]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = ", ".join(str(other) for other in failed if other != rank)
        lines = _tail(self.log(rank))
        shown = "\n".join(f"    {line}" for line in lines) if lines else "    (it printed nothing)"
        also = f" (so did rank {others})" if others else ""
        return BitwitnessError(f"rank {rank} {how}{also}; the end of {self.log(rank)}:\n{shown}")


def _tail(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-_TAIL:]
    except OSError:
        return []


def _is_lost(log: Path) -> bool:
    """Whether a rank failed only because another had: it then says which one it lost."""
    return any("RankLost" in line or "Connection" in line for line in _tail(log))
