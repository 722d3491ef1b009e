"""What the controller does about an incident, and what it leaves alone."""

from __future__ import annotations

import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import RunFilesError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters import Act, Call, Census, FakeCluster, NodeState
from bitwitness.fleet.identity import read_condemned
from bitwitness.fleet.publishing import CONDEMNED
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.runfiles import read_actions
from tests.fleet.rehearsal import Rehearsal

HOUR = timedelta(hours=1)
DRAINED = [("drain", "n1")]


def reboot(play: Rehearsal) -> None:
    """Have the next incident on n1 ask for a reboot."""
    play.begin(may=frozenset({"drain", "reboot"}))
    play.signals = [
        Signal("kernel", "xid:154", "GPU-n1-0", None, "loud", "none", "the driver asks for a reboot", host="n1")
    ]


# What is done ---------------------------------------------------------------------------------------------------------


def test_a_persistent_fault_drains_its_node_once(play: Rehearsal) -> None:
    path = play.incident()
    play.rounds(5)
    assert play.cluster.calls() == DRAINED
    assert play.cluster.look("n1").reason.startswith(f"bitwitness {path.name}: ")
    assert play.statuses() == {"n1": "done"}
    assert [one.device for one in read_condemned(play.state.folder / CONDEMNED)] == ["GPU-n1-0"]
    assert [one["action"] for one in read_actions(path)] == ["fleet drain"]
    assert len(play.told()) == 1
    assert "drained n1" in play.told()[0]
    assert "fake drain n1" in play.listener.got[0].text
    kinds = [one.what for one in play.state.history(incident=path.name)]
    assert kinds == ["incident", "proposed", "intent", "call", "done"]


def test_nothing_is_done_where_the_policy_only_observes(play: Rehearsal) -> None:
    play.begin(act=False)
    play.incident()
    play.rounds(3)
    assert play.cluster.calls() == []
    assert play.statuses() == {"n1": "observed"}
    assert len(play.told()) == 1
    play.begin(act=True)
    play.rounds()
    assert play.cluster.calls() == DRAINED


@pytest.mark.parametrize("persistence", ["transient", "unknown"])
def test_one_strike_is_counted_and_the_third_drains(play: Rehearsal, persistence: str) -> None:
    for number in range(1, 4):
        assert play.cluster.calls() == []
        play.incident(number, persistence=persistence)
        play.rounds()
    assert play.cluster.calls() == DRAINED


@pytest.mark.parametrize("kind", ["collective", "software", "compute"])
def test_whom_nobody_names_is_never_acted_upon(play: Rehearsal, kind: str) -> None:
    for number in range(10):
        play.incident(number, ranks=(), kind=kind)
    play.rounds(3)
    assert play.cluster.calls() == []
    assert play.cluster.looks() == 0
    assert play.statuses() == {"": "nothing"}
    assert len(play.told()) == 10


def test_two_runs_with_the_same_incident_are_one(play: Rehearsal) -> None:
    path = play.incident()
    other = play.folder / "other"
    shutil.copytree(play.run_dir, other, ignore=shutil.ignore_patterns(".fleet.lock"))
    play.controller._runs._runs += (other,)
    play.rounds(2)
    assert (other / "incidents" / path.name).is_dir()
    assert play.cluster.calls() == DRAINED


def test_another_incident_of_the_same_id_is_said(play: Rehearsal) -> None:
    other = play.folder / "other"
    play.incident()
    play.incident(run_dir=other, ranks=(2,))
    play.controller._runs._runs += (other,)
    play.rounds(4)
    assert play.cluster.calls() == DRAINED
    (told,) = play.trail("trouble")
    assert f"{other}/incidents" in told
    assert "has the id of another incident" in told


def test_a_second_incident_on_a_node_that_is_out_needs_no_act(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=1, cluster_share=0.25)
    play.incident(1)
    play.rounds(2)
    play.incident(2)
    play.rounds(2)
    assert play.cluster.calls() == DRAINED
    assert [one.status for one in play.kept("n1")] == ["done", "already out"]


def test_a_cluster_that_cannot_reboot_drains(play: Rehearsal) -> None:
    reboot(play)
    play.cluster.acts = frozenset({"drain", "clear"})
    play.incident()
    play.rounds()
    assert play.cluster.calls() == DRAINED


def test_damaged_incidents_behind_a_storm_are_said_once(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwitness.fleet.picking.BATCH", 3)
    for number in (50, 51):
        (play.incident(number) / "incident.json").write_text("{")
    play.rounds(2)
    assert len(play.trail("trouble")) == 2
    for number in range(12):
        play.incident(number)
    play.begin()
    play.rounds(8)
    assert len(play.controller.book.known()) == 12
    assert (len(play.trail("trouble")), play.trail("over")) == (2, [])
    assert not play.controller.backlog


# Holds ----------------------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_frees_with_time(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=2)
    play.incident(1, ranks=(0, 1, 2, 3))
    play.rounds(10)
    assert len(play.cluster.calls()) == 2
    assert sorted(play.statuses().values()) == ["done", "done", "held", "held"]
    assert play.controller.book.tally()[-1][2] == "nodes-per-hour"
    play.clock.move(HOUR)
    play.rounds(3)
    assert sorted(node for _, node in play.cluster.calls()) == ["n0", "n1", "n2", "n3"]


def test_the_share_of_the_cluster_holds_whoever_took_the_others_out(play: Rehearsal) -> None:
    play.begin(cluster_share=0.5)
    play.cluster.take_out("n3", "fan")
    play.incident(1, ranks=(0, 1))
    play.rounds(5)
    assert play.cluster.calls() == [("drain", "n0")]
    play.cluster.take_in("n3")
    play.rounds()
    assert play.cluster.calls() == [("drain", "n0"), ("drain", "n1")]


@pytest.mark.parametrize("jump", [HOUR * 5, -HOUR * 5])
def test_a_clock_that_is_set_neither_refills_the_budget_nor_stops_it(play: Rehearsal, jump: timedelta) -> None:
    play.begin(nodes_per_hour=1)
    play.incident(1, ranks=(0, 1))
    play.rounds(2)
    play.clock.wall += jump
    play.rounds(2)
    play.begin()
    play.rounds(2)
    assert len(play.cluster.calls()) == 1
    play.clock.move(HOUR)
    play.rounds(2)
    assert len(play.cluster.calls()) == 2


def test_what_is_not_shown_yet_counts_against_the_budget(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=1)
    play.cluster.slow_to_show(10_000)
    play.incident(1, ranks=(0, 1))
    play.rounds(5)
    assert play.cluster.calls() == [("drain", "n0")]


def test_what_is_not_counted_yet_counts_against_the_share(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    play.begin(cluster_share=0.25)
    play.cluster.slow_to_show(10_000)
    monkeypatch.setattr(play.cluster, "census", lambda: Census(4, 0))
    play.incident(1, ranks=(0, 1))
    play.rounds(5)
    assert play.cluster.calls() == [("drain", "n0")]


def test_what_waits_for_too_long_is_left_to_a_person(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=1, act_within=HOUR / 2)
    play.incident(1, ranks=(0, 1))
    play.rounds(2)
    play.clock.move(HOUR * 2)
    play.rounds(2)
    assert len(play.cluster.calls()) == 1
    assert sorted(play.statuses().values()) == ["done", "expired"]
    assert any("expired" in subject for subject in play.told())


def test_a_node_of_somebody_else_is_not_touched(play: Rehearsal) -> None:
    play.cluster.take_out("n1", "fan broken", by="kim")
    play.incident()
    play.rounds(3)
    play.cluster.take_in("n1")
    play.clock.move(HOUR)
    play.rounds(3)
    assert play.cluster.calls() == []
    (kept,) = play.kept("n1")
    assert (kept.status, kept.hold, kept.final) == ("held", "not-ours", True)
    assert "by kim" in kept.why
    assert "fan broken" in kept.why


def test_a_name_that_is_no_node_never_reaches_the_cluster(tmp_path: Path) -> None:
    play = Rehearsal(tmp_path, nodes=("n0", "n1"))
    play.where = type(play.where)(
        tuple(
            type(one)(one.rank, node, one.device, one.slot)
            for one, node in zip(play.where.placements, ("n0", "n1;reboot"), strict=True)
        )
    )
    play.incident()
    play.rounds(3)
    assert (play.cluster.calls(), play.cluster.looks()) == ([], 0)
    assert play.statuses() == {"n1;reboot": "held"}
    play.end()


def test_a_node_that_the_cluster_does_not_have_is_asked_for_until_it_expires(play: Rehearsal) -> None:
    play.cluster = FakeCluster(["n0"])
    play.begin()
    play.incident()
    play.rounds(100, timedelta(minutes=20))
    assert play.statuses() == {"n1": "expired"}
    assert play.cluster.calls() == []
    assert play.cluster.looks() < 80


# A cluster that refuses, hangs or lies --------------------------------------------------------------------------------


def test_a_refused_drain_is_tried_again_and_counts_once(play: Rehearsal) -> None:
    play.cluster.refuse(2)
    play.incident()
    play.rounds()
    assert play.statuses() == {"n1": "failed"}
    assert any("FAILED" in subject for subject in play.told())
    play.rounds(60, timedelta(seconds=10))
    assert play.cluster.calls() == DRAINED * 3
    assert play.statuses() == {"n1": "done"}


def test_a_cluster_that_always_refuses_is_not_asked_for_ever(play: Rehearsal) -> None:
    play.cluster.refuse(10_000)
    play.incident()
    play.rounds(200, timedelta(minutes=10))
    assert play.statuses() == {"n1": "expired"}
    assert 5 < len(play.cluster.calls()) < 60


def test_an_unreachable_cluster_is_waited_for(play: Rehearsal) -> None:
    play.cluster.unreachable()
    play.incident()
    play.rounds(5)
    (kept,) = play.kept("n1")
    assert (kept.status, kept.hold) == ("held", "cluster")
    play.cluster.unreachable(False)
    play.rounds(2, timedelta(minutes=5))
    assert play.cluster.calls() == DRAINED


def test_a_cluster_that_is_slow_to_show_is_asked_once(play: Rehearsal) -> None:
    play.cluster.slow_to_show(4)
    play.incident()
    play.rounds(2)
    assert play.statuses() == {"n1": "acting"}
    play.rounds(5)
    assert play.statuses() == {"n1": "done"}
    assert play.cluster.calls() == DRAINED


def test_a_drain_that_never_shows_is_asked_for_again(play: Rehearsal) -> None:
    play.cluster.slow_to_show(100_000)
    play.incident()
    play.rounds(20, timedelta(seconds=30))
    assert 2 <= len(play.cluster.calls()) <= 6
    assert len(play.controller.book.intents()) == 1


def test_a_reboot_that_never_shows_is_asked_for_once_and_a_person_is_told(play: Rehearsal) -> None:
    reboot(play)
    play.cluster.slow_to_show(100_000)
    play.incident()
    play.rounds(20, timedelta(minutes=5))
    assert play.cluster.calls() == [("reboot", "n1")]
    assert play.statuses() == {"n1": "unclear"}
    assert any("UNCLEAR" in subject for subject in play.told())
    play.cluster.slow_to_show(0)
    play.cluster.take_in("n1")  # shows what it is
    play.rounds()
    assert play.statuses() == {"n1": "done"}


def test_a_node_that_somebody_takes_out_between_two_looks_is_theirs(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, seen = play.cluster.look, []

    def interfered(node: str) -> object:
        seen.append(node)
        if len(seen) == 2:
            play.cluster.take_out("n1", "mine", by="kim")
        return look(node)

    monkeypatch.setattr(play.cluster, "look", interfered)
    play.incident()
    play.rounds(2)
    assert play.cluster.calls() == []
    assert [one.outcome for one in play.controller.book.intents()] == ["not done"]
    assert play.kept("n1")[0].hold == "not-ours"


def test_a_node_that_somebody_takes_out_after_a_refusal_is_theirs(play: Rehearsal) -> None:
    play.cluster.refuse(1)
    play.incident()
    play.rounds()
    play.cluster.take_out("n1", "mine", by="kim")
    play.rounds(3)
    (kept,) = play.kept("n1")
    assert (kept.status, kept.hold, kept.final) == ("held", "not-ours", True)
    assert read_condemned(play.state.folder / CONDEMNED) == []


def test_a_node_that_is_cleared_while_it_is_looked_at_stays_in(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = play.cluster.look

    def cleared(node: str) -> NodeState:
        monkeypatch.setattr(play.cluster, "look", look)
        clear(play.state, play.cluster, node, "it was a test", "kim@head")
        return look(node)

    monkeypatch.setattr(play.cluster, "look", cleared)
    play.incident()
    play.rounds(3)
    assert play.cluster.calls() == []
    assert play.statuses() == {"n1": "cleared"}


def test_an_adapter_with_a_mistake_stops_no_other_node(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = play.cluster.plan

    def mistaken(act: Act, state: NodeState) -> tuple[Call, ...]:
        if act.node == "n1":
            raise KeyError("state")
        return plan(act, state)

    monkeypatch.setattr(play.cluster, "plan", mistaken)
    play.incident(1)
    play.incident(2, ranks=(2,))
    play.rounds(2)
    assert play.cluster.calls() == [("drain", "n2")]
    assert play.statuses() == {"n1": "held", "n2": "done"}


# Restarts -------------------------------------------------------------------------------------------------------------


def cut(play: Rehearsal, kind: str) -> None:
    """A call of which nothing is noted afterwards, as by a kill."""
    with pytest.MonkeyPatch.context() as patch:

        def killed(call: object) -> str:
            if kind == "after":
                FakeCluster.carry_out(play.cluster, call)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        patch.setattr(play.cluster, "carry_out", killed)
        with pytest.raises(KeyboardInterrupt):
            play.controller.round()
    play.begin()


@pytest.mark.parametrize("act", ["drain", "reboot"])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_what_was_cut_off_is_settled_by_looking(play: Rehearsal, kind: str, act: str) -> None:
    if act == "reboot":
        reboot(play)
    play.incident()
    cut(play, kind)
    play.rounds(10, timedelta(seconds=20))
    unseen = act == "reboot" and kind == "before"
    assert play.statuses() == {"n1": "unclear" if unseen else "done"}
    assert len(play.cluster.calls()) == (0 if unseen else 1)


def test_what_was_only_intended_is_begun_anew(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    reboot(play)
    play.incident()
    with monkeypatch.context() as patch:
        patch.setattr(play.controller.book, "set_started", killed)
        with pytest.raises(KeyboardInterrupt):
            play.controller.round()
    play.begin()
    play.rounds(2)
    assert play.cluster.calls() == [("reboot", "n1")]
    assert [one.outcome for one in play.controller.book.intents()] == ["not done", "done"]


# Jobs -----------------------------------------------------------------------------------------------------------------


def test_a_job_is_started_again_once_without_the_nodes(play: Rehearsal) -> None:
    play.cluster.add_job("7", ["n1"])
    play.incident(ranks=(1, 2), scheduler_job="fake:7")
    play.rounds(3)
    assert play.cluster.look("n1").service == "draining"
    assert play.cluster.calls(kind="requeue") == []
    play.cluster.add_job("7", state="ended", exit_code=160)
    play.rounds(5, timedelta(seconds=10))
    assert play.cluster.calls(kind="requeue") == [("requeue", "7")]
    assert play.cluster.job("7").excluded == ("n1", "n2")
    play.cluster.add_job("7", state="ended", exit_code=160)
    play.rounds(5, timedelta(minutes=10))
    assert len(play.cluster.calls(kind="requeue")) == 1


@pytest.mark.parametrize(("exit_code", "act"), [(3, True), (0, True), (160, False)])
def test_a_job_that_needs_a_person_is_left(play: Rehearsal, exit_code: int, act: bool) -> None:
    play.begin(act=act)
    play.cluster.add_job("7", ["n1"], state="ended", exit_code=exit_code)
    play.incident(scheduler_job="fake:7")
    play.rounds(5)
    assert play.cluster.calls(kind="requeue") == []


def test_a_requeue_that_was_cut_off_is_not_repeated(play: Rehearsal) -> None:
    play.cluster.add_job("7", ["n1"], state="ended", exit_code=160)
    play.incident(scheduler_job="fake:7")
    carry_out = play.cluster.carry_out
    with pytest.MonkeyPatch.context() as patch:

        def killed(call: object) -> str:
            done = carry_out(call)  # type: ignore[arg-type]
            if "requeue" in call.words:  # type: ignore[attr-defined]
                raise KeyboardInterrupt
            return done

        patch.setattr(play.cluster, "carry_out", killed)
        with pytest.raises(KeyboardInterrupt):
            play.controller.round()
    play.begin()
    play.rounds(5, timedelta(minutes=2))
    assert len(play.cluster.calls(kind="requeue")) == 1
    assert [one.status for one in play.controller.book.requeues(waiting=False)] == ["done"]
    assert play.cluster.job("7").raw == "pending", "what the killed one had held is released"
    assert len(play.cluster.calls(kind="release")) == 1


def test_a_job_that_ran_elsewhere_is_not_this_incidents(play: Rehearsal) -> None:
    play.cluster.add_job("7", ["n3"], state="ended", exit_code=160)
    play.incident(scheduler_job="fake:7")
    play.rounds(5, timedelta(seconds=10))
    assert play.cluster.calls(kind="requeue") == []
    assert [text for text in play.trail("not requeued") if "ran on n3" in text]


def test_a_job_of_which_one_node_still_waits_is_not_started_again(play: Rehearsal) -> None:
    play.begin(nodes_per_hour=1)
    play.cluster.add_job("7", ["n1", "n2"], state="ended", exit_code=160)
    play.incident(1, ranks=(1,), scheduler_job="fake:7")
    play.incident(2, ranks=(2,), scheduler_job="fake:7")
    play.rounds(5, timedelta(seconds=10))
    assert play.cluster.calls(kind="requeue") == []
    play.clock.move(HOUR)
    play.rounds(5, timedelta(seconds=10))
    assert play.cluster.job("7").excluded == ("n1", "n2")


def test_a_job_is_started_again_without_nodes_that_others_took_out(play: Rehearsal) -> None:
    play.cluster.add_job("7", state="ended", exit_code=160)
    play.cluster.take_out("n2", "bad fan", by="anna")
    play.incident(ranks=(1, 2), scheduler_job="fake:7")
    play.rounds(3, timedelta(seconds=10))
    assert play.cluster.job("7").excluded == ("n1", "n2")


def test_what_happened_long_before_the_controller_came_is_left_to_a_person(play: Rehearsal) -> None:
    play.incident(number=1, ranks=(1,))
    play.clock.move(timedelta(days=90))
    play.incident(number=2, ranks=(2,))
    play.clock.move(timedelta(hours=23))
    play.rounds(2)
    assert play.cluster.calls() == [("drain", "n2")]
    assert play.statuses() == {"n1": "expired", "n2": "done"}


# What the hardware says later ------------------------------------------------------------------------------------------


def uncorrectable(play: Rehearsal, device: str = "GPU-n1-0", code: str = "xid:48") -> Signal:
    at = play.clock.wall.isoformat()
    return Signal("kernel", code, device, at, "memory", "strong", "as a test says", host="n1")


def test_what_is_heard_within_the_window_after_an_act_is_told(play: Rehearsal) -> None:
    play.incident()
    play.rounds(2)
    assert play.cluster.calls() == DRAINED
    play.signals = [uncorrectable(play)]
    play.rounds(3)
    assert play.trail("reconsidered") == []
    play.clock.move(play.policy.signals_after)
    play.rounds(3)
    (told,) = play.trail("reconsidered")
    assert "replace instead of drain" in told
    assert [subject for subject in play.told() if "n1 needs replace" in subject]
    assert play.cluster.calls() == DRAINED


def test_what_waits_is_proposed_anew(play: Rehearsal) -> None:
    play.begin(act=False, may=frozenset({"drain", "replace"}))
    play.incident()
    play.rounds()
    play.signals = [uncorrectable(play)]
    play.clock.move(play.policy.signals_after)
    play.rounds()
    (kept,) = play.kept("n1")
    assert (kept.proposal.action, kept.proposal.act, kept.proposal.confidence) == ("replace", "replace", "high")
    play.begin(act=True)
    play.rounds(3)
    assert play.cluster.calls() == [("replace", "n1")]


def test_a_source_that_does_not_answer_takes_nothing_back(play: Rehearsal) -> None:
    play.begin(act=False, may=frozenset({"drain", "replace"}))
    play.signals = [uncorrectable(play)]
    play.incident()
    play.rounds()
    play.signals = [no_evidence("logs", "logs:hangs", "a server hangs", host="n1")]
    play.clock.move(play.policy.signals_after)
    play.rounds(3)
    (kept,) = play.kept("n1")
    assert (kept.proposal.action, kept.proposal.confidence) == ("replace", "high")
    assert play.trail("reconsidered") == []


def test_a_source_that_had_no_time_is_asked_again(play: Rehearsal) -> None:
    said = uncorrectable(play)
    play.signals = [no_evidence("logs", "logs:later", "busy", host="n1")]
    play.incident()
    play.clock.move(HOUR)  # the window is over when it is picked up
    play.rounds(2)
    play.signals = [said]
    play.clock.move(timedelta(minutes=2))
    play.rounds()
    assert len(play.trail("reconsidered")) == 1


def test_a_second_look_names_nobody_and_acts_on_nobody(play: Rehearsal) -> None:
    play.incident(1, persistence="transient")
    play.incident(2, ranks=())
    play.rounds()
    play.signals = [uncorrectable(play)]
    play.clock.move(play.policy.signals_after)
    play.rounds(3)
    assert play.cluster.calls() == []
    assert [text for text in play.trail("reconsidered") if "re-test instead of watch" in text]
    play.clock.move(HOUR)
    play.rounds(3)
    assert len(play.trail("reconsidered")) == 1


# What others do to nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_a_node_that_is_resumed_by_hand_is_left_alone_and_said_until_it_is_cleared(play: Rehearsal, whose: str) -> None:
    if whose == "theirs":
        play.cluster.take_out("n1", "fan broken", by="kim")
    play.incident()
    play.rounds(3)
    before = play.cluster.calls()
    play.cluster.take_in("n1")
    play.rounds(40)
    assert play.cluster.calls() == before, "a person has decided"
    (told,) = [text for text in play.trail("trouble") if "n1 is in service again" in text]
    assert "bitwitness fleet clear n1" in told
    assert len([subject for subject in play.told() if "n1 is in service again" in subject]) == 1
    clear(play.state, play.cluster, "n1", "the fan was all", "kim")
    play.rounds(2)
    assert [text for text in play.trail("over") if "n1 is in service again" in text]
    assert play.cluster.calls(kind="drain") == [one for one in before if one[0] == "drain"]


def test_what_was_found_before_a_person_resumed_a_node_does_not_take_it_out_again(play: Rehearsal) -> None:
    found = play.clock.wall
    play.clock.move(timedelta(minutes=30))
    play.incident(1)
    play.rounds(2)
    play.cluster.take_in("n1")
    play.incident(2, at=found)
    play.rounds(3)
    assert play.cluster.calls() == DRAINED
    play.clock.move(HOUR)
    play.incident(3)
    play.rounds(3)
    assert play.cluster.calls() == DRAINED * 2, "what was found since does"


def test_a_clock_that_is_ahead_does_not_overrule_a_person(play: Rehearsal) -> None:
    play.incident(1)
    play.rounds(2)
    clear(play.state, play.cluster, "n1", "repaired", "kim")
    play.incident(2, at=play.clock.wall + HOUR * 2)
    play.rounds(3)
    assert play.cluster.calls(kind="drain") == DRAINED
    assert "was returned to service" in play.kept("n1")[-1].why or play.kept("n1")[-1].proposal.action == "contact"


def test_a_node_that_stays_out_is_not_spoken_of(play: Rehearsal) -> None:
    play.incident()
    play.rounds(40)
    assert play.trail("trouble") == []


def test_told_to_stop_nothing_new_is_begun(play: Rehearsal) -> None:
    stop = threading.Event()
    for number, node in enumerate((1, 2, 3)):
        play.incident(number, ranks=(node,))
    carry_out = play.cluster.carry_out

    def and_stop(call: Call) -> str:
        stop.set()
        return carry_out(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play.cluster, "carry_out", and_stop)
        play.controller.run(stop)
    assert len(play.cluster.calls(kind="drain")) == 1


def test_a_state_that_was_removed_ends_the_controller(play: Rehearsal) -> None:
    play.rounds()
    shutil.rmtree(play.folder / "state")
    with pytest.raises(RunFilesError, match="removed or replaced"):
        play.controller.run(threading.Event())
