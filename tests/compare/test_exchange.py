"""Participants in several processes: what they share, and whom they name when one of them is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.compare.exchange import Alone
from bitwitness.compare.tape import Tape
from bitwitness.errors import RankLost

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    """What all ranks of all scenes have said, played once."""
    command = [sys.executable, "-m", "tests.compare.ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_process_has_the_tape_itself() -> None:
    tape = Tape(3)
    alone = Alone()
    assert alone.share(tape) is tape
    assert alone.gather("x") == ["x"]
    with pytest.raises(RankLost, match="the leader has no tape"):
        alone.share(None)


def test_a_tape_comes_to_all_as_it_is_and_so_does_its_end(seen: dict[str, Any]) -> None:
    everybody = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert seen["shared"] == [["it fell", everybody]] * 3


@pytest.mark.parametrize("scene", ["died", "hung"])
def test_a_rank_that_is_not_there_is_named_and_nobody_else(seen: dict[str, Any], scene: str) -> None:
    *others, gone = seen[scene]
    assert gone is None
    for said in others:
        missing = said.partition("; not there: ")[2]
        assert missing.startswith("rank 2 (last at gathering what all ranks say")
        assert "rank 0 (" not in missing
        assert "rank 1 (" not in missing


def test_who_leaves_says_so_and_why(seen: dict[str, Any]) -> None:
    assert seen["left"] == ["rank 2 has left the comparison: a lack of time"] * 2 + ["gone"]


def test_a_tape_that_was_damaged_on_its_way_blames_no_device(seen: dict[str, Any]) -> None:
    fine, leader, damaged = seen["damaged"]
    assert (fine, leader) == ("whole", "whole")
    assert "sharing tape 1 of this run came to rank 2 otherwise than it left rank 1" in damaged


def test_the_command_on_three_ranks(seen: dict[str, Any], folder: Path) -> None:
    for code, _, err, trace in seen["whole"]:
        assert code == 1, (err, trace)
    suspect, leader, other = seen["whole"]
    assert (
        "DIFFERS (simulated fault, a drill): suspect differs from 2 references that agree, in 8 of 8 steps" in leader[1]
    )
    assert not suspect[1]
    assert not other[1]
    report = json.loads((folder / "whole" / "report.json").read_text())
    ranks = {
        one["name"]: one["device"]["rank"] for one in (report["suspect"], *report["references"], report["control"])
    }
    assert ranks == {"suspect": 0, "reference-1": 1, "reference-2": 2, "control": 3}
    assert [mode["mode"] for mode in report["modes"]] == ["lock-step", "free"]


def test_ranks_with_other_options_are_refused_by_all(seen: dict[str, Any], folder: Path) -> None:
    for code, err, trace in seen["other options"]:
        assert code == 2, (err, trace)
        assert "rank 2 was started with other options than rank 0 (steps: 3, not 2)" in err
    assert not (folder / "other").exists()


def test_what_was_killed_can_be_read(seen: dict[str, Any], folder: Path) -> None:
    assert seen["killed"] == [None]
    assert not (folder / "killed" / "report.json").exists()
    done = CliRunner().invoke(cli, ["compare", "show", str(folder / "killed")])
    assert done.exit_code == 0, done.output
    assert "NOT CHARACTERISED" in done.stdout, "two steps are too few to call anybody wrong"
    assert "UNFINISHED" in done.stdout
    assert "the suspect has done 2 of 9 steps" in done.stdout
