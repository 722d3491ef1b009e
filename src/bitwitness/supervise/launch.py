"""One agent and its workers, from start to the last process that is left of them.

Everything is looked at and nothing waited for: the wrapper that owns an agent has to go on saying that it lives, also while
its workers are given time to save.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TextIO

from bitwitness.runfiles.files import Reported
from bitwitness.runfiles.supervision import Generation
from bitwitness.supervise.agent import REPORT
from bitwitness.supervise.decisions import Failure
from bitwitness.supervise.identity import Identity
from bitwitness.supervise.processes import MARKER, PARENT, kill, started, sweep
from bitwitness.supervise.scratch import Scratch
from bitwitness.supervise.settings import Settings
from bitwitness.supervise.worker import GENERATION, NOTES, RUN_DIR, SUPERVISION

_TAIL = 20
_TAIL_BYTES = 16_384
_AGENT_PATIENCE = 5.0
"""Seconds an agent whose workers are gone has to leave its report, and once more to obey SIGTERM."""

_STACKS_PATIENCE = 1.0
_TAKEN = ("EADDRINUSE", "address already in use", "Address already in use")
_STRANGERS = ("TORCHELASTIC_", "PET_")
"""Variables by which an outer torchrun would steer ours."""

How = Literal["", "ask", "kill", "stacks"]


@dataclass
class _Worker:
    """A worker as its wrapper sees it: the numbers it left, and when it was seen to be gone."""

    pid: int
    started: int | None
    gone: int | None = None  # how many of the node were gone before it

    @property
    def lives(self) -> bool:
        return started(self.pid) == self.started


@dataclass
class Progress:
    """What the beat files of a node's ranks say: rank -> (step, phase, since when by this host's clock)."""

    changed: float
    beats: dict[int, tuple[int, str, float]] = field(default_factory=dict)
    seen: dict[str, object] = field(default_factory=dict)

    def look(self, folder: Path, logs: Path, now: float) -> None:
        """Read what has changed. Until the first beat, output counts as progress too: imports and compilation print."""
        for path in folder.glob("rank-*"):
            if not self._is_new(path):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = json.loads(path.read_text(encoding="utf-8"))
                rank = int(path.name.removeprefix("rank-"))
                self.beats[rank] = (int(record["step"]), str(record["phase"]), now)
            self.changed = now
        if not self.beats:
            for path in logs.glob("*/attempt_*/*/std*.log"):
                if self._is_new(path):
                    self.changed = now

    def _is_new(self, path: Path) -> bool:
        try:
            status = path.stat()
        except OSError:
            return False
        known, self.seen[path.as_posix()] = self.seen.get(path.as_posix()), (status.st_mtime_ns, status.st_size)
        return known != (status.st_mtime_ns, status.st_size)


class AgentRun:
    """One generation on one node.

    Args:
        identity: this node.
        session: id of the supervised run.
        generation: who trains; this node is among them.
        logs: folder for what is printed.
        scratch: folder on this node, for what need not be shared; removed by `close`.
        echo: where to pass on what is printed: stdout's and stderr's stream.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        session: str,
        generation: Generation,
        logs: Path,
        scratch: Scratch,
        echo: tuple[TextIO, TextIO],
    ) -> None:
        self.generation = generation
        self.node_rank = generation.nodes.index(identity.node)
        self._settings, self._identity, self._logs, self._scratch = settings, identity, logs, scratch
        self._marker = f"{session}:{generation.number}:{identity.node}"
        self._how: How = ""
        self._deadline = 0.0
        self._stage = 0
        self._workers: dict[int, _Worker] = {}
        self._asked: set[int] = set()
        self._told = False
        self.code: int | None = None
        for folder in (self._beats, self._notes):
            folder.mkdir(parents=True, exist_ok=True)
        with Reported(logs / "agent.log", "written"):
            logs.mkdir(parents=True, exist_ok=True)
            self._log = (logs / "agent.log").open("ab")
        self.progress = Progress(time.monotonic())
        self._process = subprocess.Popen(
            self._command(),
            env=self._environment(session),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._pumps = [self._pump(self._process.stdout, echo[0]), self._pump(self._process.stderr, echo[1])]

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it."""
        return self._stage == _OVER

    @property
    def ended_by_itself(self) -> bool:
        """Whether the agent's exit code says something: it had not been told to stop."""
        return not self._told

    def ask(self, seconds: float) -> None:
        """Ask the workers to stop, give them this long, then end everything. A second call changes nothing."""
        if self._how == "":
            self._look_at_workers()
            self._told = self._told or self.code is None
            self._how, self._deadline = "ask", time.monotonic() + (seconds if self._workers else 0.0)
            self._pass_on()

    def end(self, stacks: bool = False) -> None:
        """End everything at once; first let the workers print where they are, if `stacks`."""
        if self._how in ("", "ask"):
            self._look_at_workers()
            self._told = self._told or self.code is None
            self._how, self._deadline = ("stacks" if stacks else "kill"), time.monotonic()
            if stacks:
                kill([worker.pid for worker in self._living()], signal.SIGUSR2)
                self._deadline += _STACKS_PATIENCE

    def look(self) -> None:
        """See what has changed, and do what is due: to be called again and again until `is_over`."""
        now = time.monotonic()
        if self._stage == _OVER:
            return
        if self.code is None:
            self.code = self._process.poll()
        self._look_at_workers()
        if self._how == "ask":
            self._pass_on()
        self.progress.look(self._beats, self._logs, now)
        if self.code is not None:
            self._finish()
        elif self._how:
            self._advance(now)

    @property
    def somebody_left(self) -> bool:
        """Whether some worker is gone, done or not."""
        return self.code is not None or any(worker.gone is not None for worker in self._workers.values())

    def failures(self, marked: Collection[int] = ()) -> tuple[Failure, ...]:
        """The workers that ended before anybody told them to, in that order, but for the ranks that left a mark."""
        report = self._report()
        first = self.node_rank * self._settings.nproc_per_node
        down = {slot: worker.gone for slot, worker in self._workers.items() if worker.gone is not None}
        down = {slot: order for slot, order in down.items() if first + slot not in marked}
        for slot, code in report.items():
            if slot not in down and (slot not in self._workers or not self._how) and code not in (-15, -9):
                down[slot] = len(down)
        return tuple(self._failure(slot, order, report) for slot, order in sorted(down.items()))

    def port_taken(self) -> bool:
        """Whether the agent could not listen, as it says itself."""
        if self.node_rank != 0 or self._workers or self.code in (None, 0):
            return False
        return any(word in "\n".join(_tail(self._logs / "agent.log", _TAIL * 10)) for word in _TAKEN)

    def close(self) -> None:
        """End what is left, at once, and remove the scratch folder."""
        if self._stage != _OVER:
            sweep(self._marker, keep=[self._process.pid])
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.code = self._process.returncode
            self._finish()
        self._scratch.close()

    # How it is started

    @property
    def _beats(self) -> Path:
        return self._scratch.path / "beats"

    @property
    def _notes(self) -> Path:
        return self._scratch.path / "notes"

    def _command(self) -> list[str]:
        settings, generation = self._settings, self.generation
        script = ["-m", settings.script] if settings.module else [settings.script]
        options = {
            "--nnodes": len(generation.nodes),
            "--node-rank": self.node_rank,
            "--nproc-per-node": settings.nproc_per_node,
            "--rdzv-backend": "static",
            "--rdzv-id": f"generation-{generation.number}",
            "--rdzv-conf": f"timeout={int(max(60, settings.join_timeout))}",
            "--master-addr": generation.address,
            "--master-port": generation.port,
            "--max-restarts": 0,  # torchrun would restart on the same nodes, the bad one included
            "--shutdown-timeout": max(1, int(settings.grace)),
            "--log-dir": self._logs,
            "--tee": 3,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return [*settings.agent, *words, "-m", "bitwitness.supervise.worker", *script, *settings.args]

    def _environment(self, session: str) -> dict[str, str]:
        generation = self.generation
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGERS)}
        for name in ("BITWITNESS_SUSPICION", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            inherited.pop(name, None)
        defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} if self._settings.local else {}
        return {
            **defaults,
            **inherited,
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            PARENT: str(os.getpid()),
            MARKER: self._marker,
            REPORT: str(self._scratch.path / "report.json"),
            NOTES: str(self._notes),
            RUN_DIR: str(self._settings.run_dir),
            SUPERVISION: session,
            GENERATION: str(generation.number),
            **({"BITWITNESS_SUSPICION": "1"} if generation.suspicion else {}),
            "BITWITNESS_BEATS": str(self._beats),
            "BITWITNESS_NODE": self._identity.node,
            "BITWITNESS_DEVICES": ",".join(self._identity.devices),
        }

    def _pump(self, source: IO[bytes] | None, echo: TextIO) -> threading.Thread:
        """Pass on what an agent prints, and keep it: with `--tee`, its workers' output is in it as well."""
        assert source is not None

        def work() -> None:
            shown = True
            for line in source:
                with contextlib.suppress(OSError, ValueError):
                    self._log.write(line)
                    self._log.flush()
                if shown:
                    try:
                        echo.write(line.decode(errors="replace"))
                        echo.flush()
                    except (OSError, ValueError):
                        shown = False  # nobody reads any more; the log goes on

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    # How it ends

    def _pass_on(self) -> None:
        """Ask each worker once. Not their groups: a loader's workers are still needed for the step under way."""
        for worker in self._living():
            if worker.pid not in self._asked:
                self._asked.add(worker.pid)
                kill([worker.pid], signal.SIGTERM)

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.gone is None and worker.lives]

    def _look_at_workers(self) -> None:
        for slot in range(self._settings.nproc_per_node):
            if slot not in self._workers:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    note = json.loads((self._notes / f"worker-{slot}").read_text(encoding="utf-8"))
                    self._workers[slot] = _Worker(int(note["pid"]), note["started"])
            worker = self._workers.get(slot)
            if worker is not None and worker.gone is None and not self._ending and not worker.lives:
                worker.gone = sum(other.gone is not None for other in self._workers.values())

    @property
    def _ending(self) -> bool:
        return self._how == "kill" or (self._how == "stacks" and self._stage > 0)

    def _advance(self, now: float) -> None:
        """The next of: kill the workers, wait for the agent, ask it to stop, kill it."""
        if self._stage == 0 and (
            now >= self._deadline or (self._how == "ask" and self._workers and not self._living())
        ):
            if self._how == "ask":
                self._how = "kill"
            sweep(self._marker, keep=[self._process.pid])
            self._stage, self._deadline = 1, now + (_AGENT_PATIENCE if self._workers else 0.0)
        elif self._stage == 1 and now >= self._deadline:
            kill([self._process.pid], signal.SIGTERM)
            self._stage, self._deadline = 2, now + (_AGENT_PATIENCE if self._workers else 0.5)
        elif self._stage == 2 and now >= self._deadline:
            kill([self._process.pid], signal.SIGKILL)
            self._deadline = now + _AGENT_PATIENCE

    def _finish(self) -> None:
        """The agent is gone: whatever it has left behind goes too."""
        sweep(self._marker)
        for pump in self._pumps:
            pump.join(1.0)
        with contextlib.suppress(OSError):
            self._log.close()
        self._stage = _OVER

    # What is said about it

    def _report(self) -> dict[int, int]:
        try:
            found = json.loads((self._scratch.path / "report.json").read_text(encoding="utf-8"))
            return {int(one["local_rank"]): int(one["exit_code"]) for one in found}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _failure(self, slot: int, order: int | None, report: Mapping[int, int]) -> Failure:
        folder = next(iter(sorted(self._logs.glob(f"*/attempt_0/{slot}"))), None)
        said = _error_file(self._notes / f"error-{slot}.json")
        if not said and folder is not None:
            said = _error_file(folder / "error.json")
        # A report names who failed: a worker that is gone and not in it has ended with 0, and without a mark.
        others = 0 if report or self.code == 0 else None
        return Failure(
            rank=self.node_rank * self._settings.nproc_per_node + slot,
            node=self._identity.node,
            exit_code=report.get(slot, said.get("exit_code", others)),
            type=str(said.get("type", "")),
            text=str(said.get("text", "")),
            order=order or 0,
            time=float(said.get("time", 0.0)),
            log=str(folder / "stderr.log") if folder is not None else "",
            tail=tuple(_tail(folder / "stderr.log", _TAIL)) if folder is not None else (),
            incident=str(said.get("incident", "")),
            verdict=said.get("verdict") or {},
        )


_OVER = 9


def _error_file(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    own = record.get("bitwitness") if isinstance(record, dict) else None
    return own if isinstance(own, dict) else {}


def _tail(path: Path, lines: int) -> Sequence[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def echoes(everything_to_stderr: bool) -> tuple[TextIO, TextIO]:
    """Where to pass on what agents print."""
    return (sys.stderr if everything_to_stderr else sys.stdout), sys.stderr
