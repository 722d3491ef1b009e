"""Answers and state files survive every kill: no answer is lost, and none is acted upon twice."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.answering import answer
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.kept import Book
from bitwitness.fleet.kept_answers import Questions
from bitwitness.fleet.state import NAME, State
from bitwitness.fleet.tables import APPROVALS, SCHEMA, TABLES
from bitwitness.fleet.view import report
from tests.fleet.incidents import topology, verdict, write
from tests.fleet.rehearsal import ACT, HandClock
from tests.fleet.test_controller_kills import CutState, FileClock, cluster_of, run_to_end, start

fork = multiprocessing.get_context("fork")
POLICY = replace(ACT, approve=frozenset({"drain"}))
EXHAUSTIVE = "BITWITNESS_EXHAUSTIVE"
"""Where it is set, kills before each commit too; a kill before one is a kill after the one before it, but for the first."""
exhaustive = pytest.mark.skipif(not os.environ.get(EXHAUSTIVE), reason="a kill like another one")
NODES = ("n0", "n1", "n2", "n3")


def asked(folder: Path) -> None:
    """Two nodes wait for an answer."""
    folder.mkdir(exist_ok=True)
    where = topology(NODES, per_node=1)
    write(folder / "runs" / "run", 1, verdict(where, (1,)), where)
    write(folder / "runs" / "run", 2, verdict(where, (2,)), where)
    FakeCluster(NODES, folder / "cluster.json")
    run_to_end(folder, POLICY, 2)


def say(folder: Path, cut: object = None) -> None:
    """Approve one and reject the other, in a process that may be killed."""
    state = CutState(folder / "state", clock=FileClock(folder / "clock"), create=False)
    state.cut = cut  # type: ignore[assignment]
    with suppress(ConfigurationError):
        answer(state, "n1", "approved", "kim@head", "seen twice")
    with suppress(ConfigurationError):
        answer(state, "n2", "rejected", "kim@head", "on the bench")
    os._exit(0)


def said(folder: Path, cut: object = None) -> int | None:
    process = fork.Process(target=say, args=(folder, cut))
    process.start()
    process.join(60)
    return process.exitcode


def expect(folder: Path) -> None:
    clock = FileClock(folder / "clock")
    assert cluster_of(folder, clock).calls() == [("drain", "n1")]
    with State(folder / "state", clock=clock) as state:
        assert {one.proposal.node: one.status for one in Book(state).proposals()} == {"n1": "done", "n2": "rejected"}
        answers = [(one.what, one.node) for one in state.history() if one.who == "kim@head"]
        assert sorted(answers) == [("approved", "n1"), ("rejected", "n2")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug: what was written survives a kill without being flushed."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("when", "number"), [("before", 1), ("after", 1), ("after", 2), pytest.param("before", 2, marks=exhaustive)]
)
def test_a_kill_of_whoever_answers(tmp_path: Path, when: str, number: int) -> None:
    asked(tmp_path)
    assert said(tmp_path, (when, number)) == -signal.SIGKILL
    assert said(tmp_path) == 0
    run_to_end(tmp_path, POLICY, 4)
    expect(tmp_path)


@pytest.mark.usefixtures("quick")
def test_a_kill_of_the_controller_at_every_commit_after_an_answer(tmp_path: Path) -> None:
    first = tmp_path / "first"
    asked(first)
    assert said(first) == 0
    whens: tuple[Literal["before", "after"], ...] = ("before", "after") if os.environ.get(EXHAUSTIVE) else ("after",)
    for when in whens:
        for number in count(1):
            folder = tmp_path / f"{when}-{number}"
            shutil.copytree(first, folder)
            ended, _, _ = start(folder, POLICY, 3, (when, number))
            if ended() == 0:
                assert number > 5, "there are fewer commits than steps"
                break
            run_to_end(folder, POLICY, 3)
            expect(folder)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_the_call_that_was_approved(tmp_path: Path, when: Literal["before", "after"]) -> None:
    asked(tmp_path)
    assert said(tmp_path) == 0
    cluster_of(tmp_path, HandClock()).kill_caller(when)
    ended, _, _ = start(tmp_path, POLICY, 3)
    assert ended() == -signal.SIGKILL
    run_to_end(tmp_path, POLICY, 3)
    expect(tmp_path)


@pytest.mark.usefixtures("quick")
def test_two_people_answer_at_once(tmp_path: Path) -> None:
    asked(tmp_path)
    processes = [fork.Process(target=one_of_many, args=(tmp_path, number)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    with State(tmp_path / "state", clock=FileClock(tmp_path / "clock")) as state:
        answers = [one for one in state.history() if one.what in ("approved", "rejected")]
    assert len(answers) == 1
    run_to_end(tmp_path, POLICY, 4)
    calls = cluster_of(tmp_path, FileClock(tmp_path / "clock")).calls()
    assert calls == ([("drain", "n1")] if answers[0].what == "approved" else [])


def one_of_many(folder: Path, number: int) -> None:
    state = State(folder / "state", clock=FileClock(folder / "clock"), create=False, check=False)
    with suppress(ConfigurationError):
        answer(state, "n1", ("approved", "rejected")[number % 2], f"kim{number}@head", "seen")
    os._exit(0)


# Files of an older version ---------------------------------------------------------------------------------------------


OLD = TABLES.replace(APPROVALS, "")
"""The tables as schema 2 had them."""


def old(folder: Path) -> Path:
    """A state of schema 2 with something in it."""
    folder.mkdir()
    with sqlite3.connect(folder / NAME) as made:
        made.executescript(OLD)
        made.executemany("INSERT INTO about VALUES (?, ?)", {"schema": "2", "version": "0"}.items())
        made.execute(
            "INSERT INTO audit (time, who, what, incident, node, text, record) VALUES ('t','w','test','','','x','{}')"
        )
    made.close()
    return folder / NAME


def test_an_older_file_is_brought_up_to_date_and_loses_nothing(tmp_path: Path) -> None:
    assert "approvals" not in OLD
    old(tmp_path / "state")
    with State(tmp_path / "state") as state:
        assert state.schema == SCHEMA
        assert [one.what for one in state.history()] == ["test"]
        assert Questions(state).waiting() == []
    with State(tmp_path / "state") as again, State(tmp_path / "new") as new:
        tables = "SELECT name, sql FROM sqlite_master ORDER BY name"
        assert again.read(tables) == new.read(tables), "a file that was brought up to date is as a new one"


def test_a_reader_leaves_an_older_file_as_it_is(tmp_path: Path) -> None:
    path = old(tmp_path / "state")
    with State(tmp_path / "state", create=False, write=False) as state:
        assert (state.schema, Questions(state).waiting(), Questions(state).about("n1")) == (2, [], [])
        assert report(state).questions == ()
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT value FROM about WHERE name = 'schema'").fetchone() == ("2",)
    plain.close()


def test_a_reader_that_is_there_sees_what_came_with_the_new_schema(tmp_path: Path) -> None:
    old(tmp_path / "state")
    with State(tmp_path / "state", create=False, write=False) as reader:
        assert reader.schema == 2
        with State(tmp_path / "state"):
            pass
        assert (reader.schema, Questions(reader).waiting()) == (SCHEMA, [])


def test_whoever_writes_brings_it_up_to_date_first(tmp_path: Path) -> None:
    old(tmp_path / "state")
    with State(tmp_path / "state", create=False) as state, state.change():
        state.note("test", "y")
    with State(tmp_path / "state", create=False) as state:
        assert (state.schema, len(state.history())) == (SCHEMA, 2)


def open_it(folder: Path, cut: int = 0) -> None:
    """Open a state, and die at its so manieth statement."""
    if cut:
        import bitwitness.fleet.state as module

        statements = module._statements

        def cutting(script: str) -> Iterator[str]:
            for number, one in enumerate(statements(script), 1):
                if number == cut:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield one

        module._statements = cutting
    State(folder)
    os._exit(0)


@pytest.mark.parametrize("cut", [1, 5, *(pytest.param(cut, marks=exhaustive) for cut in (2, 3, 4))])
def test_a_kill_while_it_is_brought_up_to_date(tmp_path: Path, cut: int) -> None:
    old(tmp_path / "state")
    process = fork.Process(target=open_it, args=(tmp_path / "state", cut))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with State(tmp_path / "state", create=False) as state:
        assert (state.schema, len(state.history())) == (2, 1)
    with State(tmp_path / "state") as state:
        assert (state.schema, len(state.history())) == (SCHEMA, 1)


def test_many_open_an_older_file_at_once(tmp_path: Path) -> None:
    old(tmp_path / "state")
    processes = [fork.Process(target=open_it, args=(tmp_path / "state",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    with State(tmp_path / "state") as state:
        assert (state.schema, len(state.history())) == (SCHEMA, 1)
