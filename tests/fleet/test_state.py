"""The database of a controller: it is never replaced, never half-written, and has one owner."""

from __future__ import annotations

import logging
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError, RunFilesError, StorageBusy
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.owning import RUN_LOCK, STATE_LOCK, Lock
from bitwitness.fleet.state import NAME, State
from tests.fleet.incidents import NOW
from tests.fleet.rehearsal import HandClock, Rehearsal


def filled(folder: Path) -> Path:
    """A state with something in it."""
    with State(folder) as state, state.change():
        for number in range(200):
            state.note("test", f"line {number} " + "x" * 100)
    return folder / NAME


# Damage ---------------------------------------------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"garbage" * 100)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scratched(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8192:12288] = b"\xff" * 4096
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE songs (name TEXT)")


def newer(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("UPDATE about SET value = '99' WHERE name = 'schema'")


def older(path: Path) -> None:
    """As version 1 left it: other tables."""
    with sqlite3.connect(path) as other:
        other.execute("UPDATE about SET value = '1' WHERE name = 'schema'")
        other.execute("DROP TABLE clears")


def test_a_state_of_another_version_says_which_program_reads_it(tmp_path: Path) -> None:
    older(filled(tmp_path))
    with pytest.raises(RunFilesError, match="has schema 1, this version reads 2 and 3: use the version that wrote it"):
        State(tmp_path)


@pytest.mark.parametrize("damage", [older, garbage, cut, empty, scratched, foreign, newer])
def test_damage_is_an_error_and_nothing_is_overwritten(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = filled(tmp_path)
    damage(path)
    before = path.read_bytes()
    for write in (True, False):
        with pytest.raises(RunFilesError, match=NAME) as caught:
            State(tmp_path, create=write, write=write)
        assert caught.value.exit_code == 2
    assert path.read_bytes() == before


def test_a_state_that_is_gone_is_not_begun_anew_beside_what_is_left_of_it(tmp_path: Path) -> None:
    path = filled(tmp_path)
    path.with_name(f"{NAME}-wal").write_bytes(b"x")
    path.unlink()
    with pytest.raises(RunFilesError, match="is gone"):
        State(tmp_path)
    assert not path.exists()


def test_readers_make_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--state"):
        State(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFilesError, match="choose another --state"):
        State(tmp_path / "file" / "state")


# Changes --------------------------------------------------------------------------------------------------------------


def half(state: State) -> None:
    state.note("test", "half")
    state.write("DELETE FROM absent")


def test_a_change_is_whole_or_absent(tmp_path: Path) -> None:
    with State(tmp_path) as state:
        with pytest.raises(RunFilesError, match="no such table"), state.change():
            half(state)
        assert state.history() == []
        with pytest.raises(AssertionError):
            state.note("test", "alone")


@pytest.mark.parametrize("query", ["UPDATE audit SET text = 'other'", "DELETE FROM audit"])
def test_the_audit_trail_cannot_be_changed(tmp_path: Path, query: str) -> None:
    filled(tmp_path)
    with State(tmp_path) as state:
        with pytest.raises(RunFilesError, match="not changed"), state.change():
            state.write(query)
        assert len(state.history()) == 200


def test_the_audit_trail_can_be_asked(tmp_path: Path) -> None:
    with State(tmp_path) as state:
        with state.change():
            state.note("one", "a", node="n1", incident="i1")
            state.note("two", "b", node="n2", incident="i1", record={"calls": ["x"]})
            state.note("three", "c", node="n2")
        assert [one.what for one in state.history(node="n2")] == ["two", "three"]
        assert [one.what for one in state.history(incident="i1", last=1)] == ["two"]
        assert [one.what for one in state.news(2)] == ["three"]
        assert state.history()[1].to_json()["record"] == {"calls": ["x"]}


def test_what_is_said_once_is_said_again_after_it_was_over(tmp_path: Path) -> None:
    with State(tmp_path) as state, state.change():
        assert [state.say_once("a", "x"), state.say_once("a", "x"), state.say_once("a", "y")] == [True, False, True]
        assert state.unsay("a")
        assert not state.unsay("a")
        assert state.say_once("a", "y")


def test_a_full_disk_stops_every_act_loses_nothing_and_is_got_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play = Rehearsal(tmp_path)
    play.rounds()
    full = play.state.read("PRAGMA page_count")[0][0]
    play.state.read(f"PRAGMA max_page_count = {full}")
    for number in range(1, 60):
        play.incident(number, ranks=(number % 4,))
    for _ in range(3):
        with pytest.raises(RunFilesError, match="full"):
            play.controller.round()
    began = len(play.cluster.calls())
    intents = [one.act.node for one in play.controller.book.intents() if one.started]
    assert began <= len(intents)
    play.state.read("PRAGMA max_page_count = 1000000")
    play.rounds(3)
    assert sorted(node for _, node in play.cluster.calls()) == ["n0", "n1", "n2", "n3"]
    assert len(play.controller.book.known()) == 59
    play.end()


def test_the_loop_goes_on_loudly_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    play = Rehearsal(tmp_path)
    play.incident()
    stop, real, tries = threading.Event(), play.controller.round, []

    def failing() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise StorageBusy("disk full") from sqlite3.OperationalError("database or disk is full")
        real()

    monkeypatch.setattr(play.controller, "round", failing)
    with caplog.at_level(logging.ERROR):
        play.controller.run(stop, 0.001, lambda _: stop.set())
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert play.cluster.calls() == [("drain", "n1")]
    assert play.state.about()["stopped"]
    play.end()


def test_the_loop_ends_where_the_state_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Rehearsal(tmp_path)

    def damaged() -> None:
        raise RunFilesError("damaged") from sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(play.controller, "round", damaged)
    with pytest.raises(RunFilesError, match="damaged"):
        play.controller.run(threading.Event(), 0.001)
    play.end()


def test_the_loop_ends_where_a_table_is_not_there(tmp_path: Path) -> None:
    play = Rehearsal(tmp_path)
    with play.state.change():
        play.state.write("DROP TABLE aliases")
    play.incident()
    with pytest.raises(RunFilesError, match="no such table"):
        play.controller.run(threading.Event(), 0.001)
    play.end()


def test_nothing_is_done_once_the_state_was_removed(tmp_path: Path) -> None:
    play = Rehearsal(tmp_path)
    play.incident()
    (play.state.folder / NAME).unlink()
    with pytest.raises(RunFilesError, match="removed or replaced"):
        play.controller.round()
    assert play.cluster.calls() == []
    play.end()


# Owners ---------------------------------------------------------------------------------------------------------------


def hold(path: Path, said: Connection) -> None:
    lock = Lock(path, "it")
    said.send("held")
    said.recv()
    lock.release()


def test_a_lock_has_one_owner_and_ends_with_its_process(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    other = fork.Process(target=hold, args=(tmp_path / STATE_LOCK, there))
    other.start()
    assert here.recv() == "held"
    with pytest.raises(ConfigurationError, match=f"pid {other.pid} on "):
        Lock(tmp_path / STATE_LOCK, "state x")
    other.kill()
    other.join()
    mine = Lock(tmp_path / STATE_LOCK, "state x")
    with pytest.raises(ConfigurationError, match="this process"):
        Lock(tmp_path / STATE_LOCK, "state x")
    mine.release()
    Lock(tmp_path / STATE_LOCK, "state x").release()


def test_a_run_of_another_controller_is_left_alone_until_it_is_free(tmp_path: Path) -> None:
    play = Rehearsal(tmp_path)
    play.incident()
    other = Lock(play.run_dir / RUN_LOCK, "run")
    play.rounds(3)
    assert play.cluster.calls() == []
    assert len(play.trail("trouble")) == 1
    assert "has an owner already" in play.trail("trouble")[0]
    other.release()
    play.rounds(2)
    assert play.cluster.calls() == [("drain", "n1")]
    play.end()


# Time -----------------------------------------------------------------------------------------------------------------


def test_what_has_passed_is_told_by_the_machine_while_it_is_up() -> None:
    clock = HandClock()
    noted = (clock.now(), clock.boot(), clock.ticks())
    clock.move(timedelta(minutes=5))
    clock.wall += timedelta(hours=7)
    assert clock.since(*noted) == timedelta(minutes=5)
    clock.started = "boot-2"
    assert clock.since(*noted) == timedelta(hours=7, minutes=5)
    clock.wall = NOW - timedelta(hours=1)
    assert clock.since(*noted) == timedelta(0)


def test_the_clock_of_this_machine() -> None:
    clock = Clock()
    noted = (clock.now(), clock.boot(), clock.ticks())
    assert noted[0].tzinfo is not None
    assert timedelta(0) <= clock.since(*noted) < timedelta(hours=1)


@pytest.mark.parametrize(
    "said", ["disk I/O error", "database or disk is full", "unable to open database file", "database is locked"]
)
def test_storage_that_is_busy_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    State(tmp_path).close()

    def failing(*_: object, **__: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError(said)

    monkeypatch.setattr(sqlite3, "connect", failing)
    with pytest.raises(StorageBusy) as caught:
        State(tmp_path)
    assert caught.value.exit_code == 1
    assert "damaged" not in str(caught.value)
