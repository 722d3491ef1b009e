"""`kill -9` at random instants: whatever a writer was doing, each file is whole or absent.

The writers are real processes that write as fast as they can; they are killed after a random time, looked at, and
followed by another writer in the same directory, as after a restart.
"""

from __future__ import annotations

import json
import logging
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwitness.errors import RunFilesError
from bitwitness.runfiles import RunFiles, read_incident

KILLS = 15
EVIDENCE_BYTES = 300_000
_LONG = 20_000_000  # journals above this are begun anew, only so that reading them does not take the test's time

PREAMBLE = """
import sys
from bitwitness.runfiles import RunFiles, new_incident_id, write_bytes
files = RunFiles(sys.argv[1]).create()
start = int(sys.argv[2])
"""

JOURNAL = """
journal = files.journal(0)
print("ready", flush=True)
for number in range(start, start + 10**9):
    journal.append("ledger", {"number": number, "text": "x" * (number * 7919 % 60_000)})
"""

RUN = """
print("ready", flush=True)
for number in range(start, start + 10**9):
    files.write_run({"number": number, "text": "x" * (number * 7919 % 600_000), "end": number})
"""

INCIDENTS = f"""
files.discard_staged()
print("ready", flush=True)
verdict = {{"status": "unattributed", "step": 1, "kind": "compute"}}
place = {{"rank": 0, "node": "a", "device": "b", "slot": 0}}
while True:
    incident_id = new_incident_id()
    for rank in range(3):
        write_bytes(files.stage_incident(incident_id) / f"rank-{{rank}}.pt", bytes({EVIDENCE_BYTES}))
    record = {{"verdict": verdict, "observations": [], "placement": [place], "text": "x" * 100_000}}
    files.commit_incident(incident_id, record)
"""


def write_until_killed(program: str, run_dir: Path, start: int, delay: float) -> None:
    """Run a writer and kill it some time after it has begun to write."""
    command = [sys.executable, "-c", PREAMBLE + program, str(run_dir), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        try:
            assert select.select([writer.stdout], [], [], 60)[0], "the writer did not start"
            ready = writer.stdout.readline()
            time.sleep(delay)
        finally:
            writer.kill()
        assert (ready, writer.wait()) == ("ready\n", -signal.SIGKILL), writer.stderr.read()


@pytest.fixture
def kill(tmp_path: Path, seed: int) -> Callable[[str, Callable[[int], int]], None]:
    """Kill writers of a program many times, and look at what each of them left; the look says where the next starts."""

    def many(program: str, look: Callable[[int], int]) -> None:
        draw, start = random.Random(seed), 0
        for _ in range(KILLS):
            write_until_killed(program, tmp_path, start, draw.uniform(0, 0.15))
            start = look(start)

    return many


def test_journals(tmp_path: Path, kill: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    files = RunFiles(tmp_path).create()
    path = tmp_path / "journal" / "rank-00000.jsonl"
    caplog.set_level(logging.ERROR)

    def look(start: int) -> int:
        content = path.read_bytes()
        whole, end, _ = content.rpartition(b"\n")
        numbers = [json.loads(line)["number"] for line in whole.splitlines()] if end else []
        assert numbers == list(range(len(numbers))), "a line is torn, missing or doubled in the middle"
        assert [record["number"] for record in files.read_journal(0)] == numbers
        assert len(numbers) >= start
        if len(content) > _LONG:
            path.unlink()
            return 0
        return len(numbers)

    kill(JOURNAL, look)
    # A kill rarely falls into a system call, so every place where a line can be torn is tried as well.
    line = b'{"schema":1,"kind":"ledger","rank":0,"number":0}\n'
    for size in range(len(line)):
        path.write_bytes(line + line[:size])
        assert len(list(files.read_journal(0))) == 1
        files.journal(0).append("ledger", {"number": 1})
        assert [record["number"] for record in files.read_journal(0)] == [0, 1]


def test_run_json(tmp_path: Path, kill: Callable[..., None]) -> None:
    files = RunFiles(tmp_path)

    def look(start: int) -> int:
        try:
            record = files.read_run()
        except RunFilesError as error:
            assert "does not exist" in str(error)  # noqa: PT017
            assert start == 0, "a file that was there is gone"
            return start
        number = int(record["number"])
        assert record["end"] == number
        assert len(record["text"]) == number * 7919 % 600_000
        assert number >= start - 1
        return number + 1

    kill(RUN, look)
    files.discard_staged()
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        ["incidents", "journal", "run.json"],
        ["incidents", "journal"],
    )


def test_incidents(tmp_path: Path, kill: Callable[..., None]) -> None:
    files = RunFiles(tmp_path)
    staged = 0

    def look(start: int) -> int:
        nonlocal staged
        found = files.incidents()
        assert len(found) >= start, "an incident is gone"
        for path in found[start:]:
            assert len(read_incident(path).record["text"]) == 100_000
            names = {evidence.name: evidence.stat().st_size for evidence in path.iterdir()}
            assert names.pop("incident.json")
            assert names == {f"rank-{rank}.pt": EVIDENCE_BYTES for rank in range(3)}
        staged += len(list((tmp_path / "incidents").glob(".staging-*")))
        return len(found)

    kill(INCIDENTS, look)
    assert staged, "no kill came while an incident was staged: the delays prove nothing"
    files.discard_staged()
    assert len(list((tmp_path / "incidents").iterdir())) == len(files.incidents())
