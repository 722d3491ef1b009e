from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.runfiles import RunFiles
from tests.cli import samples


def bitwitness(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, [str(one) for one in arguments])


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    files = RunFiles(tmp_path / "run").create()
    files.write_run({})
    held = files.quarantine
    held.strike("GPU-1", incident="i-1", node="node-1", persistence="transient")
    held.strike("GPU-2", incident="i-2", node="node-2", persistence="persistent")
    held.deny_devices(["GPU-2"], node="node-2", reason="wrong again when it repeated its work", incident="i-2")
    held.deny_node("node-2", reason="two devices named")
    return files


def test_list(run: RunFiles) -> None:
    done = bitwitness("quarantine", "list", run.path)
    assert done.exit_code == 0
    page = " ".join(done.stdout.split())
    since = run.quarantine.read().denied_devices["GPU-2"].since
    assert f"device GPU-2 {since} node-2 wrong again when it repeated its work i-2" in page
    assert "two devices named" in page
    assert "persistent i-2" in page
    assert "deny node" in page
    record = json.loads(bitwitness("quarantine", "list", run.path, "--json").stdout)
    assert record["run_dir"] == str(run.path)
    assert set(record["denied_devices"]) == {"GPU-2"}
    assert [one["incident"] for one in record["strikes"]["GPU-1"]] == ["i-1"]
    assert len(record["log"]) == 4


def test_a_list_that_no_terminal_shows_is_not_folded(run: RunFiles) -> None:
    device, incident, reason = "GPU-" + "a" * 80, "20261129T190029Z-7750b6", "wrong again, " * 20
    run.quarantine.deny_devices([device], node="node-1", reason=reason, incident=incident)
    since = run.quarantine.read().denied_devices[device].since
    (line,) = [one for one in bitwitness("quarantine", "list", run.path).stdout.splitlines() if incident in one]
    assert line.split(maxsplit=4)[1:4] == [device, since, "node-1"]
    assert reason.strip() in line


def test_list_of_nobody(tmp_path: Path) -> None:
    RunFiles(tmp_path).create().write_run({})
    done = bitwitness("quarantine", "list", tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}: nobody is in quarantine\n")
    assert json.loads(bitwitness("quarantine", "list", tmp_path, "--json").stdout)["denied_nodes"] == {}


def test_clear(run: RunFiles) -> None:
    done = bitwitness("quarantine", "clear", run.path, "node-2", "GPU-1", "--reason", "fan replaced")
    assert done.exit_code == 0, done.output
    page = " ".join(done.stdout.split())
    assert "cleared node-2 (denied as a node), logged as " in page
    assert "cleared GPU-1 (1 strike), logged as " in page
    assert "still in quarantine: device GPU-2, then on node node-2" in page
    assert run.quarantine.read().names() == ["GPU-2"]
    done = bitwitness("quarantine", "clear", run.path, "--all", "--reason", "new rack", "--json")
    record = json.loads(done.stdout)
    assert ([one["name"] for one in record["cleared"]], record["remaining"]) == (["GPU-2"], [])
    assert "@" in record["cleared"][0]["who"]
    assert [one["reason"] for one in run.quarantine.read().log[-3:]] == ["fan replaced", "fan replaced", "new rack"]
    done = bitwitness("quarantine", "clear", run.path, "--all", "--reason", "once more")
    assert (done.exit_code, "nobody was in quarantine" in done.stdout) == (0, True)


def test_add(run: RunFiles) -> None:
    done = bitwitness("quarantine", "add", run.path, "GPU-7", "node-1", "GPU-2", "--reason", "ECC errors in dmesg")
    assert done.exit_code == 0, done.output
    assert "denied device GPU-7, logged as " in done.stdout
    assert "denied node node-1, logged as " in done.stdout  # there was a strike on it
    assert "GPU-2 was in quarantine already" in done.stdout
    held = run.quarantine.read()
    assert (held.denied_devices["GPU-7"].reason, held.denied_devices["GPU-7"].node) == ("ECC errors in dmesg", "")
    assert held.denied_devices["GPU-2"].reason == "wrong again when it repeated its work"
    assert held.why_denied("elsewhere", ["GPU-7"]).startswith("device GPU-7 is in quarantine since")
    done = bitwitness("quarantine", "add", run.path, "node-9", "--node", "--reason", "loud", "--json")
    record = json.loads(done.stdout)
    assert [(one["what"], one["name"]) for one in record["added"]] == [("deny node", "node-9")]
    assert "@" in record["added"][0]["who"]
    assert record["denied"] == ["GPU-2", "GPU-7", "node-1", "node-2", "node-9"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["GPU-7", "--reason", " "], "say what they are suspected of"),
        (["GPU-7"], "Missing option '--reason'"),
        (["--reason", "x"], "Missing argument"),
        (["", "--reason", "x"], "is empty"),
    ],
)
def test_what_cannot_be_added(run: RunFiles, arguments: list[str], said: str) -> None:
    before = run.quarantine.path.read_bytes()
    done = bitwitness("quarantine", "add", run.path, *arguments)
    assert (done.exit_code, done.stdout, said in done.stderr) == (2, "", True), done.output
    assert run.quarantine.path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["GPU-7", "--reason", "x"], "GPU-7: not in the quarantine"),
        (["GPU-1", "--reason", " "], "say what was repaired"),
        (["GPU-1"], "Missing option '--reason'"),
        (["--reason", "x"], "name the devices and nodes to clear, or give --all"),
        (["GPU-1", "--all", "--reason", "x"], "name the devices and nodes to clear, or give --all"),
    ],
)
def test_what_cannot_be_cleared(run: RunFiles, arguments: list[str], said: str) -> None:
    before = run.quarantine.path.read_bytes()
    done = bitwitness("quarantine", "clear", run.path, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    if "GPU-7" in arguments:
        assert "there are: GPU-1, GPU-2, node-2" in " ".join(done.stderr.split())
    assert run.quarantine.path.read_bytes() == before


@pytest.mark.parametrize("command", [["list"], ["add", "n", "--reason", "x"], ["clear", "--all", "--reason", "x"]])
def test_a_damaged_quarantine_and_no_run(run: RunFiles, tmp_path: Path, command: list[str]) -> None:
    run.quarantine.path.write_text("{}")
    done = bitwitness("quarantine", command[0], run.path, *command[1:])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "nobody can say who is in quarantine" in done.stderr
    done = bitwitness("quarantine", command[0], tmp_path, *command[1:])
    assert (done.exit_code, "runs in it: run" in done.stderr) == (2, True)


def test_names_and_reasons_do_not_steer_the_terminal(run: RunFiles) -> None:
    hostile = "n\x1b[31m[bold red]\x07"
    run.quarantine.deny_node(hostile, reason=hostile, who=hostile)
    for arguments in (["list"], ["clear", "nobody", "--reason", "x"], ["clear", hostile, "--reason", "x"]):
        words = ["quarantine", arguments[0], str(run.path), *arguments[1:]]
        done = CliRunner(env={"COLUMNS": "400"}).invoke(cli, words, color=True)
        assert "n\\x1b[31m[bold red]\\x07" in done.output
        assert not {char for char in done.output if not char.isprintable()} - {"\n"}


def test_an_incident_shows_what_was_done_about_it(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, samples.BAD), where)
    assert "What was done about it" not in bitwitness("incident", "show", path).stdout
    assert json.loads(bitwitness("incident", "show", path, "--json").stdout)["actions"] == []
    files = RunFiles(tmp_path)
    files.note_action(path.name, "device denied", devices=["GPU-4", "\x1b[31m"], node="node-2", note="")
    files.note_action(path.name, "restarted", from_checkpoint="step-00000010")
    page = bitwitness("incident", "show", path / "incident.json").stdout
    shown = " ".join(page[page.index("What was done about it") : page.index("What to do next")].split())
    assert "Z device denied (devices: GPU-4, \\x1b[31m; node: node-2) 2" in shown
    assert shown.endswith("Z restarted (from checkpoint: step-00000010)")
    record = json.loads(bitwitness("incident", "show", tmp_path, "--json").stdout)
    assert [one["action"] for one in record["actions"]] == ["device denied", "restarted"]
