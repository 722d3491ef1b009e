"""`bitwitness demo`, for real: each case is three training jobs of several processes, the last under `bitwitness run`.

These are the smallest that show each path; `make demo` runs it in full. Where one has just been run, as `.ci/run` does,
`BITWITNESS_TEST_DEMO` names its directory, and that one is judged instead of another. What is concluded from what they leave is
tested in tests/examples/test_report.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.examples.plan import Settings, device_name
from bitwitness.examples.report import conclude
from bitwitness.runfiles import RunFiles, read_incident

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
THREE = ["--nodes", "3", "--ranks-per-node", "1", "--steps", "6"]
TWO = ["--nodes", "2", "--ranks-per-node", "1", "--steps", "6"]


def demo(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(cli, ["demo", *map(str, arguments)])


def report(done: Result) -> dict[str, Any]:
    """The one object on stdout."""
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["ok"], record["problems"]
    return record


def losses(record: dict[str, Any]) -> dict[str, list[Any]]:
    by_training: dict[str, list[Any]] = record["losses"]
    return by_training


@pytest.fixture
def has_run(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The directory of a demo, and what came of it."""
    given = os.environ.get("BITWITNESS_TEST_DEMO")
    if not given:
        return tmp_path / "run", report(demo("--json", "--run-dir", tmp_path / "run", *THREE))
    run_dir = Path(given).absolute()
    (stopped,) = (run_dir / "guarded" / "supervise").glob("*/stop.json")
    found = conclude(Settings.read(run_dir), run_dir, json.loads(stopped.read_text())["exit_code"], 1.0)
    assert not found.problems
    record: dict[str, Any] = json.loads(json.dumps(found.to_json()))
    return run_dir, record | {"report": str(run_dir / "report.html")}


def test_a_wrong_matrix_product(has_run: tuple[Path, dict[str, Any]]) -> None:
    """As `make demo` runs it: found, named, in quarantine, and finished on the spare as if nothing had happened."""
    run_dir, record = has_run
    settings = Settings.read(run_dir)
    every, device = settings.checkpoint_every, settings.rank % settings.ranks_per_node
    step, rank = record["injected_step"], record["true_rank"]
    assert (step, rank) == (settings.step, settings.rank)
    assert record["detected_step"] == step
    assert record["before_update"] is True
    assert (record["check"], record["kind"], record["persistence"]) == ("replay", "compute", "persistent")
    assert record["status"] == "attributed"
    assert record["named_ranks"] == [rank]
    assert record["named_nodes"] == [record["true_node"]] == [settings.node]
    assert record["right"] is True
    assert record["false_alarms"] == 0
    assert record["checks_passed"] == dict.fromkeys(
        ("numerics", "replay", "replicas"), settings.world_size * settings.steps
    )
    assert record["guard_changes_no_bit"] is True
    assert record["resumed_from_step"] == step // every * every
    assert record["final_weights_equal_clean_run"] is True
    assert (record["generations"], record["run_exit_code"]) == (2, 0)
    assert record["quarantined"] == {"devices": [device_name(settings.node, device)], "nodes": []}
    saved = range(every, settings.steps + 1, every)
    assert [(one["step"], one["verified"]) for one in record["checkpoints"]] == [(one, True) for one in saved]
    assert {one["passed"]["replay"] - one["step"] for one in record["checkpoints"]} == {-1}
    told = " / ".join(one["what"] for one in record["recovery"])
    assert f"node-{settings.nodes} in the place of {settings.node}" in told
    curves = losses(record)
    assert curves["clean"] == curves["guarded"]
    assert curves["clean"][:step] == curves["unguarded"][:step]
    assert curves["unguarded"][-1] > curves["clean"][-1]
    incident = read_incident(record["incident"])
    assert incident.verdict.ranks == (rank,)
    assert incident.path.parent.parent == run_dir / "guarded"
    assert not RunFiles(run_dir / "clean").incidents()
    shown = CliRunner().invoke(cli, ["incident", "show", record["incident"]])
    assert f"persistent compute corruption on rank {rank}" in shown.stdout
    assert "quarantined" in shown.stdout
    listed = CliRunner().invoke(cli, ["quarantine", "list", str(run_dir / "guarded")])
    assert device_name(settings.node, device) in listed.stdout
    assert "equal, bit for bit" in Path(record["report"]).read_text()


@pytest.mark.skipif(not EXHAUSTIVE, reason="a demo more: BITWITNESS_EXHAUSTIVE=1")
def test_nothing_wrong(tmp_path: Path) -> None:
    record = report(demo("--fault", "none", "--json", "--run-dir", tmp_path / "run", *TWO))
    assert record["status"] == "clean"
    assert record["named_ranks"] == record["named_nodes"] == []
    nothing = ("injected_step", "detected_step", "true_rank", "incident", "right", "resumed_from_step")
    assert [record[key] for key in nothing] == [None] * 6
    assert record["false_alarms"] == 0
    assert losses(record)["clean"] == losses(record)["unguarded"] == losses(record)["guarded"]
    assert (record["generations"], record["final_weights_equal_clean_run"]) == (1, True)


@pytest.mark.skipif(not EXHAUSTIVE, reason="a demo more: BITWITNESS_EXHAUSTIVE=1")
def test_a_weight_in_memory_as_a_person_reads_it(tmp_path: Path) -> None:
    """It strikes once, so the same nodes go on and finish."""
    done = demo("--fault", "weight", "--run-dir", tmp_path / "run", "--seed", "3", *TWO)
    assert done.exit_code == 0, done.output
    page = " ".join(done.stdout.split())
    drawn = Settings(fault="weight", seed=3, nodes=2, ranks_per_node=1, steps=6)
    who = f"rank {drawn.rank} on {drawn.node}"
    assert f"At step {drawn.step}, once, {who} had this wrong: blocks.1.mlp.up.weight. 1 element changed" in page
    assert "by replicas, after the update of that step, on every rank: memory corruption, unknown." in page
    assert "Named: nobody (right: it takes three nodes to name anybody)." in page
    assert "Its ranks ended with different weights, which nothing reported." in page
    assert "no false alarm in 36 checks" in page
    assert "In quarantine: nobody." in page
    assert "generation 2 on node-0, node-1; every step is audited" in page
    assert f"went on with step {drawn.step // 2 * 2} from step-0000000{drawn.step // 2 * 2}" in page
    assert "Final weights of every rank: equal, bit for bit, to those of the run that was never hit." in page
    assert "bitwitness incident show " in page
    assert "As it should be." in page
    assert not done.stderr


@pytest.mark.skipif(not EXHAUSTIVE, reason="a demo more: BITWITNESS_EXHAUSTIVE=1")
def test_a_lasting_nan_where_nobody_can_be_named(tmp_path: Path) -> None:
    """Once more under suspicion, then a person must look: that is as it should be."""
    record = report(demo("--fault", "nan", "--json", "--run-dir", tmp_path / "run", *TWO))
    assert record["status"] == "unattributed"
    assert record["named_ranks"] == []
    assert record["detected_step"] == record["injected_step"]
    assert losses(record)["unguarded"][-1] == "nan"  # JSON has no NaN
    assert (record["generations"], record["run_exit_code"]) == (2, 3)
    assert record["quarantined"] == {"devices": [], "nodes": []}
    assert record["final_weights_equal_clean_run"] is False
    assert record["validation_loss"]["guarded"] is None
