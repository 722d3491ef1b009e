"""`kill -9` at any instant: nothing is acted upon twice, nothing is forgotten, and the budget holds.

The controllers are real processes on a cluster that lives in a file. They are killed at random instants, and at every instant
that matters, followed by another one on the same state, and at the end everything is counted where it was done: on the
cluster.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest

from bitwitness.errors import ClusterError
from bitwitness.evidence import Persistence
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Book
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.state import State
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.rehearsal import ACT, HandClock, Listener

EXHAUSTIVE = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1"
KILLS, INCIDENTS = (30, 500) if EXHAUSTIVE else (15, 250)
RUNS, PER_RUN = 3, 20
HOUR = timedelta(hours=1)
STEP = timedelta(minutes=5)
POLICY = replace(ACT, nodes_per_hour=4, cluster_share=0.3, act_within=10 * HOUR)
ALLOWED = POLICY.allowed_out(RUNS * PER_RUN)
SPARED = 5
"""Nodes of each run that are only ever among the candidates of incidents that name nobody."""

fork = multiprocessing.get_context("fork")


class FileClock(HandClock):
    """Hours that pass by rounds, in a file, so that they go on after a kill."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        passed = float(path.read_text()) if path.exists() else 0.0
        super().move(timedelta(seconds=passed))

    def move(self, by: timedelta) -> None:
        super().move(by)
        beside = self._path.with_suffix(".new")
        beside.write_text(str(self.passed))
        beside.replace(self._path)


class CutState(State):
    """A state whose process dies at one of its commits: just before it, or just after."""

    cut: tuple[Literal["before", "after"], int] | None = None
    _commits = 0

    @contextmanager
    def change(self) -> Iterator[None]:
        self._commits += 1
        with super().change():
            yield
            if self.cut == ("before", self._commits):
                os.kill(os.getpid(), signal.SIGKILL)
        if self.cut == ("after", self._commits):
            os.kill(os.getpid(), signal.SIGKILL)


def cluster_of(folder: Path, clock: HandClock) -> FakeCluster:
    return FakeCluster((), folder / "cluster.json", clock=clock.now)


def live(folder: Path, policy: FleetPolicy, ready: Connection, rounds: int, cut: object = None) -> None:
    """The life of a controller, in a process of its own."""
    clock = FileClock(folder / "clock")
    state = CutState(folder / "state", clock=clock)
    state.read("PRAGMA synchronous=OFF")  # a kill loses nothing that was written
    state.cut = cut  # type: ignore[assignment]
    ready.send("ready")
    controller = Controller(
        [],
        state,
        cluster_of(folder, clock),
        policy,
        parents=[folder / "runs"],
        notifiers=[Listener()],
        read_signals=lambda _: (),
    )
    for _ in range(rounds):
        controller.round()
        clock.move(STEP)
    ready.send("end")
    os._exit(0)


def start(
    folder: Path, policy: FleetPolicy, rounds: int, cut: object = None
) -> tuple[Callable[[], int | None], Connection, int]:
    """A controller begins; a function that waits for its end, where it speaks, and its pid."""
    here, there = fork.Pipe()
    process = fork.Process(target=live, args=(folder, policy, there, rounds, cut))
    process.start()
    there.close()
    assert here.poll(60), "the controller did not start"
    with suppress(EOFError):  # it was killed already
        here.recv()
    assert process.pid is not None

    def ended() -> int | None:
        process.join(60)
        return process.exitcode

    return ended, here, process.pid


def run_to_end(folder: Path, policy: FleetPolicy, rounds: int) -> None:
    ended, said, _ = start(folder, policy, rounds)
    assert ended() == 0
    assert said.recv() == "end"


# The storm ------------------------------------------------------------------------------------------------------------


def storm(folder: Path, draw: random.Random) -> None:
    """Incidents of all kinds in some runs, over a day; twice as many, and kills, with `BITWITNESS_EXHAUSTIVE=1`."""
    nodes = [[f"n{run}-{number:02}" for number in range(PER_RUN)] for run in range(RUNS)]
    where = [topology(each, per_node=1) for each in nodes]
    kinds: list[Persistence | None] = ["persistent", "transient", "unknown", None]
    for number in range(INCIDENTS):
        run = draw.randrange(RUNS)
        how = draw.choices(kinds, (2, 4, 1, 3))[0]
        named = draw.sample(range(PER_RUN - SPARED), draw.choice((1, 1, 1, 2)))
        candidates = tuple(range(PER_RUN - SPARED, PER_RUN))
        found = verdict(where[run], named, how) if how else replace(verdict(where[run], ()), candidates=candidates)
        at = NOW - timedelta(seconds=draw.uniform(0, 86_400))
        write(folder / "runs" / f"run-{run}", number, found, where[run], at)
    FakeCluster([node for each in nodes for node in each], folder / "cluster.json")


def most_within(times: list[tuple[datetime, str]], span: timedelta) -> int:
    """The most nodes that were touched within any such time."""
    return max((len({node for when, node in times if begin <= when < begin + span}) for begin, _ in times), default=0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug: what was written survives a kill without being flushed."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("quick")
def test_a_storm_with_kills_at_random_instants(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    storm(tmp_path, draw)
    clock = FileClock(tmp_path / "clock")
    cluster = cluster_of(tmp_path, clock)
    acting = 0
    for number in range(KILLS):
        cluster.kill_caller(draw.choice(("before", "after")), draw.choice((1, 1_000_000, 1_000_000)))
        ended, said, pid = start(tmp_path, POLICY, 10_000)
        # On a machine that has other things to do, lives are longer until one has come to an act.
        said.poll(draw.uniform(0, 0.2 if acting else 0.2 + 0.1 * number))
        os.kill(pid, signal.SIGKILL)
        assert ended() == -signal.SIGKILL
        acting += 0 < len(cluster.calls()) < ALLOWED
    cluster.kill_caller("before", 1_000_000)
    run_to_end(tmp_path, POLICY, 120)
    before = cluster.calls()
    run_to_end(tmp_path, POLICY, 10)
    assert cluster.calls() == before, "what was held to the end was acted upon after all"
    with State(tmp_path / "state", clock=FileClock(tmp_path / "clock")) as state:
        check(state, cluster)
    assert acting, "no kill came while nodes were acted upon: they prove nothing"


def check(state: State, cluster: FakeCluster) -> None:
    """What must be true at the end."""
    book = Book(state)
    calls = cluster.calls()
    acted = {node for _, node in calls}
    assert Counter(calls).most_common(1)[0][1] == 1, "a node was acted upon twice"
    assert {kind for kind, _ in calls} == {"drain"}
    assert len(acted) == ALLOWED, "the share of the cluster was not used, or overrun"
    assert most_within(cluster.times(), HOUR) == POLICY.nodes_per_hour, "the budget of an hour was not used, or overrun"
    assert not {node for node in acted if int(node[-2:]) >= PER_RUN - SPARED}, "somebody unnamed was acted upon"
    assert sum(book.incidents().values()) == INCIDENTS, "an incident was forgotten, or counted twice"
    proposals = book.proposals()
    asked = [one for one in proposals if one.proposal.act is not None]
    assert {one.proposal.incident for one in proposals} == book.known()
    assert {one.status for one in asked} == {"done", "already out", "expired"}
    assert all(one.status == "nothing" for one in proposals if one.proposal.act is None)
    assert Counter(one.proposal.node for one in asked if one.status == "done") == dict.fromkeys(acted, 1)
    assert {one.proposal.node for one in asked if one.status == "already out"} <= acted
    named = {one.proposal.node for one in asked}
    assert all(not one.node or one.node in named or one.what == "proposed" for one in state.history())
    told = [subject for (subject,) in state.read("SELECT subject FROM outbox WHERE subject LIKE '%: drained %'")]
    assert len(told) == len(acted)


@pytest.mark.usefixtures("quick")
def test_a_person_returns_nodes_beside_controllers_that_are_killed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    where = topology([f"n{number}" for number in range(6)], per_node=1)
    for number in range(30):
        at = NOW - timedelta(seconds=draw.uniform(60, 3600))
        write(tmp_path / "runs" / "run", number, verdict(where, (number % 6,)), where, at)
    cluster = FakeCluster(where.nodes, tmp_path / "cluster.json")
    cluster.slow_to_show(1)
    then, acted = {}, 0
    for node in where.nodes:
        ended, said, pid = start(tmp_path, ACT, 10_000)
        said.poll(draw.uniform(0, 0.3))
        return_to_service(tmp_path, node)
        then[node] = cluster.calls(node)
        acted += ("drain", node) in then[node]
        os.kill(pid, signal.SIGKILL)
        assert ended() == -signal.SIGKILL
    run_to_end(tmp_path, ACT, 5)
    assert {node: cluster.calls(node) for node in then} == then, "what a person had answered was acted upon"
    assert acted, "nobody was taken out before he was returned: that proves nothing"
    with State(tmp_path / "state", clock=FileClock(tmp_path / "clock")) as state:
        stands = {(one.status, one.proposal.act) for one in Book(state).proposals()}
    assert stands <= {("done", "drain"), ("already out", "drain"), ("cleared", "drain"), ("nothing", None)}


def return_to_service(folder: Path, node: str) -> None:
    """As a person does: again, while the cluster does not show yet what it was asked for."""
    for _ in range(500):
        clock = FileClock(folder / "clock")
        with State(folder / "state", clock=clock, check=False) as state, suppress(ClusterError):
            clear(state, cluster_of(folder, clock), node, "repaired", "kim@head")
            return
    raise AssertionError(f"{node} could not be returned")


# Every instant --------------------------------------------------------------------------------------------------------


def small(folder: Path) -> None:
    """One of each kind, two of them about one node, and a job."""
    nodes = [f"n{number}" for number in range(4)]
    where = topology(nodes, per_node=1)
    run = folder / "runs" / "run"
    write(run, 1, verdict(where, (1,)), where, scheduler_job="fake:7")
    write(run, 2, verdict(where, ()), where)
    write(run, 3, verdict(where, (1,)), where)
    write(run, 4, verdict(where, (2,), "transient"), where)
    FakeCluster(nodes, folder / "cluster.json").add_job("7", ["n1"], state="ended", exit_code=160)


def expect(folder: Path) -> None:
    """All was done, and once."""
    clock = FileClock(folder / "clock")
    with State(folder / "state", clock=clock) as state:
        assert [(one.proposal.node, one.status) for one in Book(state).proposals()] == [
            ("n1", "done"),
            ("", "nothing"),
            ("n1", "already out"),
            ("n2", "nothing"),
        ]
        assert [one.status for one in Book(state).requeues(waiting=False)] == ["done"]
        assert len(state.read("SELECT 1 FROM outbox WHERE subject LIKE '%: drained %'")) == 1
        assert len(state.read("SELECT 1 FROM audit WHERE what = 'incident'")) == 4
    assert cluster_of(folder, clock).calls() == [("drain", "n1"), ("requeue", "7"), ("release", "7")]


@pytest.mark.usefixtures("quick")
def test_a_kill_at_every_commit(tmp_path: Path) -> None:
    """Just before and just after each; by default before every other one and after the others."""
    whens: tuple[Literal["before", "after"], ...] = ("before", "after")
    for when in whens:
        for number in count(1) if EXHAUSTIVE else count(1 + whens.index(when), 2):
            folder = tmp_path / f"{when}-{number}"
            folder.mkdir()
            small(folder)
            ended, _, _ = start(folder, ACT, 3, (when, number))
            if ended() == 0:
                assert number > 12, "there are fewer commits than steps"
                break
            run_to_end(folder, ACT, 3)
            expect(folder)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_at_every_call(tmp_path: Path, when: Literal["before", "after"], call: int) -> None:
    small(tmp_path)
    cluster_of(tmp_path, HandClock()).kill_caller(when, call)
    ended, _, _ = start(tmp_path, ACT, 3)
    assert ended() == -signal.SIGKILL
    run_to_end(tmp_path, ACT, 3)
    expect(tmp_path)
