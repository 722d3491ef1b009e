"""The script that starts jobs in pods, run by a real shell: exit codes, signals, and what is handed in."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.deploy.manifests import EXAMPLES, documents
from tests.deploy.test_manifests import parsed

SCRIPT = documents(EXAMPLES / "start.yaml")[0]["data"]["start.sh"]
STAND_IN = """#!/bin/sh
echo "$@" >> "$LOG"
[ "$1" = fleet ] && exit "${SEND:-0}"
echo "index $BITWITNESS_NODE_RANK" >> "$LOG"
trap 'echo asked >> "$LOG"; /bin/sleep 0.2; exit 143' TERM
[ -n "${FINDS:-}" ] && mkdir -p "$RUN_DIR/incidents/$FINDS"
[ -n "${WAITS:-}" ] && { : > "$LOG.waits"; while :; do /bin/sleep 0.05; done; }
exit "${CODE:-0}"
"""
SLEEP = """#!/bin/sh
echo slept >> "$LOG.slept"
exec /bin/sleep 0.02
"""
ID = "20261129T093015Z-4be1d2"


class Play:
    """A run directory, a program that stands in for ours, and what it was asked to do."""

    def __init__(self, folder: Path) -> None:
        self.log, self.run_dir = folder / "log", folder / "runs" / "train"
        self.run_dir.mkdir(parents=True)
        (folder / "start.sh").write_text(SCRIPT, encoding="utf-8")
        (folder / "bitwitness").write_text(STAND_IN, encoding="utf-8")
        (folder / "bitwitness").chmod(0o755)
        self.folder = folder
        self.command = ["/bin/sh", str(folder / "start.sh"), "--nodes", "4", "train.py", "--lr", "0.1 2"]
        self.environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "RUN_DIR": str(self.run_dir),
            "BITWITNESS_FLEET": "http://fleet:9470",
            "CREDENTIALS_DIRECTORY": "/etc/bitwitness/inbox",
            "POD_NAMESPACE": "research",
            "JOB_COMPLETION_INDEX": "0",
        }

    def run(self, **environment: str) -> int:
        with self._process(**environment) as process:
            return process.wait(timeout=30)

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []

    def hurry(self) -> None:
        """Let the script look often, and write down that it does."""
        (self.folder / "sleep").write_text(SLEEP, encoding="utf-8")
        (self.folder / "sleep").chmod(0o755)

    def looks(self) -> int:
        """How often the script has looked for incidents since."""
        file = Path(f"{self.log}.slept")
        return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0

    def sent(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("fleet send")]

    @contextmanager
    def started(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """Runs until it is told to end; the run inside it has begun to wait."""
        with self._process(WAITS="1", **environment) as process:
            until(lambda: Path(f"{self.log}.waits").exists())
            yield process

    @contextmanager
    def _process(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(self.command, env={**self.environment, **environment}, start_new_session=True)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the script has started
            process.wait()


def until(holds: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_the_code_is_that_of_the_run_whatever_becomes_of_the_incident(play: Play) -> None:
    assert play.run() == 0
    assert play.lines() == [f"run --run-dir {play.run_dir} --nodes 4 train.py --lr 0.1 2", "index 0"]
    assert play.run(CODE="160", FINDS=ID) == 160
    assert len(play.sent()) == 1
    assert play.run(CODE="3", SEND="1") == 3, "the controller could not be reached"
    assert play.run(CODE="2", BITWITNESS_FLEET="", SEND="1") == 2


@pytest.mark.parametrize("name", ["POD_NAMESPACE", "CREDENTIALS_DIRECTORY"])
def test_the_code_is_that_of_the_run_whatever_the_pod_is_not_told(play: Play, name: str) -> None:
    del play.environment[name]
    assert play.run(CODE="160", FINDS=ID) == 160
    assert len(play.sent()) == (1 if name == "POD_NAMESPACE" else 0)
    assert all(parsed(line.split())[1].params["run"] == "train" for line in play.sent())


def test_what_is_handed_in_is_a_command_that_our_program_understands(play: Play) -> None:
    assert play.run(CODE="160", FINDS=ID) == 160
    params = parsed(play.sent()[0].split())[1].params
    assert params["path"] == play.run_dir
    assert params["address"] == "http://fleet:9470"
    assert params["token_file"] == Path("/etc/bitwitness/inbox/token")
    assert params["run"] == "research.train"
    assert params["as_json"], "else it warns each time of a token that goes over the cluster's own network"


@pytest.mark.parametrize(("index", "sends"), [("0", True), ("1", True), ("2", False), ("10", False)])
def test_the_first_two_pods_hand_in(play: Play, index: str, sends: bool) -> None:
    assert play.run(CODE="160", FINDS=ID, JOB_COMPLETION_INDEX=index) == 160
    assert bool(play.sent()) == sends
    assert f"index {index}" in play.lines()


def test_the_place_in_a_pytorchjob(play: Play) -> None:
    del play.environment["JOB_COMPLETION_INDEX"]
    assert play.run(RANK="4") == 0
    assert "index 4" in play.lines()


def test_a_pod_without_a_place_does_not_start(play: Play) -> None:
    del play.environment["JOB_COMPLETION_INDEX"]
    assert play.run() != 0
    assert play.lines() == []


def test_sigterm_reaches_the_run_and_is_waited_for(play: Play) -> None:
    with play.started(FINDS=ID) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    assert "asked" in play.lines()
    assert len(play.sent()) == 1, "what was found before is handed in all the same"


def test_an_incident_is_handed_in_while_the_job_goes_on_and_only_once(play: Play) -> None:
    play.hurry()
    with play.started(FINDS=ID) as process:
        until(play.sent)
        looks = play.looks()
        until(lambda: play.looks() > looks + 4)
        assert len(play.sent()) == 1, "it looked again, and there was nothing new"
        (play.run_dir / "incidents" / ID.replace("4be1d2", "000000")).mkdir()
        until(lambda: len(play.sent()) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143


def test_what_was_not_taken_is_handed_in_again(play: Play) -> None:
    play.hurry()
    with play.started(FINDS=ID, SEND="1") as process:
        until(lambda: len(play.sent()) >= 3)
        assert process.poll() is None
