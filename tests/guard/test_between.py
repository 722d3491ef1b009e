"""What runs between two steps: never a bit of the job, never its end, and never a wait for the file system."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bitwitness.errors import RunFilesError
from bitwitness.guard import between
from bitwitness.guard.between import Between
from bitwitness.runfiles import Journal, RunFiles
from bitwitness.runfiles.ripple import LOOK_SECONDS, Request, RippleFiles
from bitwitness.scan.asking import Following
from bitwitness.scan.items import SUITE_VERSION
from bitwitness.topology import Placement, Topology
from tests.guard import models
from tests.guard.harness import Launch, Rank, Scenario, Seen, launch
from tests.guard.training import Plan, run

pytestmark = pytest.mark.timeout(300)

REQUEST = Request(
    id="20261130T101010Z-0a1b2c",
    from_step=1,
    every=1,
    until=time.time() + 3600,
    slice_ms=12.0,  # long enough on a busy machine
    budget=0.5,
    suites=("ops",),
    seed=7,
    suite_version=SUITE_VERSION,
)

# A whole job ------------------------------------------------------------------------------------------------------------

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
PLAIN = Plan(steps=60 if EXHAUSTIVE else 10, every_state=False)
SCALED = {"init_scale": 2.0**16, "growth_interval": 4}
FIRST, BAD = "dropout, accumulated, fp16, scaler", "bf16 around the loop, a bad device"
PLANS = {
    FIRST: replace(PLAIN, accumulate=2, loss=models.fp16_loss, scaler=SCALED),
    BAD: replace(PLAIN, autocast_outside=True, drive="phases"),
}
if EXHAUSTIVE:
    PLANS |= {
        "randomness": replace(PLAIN, loss=models.random_loss, own_generators=True),
        "batch norm": replace(PLAIN, model=models.BatchNorm, accumulate=3),
        "transformer": replace(PLAIN, model=models.Transformer),
    }


@dataclass(frozen=True)
class Asked:
    """A plan, and what its ranks are asked for; `raises` is a rank in which a slice fails."""

    plan: Plan
    request: Request = REQUEST
    raises: int | None = None


def asked(place: Rank, given: Asked) -> Seen:
    """Train with a request in force from the beginning."""
    if place.rank == 0:
        place.run_dir.mkdir()
        RippleFiles(place.run_dir).write(given.request)
    dist.barrier()
    from bitwitness.scan import work

    digest = work.digest
    if given.raises == place.rank:

        def broken(outputs: Any) -> str:
            raise OSError("no such device any more")

        work.digest = broken
    try:
        return run(place, given.plan)
    finally:
        work.digest = digest


def unasked(place: Rank, plan: Plan) -> Seen:
    """Train, and say whether anything was loaded that only slices need."""
    seen = run(place, plan)
    return {**seen, "loaded": "bitwitness.scan.ripple" in sys.modules}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Those that nobody asks come first, while nothing is loaded yet."""
    drilled = replace(REQUEST, drills=("rank=2 p=1",))
    scenarios = [Scenario(f"guarded {name}", unasked, plan) for name, plan in PLANS.items()]
    for name, plan in PLANS.items():
        scenarios.append(Scenario(name, asked, Asked(plan, drilled if name == BAD else REQUEST)))
    scenarios.append(Scenario("raises", asked, Asked(PLANS[FIRST], raises=1)))
    return launch(scenarios, 3, tmp_path_factory.mktemp("ranks"))


def judged(done: Launch, name: str) -> Following:
    following = Following(done.folder(name) / "run", REQUEST)
    following.look()
    return following


@pytest.mark.parametrize("name", [*PLANS, "raises"])
def test_not_a_bit_of_the_job_changes(done: Launch, name: str) -> None:
    """Parameters, buffers, optimizer state, loss scale; every loss on the way; and what every generator draws next."""
    reference = name if name in PLANS else FIRST
    for own, without in zip(done.seen(name), done.seen(f"guarded {reference}"), strict=True):
        assert own["error"] is None
        assert all(own[what] == without[what] for what in ("losses", "draws", "final", "updated"))
    assert len(set(done.seen(name)[0]["losses"])) > PLAIN.steps // 2


@pytest.mark.parametrize("name", PLANS)
def test_slices_were_taken_meanwhile(done: Launch, name: str) -> None:
    sheets = judged(done, name).sheets
    assert [sheet.ended for sheet in sheets] == ["done"] * 3
    assert all(len(sheet.answers) >= 3 for sheet in sheets)
    assert not [seen["logged"] for seen in done.seen(name) if any("slice" in line for line in seen["logged"])]
    for rank in range(3):
        states = [one["state"] for one in ripple_events(done, name, rank)]
        assert states == ["begun", "ended"]


def test_who_is_healthy_passes(done: Launch) -> None:
    judgement = judged(done, FIRST).look()
    assert [one.standing for one in judgement.devices] == ["pass"] * 3
    assert [one.node for one in judgement.devices] == ["n0", "n1", "n2"]
    assert [one.device for one in judgement.devices] == ["n0/cpu-0", "n1/cpu-0", "n2/cpu-0"]


def test_a_bad_device_is_found(done: Launch) -> None:
    """How many slices there were depends on how busy the machine is; eight wrong ones of three devices are no chance."""
    *healthy, bad = judged(done, BAD).look().devices
    events = sum(finding.events for finding in bad.findings)
    assert events >= 3
    assert bad.wrong == sum(finding.calls for finding in bad.findings)
    assert bad.standing == ("fail" if events >= 8 else "not judged")
    assert "fail" not in [one.standing for one in healthy]


def test_a_rank_whose_slice_fails_trains_on_and_is_not_judged(done: Launch) -> None:
    logged = [[line for line in seen["logged"] if "slice" in line] for seen in done.seen("raises")]
    assert [len(lines) for lines in logged] == [0, 1, 0]
    assert "training goes on: OSError: no such device any more" in logged[1][0]
    events = ripple_events(done, "raises", 1)
    assert [one["state"] for one in events] == ["begun", "ended", "failed"]
    assert events[-1]["why"] == "OSError: no such device any more"
    following = judged(done, "raises")
    assert following.sheets[1].ended == events[-1]["why"]
    assert following.look().devices[1].standing == "not judged"
    assert all(sheet.answers for sheet in (following.sheets[0], following.sheets[2]))


def test_a_job_that_nobody_asks_pays_for_nothing(done: Launch) -> None:
    for name in PLANS:
        assert [seen["loaded"] for seen in done.seen(f"guarded {name}")] == [False] * 3


def ripple_events(done: Launch, name: str, rank: int) -> list[dict[str, Any]]:
    journal = RunFiles(done.folder(name) / "run").read_journal(rank)
    return [one for one in journal if one["kind"] == "ripple"]


# The parts ------------------------------------------------------------------------------------------------------------


@dataclass
class Computes:
    """Stands for what computes, and for the clock of the job."""

    now: float = 0.0
    error: Exception | None = None
    begun: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def begin(self, job: object, files: RippleFiles, request: Request) -> Computes:
        self.begun.append(request.id)
        return self

    def load(self, request: Request, device: object) -> None:
        """Nothing takes long here."""

    def step_ended(self, step: int) -> bool:
        if self.error is not None:
            raise self.error
        if step >= 0:
            self.steps.append(step)
        return True

    def close(self, why: str) -> None:
        self.closed.append(why)

    def event(self, kind: str, record: Mapping[str, Any]) -> None:
        assert kind == "ripple"
        self.events.append(record)

    def between(self, run_dir: Path) -> Between:
        return Between(SimpleNamespace(device=None), run_dir, self.event, lambda: self.now)  # type: ignore[arg-type]

    def look(self, one: Between) -> None:
        """Let the time pass after which one looks again, and the look come to its end; in this step or the next it is heeded."""
        self.now += LOOK_SECONDS
        one.step_ended(-1)
        if one._looking is not None:
            one._looking.join()


@pytest.fixture
def computes(monkeypatch: pytest.MonkeyPatch) -> Computes:
    made = Computes()
    module = ModuleType("a_stand_in_for_slices")
    module.load, module.begin = made.load, made.begin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(between, "_COMPUTES", module.__name__)
    return made


def test_a_request_is_found_while_the_job_runs(tmp_path: Path, computes: Computes) -> None:
    one = computes.between(tmp_path)
    RippleFiles(tmp_path).write(REQUEST)
    one.step_ended(3)
    assert not computes.begun, "it looked again at once"
    computes.look(one)
    one.step_ended(5)
    one.step_ended(6)
    assert (computes.begun, computes.steps) == ([REQUEST.id], [5, 6])


def test_the_newest_request_wins_and_one_that_is_withdrawn_ends(tmp_path: Path, computes: Computes) -> None:
    files = RippleFiles(tmp_path)
    files.write(REQUEST)
    one = computes.between(tmp_path)
    one.step_ended(0)
    other = replace(REQUEST, id="another")
    files.write(other)
    computes.look(one)
    one.step_ended(2)
    assert (computes.begun, computes.closed) == ([REQUEST.id, "another"], ["done"])
    files.write(other.withdrawn())
    computes.look(one)
    one.step_ended(4)
    one.step_ended(5)
    assert (computes.begun, computes.closed) == ([REQUEST.id, "another"], ["done", "done"])
    assert computes.steps == [0, 2]
    assert [record["state"] for record in computes.events] == ["begun", "ended"] * 2


def test_one_that_has_ended_is_not_begun(tmp_path: Path, computes: Computes) -> None:
    RippleFiles(tmp_path).write(replace(REQUEST, until=time.time() - 1))
    computes.between(tmp_path).step_ended(0)
    assert not computes.begun


def test_the_end_of_the_job_ends_it(tmp_path: Path, computes: Computes) -> None:
    RippleFiles(tmp_path).write(REQUEST)
    one = computes.between(tmp_path)
    one.step_ended(0)
    one.close()
    one.close()
    assert computes.closed == ["done"]


def test_a_failure_ends_the_slices_of_this_request_only(
    tmp_path: Path, computes: Computes, caplog: pytest.LogCaptureFixture
) -> None:
    files = RippleFiles(tmp_path)
    files.write(REQUEST)
    one = computes.between(tmp_path)
    computes.error = RuntimeError("out of luck")
    for step in range(3):
        one.step_ended(step)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert computes.closed == ["RuntimeError: out of luck"]
    assert computes.events[-1] == {
        "request": REQUEST.id,
        "state": "failed",
        "step": 0,
        "why": "RuntimeError: out of luck",
    }
    computes.error = None
    files.write(replace(REQUEST, id="another"))
    computes.look(one)
    one.step_ended(4)
    assert (computes.begun, computes.steps) == ([REQUEST.id, "another"], [4])


@pytest.mark.parametrize(
    "content", ["{", '{"schema": 1}', '{"schema": 1, "id": "../..", "from_step": 0, "every": 0}', "[]"]
)
def test_a_request_that_is_none_is_told_once(
    tmp_path: Path, computes: Computes, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    files = RippleFiles(tmp_path)
    files.path.mkdir()
    files.request.write_text(content)
    one = computes.between(tmp_path)
    one.step_ended(0)
    computes.look(one)
    one.step_ended(2)
    assert len(caplog.records) == 1
    assert not computes.begun


def test_a_file_system_that_hangs_holds_up_nothing(
    tmp_path: Path, computes: Computes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = computes.between(tmp_path)
    answers, looks = threading.Event(), []

    def hangs(self: RippleFiles) -> None:
        looks.append(1)
        answers.wait(60)

    monkeypatch.setattr(RippleFiles, "stamp", hangs)
    for step in range(20):
        computes.now += LOOK_SECONDS
        one.step_ended(step)
    assert one._looking is not None
    assert one._looking.is_alive()
    assert len(looks) <= 1, "looks pile up behind the first one"
    answers.set()
    one._looking.join()


def test_a_file_system_that_fails_is_told_once(
    tmp_path: Path, computes: Computes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = computes.between(tmp_path)

    def fails(self: RippleFiles) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(RippleFiles, "stamp", fails)
    for _ in range(3):
        computes.look(one)
    one.step_ended(9)
    assert len(caplog.records) == 1
    assert computes.events == [{"request": "", "state": "unreadable", "step": -1, "why": "stale file handle"}]


@dataclass
class Flaky:
    """A request that cannot be read while `fails` is true."""

    fails: bool = True

    def __post_init__(self) -> None:
        self._read = RippleFiles.read

    def read(self, files: RippleFiles) -> Request | None:
        if self.fails:
            raise RunFilesError("request.json cannot be read: stale file handle")
        return self._read(files)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    made = Flaky()

    def read(files: RippleFiles) -> Request | None:
        return made.read(files)

    monkeypatch.setattr(RippleFiles, "read", read)
    return made


def test_a_request_that_could_not_be_read_is_read_again(tmp_path: Path, computes: Computes, flaky: Flaky) -> None:
    RippleFiles(tmp_path).write(REQUEST)
    one = computes.between(tmp_path)
    one.step_ended(0)
    assert not computes.begun
    flaky.fails = False
    computes.look(one)
    one.step_ended(2)
    assert (computes.begun, computes.steps) == ([REQUEST.id], [2])


def test_while_the_request_cannot_be_read_there_are_no_slices(tmp_path: Path, computes: Computes, flaky: Flaky) -> None:
    """It may have been withdrawn. Where it was not, they go on; and the same error a second time is heeded like the first one."""
    files, flaky.fails = RippleFiles(tmp_path), False
    files.write(REQUEST)
    one = computes.between(tmp_path)
    one.step_ended(0)
    for step, ends in ((10, REQUEST), (20, REQUEST.withdrawn())):
        files.write(ends)
        flaky.fails = True
        computes.look(one)
        one.step_ended(step)
        assert computes.steps[-1] < step
        flaky.fails = False
        computes.look(one)
        one.step_ended(step + 1)
    assert (computes.begun, computes.steps, computes.closed) == ([REQUEST.id], [0, 11], ["done"])


def test_slices_that_failed_are_not_begun_again_by_the_same_request(
    tmp_path: Path, computes: Computes, flaky: Flaky
) -> None:
    files, flaky.fails = RippleFiles(tmp_path), False
    files.write(REQUEST)
    one = computes.between(tmp_path)
    computes.error = RuntimeError("out of luck")
    one.step_ended(0)
    computes.error = None
    files.write(replace(REQUEST, from_step=2))
    computes.look(one)
    one.step_ended(3)
    assert (computes.begun, computes.steps) == ([REQUEST.id], [])


def test_a_full_disk_ends_the_slices_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written at all any more: no answers, no end, and no event."""
    from bitwitness.scan import ripple  # not above: the ranks of a job that nobody asks read this module, too

    RippleFiles(tmp_path).write(replace(REQUEST, from_step=0))
    job: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), start_id="s")
    job.topology = Topology((Placement(0, "n0", "n0/cpu-0", 0),))
    events: list[str] = []

    def event(kind: str, record: Mapping[str, Any]) -> None:
        events.append(record["state"])
        if full:
            raise RunFilesError("no space left on device")

    def append(journal: Any, kind: str, record: Any) -> None:
        raise RunFilesError("no space left on device")

    full = False
    one = Between(job, tmp_path, event)
    one.step_ended(0)
    full = True
    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr(ripple, "_LEAST_BETWEEN_WRITES", 0.0)
    until = time.monotonic() + 50
    step = 0
    while not caplog.records and time.monotonic() < until:
        step += 1
        one.step_ended(step)
        time.sleep(0.001)
    for later in range(step + 1, step + 10):
        one.step_ended(later)
    one.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "there will be no more of them; training goes on: RunFilesError: no space left" in caplog.text
    assert events == ["begun", "failed"]
