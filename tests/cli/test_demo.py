"""`bitwitness demo`, for real: each case is a training job of several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.examples.demo import Settings
from bitwitness.runfiles import RunFiles, read_incident

SMALL = ["--nodes", "3", "--ranks-per-node", "1", "--steps", "6"]


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


def test_a_wrong_matrix_product(tmp_path: Path) -> None:
    """The command as `make demo` runs it."""
    record = report(demo("--fault", "matmul", "--json", "--run-dir", tmp_path / "run"))
    step, rank = record["injected_step"], record["true_rank"]
    assert record["detected_step"] == step
    assert record["before_update"] is True
    assert (record["check"], record["kind"], record["persistence"]) == ("replay", "compute", "persistent")
    assert record["status"] == "attributed"
    assert record["named_ranks"] == [rank]
    assert record["named_nodes"] == [record["true_node"]] == [f"node-{'abcd'[rank // 2]}"]
    assert record["right"] is True
    assert record["false_alarms"] == 0
    assert record["checks_passed"] == {"numerics": 192, "replay": 192, "replicas": 192}  # 8 ranks, 24 steps
    assert record["guard_changes_no_bit"] is True
    assert record["seconds"] > 0
    curves = losses(record)
    assert [len(curves[name]) for name in ("clean", "unguarded", "guarded")] == [24, 24, step + 1]
    assert curves["clean"][:step] == curves["unguarded"][:step] == curves["guarded"][:step]
    assert curves["clean"][-1] < curves["clean"][0]
    assert curves["unguarded"][-1] > curves["clean"][-1]
    incident = read_incident(record["incident"])
    assert incident.verdict.ranks == (rank,)
    assert incident.path.parent.parent == Path(record["run_dir"]) / "guarded"
    assert not RunFiles(tmp_path / "run" / "clean").incidents()
    done = CliRunner().invoke(cli, ["incident", "show", record["incident"]])
    assert done.exit_code == 0
    assert f"persistent compute corruption on rank {rank}" in done.stdout


def test_nothing_wrong(tmp_path: Path) -> None:
    record = report(demo("--fault", "none", "--json", "--run-dir", tmp_path / "run", *SMALL))
    assert record["status"] == "clean"
    assert record["named_ranks"] == record["named_nodes"] == []
    assert [record[key] for key in ("injected_step", "detected_step", "true_rank", "incident", "right")] == [None] * 5
    assert record["false_alarms"] == 0
    assert losses(record)["clean"] == losses(record)["unguarded"] == losses(record)["guarded"]


def test_a_weight_in_memory_as_a_person_reads_it(tmp_path: Path) -> None:
    done = demo("--fault", "weight", "--run-dir", tmp_path / "run", "--seed", "3", *SMALL)
    assert done.exit_code == 0, done.output
    page = " ".join(done.stdout.split())
    drawn = Settings(fault="weight", seed=3, nodes=3, ranks_per_node=1, steps=6)
    who = f"rank {drawn.rank} on {drawn.node}"
    assert f"At step {drawn.step}, once, {who} had this wrong: blocks.1.mlp.up.weight. 1 element changed" in page
    assert "by replicas, after the update of that step, on every rank: memory corruption, unknown." in page
    assert f"Named: {who} (right)." in page
    assert "Its ranks ended with different weights, which nothing reported." in page
    assert "no false alarm in 54 checks" in page
    assert "bitwitness incident show " in page
    assert "As it should be." in page
    assert not done.stderr


def test_a_transient_nan_where_nobody_can_be_named(tmp_path: Path) -> None:
    two_nodes = ["--nodes", "2", "--ranks-per-node", "1", "--steps", "6"]
    record = report(demo("--fault", "nan", "--transient", "--json", "--run-dir", tmp_path / "run", *two_nodes))
    assert record["status"] == "unattributed"
    assert record["named_ranks"] == []
    assert record["detected_step"] == record["injected_step"]
    assert losses(record)["unguarded"][-1] == "nan"  # JSON has no NaN


@pytest.mark.parametrize(
    ("fault", "flags", "kind", "check", "persistence"),
    [
        ("gradient", ["--transient"], "compute", "replay", "transient"),
        ("moment", [], "memory", "replicas", "unknown"),
    ],
)
def test_the_other_faults(
    tmp_path: Path, fault: str, flags: list[str], kind: str, check: str, persistence: str
) -> None:
    record = report(demo("--fault", fault, *flags, "--json", "--run-dir", tmp_path / "run", *SMALL))
    assert (record["kind"], record["check"], record["persistence"]) == (kind, check, persistence)
    assert record["named_ranks"] == [record["true_rank"]]
    assert record["before_update"] is (check == "replay")
