"""The prelude of a worker: the script runs as by itself, and how it ended is on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitwitness.runfiles.supervision import SupervisionFiles
from bitwitness.supervise import agent, worker
from bitwitness.supervise.processes import PARENT
from bitwitness.supervise.worker import NOTES


def run(folder: Path, script: str, *args: str, module: bool = False) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BITWITNESS_")} | {
        "BITWITNESS_RUN_DIR": str(folder / "run"),
        "BITWITNESS_SUPERVISION": "s",
        "BITWITNESS_GENERATION": "2",
        "RANK": "3",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    what = ["-m", "script"] if module else [str(folder / "script.py")]
    return subprocess.run(
        [sys.executable, "-m", "bitwitness.supervise.worker", *what, *args],
        cwd=folder if module else None,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def mark(folder: Path) -> str:
    return SupervisionFiles(folder / "run").read_marks("s", 2).get(3, "")


def error(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "error.json").read_text())
    return found


@pytest.mark.parametrize("module", [False, True])
def test_a_script_runs_as_by_itself(tmp_path: Path, module: bool) -> None:
    (tmp_path / "beside.py").write_text("value = 5")
    script = (
        "import atexit, pickle, sys, beside\n"
        "class Own: pass\n"
        "pickle.loads(pickle.dumps(Own()))\n"
        "atexit.register(lambda: print('at exit'))\n"
        "print(__name__, beside.value, sys.argv[1:])\n"
    )
    done = run(tmp_path, script, "--a", "b", module=module)
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ 5 ['--a', 'b']\nat exit\n", "")
    assert mark(tmp_path) == "finished"


def test_a_process_that_dies_at_interpreter_exit_has_finished(tmp_path: Path) -> None:
    done = run(tmp_path, "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGABRT)")
    assert done.returncode == -signal.SIGABRT
    assert mark(tmp_path) == "finished"


VERDICT = "from bitwitness.evidence import Verdict; verdict = Verdict('unattributed', 3, kind='software')\n"
RAISED = "raise bitwitness.CorruptionDetected(verdict, None)"
ENDS: list[tuple[str, int, str, str]] = [
    ("import sys; sys.exit()", 0, "finished", ""),
    ("import sys; sys.exit(0)", 0, "finished", ""),
    ("import sys; sys.exit(7)", 7, "", "SystemExit"),
    ("import sys; sys.exit(256)", 1, "", "SystemExit"),
    ("import sys; sys.exit('no data')", 1, "", "SystemExit"),
    ("raise ValueError('boom')", 1, "", "ValueError"),
    ("raise KeyboardInterrupt", 1, "", "KeyboardInterrupt"),
    ("import bitwitness; raise bitwitness.GuardFailure('lost')", 4, "", "GuardFailure"),
    (VERDICT + "import bitwitness; raise bitwitness.CorruptionDetected(verdict, None)", 3, "", "CorruptionDetected"),
    ("from bitwitness import preemption; preemption.request()", 0, "stopped", ""),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 0, "stopped", ""),
    ("import os; os._exit(0)", 0, "", ""),
    ("syntax error", 1, "", "SyntaxError"),
]


@pytest.mark.parametrize(("script", "code", "left", "kind"), ENDS, ids=[end[0][-30:] for end in ENDS])
def test_every_end_is_said(tmp_path: Path, script: str, code: int, left: str, kind: str) -> None:
    done = run(tmp_path, script)
    assert done.returncode == code, done.stderr
    assert mark(tmp_path) == left
    assert (tmp_path / "error.json").exists() == bool(kind)
    if kind:
        found = error(tmp_path)
        assert (found["bitwitness"]["type"], found["bitwitness"]["exit_code"]) == (kind, code)
        assert set(found["message"]) == {"message", "extraInfo"}
        assert int(found["message"]["extraInfo"]["timestamp"]) > 0
    if kind == "CorruptionDetected":
        assert error(tmp_path)["bitwitness"]["verdict"]["kind"] == "software"
        assert error(tmp_path)["bitwitness"]["incident"] == ""
    if "boom" in script:
        assert done.stderr.splitlines()[1].startswith(f'  File "{tmp_path / "script.py"}", line 1')


def test_a_mark_that_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    assert run(tmp_path, "pass").returncode == 2


def test_an_error_that_the_run_dir_does_not_take_is_left_on_this_node_and_half_of_one_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / ".error.json").mkdir()  # as good as a full disk: what is to become error.json cannot be written
    monkeypatch.setenv(NOTES, str(notes))
    monkeypatch.setattr(worker, "_leave", lambda code: None)
    monkeypatch.setenv(worker.ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    worker._leave_failed(ValueError("boom"), 1)
    assert json.loads((notes / "error-1.json").read_text())["bitwitness"]["text"] == "boom"
    assert not (tmp_path / "error.json").exists()


def test_an_error_that_cannot_be_printed_is_left_all_the_same(tmp_path: Path) -> None:
    done = run(tmp_path, VERDICT + "import os, bitwitness; os.close(2); os.open('/dev/full', os.O_WRONLY)\n" + RAISED)
    assert (done.returncode, error(tmp_path)["bitwitness"]["type"]) == (3, "CorruptionDetected")


def test_an_error_file_that_torch_cannot_read_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *rest: None)
    monkeypatch.setenv(PARENT, "1")
    monkeypatch.setattr("runpy.run_module", lambda *rest, **more: json.loads(""))
    with pytest.raises(SystemExit) as caught:
        agent.main()
    assert caught.value.code == 1
    assert "the error file of a worker is damaged" in capsys.readouterr().err
