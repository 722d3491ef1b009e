"""A node's agent by itself: what it tells and when, across restarts and kills between any two steps."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ClusterError, RunFilesError
from bitwitness.fleet.agent import Memory, Said, Seen, Step, remembered, step
from bitwitness.fleet.agent_check import wrong_with_reports, wrong_with_signals
from bitwitness.fleet.agent_memory import MemoryFile, Noted
from bitwitness.fleet.agent_node import NodeReader, seen_of
from bitwitness.fleet.agent_rounds import Reporter, Work, report_work, run, signals_work
from bitwitness.fleet.agent_signals import tidy, write_signals
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.nvsentinel_events import HealthEvent, Quarantine, Strategy, Suspicion

NOW = datetime(2026, 11, 29, 9, 30, tzinfo=UTC)
STORE: Strategy = "STORE_ONLY"
EXECUTE: Strategy = "EXECUTE_REMEDIATION"
WHAT = Suspicion("i1", "replay differs", ("GPU-1",))
SUSPECT = Seen("u1", WHAT, asked="t1", execute=True)
CLEAN = Seen("u1")
OURS = Quarantine(("bitwitness",), "i1", cordoned=True)
TOLD = Said(False, "i1", ("GPU-1",), STORE, "t1", "u1", NOW)
LOST = Memory(lost=True)


def after(said: Said | None) -> Memory:
    return Memory(said)


# What is told, and when -----------------------------------------------------------------------------------------------


def test_a_node_that_nobody_suspects_is_told_to_nobody() -> None:
    assert step(CLEAN, LOST, EXECUTE, NOW) == Step()
    assert remembered(CLEAN, LOST, Step(), NOW) == Memory()


def test_a_fault_is_told_once_and_again_when_it_is_another() -> None:
    first = step(SUSPECT, Memory(), STORE, NOW)
    assert (first.tell, first.strategy) == ("fault", STORE)
    memory = remembered(SUSPECT, Memory(), first, NOW)
    assert step(SUSPECT, memory, STORE, NOW).tell == ""
    assert step(replace(SUSPECT, asked="t2"), memory, STORE, NOW).tell == ""  # who only stores has it already
    for other in (Suspicion("i2", "", ("GPU-1",)), Suspicion("i1", "", ("GPU-1", "GPU-2"))):
        assert step(replace(SUSPECT, suspicion=other), memory, STORE, NOW).tell == "fault"
    assert step(replace(SUSPECT, uid="u2"), memory, STORE, NOW).tell == "fault"


@pytest.mark.parametrize(
    ("execute", "allowed", "strategy"),
    [(True, EXECUTE, EXECUTE), (True, STORE, STORE), (False, EXECUTE, STORE), (False, STORE, STORE)],
)
def test_nvsentinel_acts_only_where_the_controller_and_the_agent_both_say_so(
    execute: bool, allowed: Strategy, strategy: Strategy
) -> None:
    done = step(replace(SUSPECT, execute=execute), Memory(), allowed, NOW)
    assert (done.tell, done.strategy) == ("fault", strategy)
    assert bool(done.trouble) == (execute and allowed == STORE)


def test_a_fault_that_was_stored_is_told_again_when_it_may_be_acted_upon_and_not_the_other_way() -> None:
    assert step(SUSPECT, after(TOLD), EXECUTE, NOW).strategy == EXECUTE
    assert step(SUSPECT, after(replace(TOLD, strategy=EXECUTE)), STORE, NOW).tell == ""


def test_what_the_controller_asks_for_anew_is_told_anew() -> None:
    acted = after(replace(TOLD, strategy=EXECUTE))
    assert step(SUSPECT, acted, EXECUTE, NOW).tell == ""
    assert step(replace(SUSPECT, asked="t2"), acted, EXECUTE, NOW).tell == "fault"


@pytest.mark.parametrize("strategy", [STORE, EXECUTE])
def test_a_recovery_is_told_once_the_way_the_fault_was(strategy: Strategy) -> None:
    memory = after(replace(TOLD, strategy=strategy))
    done = step(CLEAN, memory, EXECUTE, NOW)
    assert (done.tell, done.strategy) == ("recovery", strategy)
    memory = remembered(CLEAN, memory, done, NOW)
    assert step(CLEAN, memory, EXECUTE, NOW).tell == ""
    assert step(SUSPECT, memory, EXECUTE, NOW).tell == "fault"


def test_an_annotation_that_cannot_be_read_is_no_recovery() -> None:
    done = step(replace(CLEAN, unreadable="it is none"), after(TOLD), EXECUTE, NOW)
    assert (done.tell, "cannot be read" in done.trouble) == ("", True)


def test_a_node_object_that_is_another_one_was_cleared_by_nobody() -> None:
    done = step(replace(CLEAN, uid="u2"), after(TOLD), EXECUTE, NOW)
    assert (done.tell, done.forget) == ("", True)
    assert "nobody has cleared it" in done.trouble
    assert remembered(CLEAN, after(TOLD), done, NOW) == Memory()
    held = step(replace(CLEAN, uid="u2", quarantine=OURS), after(TOLD), EXECUTE, NOW)
    assert (held.tell, held.forget, bool(held.trouble)) == (
        "",
        False,
        True,
    )  # else it would be taken for a lost recovery


def test_an_agent_that_may_only_store_returns_no_node_that_nvsentinel_holds() -> None:
    acted = after(replace(TOLD, strategy=EXECUTE))
    done = step(replace(CLEAN, quarantine=OURS), acted, STORE, NOW)
    assert (done.tell, "--strategy EXECUTE_REMEDIATION" in done.trouble) == ("", True)
    assert remembered(CLEAN, acted, done, NOW) == acted
    assert step(CLEAN, acted, STORE, NOW) == Step("recovery", STORE)  # it holds it no more


def test_a_recovery_that_nvsentinel_has_lost_is_told_again_after_a_while() -> None:
    healthy = after(replace(TOLD, healthy=True, strategy=EXECUTE))
    held = replace(CLEAN, quarantine=OURS)
    assert step(held, healthy, EXECUTE, NOW + timedelta(minutes=4)).tell == ""
    assert step(held, healthy, EXECUTE, NOW + timedelta(minutes=5)) == Step("recovery", EXECUTE)
    assert step(held, healthy, EXECUTE, NOW - timedelta(days=1)) == Step("recovery", EXECUTE)  # the clock was set back


def test_without_memory_nvsentinel_itself_tells_what_it_was_told() -> None:
    assert step(replace(CLEAN, quarantine=OURS), LOST, EXECUTE, NOW) == Step("recovery", EXECUTE)
    adopted = step(replace(SUSPECT, quarantine=OURS), LOST, EXECUTE, NOW)
    assert (adopted.tell, adopted.adopt) == ("", True)
    assert remembered(SUSPECT, LOST, adopted, NOW).said == replace(TOLD, strategy=EXECUTE)
    other = replace(OURS, incident="i0")
    assert step(replace(SUSPECT, quarantine=other), LOST, EXECUTE, NOW).tell == "fault"
    foreign = Quarantine(("gpu-health-monitor",), cordoned=True)
    assert step(replace(CLEAN, quarantine=foreign), LOST, EXECUTE, NOW) == Step()


def test_a_node_that_a_person_has_uncordoned_is_not_asked_for_again() -> None:
    by_hand = replace(SUSPECT, quarantine=Quarantine(released_by_hand=True))
    for memory in (LOST, Memory(), after(replace(TOLD, strategy=EXECUTE, asked="t0"))):
        done = step(by_hand, memory, EXECUTE, NOW)
        assert (done.tell, "a person has uncordoned" in done.trouble) == ("", True)
    known = remembered(by_hand, LOST, step(by_hand, LOST, EXECUTE, NOW), NOW)
    assert known.said == replace(TOLD, strategy=EXECUTE)
    assert step(by_hand, known, EXECUTE, NOW).trouble
    again = replace(by_hand, suspicion=replace(WHAT, incident="i2"), was_released=True)
    assert step(again, known, EXECUTE, NOW).tell == "fault"
    earlier = replace(by_hand, was_released=True)  # the mark is of an earlier time, and this is a new incident
    assert step(earlier, Memory(), EXECUTE, NOW).tell == "fault"
    assert step(earlier, LOST, EXECUTE, NOW).tell == ""  # nobody can tell


def test_a_node_that_nvsentinel_leaves_alone_is_told_and_a_person_too() -> None:
    done = step(replace(SUSPECT, managed=False), Memory(), EXECUTE, NOW)
    assert (done.tell, "not managed" in done.trouble) == ("fault", True)


def test_no_history_tells_health_of_a_suspect_node_and_none_tells_twice() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(1000):
        memory = chance.choice([LOST, Memory()])
        for _ in range(8):
            held = chance.choice([Quarantine(), OURS, Quarantine(released_by_hand=True)])
            what = chance.choice([None, WHAT, replace(WHAT, incident="i2")])
            seen = Seen(
                chance.choice(["u1", "u1", "u2"]), what, chance.choice(["t1", "t2"]) if what else "", chance.random() < 0.5,
                chance.random() < 0.5, held, chance.choice(["", "", "", "bad"]), chance.random() < 0.9,
            )  # fmt: skip
            allowed = chance.choice([STORE, EXECUTE])
            done = step(seen, memory, allowed, NOW)
            text = f"seed {seed}: {seen} {memory} {allowed} {done}"
            assert done.tell != "recovery" or (what is None and not seen.unreadable), text
            assert done.tell != "fault" or what is not None, text
            assert done.strategy == STORE or (allowed == EXECUTE and (done.tell or done.adopt)), text
            assert not (done.tell == "fault" and done.strategy == EXECUTE and not seen.execute), text
            memory = remembered(seen, memory, done, NOW)
            again = step(seen, memory, allowed, NOW)
            assert not again.tell, f"told twice: {text}"


# What the Node shows --------------------------------------------------------------------------------------------------


def node(annotation: str | None = None, **more: Any) -> dict[str, Any]:
    annotations = {
        **({} if annotation is None else {"bitwitness.dev/suspect": annotation}),
        **more.pop("annotations", {}),
    }
    return {"metadata": {"name": "n1", "uid": "u1", "annotations": annotations, **more}}


def annotation(incident: str = "i1", *, execute: bool = False, **more: Any) -> str:
    what = {
        "incident": incident,
        "reason": "replay differs",
        "devices": ["GPU-1"],
        "time": "t1",
        "cordoned": not execute,
    }
    return json.dumps({**what, "execute": execute, **more})


def test_a_node_is_read() -> None:
    held = {"quarantineHealthEvent": '[{"agent":"bitwitness","metadata":{"incident":"i1"}}]'}
    seen = seen_of(node(annotation(execute=True, released=True), annotations=held))
    assert seen == Seen("u1", WHAT, "t1", True, True, Quarantine(("bitwitness",), "i1"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"incident": 1}'])
def test_an_annotation_that_is_not_ours_is_unreadable(text: str) -> None:
    assert seen_of(node(text)).unreadable
    assert seen_of(node(text)).suspicion is None


@pytest.mark.parametrize("label", ["nvsentinel.dgxc.nvidia.com/managed", "k8saas.nvidia.com/ManagedByNVSentinel"])
def test_labels_tell_whether_nvsentinel_may_act(label: str) -> None:
    assert not seen_of(node(labels={label: "false"})).managed
    assert seen_of(node(labels={label: "true"})).managed
    assert seen_of({"metadata": {"uid": "u1"}}) == Seen("u1")


class OneNode:
    """An API server with one answer."""

    host = "https://api"

    def __init__(self, answer: dict[str, Any] | None) -> None:
        self.answer = answer

    def find(self, path: str, query: object = None) -> dict[str, Any] | None:
        assert path == "/api/v1/nodes/n1"
        return self.answer


@pytest.mark.parametrize("answer", [None, {}, node(name="n2"), node(uid="")])
def test_what_is_not_this_node_is_an_error_and_no_health(answer: dict[str, Any] | None) -> None:
    with pytest.raises(ClusterError, match="n1"):
        NodeReader(OneNode(answer), "n1").look()


# Rounds ---------------------------------------------------------------------------------------------------------------


class Shown:
    """A Node as a test has it."""

    def __init__(self, seen: Seen = CLEAN) -> None:
        self.seen: Seen | Exception = seen

    def look(self) -> Seen:
        if isinstance(self.seen, Exception):
            raise self.seen
        return self.seen


class Heard:
    """NVSentinel as a test has it."""

    def __init__(self) -> None:
        self.events: list[HealthEvent] = []
        self.away: Exception | None = None

    def tell(self, *events: HealthEvent) -> None:
        if self.away:
            raise self.away
        self.events += events

    def check(self) -> None:
        if self.away:
            raise self.away

    @property
    def kinds(self) -> list[str]:
        return ["recovery" if one.healthy else "fault" for one in self.events]


def reporter(
    shown: Shown, heard: Any, file: Path | None, allowed: Strategy = EXECUTE, clock: Clock | None = None
) -> Reporter:
    return Reporter("n1", shown, heard, MemoryFile(file, "n1"), allowed=allowed, clock=clock)


def test_rounds_tell_transitions_only_also_across_restarts(tmp_path: Path) -> None:
    shown, heard, file = Shown(), Heard(), tmp_path / "memory"
    for seen in (CLEAN, CLEAN, SUSPECT, SUSPECT, CLEAN, CLEAN, SUSPECT):
        shown.seen = seen
        reporter(shown, heard, file).round()
    assert heard.kinds == ["fault", "recovery", "fault"]
    assert {one.node for one in heard.events} == {"n1"}


@pytest.mark.parametrize("away", ["api", "socket", "disk"])
def test_what_is_away_loses_nothing(away: str, tmp_path: Path) -> None:
    shown, heard, file = Shown(SUSPECT), Heard(), tmp_path / "memory"
    one = reporter(shown, heard, file)
    if away == "api":
        shown.seen = ClusterError("no API")
    elif away == "socket":
        heard.away = ClusterError("no socket")
    else:
        file.mkdir()
    for _ in range(3):
        with pytest.raises((ClusterError, RunFilesError)):
            one.round()
    assert heard.kinds == (["fault"] if away == "disk" else [])
    shown.seen, heard.away = SUSPECT, None
    if away == "disk":
        file.rmdir()
    assert one.round() == ""
    assert heard.kinds == ["fault"]
    reporter(shown, heard, file).round()
    assert heard.kinds == ["fault"]


class Killed(BaseException):
    """SIGKILL, as far as what is left behind goes."""


@pytest.mark.parametrize("at", range(1, 13))
def test_killed_between_any_two_steps_it_ends_the_same(at: int, tmp_path: Path) -> None:
    """The first `at - 1` instants pass, and at the next one the agent is gone; its successors tell the rest."""
    shown, heard, left = Shown(), Heard(), [at]

    def instant() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    class Reader:
        def look(self) -> Seen:
            instant()
            return shown.look()

    class Listener:
        def tell(self, *events: HealthEvent) -> None:
            instant()
            heard.tell(*events)
            instant()

        def check(self) -> None:
            instant()

    class File(MemoryFile):
        def save(self, noted: Noted) -> None:
            instant()
            super().save(noted)
            instant()

    for seen in (SUSPECT, CLEAN):
        shown.seen = seen
        done = 0
        while done < 2:  # two whole rounds, by however many agents
            try:
                one = Reporter("n1", Reader(), Listener(), File(tmp_path / "memory", "n1"), allowed=EXECUTE)
                while done < 2:
                    one.round()
                    done += 1
            except Killed:
                continue
    assert left[0] <= 0
    once = [kind for number, kind in enumerate(heard.kinds) if kind != ["", *heard.kinds][number]]
    assert once == ["fault", "recovery"]
    assert len(heard.kinds) <= 3


def test_a_memory_of_another_node_or_a_damaged_one_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "memory"
    MemoryFile(file, "n1").save(Noted(after(TOLD), NOW, ("trouble",)))
    assert MemoryFile(file, "n1").load() == Noted(after(TOLD), NOW, ("trouble",))
    assert MemoryFile(file, "n2").load() == Noted(LOST)
    assert "'n1'" in caplog.text
    for text in ("", "{}", '{"schema": 1, "node": "n1", "said": {}, "looked": null, "lost": false, "troubles": []}'):
        file.write_text(text)
        assert MemoryFile(file, "n1").load() == Noted(LOST)
    assert MemoryFile(None, "n1").load() == Noted(LOST)


def test_what_a_kill_has_left_half_written_is_removed(tmp_path: Path) -> None:
    for name in (".memory.1.ab.tmp", ".n1.json.1.ab.tmp", ".n2.json.1.ab.tmp", "n1.json"):
        (tmp_path / name).write_text("x")
    MemoryFile(tmp_path / "memory", "n1").tidy()
    tidy(tmp_path, "n1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".n2.json.1.ab.tmp", "n1.json"]


def test_a_look_is_noted_seldom_where_nothing_changes(tmp_path: Path) -> None:
    class Hand(Clock):
        time = NOW

        def now(self) -> datetime:
            return self.time

    clock, file = Hand(), tmp_path / "memory"
    one = reporter(Shown(), Heard(), file, clock=clock)
    one.round()
    for seconds, looked in ((10, 0), (29, 0), (30, 30), (40, 30)):
        clock.time = NOW + timedelta(seconds=seconds)
        one.round()
        assert MemoryFile(file, "n1").load().looked == NOW + timedelta(seconds=looked)


# Failing, and going on ------------------------------------------------------------------------------------------------


def test_pauses_grow_and_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    errors: list[Exception | str] = [*[ClusterError("away")] * 8, ValueError("a mistake of ours"), "", ""]

    def do() -> str:
        now = errors.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    work = Work("work", do, every=15.0, phase="n1")
    pauses = [(work.once(), work.pause())[1] for _ in range(11)]
    bases = [1, 2, 4, 8, 16, 32, 60, 60, 60, 15, 15]
    assert all(base * 0.8 <= pause <= base * 1.2 for base, pause in zip(bases, pauses, strict=True)), pauses
    assert len({round(pause, 3) for pause in pauses[6:9]}) == 3  # no two nodes or times are in step
    said = [record.message for record in caplog.records]
    assert said == [
        "work: away",
        "work: ValueError('a mistake of ours')",
        "work: this is over: ValueError('a mistake of ours')",
    ]


def test_work_goes_on_until_it_is_told_to_stop() -> None:
    import threading

    stop, done = threading.Event(), {"first": 0, "second": 0}

    def worker(name: str) -> Callable[[], str]:
        def do() -> str:
            done[name] += 1
            if all(count >= 3 for count in done.values()):
                stop.set()
            if name == "second" and done[name] == 1:
                raise OSError("at first")
            return ""

        return do

    quick = Work("first", worker("first"), every=0.001)
    run([quick, Work("second", worker("second"), every=0.001)], stop)
    assert min(done.values()) >= 3


# Signals --------------------------------------------------------------------------------------------------------------

LOG = "Nov 29 09:00:00 n1 kernel: NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.\n"


def test_signals_are_what_the_command_prints(tmp_path: Path) -> None:
    log = tmp_path / "messages"
    log.write_text(LOG + LOG.replace("n1 kernel", "n2 kernel"))
    path = write_signals(tmp_path, "n1", [log])
    script = Path(sysconfig.get_path("scripts")) / "bitwitness"
    command = [str(script), "fleet", "signals", "--from", str(log), "--node", "n1", "--details", "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert path.read_text() == printed
    assert [one["code"] for one in json.loads(printed)] == ["xid:63"]
    assert oct(path.stat().st_mode & 0o777) == "0o644"


def test_a_source_that_is_absent_is_said_and_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not signals_work(tmp_path, "n1", [tmp_path / "absent"], 60).once()
    assert "no such file" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_signals_that_cannot_be_written_leave_the_old_ones(tmp_path: Path) -> None:
    log = tmp_path / "messages"
    log.write_text(LOG)
    assert signals_work(tmp_path, "n1", [log], 60).once()
    old = (tmp_path / "n1.json").read_bytes()
    (tmp_path / "n1.json").unlink()
    (tmp_path / "n1.json").mkdir()
    assert not signals_work(tmp_path, "n1", [log], 60).once()
    assert [path.name for path in tmp_path.glob(".n1*")] == []
    assert old


# The probe ------------------------------------------------------------------------------------------------------------


def test_a_probe_finds_what_is_old_absent_or_from_the_future(tmp_path: Path) -> None:
    assert "never seen" in wrong_with_reports(Noted(LOST), 15, NOW)
    assert wrong_with_reports(Noted(Memory(), NOW), 15, NOW + timedelta(seconds=119)) == ""
    assert wrong_with_reports(Noted(Memory(), NOW, ("may only store",)), 15, NOW) == "may only store"
    assert "121 s ago" in wrong_with_reports(Noted(Memory(), NOW), 15, NOW + timedelta(seconds=121))
    assert wrong_with_reports(Noted(Memory(), NOW), 60, NOW + timedelta(seconds=239)) == ""
    assert "set back" in wrong_with_reports(Noted(Memory(), NOW), 15, NOW - timedelta(minutes=6))
    assert "No such file" in wrong_with_signals(tmp_path, "n1", 300, NOW)
    (tmp_path / "n1.json").write_text("[]")
    os.utime(tmp_path / "n1.json", (NOW.timestamp(), NOW.timestamp()))
    assert wrong_with_signals(tmp_path, "n1", 300, NOW + timedelta(seconds=899)) == ""
    assert "901 s ago" in wrong_with_signals(tmp_path, "n1", 300, NOW + timedelta(seconds=901))


def test_report_work_names_the_node() -> None:
    assert "n1" in report_work(reporter(Shown(), Heard(), None), "n1", 15).name
