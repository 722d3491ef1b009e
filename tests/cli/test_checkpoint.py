from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.runfiles import RunFiles, new_incident_id, read_label, write_json, write_label
from tests.cli import samples
from tests.cli.test_main import WITHOUT_TORCH
from tests.test_checkpoint_files import label_of, save


def bitwitness(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, ["checkpoint", *map(str, arguments)])


def text(done: Result) -> str:
    return " ".join(done.stdout.split())


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A run with checkpoints at steps 5, 10, 15, 20."""
    files = RunFiles(tmp_path / "run").create()
    files.write_run({})
    for step in (5, 10, 15, 20):
        save(files.checkpoints, step)
    return files


def verified(*paths: str | Path) -> tuple[int, dict[str, Any]]:
    done = bitwitness("verify", *paths, "--json")
    return done.exit_code, json.loads(done.stdout)


# list ----------------------------------------------------------------------------------------------------------------


def test_list(run: RunFiles) -> None:
    done = bitwitness("list", run.path)
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines[1:]] == [f"step-000000{step:02d}" for step in (20, 15, 10, 5)]
    assert lines[1][1:] == ["2026-11-29T15:38:21.000Z", "10.2", "KiB", "replay", "19,", "replicas", "19"]
    (run.path / "checkpoints" / "step-00000015" / "label.json").write_text("{")
    assert "step-00000015 damaged" in text(bitwitness("list", run.path))
    record = json.loads(bitwitness("list", run.path, "--json").stdout)
    newest, damaged = record["checkpoints"][:2]
    assert (newest["step"], newest["bytes"], newest["passed"]["replay"], newest["problems"]) == (20, 10440, 19, [])
    assert "is not JSON" in damaged["problems"][0]


def test_list_of_a_run_without_checkpoints_and_of_no_run(tmp_path: Path) -> None:
    RunFiles(tmp_path / "run").create().write_run({})
    done = bitwitness("list", tmp_path / "run")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'run'}: no checkpoints\n")
    for wrong, said in ((tmp_path, "runs in it: run"), (tmp_path / "nowhere", "does not exist")):
        done = bitwitness("list", wrong)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr


# verify --------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_whole(run: RunFiles) -> None:
    done = bitwitness("verify", run.path)
    assert done.exit_code == 0
    assert done.stdout.count("whole, 3 files, 10.2 KiB") == 4
    assert "resume() would take step-00000020." in text(done)
    assert verified(run.path / "checkpoints")[1] == verified(run.path)[1]


def test_one_flipped_bit(run: RunFiles) -> None:
    file = run.path / "checkpoints" / "step-00000020" / "shared.pt"
    content = bytearray(file.read_bytes())
    content[5000] ^= 4
    file.write_bytes(content)
    done = bitwitness("verify", run.path)
    assert done.exit_code == 1
    assert "step-00000020: damaged shared.pt differs: its SHA-256 is" in text(done)
    assert "resume() would take step-00000015, not the newer step-00000020 (damaged)." in text(done)
    code, report = verified(run.path)
    assert (code, report["whole"]) == (1, False)
    asked = report["asked"][0]
    assert asked["resumes_from"].endswith("step-00000015")
    assert [one["whole"] for one in asked["checkpoints"]] == [False, True, True, True]
    assert verified(file.parent)[0] == 1
    assert verified(file.parent.with_name("step-00000015"))[0] == 0


def test_what_incidents_forbid(run: RunFiles) -> None:
    """The window of the sample is (9, 12]: what holds the updates 0..9 is the last that may be used."""
    where = samples.topology()
    path = samples.write(run.path, samples.replays(where, 4, samples.BAD), where)
    done = bitwitness("verify", run.path)
    assert done.exit_code == 0, "whole they are"
    assert f"not to be resumed from: incident {path.name} (replay)" in text(done)
    assert (
        "resume() would take step-00000010, not the newer step-00000020 (forbidden by an incident), step-00000015 (forbidden by"
    ) in text(done)
    code, report = verified(run.path / "checkpoints" / "step-00000015")
    assert (code, path.name in report["asked"][0]["checkpoints"][0]["refused"]) == (0, True)
    assert "resumes_from" not in report["asked"][0]
    save(run.checkpoints, 25, incidents=(path.name,))
    save(run.checkpoints, 30, failed={"replay": "rank 4 differs"})
    said = text(bitwitness("verify", run.path))
    assert "resume() would take step-00000025, not the newer step-00000030 (not a verified one)." in said
    assert "replay had failed when it was saved (rank 4 differs)" in text(bitwitness("list", run.path))


def test_an_incident_that_cannot_be_read_leaves_it_open(run: RunFiles) -> None:
    name = new_incident_id()
    run.commit_incident(name, {"verdict": {}})
    done = bitwitness("verify", run.path)
    assert done.exit_code == 1
    assert name in "".join(done.stdout.split()), "wherever a long path was broken"
    assert "Which one resume() would take cannot be told" in text(done)
    assert "resume() would take step" not in text(done)
    code, report = verified(run.path)
    assert (code, report["asked"][0]["resumes_from"]) == (1, None)
    assert "An incident cannot be read" in text(bitwitness("list", run.path))


def test_nothing_to_resume_from(run: RunFiles) -> None:
    for path in run.checkpoints.list():
        (path / "rank-00000.pt").unlink()
    done = bitwitness("verify", run.path)
    assert (done.exit_code, "resume() would refuse all of them" in done.stdout) == (1, True)
    for path in run.checkpoints.list():
        run.checkpoints.remove(path)
    done = bitwitness("verify", run.path)
    assert (done.exit_code, "no checkpoints; resume() would begin at step 0" in text(done)) == (0, True)


def test_no_label_and_the_label_of_another(run: RunFiles) -> None:
    newest, older = run.checkpoints.list()[:2]
    write_json(newest / "label.json", read_label(older).to_json())
    done = bitwitness("verify", newest)
    assert (done.exit_code, "its label is that of step 15: it was renamed" in text(done)) == (1, True)
    (newest / "label.json").unlink()
    done = bitwitness("verify", newest)
    assert (done.exit_code, "has no label (label.json)" in text(done)) == (1, True)


def test_foreign_checkpoints(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.pt", tmp_path / "dcp"
    folder.mkdir()
    for part in (file, folder / ".metadata", folder / "__0_0.distcp"):
        part.write_bytes(b"weights")
    labels = [write_label(one, label_of(one, 7)) for one in (file, folder)]
    done = bitwitness("verify", file, folder)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"{file}: whole, 1 file, 7 B", f"{folder}: whole, 2 files, 14 B"]
    assert [verified(label)[0] for label in labels] == [0, 0]
    (folder / ".metadata").write_bytes(b"weighty")
    code, report = verified(file, folder)
    assert code == 1
    assert [asked["checkpoints"][0]["whole"] for asked in report["asked"]] == [True, False]
    file.unlink()
    assert "does not exist" in bitwitness("verify", labels[0]).stderr


def test_nothing_to_verify_by(run: RunFiles, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"weights")
    (tmp_path / "folder").mkdir()
    for wrong, said in (
        ("model.pt", "has no label (model.pt.label.json): there is nothing to verify it by"),
        ("folder", "neither a checkpoint (no label.json) nor a run (no run.json)"),
        ("nowhere", "does not exist"),
    ):
        done = bitwitness("verify", run.path, tmp_path / wrong)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr
    assert bitwitness("verify").exit_code == 2


def test_names_and_labels_that_mean_harm_do_not_steer_the_terminal(tmp_path: Path) -> None:
    hostile = "e\x1b[31mvil[bold]\x07\n"
    files = RunFiles(tmp_path / "run").create()
    path = save(files.checkpoints, 5, {"shared.pt": b"x", hostile: b"y"}, saved=hostile, failed={hostile: hostile})
    (path / hostile).unlink()
    foreign = tmp_path / hostile
    foreign.mkdir()
    write_label(foreign, label_of(path, 5, passed={hostile: 3}))
    for arguments in (["list", files.path], ["verify", files.path], ["verify", foreign], ["list", foreign]):
        done = CliRunner(env={"COLUMNS": "400"}).invoke(cli, ["checkpoint", *map(str, arguments)], color=True)
        assert done.exit_code in (0, 1, 2)
        assert not done.exception or isinstance(done.exception, SystemExit)
        assert not {char for char in done.output if not char.isprintable()} - {"\n"}
        assert "e\\x1b[31mvil" in done.output


def test_without_torch(run: RunFiles) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "checkpoint", "verify", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "resume() would take step-00000020" in " ".join(done.stdout.split())
