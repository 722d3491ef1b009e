"""Launching the ranks of a job on this machine, and reading back what each of them saw.

A launch costs seconds, so many scenarios share one: every rank runs a list of them in turn on one process group, and writes
what it saw as a line of JSON, which survives the rank. Nothing outlives a launch: the ranks are forked by one process,
leader of its own session, they die with it, and it dies with the tests; a deadline ends them all. That process is forked in its
turn, by one that has imported torch once for all launches of these tests.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

Seen = dict[str, Any]
"""What one rank saw in one scenario: JSON values."""


@dataclass(frozen=True)
class Scenario:
    """Something that every rank does. `run` is a function of a module and `given` its argument: both travel by pickle."""

    name: str
    run: Callable[[Rank, Any], Seen]
    given: Any = None
    per_node: int = 1


@dataclass(frozen=True)
class Rank:
    """Where a scenario finds itself. `folder` is its own, shared by the ranks."""

    rank: int
    world_size: int
    folder: Path

    @property
    def run_dir(self) -> Path:
        """Where the guard of this scenario writes."""
        return self.folder / "run"


@dataclass(frozen=True)
class Spec:
    """What the process that forks the ranks is told. Without a process group a rank is alone."""

    world_size: int
    folder: Path
    scenarios: Sequence[Scenario]
    process_group: bool = True
    collective_timeout: float = 60.0


@dataclass
class Launch:
    """What came back from a launch."""

    spec: Spec
    seconds: float
    timed_out: bool
    exit_codes: list[int | None]
    results: list[dict[str, Seen]] = field(default_factory=list)

    def seen(self, name: str) -> list[Seen]:
        """What every rank saw in a scenario; fails, with the ranks' output, where one of them has nothing to say."""
        for rank, seen in enumerate(self.results):
            if name not in seen:
                pytest.fail(f"rank {rank} did not finish {name} ({self._how_it_ended()})\n{self.output(rank)}")
            if "crashed" in seen[name]:
                pytest.fail(f"rank {rank} crashed in {name}: {seen[name]['crashed']}\n{self.output(rank)}")
        return [seen[name] for seen in self.results]

    def survivors(self, name: str) -> dict[int, Seen]:
        """What those ranks saw that were left to tell."""
        return {rank: seen[name] for rank, seen in enumerate(self.results) if name in seen}

    def folder(self, name: str) -> Path:
        """The folder of a scenario."""
        return folder_of(self.spec, name)

    def output(self, rank: int, characters: int = 6000) -> str:
        """The end of what a rank wrote, and of what the process that forked it wrote."""
        logs = [self.spec.folder / f"rank-{rank}.log", self.spec.folder / "launcher.log"]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-characters:]}" for log in logs if log.exists())

    def _how_it_ended(self) -> str:
        ended = f"exit codes {self.exit_codes}, after {self.seconds:.0f} s"
        return f"killed at the deadline, {ended}" if self.timed_out else ended


def launch(
    scenarios: Sequence[Scenario],
    world_size: int,
    folder: Path,
    deadline: float = 120.0,
    process_group: bool = True,
    collective_timeout: float = 60.0,
) -> Launch:
    """Run scenarios one after another on this many ranks; returns when all have ended, at the deadline by force."""
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names), "two scenarios of one launch have the same name"
    folder.mkdir(parents=True, exist_ok=True)
    spec = Spec(world_size, folder, scenarios, process_group, collective_timeout)
    for scenario in scenarios:
        folder_of(spec, scenario.name).mkdir(parents=True)
    (folder / "spec.pickle").write_bytes(pickle.dumps(spec))
    environment = _environment() | {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    started = time.monotonic()
    finished = forks().run(folder / "spec.pickle", folder / "launcher.log", environment, deadline)
    seconds = time.monotonic() - started
    codes = [_exit_code(folder / f"rank-{rank}.exit") for rank in range(world_size)]
    results = [_read_results(folder / f"rank-{rank}.jsonl") for rank in range(world_size)]
    return Launch(spec, seconds, not finished, codes, results)


def folder_of(spec: Spec, name: str) -> Path:
    """The folder that a scenario has for itself."""
    return spec.folder / "scenarios" / name.replace("/", "_").replace(" ", "_")


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}


class Forks:
    """The process that has imported torch, and is asked to fork one launch at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.guard.worker", str(os.getpid())],
            cwd=ROOT,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,  # select knows nothing of a line that was read ahead
        )

    @property
    def usable(self) -> bool:
        return self._process.poll() is None

    def run(self, spec: Path, log: Path, environment: dict[str, str], deadline: float) -> bool:
        """A launch; False where it was ended at the deadline. It has ended when this returns, however it returns."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"spec": str(spec), "log": str(log), "environment": environment}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        pid, ended = self._answer(), False
        try:
            ended = bool(select.select([self._process.stdout], [], [], deadline)[0])
        finally:
            if not ended:
                _kill_session(pid)
            self._answer()
        return ended

    def close(self) -> None:
        """It ends when nobody can ask any more."""
        self._process.communicate()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the process that forks launches has ended with exit code {self._process.wait()}")
        return int(line)


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # it has just been forked, and leads no session yet; or it has just ended
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)


_started: list[Forks] = []


def forks() -> Forks:
    """The one of these tests; started when first needed, and again after it was killed."""
    if not _started or not _started[-1].usable:
        _started.append(Forks())
        atexit.register(_started[-1].close)
    return _started[-1]


def _read_results(file: Path) -> dict[str, Seen]:
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {line["name"]: line["seen"] for line in lines}


def _exit_code(file: Path) -> int | None:
    return int(file.read_text()) if file.exists() else None
