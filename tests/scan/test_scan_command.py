"""`bitwitness scan` from the outside: ranks that are real processes, one of which computes wrongly and one of which is killed.

How fast ranks compute says nothing here: a scan is ended by what it has seen, and by no clock.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.runfiles.files import TEMPORARY, write_json
from bitwitness.scan import coordinating
from bitwitness.scan.concluding import Conclusion
from bitwitness.scan.coordinating import Coordinator, State
from bitwitness.scan.drill import Drill
from bitwitness.scan.launching import Launched, Share, torchrun
from bitwitness.scan.settings import Settings
from bitwitness.supervise.processes import started

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
COMMAND = (sys.executable, "-m", "bitwitness", "scan")
PATIENCE = 50.0


def scan(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["scan", *arguments], env=environment)


def wait_for(done: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.05)


def begun(path: Path, world: int) -> list[int]:
    """The processes of all ranks once they have begun, else nothing."""
    files = AnswerFiles(path)
    at_work = [rank for rank in files.ranks() if files.answers(rank).exists() and files.answers(rank).stat().st_size]
    return [files.device(rank).pid for rank in at_work] if len(at_work) == world else []


def gone(pids: list[int]) -> bool:
    return all(started(pid) is None for pid in pids)


# A scan with a fault and a death --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> tuple[AnswerFiles, Settings, Conclusion]:
    """Five ranks, of which one computes wrongly, and one is killed; over as soon as the one fails and the other is lost."""
    files = AnswerFiles(tmp_path_factory.mktemp("scan"))
    files.create()
    drills = (Drill(0.2, rank=2),)
    settings = Settings(id="struck", world=5, seconds=PATIENCE, suites=("ops",), drills=drills, played=True, seed=1)
    write_json(files.scan, settings.to_json())
    seen: list[str] = []
    killed: list[int] = []

    def told(state: State) -> None:
        seen.extend(state.messages)
        if not killed and files.answers(4).is_file() and "answer" in files.answers(4).read_text():
            killed.append(files.device(4).pid)
            os.kill(killed[0], signal.SIGKILL)
        lost = any("rank 4 is lost" in message for message in seen)
        kept = list(files.evidence.glob("rank-00002-*.json"))
        if lost and kept and state.wrong > 20:
            coordinator.asked = signal.SIGTERM

    with pytest.MonkeyPatch.context() as patch, Launched(files, Share(0, 5), played=True) as launched:
        patch.setattr(coordinating, "_LOOK", 0.3)
        coordinator = Coordinator(files, settings, launched, told=told)
        done = coordinator.watch()
        assert gone([launched.pid, *(files.device(rank).pid for rank in range(5))])
    write_json(files.result, done.to_json(settings) | {"exit_code": 143})
    return files, settings, done


def test_the_wrong_one_fails_and_the_dead_one_is_not_judged(struck: tuple[AnswerFiles, Settings, Conclusion]) -> None:
    _, settings, done = struck
    standings = [one.standing for one in done.judgement.devices]
    assert (standings[2], standings[4]) == ("fail", "not judged")
    # It ends as soon as that is clear: on a busy machine before others have done enough to pass.
    assert "fail" not in (standings[0], standings[1], standings[3])
    assert re.search(r"killed by SIGKILL.*it was at ops/", done.judgement.devices[4].reason)
    assert done.drill_outcome(settings) == "found"
    assert all(finding.wrong for finding in done.judgement.devices[2].findings)


def test_it_is_shown_from_its_files_with_what_to_do(struck: tuple[AnswerFiles, Settings, Conclusion]) -> None:
    shown = scan("show", str(struck[0].path))
    assert shown.exit_code == 0
    passed = [one.standing for one in struck[2].judgement.devices].count("pass")
    counted = f"{passed} pass, " if passed else ""
    for words in (
        f"FAIL: {counted}1 fail, {4 - passed} not judged",
        "a drill (rank=2 p=0.2)",
        "evidence:",
        "xor",
        "the drill was found on rank 2, and nothing else",
    ):
        assert words in " ".join(shown.stdout.split())
    record = json.loads(scan("show", str(struck[0].path), "--json").stdout)
    assert (record["drill"], record["interrupted"], record["seed"], record["suites"]) == (True, True, 1, ["ops"])


def test_it_is_shown_where_there_is_no_torch(struck: tuple[AnswerFiles, Settings, Conclusion]) -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from bitwitness.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "scan", "show", str(struck[0].path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "FAIL: " in done.stdout) == (0, True), done.stderr


def test_its_evidence_can_be_computed_again(struck: tuple[AnswerFiles, Settings, Conclusion]) -> None:
    path = next(one["path"] for one in struck[2].evidence if one["standing"] == "fail")
    done = scan("replay", str(path), "--calls", "3", "--json", BITWITNESS_NODE="elsewhere")
    record = json.loads(done.stdout)
    assert (done.exit_code, record["outcome"]) == (0, "expected"), record["reason"]
    assert record["differing"] == 1


# Ends ---------------------------------------------------------------------------------------------------------------


def test_kill_of_the_coordinator_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(
        [*COMMAND, "--devices", "3", "--suite", "ops", "--out", str(out)], stderr=subprocess.PIPE
    ) as process:
        wait_for(lambda: begun(out, 3), "three ranks")
        pids = begun(out, 3)
        so_far = scan("show", str(out))
        assert so_far.stdout.startswith("RUNNING: so far 3 not judged"), so_far.output
        process.kill()
    wait_for(lambda: gone(pids), "ranks to be gone")
    assert not list(out.rglob(f"*{TEMPORARY}"))
    assert not AnswerFiles(out).result.exists()
    shown, record = scan("show", str(out)).stdout, json.loads(scan("show", str(out), "--json").stdout)
    assert shown.startswith("NOT JUDGED, because there is no result: 3 not judged")
    assert "scan again" in shown
    assert (record["standing"], record["running"]) == ("not judged", False)
    assert {one["standing"] for one in record["devices"]} == {"not judged"}
    again = scan("--devices", "3", "--out", str(out))
    assert (again.exit_code, "is not empty" in again.stderr) == (2, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), *([(signal.SIGTERM, 143)] if EXHAUSTIVE else [])])
def test_interrupted_it_judges_what_there_is(tmp_path: Path, number: int, code: int) -> None:
    out = tmp_path / "out"
    command = [*COMMAND, "--devices", "3", "--suite", "ops", "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        wait_for(lambda: begun(out, 3), "three ranks")
        pids = begun(out, 3)
        process.send_signal(number)
        text, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    record = json.loads(text)
    assert record["interrupted"]
    assert record["standing"] in ("pass", "not judged")
    assert {"schema": 1, **record} == json.loads(AnswerFiles(out).result.read_text())
    assert gone(pids)


# Refusals ------------------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--suite", "all"], {}, "is no suite"),
        (["--minutes", "0"], {}, "--minutes"),
        (["--devices", "2", "--drill", "rank=2"], {}, "ranks of this scan are 0 to 1"),
        (["--devices", "2", "--drill", "rank"], {}, "is not understood"),
        (["--devices", "2", "--learn", "g.json"], {}, "belong together"),
        (["--devices", "2", "--verify-key", "k"], {}, "--golden"),
        (["--devices", "2", "--golden", "absent.json"], {}, "--verify-key"),
        (["--devices", "2", "--vendor", "acme"], {}, "dcgm"),
        (["--devices", "2", "--out", "/proc/nowhere"], {}, "/proc/nowhere"),
        (["--devices", "2"], TORCHRUN, "without torchrun"),
        (["--devices", "2", "--cpu"], {}, "for torchrun"),
        ([], TORCHRUN, "--out DIR"),
        ([], TORCHRUN | {"RANK": "2"}, "RANK 2"),
        (["--stop"], {}, "--ripple"),
        (["--devices", "2", "--minutes", "nan"], {}, "--minutes"),
        (["--devices", "2", "--minutes", "inf"], {}, "--minutes"),
        (["--devices", "2", "--confidence", "nan"], {}, "--confidence"),
        (["--devices", "2", "--vendor-timeout", "nan"], {}, "--vendor-timeout"),
        (["--devices", "2", "--vendor-timeout", "inf"], {}, "--vendor-timeout"),
        (["--ripple", "run", "--budget", "nan"], {}, "--budget"),
        (["--ripple", "run", "--slice-ms", "nan"], {}, "--slice-ms"),
        (["--devices", "2", "--out", "a\nb"], {}, "do not print"),
        (["--devices", "2", "--golden", "a\x1bb"], {}, "do not print"),
        (["show", "a\nb"], {}, "do not print"),
        (["replay", "a\tb"], {}, "do not print"),
        (["key", "a\nb"], {}, "do not print"),
        (["show", "/nowhere"], {}, "does not exist"),
        (["show", __file__], {}, "is not a directory"),
        (["replay", "/nowhere.json"], {}, "/nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = scan(*arguments, **environment)
    assert (done.exit_code, said in done.stderr) == (2, True), done.output
    assert not list(tmp_path.iterdir())


def test_a_machine_without_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwitness.cli.scan_start.count_devices", lambda: 0)
    done = scan()
    assert (done.exit_code, "give --devices N" in done.stderr) == (2, True)
    done = scan("--exit-codes", "nagios")
    assert (done.exit_code, done.stdout.startswith("BITWITNESS UNKNOWN - torch sees no GPU")) == (3, True)


def test_what_torchrun_says_is_read() -> None:
    assert torchrun({}) is None
    found = torchrun(TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "r"})
    assert found is not None
    assert (found.rank, found.world, found.slot) == (1, 2, 1)
    assert found.job != getattr(torchrun(TORCHRUN), "job", "")


# What the issue asks for ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not EXHAUSTIVE, reason="two minutes, and as much of two cores as there is")
@pytest.mark.timeout(600)
def test_one_fault_in_a_thousand_calls_of_one_of_sixteen_is_found(tmp_path: Path) -> None:
    arguments = [
        "--devices",
        "16",
        "--minutes",
        "2",
        "--drill",
        "rank=5 p=0.001",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    record = json.loads(done.stdout)
    assert [one["rank"] for one in record["devices"] if one["standing"] == "fail"] == [5]
    assert record["drill_outcome"] == "found"


@pytest.mark.skipif(not EXHAUSTIVE, reason="twenty scans")
@pytest.mark.timeout(3600)
def test_twenty_healthy_scans_without_a_failure(tmp_path: Path) -> None:
    for number in range(20):
        arguments = ["--devices", "16", "--minutes", "0.5", "--out", str(tmp_path / str(number)), "--json"]
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
        record = json.loads(done.stdout)
        assert record["standing"] != "fail", record
