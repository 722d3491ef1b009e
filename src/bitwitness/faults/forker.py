"""The process that forks the ranks of cells: `python -m bitwitness.faults.forker`.

A campaign runs thousands of cells of a second each, and an interpreter with torch takes three to start. So one process
imports everything once and forks the ranks of each cell, which begin at once and share its memory. It trains nothing
itself, because a process that has computed has threads, and those do not survive a fork.

It reads requests from its standard input, a JSON object a line (`{"cell": ..., "deadline": seconds, "keep": folder or null}`),
and answers each with the JSON of a `CellResult`, a line. It ends with its input, and with the process that started it.
"""

from __future__ import annotations

import sys

from bitwitness.supervise.processes import PARENT, die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before torch, whose import takes seconds

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch
import torch._dynamo  # the first optimizer of a process loads it
import torch.distributed as dist

from bitwitness.errors import ConfigurationError
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.job import Shape, find_factory
from bitwitness.faults.rank import Place, run_rank
from bitwitness.faults.results import gather, weights_name
from bitwitness.supervise.scratch import Scratch

logger = logging.getLogger(__name__)

GRACE = 3.0
"""Seconds that the other ranks of a cell have to end after one has ended with an error: they mostly wait for it, and may know
the cause."""
SHORT_GRACE = 0.5
"""Likewise after one that had a cause of its own: they have nothing to add."""

_KNOWS_WHY, _FAILED = 3, 4
"""Exit codes of a rank."""

_POLL = 0.005
_MEMORY = Path("/dev/shm")  # noqa: S108  (the folder made in it has a name that nobody else has)
_ENOUGH = 512 << 20


class Forker:
    """Runs cells one after another.

    Args:
        scratch: a folder of its own.
        weights: where the parameters of clean runs are kept, or None.
    """

    def __init__(self, scratch: Path, weights: Path | None) -> None:
        self._scratch, self._weights = scratch, weights
        self._prepared: set[str] = set()
        self.ranks: _Ranks | None = None

    def run(self, spec: CellSpec, deadline: float, keep: Path | None) -> CellResult:
        """Run one cell; its result, whatever it was.

        Args:
            spec: what to run.
            deadline: seconds after which it is killed.
            keep: where its files are to be moved, or None: they are removed.
        """
        started = time.monotonic()
        try:
            shape = self._prepare(spec)
        except ConfigurationError as error:
            return CellResult(spec.key, "refused", str(error))
        except Exception as error:  # noqa: BLE001  (a job is anybody's code)
            return CellResult(spec.key, "crash", "".join(traceback.format_exception(error))[-2000:])
        folder = Path(tempfile.mkdtemp(prefix="cell-", dir=self._scratch))
        weights = None if self._weights is None else self._weights / weights_name(spec)
        try:
            self.ranks = _Ranks(spec, shape, folder, weights)
            self.ranks.start()
            hung = self.ranks.wait(started + deadline)
            result = gather(spec, shape, folder, self.ranks.codes, hung, time.monotonic() - started)
            if keep is not None:
                shutil.move(folder, keep)
            return result
        except Exception as error:  # noqa: BLE001  (what ranks leave may be anything, and the other cells must not suffer)
            seconds = time.monotonic() - started
            return CellResult(spec.key, "crash", "".join(traceback.format_exception(error))[-2000:], seconds=seconds)
        finally:
            self.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """End the ranks that still run."""
        if self.ranks is not None:
            self.ranks.kill()
        self.ranks = None

    def _prepare(self, spec: CellSpec) -> Shape:
        """Load what all ranks share, and make sure that forking is safe."""
        shape, _ = Shape.split(spec.options)
        factory = find_factory(spec.factory)
        if spec.factory not in self._prepared:
            getattr(factory, "prepare", lambda: None)()
            self._prepared.add(spec.factory)
            gc.collect()
            gc.freeze()  # no collection in a rank touches, and so copies, what all of them share
            threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  (names are enough)
            if threads > 1:
                logger.warning(
                    "%d threads run before the ranks are forked (job %s): a rank may hang", threads, spec.factory
                )
        return shape


@dataclass
class _Ranks:
    """The ranks of a cell that is under way."""

    spec: CellSpec
    shape: Shape
    folder: Path
    weights: Path | None
    running: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Fork them."""
        # It listens before anybody knows the number, so that nobody can take the port meanwhile.
        listener = socket.create_server(("127.0.0.1", 0), backlog=self.shape.ranks + 8)
        sys.stderr.flush()
        own = os.getpid()
        with listener:
            for rank in range(self.shape.ranks):
                pid = os.fork()
                if pid == 0:
                    self._child(own, rank, listener)
                self.running[pid] = rank

    def wait(self, deadline: float) -> bool:
        """Until all have ended, by force at the deadline or soon after one of them failed. Whether it was the deadline."""
        failed = False
        while self.running:
            if not self._reap():
                time.sleep(_POLL)
            elif self.codes and (code := list(self.codes.values())[-1]):
                failed = True
                deadline = min(deadline, time.monotonic() + (SHORT_GRACE if code == _KNOWS_WHY else GRACE))
            if time.monotonic() > deadline:
                self.kill()
                return not failed
        return False

    def kill(self) -> None:
        """End those that run, and wait until they have ended."""
        for pid in self.running:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # not yet the leader of its session
        while self.running:
            self._reap(block=True)

    def _reap(self, block: bool = False) -> bool:
        for pid in list(self.running):
            # It is looked at first, and its number kept: until it is reaped, nobody else can be the leader of that group.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)) is None:
                continue
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # what it has started and left
            _, status = os.waitpid(pid, 0)
            self.codes[self.running.pop(pid)] = os.waitstatus_to_exitcode(status)
            return True
        return False

    def _child(self, parent: int, rank: int, listener: socket.socket) -> None:
        """Never returns: what stands above in the stack is the forker's."""
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ[PARENT] = str(parent)
            die_with_parent()
            os.setsid()
            _redirect(self.folder / f"rank-{rank:05d}.log")
            logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
            store = self._store(rank, listener)
            ended = run_rank(self.spec, Place(rank, self.folder, self.weights), store)
            knows_why = ended in ("refused", "not_landed", "crash")
            code = 0 if ended == "finished" else _KNOWS_WHY if knows_why else _FAILED
        except BaseException:  # noqa: BLE001  (it must be seen in the log, and not go on in the forker's code)
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(code)  # without the interpreter's own shutdown, in which a thread of gloo's may die

    def _store(self, rank: int, listener: socket.socket) -> dist.Store | None:
        port = listener.getsockname()[1]
        descriptor = listener.detach() if rank == 0 and self.shape.ranks > 1 else None
        listener.close()
        if self.shape.ranks == 1:
            return None
        return dist.TCPStore(
            "127.0.0.1",
            port,
            self.shape.ranks,
            is_master=rank == 0,
            master_listen_fd=descriptor,
            wait_for_workers=False,
        )


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


def _scratch() -> Scratch:
    """In memory where there is room, unless TMPDIR says where: nobody reads these files after a crash of the machine, and
    syncing them to a disk may take longer than the training does.
    """
    with suppress(OSError):
        if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH:
            tempfile.tempdir = str(_MEMORY)
    return Scratch()


def _serve(forker: Forker, answers: BinaryIO) -> None:
    answers.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request: Mapping[str, Any] = json.loads(line)
        keep = Path(request["keep"]) if request.get("keep") else None
        result = forker.run(CellSpec.from_json(request["cell"]), float(request["deadline"]), keep)
        answers.write(json.dumps(result.to_json()).encode() + b"\n")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Answer requests until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--path", action="append", default=[])
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # What a job prints while it is loaded must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # Where a user's own jobs are; last, so that nothing there hides anything else.
    sys.path += [path for path in given.path if path not in sys.path]
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    scratch = _scratch()
    forker = Forker(scratch.path, given.weights)
    try:
        _serve(forker, answers)
    finally:
        forker.stop()
        scratch.close()


if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  (it is on its way out)
        traceback.print_exc()
        code = 1
    os._exit(code)  # torch takes long to leave, and has nothing to say
