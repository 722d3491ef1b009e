from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bitwitness import __version__
from bitwitness.cli import entry
from bitwitness.cli.main import COMMANDS, cli
from bitwitness.errors import BitwitnessError, ConfigurationError, CorruptionDetected, GuardFailure, RunFilesError
from bitwitness.evidence import Verdict
from tests.cli import samples

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from bitwitness.cli.main import main
main()
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bitwitness", "--version"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"bitwitness {__version__}\n", "")


def test_an_interrupt_while_modules_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "bitwitness.cli.main", Interrupted())
    with pytest.raises(SystemExit) as caught:
        entry.main()
    assert (caught.value.code, capsys.readouterr().err) == (130, "Error: interrupted\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["incident", "--help"], ["demo", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


def test_help_lists_every_command_there_is() -> None:
    listed = CliRunner().invoke(cli, ["--help"]).stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", listed, re.MULTILINE), name


def test_an_incident_is_read_without_torch(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, samples.BAD), where)
    done = without_torch("incident", "show", str(path))
    assert done.returncode == 0, done.stderr
    assert "rank 4" in done.stdout


def test_demo_without_torch_names_the_extra(tmp_path: Path) -> None:
    program = WITHOUT_TORCH.replace(
        "sys.meta_path", "import importlib.util; importlib.util.find_spec = lambda name: None; sys.meta_path"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "demo", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "Error: bitwitness demo needs torch: pip install 'bitwitness[train]'"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"], ["incident", "no-such-command"]])
def test_usage_errors(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "No such" in done.stderr
    assert not done.stdout


def test_no_command_at_all_shows_the_help() -> None:
    done = CliRunner().invoke(cli, [])
    assert "Commands:" in done.output


ERRORS: list[tuple[BaseException, int, str]] = [
    (BitwitnessError("a rank failed"), 1, "a rank failed"),
    (ConfigurationError("too few nodes"), 2, "too few nodes"),
    (RunFilesError("no such file"), 2, "no such file"),
    (GuardFailure("rank 3 is lost"), 4, "rank 3 is lost"),
    (CorruptionDetected(Verdict("unattributed", 3, kind="software"), None), 3, "step 3: corruption (software)"),
    (CorruptionDetected(samples.attributed(), None), 160, "step 12: compute corruption on rank 4"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("error", "code", "message"), ERRORS, ids=lambda one: type(one).__name__)
def test_errors_are_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr("bitwitness.cli.incident.incident", failing)
    done = CliRunner().invoke(cli, ["incident"])
    assert done.exit_code == code
    assert done.stderr.startswith(f"Error: {message}")
    assert "Traceback" not in done.output
    assert not done.stdout


def test_errors_that_nobody_meant_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bitwitness.cli.incident.incident", broken)
    assert isinstance(CliRunner().invoke(cli, ["incident"]).exception, ZeroDivisionError)


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, samples.BAD), where)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "bitwitness", "incident", "show", str(path)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    os.close(writer)
    assert "Traceback" not in done.stderr


def test_errors_never_steer_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "e\x1b[31mvil").mkdir()
    (tmp_path / "e\x1b[31mvil" / "run.json").write_text("{}")
    for argument in (str(tmp_path), "x\x1b[31m", "a" * 5000):
        result = CliRunner().invoke(cli, ["incident", "show", argument])
        assert result.exit_code == 2, result.output
        assert "\x1b" not in result.output
        assert result.output.startswith("Error: ")


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "incident.json")
    assert CliRunner().invoke(cli, ["incident", "show", str(tmp_path)]).exit_code == 2
    (tmp_path / "incident.json").unlink()
    (tmp_path / "run.json").write_text('{"schema": 99}')
    (tmp_path / "incidents").mkdir()
    result = CliRunner().invoke(cli, ["incident", "list", str(tmp_path)])
    assert (result.exit_code, "schema 99" in result.output) == (2, True)
    (tmp_path / "incident.json").write_text('{"schema": 1, "notes": [NaN]}')
    assert "NaN is no JSON number" in CliRunner().invoke(cli, ["incident", "show", str(tmp_path)]).output
