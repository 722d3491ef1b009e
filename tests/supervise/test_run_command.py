"""The command itself: what it refuses before anything starts, what it says, and one job under real torchrun agents."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bitwitness.cli.main import cli
from bitwitness.cli.run import run as command
from bitwitness.cli.run_view import conclude
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import Stop, SupervisionFiles
from bitwitness.supervise import decisions
from bitwitness.supervise.identity import INDICES
from bitwitness.supervise.settings import Settings
from bitwitness.supervise.wrapper import RunDirLost
from tests.docs_help import ROOT

DOCS = ROOT / "docs" / "supervision.md"

TRAINING = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
for step in range(3):
    dist.all_reduce(total)
print(f"rank {rank} has {int(total)} on {os.environ['BITWITNESS_NODE']} {sys.argv[1:]}", flush=True)
if rank == 1:
    sys.exit(7)
dist.all_reduce(total)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in INDICES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def test_a_real_job_is_shown_and_its_own_exit_code_comes_out(script: Path, tmp_path: Path) -> None:
    """torchrun itself would end with 1. That it is started again, and finishes, is in test_kills.py."""
    arguments = ["--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), "--json", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "bitwitness", "run", *arguments, "--lr", "0.1", "--json"],
        env={name: value for name, value in os.environ.items() if name not in INDICES},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (summary["outcome"], summary["generations"], summary["exit_code"]) == ("failed", 1, 7)
    assert "rank 1 on node-0 ended with exit code 7" in summary["reason"]
    assert "[rank 1] rank 1 has 8 on node-0 ['--lr', '0.1', '--json']" in done.stderr
    assert "torchrun" not in done.stderr.lower()  # its own table of failures says nothing that was not said


REFUSED: list[tuple[list[str], str]] = [
    (["no-such.py"], "script no-such.py does not exist"),
    (["."], "script . is a directory"),
    (["--nodes", "0", "SCRIPT"], "Invalid value for '--nodes'"),
    (["--spares", "-1", "SCRIPT"], "Invalid value for '--spares'"),
    (["--grace", "soon", "SCRIPT"], "'soon' is no time: give seconds, or e.g. 90s, 30m, 12h, 7d"),
    (["--lost-after", "0", "SCRIPT"], "--lost-after 0.0: must be a number of seconds, at least 0.01"),
    (["--grace", "nan", "SCRIPT"], "'nan' is no time: give seconds"),
    (["--spares", "1", "--node-rank", "0", "SCRIPT"], "--node-rank is for a cluster"),
    ([], "Missing argument 'SCRIPT'"),
    (["-m", ""], "Invalid value for 'SCRIPT': is empty"),
    (["--address", " ", "--node-rank", "1", "SCRIPT"], "Invalid value for '--address': is empty"),
    (["--run-dir", "", "SCRIPT"], "Invalid value for '--run-dir': is empty"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[one[1][:30] for one in REFUSED])
def test_what_cannot_be_is_refused_before_anything_starts(
    script: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    words = [str(script) if word == "SCRIPT" else word for word in arguments]
    done = CliRunner().invoke(cli, ["run", "--run-dir", str(tmp_path / "run"), *words])
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not (tmp_path / "run").exists()


def test_a_run_dir_that_cannot_be_written_is_named(script: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    done = CliRunner().invoke(cli, ["run", "--run-dir", str(tmp_path / "run"), str(script)])
    assert done.exit_code == 2
    assert str(tmp_path / "run") in done.output


def test_without_torch_the_extra_is_named(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(cli, ["run", "--run-dir", str(tmp_path / "run"), str(script)])
    assert (done.exit_code, "pip install 'bitwitness[train]'" in done.output) == (2, True)


def test_times_have_units(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def fake(settings: Settings, *rest: object) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("bitwitness.supervise.local.run_local", fake)
    times = [
        "--grace",
        "90",
        "--lost-after",
        "90s",
        "--hang-timeout",
        "0",
        "--join-timeout",
        "1.5h",
        "--strike-window",
        "2d",
    ]
    done = CliRunner().invoke(cli, ["run", "--run-dir", str(tmp_path / "run"), *times, str(script), "--nodes", "9"])
    assert done.exit_code == 130
    (settings,) = seen
    found = (settings.grace, settings.lost_after, settings.hang_timeout, settings.join_timeout, settings.strike_window)
    assert found == (90, 90, 0, 5400, 172_800)
    assert (settings.args, settings.nodes, settings.local) == (("--nodes", "9"), 1, True)


@pytest.mark.parametrize("name", INDICES)
def test_a_launcher_makes_it_a_node_of_a_cluster(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[int] = []

    def fake(settings: Settings, identity: Any, *rest: object) -> None:
        seen.append(identity.index)
        assert not settings.local
        raise KeyboardInterrupt

    monkeypatch.setenv(name, "3")
    monkeypatch.setattr("bitwitness.supervise.wrapper.run_node", fake)
    monkeypatch.setattr("bitwitness.supervise.local.run_local", lambda settings, *rest: seen.append(-1))
    words = ["run", "--run-dir", str(tmp_path / "run"), "--address", "127.0.0.1"]
    CliRunner().invoke(cli, [*words, str(script)])
    CliRunner().invoke(cli, [*words, "--local", str(script)])
    assert seen == [3, -1]


@pytest.mark.parametrize(
    ("outcome", "summary", "said"),
    [
        (
            "corruption",
            {"incidents": ["/a run/incidents/i-1"]},
            "bitwitness incident show '/a run/incidents/i-1'; who is",
        ),
        (
            "corruption",
            {},
            "bitwitness incident show RUN_DIR; who is in quarantine: bitwitness quarantine list RUN_DIR",
        ),
        ("short", {}, "clear them: bitwitness quarantine clear RUN_DIR GPU-1 n7 --reason TEXT; then"),
        ("missing", {}, "next: start the nodes that are missing"),
        ("damaged", {}, "next: when that is done, run the same command again"),
    ],
)
def test_what_to_do_next_can_be_copied(tmp_path: Path, outcome: str, summary: dict[str, Any], said: str) -> None:
    held = RunFiles(tmp_path).create().quarantine
    held.deny_devices(["GPU-1", "GPU-2"], node="n1", reason="persistent corruption")
    held.deny_node("n7", reason="two of its devices are denied")
    reason = f"n1: {held.read().why_denied('n1', ['GPU-1'])}; n7: {held.read().why_denied('n7', [])}"
    if outcome == "damaged":
        held.path.write_text("{")
    kind, reason = ("short", reason if outcome == "short" else "") if outcome != "corruption" else (outcome, reason)
    screen = Console(file=io.StringIO(), width=400)
    conclude(Stop(2, kind, reason, {"run_dir": str(tmp_path), **summary}), screen)
    assert said.replace("RUN_DIR", str(tmp_path)) in screen.file.getvalue()  # type: ignore[attr-defined]


# The documentation


def table(heading: str) -> dict[str, str]:
    """The first column of a table of docs/supervision.md, and the rest of each row."""
    text = DOCS.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `?([^|`]+?)`? \| (.+) \|$", text, re.MULTILINE)
    return dict(rows[1:])


def test_the_exit_codes_are_documented() -> None:
    documented = {code.strip() for words in table("Exit codes") for code in words.split(",")}
    codes = {
        decisions.FINISHED,
        decisions.ATTRIBUTED,
        decisions.UNATTRIBUTED,
        decisions.GUARD,
        decisions.REFUSED,
        decisions.LOST,
        decisions.HUNG,
        RunDirLost.exit_code,
        decisions.stop_code("SIGTERM"),
        decisions.stop_code("SIGINT"),
    }
    assert {str(code) for code in codes} == documented - {"others"}
    said = " ".join((command.help or "").split())
    assert not [code for code in codes if not re.search(rf"\b{code}\b", said)]


def test_every_option_and_every_variable_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert not [option for option in options if option not in text]
    assert not [name for name in INDICES if f"`{name}`" not in text]


def test_the_manifests_are_what_they_should_be() -> None:
    """Those of the documentation parse, and each calls the command with options that there are."""
    options = {option for parameter in command.params for option in parameter.opts}
    calls = re.findall(r"bitwitness run((?:\s+\\?\s*--?[\w-]+(?:[ =]\S+)?)+)", DOCS.read_text(encoding="utf-8"))
    assert len(calls) >= 4
    for call in calls:
        used = re.findall(r"(?<=\s)(--?[a-z][\w-]*)", call)
        assert not set(used) - options - {"--help"}, call


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (3, 3), (160, 160), (None, 137)])
def test_the_slurm_script_asks_the_leader_where_srun_tells_of_a_killed_wrapper(
    tmp_path: Path, ended: int | None, code: int
) -> None:
    files = SupervisionFiles(tmp_path)
    files.create("s")
    files.log("s", "ended", text='an "exit_code": 5', exit_code=1, outcome="of another time")
    files.log("s", "lost", text="n1 is lost", node="n1")
    if ended is not None:
        files.log("s", "ended", text=f"ended (exit code {ended})", exit_code=ended, outcome="finished")
    lines = re.search(
        r"^if \[ \$code -eq 137 \]; then .*?^fi$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert lines is not None
    script = "code=137\n" + lines[0].replace("/shared/job", str(tmp_path)) + "\necho $code"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{code}\n"
