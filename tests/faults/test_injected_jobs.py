"""The injector in jobs of several ranks: on the wire, on one rank, on one node, in the guard's own work; and in a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import ConfigurationError
from bitwitness.faults import record
from bitwitness.faults.grammar import parse_all
from bitwitness.faults.script import absent, had_their_turn
from bitwitness.runfiles.faults import injected_into
from tests.faults import injected
from tests.faults.test_record import strike
from tests.guard.harness import Launch, Scenario, launch

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"

CASES: dict[str, tuple[str, bool]] = {
    "plain": ((), False),  # type: ignore[dict-item]
    "guarded": ((), True),  # type: ignore[dict-item]
    "sent, plain": ("rank=1 comm.pre @ step=2 : n=1 -> bit=26", False),
    "reduced alike, plain": ("comm.reduce @ step=2 : n=1 -> bit=26", False),
    "reduced on one, plain": ("rank=1 comm.post @ step=2 : n=1 -> bit=26", False),
    "sent": ("rank=1 comm.pre @ step=2 : n=1 -> bit=26", True),
    "reduced alike": ("comm.reduce @ step=2 : n=1 -> bit=26", True),
    "reduced on one": ("rank=1 comm.post @ step=2 : n=1 -> bit=26", True),
    "node": ("node=n2 fwd_out:0 @ step=2 : n=1 -> bit=26", True),
    "witness": ("rank=2 during=replay fwd_out:0 @ step=2 : n=1 -> bit=26", True),
    "arbiter": (
        "rank=0 fwd_out:0 @ step=2 : n=1 -> bit=26 & rank=2 during=arbiter fwd_out:0 @ step=2 : n=1 -> bit=25 ; permanent",
        True,
    ),
    "hash, first step": ("rank=1 digest @ step=0 : n=1 -> bit=12", True),
    "hash": ("rank=2 during=fingerprint param:0.weight @ step=2 : n=1 -> bit=3", True),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    scenarios = [Scenario(name, injected.train, given) for name, given in CASES.items()]
    return launch(scenarios, 3, tmp_path_factory.mktemp("injected"))  # type: ignore[return-value]


def _struck(ranks: Launch, name: str) -> list[int]:
    return [rank for rank, seen in enumerate(ranks.seen(name)) if seen["strikes"]]


def test_without_faults_nothing_differs(ranks: Launch) -> None:
    plain, guarded = ranks.seen("plain"), ranks.seen("guarded")
    assert len({seen["weights"] for seen in [*plain, *guarded]}) == 1


@pytest.mark.parametrize(
    ("name", "struck", "alike"),
    [("sent", [1], True), ("reduced alike", [0, 1, 2], True), ("reduced on one", [1], False)],
)
def test_the_wire_of_a_job_without_a_guard(ranks: Launch, name: str, struck: list[int], alike: bool) -> None:
    seen = ranks.seen(f"{name}, plain")
    assert _struck(ranks, f"{name}, plain") == struck
    weights = {one["weights"] for one in seen}
    assert (len(weights) == 1) == alike
    assert ranks.seen("plain")[0]["weights"] not in weights
    assert len({json.dumps(one["strikes"][0]["after"]) for one in seen if one["strikes"]}) == 1


@pytest.mark.parametrize(("name", "caught"), [("sent", False), ("reduced alike", False), ("reduced on one", True)])
def test_the_wire_of_a_guarded_job(ranks: Launch, name: str, caught: bool) -> None:
    """What every rank gets alike is the gap that this version admits; it must be hit all the same, at the same bits."""
    plain, seen = ranks.seen(f"{name}, plain"), ranks.seen(name)
    assert [one["strikes"] for one in seen] == [one["strikes"] for one in plain]
    assert [bool(one["verdict"]) for one in seen] == [caught] * 3


@pytest.mark.parametrize(
    ("name", "struck", "status", "named"),
    [
        ("node", [2], "attributed", [2]),
        ("witness", [2], "attributed", [2]),
        ("hash", [2], "attributed", [2]),
        ("hash, first step", [1], "unattributed", []),  # what differs in the first step may be configuration
        ("arbiter", [0, 2], "unattributed", []),  # three ranks, two of them wrong: nobody can be named
    ],
)
def test_faults_of_a_node_and_of_the_guards_own_work(
    ranks: Launch, name: str, struck: list[int], status: str, named: list[int]
) -> None:
    assert _struck(ranks, name) == struck
    for seen in ranks.seen(name):
        assert seen["verdict"]["status"] == status
        assert seen["verdict"]["ranks"] == named


# Scripts -----------------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


RESTARTED = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and os.environ["BITWITNESS_GENERATION"] == "1":
        raise SystemExit(9)
"""
"""Its second start passes the same steps again."""

RANKS = 2 if EXHAUSTIVE else 1
"""Of the script that is hit and hit again: each is a process that imports torch."""

LATE = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
other = torch.nn.Linear(4, 1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    if step == 0:
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
"""
"""The optimizer is made when a step is under way, and beside it one that has nothing to do with the model."""


def _run(
    folder: Path, name: str, *options: str, script: str = SCRIPT, ranks: int = 2, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """On one node: each costs an agent, and an agent imports torch."""
    (folder / "train.py").write_text(script)
    words = [sys.executable, "-m", "bitwitness", "run", "--nproc-per-node", str(ranks), "--run-dir", name]
    words += [*options, "train.py"]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
    )


def _replay(folder: Path, record: Path, *options: str, ranks: int = 2) -> tuple[int, dict[str, Any]]:
    """Of what `_run` has run before, into another directory."""
    words = [sys.executable, "-m", "bitwitness", "fault", "replay", "--json", str(record)]
    words += [
        sys.executable,
        "-m",
        "bitwitness",
        "run",
        "--nproc-per-node",
        str(ranks),
        "--run-dir",
        "again",
        *options,
        "train.py",
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, json.loads(done.stdout)


def _strikes(run_dir: Path) -> list[dict[str, Any]]:
    return [one.to_json() for one in record.landed(run_dir / "faults")]


def test_a_script_is_hit_from_outside_and_again_by_its_record(tmp_path: Path) -> None:
    last = RANKS - 1
    line = f"rank={last} grad_w:weight @ step=2 : n=1 -> bit=26"
    done = _run(tmp_path, "hit", ranks=RANKS, BITWITNESS_FAULT=line)
    assert done.returncode == 0, done.stderr
    assert "damaged on purpose" in done.stdout + done.stderr
    (strike,) = _strikes(tmp_path / "hit")
    assert (strike["site"]["step"], strike["site"]["name"]) == (2, "weight")
    session = json.loads((tmp_path / "hit" / "supervise" / "session.json").read_text())["id"]
    assert [one.start for one in injected_into(tmp_path / "hit")] == [f"{session}/1"], "the first of this session alone"
    recorded = tmp_path / "hit" / "faults" / f"rank-{last:05d}.jsonl"
    assert _replay(tmp_path, recorded, ranks=RANKS)[1]["reproduced"] is True


@pytest.mark.skipif(not EXHAUSTIVE, reason="several supervised runs: BITWITNESS_EXHAUSTIVE=1")
def test_a_job_that_was_started_again_is_had_again_start_by_start(tmp_path: Path) -> None:
    lines = "rank=1 grad_w:weight @ step=2 : n=1 -> bit=26 ; permanent & rank=0 grad_w:bias @ step=1 : all -> bit=3"
    done = _run(tmp_path, "hit", "--max-restarts", "1", script=RESTARTED, BITWITNESS_FAULT=lines)
    assert done.returncode == 0, done.stderr
    struck = [(one["site"]["fault"], one["site"]["start"], one["site"]["step"]) for one in _strikes(tmp_path / "hit")]
    assert sorted(struck) == [(0, 1, 2), (0, 2, 2), (0, 2, 3), (1, 1, 1)]
    code, found = _replay(tmp_path, tmp_path / "hit" / "faults", "--max-restarts", "1")
    assert (code, found["strikes"], found["reproduced"]) == (0, 4, True), found
    assert not found["additional"]


@pytest.mark.skipif(not EXHAUSTIVE, reason="several supervised runs: BITWITNESS_EXHAUSTIVE=1")
def test_a_run_directory_that_is_used_again_is_hit_by_another_fault(tmp_path: Path) -> None:
    """What has had its turn is this fault, not its number; and the very same fault does not strike twice, and says so."""
    line = "rank=1 grad_w:weight @ step=2 : n=1 -> bit={}"
    for bit, landed in ((26, 1), (25, 2), (25, 2)):
        done = _run(tmp_path, "hit", BITWITNESS_FAULT=line.format(bit))
        assert done.returncode == 0, done.stderr
        assert len(_strikes(tmp_path / "hit")) == landed
    assert "has had its turn" in done.stdout + done.stderr
    with pytest.raises(ConfigurationError, match="record of several runs"):
        record.read(tmp_path / "hit" / "faults")


def test_an_optimizer_that_is_made_late_counts_the_steps_where_a_death_has_left_half_a_record(tmp_path: Path) -> None:
    """What the model is called with is hit from the first call on; what an earlier start left stops no later one."""
    (tmp_path / "hit" / "faults").mkdir(parents=True)
    (tmp_path / "hit" / "faults" / "rank-00000.jsonl").write_text('{"schema": 1, "si')
    lines = "rank=0 input @ step=0 : n=1 -> bit=26 & grad_w:1.weight @ step=2 : n=1 -> bit=26"
    done = _run(tmp_path, "hit", script=LATE, ranks=1, BITWITNESS_FAULT=lines)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one["site"]["step"] for one in _strikes(tmp_path / "hit")] == [0, 2]


@pytest.mark.skipif(not EXHAUSTIVE, reason="a supervised run more: BITWITNESS_EXHAUSTIVE=1")
def test_a_fault_that_never_lands_fails_the_job(tmp_path: Path) -> None:
    done = _run(tmp_path, "hit", BITWITNESS_FAULT="rank=1 grad_w:weight @ step=9 : n=1 -> bit=26")
    assert done.returncode == 1
    assert "did not land" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"BITWITNESS_FAULT": "rank=1 grad_w:weight @ step=2 : n=1 -> bitt=26"}, "did you mean bit"),
        ({"BITWITNESS_FAULT": "rank=7 loss @ step=2 : n=1 -> bit=26"}, "there is no rank 7, the job has 2"),
        ({"BITWITNESS_FAULT": "node=a rank=2 loss @ step=2 : n=1 -> bit=26"}, "there is no rank 2, the job has 2"),
        (
            {"BITWITNESS_FAULT": "loss @ step=2 : n=1 -> zero", "BITWITNESS_FAULT_SEED": "x"},
            "FAULT_SEED='x': must be a",
        ),
        ({"BITWITNESS_FAULT": "@absent"}, "there is no record absent"),
        ({"BITWITNESS_FAULT": "@"}, "the path of a record is missing"),
        ({"BITWITNESS_FAULT": "@damaged.jsonl"}, "damaged.jsonl, line 1: no record of a fault: site is None"),
        ({"BITWITNESS_FAULT": "@far.jsonl"}, "there is no rank 5, the job has 2"),
    ],
)
def test_a_slip_is_an_error_before_anything_starts(
    environment: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: nothing starts, and the command alone takes seconds to import what a job needs."""
    (tmp_path / "damaged.jsonl").write_text('{"schema": 1}\n')
    record.append(tmp_path / "far.jsonl", strike(rank=5))
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["run", "--nodes", "2", "--run-dir", "hit", "train.py"])
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert isinstance(done.exception, SystemExit), "an error that nobody has explained"
    assert "Traceback" not in done.output
    assert not (tmp_path / "hit").exists()


# What has had its turn, and what is not there ------------------------------------------------------------------------------

LINE = "fwd_out:head @ step=2 : n=1 -> bit=26"


@pytest.mark.parametrize(
    ("lines", "before", "rank", "node", "numbers"),
    [
        (f"rank=1 {LINE}", {"rank": 1}, 1, "elsewhere", {0}),
        (f"rank=1 {LINE}", {"rank": 1}, 2, "n1", set()),
        (f"rank=* {LINE}", {"rank": 1}, 2, "n1", set()),
        (f"node=n1 {LINE}", {"rank": 1}, 2, "n1", {0}),
        (f"node=n1 {LINE}", {"rank": 1}, 1, "n2", set()),
        (f"rank=1 {LINE} & rank=1 {LINE}", {"rank": 1, "fault": 1}, 1, "n1", {1}),
        (f"rank=1 loss @ step=1 : n=1 -> bit=3 & rank=1 {LINE}", {"rank": 1}, 1, "n1", {1}),
        (f"rank=1 {LINE.replace('26', '25')}", {"rank": 1}, 1, "n1", set()),
    ],
)
def test_what_has_had_its_turn(lines: str, before: dict[str, Any], rank: int, node: str, numbers: set[int]) -> None:
    faults = parse_all(lines)
    struck = strike(spec=str(next((one for one in faults if one.where.target == "fwd_out"), faults[0])), **before)
    if "25" in lines:
        struck = strike(spec=f"rank=1 {LINE} ; once", **before)
    assert set(had_their_turn(faults, [struck], rank, node)) == numbers


def test_a_node_that_the_job_is_not_on_is_said() -> None:
    faults = parse_all(f"node=n7 {LINE} & node=n1 {LINE} & rank=0 {LINE}")
    (words,) = absent([*faults, strike()], ("n0", "n1"))
    assert "the job has no node 'n7', so nothing is hit; it is on n0, n1" in words
