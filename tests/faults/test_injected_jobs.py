"""The injector in jobs of several ranks: on the wire, on one rank, on one node, in the guard's own work; and in a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import injected
from tests.guard.harness import Launch, Scenario, launch

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


def _run(folder: Path, name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "bitwitness", "run", "--nodes", "2", "--run-dir", name, "train.py"]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_script_is_hit_from_outside_and_again_by_its_record(tmp_path: Path) -> None:
    done = _run(tmp_path, "hit", BITWITNESS_FAULT="rank=1 grad_w:weight @ step=2 : n=1 -> bit=26")
    assert done.returncode == 0, done.stderr
    assert "damaged on purpose" in done.stdout + done.stderr
    record = tmp_path / "hit" / "faults" / "rank-00001.jsonl"
    (strike,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert (strike["site"]["step"], strike["site"]["name"]) == (2, "weight")
    words = [sys.executable, "-m", "bitwitness", "fault", "replay", "--json", str(record)]
    words += [sys.executable, "-m", "bitwitness", "run", "--nodes", "2", "--run-dir", "again", "train.py"]
    again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["reproduced"] is True


def test_a_fault_that_never_lands_fails_the_job(tmp_path: Path) -> None:
    done = _run(tmp_path, "hit", BITWITNESS_FAULT="rank=1 grad_w:weight @ step=9 : n=1 -> bit=26")
    assert done.returncode == 1
    assert "did not land" in done.stdout + done.stderr


def test_a_slip_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    done = _run(tmp_path, "hit", BITWITNESS_FAULT="rank=1 grad_w:weight @ step=2 : n=1 -> bitt=26")
    assert done.returncode == 2
    assert "did you mean bit" in done.stderr
    assert not (tmp_path / "hit").exists()
