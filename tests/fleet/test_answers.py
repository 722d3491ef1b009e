"""What a person has answered stays answered, whatever a controller that runs beside has read before, or reads later."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters import FakeCluster, NodeState
from bitwitness.fleet.clusters.base import Act, Call
from bitwitness.fleet.figures import figures
from bitwitness.fleet.signals.record import Signal
from tests.fleet.rehearsal import Rehearsal
from tests.fleet.test_controller import DRAINED, HOUR, reboot


def answer(play: Rehearsal, node: str = "n1") -> None:
    clear(play.state, play.cluster, node, "replaced the GPU", "kim@head")


def after(play: Rehearsal, what: str, count: int, patch: pytest.MonkeyPatch) -> None:
    """Have a person clear n1 just after the cluster has answered so often, before the controller goes on."""
    real: Callable[..., object] = getattr(play.cluster, what)
    calls: list[int] = []

    def interrupted(*words: object) -> object:
        said = real(*words)
        calls.append(1)
        if len(calls) == count:
            patch.setattr(play.cluster, what, real)
            answer(play)
        return said

    patch.setattr(play.cluster, what, interrupted)


# While a controller looks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "count"), [("census", 1), ("look", 1), ("look", 2), ("plan", 1), ("plan", 2)])
def test_a_clear_at_any_instant_before_a_call_is_final(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch, what: str, count: int
) -> None:
    play.incident()
    after(play, what, count, monkeypatch)
    play.rounds(5, timedelta(minutes=2))
    assert play.cluster.calls() == []
    (kept,) = play.kept("n1")
    assert (kept.status, kept.final) == ("cleared", True)
    assert not [one for one in play.controller.book.intents(unsettled=True) if one.outcome is None]
    if what != "census" and count == 2:
        assert any("replaced the GPU" in text for text in play.trail("not begun")), "it says what was not done, and why"


def test_a_look_that_fails_after_a_clear_moves_nothing(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    look = play.cluster.look

    def failing(node: str) -> NodeState:
        monkeypatch.setattr(play.cluster, "look", look)
        answer(play)
        raise ClusterError("timed out")

    monkeypatch.setattr(play.cluster, "look", failing)
    play.incident()
    play.rounds(5, timedelta(minutes=2))
    assert (play.cluster.calls(), play.statuses()) == ([], {"n1": "cleared"})
    assert any("stays cleared" in text for text in play.trail("left"))


def test_a_hold_that_was_decided_before_a_clear_is_not_noted(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    play.begin(cluster_share=0.25)
    play.cluster.take_out("n3", "fan")
    play.incident()
    after(play, "census", 1, monkeypatch)
    play.rounds(2)
    play.cluster.take_in("n3")
    play.rounds(3)
    assert (play.cluster.calls(), play.statuses()) == ([], {"n1": "cleared"})


def test_an_act_that_is_only_slow_to_show_is_waited_for(play: Rehearsal) -> None:
    play.cluster.slow_to_show(6)
    play.incident()
    play.rounds()
    assert play.statuses() == {"n1": "acting"}
    with pytest.raises(ClusterError, match="was asked for 2 s ago"):
        answer(play)
    assert play.statuses() == {"n1": "acting"}, "nothing was changed"
    play.rounds(8)
    assert play.statuses() == {"n1": "done"}
    play.cluster.slow_to_show(0)
    answer(play)
    play.rounds(5, timedelta(minutes=2))
    assert play.cluster.calls() == [*DRAINED, ("clear", "n1")]


def test_a_drain_that_never_shows_does_not_keep_a_person_for_ever(play: Rehearsal) -> None:
    play.cluster.refuse(1)
    play.incident()
    play.rounds()
    play.clock.move(timedelta(minutes=3))
    answer(play)
    play.rounds(5, timedelta(minutes=2))
    assert (play.cluster.calls(), play.statuses()) == (DRAINED, {"n1": "cleared"})


def test_a_clear_that_failed_answers_nothing(play: Rehearsal) -> None:
    play.incident(1)
    play.rounds()
    play.cluster.refuse(1)
    with pytest.raises(ClusterError):
        answer(play)
    assert play.controller.book.clears() == []
    answer(play)
    assert {one.node for one in play.controller.book.clears()} == {"n1"}


# What comes later -----------------------------------------------------------------------------------------------------


def aside(play: Rehearsal, number: int, **more: Any) -> Callable[[], None]:
    """An incident of now that the controller cannot see yet; call it to bring it."""
    path = play.incident(number, run_dir=play.folder / "elsewhere", **more)
    return lambda: shutil.move(path, play.run_dir / "incidents" / path.name)  # type: ignore[return-value]


def test_an_incident_that_is_older_than_a_clear_is_told_and_counts_nothing(play: Rehearsal) -> None:
    play.incident(1)
    play.rounds()
    late = [aside(play, 2), aside(play, 3, persistence="transient"), aside(play, 4, persistence="transient")]
    play.clock.move(HOUR)
    answer(play)
    play.begin()
    for bring in late:
        bring()
    play.rounds(5)
    assert play.cluster.calls() == [*DRAINED, ("clear", "n1")]
    told = [one.proposal for one in play.kept("n1")[1:]]
    assert [(one.action, one.act) for one in told] == [("contact", None)] * 3
    assert all("was returned to service at" in one.reason and "by kim@head" in one.reason for one in told)
    assert play.controller.book.namings() == []
    play.incident(5, persistence="transient")
    play.rounds(2)
    assert play.kept("n1")[-1].proposal.action == "watch", "the first strike after the return"
    play.incident(6)
    play.rounds(2)
    assert play.cluster.calls() == [*DRAINED, ("clear", "n1"), *DRAINED], "what is found after it counts"


def test_a_clear_while_signals_are_read_answers_what_is_being_decided(play: Rehearsal) -> None:
    for number in (1, 2):
        play.incident(number, persistence="transient")
    play.rounds()
    play.clock.move(HOUR)
    play.incident(3, persistence="transient")
    play.clock.move(HOUR)
    waiting = [1]

    def slow(_: object) -> list[Signal]:
        if waiting:
            waiting.clear()
            answer(play)
        return []

    play.controller._picker._signals = slow
    play.rounds(3)
    assert play.cluster.calls() == []
    assert play.kept("n1")[-1].proposal.action == "contact"


def test_a_clear_also_ends_what_was_left_to_a_person(play: Rehearsal) -> None:
    reboot(play)
    play.cluster.slow_to_show(100_000)
    play.incident()
    play.rounds(20, timedelta(minutes=5))
    play.clock.move(HOUR * 30)
    play.rounds(2)
    (kept,) = play.kept("n1")
    assert (kept.status, kept.final) == ("unclear", True)
    play.cluster.slow_to_show(0)
    play.cluster.take_in("n1")
    answer(play)
    assert play.statuses() == {"n1": "cleared"}
    now = figures(play.state.folder)
    assert not [one for one in now.proposals if "unclear" in one], "the alert is over"
    assert now.unsettled == 0


# Drains that cannot be seen -------------------------------------------------------------------------------------------


def test_a_drain_is_looked_for_while_the_cluster_restarts(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    look = play.cluster.look
    play.cluster.refuse(1)
    play.incident()
    play.rounds()
    monkeypatch.setattr(play.cluster, "look", lambda node: NodeState(node, "unknown", "NO_RESPOND"))
    play.rounds(10, timedelta(minutes=5))
    assert play.statuses() == {"n1": "failed"}
    monkeypatch.setattr(play.cluster, "look", look)
    play.rounds(3, timedelta(minutes=5))
    assert play.statuses() == {"n1": "done"}


def test_a_drain_that_cannot_be_seen_in_time_expires(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    play.cluster.refuse(1)
    play.incident()
    play.rounds()
    monkeypatch.setattr(play.cluster, "look", lambda node: NodeState(node, "absent"))
    play.rounds(30, HOUR)
    (kept,) = play.kept("n1")
    assert (kept.status, kept.final) == ("expired", True)
    assert "cannot be seen" in kept.why


def test_what_was_carried_out_counts_and_not_what_was_proposed(play: Rehearsal) -> None:
    reboot(play)
    play.cluster.acts = frozenset({"drain", "clear"})
    play.incident()
    play.rounds(2)
    assert [one.device for one in play.controller.book.condemned()] == ["GPU-n1-0"]
    assert play.controller.book.acts() == {("drain", "done"): 1}
    assert "drained n1" in play.told()[0]


# A cluster that hangs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["look", "census", "job"])
def test_a_cluster_that_hangs_is_waited_for_once_a_round(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for job in ("7", "8", "9"):
        play.cluster.add_job(job, state="running")
    play.incident(1, ranks=(0,), scheduler_job="fake:7")
    play.incident(2, ranks=(1,), scheduler_job="fake:8")
    play.incident(3, ranks=(2,), scheduler_job="fake:9")
    if what == "job":
        play.rounds()
        play.clock.move(timedelta(seconds=10))
    asked: list[int] = []

    def hangs(*_: object) -> object:
        asked.append(1)
        play.clock.move(timedelta(seconds=30))
        raise ClusterError("did not end within 30 s")

    with monkeypatch.context() as patch:
        patch.setattr(play.cluster, what, hangs)
        for number in range(1, 4):
            play.controller.round()
            assert len(asked) == number, "the rest is left for the next round"
    play.rounds(6, timedelta(minutes=2))
    assert set(play.statuses().values()) == {"done"}


def test_a_slow_cluster_is_asked_for_half_a_minute_a_round(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    look, asked = play.cluster.look, []

    def slow(node: str) -> NodeState:
        asked.append(node)
        play.clock.move(timedelta(seconds=14))
        return look(node)

    monkeypatch.setattr(play.cluster, "look", slow)
    play.incident(ranks=(0, 1, 2, 3))
    play.controller.round()
    assert len(asked) == 3
    for _ in range(5):
        play.controller.round()
    assert set(play.statuses().values()) == {"done"}


# Jobs with several incidents ------------------------------------------------------------------------------------------


def test_the_incidents_of_a_job_start_it_again_once(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=1)
    play.cluster.add_job("7", state="ended", exit_code=160)
    play.incident(1, ranks=(1,), scheduler_job="fake:7")
    late = aside(play, 3, ranks=(3,), scheduler_job="fake:7")
    play.incident(2, ranks=(2,), scheduler_job="fake:7")
    play.rounds(3)
    assert play.cluster.calls(kind="requeue") == [], "the other node is in service yet"
    play.clock.move(HOUR)
    play.rounds(5, timedelta(seconds=10))
    assert play.cluster.calls(kind="requeue") == [("requeue", "7")]
    assert play.cluster.job("7").excluded == ("n1", "n2")
    play.cluster.add_job("7", state="ended", exit_code=0)
    late()
    play.clock.move(HOUR)
    play.rounds(5, timedelta(seconds=10))
    assert play.statuses()["n3"] == "done"
    assert len(play.controller.book.requeues(waiting=False)) == 1
    assert not [subject for subject in play.told() if "NOT started again" in subject]


def test_a_job_that_corrupts_once_more_is_started_once_more(play: Rehearsal) -> None:
    for number in (1, 2):
        play.cluster.add_job("7", state="ended", exit_code=160)
        play.incident(number, ranks=(number,), scheduler_job="fake:7")
        play.rounds(3, timedelta(seconds=10))
    assert len(play.cluster.calls(kind="requeue")) == 2
    assert play.cluster.job("7").excluded == ("n2",)
    play.cluster.add_job("8", state="ended", exit_code=0)
    play.incident(3, ranks=(3,), scheduler_job="fake:8")
    play.rounds(3, timedelta(seconds=10))
    assert [subject for subject in play.told() if "job 8 has come to its end" in subject]


# Machines that are gone -----------------------------------------------------------------------------------------------


def test_a_node_with_another_machine_is_not_back(play: Rehearsal) -> None:
    play.incident()
    play.rounds(2)
    play.cluster.exchange("n1")
    play.rounds(40)
    assert not any("in service again" in text for text in play.trail("trouble"))
    play.cluster.take_out("n1", "fan broken")
    play.cluster.take_in("n1")
    play.rounds(40)
    assert not any("in service again" in text for text in play.trail("trouble"))


def test_a_node_that_is_gone_can_be_cleared(play: Rehearsal) -> None:
    play.incident()
    play.rounds(2)
    play.cluster.lose("n1")
    looks = play.cluster.looks()
    play.rounds(60, timedelta(minutes=1))
    assert play.cluster.looks() - looks <= 3, "it is asked about once an hour"
    assert [one.device for one in play.controller.book.condemned()] == ["GPU-n1-0"]
    done = clear(play.state, play.cluster, "n1", "the provider has exchanged it", "kim@head")
    assert "has no n1 any more" in done.text
    assert done.calls == ()
    assert play.controller.book.condemned() == []
    with pytest.raises(ConfigurationError, match="has no node n9"):
        clear(play.state, play.cluster, "n9", "a typing error", "kim@head")


def test_what_is_left_of_a_return_is_said(play: Rehearsal) -> None:
    class Half(FakeCluster):
        """Returns a node before its marks are gone, as one does that must not keep a node out for a note on it."""

        def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
            calls = super().plan(act, state)
            return calls if act.kind != "clear" else tuple(reversed(calls))

        def carry_out(self, call: Call) -> str:
            if "unmark" in call.words:
                raise ClusterError("not allowed, as it was told")
            return super().carry_out(call)

    play.cluster = Half(("n0", "n1", "n2", "n3"), play.folder / "half.json", clock=play.clock.now, steps=2)
    play.begin()
    play.incident()
    play.rounds(2)
    done = clear(play.state, play.cluster, "n1", "replaced the GPU", "kim@head")
    assert "not all was taken back" in done.warning
    assert "not allowed" in done.warning
    play.rounds(40)
    assert not any("in service again" in text for text in play.trail("trouble"))


def test_two_who_return_a_node_at_once_are_both_heard(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    play.incident()
    play.rounds(2)
    look, looks = play.cluster.look, [0]

    def interrupted(node: str) -> NodeState:
        looks[0] += 1
        if looks[0] == 2:  # anna has noted that she returns it, and looks once more
            monkeypatch.setattr(play.cluster, "look", look)
            play.clock.move(timedelta(seconds=1))
            clear(play.state, play.cluster, node, "replaced the GPU", "kim@head")
        return look(node)

    monkeypatch.setattr(play.cluster, "look", interrupted)
    with pytest.raises(ClusterError, match="changed meanwhile"):
        clear(play.state, play.cluster, "n1", "replaced the GPU", "anna@head")
    assert {(one.node, one.who) for one in play.controller.book.clears()} == {("n1", "kim@head")}
    assert play.controller.book.condemned() == []
