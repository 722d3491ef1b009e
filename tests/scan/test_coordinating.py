"""The coordinator: who never appears, dies or hangs delays nobody for long, is named with what it was at, and is not judged."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from bitwitness.errors import ConfigurationError, StorageBusy
from bitwitness.runfiles.answers import AnswerFiles, Device
from bitwitness.runfiles.files import read_json
from bitwitness.scan import coordinating
from bitwitness.scan.concluding import Conclusion, conclude, refuse_used
from bitwitness.scan.coordinating import Coordinator, Patience, State
from bitwitness.scan.drill import Drill
from bitwitness.scan.following import Follower
from bitwitness.scan.launching import Launched, Share, place_of_heartbeat, report_loss
from bitwitness.scan.settings import Settings

ITEM, OTHER = "ops/add/float32/8", "ops/mul/float32/8"
RIGHT, WRONG = "a" * 32, "b" * 32
IMPATIENT = Patience(appear=0.2, silence=0.0, grace=0.3, stop=0.2)


class Processes:
    """Stands for the ranks of this machine."""

    def __init__(self, count: int, lost: Mapping[int, str] | None = None) -> None:
        self.share, self.codes, self.lost = Share(0, count), dict[int, int](), dict(lost or {})
        self.running, self.killed, self.asked = True, False, False

    def look(self) -> bool:
        return self.running

    def why(self, rank: int) -> str:
        return self.lost.get(rank, "")

    def terminate(self) -> None:
        self.asked = True

    def kill(self) -> None:
        self.killed = True


class Desk:
    """The files of a scan that ranks have written to, and its coordinator."""

    def __init__(self, path: Path, world: int = 4, **settings: Any) -> None:
        self.files = AnswerFiles(path)
        self.files.create()
        given = {"seconds": 0.1, "suites": ("ops",), "played": True}
        self.settings = Settings(id="s", world=world, **{**given, **settings})
        self.states: list[State] = []

    def rank(self, number: int, *answers: tuple[str, str, int], end: str = "done", kind: str = "m") -> None:
        journal = self.files.introduce(Device(number, f"node-{number}", f"gpu-{number}", {"model": kind}))
        journal.append("begin", {"items": 1})
        for item, digest, count in answers:
            journal.append("answer", {"item": item, "digest": digest, "count": count, "batches": count})
        if end:
            journal.append("end", {"why": end})
        journal.close()

    def watch(self, processes: Processes, asked: int = 0) -> Conclusion:
        coordinator = Coordinator(
            self.files, self.settings, cast("Launched", processes), None, self.states.append, IMPATIENT, asked
        )
        done = coordinator.watch()
        assert processes.killed
        return done

    @property
    def messages(self) -> str:
        return "\n".join(message for state in self.states for message in state.messages)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinating, "_LOOK", 0.02)
    monkeypatch.setattr(coordinating, "_TICK", 0.01)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def _standings(done: Conclusion) -> list[str]:
    return [one.standing for one in done.judgement.devices]


def test_all_pass(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500))
    done = desk.watch(Processes(4))
    assert _standings(done) == ["pass"] * 4
    assert desk.states[-1].ended == 4
    assert done.coverage == {"ops": {"items": 1, "calls": 2000}}


def test_who_never_appears_is_not_judged(desk: Desk) -> None:
    for number in range(3):
        desk.rank(number, (ITEM, RIGHT, 500))
    done = desk.watch(Processes(4))
    assert _standings(done) == ["pass"] * 3 + ["not judged"]
    assert "never appeared" in done.judgement.devices[3].reason
    assert done.judgement.standing == "not judged"


def test_who_dies_is_not_judged_and_named_with_its_item(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500), end="" if number == 1 else "done")
    place_of_heartbeat(desk.files, 1).write_text(f"{OTHER}\n")
    done = desk.watch(Processes(4, {1: "it was killed by SIGKILL"}))
    assert _standings(done) == ["pass", "not judged", "pass", "pass"]
    assert f"killed by SIGKILL (it was at {OTHER})" in done.judgement.devices[1].reason
    assert "rank 1 is lost" in desk.messages


def test_who_hangs_is_said_and_given_up(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500), end="" if number == 2 else "done")
    done = desk.watch(Processes(4))
    assert _standings(done) == ["pass", "pass", "not judged", "pass"]
    assert "it hangs" in done.judgement.devices[2].reason
    assert "rank 2 on node-2 has said nothing" in desk.messages


def test_who_started_a_rank_elsewhere_says_that_it_died(desk: Desk) -> None:
    for number in range(3):
        desk.rank(number, (ITEM, RIGHT, 500), end="" if number == 2 else "done")
    place_of_heartbeat(desk.files, 2).write_text(f"{OTHER}\n")
    report_loss(desk.files, 2, "it was killed by SIGKILL")
    report_loss(desk.files, 3, "it was killed by SIGSEGV")
    patient = Patience(appear=3600.0, grace=3600.0)
    processes = cast("Launched", Processes(1))
    done = Coordinator(desk.files, desk.settings, processes, None, desk.states.append, patient).watch()
    assert _standings(done)[2:] == ["not judged"] * 2
    assert f"killed by SIGKILL (it was at {OTHER})" in done.judgement.devices[2].reason
    assert "never appeared: it was killed by SIGSEGV" in done.judgement.devices[3].reason
    assert "hangs" not in str(done.judgement)
    assert "rank 3 is lost" in desk.messages


def test_a_disk_that_is_full_does_not_lose_what_is_known(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500), *([(ITEM, WRONG, 20)] if number == 3 else []))

    def full(path: Path, record: Mapping[str, Any]) -> None:
        raise StorageBusy(f"{path}: no space left")

    monkeypatch.setattr(coordinating, "write_json", full)
    assert _standings(desk.watch(Processes(4))) == ["pass"] * 3 + ["fail"]
    assert "no space left" in desk.messages


def test_wrong_answers_are_repeated_by_kind_and_fail(desk: Desk) -> None:
    for number in range(4):
        wrong = [(ITEM, WRONG, 20)] if number == 3 else []
        desk.rank(number, (ITEM, RIGHT, 500), *wrong)
    done = desk.watch(Processes(4))
    assert _standings(done) == ["pass"] * 3 + ["fail"]
    assert read_json(desk.files.focus)["kinds"] == {"model m": {ITEM: RIGHT}}
    assert "rank 3 on node-3 gives wrong answers" in desk.messages


def test_two_kinds_are_not_compared(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, WRONG if number == 3 else RIGHT, 500), kind="other" if number == 3 else "m")
    assert _standings(desk.watch(Processes(4))) == ["pass"] * 3 + ["not judged"]


def test_work_that_does_not_repeat_accuses_nobody(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, *((ITEM, f"{number}{call:031d}", 1) for call in range(50)))
    assert _standings(desk.watch(Processes(4))) == ["not judged"] * 4


def test_an_error_on_one_device_alone_is_no_pass(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500))
    with desk.files.answers(0).open("a") as file:
        file.write('{"schema": 1, "kind": "skip", "item": "ops/mul/float32/8", "what": "error", "why": "broken"}\n')
    done = desk.watch(Processes(4))
    assert _standings(done) == ["not judged", "pass", "pass", "pass"]
    assert "ops/mul/float32/8" in done.judgement.devices[0].reason


def test_a_damaged_introduction_is_no_reason_to_lose_the_others(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500))
    (desk.files.path / "ranks" / "rank-00002.json").write_text("{")
    assert _standings(desk.watch(Processes(4))) == ["pass", "pass", "not judged", "pass"]


def test_interrupted_it_judges_what_there_is(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, RIGHT, 500))
    processes = Processes(4)
    done = desk.watch(processes, asked=signal.SIGTERM)
    assert (done.interrupted, processes.asked) == (True, True)
    assert _standings(done) == ["pass"] * 4
    assert (desk.files.path / "stop.json").is_file()


def test_a_drill_is_found_only_where_just_that_was_found(desk: Desk) -> None:
    for number in range(4):
        desk.rank(number, (ITEM, WRONG if number == 3 else RIGHT, 50))
    done = desk.watch(Processes(4))
    for drills, outcome in (((Drill(1.0, rank=3),), "found"), ((Drill(1.0, rank=2),), "missed"), ((), None)):
        assert done.drill_outcome(Settings(id="s", world=4, seconds=1.0, drills=drills)) == outcome


def test_each_line_is_read_once_and_a_torn_one_later(desk: Desk) -> None:
    desk.rank(0, (ITEM, RIGHT, 2), end="")
    follower = Follower(desk.files)
    line = '{"schema": 1, "kind": "answer", "item": "ops/add/float32/8", "digest": "x", "count": 3}\n'
    assert follower.sheets()[0].answers == {ITEM: {RIGHT: 2}}
    for part, expected in ((line[:30], {RIGHT: 2}), (line[30:], {RIGHT: 2, "x": 3}), ("rubbish\n", {RIGHT: 2, "x": 3})):
        with desk.files.answers(0).open("a") as file:
            file.write(part)
        assert follower.sheets()[0].answers == {ITEM: expected}


def test_a_running_scan_can_be_looked_at(desk: Desk) -> None:
    desk.rank(0, (ITEM, RIGHT, 2), end="")
    done = conclude(desk.files, desk.settings, Follower(desk.files), running=True)
    assert _standings(done) == ["not judged"] * 4
    assert "not begun yet" in done.judgement.devices[1].reason


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    refuse_used(tmp_path)
    refuse_used(tmp_path / "new")
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigurationError, match="not empty"):
            refuse_used(path)
