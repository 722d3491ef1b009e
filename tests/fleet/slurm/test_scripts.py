"""Prolog and epilog when things go wrong: a node is given up for a condemned device, and for nothing else."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent.parent / "deploy" / "slurm"
REFUSED = '{"admitted": false, "returned": ["GPU-bad, taken out on n1", "GPU-2"]}'


@dataclass
class Node:
    """A node whose programs are scripts of a folder.

    Attributes:
        folder: in which everything lies.
    """

    folder: Path

    def program(self, name: str, body: str) -> None:
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def run(self, script: str, **env: object) -> subprocess.CompletedProcess[str]:
        known = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "SLURMD_NODENAME": "n3",
            "SLURM_JOB_ID": "12",
            "BITWITNESS_SETTINGS": "/dev/null",
            "BITWITNESS_CONDEMNED": str(self.folder / "condemned.json"),
            "BITWITNESS_SIGNALS_DIR": str(self.folder / "signals"),
        }
        words = ["/bin/bash", str(SCRIPTS / script)]
        whole = known | {name: str(value) for name, value in env.items()}
        return subprocess.run(words, env=whole, capture_output=True, text=True, timeout=60, check=False)

    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def kept(self) -> dict[str, str]:
        found = [file for file in (self.folder / "signals").rglob("*") if file.is_file()]
        return {str(file.relative_to(self.folder / "signals")): file.read_text() for file in found}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    one = Node(tmp_path)
    (tmp_path / "condemned.json").write_text("{}")
    one.program("scontrol", f'printf "%s|" "$@" >> {tmp_path}/asked; echo >> {tmp_path}/asked')
    one.program("logger", "exit 0")
    return one


def test_a_node_that_may_take_jobs(node: Node) -> None:
    node.program("bitwitness", f'echo "$@" > {node.folder}/words')
    assert node.run("prolog.sh").returncode == 0
    words = (node.folder / "words").read_text().split()
    assert words == ["fleet", "admit", "--condemned", f"{node.folder}/condemned.json", "--node", "n3", "--json"]
    assert node.asked() == []


def test_a_condemned_device_drains_its_node_with_a_reason(node: Node) -> None:
    node.program("bitwitness", f"echo '{REFUSED}'; exit 1")
    done = node.run("prolog.sh")
    assert done.returncode == 1
    reason = "Reason=bitwitness admit: GPU-bad, taken out on n1, GPU-2"
    assert node.asked() == [f"update|NodeName=n3|State=DRAIN|{reason}|"]
    node.program("scontrol", "exit 1")  # Slurm drains it as well, by the exit code
    assert node.run("prolog.sh").returncode == 1


@pytest.mark.parametrize(
    "body",
    [
        "echo 'Traceback (most recent call last):' >&2; exit 1",
        "echo 'Fatal Python error: init_fs_encoding' >&2; exit 1",
        "echo damaged >&2; exit 2",
        "exit 127",
        "kill -9 $$",
        "exec sleep 60",
    ],
)
def test_whatever_else_goes_wrong_lets_the_job_start(node: Node, body: str) -> None:
    node.program("bitwitness", body)
    done = node.run("prolog.sh", BITWITNESS_TIMEOUT=1)
    assert (done.returncode, node.asked()) == (0, [])
    assert "the job starts" in done.stderr
    strict = node.run("prolog.sh", BITWITNESS_TIMEOUT=1, BITWITNESS_STRICT=1)
    assert strict.returncode == 1
    assert node.asked()[0].startswith("update|NodeName=n3|State=DRAIN|Reason=bitwitness admit: ")


def test_a_prolog_that_is_not_set_up_lets_jobs_start(node: Node) -> None:
    node.program("bitwitness", "exit 1")
    for env in ({"BITWITNESS_CONDEMNED": ""}, {"BITWITNESS_CONDEMNED": "/nowhere/condemned.json"}):
        done = node.run("prolog.sh", **env)
        assert done.returncode == 0
        assert "nothing was checked" in done.stderr


def test_signals_are_kept_whole(node: Node) -> None:
    node.program("bitwitness", f"echo \"$@\" > {node.folder}/words; echo '[{{}}]'")
    assert node.run("epilog.sh").returncode == 0
    assert node.kept() == {"n3/12.json": "[{}]\n"}
    assert (node.folder / "words").read_text().split() == ["fleet", "signals", "--node", "n3", "--details", "--json"]


@pytest.mark.parametrize("body", ["exit 1", "exit 0", "echo '[{'; exit 2", "echo '[{'; exec sleep 60", "kill -9 $$"])
def test_half_a_file_is_none_and_no_node_is_drained_for_it(node: Node, body: str) -> None:
    node.program("bitwitness", body)
    done = node.run("epilog.sh", BITWITNESS_TIMEOUT=1)
    assert (done.returncode, node.kept()) == (0, {})
    assert "could not be kept" in done.stderr


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "../12"},
        {"SLURMD_NODENAME": "../n3"},
        {"SLURMD_NODENAME": "a b"},
        {"BITWITNESS_SIGNALS_DIR": ""},
        {"BITWITNESS_SIGNALS_DIR": "/proc/nowhere"},
    ],
)
def test_nothing_is_written_elsewhere(node: Node, env: dict[str, str]) -> None:
    node.program("bitwitness", "echo '[]'")
    before = sorted(node.folder.rglob("*"))
    assert node.run("epilog.sh", **env).returncode == 0
    assert sorted(node.folder.rglob("*")) == before


def test_settings_come_from_a_file(node: Node) -> None:
    node.program("mine", "echo '[1]'")
    settings = node.folder / "slurm.env"
    settings.write_text(f"BITWITNESS={node.folder}/bin/mine\nBITWITNESS_SIGNALS_DIR={node.folder}/signals/other\n")
    assert node.run("epilog.sh", BITWITNESS_SETTINGS=settings).returncode == 0
    assert node.kept() == {"other/n3/12.json": "[1]\n"}


def test_the_scripts_are_clean() -> None:
    files = [str(file) for file in sorted(SCRIPTS.glob("*.sh"))]
    assert len(files) == 2
    for file in files:
        assert subprocess.run(["/bin/bash", "-n", file], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
        assert done.stdout == ""
