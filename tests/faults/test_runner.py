"""Cells are run and answered for, whatever a job does to its ranks, to the process that forked them, or to time.

Everything is run in one go, because a process with torch takes seconds to start: what strange jobs do must not harm the
cells that come after them either.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.examples.jobs import Mlp, MlpOptions
from bitwitness.faults import forker, runner
from bitwitness.faults.cells import CellResult, CellSpec, Role
from bitwitness.faults.job import Shape, find_factory
from bitwitness.faults.rank import GUARD_TIMEOUT, Place, _compare_or_keep
from bitwitness.faults.results import account_path, gather
from bitwitness.supervise import processes

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_OF_THE_RUNNER"
EVERY_STEP = {"audit_every": 1, "check_every": 1}
STEPS = 4


class Strange(Mlp):
    """Does what its option says on rank 1, at the start of step 2."""

    def __init__(self, what: str, seed: int, rank: int) -> None:
        super().__init__(MlpOptions(), seed)
        self._what = what if rank == 1 else ""

    def batch(self, step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
        if step == 2:
            self._do(self._what)
        return super().batch(step, rank, micro)

    def _do(self, what: str) -> None:
        if what == "raise":
            raise ZeroDivisionError("on purpose")
        if what == "abort":
            os.abort()
        if what == "sleep":
            time.sleep(600)
        if what == "kill the forker":
            os.kill(os.getppid(), signal.SIGKILL)


def strange(options: Mapping[str, Any], seed: int, rank: int, world_size: int) -> Strange:
    return Strange(str(options["what"]), seed, rank)


def cell(key: str, role: Role = "control", factory: str = "mlp", seed: int = 0, **options: Any) -> CellSpec:
    policy = options.pop("policy", EVERY_STEP if role in ("control", "fault") else None)
    faults = options.pop("faults", ())
    return CellSpec(key, "job", factory, {"ranks": 2, "steps": STEPS, **options}, policy, faults, seed, role)


def odd(what: str, **options: Any) -> CellSpec:
    return cell(what, factory="tests.faults.test_runner:strange", what=what, **options)


def hit(key: str, *faults: str, **options: Any) -> CellSpec:
    return cell(key, "fault", faults=faults, checkpoint_every=2, rebuild=True, **options)


CELLS = [
    cell("control", checkpoint_every=2, rebuild=True),  # before the clean one, which must nevertheless be run first
    odd("raise"),
    odd("abort"),
    odd("kill the forker"),
    cell("no such option", widht=3),
    cell("no such job", factory="nothing"),
    cell("alone", role="reference", ranks=1, seed=5),
    cell("clean", role="clean"),
    hit("caught", "rank=1 grad_w:0.weight @ step=2 : n=1 -> bit=30"),
    hit("recorded", "rank=1 grad_w:0.weight @ step=2 : n=1 -> bit=3", policy=EVERY_STEP | {"on_detection": "record"}),
    hit("unguarded", "rank=1 grad_w:0.weight @ step=2 : largest -> bit=22 ; permanent", policy=None),
    hit("at rest", "rank=0 ckpt @ step=1 : n=1 -> bit=0"),
    hit("while saving", "rank=0 during=save ckpt @ step=1 : n=1 -> bit=0"),
    hit("no such module", "rank=1 fwd_out:nothing @ step=2 : n=1 -> bit=3"),
    hit("changes nothing", "rank=1 fwd_out:0 @ step=2 : all -> scale=2.0 ; if=1e30..1e31"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CellResult]:
    found: dict[str, CellResult] = {}

    def keep(spec: CellSpec, result: CellResult) -> None:
        assert spec.key == result.key
        assert result == CellResult.from_json(json.loads(json.dumps(result.to_json())))
        found[spec.key] = result

    folder = tmp_path_factory.mktemp("campaign")
    memory = Path("/dev/shm")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch,
    ):
        patch.chdir(ROOT)
        patch.setenv(MARK, str(os.getpid()))
        patch.setenv("TMPDIR", scratch)
        progress: list[runner.Progress] = []
        runner.run(CELLS, deadline=100.0, on_result=keep, on_progress=progress.append, weights=folder / "weights")
        # One forker was killed, and the one after it has removed what it left.
        assert not list(Path(scratch).glob("bitwitness-*"))
    assert progress[-1].done == progress[-1].total == len(CELLS)
    assert not marked(str(os.getpid()))
    return found


def test_a_guarded_run_without_a_fault_is_the_clean_run(results: dict[str, CellResult]) -> None:
    clean, control = results["clean"], results["control"]
    assert (clean.end, control.end) == ("finished", "finished")
    assert list(results).index("clean") < list(results).index("control")
    assert control.digests == clean.digests
    assert [len(of_rank) for of_rank in clean.digests] == [STEPS, STEPS]
    assert len(set(clean.digests[0])) == STEPS
    assert control.losses == clean.losses
    assert control.norms == clean.norms
    assert control.evaluation == clean.evaluation
    assert (clean.drift, control.drift) == (None, 0.0)
    assert (clean.updates, control.updates) == (STEPS, STEPS)
    assert (control.verdict, control.caught_by, control.verdicts) == (None, "", ())
    assert [(one["step"], one["published"], one["problem"]) for one in control.checkpoints] == [
        (2, True, ""),
        (4, True, ""),
    ]


def test_one_rank_is_a_job_too(results: dict[str, CellResult]) -> None:
    alone = results["alone"]
    assert alone.end == "finished"
    assert len(alone.digests) == 1
    assert set(alone.evaluation) == {"loss", "accuracy"}


def test_a_rank_that_raises_is_the_cause(results: dict[str, CellResult]) -> None:
    raised = results["raise"]
    assert raised.end == "crash"
    assert raised.error == "rank 1: ZeroDivisionError: on purpose"
    assert raised.updates == 2
    assert len(raised.losses) == 2
    assert raised.seconds < GUARD_TIMEOUT  # nobody has waited for one who is gone


def test_a_rank_that_is_gone_is_the_cause(results: dict[str, CellResult]) -> None:
    aborted = results["abort"]
    assert aborted.end == "crash"
    assert aborted.error.startswith("rank 1 was killed by SIGABRT")
    assert aborted.updates == 2


def test_a_rank_that_never_ends_is_killed_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    hung: list[CellResult] = []
    runner.run([odd("sleep", policy=None)], deadline=2.0, on_result=lambda _, result: hung.append(result))
    assert [result.end for result in hung] == ["hang"]
    assert len(hung[0].losses) <= 2


def test_a_cell_that_kills_its_forker_is_a_crash_of_that_cell_only(results: dict[str, CellResult]) -> None:
    killed = results["kill the forker"]
    assert killed.end == "crash"
    assert "SIGKILL" in killed.error
    assert results["alone"].end == "finished"


def test_what_cannot_be_is_refused(results: dict[str, CellResult]) -> None:
    assert results["no such option"].end == results["no such job"].end == "refused"
    assert "no option widht" in results["no such option"].error
    assert "no such job: 'nothing'" in results["no such job"].error


# With faults ---------------------------------------------------------------------------------------------------------


def test_a_fault_is_caught_and_its_rank_named(results: dict[str, CellResult]) -> None:
    caught = results["caught"]
    assert caught.end == "detected"
    assert caught.verdict is not None
    assert caught.verdict["ranks"] == [1] or caught.verdict["status"] == "unattributed"  # two nodes: nobody to decide
    assert (caught.caught_step, caught.first_step, caught.struck_ranks) == (2, 2, (1,))
    assert caught.caught_by in ("numerics", "replay")
    assert caught.struck == len(caught.strikes) == 1
    assert caught.strikes[0]["site"]["name"] == "0.weight"
    assert caught.updates == 2
    assert [one["step"] for one in caught.checkpoints] == [2]
    assert caught.digests == tuple(of_rank[:2] for of_rank in results["clean"].digests)
    assert "/bitwitness-" not in caught.error


def test_in_shadow_mode_every_verdict_is_told(results: dict[str, CellResult]) -> None:
    recorded = results["recorded"]
    assert recorded.end == "finished"
    assert recorded.verdicts[0]["check"] == recorded.caught_by == "replay"
    assert recorded.updates == STEPS
    assert recorded.digests[0][:2] == results["clean"].digests[0][:2]
    assert recorded.digests[0][2] != results["clean"].digests[0][2]
    assert "not a verified one" in recorded.checkpoints[-1]["distrusted"]


def test_without_a_guard_it_trains_on(results: dict[str, CellResult]) -> None:
    unguarded = results["unguarded"]
    assert (unguarded.end, unguarded.verdict, unguarded.struck) == ("finished", None, STEPS - 2)
    assert unguarded.drift is not None
    assert unguarded.drift > 0.0
    assert unguarded.losses != results["clean"].losses


def test_a_damaged_checkpoint_is_seen_by_its_label(results: dict[str, CellResult]) -> None:
    for key, published in (("at rest", True), ("while saving", False)):
        result = results[key]
        assert (result.end, result.caught_by, result.caught_step, result.verdict) == ("finished", "checkpoint", 1, None)
        first, last = result.checkpoints
        assert (first["published"], bool(first["problem"])) == (published, True)
        assert (last["published"], last["problem"]) == (True, "")
        assert result.digests == results["clean"].digests


def test_a_fault_that_cannot_be_and_one_that_does_nothing(results: dict[str, CellResult]) -> None:
    assert results["no such module"].end == "refused"
    assert "'nothing'" in results["no such module"].error
    assert results["changes nothing"].end == "not_landed"
    assert results["changes nothing"].struck == 0


# Its own end ---------------------------------------------------------------------------------------------------------


def marked(value: str) -> list[int]:
    """The processes of a run: they have its mark in their environment."""
    wanted = f"{MARK}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_nothing_outlives_a_campaign_that_is_killed(tmp_path: Path) -> None:
    mark = f"{os.getpid()} killed"
    code = (
        "import json, sys\n"
        "from bitwitness.faults import runner\n"
        "from bitwitness.faults.cells import CellSpec\n"
        "spec = CellSpec.from_json(json.loads(sys.argv[1]))\n"
        "runner.run([spec], deadline=500.0, on_result=print)\n"
    )
    spec = json.dumps(odd("sleep", policy=None).to_json())
    process = subprocess.Popen(
        [sys.executable, "-c", code, spec], cwd=ROOT, env=os.environ | {MARK: mark, "TMPDIR": str(tmp_path)}
    )
    try:
        wait_for(lambda: len(marked(mark)) == 4, "the campaign, its forker and two ranks")
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not marked(mark), "all of them end")


def test_a_forker_that_died_while_idle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, sys\nprint('{\"ready\": true}', flush=True)\n"
        "key = json.loads(sys.stdin.readline())['cell']['key']\n"
        "print(json.dumps({'key': key, 'end': 'finished'}), flush=True)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: start([sys.executable, "-c", program], **how))
    found: dict[str, str] = {}

    def keep(spec: CellSpec, result: CellResult) -> None:
        found[spec.key] = result.end
        time.sleep(0.3)  # until it is gone

    runner.run([cell("one"), cell("two")], parallel=1, on_result=keep)
    assert found == {"one": "finished", "two": "finished"}


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "pid"

    def run_rank(spec: CellSpec, place: Place, store: object) -> str:
        process = subprocess.Popen(["sleep", "600"])
        started.write_text(str(process.pid))
        return "finished"

    monkeypatch.setattr(forker, "run_rank", run_rank)
    ranks = forker._Ranks(cell("any"), Shape(ranks=1), tmp_path, None)
    ranks.start()
    assert not ranks.wait(time.monotonic() + 60)
    assert ranks.codes == {0: 0}
    wait_for(lambda: processes.started(int(started.read_text())) is None, "it ends")


def test_accounts_that_cannot_be_read_are_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*_: object) -> None:
        raise ValueError("not an account")

    monkeypatch.setattr(forker, "run_rank", lambda *_: "finished")
    monkeypatch.setattr(forker, "gather", gather)
    monkeypatch.setattr("gc.freeze", lambda: None)
    result = forker.Forker(tmp_path, None).run(cell("any", ranks=1), 60.0, None)
    assert (result.key, result.end) == ("any", "crash")
    assert "not an account" in result.error
    assert not list(tmp_path.iterdir())


# Pieces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["finished", "finished"], "finished"),
        (["lost", "not_landed"], "not_landed"),
        (["guard_failure", "crash"], "crash"),
        (["guard_failure", "lost"], "guard_failure"),
        (["detected", "guard_failure"], "detected"),
        (["lost", "lost"], "crash"),
        (["crash", "detected"], "crash"),  # the first
    ],
)
def test_the_first_with_a_cause_of_its_own_says_how_it_ended(ends: list[str], expected: str, tmp_path: Path) -> None:
    for rank, end in enumerate(ends):
        record = {"kind": "end", "time": float(rank), "end": end, "error": "" if end == "finished" else end}
        account_path(tmp_path, rank).write_text(json.dumps(record) + "\n")
    result = gather(cell("any"), Shape(ranks=2), tmp_path, {0: 0, 1: 0}, False, 1.0)
    assert result.end == expected


def test_a_torn_line_of_an_account_is_left_out(tmp_path: Path) -> None:
    step = {"kind": "step", "time": 0.0, "step": 0, "loss": "nan", "norm": 1.0, "digest": "a", "updated": True}
    account_path(tmp_path, 0).write_text(json.dumps(step) + "\n" + json.dumps(step)[:20])
    result = gather(cell("any"), Shape(ranks=1), tmp_path, {0: -9}, True, 1.0)
    assert (result.end, result.losses, result.digests, result.updates) == ("hang", ("nan",), (("a",),), 1)


@pytest.mark.parametrize("what", [None, b"", b"PK\x03\x04 torn", b"\x80\x04."])
def test_without_readable_clean_weights_there_is_no_drift(tmp_path: Path, what: bytes | None) -> None:
    file = tmp_path / "clean.pt"
    if what is not None:
        file.write_bytes(what)
    account = Mock()
    _compare_or_keep(cell("any"), torch.nn.Linear(2, 2), file, account)
    account.add.assert_not_called()


@pytest.mark.parametrize("name", ["nothing", "nowhere:job", "bitwitness.examples.jobs:nothing", ":", "digits:"])
def test_a_job_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigurationError, match="job"):
        find_factory(name)


@pytest.mark.parametrize("options", [{"ranks": 0}, {"steps": True}, {"rebuild": 1}, {"checkpoint_every": -1}])
def test_an_impossible_shape_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Shape.split(options)
