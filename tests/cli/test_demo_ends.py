"""However the demo ends, no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WORLD = 3


def processes_of(parent: int) -> list[int]:
    """The ranks that a process has started, wherever they hang now."""
    mark = f"BITWITNESS_PARENT={parent}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or is somebody else's
    return sorted(found)


def wait_until_gone(parent: int) -> None:
    deadline = time.monotonic() + 30
    while processes_of(parent):
        assert time.monotonic() < deadline, f"still there: {processes_of(parent)}"
        time.sleep(0.05)


@contextmanager
def running_demo(run_dir: Path, training: bool) -> Iterator[subprocess.Popen[str]]:
    """A demo whose ranks exist, and if asked have begun to train."""
    size = ["--nodes", str(WORLD), "--ranks-per-node", "1", "--steps", "10000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwitness", "demo", "--run-dir", str(run_dir), *size],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        events = [run_dir / "events" / f"rank-{rank:05d}.jsonl" for rank in range(WORLD)]
        while not (len(processes_of(process.pid)) == WORLD and (not training or all(one.exists() for one in events))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        wait_until_gone(process.pid)


@pytest.mark.parametrize("training", [False, True], ids=["while starting", "while training"])
def test_control_c(tmp_path: Path, training: bool) -> None:
    with running_demo(tmp_path / "run", training) as demo:
        os.killpg(demo.pid, signal.SIGINT)  # what a terminal does
        output, errors = demo.communicate(timeout=60)
        assert demo.returncode == 130
        assert "Error: interrupted" in errors
        assert "Traceback" not in output + errors
        wait_until_gone(demo.pid)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_command_is_killed(tmp_path: Path, sent: signal.Signals) -> None:
    with running_demo(tmp_path / "run", training=True) as demo:
        demo.send_signal(sent)
        demo.wait(60)
        wait_until_gone(demo.pid)


def test_a_rank_is_killed(tmp_path: Path) -> None:
    with running_demo(tmp_path / "run", training=True) as demo:
        os.kill(processes_of(demo.pid)[1], signal.SIGKILL)
        output, errors = demo.communicate(timeout=60)
        assert demo.returncode == 1
        assert "was killed by SIGKILL" in errors
        assert "Traceback (most recent call last)" not in output
        wait_until_gone(demo.pid)
