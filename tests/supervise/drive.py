"""Supervised runs for the tests: without torch, with short times, and all their processes known by a mark.

As a program (`python -m tests.supervise.drive SETTINGS`) it is `bitwitness run` with the plain agent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwitness.errors import BitwitnessError
from bitwitness.runfiles.journal import read_journal
from bitwitness.supervise.events import Event
from bitwitness.supervise.processes import holding
from bitwitness.supervise.settings import PLAIN_AGENT, Settings

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Path(__file__).with_name("job.py")
MARK = "BITWITNESS_TEST_MARK"
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""

QUICK: dict[str, Any] = {
    "agent": PLAIN_AGENT,
    "tick": 0.04,
    "settle": 1.0,
    "lost_after": 3.0,
    "join_timeout": 20.0,
    "grace": 10.0,
    "hang_timeout": 0.0,
}


def until(what: Callable[[], Any], why: str = "") -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = what()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited in vain: {why or what}"
        time.sleep(0.02)


@dataclass
class Driven:
    """One started `bitwitness run`."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Place:
    """A run directory, and what was started in it."""

    folder: Path
    started: list[Driven] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def mark(self) -> str:
        return str(self.folder)

    def start(self, *plan: str, index: int | None = None, env: dict[str, str] | None = None, **changes: Any) -> Driven:
        """Start a run of the job: a local one, or with `index` one wrapper of a cluster."""
        made = {**QUICK, "local": index is None, "nodes": 2, "nproc_per_node": 1, **changes}
        settings = Settings(run_dir=self.run_dir, **{"script": str(JOB), "args": tuple(plan), **made})
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BITWITNESS_")}
        environment |= {MARK: self.mark, "PYTHONPATH": str(ROOT), **(env or {})}
        log = self.folder / f"output-{len(self.started)}.log"
        told = json.dumps({"settings": settings.to_json(), "index": index})
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.supervise.drive", told],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Driven(process, log))
        return self.started[-1]

    def run(self, *plan: str, **changes: Any) -> Driven:
        """Start one, and wait for its end."""
        driven = self.start(*plan, **changes)
        driven.wait()
        return driven

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found = read_journal(self.run_dir / "supervise" / "log.jsonl")
        return [one for one in found if kind in ("", one["kind"])]

    def processes(self, word: str = "") -> dict[int, str]:
        """The processes that descend from what was started here, with their command lines."""
        found = {}
        for pid in holding(self.mark, MARK):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if word in command:
                found[pid] = command
        return found

    def steps(self) -> list[str]:
        """Which steps the job has come to: `rank generation step`, in order."""
        path = self.run_dir / "steps"
        return path.read_text().splitlines() if path.exists() else []

    def kill_all(self) -> None:
        """`kill -9` of everything."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A place; when it is left nothing that was started there may live."""
    made = Place(folder)
    try:
        yield made
        until(lambda: not made.processes(), f"still alive: {made.processes()}")
    finally:
        made.kill_all()
        for driven in made.started:
            driven.process.wait(PATIENCE)


def main() -> None:
    """What `bitwitness run` does, with these settings."""
    from bitwitness.supervise.identity import identify
    from bitwitness.supervise.local import run_local
    from bitwitness.supervise.wrapper import run_node

    told = json.loads(sys.argv[1])
    settings, index = Settings.from_json(told["settings"]), told["index"]

    def show(event: Event) -> None:
        sys.stderr.write("\n  ".join((f"[{event.kind}] {event.text}", *event.details)) + "\n")

    try:
        if index is None:
            stop = run_local(settings, show)
        else:
            stop = run_node(settings, identify(index, settings.nproc_per_node, os.environ, "127.0.0.1"), show)
    except BitwitnessError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(json.dumps(stop.summary) + "\n")
    sys.exit(stop.exit_code)


if __name__ == "__main__":
    main()
