"""The leader and a member alone, with a clock of their own and the words of others written by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitwitness.errors import BitwitnessError, ConfigurationError, RunFilesError
from bitwitness.runfiles.supervision import Member, SupervisionFiles
from bitwitness.supervise.decisions import PORT_RETRIES, Failure
from bitwitness.supervise.events import Event
from bitwitness.supervise.identity import Identity
from bitwitness.supervise.launchers import Scattered
from bitwitness.supervise.leader import Leader
from bitwitness.supervise.member import LeaderLost, NodeMember
from bitwitness.supervise.settings import Settings
from bitwitness.supervise.wrapper import Patience

NODES = ("a", "b", "c")


class Stage:
    """A leader, the clock, and members whose files are written here."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.now = 100.0
        self.settings = Settings(run_dir=folder, script="train.py", **{"nodes": 2, "lost_after": 60.0, **changes})
        self.files = SupervisionFiles(folder)
        self.events: list[Event] = []
        self.leader = Leader(self.settings, Scattered(2, patience=10.0), self.events.append, lambda: self.now)
        self.leader.start()
        self.members: dict[str, Member] = {}

    def say(self, node: str, **changes: Any) -> None:
        """One beat of a member."""
        old = self.members.get(node, Member(node, f"token-{node}", index=NODES.index(node), address=node, port=30_000))
        self.members[node] = replace(old, beat=old.beat + 1, **changes)
        self.files.write_member(self.leader.id, self.members[node])

    def beat(self, seconds: float = 1.0, but: tuple[str, ...] = ()) -> int | None:
        """Time goes on, everybody beats, the leader looks; the exit code, once there is one."""
        self.now += seconds
        for node in self.members:
            if node not in but:
                self.say(node)
        stop = self.leader.tick()
        return None if stop is None else stop.exit_code

    def start(self, *nodes: str, generation: int = 1) -> None:
        for node in nodes:
            self.say(node, state="ready", generation=generation)
        assert self.beat() is None
        for node in nodes:
            self.say(node, state="running")

    @property
    def generation(self) -> tuple[str, ...]:
        session = self.files.read_session()
        assert session is not None
        found = self.files.read_generation(session.id, session.generation)
        return () if found is None else found.nodes

    def said(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Stage]:
    return lambda **changes: Stage(tmp_path / "run", **changes)


def test_a_spare_that_comes_first_waits_for_those_with_a_place(stage: Callable[..., Stage]) -> None:
    here = stage()
    for node in ("c", "b"):
        here.say(node, state="ready", generation=1)
    for _ in range(5):
        assert here.beat() is None
    assert not here.generation
    here.say("a", state="ready", generation=1)
    here.beat()
    assert here.generation == ("a", "b")


def test_a_spare_takes_the_place_of_one_that_does_not_come(stage: Callable[..., Stage]) -> None:
    here = stage()
    for node in ("c", "b"):
        here.say(node, state="ready", generation=1)
    for _ in range(15):
        here.beat()
    assert here.generation == ("c", "b")


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (-9, 137, " (its wrapper was killed by SIGKILL);"),
        (1, 2, " (its wrapper ended with exit code 1);"),
        (None, 2, ";"),
    ],
)
def test_how_a_node_ended_that_never_joined(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, ended: int | None, code: int, said: str
) -> None:
    here = stage(join_timeout=20.0)
    monkeypatch.setattr(Scattered, "names", lambda self: ["a", "b"])
    monkeypatch.setattr(Scattered, "exit_code", lambda self, node: ended)
    here.say("a", state="ready", generation=1)
    for _ in range(20):
        assert here.beat() is None
    assert here.beat() == code
    assert f"b has not joined{said}" in here.said("ended")[0]


def test_silence_is_a_loss_only_after_its_time(stage: Callable[..., Stage]) -> None:
    here = stage(max_restarts=1)
    here.start("a", "b", "c")
    for _ in range(59):
        here.beat(but=("b",))
    assert here.said("lost") == []
    for _ in range(3):
        here.beat(but=("b",))
    assert len(here.said("lost")) == 1
    for node in ("a", "c"):
        here.say(node, state="stopped")
    here.beat(but=("b",))
    for node in ("a", "c"):
        here.say(node, state="ready", generation=2)
    here.beat(but=("b",))
    assert here.generation == ("a", "c")


def test_a_leader_that_slept_does_not_hold_the_silence_against_others(stage: Callable[..., Stage]) -> None:
    here = stage()
    here.start("a", "b")
    here.beat(70.0, but=("a", "b"))
    for _ in range(59):
        here.beat(but=("b",))
    assert here.said("lost") == []
    here.beat(2.0, but=("b",))
    assert len(here.said("lost")) == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ({"why": "the leader was silent for 70 s"}, "b is lost: the leader was silent for 70 s"),
        ({"state": "joined", "generation": 0, "token": "another"}, "b is lost: its wrapper has left the job"),
    ],
    ids=["stopped by itself", "started anew"],
)
def test_a_node_that_left_is_the_cause_and_not_whose_connection_it_closed(
    stage: Callable[..., Stage], word: dict[str, Any], said: str
) -> None:
    here = stage()
    here.start("a", "b")
    failure = Failure(0, "a", 1, "RuntimeError", "Connection reset by peer", tail=("traceback",))
    here.say("a", state="ended", code=1, failures=(failure.to_json(),))
    here.say("b", **word)
    here.beat()  # the leader, which was silent
    here.say("b", state="joined", generation=0, why="")
    assert here.beat() == 137
    assert said in here.said("ended")[0]


def test_a_lost_node_whose_ranks_had_finished_is_no_loss(stage: Callable[..., Stage]) -> None:
    here = stage()
    here.start("a", "b")
    here.files.write_mark(here.leader.id, 1, 1, "finished")
    for _ in range(70):
        assert here.beat(but=("b",)) is None
    here.files.write_mark(here.leader.id, 1, 0, "finished")
    assert here.beat(but=("b",)) == 0


def test_a_node_on_which_nothing_ends_is_left_out(stage: Callable[..., Stage]) -> None:
    here = stage(max_restarts=1)
    here.start("a", "b", "c")
    here.say("a", state="ended", code=1)
    for _ in range(25):
        here.beat()
    assert here.said("stuck") == []
    for _ in range(10):
        here.beat()
    assert here.said("stuck") == ["b: what runs there does not end, not even when killed; left out"]
    for node in ("a", "b", "c"):
        here.say(node, state="ready", generation=2)
    here.beat()
    assert here.generation == ("a", "c")


def test_a_port_that_is_taken_is_tried_anew_without_counting(stage: Callable[..., Stage]) -> None:
    here = stage()
    for generation in range(1, PORT_RETRIES + 2):
        here.start("a", "b", generation=generation)
        here.say("a", state="ended", code=1, port_taken=True)
        here.beat()
        here.say("b", state="stopped")
        here.beat()
        for node in ("a", "b"):
            here.say(node, code=None, port_taken=False)
    assert here.leader.tick() is not None
    assert f"{PORT_RETRIES + 1} times in a row" in here.said("ended")[0]


def test_a_damaged_quarantine_is_told_once(stage: Callable[..., Stage]) -> None:
    here = stage(join_timeout=20.0)
    file = here.settings.run_dir / "quarantine.json"
    file.write_text("{")
    for node in ("a", "b"):
        here.say(node, state="refused", generation=1, why=f"{file} is damaged")
    for _ in range(20):
        here.beat()
    assert here.beat() == 2
    assert here.said("refused") == [f"a does not take part: {file} is damaged"]
    (end,) = here.said("ended")
    assert end.count(str(file)) == 1
    assert "too few nodes" not in end
    assert "mend it by hand, or move it away" in end


def test_workers_may_take_their_grace(stage: Callable[..., Stage]) -> None:
    here = stage(grace=100.0)
    here.start("a", "b")
    here.leader.stop("SIGTERM")
    for _ in range(120):
        assert here.beat() is None
    for node in ("a", "b"):
        here.say(node, state="stopped")
    assert here.beat() == 143


def test_a_quarantine_that_cannot_be_kept_starts_nobody(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitwitness.supervise import findings
    from tests.supervise.test_decisions import hit

    here = stage()
    here.start("a", "b")
    monkeypatch.setattr(findings, "incidents_of", lambda *rest: (hit((1, "persistent")),))
    (here.settings.run_dir / "quarantine.json").write_text("{")
    for node in ("a", "b"):
        here.say(node, state="ended", code=1)
    here.beat()
    assert here.beat() == 160
    assert "the quarantine could not be kept, so nothing is started again" in here.said("ended")[0]


@pytest.mark.parametrize(("nodes", "code"), [((), 2), (("a", "b"), 1)])
def test_another_leader_ends_this_one(stage: Callable[..., Stage], nodes: tuple[str, ...], code: int) -> None:
    """With 2, as what is refused, where both were started at the same instant and nothing runs yet."""
    here = stage()
    here.start(*nodes)
    session = here.files.read_session()
    assert session is not None
    here.files.write_session(replace(session, id="other", pid=77, host="elsewhere"))
    with pytest.raises(BitwitnessError, match="process 77 on elsewhere") as caught:
        here.beat()
    assert caught.value.exit_code == code


# A member alone


def member(here: Stage, node: str, session: str = "") -> NodeMember:
    who = Identity(node, 0, "127.0.0.1", ("d",))
    echo = (io.StringIO(), io.StringIO())
    return NodeMember(here.settings, who, echo, here.events.append, session, lambda: here.now)


def test_two_that_start_together_under_one_name_find_out(stage: Callable[..., Stage]) -> None:
    here = stage()
    one = member(here, "n", here.leader.id)
    one.tick()
    other = here.files.read_member(here.leader.id, "n")
    assert other is not None
    here.files.write_member(here.leader.id, replace(other, token="other"))
    here.now += 10
    with pytest.raises(ConfigurationError, match="two wrappers call themselves node 'n'"):
        one.tick()


def test_a_session_is_joined_only_while_its_leader_beats(stage: Callable[..., Stage]) -> None:
    here = stage(join_timeout=50.0)
    one = member(here, "n")
    for _ in range(5):
        one.tick()
        here.now += 5
    assert here.files.read_members(here.leader.id) == []
    here.leader.tick()
    one.tick()
    assert [found.node for found in here.files.read_members(here.leader.id)] == ["n"]
    late = member(here, "m")
    late.tick()
    here.now += 51
    with pytest.raises(LeaderLost, match="no leader in"):
        late.tick()


def test_one_that_hears_nothing_of_the_leader_leaves_word_of_it(stage: Callable[..., Stage]) -> None:
    here = stage()
    one = member(here, "n", here.leader.id)
    one.tick()
    run = SimpleNamespace(is_over=False, look=lambda: None, end=lambda: None, close=lambda: None)
    one._run = run  # type: ignore[assignment]
    one._said = replace(one._said, state="running", generation=1)
    here.now += 61
    one.tick()
    words = []
    for over in (False, True):
        run.is_over = over
        one.tick()
        (found,) = here.files.read_members(here.leader.id)
        words.append((found.state, found.generation, found.why))
    assert words == [(state, 1, "the leader was silent for 61 s") for state in ("running", "stopped")]


def test_a_damaged_quarantine_refuses_and_says_so(stage: Callable[..., Stage]) -> None:
    here = stage()
    (here.settings.run_dir / "quarantine.json").write_text("{")
    one = member(here, "n", here.leader.id)
    one.tick()
    one.tick()
    (found,) = here.files.read_members(here.leader.id)
    assert found.state == "refused"
    assert "quarantine.json" in found.why


def test_storage_may_fail_for_a_while_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bitwitness.supervise.wrapper.time.monotonic", lambda: now[0])
    said: list[str] = []
    patience = Patience(10.0, said.append, lambda: ["rank 0 has failed"])

    def fails() -> int:
        raise RunFilesError("disk full")

    assert patience(fails) is None
    now[0] = 9.0
    assert patience(fails) is None
    assert patience(lambda: 5) == 5
    now[0] = 18.0
    assert patience(fails) is None
    now[0] = 29.0
    with pytest.raises(RunFilesError, match="has failed for 10 s: disk full; rank 0 has failed") as caught:
        patience(fails)
    assert caught.value.exit_code == 1
    fails_now = "the run directory fails, which is borne for 10 s: disk full"
    assert said == [fails_now, "known, and not to be written: rank 0 has failed"] * 2
