"""However the demo ends, no process of it is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bitwitness.supervise.processes import holding

WORLD = 2
MARK = "BITWITNESS_TEST_DEMO"


@dataclass
class Demo:
    """A demo that runs, and all that hang on it, wherever they hang now: the mark is in their environment."""

    process: subprocess.Popen[str]
    mark: str
    run_dir: Path

    def others(self) -> list[int]:
        return sorted(set(holding(self.mark, MARK)) - {self.process.pid})

    def is_starting(self) -> bool:
        return len(self.others()) == WORLD

    def is_training(self) -> bool:
        return all((self.run_dir / "events" / f"rank-{rank:05d}.jsonl").exists() for rank in range(WORLD))

    def is_supervised(self) -> bool:
        """Whether agents have started workers: supervisor, three nodes, two agents, two workers."""
        log = self.run_dir / "guarded" / "supervise" / "log.jsonl"
        return log.exists() and '"started"' in log.read_text() and len(self.others()) >= 1 + WORLD + 1 + 2 * WORLD

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + 60
        while self.others():
            assert time.monotonic() < deadline, f"still there: {self.others()}"
            time.sleep(0.05)


@contextmanager
def running_demo(run_dir: Path, state: Callable[[Demo], bool], steps: int = 10_000) -> Iterator[Demo]:
    """A demo that has come as far as this."""
    size = ["--nodes", str(WORLD), "--ranks-per-node", "1", "--steps", str(steps), "--fault", "none"]
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwitness", "demo", "--run-dir", str(run_dir), *size],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    demo = Demo(process, mark, run_dir)
    try:
        demo.wait_until(lambda: state(demo))
        yield demo
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        demo.wait_until_gone()


def interrupt(demo: Demo) -> None:
    os.killpg(demo.process.pid, signal.SIGINT)  # what a terminal does
    output, errors = demo.process.communicate(timeout=60)
    assert demo.process.returncode == 130, errors
    assert "Error: interrupted" in errors
    assert "Traceback" not in output + errors
    demo.wait_until_gone()


def test_control_c_while_starting(tmp_path: Path) -> None:
    with running_demo(tmp_path / "run", Demo.is_starting) as demo:
        interrupt(demo)


@pytest.mark.skipif(os.environ.get("BITWITNESS_EXHAUSTIVE") != "1", reason="a demo more: BITWITNESS_EXHAUSTIVE=1")
def test_control_c_while_supervised(tmp_path: Path) -> None:
    with running_demo(tmp_path / "run", Demo.is_supervised, steps=6) as demo:
        interrupt(demo)


def test_the_command_is_killed_while_supervised(tmp_path: Path) -> None:
    with running_demo(tmp_path / "run", Demo.is_supervised, steps=6) as demo:
        demo.process.kill()
        demo.wait_until_gone()


def test_a_rank_is_killed(tmp_path: Path) -> None:
    with running_demo(tmp_path / "run", Demo.is_training) as demo:
        os.kill(demo.others()[1], signal.SIGKILL)
        output, errors = demo.process.communicate(timeout=60)
        assert demo.process.returncode == 1
        assert "was killed by SIGKILL" in errors
        assert "Traceback (most recent call last)" not in output
        demo.wait_until_gone()
