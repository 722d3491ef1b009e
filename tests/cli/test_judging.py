"""`bitwitness incident judge`: a person's word on an incident, beside it, and shown by whatever reads it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.judging import last_judgement, note_judgement, said
from tests.fleet.incidents import write


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A run with an incident."""
    write(tmp_path / "run")
    return RunFiles(tmp_path / "run")


def judge(run: RunFiles, *words: str) -> Any:
    name = run.incidents()[0].name
    return CliRunner().invoke(cli, ["incident", "judge", str(run.path), name, *words])


def test_it_is_noted_with_who_and_why_and_the_last_word_counts(run: RunFiles) -> None:
    first = judge(run, "--as", "false-alarm", "--why", "the sampler was not seeded", "--json")
    assert (first.exit_code, json.loads(first.output)["judgement"]) == (0, "false alarm")
    again = judge(run, "--as", "false-alarm", "--why", "the sampler was not seeded")
    assert (again.exit_code, "was judged so" in again.output) == (0, True)
    second = judge(run, "--as", "confirmed", "--why", "dcgmi diag failed")
    assert "before it was false alarm" in second.output
    actions = run.actions(run.incidents()[0].name)
    assert [(one["action"], one["judgement"], one["why"]) for one in actions] == [
        ("judged", "false alarm", "the sampler was not seeded"),
        ("judged", "confirmed", "dcgmi diag failed"),
    ]
    assert all("@" in one["who"] for one in actions)
    assert (last_judgement(actions) or {})["judgement"] == "confirmed"


def test_show_and_list_say_it(run: RunFiles) -> None:
    judge(run, "--as", "drill", "--why", "the drill of Monday")
    shown = CliRunner().invoke(cli, ["incident", "show", str(run.path)])
    assert "judged" in shown.output
    assert "the drill of Monday" in shown.output
    listed = CliRunner().invoke(cli, ["incident", "list", str(run.path)])
    assert "attributed, drill" in listed.output
    assert json.loads(CliRunner().invoke(cli, ["incident", "list", str(run.path), "--json"]).output)["incidents"][0][
        "judgement"
    ] == ("drill")


@pytest.mark.parametrize(
    "words",
    [("--as", "guilty", "--why", "x"), ("--as", "drill"), ("--as", "drill", "--why", " \n"), ("--why", "x")],
)
def test_what_is_no_judgement(run: RunFiles, words: tuple[str, ...]) -> None:
    assert judge(run, *words).exit_code == 2
    assert run.actions(run.incidents()[0].name) == []


def test_an_incident_that_is_not_there(run: RunFiles) -> None:
    for name in ("20261129T120000Z-ffffff", "..", "x/../../y"):
        result = CliRunner().invoke(cli, ["incident", "judge", str(run.path), name, "--as", "drill", "--why", "x"])
        assert result.exit_code == 2
    with pytest.raises(RunFilesError, match="is no incident"):
        note_judgement(run, "20261129T120000Z-ffffff", "drill", "x", "kim")


def test_words_of_others_are_not_taken(run: RunFiles) -> None:
    with pytest.raises(ConfigurationError):
        said("guilty")
    name = run.incidents()[0].name
    run.note_action(name, "judged", judgement="guilty", who="x", why="y")
    assert last_judgement(run.actions(name)) is None


def test_many_judge_at_once_and_each_word_is_whole(run: RunFiles) -> None:
    name = run.incidents()[0].name
    threads = [
        threading.Thread(target=note_judgement, args=(run, name, "drill", f"number {number}", "kim"))
        for number in range(20)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(one["why"] for one in run.actions(name)) == sorted(f"number {number}" for number in range(20))
