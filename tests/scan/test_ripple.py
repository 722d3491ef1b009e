"""Slices beside a job: which work, how much of the job's time, what is written, and what the command makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitwitness import Guard, Policy
from bitwitness.cli import scan_ripple
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.guard import between
from bitwitness.runfiles import Journal, RunFiles, read_journal
from bitwitness.runfiles.answers import Device, Sheet
from bitwitness.runfiles.ripple import Request, RippleFiles
from bitwitness.scan import ripple, work
from bitwitness.scan.asking import Following, ask, pace, together, withdraw
from bitwitness.scan.drill import Drill
from bitwitness.scan.items import SUITE_VERSION, Item
from bitwitness.scan.ripple import Course, Slices, begin
from bitwitness.topology import Placement, Topology

CPU = torch.device("cpu")
REQUEST = Request("20261130T101010Z-0a1b2c", 10, 2, 1e11, 3.0, 0.01, ("ops",), 7, SUITE_VERSION)
SMALL, MIDDLE, LARGE = (Item("ops", "mul", "float32", (size,)) for size in (100, 1000, 10_000))
OTHER = Item("ops", "sqrt", "float32", (100,))

# The request ----------------------------------------------------------------------------------------------------------


def test_slices_are_a_function_of_the_step() -> None:
    assert [REQUEST.slice_after(step) for step in range(8, 16)] == [None, None, 0, None, 1, None, 2, None]


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = RippleFiles(tmp_path)
    assert files.read() is None
    files.write(replace(REQUEST, drills=("rank=1 p=0.5",)))
    assert files.read() == replace(REQUEST, drills=("rank=1 p=0.5",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "../up"),
        ("id", "request.json"),
        ("id", 7),
        ("from_step", -1),
        ("from_step", 10**30),
        ("from_step", 1.5),
        ("every", 0),
        ("every", True),
        ("until", float("nan")),
        ("until", float("inf")),
        ("until", 1e300),
        ("until", -1),
        ("slice_ms", 0),
        ("slice_ms", float("inf")),
        ("slice_ms", 1e9),
        ("slice_ms", "3"),
        ("budget", 1.0),
        ("budget", 0),
        ("budget", float("nan")),
        ("suites", "ops"),
        ("suites", []),
        ("suites", ["train"]),
        ("suites", [["ops"]]),
        ("seed", None),
        ("seed", "x"),
        ("suite_version", -1),
        ("drills", "rank=0 p=1"),
        ("drills", {"a": 1}),
    ],
)
def test_a_request_that_cannot_be_kept_to_is_refused(name: str, value: Any) -> None:
    with pytest.raises(RunFilesError, match="request for slices"):
        Request.from_json({**REQUEST.to_json(), name: value})


@pytest.mark.parametrize("record", [[], None, 3, "x", {}])
def test_what_is_no_request_is_refused(record: Any) -> None:
    with pytest.raises(RunFilesError, match="request for slices that is none"):
        Request.from_json(record)


# The course -----------------------------------------------------------------------------------------------------------


def test_the_course_is_a_function_of_seed_and_number() -> None:
    items = [SMALL, MIDDLE, LARGE, OTHER]
    first, second = Course(items, 1, 0.003), Course(items, 1, 0.003)
    for number in range(6):
        assert list(first.after(number)) == list(second.after(number))
        assert list(first.after(number))[1:] == list(first.after(number + 1))[:-1]
    assert {tuple(Course(items, seed, 0.003).after(0)) for seed in range(20)} != {tuple(items)}


def test_larger_items_are_tried_only_when_the_smaller_ones_leave_room() -> None:
    course = Course([SMALL, MIDDLE, LARGE], 1, 0.003)
    assert [course.expected(one) for one in (SMALL, MIDDLE, LARGE)] == [0.003, None, None]
    course.took(SMALL, 0.0001)
    assert course.expected(MIDDLE) == pytest.approx(0.001)
    course.took(MIDDLE, 0.002)
    assert course.expected(LARGE) == pytest.approx(0.02)
    course.took(LARGE, 0.02)
    assert course.expected(LARGE) == 0.003, "the first time does not tell: a kernel was loaded as well"
    course.took(LARGE, 0.01)
    assert course.expected(LARGE) is None


def test_what_cannot_be_computed_is_left_out_and_holds_up_nothing() -> None:
    course = Course([SMALL, MIDDLE], 1, 0.003)
    course.leave_out(SMALL)
    assert course.expected(SMALL) is None
    assert course.expected(MIDDLE) == 0.003


# The slices -----------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """A job with a clock that only moves when it is told to, and items that take as long as they are told to."""

    folder: Path
    request: Request = REQUEST
    now: float = 0.0
    takes: float = 0.001
    writes: float = 0.0
    computed: list[tuple[int, str]] = field(default_factory=list)
    step: int = 0

    def slices(self, monkeypatch: pytest.MonkeyPatch) -> Slices:
        def prepare(item: Item, device: torch.device) -> Any:
            self.now += self.takes
            self.computed.append((self.step, item.id))
            return lambda: [torch.zeros(1)]

        append = Journal.append

        def slow(journal: Any, kind: str, record: Any) -> None:
            self.now += self.writes
            append(journal, kind, record)

        monkeypatch.setattr(Journal, "append", slow)
        monkeypatch.setattr(work, "prepare", prepare)
        topology = Topology((Placement(0, "n0", "n0/cpu-0", 0),))
        job: Any = SimpleNamespace(rank=0, device=CPU, topology=topology, start_id="a/1")
        return Slices(job, RippleFiles(self.folder), self.request, lambda: self.now, lambda: self.now)

    def train(self, slices: Slices, steps: int, seconds: float) -> list[float]:
        """So many steps; after each, by how many seconds slices have exceeded the budget."""
        exceeded = []
        for _ in range(steps):
            self.now += seconds
            slices.step_ended(self.step)
            self.step += 1
            exceeded.append(slices.spent - self.request.budget * self.now)
        return exceeded

    def records(self) -> list[dict[str, Any]]:
        return list(read_journal(RippleFiles(self.folder).answers(self.request.id, "a/1").answers(0)))


@pytest.mark.parametrize(("takes", "writes"), [(0.001, 0.0), (0.0029, 0.0), (0.001, 0.0005), (0.001, 0.002)])
def test_the_budget_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, writes: float) -> None:
    """Writing included; how long that takes is known after the first time."""
    played = Played(tmp_path, takes=takes, writes=writes)
    exceeded = played.train(played.slices(monkeypatch), 600, 0.1)
    assert played.computed[-1][0] > 500
    assert max(exceeded if not writes else exceeded[300:]) <= 1e-9


def test_what_takes_longer_than_a_slice_is_tried_twice_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path, takes=0.004)
    exceeded = played.train(played.slices(monkeypatch), 600, 0.1)
    assert max(exceeded) <= 0.001 + 1e-9
    assert max(Counter(item for _, item in played.computed).values()) == 2


def test_a_slice_that_takes_long_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    slices = played.slices(monkeypatch)
    played.train(slices, 100, 0.1)
    played.takes, before = 0.5, len(played.computed)
    while len(played.computed) == before:
        played.train(slices, 1, 0.1)
    played.takes, before = 0.001, len(played.computed)
    assert max(played.train(slices, 400, 0.1)) > 0
    assert len(played.computed) == before, "it went on before the time was made up for"
    assert played.train(slices, 300, 0.1)[-1] <= 0
    assert len(played.computed) > before


def test_slices_are_where_they_were_asked_for_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path, replace(REQUEST, until=20.0))
    slices = played.slices(monkeypatch)
    played.train(slices, 300, 0.1)
    steps = {step for step, _ in played.computed}
    assert steps
    assert all(step >= 10 and step % 2 == 0 and step < 200 for step in steps)
    assert not slices.step_ended(played.step)
    slices.close("done")
    slices.close("done")
    assert [record["why"] for record in played.records() if record["kind"] == "end"] == ["done"]
    answers = [record for record in played.records() if record["kind"] == "answer"]
    assert sum(record["count"] for record in answers) == ripple.CALLS * len(played.computed)
    assert sum(record["batches"] for record in answers) == len(played.computed)
    spent = sum(record.get("seconds", 0.0) for record in played.records())
    assert spent == pytest.approx(slices.spent, abs=1e-3)


def test_different_answers_from_one_set_of_operands_are_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one event to whoever judges."""
    played = Played(tmp_path)
    slices = played.slices(monkeypatch)
    answers = iter(range(10**6))
    monkeypatch.setattr(work, "digest", lambda outputs: f"{next(answers):032x}")
    played.train(slices, 100, 0.1)
    slices.close("done")
    records = [record for record in played.records() if record["kind"] == "answer"]
    assert len(records) == len(played.computed)
    assert all((list(one["answers"].values()), one["batches"]) == ([1, 1], 1) for one in records)


def test_who_answers_is_told_as_the_job_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    played.train(played.slices(monkeypatch), 100, 0.1)
    files = RippleFiles(tmp_path).starts(REQUEST.id)
    device = files[0].device(0)
    assert (device.node, device.device, device.pid) == ("n0", "n0/cpu-0", os.getpid())
    assert f"threads {torch.get_num_threads()}" in device.kind_name


def test_what_somebody_got_wrong_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path)
    slices = played.slices(monkeypatch)
    played.train(slices, 100, 0.1)
    start = RippleFiles(tmp_path).starts(REQUEST.id)[0]
    wanted = next(iter(start.sheet(0).answers))
    kind = start.device(0).kind_name
    content = {"schema": 1, "kinds": {kind: {wanted: "ff"}, "another": {"ops/add/float32/8192": "00"}}}
    start.focus.write_text(json.dumps(content))
    played.train(slices, 100, 0.1)
    played.computed.clear()
    played.train(slices, 400, 0.1)
    first = [next(item for at, item in played.computed if at == step) for step in sorted(dict(played.computed))]
    assert first.count(wanted) >= len(first) // 3


def test_a_journal_that_cannot_be_written_is_an_error_of_the_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tmp_path)
    slices = played.slices(monkeypatch)
    played.train(slices, 30, 0.1)

    def full(journal: Any, kind: str, record: Any) -> None:
        raise RunFilesError("no space left")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(RunFilesError, match="no space left"):
        played.train(slices, 100, 0.1)


def test_a_job_that_changes_its_settings_is_compared_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone may do so, for an evaluation: its answers would differ from those of all others."""
    played = Played(tmp_path)
    slices = played.slices(monkeypatch)
    played.train(slices, 100, 0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(RuntimeError, match=f"changed its settings since slices began, .*threads {before + 1}"):
            played.train(slices, 100, 0.1)
    finally:
        torch.set_num_threads(before)


def test_another_version_of_the_suites_is_refused(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(rank=0, device=CPU, start_id="a")
    with pytest.raises(ConfigurationError, match="version 99"):
        begin(job, RippleFiles(tmp_path), replace(REQUEST, suite_version=99))


# The command ----------------------------------------------------------------------------------------------------------


def running(folder: Path, ranks: int = 3, seconds: float = 0.5, ago: float = 1.0) -> Path:
    """The directory of a job that is at step 99."""
    files = RunFiles(folder).create()
    place = [{"rank": rank, "node": f"n{rank}", "device": f"d{rank}", "slot": 0} for rank in range(ranks)]
    files.write_run({"world_size": ranks, "placement": place})
    then = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
    records: list[dict[str, Any]] = [
        {"kind": "start"},
        {"kind": "steps", "first": 90, "last": 99, "seconds": 10 * seconds},
    ]
    lines = [json.dumps({"schema": 1, "time": then, **record}) for record in records]
    (folder / "journal" / "rank-00000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_it_asks_for_as_much_as_the_budget_has(tmp_path: Path) -> None:
    request = ask(running(tmp_path), budget=0.002, slice_ms=3.0, minutes=10, ahead=20)
    assert request.every == 3, "3 ms every 1.5 s are 0.2 %"
    assert request.from_step == 99 + 40
    assert request.until == pytest.approx(time.time() + 620, abs=60)
    assert RippleFiles(tmp_path).read() == request


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": 0.0}, "--budget"),
        ({"budget": float("nan")}, "--budget"),
        ({"slice_ms": -1.0}, "--slice-ms"),
        ({"minutes": float("inf")}, "--minutes"),
        ({"drills": (Drill(1.0, rank=7),)}, "ranks of this scan are 0 to 2"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ask(running(tmp_path), **given)
    assert RippleFiles(tmp_path).read() is None


def test_a_job_that_does_not_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not the directory of a guarded job"):
        pace(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"nothing was heard of the job for .* \(step 99"):
        pace(running(tmp_path / "dead", ago=7200))
    folder = running(tmp_path / "new")
    (folder / "journal" / "rank-00000.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="has ended no step"):
        pace(folder)


def answered(rank: int, digest: str = "aa", device: str = "", count: int = 20, ended: str = "done") -> Sheet:
    kind = {"device": "a processor"}
    return Sheet(Device(rank, f"n{rank}", device or f"d{rank}", kind), {SMALL.id: {digest: count}}, ended)


def test_answers_are_the_device_s_over_all_starts() -> None:
    place = [{"rank": rank, "node": f"n{2 - rank}", "device": f"d{2 - rank}"} for rank in range(3)]
    before = [answered(rank) for rank in range(3)] + [answered(3, "bb")]
    now = [replace(answered(rank), device=replace(answered(2 - rank).device, rank=rank)) for rank in range(2)]
    found = together([before, now], place)
    assert [(one.device.rank, one.device.device) for one in found] == [(0, "d2"), (1, "d1"), (2, "d0"), (3, "d3")]
    assert [one.answers[SMALL.id] for one in found] == [{"aa": 40}, {"aa": 40}, {"aa": 20}, {"bb": 20}]


def test_sets_of_operands_are_added_up_over_starts() -> None:
    def one(digests: dict[str, int], operands: dict[tuple[str, ...], int]) -> Sheet:
        return replace(answered(0), answers={SMALL.id: digests}, operands={SMALL.id: operands})

    (found,) = together([[one({"aa": 4}, {("aa",): 2})], [one({"aa": 3, "bb": 1}, {("aa",): 1, ("aa", "bb"): 1})]], [])
    assert found.answers == {SMALL.id: {"aa": 7, "bb": 1}}
    assert (found.sets(SMALL.id), found.sets_with_other(SMALL.id, "aa")) == (4, 1)


def test_a_new_start_does_not_excuse_slices_that_failed() -> None:
    place = [{"rank": rank, "node": f"n{rank}", "device": f"d{rank}"} for rank in range(3)]
    before = [answered(rank, ended="OSError: no such device" if rank == 1 else "") for rank in range(3)]
    found = together([before, [answered(rank) for rank in range(3)]], place)
    assert [one.ended for one in found] == ["done", "OSError: no such device", "done"]


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4)])
def test_a_start_with_another_number_of_ranks_keeps_the_answers(worlds: tuple[int, int]) -> None:
    second = worlds[1]
    place = [{"rank": rank, "node": f"n{rank}", "device": f"d{rank}"} for rank in range(second)]
    found = together([[answered(rank) for rank in range(world)] for world in worlds], place)
    assert [one.device.rank for one in found] == [0, 1, 2, 3]
    assert [one.answers[SMALL.id]["aa"] for one in found] == [40, 40, 20, 20]


@pytest.mark.parametrize("placement", [[{"node": "n0", "device": "d0", "rank": "x"}], [{"rank": -1}], [{}], ["x"], 7])
def test_a_placement_that_is_none_is_told(placement: Any) -> None:
    with pytest.raises(RunFilesError, match=r"run\.json: .*placement"):
        together([[answered(0)]], placement)


def written(folder: Path, ended: dict[int, str], old: int | None = None) -> Following:
    """Three ranks with answers; who has an end in `ended`, and of whom nothing was heard for an hour."""
    start = RippleFiles(folder).answers(REQUEST.id, "s")
    start.create()
    for rank in range(3):
        journal = start.introduce(answered(rank).device)
        journal.append("answer", {"item": SMALL.id, "digest": "aa", "count": 300, "batches": 150, "seconds": 0.1})
        if rank in ended:
            journal.append("end", {"why": ended[rank]})
        journal.close()
        if rank == old:
            record = {**json.loads(journal.path.read_text()), "time": "2026-01-01T00:00:00.000Z"}
            journal.path.write_text(json.dumps(record) + "\n")
    return Following(folder, REQUEST)


def test_who_fell_silent_has_not_passed_at_the_end(tmp_path: Path) -> None:
    following = written(running(tmp_path), {0: "done", 1: "done"})
    assert [one.standing for one in following.look().devices] == ["pass"] * 3, "it may still write"
    last = following.conclude("its time is over").devices
    assert [one.standing for one in last] == ["pass", "pass", "not judged"]
    assert "stopped answering" in last[2].reason


def test_who_is_silent_while_others_go_on_has_not_passed(tmp_path: Path) -> None:
    found = written(running(tmp_path), {}, old=1).look().devices
    assert [one.standing for one in found] == ["pass", "not judged", "pass"]
    assert "has written nothing for" in found[1].reason


def test_of_a_job_that_is_gone_nothing_passes_that_did_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    following = written(running(tmp_path, ago=7200), {0: "done"})
    RippleFiles(tmp_path).write(REQUEST)
    assert not following.running
    scan_ripple.show_slices(tmp_path, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [one["standing"] for one in shown["devices"]] == ["pass", "not judged", "not judged"]
    assert shown["ended"] == "nothing is heard of the job any more"


def test_whoever_stops_slices_waits_for_ranks_to_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever, and not for a job that does not run."""
    following = written(running(tmp_path), {0: "done"})
    slept: list[float] = []

    def ends(seconds: float) -> None:
        slept.append(seconds)
        written(tmp_path, {0: "done", 1: "done", 2: "done"})

    monkeypatch.setattr(time, "sleep", ends)
    following.settle(60.0, 0.5)
    assert slept == [0.5]
    assert [one.standing for one in following.conclude("it was withdrawn").devices] == ["pass"] * 3
    following.settle(0.0, 0.5)
    assert slept == [0.5]


def test_a_device_that_took_no_slice_is_there_and_not_judged(tmp_path: Path) -> None:
    following = Following(running(tmp_path), REQUEST)
    start = RippleFiles(tmp_path).answers(REQUEST.id, "s")
    start.create()
    for rank in range(3):
        journal = start.introduce(answered(rank).device)
        if rank < 2:
            journal.append("answer", {"item": SMALL.id, "digest": "aa", "count": 30, "seconds": 0.1})
        journal.close()
    (start.path / "ranks" / "rank-00002.json").unlink()
    judgement = following.look()
    assert [one.standing for one in judgement.devices] == ["not judged"] * 3
    assert "it has taken no slice" in judgement.devices[2].reason


def command(folder: Path, **given: Any) -> int:
    return scan_ripple.ripple(folder, **{"poll": 0.01, "ahead": 0.0, **given})


def test_the_command_follows_and_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its looks are the job's: a first one finds nothing, a second one answers and the end."""
    running(tmp_path)
    looks = Following.look

    def look(self: Following, repeat: bool = True, running: bool = True) -> Any:
        request = RippleFiles(tmp_path).read()
        assert request is not None
        start = RippleFiles(tmp_path).answers(request.id, "s")
        if start.path.exists():
            RippleFiles(tmp_path).write(request.withdrawn())
        start.create()
        for rank in range(3):
            journal = start.introduce(answered(rank).device)
            digest = "bb" if rank == 1 else "aa"
            journal.append("answer", {"item": SMALL.id, "digest": digest, "count": 30, "batches": 15, "seconds": 0.1})
            journal.append("end", {"why": "done"})
            journal.close()
        return looks(self, repeat, running)

    monkeypatch.setattr(Following, "look", look)
    assert command(tmp_path, drills=(Drill(1.0, rank=1),), as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ended"] == "it was withdrawn"
    result = next((tmp_path / "ripple").glob("*/result.json"))
    written = json.loads(result.read_text())
    assert written["drill"] is True
    assert written["failed_nodes"] == ["n1"] == printed["failed_nodes"]
    focus = json.loads(next((tmp_path / "ripple").glob("*/s/focus.json")).read_text())
    assert list(focus["kinds"].values()) == [{SMALL.id: "aa"}]


def test_it_can_leave_and_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running(tmp_path)
    assert command(tmp_path, stop=True) == 0
    assert "No request is in force" in capsys.readouterr().err
    assert command(tmp_path, detach=True) == 0
    request = RippleFiles(tmp_path).read()
    assert request is not None
    assert request.until > time.time()
    scan_ripple.show_slices(tmp_path, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ended"], shown["standing"]) == ("", "not judged")
    assert command(tmp_path, stop=True) == 3, "nobody has answered yet"
    assert "it has taken no slice" in capsys.readouterr().out
    after = RippleFiles(tmp_path).read()
    assert after == request.withdrawn()
    assert withdraw(tmp_path) is None
    with pytest.raises(ConfigurationError, match="give one of them"):
        command(tmp_path, stop=True, detach=True)


def test_it_says_when_the_job_is_gone_or_somebody_else_asks(tmp_path: Path) -> None:
    request = ask(running(tmp_path))
    following = Following(tmp_path, request)
    assert following.over(patience=60) == ""
    assert following.over(patience=-1) == "nothing is heard of the job any more"
    other = ask(tmp_path)
    assert other.id != request.id
    assert following.over(patience=60) == "another request has taken its place"


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def test_a_killed_command_leaves_a_job_that_trains_on_and_slices_that_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(between, "LOOK_SECONDS", 0.05)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, squares, run_dir=tmp_path, policy=Policy(audit="off")) as guard:

        def train_until(what: str) -> None:
            until = time.monotonic() + 50
            while what not in [one["state"] for one in RunFiles(tmp_path).read_journal(0) if one["kind"] == "ripple"]:
                assert time.monotonic() < until, f"slices have not {what}"
                guard.forward_backward(torch.randn(2, 4))
                assert guard.step()
                time.sleep(0.01)

        for _ in range(3):
            guard.forward_backward(torch.randn(2, 4))
            guard.step()
        vars(guard)["_ledger"].steps()
        program = (
            "import pathlib, sys; from bitwitness.cli.scan_ripple import ripple; "
            "ripple(pathlib.Path(sys.argv[1]), budget=0.5, minutes=0.1, ahead=0.0)"
        )
        asking = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.DEVNULL)
        try:
            train_until("begun")
        finally:
            asking.send_signal(signal.SIGKILL)
            asking.wait()
        train_until("ended")
    files = RippleFiles(tmp_path)
    request = files.read()
    assert request is not None
    sheet = files.starts(request.id)[0].sheet(0)
    assert sheet.ended == "done"
    assert sheet.answers
    assert not files.result(request.id).exists()
