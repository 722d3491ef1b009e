"""`kill -9` at random instants, of a worker, an agent or a wrapper, between saves and in the midst of one.

Whatever was killed, the same command then goes on; the end is bit for bit that of a job that was left alone; no file is
half-written and no process stays behind. One instant on one node of two ranks by default; `BITWITNESS_EXHAUSTIVE=1` takes forty on
three nodes.
The job that was left alone is run without a supervisor, by processes that need not import torch.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from bitwitness.runfiles import RunFiles, read_label
from bitwitness.runfiles.label import verify_files
from tests.guard.harness import Scenario, launch
from tests.supervise import real_job

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
INSTANTS = 40 if EXHAUSTIVE else 1
VICTIMS = ("worker", "agent", "wrapper", "everything")
MARK = "BITWITNESS_TEST_KILLS"
NODES, PER_NODE = (3, 1) if EXHAUSTIVE else (1, 2)
RANKS = NODES * PER_NODE
PAUSE = 0.05
IMPORTS = 5.0
"""Seconds: what comes before the training takes about so long."""

pytestmark = pytest.mark.timeout(60 + 60 * INSTANTS)


@dataclass(frozen=True)
class Place:
    """One job: where it runs, and the mark by which its processes are known."""

    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> subprocess.Popen[bytes]:
        job = [str(Path(__file__).with_name("real_job.py")), str(self.run_dir), str(self.folder), str(PAUSE)]
        options = [
            "--local",
            "--nodes",
            str(NODES),
            "--nproc-per-node",
            str(PER_NODE),
            "--run-dir",
            str(self.run_dir),
            "--max-restarts",
            "2",
        ]
        environment = os.environ | {MARK: str(self.folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "bitwitness", "run", *options, *job],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """The processes of this job that live, each with its command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                if f"{MARK}={self.folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def kinds(self) -> dict[str, list[int]]:
        """Those that can be killed, by what they are."""
        processes = self.processes()
        return {
            "worker": [pid for pid, command in processes.items() if "supervise.worker" in command],
            "agent": [pid for pid, command in processes.items() if "supervise.agent" in command],
            "wrapper": [
                pid for pid, command in processes.items() if "supervise" in command or "bitwitness run" in command
            ],
            "everything": list(processes),
        }

    def digests(self) -> list[str]:
        return [(self.folder / f"rank-{rank}").read_text() for rank in range(RANKS)]

    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")[-6000:]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for pid in made.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _gone(place: Place, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while place.processes():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _wait_until_it_trains(place: Place, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and not list(place.folder.glob("training-*")):
        assert time.monotonic() < deadline, f"it does not begin:\n{place.output()}"
        time.sleep(0.02)


def _run_to_the_end(place: Place, attempts: int = 3) -> None:
    for _ in range(attempts):
        process = place.start()
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job hangs:\n{place.output()}")
        assert _gone(place), f"left behind: {place.processes()}\n{place.output()}"
        if code == 0:
            return
    pytest.fail(f"it did not end well in {attempts} attempts (exit code {code}):\n{place.output()}")


def _whole(place: Place) -> None:
    """Every visible file of the run is whole."""
    files = RunFiles(place.run_dir)
    for path in files.checkpoints.list():
        assert not verify_files(path, read_label(path))
    assert not files.incidents(), "a kill was taken for corruption"
    for rank in range(RANKS):
        list(files.read_journal(rank))


def test_killed_at_random_instants(tmp_path: Path, seed: int) -> None:
    reference = Place(tmp_path / "reference")
    scenario = Scenario("alone", real_job.alone, str(reference.folder), PER_NODE)
    alone = launch([scenario], RANKS, reference.folder)
    assert len(alone.seen("alone")) == RANKS
    draw = random.Random(seed)
    for number in range(INSTANTS):
        place = Place(tmp_path / f"instant-{number}")
        place.folder.mkdir()
        victim = draw.choice(VICTIMS)
        process = place.start()
        if early := draw.random() < 0.2:
            instant = draw.uniform(0.0, IMPORTS)
        else:
            instant = draw.uniform(0.0, 2 * PAUSE * real_job.STEPS)
            _wait_until_it_trains(place, process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(instant)
        pids = place.kinds()[victim]
        chosen = pids if victim == "everything" else [draw.choice(pids)] if pids else []
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = f"instant {number}: {victim} {chosen} {instant:.2f} s after it began to {'run' if early else 'train'} (seed {seed})"
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{said}: the job hangs\n{place.output()}")
        assert _gone(place), f"{said}: left behind {place.processes()}"
        if code != 0:
            _run_to_the_end(place)
        assert place.digests() == reference.digests(), f"{said}\n{place.output()}"
        _whole(place)
