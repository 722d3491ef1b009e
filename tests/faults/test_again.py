"""`bitwitness fault`: what a line means, and a run of a campaign made again from its record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.faults import again, runner
from bitwitness.faults.campaign import Campaign, load
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.faults.database import Results

CAMPAIGN = """
campaign: again
jobs:
  mlp: {factory: mlp, ranks: 2, steps: 4, checkpoint_every: 2}
policy: null
controls: 0
faults:
  - {name: one, fault: "rank=1 fwd_out:0 @ step=1 : n=1 -> bit=26"}
  - {name: many, fault: "rank=0 grad_w:0.weight @ step=1 : all -> scale=2.0 ; permanent"}
"""


def fault(*words: object) -> Result:
    return CliRunner().invoke(cli, ["fault", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("again")
    campaign = load_text(made)
    cells = campaign.cells()
    with Results(made / "results.sqlite") as results:
        results.begin(campaign.name, cells)
        runner.run(cells, on_result=results.put)
    return made


@pytest.mark.parametrize("label", ["one", "many"] if os.environ.get("BITWITNESS_EXHAUSTIVE") == "1" else ["many"])
def test_a_run_of_a_campaign_can_be_had_again(folder: Path, label: str) -> None:
    with Results(folder / "results.sqlite") as results:
        (spec,) = [spec for spec, _ in results.all() if spec.label == label]
    ended = fault("replay", "--json", folder, spec.key[:10])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.output)
    assert found["reproduced"] is True
    assert found["strikes"] == (1 if label == "one" else 3)


def test_the_job_is_looked_for_where_the_campaign_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = [one for one in load_text(tmp_path).cells() if one.label == "one"]
    hit = CellResult(spec.key, "finished", struck=1)
    with Results(tmp_path / "results.sqlite") as results:
        results.begin("again", [spec], tmp_path / "beside")
        results.put(spec, hit)
    given: list[dict[str, Any]] = []

    def run(cells: list[CellSpec], **how: Any) -> None:
        given.append(how)
        how["on_result"](cells[0], hit)

    monkeypatch.setattr(runner, "run", run)
    again.run(tmp_path, spec.key)
    assert len(given) == 2
    for how in given:
        assert str(tmp_path / "beside") in how["path"]
        assert how["deadline"] >= 600


def load_text(folder: Path) -> Campaign:
    (folder / "again.yaml").write_text(CAMPAIGN)
    return load(folder / "again.yaml")


@pytest.mark.parametrize(
    ("words", "told"), [(("zz",), "0 of its runs"), ((), "say which"), (("a", "b"), "nothing else")]
)
def test_which_run_must_be_clear(folder: Path, words: tuple[str, ...], told: str) -> None:
    ended = fault("replay", folder, *words)
    assert ended.exit_code == 2
    assert told in ended.output


def test_check_prints_what_was_left_open() -> None:
    ended = fault(
        "check",
        "--json",
        "rank=2 fwd_out:head @ step=8 : he2023.rbflip",
        "loss @ p=0.5 : n=1 -> nan & input @ step=1 : n=1 -> zero",
    )
    assert json.loads(ended.output)["faults"] == [
        "rank=2 fwd_out:head @ step=8 : n=1 -> bit=any ; once",
        "loss @ p=0.5 : n=1 -> nan ; once",
        "input @ step=1 : n=1 -> zero ; once",
    ]
    wrong = fault("check", "rank=2 fwd_ou:head @ step=8 : n=1 -> zero")
    assert wrong.exit_code == 2
    assert "column 8" in wrong.output
    assert "did you mean fwd_out" in wrong.output


def test_presets_are_listed() -> None:
    rows = json.loads(fault("presets", "--json").output)["presets"]
    assert {"he2023.input", "prism.fma", "anatomy", "aegis-eu", "hbm-1bit", "aws.activation-10000"} <= {
        row["name"] for row in rows
    }
    assert "he2023.input" in fault("presets").output


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("no\n")
    for command in ("show", "replay"):
        ended = fault(command, tmp_path / "x.jsonl")
        assert ended.exit_code == 2
        assert "x.jsonl" in ended.output
