"""Starting and ending the ranks of a scan that run on this machine; torch-free, because the process that watches must outlive any
device that it watches.

All ranks of a machine have one process above them (`ranks`), which this one starts. Whoever dies, those below are killed by the
kernel. Under torchrun each process starts one rank in the same way, so that a rank that crashes does not take with it the process
that judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.runfiles.files import read_json, write_json
from bitwitness.runfiles.journal import Journal
from bitwitness.supervise.processes import PARENT

_RANKS = (sys.executable, "-P", "-m", "bitwitness.scan.ranks")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PROBE = 300.0
"""Seconds to import torch and count devices in: a shared file system may be slow."""


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks that this machine starts.

    Attributes:
        first, count: which.
        slot: index of the first one's device on this machine.
    """

    first: int
    count: int
    slot: int = 0


class Launched:
    """The ranks of this machine, from entering to leaving the context.

    Args:
        files: of the scan, with its scan.json in place.
        share: which ranks.
        played: whether processes stand for devices.

    Raises:
        RunFilesError: the folder for what they print cannot be made.
    """

    def __init__(self, files: AnswerFiles, share: Share, *, played: bool) -> None:
        self._files, self.share = files, share
        self.codes: dict[int, int] = {}
        logs = files.path / "logs"
        try:
            logs.mkdir(exist_ok=True)
        except OSError as error:
            raise RunFilesError(f"{logs} cannot be made: {error.strerror or error}") from error
        environment = {**os.environ, PARENT: str(os.getpid())}
        if played:
            environment |= dict.fromkeys(_THREADS, "1")
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's own name need not resolve
        command = [*_RANKS, str(files.path.absolute())]
        command += ["--first", str(share.first), "--count", str(share.count), "--slot", str(share.slot)]
        self._log = logs / f"launcher-{share.first:05d}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal reaches this process alone, which then decides
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._torn = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process above the ranks."""
        return self._process.pid

    def look(self) -> bool:
        """Take note of ranks that have ended; whether some still run."""
        running = self._process.poll() is None
        assert self._process.stdout is not None
        while not self._process.stdout.closed and (chunk := _read(self._process.stdout.fileno())):
            self._torn += chunk
        *lines, self._torn = self._torn.split(b"\n")
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                self.codes[int(record["rank"])] = int(record["code"])
        return running

    def why(self, rank: int) -> str:
        """How a rank of this machine ended where it ended badly, or was not started; "" else."""
        code = self.codes.get(rank)
        if code is None:
            over = self._process.poll()
            return "" if over is None else f"the process above it {_how(over)}: see {self._log}"
        return "" if code == 0 else f"it {_how(code)}: see {log_of(self._files, rank)}"

    def terminate(self) -> None:
        """Ask all to come to an end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all, now: the kernel kills the ranks with the process above them."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.look()
        assert self._process.stdout is not None
        self._process.stdout.close()


def place_of_heartbeat(files: AnswerFiles, rank: int) -> Path:
    """Where a rank says which item it is at."""
    return files.path / "ranks" / f"rank-{rank:05d}.at"


def item_of(files: AnswerFiles, rank: int) -> str:
    """The item that a rank is or was at."""
    try:
        return place_of_heartbeat(files, rank).read_text(encoding="ascii", errors="replace").strip() or "its start"
    except OSError:
        return "its start"


def report_loss(files: AnswerFiles, rank: int, why: str) -> None:
    """Say to whoever coordinates, on another node, that a rank of this machine has died, which it cannot say itself.

    Raises:
        RunFilesError: it cannot be written.
    """
    if rank in files.ranks():
        journal = Journal(files.answers(rank), rank)  # its writer is dead
        journal.append("end", {"why": f"{why} (it was at {item_of(files, rank)})"})
        journal.close()
    else:
        write_json(_place_of_loss(files, rank), {"why": why})


def reported_loss(files: AnswerFiles, rank: int) -> str:
    """What was said of a rank that had not yet said who it is; "" where nothing was."""
    path = _place_of_loss(files, rank)
    if not path.is_file():
        return ""
    try:
        return str(read_json(path).get("why"))[:1000]
    except RunFilesError as error:
        return str(error)


def _place_of_loss(files: AnswerFiles, rank: int) -> Path:
    return files.path / "ranks" / f"rank-{rank:05d}.lost"


def log_of(files: AnswerFiles, rank: int) -> Path:
    """What a rank has printed."""
    return files.path / "logs" / f"rank-{rank:05d}.log"


def count_devices() -> int:
    """How many GPUs torch sees on this machine, asked in a process of its own.

    Raises:
        BitwitnessError: it could not be found out.
    """
    environment = {**os.environ, PARENT: str(os.getpid())}
    command = [*_RANKS, ".", "--count-devices"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PROBE, check=False)
        return int(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise BitwitnessError(
            f"torch did not say within {_PROBE:g} s how many GPUs there are: its driver hangs"
        ) from error
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BitwitnessError(f"torch could not be asked how many GPUs there are: {last[:300]}") from error


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun has told this process: one rank of a scan.

    Attributes:
        rank, world, slot: as RANK, WORLD_SIZE and LOCAL_RANK.
        job: the same in all processes of this start, and in no other.
    """

    rank: int
    world: int
    slot: int
    job: str


def torchrun(environment: Mapping[str, str]) -> Torchrun | None:
    """Whether this process is one of several that torchrun has started.

    Raises:
        ConfigurationError: its variables make no sense.
    """
    if not all(environment.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    try:
        rank, world, slot = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError as error:
        raise ConfigurationError(f"RANK, WORLD_SIZE or LOCAL_RANK is no number: {error}") from error
    if not 0 <= rank < world:
        raise ConfigurationError(f"RANK {rank} is none of WORLD_SIZE {world}")
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return Torchrun(rank, world, slot, " ".join(environment.get(name, "-") for name in names))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except BlockingIOError:
        return b""


def _how(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
