"""Health checks when things go wrong: a node is given up for a device that failed, and for nothing else, and stays given up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from bitwitness.scan import exiting
from bitwitness.scan.results import DeviceResult, Judgement, Standing
from tests.deploy import published
from tests.fleet.slurm.real import Slurm, me, need, slurm, until

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "health"


def judgement(standing: Standing) -> Judgement:
    wrong = 5 if standing == "fail" else 0
    return Judgement((DeviceResult(0, "n1", "GPU-7", "H200", standing, "5 of 1000 answers were wrong", 1000, wrong),))


def ends(style: str, standing: Standing) -> str:
    """A program that ends as our own does."""
    found = judgement(standing)
    return f"echo '{exiting.line(found, style)}'; exit {exiting.code(found, style)}"


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

    def bitwitness(self, body: str) -> None:
        self.program("bitwitness", f'echo "$@" >> {self.folder}/words\n{body}')

    def run(self, script: str, *words: str, **env: object) -> subprocess.CompletedProcess[str]:
        known = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "SLURMD_NODENAME": "n1",
            "BITWITNESS_SETTINGS": "/dev/null",
            "BITWITNESS_SCANS": str(self.folder / "scans"),
            "BITWITNESS_STATE": str(self.folder / "state"),
            "BITWITNESS_IDLE": "true",
        }
        whole = known | {name: str(value) for name, value in env.items()}
        command = ["/bin/bash", str(FOLDER / script), *words]
        return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=60, check=False)

    def health(self, **env: object) -> int:
        return self.run("slurm.sh", **env).returncode

    def asked(self, file: str = "asked") -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    def slurm(self, state: str = "IDLE") -> None:
        show = f"case \"$*\" in *'show node'*) echo 'NodeName=n1 State={state} CPUs=2 Reason=x'; exit 0;; esac\n"
        self.program("scontrol", f'{show}printf "%s|" "$@" >> {self.folder}/asked; echo >> {self.folder}/asked')


@pytest.fixture
def node(tmp_path: Path) -> Node:
    one = Node(tmp_path)
    one.slurm()
    one.program("logger", "exit 0")
    return one


# Slurm --------------------------------------------------------------------------------------------------------------------

DRAIN = "update|NodeName=n1|State=DRAIN|Reason=bitwitness scan: 1 of 1 devices failed: n1 GPU-7: 5 of 1000 answers were wrong|"


def test_a_failure_drains_the_node_with_the_reason(node: Node) -> None:
    node.bitwitness(ends("slurm", "fail"))
    assert node.health() == 1
    assert node.asked() == [DRAIN]
    (words,) = node.asked("words")
    assert re.fullmatch(r"scan --exit-codes slurm --out \S+/scans/running\.\w+/scan --minutes 0\.3", words)
    assert len(list((node.folder / "scans").glob("*-fail"))) == 1, "what was found is kept"


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "DOWN*", "MIXED+DRAIN", "IDLE+FAIL", "DRAINED"])
def test_a_node_that_is_out_is_left_as_it_is(node: Node, state: str) -> None:
    node.slurm(state)
    node.bitwitness(ends("slurm", "fail"))
    assert [node.health(), node.health()] == [1, 1]
    assert node.asked() == []


def test_a_node_that_passes_is_neither_drained_nor_put_back(node: Node) -> None:
    node.slurm("IDLE+DRAIN")
    node.bitwitness(ends("slurm", "pass"))
    assert (node.health(), node.asked()) == (0, [])
    left = {file.name for file in (node.folder / "scans").iterdir()}
    assert left == {".lock"}, "what was scanned without a finding is not kept"


@pytest.mark.parametrize(
    "body",
    [
        ends("slurm", "not judged"),
        ends("plain", "fail"),
        ends("nagios", "fail"),
        ends("npd", "fail"),
        "echo 'bitwitness scan fail: x'; exit 0",
        "echo 'bitwitness scan fail: x'; exit 2",
        "echo 'bitwitness scan fail: x'; exec sleep 60",
        "echo 'Traceback (most recent call last):' >&2; exit 1",
        "echo 'Error: no such option' >&2; exit 2",
        f"echo '{exiting.line(judgement('fail'), 'slurm', drill='found')}'; exit 0",
        f"echo '{exiting.line(judgement('fail'), 'slurm', drill='missed')}'; exit 3",
        "exit 127",
        "kill -9 $$",
    ],
)
def test_whatever_else_happens_drains_nothing(node: Node, body: str) -> None:
    node.bitwitness(body)
    assert node.health(BITWITNESS_SCAN_TIMEOUT=1) == 0
    assert node.asked() == []
    assert not (node.folder / "scans" / "to-drain").exists()


def test_slurm_that_does_not_answer_is_asked_again_and_a_pass_undoes_nothing(node: Node) -> None:
    node.bitwitness(ends("slurm", "fail"))
    node.program("scontrol", "exit 1")
    assert node.health() == 1
    node.bitwitness(ends("slurm", "pass"))
    assert node.health() == 1
    node.slurm()
    assert node.health() == 1
    assert node.asked() == [DRAIN]
    assert node.health() == 0, "once it is out, it is Slurm that knows"


def test_two_do_not_run_at_once(node: Node) -> None:
    node.bitwitness(
        f"touch {node.folder}/begun; while [ ! -e {node.folder}/go ]; do sleep 0.02; done; {ends('slurm', 'pass')}"
    )
    env = {
        "PATH": f"{node.folder}/bin:/usr/bin:/bin",
        "SLURMD_NODENAME": "n1",
        "BITWITNESS_SETTINGS": "/dev/null",
        "BITWITNESS_SCANS": str(node.folder / "scans"),
    }
    with subprocess.Popen(["/bin/bash", str(FOLDER / "slurm.sh")], env=env, stderr=subprocess.DEVNULL) as first:
        until((node.folder / "begun").exists, "the first has begun")
        assert node.health() == 0
        (node.folder / "go").touch()
        assert first.wait(60) == 0
    assert len(node.asked("words")) == 1


@pytest.mark.parametrize(
    "env", [{"SLURMD_NODENAME": "a b"}, {"SLURMD_NODENAME": "n1;x"}, {"BITWITNESS_SCANS": "/proc/x"}]
)
def test_what_is_set_up_wrongly_scans_nothing(node: Node, env: dict[str, str]) -> None:
    node.bitwitness(ends("slurm", "fail"))
    assert (node.health(**env), node.asked(), node.asked("words")) == (0, [], [])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    need()
    with slurm(1, prepare=_prepared) as here:
        yield here


def _prepared(folder: Path) -> str:
    program = folder / "bitwitness"
    program.write_text(f"#!/bin/sh\nprintf x >> {folder}/ran\n[ -e {folder}/bad ] || exit 3\n{ends('slurm', 'fail')}\n")
    script = folder / "health.sh"
    settings = folder / "settings"
    settings.write_text(f"BITWITNESS={program}\nBITWITNESS_SCANS={folder}/scans\nSLURM_CONF={folder}/slurm.conf\n")
    script.write_text(
        f"#!/bin/sh\nBITWITNESS_SETTINGS={settings} SLURMD_NODENAME=n1 exec /bin/bash {FOLDER}/slurm.sh\n"
    )
    for file in (program, script):
        file.chmod(0o755)
    return f"HealthCheckProgram={script}\nHealthCheckInterval=1\nHealthCheckNodeState=IDLE"


def test_a_real_slurm_drains_its_node(cluster: Slurm) -> None:
    """HealthCheckProgram as slurmd runs it: not judged leaves the node idle, a failure drains it, once."""
    ran = cluster.folder / "ran"
    until(lambda: ran.exists() and len(ran.read_text()) > 2, cluster.logs)
    assert cluster.states() == {"n1": "idle"}
    (cluster.folder / "bad").touch()
    until(lambda: "drain" in cluster.states()["n1"], cluster.logs)
    shown = cluster.run("scontrol", "-o", "show", "node", "n1")
    assert f"Reason=bitwitness scan: 1 of 1 devices failed: n1 GPU-7: 5 of 1000 answers were wrong [{me()}@" in shown


# Nagios and node-problem-detector -----------------------------------------------------------------------------------------

STYLES = ("nagios", "npd")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("standing", ["pass", "fail", "not judged"])
def test_a_monitor_is_told_what_the_scan_says(node: Node, style: str, standing: Standing) -> None:
    node.bitwitness(ends(style, standing))
    done = node.run("monitor.sh", style)
    found = judgement(standing)
    assert (done.returncode, done.stdout) == (exiting.code(found, style), exiting.line(found, style) + "\n")


@pytest.mark.parametrize("style", STYLES)
def test_a_drill_is_told_and_not_remembered(node: Node, style: str) -> None:
    node.bitwitness(f"echo '{exiting.line(judgement('fail'), style, drill='found')}'; exit 0")
    assert node.run("monitor.sh", style).returncode == 0
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="false").returncode != 0


@pytest.mark.parametrize("style", STYLES)
def test_a_failure_stays_until_somebody_clears_it(node: Node, style: str) -> None:
    node.bitwitness(ends(style, "fail"))
    first = node.run("monitor.sh", style)
    node.bitwitness(ends(style, "pass"))
    again = node.run("monitor.sh", style)
    assert (again.returncode, again.stdout) == (first.returncode, first.stdout)
    assert first.returncode == exiting.code(judgement("fail"), style)
    (node.folder / "state" / f"failed.{style}").unlink()
    assert node.run("monitor.sh", style).returncode == 0


@pytest.mark.parametrize("style", STYLES)
def test_devices_that_are_in_use_are_not_scanned(node: Node, style: str) -> None:
    node.bitwitness(ends(style, "pass"))
    unknown = exiting.code(judgement("not judged"), style)
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="false").returncode == unknown
    assert node.asked("words") == []
    assert node.run("monitor.sh", style).returncode == 0
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="false").returncode == 0, "the last result, which is new"
    os.utime(node.folder / "state" / f"ok.{style}", (0, 0))
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="false").returncode == unknown
    assert len(node.asked("words")) == 1
    node.program("nvidia-smi", "echo 4711")
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="").returncode == unknown
    node.program("nvidia-smi", "exit 9")
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="").returncode == unknown
    node.program("nvidia-smi", "exit 0")
    assert node.run("monitor.sh", style, BITWITNESS_IDLE="").returncode == 0


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "body",
    [
        "echo 'Traceback (most recent call last):' >&2; exit 1",
        "echo 'Error: no such option | ' >&2; exit 2",
        "echo 'BITWITNESS OK - x'; exit 2",
        "echo 'BITWITNESS CRITICAL - x'; exit 1",
        "echo 'pass: x'; exit 1",
        "exit 0",
        "exec sleep 60",
        "kill -9 $$",
    ],
)
def test_what_is_not_understood_is_unknown(node: Node, style: str, body: str) -> None:
    node.bitwitness(body)
    done = node.run("monitor.sh", style, BITWITNESS_SCAN_TIMEOUT=1)
    assert done.returncode == exiting.code(judgement("not judged"), style)
    (line,) = done.stdout.splitlines()
    assert "not judged" in line
    assert "|" not in line
    assert len(line) <= 80 or style == "nagios"
    assert not list((node.folder / "state").glob("failed*"))


def test_a_monitor_of_another_kind_is_unknown(node: Node) -> None:
    assert node.run("monitor.sh").returncode == node.run("monitor.sh", "zabbix").returncode == 3


# Files --------------------------------------------------------------------------------------------------------------------


def test_the_scripts_are_clean() -> None:
    files = [str(file) for file in sorted(FOLDER.glob("*.sh"))]
    assert len(files) == 2
    for file in files:
        assert os.access(file, os.X_OK)
        assert subprocess.run(["/bin/bash", "-n", file], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_the_problem_of_the_detector_is_one_condition() -> None:
    """Its own checks: a permanent rule needs its condition with a message for good times, and time-outs that fit."""
    told = json.loads((FOLDER / "node-problem-detector.json").read_text())
    (condition,), (rule,) = told["conditions"], told["rules"]
    assert (told["plugin"], rule["type"], rule["condition"]) == ("custom", "permanent", condition["type"])
    assert condition["message"]
    assert told["pluginConfig"]["max_output_length"] == 80
    assert int(rule["timeout"][:-1]) > 50 + 10, "the scan's own limit and the look for programs come first"
    assert int(told["pluginConfig"]["timeout"][:-1]) >= int(rule["timeout"][:-1])


@pytest.mark.parametrize("version", [published.OLDEST, published.NEWEST])
def test_the_init_container_is_right_by_the_schema(version: str) -> None:
    assert published.wrong(yaml.safe_load((FOLDER / "init-container.yaml").read_text()), version) == []


@pytest.mark.parametrize(
    ("code", "strict", "expected"),
    [(0, 0, 0), (0, 1, 0), (3, 0, 0), (3, 1, 3), (160, 0, 160), (2, 0, 2), (1, 0, 1), (137, 0, 137)],
)
def test_a_pod_starts_unless_a_device_failed(node: Node, code: int, strict: int, expected: int) -> None:
    manifest = yaml.safe_load((FOLDER / "init-container.yaml").read_text())
    (scan,) = manifest["spec"]["template"]["spec"]["initContainers"]
    assert {exiting.code(judgement(one), "kubernetes") for one in ("pass", "fail", "not judged")} == {0, 160, 3}
    node.bitwitness(f"exit {code}")
    env = {"PATH": f"{node.folder}/bin:/usr/bin:/bin", "STRICT": str(strict)}
    done = subprocess.run([*scan["command"], *scan["args"]], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == expected
    assert ("the pod starts all the same" in done.stderr) == ((code, expected) == (3, 0))
    failing = [one["onExitCodes"] for one in manifest["spec"]["podFailurePolicy"]["rules"]]
    assert {(one["containerName"], *one["values"]) for one in failing} == {("scan", 2), ("scan", 160)}
