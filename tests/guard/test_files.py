"""What a guarded run leaves on the disk: ledger, run.json, incidents; also of a rank that was killed while it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import bitwitness
from bitwitness.evidence import History
from bitwitness.runfiles import RunFiles
from bitwitness.verdict import decide
from tests.guard.faults import Fault
from tests.guard.harness import Launch, Rank, Scenario, Seen, launch
from tests.guard.training import Plan, run

pytestmark = pytest.mark.timeout(200)

RARELY = Plan(steps=9, policy={"audit": "auto", "audit_every": 4, "check_every": 3, "checkpoint_every": 7})
REBUILT = replace(RARELY, rebuild=True)
RECORD = Plan(steps=7, policy={"audit": "gradients", "on_detection": "record"})
RECORDED = {
    "persistent": (Fault("matmul", 1, 2, True),),
    "once": (Fault("gradient sign", 1, 2),),
    "weight": (Fault("weight last bit", 1, 2),),
    "two kinds": (Fault("matmul", 1, 2), Fault("layer norm", 2, 4)),
}
KILLED = Plan(steps=6, policy={"audit": "gradients", "audit_every": 2, "timeout": 3.0})


def killed_while_writing(place: Rank, whole: int) -> Seen:
    """Rank 1 dies in the middle of a line of its journal, after so many whole ones."""
    original = os.write
    lines = 0

    def write(file: int, content: bytes) -> int:
        nonlocal lines
        lines += content.startswith(b'{"schema"')
        if place.rank == 1 and lines > whole:
            original(file, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(file, content)

    with patch.object(os, "write", write):
        return run(place, KILLED)


def run_in(place: Rank, folder: str) -> Seen:
    """A later run in the folder of an earlier one."""
    return run(Rank(place.rank, place.world_size, Path(folder)), KILLED)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Three nodes."""
    scenarios = [
        Scenario("rarely", run, RARELY),
        Scenario("rebuilt", run, REBUILT),
        Scenario("hit", run, RARELY.with_faults(Fault("matmul", 1, 3))),
    ]
    for name, faults in RECORDED.items():
        scenarios.append(Scenario(f"record {name}", run, RECORD.with_faults(*faults)))
        scenarios.append(Scenario(f"record {name}, plain", run, RECORD.with_faults(*faults, guarded=False)))
    return launch(scenarios, 3, tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launch, RunFiles, list[int]]:
    """A run of which a rank was killed while it wrote; its files; how many lines of each journal could be read."""
    scenario = Scenario("killed", killed_while_writing, 2)
    first = launch([scenario], 3, tmp_path_factory.mktemp("killed"), deadline=90, collective_timeout=15)
    files = RunFiles(first.folder("killed") / "run")
    return first, files, [len(list(files.read_journal(rank))) for rank in range(3)]


def ledger(files: RunFiles, rank: int) -> dict[str, dict[int, str]]:
    """For each check the outcome of each step."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for entry in files.read_journal(rank):
        if entry["kind"] == "ledger":
            for step in range(entry["first"], entry["last"] + 1):
                assert step not in found[entry["check"]], "two outcomes of one check in one step"
                found[entry["check"]][step] = entry["outcome"]
    return found


def files_of(done: Launch, name: str) -> RunFiles:
    return RunFiles(done.folder(name) / "run")


@pytest.mark.parametrize("name", ["rarely", "rebuilt"])
@pytest.mark.parametrize("rank", range(3))
def test_the_ledger_says_what_was_verified(done: Launch, name: str, rank: int) -> None:
    assert done.seen(name)[rank]["error"] is None
    assert ledger(files_of(done, name), rank) == {
        "numerics": dict.fromkeys(range(9), "passed"),
        "replay": dict.fromkeys((0, 3, 6, 7), "passed"),
        "replicas": dict.fromkeys((2, 5, 6, 8), "passed"),
    }
    replays = [entry for entry in files_of(done, name).read_journal(rank) if entry.get("check") == "replay"]
    assert {entry["detail"]["witness"] for entry in replays} == {(rank + 1) % 3}
    assert {entry["detail"]["level"] for entry in replays} == {"gradients"}


@pytest.mark.parametrize(("name", "steps"), [("rarely", 9), ("rebuilt", 9), ("hit", 4), ("record persistent", 7)])
def test_rank_0_says_how_training_went(done: Launch, name: str, steps: int) -> None:
    """Every step once, also the one in which corruption was found; the others write nothing of the kind."""
    records = [one for one in files_of(done, name).read_journal(0) if one["kind"] == "steps"]
    assert [step for one in records for step in range(one["first"], one["last"] + 1)] == list(range(steps))
    losses = done.seen(name)[0]["losses"]
    mean = sum(one["loss"] * (one["last"] - one["first"] + 1) for one in records) / steps
    assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert all(one["norm"] > 0 and one["seconds"] > 0 and one["clock"] == "host" for one in records)
    assert {check for one in records for check in one["cost"]} == {"guard", "numerics", "replay", "replicas"}
    for rank in (1, 2):
        assert not [one for one in files_of(done, name).read_journal(rank) if one["kind"] == "steps"]


def test_the_ledger_says_what_failed(done: Launch) -> None:
    for rank in range(3):
        found = ledger(files_of(done, "hit"), rank)
        assert found["replay"] == {0: "passed", 3: "failed"}
        assert found["replicas"] == {2: "passed"}
        kinds = [entry["kind"] for entry in files_of(done, "hit").read_journal(rank)]
        assert kinds.count("verdict") == 1
        assert "observation" in kinds


def test_run_json(done: Launch) -> None:
    record = files_of(done, "rarely").read_run()
    assert record["schema"] == 1
    assert record["world_size"] == 3
    assert [(place["rank"], place["node"]) for place in record["placement"]] == [(0, "n0"), (1, "n1"), (2, "n2")]
    assert len({place["device"] for place in record["placement"]}) == 3
    assert bitwitness.Policy(**record["policy"]) == bitwitness.Policy(timeout=60.0, **RARELY.policy)
    assert (record["torch"], record["bitwitness"]) == (torch.__version__, bitwitness.__version__)
    assert 0 <= record["fingerprint_seed"] < 2**64
    assert any("wrong input is not detected" in limit for limit in record["limits"])
    assert not any("wrong input" in limit for limit in files_of(done, "rebuilt").read_run()["limits"])
    assert record["started"].endswith("Z")


def test_an_incident_is_read_without_torch(done: Launch) -> None:
    incident = done.seen("hit")[0]["error"]["incident"]
    program = (
        "import sys, json; sys.modules['torch'] = sys.modules['numpy'] = None; import bitwitness; "
        "found = bitwitness.read_incident(sys.argv[1]); print(json.dumps([found.verdict.ranks, found.verdict.window, "
        "len(found.observations), found.topology.nodes, sorted(path.name for path in found.path.iterdir())]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run(
        [sys.executable, "-c", program, incident], capture_output=True, text=True, check=False, env=environment
    )
    assert told.returncode == 0, told.stderr
    ranks, window, observations, nodes, names = json.loads(told.stdout)
    assert (ranks, window, nodes) == ([1], [0, 3], ["n0", "n1", "n2"])
    assert observations == 9
    assert names == ["incident.json", "micro-batches-rank-00001.pt"]


@pytest.mark.parametrize("name", ["hit", *(f"record {name}" for name in RECORDED)])
def test_the_verdict_can_be_decided_again(done: Launch, name: str) -> None:
    for path in files_of(done, name).incidents():
        found = bitwitness.read_incident(path)
        history = History.from_json(found.record["history"])
        assert decide(found.observations, found.topology, history, found.verdict.step) == found.verdict


@pytest.mark.parametrize("name", RECORDED)
def test_recording_goes_on(done: Launch, name: str) -> None:
    """Exactly as if nobody watched; and each thing is written down once, not at every step."""
    guarded, plain = done.seen(f"record {name}"), done.seen(f"record {name}, plain")
    for own, reference in zip(guarded, plain, strict=True):
        assert own["error"] is None
        assert own["states"] == reference["states"]
    incidents = (bitwitness.read_incident(path) for path in files_of(done, f"record {name}").incidents())
    found = sorted(incidents, key=lambda incident: incident.verdict.step)
    expected = [(1,), (2,)] if name == "two kinds" else [(1,)]
    assert [incident.verdict.ranks for incident in found] == expected
    assert len([line for line in guarded[0]["logged"] if "corruption on rank" in line]) == len(expected)


def test_recording_counts_every_step(done: Launch) -> None:
    for rank in range(3):
        found = ledger(files_of(done, "record persistent"), rank)["replay"]
        assert found == {**dict.fromkeys(range(2), "passed"), **dict.fromkeys(range(2, 7), "failed")}
        found = ledger(files_of(done, "record once"), rank)["replay"]
        assert found == {**dict.fromkeys(range(7), "passed"), 2: "failed"}


def test_a_journal_that_was_torn_is_readable(
    killed: tuple[Launch, RunFiles, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    done, files, lines = killed
    assert done.exit_codes[1] == -9
    assert not (files.path / "journal" / "rank-00001.jsonl").read_bytes().endswith(b"\n")
    assert lines[1] == 2
    assert len(list(files.read_journal(1))) == 2
    assert "skipped 1 torn" in caplog.text
    for rank in (0, 2):
        error: Any = done.survivors("killed")[rank]["error"]
        assert error["type"] == "RankLost" or "rank 1 (node n1)" in " ".join(error["notes"])
        assert list(ledger(files, rank))


def test_a_torn_journal_is_continued(
    killed: tuple[Launch, RunFiles, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A restart in the same folder cuts the torn line off and writes on."""
    first, files, lines = killed
    scenario = Scenario("again", run_in, str(first.folder("killed")))
    again = launch([scenario], 3, tmp_path_factory.mktemp("again"))
    assert [seen["error"] for seen in again.seen("again")] == [None] * 3
    for rank in range(3):
        content = (files.path / "journal" / f"rank-{rank:05d}.jsonl").read_text()
        records = [json.loads(line) for line in content.splitlines()]
        assert [record["kind"] for record in records].count("start") == 2
        assert records == list(files.read_journal(rank))
        assert len(records) > lines[rank]
