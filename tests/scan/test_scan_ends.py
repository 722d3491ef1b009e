"""How `bitwitness scan` ends: with a result as soon as there is one, with a code that accuses nobody wrongly, and with words that say
what failed and what to do. The ranks are played; what ends the command is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli import scan_start
from bitwitness.cli.main import cli
from bitwitness.errors import StorageBusy
from bitwitness.runfiles.answers import AnswerFiles, Device, Sheet
from bitwitness.runfiles.files import write_json
from bitwitness.scan import golden
from bitwitness.scan.concluding import Conclusion
from bitwitness.scan.evidence import Evidence, write
from bitwitness.scan.items import Item
from bitwitness.scan.launching import Share, Torchrun
from bitwitness.scan.living import lives, this_process
from bitwitness.scan.results import DeviceResult, Judgement, LinkResult
from bitwitness.scan.settings import Settings
from bitwitness.supervise.processes import started

pytest.importorskip("cryptography")

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
ITEM, RIGHT = "ops/add/float32/8", "a" * 32
PATIENCE = 30.0
WORLD = 4


def concluded(*, link: bool = False, name: str = "host") -> Conclusion:
    """What a scan of four devices comes to that computed one item rightly."""
    devices = [Device(rank, f"{name}-{rank}", f"gpu-{rank}", {"model": "m"}) for rank in range(WORLD)]
    sheets = [Sheet(device, {ITEM: {RIGHT: 500}}, ended="done") for device in devices]
    results = [DeviceResult(d.rank, d.node, d.device, "model m", "pass", "all right", 500, 0, 6e-3) for d in devices]
    nodes, names = ("host-1", "host-2"), ("gpu-1", "gpu-2")
    links = (LinkResult((1, 2), nodes, names, "fail", "3 of 90 arrived otherwise", 90, 3),) if link else ()
    coverage = {"ops": {"items": 1, "calls": 2000}}
    return Conclusion(judgement=Judgement(tuple(results), links), sheets=sheets, coverage=coverage)


def scan(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["scan", *arguments], env=environment)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for scans whose ranks have all done right."""
    monkeypatch.setattr(scan_start, "_watch", lambda *_: concluded())
    return tmp_path / "out"


def played(out: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    """A scan, and its result."""
    done = scan("--devices", str(WORLD), "--suite", "ops", "--out", str(out), *arguments)
    record = json.loads((out / "result.json").read_text())
    assert record["exit_code"] == done.exit_code, done.output
    return done, record


@pytest.fixture
def dcgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that stands for DCGM's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "dcgmi"


def prints(program: Path, text: str, more: str = "") -> None:
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n{more}\n")
    program.chmod(0o755)


def diagnosed(status: str, *warnings: Mapping[str, object]) -> str:
    """What DCGM prints of one GPU."""
    told = {"entity_group": "GPU", "entity_id": 3, "status": status, "warnings": warnings}
    tests = [{"name": "memory", "results": [told], "test_summary": {"status": status}}]
    return json.dumps({"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}})


FAULT = {"warning": "GPU 3 has a fault", "error_id": 52, "error_category": 10, "error_severity": 2}


def words(done: Result) -> str:
    return " ".join(done.stdout.split())


# What vendors and links add ---------------------------------------------------------------------------------------------


def test_a_failure_of_a_vendor_is_in_the_first_line_and_in_what_to_do(out: Path, dcgmi: Path) -> None:
    prints(dcgmi, diagnosed("Fail", FAULT))
    done, record = played(out, "--vendor", "dcgm")
    assert (done.exit_code, record["standing"]) == (1, "fail")
    assert done.stdout.startswith("FAIL: 4 pass; dcgm-diag failed gpu:3 on ")
    assert "let no job use gpu:3 on" in words(done)
    assert "our own work found nothing wrong there" in words(done)
    assert "nothing: no wrong answer" not in words(done)


@pytest.mark.parametrize(
    ("text", "more", "options"), [("garbage", "", []), ("", "exec sleep 600", ["--vendor-timeout", "0.5"])]
)
def test_a_vendor_that_told_nothing_is_in_the_first_line_and_in_what_to_do(
    out: Path, dcgmi: Path, text: str, more: str, options: list[str]
) -> None:
    prints(dcgmi, text, more)
    done, record = played(out, "--vendor", "dcgm", *options)
    assert (done.exit_code, record["standing"]) == (0, "pass")
    assert done.stdout.startswith("PASS: 4 pass; dcgm-diag did not judge ")
    assert "The standing above is of our own work only" in words(done)
    assert "nothing: no wrong answer" not in words(done)
    assert "more_within" not in record


def test_of_it_other_programs_hear_as_well(out: Path, dcgmi: Path) -> None:
    prints(dcgmi, "garbage")
    done, _ = played(out, "--vendor", "dcgm", "--exit-codes", "npd")
    first = done.stdout.splitlines()[0]
    assert first.startswith("pass: 4 devices, 2000 answers right, dcgm-diag did not judge")


def test_a_link_that_fails_alone_is_in_the_first_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_start, "_watch", lambda *_: concluded(link=True))
    done, _ = played(out)
    assert done.stdout.startswith("FAIL: 4 pass; the link of ranks 1 and 2 failed")
    assert "keep host-1 and host-2 from talking to each other" in words(done)


# Ended while a vendor's diagnostic runs ---------------------------------------------------------------------------------

PROGRAM = """
import sys
from bitwitness.cli import scan_start
from tests.scan.test_scan_ends import concluded
scan_start._watch = lambda *_: concluded()
from bitwitness.cli.main import main
main()
"""


def _in_the_middle_of_it(out: Path, dcgmi: Path, number: int) -> tuple[int, dict[str, Any], dict[str, Any], list[int]]:
    """A scan that gets a signal while a diagnostic runs: how it ended, its result before and after, and the processes of that."""
    pids = dcgmi.parent / "pids"
    prints(dcgmi, "", f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait")
    command = [sys.executable, "-c", PROGRAM, "scan", "--devices", "4", "--out", str(out), "--vendor", "dcgm"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + PATIENCE
        while not pids.exists():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        before = json.loads((out / "result.json").read_text())
        process.send_signal(number)
        code = process.wait(PATIENCE)
    after = json.loads((out / "result.json").read_text())
    return code, before, after, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, *([signal.SIGINT] if EXHAUSTIVE else [])])
def test_a_signal_then_loses_nothing_and_leaves_nothing(tmp_path: Path, dcgmi: Path, number: signal.Signals) -> None:
    code, before, after, pids = _in_the_middle_of_it(tmp_path / "out", dcgmi, number)
    until = time.monotonic() + PATIENCE
    while any(started(pid) is not None for pid in pids):
        assert time.monotonic() < until, "a diagnostic lives on"
        time.sleep(0.02)
    assert (before["standing"], before["interrupted"], len(before["devices"])) == ("pass", False, 4)
    assert "had not come to its end" in before["voices"][0]["reason"]
    if number == signal.SIGKILL:
        assert (code, after) == (-9, before)
    else:
        assert code == after["exit_code"] == 128 + number
        assert after["interrupted"]
        assert "interrupted" in after["voices"][0]["reason"]


# Learning ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    golden.make_key(tmp_path / "key")
    return tmp_path / "key"


def test_what_cannot_be_learned_is_refused_before_it_starts(out: Path, key: Path, tmp_path: Path) -> None:
    golden.make_key(tmp_path / "other")
    known, folder = tmp_path / "known.json", tmp_path / "absent" / "g.json"
    sheets = concluded().sheets
    golden.write(known, golden.learn(sheets, concluded().judgement), tmp_path / "other")
    for file, devices, said in (
        (known, 4, "was not signed by"),
        (folder, 4, "cannot be written"),
        (tmp_path / "g", 2, "3 devices"),
    ):
        arguments = ["--learn", str(file), "--sign-key", str(key), "--out", str(out)]
        done = scan("--devices", str(devices), *arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), done.output
        assert not out.exists()
    done = scan("--devices", "4", "--suite", "comm", "--learn", str(tmp_path / "g"), "--sign-key", str(key))
    assert (done.exit_code, "could be learned" in done.stderr) == (2, True)


def test_what_cannot_be_learned_in_the_end_is_no_refusal(
    out: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = replace(concluded(), sheets=[Sheet(sheet.device) for sheet in concluded().sheets])
    monkeypatch.setattr(scan_start, "_watch", lambda *_: nothing)
    done, record = played(out, "--learn", str(tmp_path / "g.json"), "--sign-key", str(key))
    assert done.exit_code == 3
    assert "nothing could be learned" in record["learned"]["error"]
    assert "nothing was learned" in done.stderr


def test_what_was_learned_is_said(out: Path, key: Path, tmp_path: Path) -> None:
    done, record = played(out, "--learn", str(tmp_path / "g.json"), "--sign-key", str(key))
    assert (done.exit_code, record["learned"]["items"], "more_within" in record) == (0, 1, False)
    assert golden.load(tmp_path / "g.json", Path(f"{key}.pub")).scan == "out"


# Errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StorageBusy("the disk is full"), RuntimeError("odd"), OSError(28, "No space left")])
@pytest.mark.parametrize(("style", "code"), [("plain", 3), ("nagios", 3), ("npd", 2), ("kubernetes", 3)])
def test_an_error_in_the_middle_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, style: str, code: int
) -> None:
    def broken(*_: object) -> Conclusion:
        raise error

    monkeypatch.setattr(scan_start, "_watch", broken)
    done = scan("--devices", "4", "--out", str(tmp_path / "out"), "--exit-codes", style)
    assert (done.exit_code, "ended without a result" in done.stderr) == (code, True)
    assert bool(done.stdout) == (style != "plain")


def test_a_result_that_cannot_be_written_is_shown(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, record: Mapping[str, Any]) -> None:
        if path.name == "result.json":
            raise StorageBusy(f"{path}: no space left")
        write_json(path, record)

    monkeypatch.setattr(scan_start, "write_json", full)
    done = scan("--devices", "4", "--out", str(out))
    assert (done.exit_code, "PASS: 4 pass" in done.stdout, "nowhere else" in done.stderr) == (3, True, True)


@pytest.mark.parametrize(("style", "first"), [("npd", "not judged: --cpu"), ("nagios", "BITWITNESS UNKNOWN - --cpu")])
def test_a_refusal_is_on_standard_output_for_who_shows_that(style: str, first: str) -> None:
    done = scan("--cpu", "--exit-codes", style)
    assert done.stdout.startswith(first)
    assert len(done.stdout.splitlines()) == 1
    assert done.exit_code == {"npd": 2, "nagios": 3}[style]


# Without a result -------------------------------------------------------------------------------------------------------


def _without_result(path: Path, end: str, coordinator: object = None) -> AnswerFiles:
    files = AnswerFiles(path)
    files.create()
    settings = Settings(id="s", world=WORLD, seconds=60.0, suites=("ops",))
    write_json(files.scan, {**settings.to_json(), "coordinator": coordinator})
    for sheet in concluded().sheets:
        journal = files.introduce(sheet.device)
        journal.append("answer", {"item": ITEM, "digest": RIGHT, "count": 500, "batches": 250, "seconds": 1.0})
        if end:
            journal.append("end", {"why": end})
        journal.close()
    return files


@pytest.mark.parametrize(("end", "standing"), [("", "not judged"), ("done", "pass")])
def test_without_a_result_nothing_passes(tmp_path: Path, end: str, standing: str) -> None:
    dead = {**this_process(), "started": 1}
    _without_result(tmp_path, end, dead)
    record = json.loads(scan("show", str(tmp_path), "--json").stdout)
    assert (record["standing"], record["running"]) == ("not judged", False)
    assert {one["standing"] for one in record["devices"]} == {standing}
    shown = scan("show", str(tmp_path)).stdout
    assert shown.startswith("NOT JUDGED, because there is no result")
    assert "scan again" in shown


def test_one_that_runs_has_not_passed_either(tmp_path: Path) -> None:
    _without_result(tmp_path, "", this_process())
    record = json.loads(scan("show", str(tmp_path), "--json").stdout)
    assert (record["standing"], record["running"]) == ("not judged", True)
    assert {(one["standing"], one["bound"]) for one in record["devices"]} == {("not judged", None)}
    shown = scan("show", str(tmp_path)).stdout
    assert shown.startswith("RUNNING: so far 4 not judged")
    assert "so far 500 answers right" in shown


def test_of_another_machine_it_runs_while_its_files_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _without_result(tmp_path, "")
    elsewhere = {"where": "elsewhere", "pid": 1, "started": 1}
    assert not lives(files, elsewhere, 0.5)

    def sleep(seconds: float) -> None:
        with files.answers(0).open("a") as file:
            file.write("\n")

    monkeypatch.setattr(time, "sleep", sleep)
    assert lives(files, elsewhere, 60.0)


# Under torchrun ---------------------------------------------------------------------------------------------------------


class Lost:
    """Stands for a rank of this process that was killed at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.share = Share(1, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def look(self) -> bool:
        return False

    def why(self, rank: int) -> str:
        return "it was killed by SIGKILL"


def test_rank_0_is_told_of_a_rank_that_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _without_result(tmp_path, "")
    settings = Settings(id="s", world=WORLD, seconds=0.1, job="j")
    monkeypatch.setattr(scan_start, "Launched", Lost)
    monkeypatch.setattr(scan_start, "_wait_for_start", lambda *_: settings)

    def wait(done: Any, seconds: float) -> bool:
        if not files.result.exists():
            write_json(files.result, {"exit_code": 3})
        return bool(done())

    monkeypatch.setattr(scan_start, "_wait", wait)
    assert scan_start._take_part(tmp_path, Torchrun(1, WORLD, 1, "j")) == 3
    assert "killed by SIGKILL (it was at its start)" in files.sheet(1).ended


# Replays ----------------------------------------------------------------------------------------------------------------


def _evidence(folder: Path, item: str) -> Path:
    device = Device(1, "n", "gpu", {"model": "m"})
    one = Evidence(
        item=Item.parse(item), device=device, expected=RIGHT, expected_by="others", wrong="b" * 32, observed={}, time=""
    )
    return write(folder, "one", one, None)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError(), KeyError("x"), ZeroDivisionError()])
def test_an_error_of_a_replay_concludes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("bitwitness.scan.replaying.prepare", broken)
    done = scan("replay", str(_evidence(tmp_path, ITEM)))
    assert (done.exit_code, "nothing can be concluded" in done.stderr) == (3, True), done.output


@pytest.mark.parametrize("shape", ["9" * 30, "1000000x1000000", "4294967296"])
def test_an_absurd_shape_is_refused(tmp_path: Path, shape: str) -> None:
    done = scan("replay", str(_evidence(tmp_path, f"ops/add/float32/{shape}")))
    assert (done.exit_code, "no scan computes this" in done.stderr) == (2, True), done.output
