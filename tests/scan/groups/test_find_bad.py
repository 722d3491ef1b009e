"""The command on real processes: tests that fail, hang, crash, and a search that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.find_bad import read_nodes
from bitwitness.cli.main import cli
from bitwitness.scan.groups import keeper
from bitwitness.scan.groups.running import Running
from bitwitness.scan.groups.state import digest

MANY = bool(os.environ.get("BITWITNESS_EXHAUSTIVE"))
SCRIPT = """#!/bin/sh
echo "$1" >> "$(dirname "$0")/ran"
case ",$1," in {cases} esac
exit 0
"""


def script(folder: Path, cases: str) -> str:
    """A test command that ends as the cases say."""
    path = folder / "try.sh"
    path.write_text(SCRIPT.replace("{cases}", cases))
    path.chmod(0o755)
    return f"{path} {{nodes}}"


def find(*args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and result."""
    done = CliRunner().invoke(cli, ["find-bad", *args, "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_bad_node_is_found_and_the_state_kept(tmp_path: Path) -> None:
    code, result = find("--nodes", "n[01-08]", "--test", script(tmp_path, "*,n03,*) exit 1;;"), "--max-bad", "1")
    assert (code, result["bad"], result["pairs"]) == (0, ["n03"], [])
    assert result["finished"]
    assert result["tests"] == len((tmp_path / "ran").read_text().splitlines()) >= result["bound"]["counting"]
    assert Path(result["state"]).exists()
    assert {"rounds", "confidence", "rate", "candidates", "not_judged", "seed"} <= result.keys()


def test_a_bad_link_is_found(tmp_path: Path) -> None:
    code, result = find("--nodes", "a,b,c,d", "--test", script(tmp_path, "*,b,*d,*) exit 1;;"))
    assert (code, result["bad"], result["pairs"]) == (0, [], [["b", "d"]])


def test_a_node_that_crashes_the_test_is_not_accused(tmp_path: Path) -> None:
    cases = "*,c,*) exit 7;; *,b,*) exit 1;;"
    code, result = find("--nodes", "a,b,c,d", "--test", script(tmp_path, cases), "--rate", "0.5")
    assert (code, result["bad"], result["not_judged"]) == (3, ["b"], ["c"])
    assert result["tests_not_judged"]["exit status 7"] >= 3


def test_a_test_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    cases = '*,b,*) sleep 300 & echo $! >> "$(dirname "$0")/left"; wait;;'
    code, result = find("--nodes", "a,b", "--test", script(tmp_path, cases), "--timeout", "0.5", "--rate", "1")
    assert (code, result["bad"], result["not_judged"]) == (3, [], ["b"])
    assert "timed out" in result["tests_not_judged"]
    for pid in (tmp_path / "left").read_text().split():
        gone(int(pid))


def test_a_keeper_that_is_killed_takes_its_test_with_it(tmp_path: Path) -> None:
    """And everything that the test started: whoever kills it may not know of it."""
    words = ["sh", "-c", f"sleep 300 & echo $! > {tmp_path}/left; echo $$ >> {tmp_path}/left; wait", "{nodes}"]
    running = Running(words, ["a"], "one", tmp_path)
    while not (tmp_path / "left").exists() or len((tmp_path / "left").read_text().split()) < 2:
        time.sleep(0.01)
    running.process.kill()
    running.process.wait()
    for pid in (tmp_path / "left").read_text().split():
        gone(int(pid))
    assert running.outcome() == ("not judged", "its keeper was killed")


def test_what_left_the_process_group_of_its_test_ends_with_it(tmp_path: Path) -> None:
    cases = '*,a,*) setsid sh -c "echo \\$\\$ >> left; exec sleep 300" & while [ ! -s left ]; do sleep 0.01; done;;'
    code, result = find("--nodes", "a,b", "--test", script(tmp_path, cases), "--rate", "1")
    assert (code, result["bad"]) == (0, [])
    for pid in (tmp_path / "left").read_text().split():
        gone(int(pid))


def test_of_what_a_test_prints_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('first'); print('x' * 5_000_000); print('last')", "{nodes}"]
    running = Running(words, ["a"], "one", tmp_path)
    assert ended(running) == ("passed", "")
    log = (tmp_path / "one.log").read_bytes()
    assert (log[:6], log[-5:]) == (b"first\n", b"last\n")
    assert b"bytes left out]" in log
    assert len(log) < 2 * keeper.KEPT + 100


def ended(running: Running) -> tuple[str, str]:
    """How a test ended, when it has."""
    while (outcome := running.outcome()) is None:
        time.sleep(0.01)
    return outcome


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        *((f"exit {code}", ("not judged", f"exit status {code}")) for code in (2, 125, 126, 127, 255)),
        ("kill -9 $$", ("not judged", "ended by SIGKILL")),
    ],
)
def test_how_a_test_ended_is_not_mistaken_for_how_it_was_started(
    tmp_path: Path, does: str, outcome: tuple[str, str]
) -> None:
    assert ended(Running(["sh", "-c", does, "{nodes}"], ["a"], "one", tmp_path)) == outcome


def test_a_keeper_that_fails_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of ours that falls over ends with 1, as a test that failed does."""
    broken = tmp_path / "broken.py"
    broken.write_text("raise BlockingIOError('no more processes')")
    monkeypatch.setattr(keeper, "__file__", str(broken))
    assert ended(Running(["true", "{nodes}"], ["a"], "one", tmp_path))[0] == "not judged"


def test_a_program_that_is_not_there_is_said_before_it_is_started(tmp_path: Path) -> None:
    for name in ("/no/such/command", "no-such-command"):
        done = CliRunner().invoke(cli, ["find-bad", "--nodes", "a,b", "--test", f"{name} {{nodes}}"])
        assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
        assert f"'{name}' could not be started" in done.output


def test_that_nothing_was_judged_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "no-program").write_bytes(b"\x7fELF")
    (tmp_path / "no-program").chmod(0o755)
    args = ["find-bad", "--nodes", "a,b,c,d", "--test", "./no-program {nodes}"]
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 3
    first = done.stdout.splitlines()[0]
    assert first.startswith("hardly any test was judged")
    assert "could not be started: Exec format error" in first


def gone(pid: int) -> None:
    """Wait until a process has ended; one that was killed is no zombie of ours."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"{pid} still runs")


@pytest.mark.parametrize("seed", range(12 if MANY else 1))
def test_a_killed_search_goes_on_where_it_was(tmp_path: Path, seed: int) -> None:
    """Killed at random, the tests are those of a search that was not, but for those that ran when it was killed."""
    rng = random.Random(seed)
    test = script(tmp_path, "*,n3,*) sleep 0.02; exit 1;; *) sleep 0.02;;")
    arguments = ["find-bad", "--nodes", "n[1-6]", "--test", test, "--max-bad", "1", "--seed", str(seed), "--json"]
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, "-m", "bitwitness", *arguments], stdout=subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=rng.uniform(0.4, 1.2) if kills < 3 else 50)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
    result = json.loads(output)
    assert (process.returncode, result["bad"]) == (0, ["n3"])
    ran = Counter((tmp_path / "ran").read_text().splitlines())
    # One that was killed once it had put its state away is over: the next call has searched anew.
    states = [
        [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "test"]
        for path in tmp_path.glob("find-bad-*.jsonl")
    ]
    assert all(
        len({tuple(line["test"]) for line in lines}) == len(lines) for lines in states
    )  # none that had ended again
    assert result["tests"] in map(len, states)
    tests = [line for lines in states for line in lines]
    ended = Counter(line["group"] for line in tests)
    again = Counter({digest(group.replace(",", "\n")): count for group, count in ran.items()}) - ended
    at_a_time = max(
        count
        for lines in states
        for count in Counter(line["test"][0] for line in lines if line["test"][2] == 0).values()
    )
    assert not ended - Counter({digest(group.replace(",", "\n")): count for group, count in ran.items()})
    assert again.total() <= kills * at_a_time  # only those that ran when it was killed
    assert not list(tmp_path.glob("find-bad-????????.jsonl"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nodes", "a", "--test", "true {nodes}"], "at least two"),
        (["--nodes", "", "--test", "true {nodes}"], "at least two"),
        (["--nodes", "a,b,a", "--test", "true {nodes}"], "named twice: a"),
        (["--nodes", "a,b;c", "--test", "true {nodes}"], "b;c"),
        (["--nodes", "n[1-", "--test", "true {nodes}"], "not understood"),
        (["--nodes", "@none", "--test", "true {nodes}"], "cannot be read"),
        (["--nodes", "a,b", "--test", "x"], "{nodes}"),
        (["--nodes", "a,b", "--test", "x {nodes} {rank}"], "{rank} is none of"),
        (["--nodes", "a,b", "--test", "x {nodes} {"], "braces"),
        (["--nodes", "a,b", "--test", "x {nodes} 'y"], "is no command"),
        (["--nodes", "a,b", "--test", ""], "empty"),
        (["--nodes", "a,b"], "either --test"),
        (["--nodes", "a,b", "--suite", "train"], "needs --launch"),
        (["--nodes", "a,b", "--suite", "all", "--launch", "x {nodes}"], "train, ops"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--max-bad", "3"], "--max-bad 3"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--confidence", "0.5"], "--confidence 0.5"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--confidence", "1"], "--confidence 1"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--rate", "0"], "--rate 0"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--min-group", "2"], "--min-group 2"),
        (["--nodes", "a,b", "--test", "true {nodes}", "--parallel", "0"], "--parallel 0"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["find-bad", *args])
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


def test_nodes_come_from_lists_and_files(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# spare\nn[08-10]\nx-1  # new\n\n")
    assert read_nodes("@list") == ["n08", "n09", "n10", "x-1"]
    assert read_nodes("a,n[1-2,4],b") == ["a", "n1", "n2", "n4", "b"]
