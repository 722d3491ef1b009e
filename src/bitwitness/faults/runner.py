"""Runs cells over the cores of a machine, and answers for every one of them, whatever becomes of the processes.

It is the part of a campaign that outlives faults: a cell that kills its ranks, its forker or its own time is a result
like any other. Nothing that it starts outlives it, also where it is killed by `kill -9`. No torch: it must start at once,
and a fault must not reach it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.errors import BitwitnessError
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.job import DEFAULT_RANKS, search_path
from bitwitness.faults.results import weights_name
from bitwitness.supervise.processes import PARENT

OnResult = Callable[[CellSpec, CellResult], None]
"""Told of each result as it comes; what it raises ends the run."""

_SPARE = 15.0
"""Seconds beyond a cell's deadline after which its forker itself is taken to hang."""
_STARTING = 120.0
"""Seconds that a forker has to load everything."""
_STRANGERS = ("BITWITNESS_", "MASTER_", "TORCHELASTIC_")
_STRANGE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK"}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: cells that are done, of how many, those under way, and seconds since the start."""

    done: int
    total: int
    running: tuple[CellSpec, ...]
    seconds: float

    @property
    def remaining(self) -> float | None:
        """Seconds that are left if the rest takes as long as what was done; None before the first result."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None


OnProgress = Callable[[Progress], None]
"""Told of the start and end of each cell, and about once a second between."""


def run(
    cells: Sequence[CellSpec],
    *,
    parallel: int | None = None,
    deadline: float = 120.0,
    on_result: OnResult,
    on_progress: OnProgress | None = None,
    weights: Path | None = None,
    keep: Path | None = None,
    path: Sequence[str] | None = None,
) -> None:
    """Run cells; returns when all have a result. The order of results is that in which they come.

    A clean run comes before all others of its job and seed, so that these can say how far from it they ended.

    Args:
        cells: what to run.
        parallel: how many at once; None: as many as have a core for each rank, and at least one.
        deadline: seconds after which a cell is killed; it is then a `hang`.
        on_result: told of each result.
        on_progress: told how far it is.
        weights: folder where the parameters of clean runs are kept, from one call to the next.
        keep: folder where the files of every cell are to be left, by its key; None: they are removed.
        path: where the modules of jobs are looked for; None: `search_path()`.

    Raises:
        BitwitnessError: the processes that run cells do not start.
    """
    _Runner(list(cells), parallel, deadline, on_result, on_progress or (lambda _: None), weights, keep, path).run()


class _Runner:
    def __init__(
        self,
        cells: list[CellSpec],
        parallel: int | None,
        deadline: float,
        on_result: OnResult,
        on_progress: OnProgress,
        weights: Path | None,
        keep: Path | None,
        path: Sequence[str] | None,
    ) -> None:
        self._waiting, self._total, self._done = cells, len(cells), 0
        self._deadline, self._on_result, self._on_progress = deadline, on_result, on_progress
        self._weights, self._keep = weights, keep
        self._path = search_path() if path is None else path
        self._parallel = parallel
        self._cores = len(os.sched_getaffinity(0))
        self._forkers: list[_Forker] = []
        self._started = time.monotonic()

    def run(self) -> None:
        try:
            while self._waiting or self._busy():
                self._assign()
                self._report()
                self._listen()
            self._report()
        finally:
            for forker in self._forkers:
                forker.tell_to_end()
            for forker in self._forkers:
                forker.end()

    def _busy(self) -> list[_Forker]:
        return [forker for forker in self._forkers if forker.cell is not None]

    def _assign(self) -> None:
        """Give cells to forkers as long as there is room."""
        while (index := self._next()) is not None:
            cell = self._waiting.pop(index)
            free = self._idle()
            if free is None:
                free = _Forker(self._weights, self._path)
                self._forkers.append(free)
            free.give(cell, self._deadline, self._keep)

    def _idle(self) -> _Forker | None:
        """One that waits for a cell. What has died meanwhile is dropped, or the next cell would be blamed for it."""
        for forker in self._forkers:
            if forker.cell is None and forker.has_ended():
                forker.end()
        self._forkers = [forker for forker in self._forkers if forker.lives]
        return next((forker for forker in self._forkers if forker.cell is None), None)

    def _next(self) -> int | None:
        """Which of the waiting cells can start now: the first whose clean run is not still to come."""
        running = [forker.cell for forker in self._busy() if forker.cell is not None]
        first = None
        owed = {weights_name(cell) for cell in [*self._waiting, *running] if cell.role == "clean"}
        for index, cell in enumerate(self._waiting):
            if cell.role == "clean" or weights_name(cell) not in owed:
                first = index
                break
        if first is None or not running:
            return first
        if self._parallel is not None:
            return first if len(running) < self._parallel else None
        ranks = sum(_ranks(cell) for cell in [*running, self._waiting[first]])
        return first if ranks <= self._cores else None

    def _listen(self) -> None:
        """Wait for an answer, a second at most, and see to forkers that ended or hang."""
        with selectors.DefaultSelector() as selector:
            for forker in self._busy():
                selector.register(forker.output, selectors.EVENT_READ, forker)
            ready = {key.data for key, _ in selector.select(1.0)}
        for forker in self._busy():
            result = forker.answer() if forker in ready else forker.overdue()
            if result is not None:
                cell, forker.cell = forker.cell, None
                assert cell is not None
                self._done += 1
                self._on_result(cell, result)
        self._forkers = [forker for forker in self._forkers if forker.lives]

    def _report(self) -> None:
        running = tuple(forker.cell for forker in self._busy() if forker.cell is not None)
        self._on_progress(Progress(self._done, self._total, running, time.monotonic() - self._started))


def _ranks(cell: CellSpec) -> int:
    value = cell.options.get("ranks", DEFAULT_RANKS)
    return value if isinstance(value, int) else 1


class _Forker:
    """A process of `bitwitness.faults.forker`, which runs one cell at a time."""

    def __init__(self, weights: Path | None, path: Sequence[str]) -> None:
        command = [sys.executable, "-P", "-m", "bitwitness.faults.forker"]
        command += [f"--path={place}" for place in path]
        command += [] if weights is None else ["--weights", str(weights.absolute())]
        self._process = subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._buffer = b""
        self._ready = False
        self._began = time.monotonic()
        self._limit = 0.0
        self.cell: CellSpec | None = None
        self.lives = True

    def give(self, cell: CellSpec, deadline: float, keep: Path | None) -> None:
        """Have it run a cell."""
        self.cell, self._limit = cell, deadline
        self._began = time.monotonic()
        request: dict[str, Any] = {"cell": cell.to_json(), "deadline": deadline, "keep": None}
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            request["keep"] = str((keep / cell.key).absolute())
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as reading from it will show
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> CellResult | None:
        """What it says, if it says something; that its cell crashed, if it has ended."""
        assert self.cell is not None
        piece = os.read(self.output.fileno(), 1 << 20)
        if not piece:
            return self._ended()
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for record in map(json.loads, lines):
            if "key" in record:
                return CellResult.from_json(record)
            self._ready, self._began = True, time.monotonic()  # loading is not the cell's time
        return None

    def overdue(self) -> CellResult | None:
        """That its cell hangs, if it has been silent for too long."""
        assert self.cell is not None
        seconds = time.monotonic() - self._began
        if seconds < (self._limit + _SPARE if self._ready else _STARTING):
            return None
        self._process.kill()
        self.end()
        if not self._ready:
            raise BitwitnessError(f"the process that runs cells did not start within {_STARTING:.0f} s")
        return CellResult(self.cell.key, "hang", "the process that ran it did not answer", seconds=seconds)

    def _ended(self) -> CellResult:
        assert self.cell is not None
        code = self._process.wait()
        self.end()
        if not self._ready:
            raise BitwitnessError(
                f"the process that runs cells ended with exit code {code} before it ran one; see above"
            )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        seconds = time.monotonic() - self._began
        return CellResult(self.cell.key, "crash", f"the process that ran it {how}", seconds=seconds)

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def tell_to_end(self) -> None:
        """It ends its ranks and removes its files."""
        with suppress(OSError):
            self._process.terminate()

    def end(self) -> None:
        """Wait until it has ended; by force, if it takes long."""
        self.lives = False
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert stream is not None
                stream.close()


def environment() -> dict[str, str]:
    """For what loads a job: that of this process, without what belongs to another job or would tell every rank the same."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_STRANGERS) and name not in _STRANGE
    }
    return {
        **kept,
        # One thread each: more would start before the ranks are forked, and wait for one another afterwards.
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # a container's own name need not resolve
        "CUDA_VISIBLE_DEVICES": "",
        PARENT: str(os.getpid()),
    }
