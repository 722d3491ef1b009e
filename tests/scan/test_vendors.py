"""Diagnostics of vendors, played by small programs: what they find counts, what keeps them from telling is never health."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.scan import running, vendors
from bitwitness.scan.results import Judgement, Voice

WARNING = {"warning": "GPU 3 has a fault", "error_id": 52, "error_category": 10, "error_severity": 2}
SLOW = {"warning": "low bandwidth", "error_id": 21, "error_category": 1, "error_severity": 1}
NEEDS_PYTHON = f"#!{sys.executable} -IS\n"


def four(*results: tuple[int, str, list[dict[str, object]]], name: str = "memory") -> str:
    """What DCGM 4 prints of its devices."""
    told = [
        {"entity_group": "GPU", "entity_id": number, "status": status, "warnings": warnings}
        for number, status, warnings in results
    ]
    tests = [{"name": name, "results": told, "test_summary": {"status": "Pass"}}]
    return json.dumps({"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": tests}]}})


THREE = json.dumps(
    {
        "DCGM GPU Diagnostic": {
            "test_categories": [
                {"tests": [{"name": "GPU Memory", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}]},
                {
                    "tests": [
                        {"name": "Diagnostic", "results": [{"gpu_id": "1", "status": "Fail", "warnings": [WARNING]}]}
                    ]
                },
            ]
        }
    }
)
TABLE = """\
+=====================================================================+
|                 ROCm Validation Suite (RVS) Summary                 |
+=====================================================================+
| GPUs                             | 2                                |
| AMD Instinct MI210 - 20068       | AMD Instinct MI210 - 48932       |
| Action Name                      | Module         | Result          |
+=====================================================================+
| action_5                         | IET            | \x1b[31mFAIL           \x1b[0m |
| action_8                         | MEM            | \x1b[32mPASS           \x1b[0m |
+---------------------------------------------------------------------+
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, output: str = "", *, code: int = 0, body: str = "", errors: str = "") -> None:
    """A program that prints, and then does something, and ends."""
    (folder / f"{name}.out").write_text(output)
    text = f"{NEEDS_PYTHON}import os, signal, subprocess, sys, time\nargs = ' '.join(sys.argv[1:])\n"
    text += f"open({str(folder / name)!r} + '.args', 'a').write(args + '\\n')\n"
    text += f"sys.stdout.write(open({str(folder / name)!r} + '.out').read()); sys.stderr.write({errors!r}); sys.stdout.flush()\n"
    file = folder / name
    file.write_text(f"{text}{body}\nsys.exit({code})\n")
    file.chmod(0o755)


def asked(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.args").read_text().splitlines()


def told(voices: list[Voice]) -> list[tuple[str, str, str]]:
    return [(one.device, one.standing, one.weight) for one in voices]


# DCGM ---------------------------------------------------------------------------------------------------------------------


def test_a_failure_of_dcgm_counts_for_its_device_alone(programs: Path) -> None:
    program(
        programs, "dcgmi", "Successfully ran diagnostic.\n" + four((2, "Pass", []), (3, "Fail", [WARNING])), code=205
    )
    voices = vendors.run(["dcgm"], 3, None, "n1")
    assert told(voices) == [("gpu:3", "fail", "strong"), ("gpu:2", "pass", "none")]
    assert asked(programs, "dcgmi") == ["diag -r 3 -j"]
    failed, passed = voices
    assert (failed.source, failed.node) == ("dcgm-diag", "n1")
    assert "read something else" in failed.reason
    assert vendors.PASSED in passed.reason
    assert Judgement((), voices=tuple(voices)).standing == "fail"


def test_dcgm_of_the_third_generation(programs: Path) -> None:
    program(programs, "dcgmi", THREE, code=226)
    assert told(vendors.run(["dcgm"], 1, None, "n1")) == [("gpu:1", "fail", "strong"), ("gpu:0", "pass", "none")]


def test_a_slow_device_is_no_corrupt_one(programs: Path) -> None:
    program(programs, "dcgmi", four((0, "Fail", [SLOW]), (1, "Pass", []), name="pcie"), code=226)
    voices = vendors.run(["dcgm"], 2, None, "n1")
    assert told(voices) == [("gpu:0", "not judged", "none"), ("gpu:1", "pass", "none")]
    assert "weak evidence of corruption, or none" in voices[0].reason
    assert Judgement((), voices=tuple(voices)).standing == "not judged"


@pytest.mark.parametrize(
    ("output", "code", "errors", "expected"),
    [
        (four((0, "Pass", [])), 226, "", "ended with 226.*names no error that is known"),
        (four((0, "Pass", [])), 1, "", "ended with 1 and may not have told all"),
        (four((0, "Pass", []))[:-30], 0, "", "damaged|told nothing"),
        ("", 0, "", "ended with 0 and told nothing"),
        ("", 255, "Error: unable to establish a connection to the specified host engine", "nv-hostengine"),
        ("", 1, "this needs root", "run it as root"),
        ("\x00\xffgarbage" * 100, 0, "", "told nothing"),
        ("[" * 100_000, 0, "", "told nothing"),
        ('{"DCGM Diagnostic": 3}', 0, "", "told nothing"),
        ("42", 205, "", "ended with 205"),
    ],
    ids=["says-failed", "code", "cut", "empty", "engine", "root", "garbage", "deep", "shape", "isolate-unread"],
)
def test_what_cannot_be_read_is_not_judged(programs: Path, output: str, code: int, errors: str, expected: str) -> None:
    program(programs, "dcgmi", output, code=code, errors=errors)
    (voice,) = vendors.run(["dcgm"], 1, None, "n1")
    assert (voice.device, voice.standing, voice.weight) == ("", "not judged", "none")
    assert re.search(expected, voice.reason), voice.reason


def test_what_was_skipped_is_no_pass(programs: Path) -> None:
    program(programs, "dcgmi", four((0, "Skip", []), (1, "Not run", [])))
    voices = vendors.run(["dcgm"], 1, None, "n1")
    assert told(voices) == [("gpu:0", "not judged", "none"), ("gpu:1", "not judged", "none")]
    assert "says nothing" in voices[0].reason


def test_a_failure_before_it_was_cut_off_stands(programs: Path) -> None:
    body = "os.kill(os.getpid(), signal.SIGKILL)"
    program(programs, "dcgmi", four((3, "Fail", [WARNING]), (4, "Pass", [])), body=body)
    assert told(vendors.run(["dcgm"], 1, None, "n1"))[0] == ("gpu:3", "fail", "strong")
    program(programs, "dcgmi", four((4, "Pass", [])), body=body)
    (voice,) = vendors.run(["dcgm"], 1, None, "n1")
    assert voice.standing == "not judged"
    assert "signal 9" in voice.reason


# Programs that do not end -------------------------------------------------------------------------------------------------


def test_a_program_that_hangs_is_killed_with_all_that_it_started(programs: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    program(programs, "dcgmi", four((4, "Pass", [])), body=body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_GRACE", 0.2)
        (voice,) = vendors.run(["dcgm"], 1, 1.5, "n1")
    assert voice.standing == "not judged"
    assert "did not end within 1.5 s: give it more time (--vendor-timeout)" in voice.reason
    for pid in map(int, pids.read_text().split()):
        assert not _lives(pid)


def test_what_a_program_leaves_running_does_not_hold_us(programs: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))"
    )
    program(programs, "dcgmi", four((4, "Pass", [])), body=body)
    assert told(vendors.run(["dcgm"], 1, 60, "n1")) == [("gpu:4", "pass", "none")]
    assert not _lives(int(pids.read_text()))


def _lives(pid: int) -> bool:
    """Whether a process is there, and no zombie that waits for whoever adopted it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("endless", [False, True])
def test_a_program_that_prints_without_end(programs: Path, endless: bool) -> None:
    body = "for _ in range(100): os.write(1, b'x' * (1 << 20))"
    program(programs, "dcgmi", body=body.replace("for _ in range(100)", "while True") if endless else body)
    (voice,) = vendors.run(["dcgm"], 1, 60, "n1")
    assert voice.standing == "not judged"
    assert "more than 16 MiB" in voice.reason


def test_errors_without_end_are_no_reason(programs: Path) -> None:
    program(programs, "dcgmi", four((4, "Pass", [])), body="for _ in range(64): os.write(2, b'x' * (1 << 16))")
    assert told(vendors.run(["dcgm"], 1, 60, "n1")) == [("gpu:4", "pass", "none")]


def test_what_cannot_be_started(programs: Path) -> None:
    (programs / "dcgmi").write_text("#!/nowhere/python\n")
    (programs / "dcgmi").chmod(0o755)
    (voice,) = vendors.run(["dcgm"], 1, None, "n1")
    assert (voice.standing, "could not be started" in voice.reason) == ("not judged", True)
    assert running.run(["\0"], 1).why.startswith("it could not be started")


# The others ---------------------------------------------------------------------------------------------------------------


def test_ascend(programs: Path) -> None:
    output = {
        "healthCheck": {"items": [{"item": "hbm", "npuId": 4, "status": "FAIL"}, {"item": "cann", "status": "PASS"}]}
    }
    program(programs, "ascend-dmi", json.dumps(output))
    voices = vendors.run(["ascend"], 1, None, "n1")
    assert told(voices) == [("npu:4", "fail", "medium"), ("", "pass", "none")]
    assert vendors.run(["ascend"], 4, None, "n1")[0].standing == "fail"
    assert asked(programs, "ascend-dmi") == [
        "--dg --se healthCheck -q --fmt json",
        "--dg --se stressTest -q --fmt json",
    ]


def test_rvs(programs: Path) -> None:
    program(programs, "rvs", TABLE)
    (voice,) = vendors.run(["rvs"], 2, None, "n1")
    assert (voice.source, voice.standing) == ("rvs", "not judged")
    assert "slow is not wrong" in voice.reason
    program(programs, "rvs", TABLE.replace("IET            | \x1b[31mFAIL", "IET            | \x1b[32mPASS"))
    (voice,) = vendors.run(["rvs"], 2, None, "n1")
    assert (voice.standing, vendors.PASSED in voice.reason) == ("pass", True)
    program(programs, "rvs", TABLE.replace("MEM            | \x1b[32mPASS", "MEM            | \x1b[31mFAIL"))
    assert told(vendors.run(["rvs"], 2, None, "n1")) == [("", "fail", "medium")]
    program(programs, "rvs", "RVS-ERROR [CLI] No platform support for the detected GPU or no GPU detected !\n")
    (voice,) = vendors.run(["rvs"], 2, None, "n1")
    assert voice.standing == "not judged"
    assert "no driver for it" in voice.reason
    assert asked(programs, "rvs") == ["-r 2"] * 4


# Which --------------------------------------------------------------------------------------------------------------------


def test_auto_runs_what_is_there(programs: Path) -> None:
    (voice,) = vendors.run(["auto"], 1, None, "n1")
    assert (voice.standing, "no diagnostic of a vendor is installed" in voice.reason) == ("not judged", True)
    program(programs, "rvs", TABLE)
    program(programs, "dcgmi", four((0, "Pass", [])))
    assert [one.source for one in vendors.run(["auto"], 1, None, "n1")] == ["dcgm-diag", "rvs"]
    found = vendors.run(["auto", "ascend", "auto"], 1, None, "n1")
    assert [one.source for one in found] == ["dcgm-diag", "ascend-dmi", "rvs"]
    assert vendors.run([], 1, None, "n1") == []


@pytest.mark.parametrize("name", vendors.VENDORS)
def test_what_was_asked_for_and_is_not_there_is_not_judged(programs: Path, name: str) -> None:
    (voice,) = vendors.run([name], 1, None, "n1")
    assert voice.standing == "not judged"
    assert "is not installed: install" in voice.reason


@pytest.mark.parametrize(
    ("which", "level", "timeout"),
    [(["nvidia"], 1, None), (["dcgm"], 0, None), (["dcgm"], 5, None), (["dcgm"], 1, -1), (["dcgm"], 1, float("nan"))],
)
def test_bad_words_are_refused(which: list[str], level: int, timeout: float | None) -> None:
    with pytest.raises(ConfigurationError):
        vendors.run(which, level, timeout, "n1")


def _hanging(programs: Path, pids: Path) -> None:
    """A diagnostic that ends for nobody, with a child; once it runs, `pids` has their numbers."""
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids) + '.new'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids) + '.new'!r}, {str(pids)!r})\n"
        "time.sleep(600)"
    )
    program(programs, "dcgmi", four((4, "Pass", [])), body=body)


def test_asked_to_stop_it_ends_the_one_that_runs_and_starts_no_other(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    _hanging(programs, pids)
    program(programs, "rvs", TABLE)
    monkeypatch.setattr(running, "_GRACE", 0.2)
    voices = vendors.run(["dcgm", "rvs"], 1, None, "n1", pids.exists)
    assert told(voices) == [("", "not judged", "none")] * 2
    assert ["interrupted" in one.reason for one in voices] == [True, True]
    assert not (programs / "rvs.args").exists()
    assert not any(map(_lives, map(int, pids.read_text().split())))


def test_a_kill_of_who_runs_it_ends_it_with_all_that_it_started(programs: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    _hanging(programs, pids)
    code = "from bitwitness.scan import vendors; vendors.run(['dcgm'], 1, None, 'n1')"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        for _ in range(1000):
            if pids.exists():
                break
            time.sleep(0.02)
        process.kill()
    assert not any(map(_lives, map(int, pids.read_text().split())))
