"""Two controllers on one cluster, and what is left of an act when its node is out already."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.clusters.base import Act, Call, Census, NodeState
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.view import report
from tests.fleet.rehearsal import NODES, HandClock, Rehearsal

MINUTE = timedelta(minutes=1)


class LedCluster(FakeCluster):
    """A cluster with a lease, of which a test says who has it."""

    holder, resigned, away = "", 0, False

    def leader(self) -> str:
        if self.away:
            raise ClusterError("the lease cannot be read, as it was told")
        return self.holder

    def resign(self) -> None:
        self.resigned += 1


def begin_on(play: Rehearsal, cluster: FakeCluster) -> None:
    play.cluster = cluster
    play.begin()


def test_who_does_not_lead_does_nothing_until_it_does(play: Rehearsal) -> None:
    cluster = LedCluster(NODES, play.folder / "led.json", clock=play.clock.now)
    cluster.holder = "bitwitness-fleet-7d9f"
    begin_on(play, cluster)
    play.incident()
    play.rounds(5, MINUTE)
    assert cluster.calls() == []
    assert play.kept() == []
    assert play.told() == []
    assert len(play.trail("stands by")) == 1
    assert "bitwitness-fleet-7d9f leads" in report(play.state).text
    cluster.away = True  # nobody can say: it is as it was
    play.rounds(2)
    assert play.told() == []
    cluster.away = False
    cluster.holder = ""
    play.rounds(2)
    assert cluster.calls() == [("drain", "n1")]
    assert "leads" not in report(play.state).text
    play.controller.close()
    assert cluster.resigned == 1


def test_who_only_observes_needs_no_lead(play: Rehearsal) -> None:
    cluster = LedCluster(NODES, play.folder / "led.json", clock=play.clock.now)
    cluster.holder = "another"
    play.cluster = cluster
    play.begin(act=False)
    play.incident()
    play.rounds(2)
    assert play.statuses() == {"n1": "observed"}


def test_a_cluster_that_is_away_keeps_nobody_from_telling(play: Rehearsal) -> None:
    cluster = LedCluster(NODES, play.folder / "led.json", clock=play.clock.now)
    begin_on(play, cluster)
    cluster.away = True
    cluster.unreachable()
    play.incident()
    play.rounds(10, MINUTE)
    assert play.statuses() == {"n1": "held"}
    assert any("n1" in one for one in play.told())
    assert [text for text in play.trail("trouble") if "who leads cannot be told" in text]
    cluster.away = False
    cluster.unreachable(False)
    play.rounds(3, MINUTE)
    assert cluster.calls() == [("drain", "n1")]


class Dies(BaseException):
    """Ends the controller in the middle of an act, as a kill does."""


class DyingCluster(FakeCluster):
    """A cluster whose caller dies at a call."""

    dies_at, dies_after = 0, False

    def carry_out(self, call: Call) -> str:
        self.dies_at -= 1
        if self.dies_at == 0 and not self.dies_after:
            raise Dies
        said = super().carry_out(call)
        if self.dies_at == 0:
            raise Dies
        return said


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_drain_of_three_calls_that_is_cut_off_ends_complete(play: Rehearsal, call: int, after: bool) -> None:
    cluster = DyingCluster(NODES, play.folder / "steps.json", clock=play.clock.now, steps=3)
    begin_on(play, cluster)
    play.incident()
    cluster.dies_at, cluster.dies_after = call, after
    with pytest.raises(Dies):
        play.rounds()
    play.begin()
    play.rounds(6, MINUTE)
    state = cluster.look("n1")
    assert state.service == "out"
    assert cluster.rest(Act("drain", "n1", "x", "y"), state) == ()
    assert play.statuses() == {"n1": "done"}
    assert len(cluster.calls("n1", "drain")) == 1


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_replacement_whose_last_call_was_not_begun_is_carried_on_with(play: Rehearsal, call: int) -> None:
    cluster = DyingCluster(NODES, play.folder / "steps.json", clock=play.clock.now, steps=3)
    begin_replacing(play, cluster)
    cluster.dies_at = call
    with pytest.raises(Dies):
        play.rounds()
    play.begin()
    play.rounds(6, MINUTE)
    assert play.statuses() == {"n1": "done"}
    assert cluster.calls("n1", "replace") == [("replace", "n1")]


@pytest.mark.parametrize(("after", "calls", "status"), [(False, 0, "unclear"), (True, 1, "done")])
def test_a_replacement_that_was_begun_is_not_asked_for_again(
    play: Rehearsal, after: bool, calls: int, status: str
) -> None:
    cluster = DyingCluster(NODES, play.folder / "steps.json", clock=play.clock.now, steps=3)
    begin_replacing(play, cluster)
    cluster.dies_at, cluster.dies_after = 4, after
    with pytest.raises(Dies):
        play.rounds()
    play.begin()
    play.rounds(12, 10 * MINUTE)
    assert len(cluster.calls("n1", "replace")) == calls
    assert play.statuses() == {"n1": status}


def begin_replacing(play: Rehearsal, cluster: FakeCluster) -> None:
    play.cluster = cluster
    play.begin(may=frozenset({"drain", "replace"}))
    at = play.clock.wall.isoformat()
    play.signals = [Signal("kernel", "xid:48", "GPU-n1-0", at, "memory", "strong", "as a test says", host="n1")]
    play.incident(scheduler_job="fake:7")


class Stubborn(FakeCluster):
    """A cluster that refuses the last step, as a budget for disruptions does."""

    refusing = True

    def carry_out(self, call: Call) -> str:
        if "mark" in call.words and "3" in call.words and self.refusing:
            raise ClusterError("429: a disruption budget lets no pod go, as it was told")
        return super().carry_out(call)


def test_what_is_refused_for_a_while_is_told_and_brought_to_its_end(play: Rehearsal) -> None:
    cluster = Stubborn(NODES, play.folder / "steps.json", clock=play.clock.now, steps=4)
    begin_on(play, cluster)
    play.incident()
    play.rounds(2)
    assert play.statuses() == {"n1": "done"}  # the node is out, which is what counts
    assert len(cluster.calls("n1", "mark")) == 2  # the second and the fourth step
    assert not any("FAILED" in one for one in play.told())
    play.rounds(3, MINUTE)
    assert troubles(play) == []
    play.rounds(6, MINUTE)
    (text,) = troubles(play)
    assert "n1 is out of service, and not all" in text
    assert "disruption budget" in text
    cluster.refusing = False
    play.rounds(3, MINUTE)
    assert troubles(play) == []
    assert cluster.look("n1").more["marks"]
    assert play.state.said("told:rest:")  # nobody asks any more what is left


def troubles(play: Rehearsal) -> list[str]:
    return [text for key, (text, _) in play.state.said().items() if key.startswith("rest:")]


def test_what_a_person_returns_is_not_finished(play: Rehearsal) -> None:
    cluster = Stubborn(NODES, play.folder / "steps.json", clock=play.clock.now, steps=3)
    begin_on(play, cluster)
    play.incident()
    play.rounds(2)
    cluster.take_in("n1")
    cluster.refusing = False
    play.rounds(5, MINUTE)
    assert len(cluster.calls("n1", "mark")) == 1  # the second step, before


@pytest.mark.parametrize(("refused", "calls", "status"), [(True, 2, "done"), (False, 1, "unclear")])
def test_what_must_not_be_done_twice_is_asked_again_only_where_it_was_refused(
    play: Rehearsal, refused: bool, calls: int, status: str
) -> None:
    class Refusing(FakeCluster):
        asked = 0

        def carry_out(self, call: Call) -> str:
            if "replace" in call.words:
                self.asked += 1
                if self.asked == 1:
                    raise ClusterError("throttled" if refused else "no answer in time", refused=refused)
            return super().carry_out(call)

    cluster = Refusing(NODES, play.folder / "refusing.json", clock=play.clock.now, steps=2)
    cluster.add_job("7", ["n1", "n2"], state="ended", exit_code=160)
    begin_replacing(play, cluster)
    play.rounds()
    # The node takes no jobs, which is what its job and whoever has the device next have waited for.
    assert [one.device for one in play.controller.book.condemned()] == ["GPU-n1-0"]
    play.rounds(3, MINUTE)
    assert cluster.calls(kind="requeue") == [("requeue", "7")]
    assert cluster.asked == calls
    play.rounds(10, 10 * MINUTE)
    assert cluster.asked == calls
    assert play.statuses() == {"n1": status}


def test_a_job_that_restarted_by_itself_goes_on(tmp_path: Path, play: Rehearsal) -> None:
    play.cluster.add_job("7", ["n0", "n2"])
    play.incident(scheduler_job="fake:7")
    play.rounds(3, MINUTE)
    assert play.controller.book.requeues()  # its other ranks may only be slow to end
    play.rounds(5, MINUTE)
    (row,) = play.controller.book.requeues(waiting=False)
    assert row.status == "done"
    assert "runs on without n1" in row.why
    assert play.cluster.calls(kind="requeue") == []


def test_a_node_whose_replacement_is_refused_can_be_returned(play: Rehearsal) -> None:
    class Refusing(FakeCluster):
        def carry_out(self, call: Call) -> str:
            if "replace" in call.words:
                raise ClusterError("not allowed", refused=True)
            return super().carry_out(call)

    cluster = Refusing(NODES, play.folder / "refusing.json", clock=play.clock.now, steps=2)
    begin_replacing(play, cluster)
    play.rounds(10, MINUTE)
    assert play.statuses() == {"n1": "failed"}
    clear(play.state, cluster, "n1", "the vendor has looked at it", "kim@head")
    play.rounds(10, MINUTE)
    assert play.statuses() == {"n1": "cleared"}
    assert cluster.look("n1").service == "in"


def test_a_plan_that_cannot_be_made_any_more_is_told_at_once(play: Rehearsal) -> None:
    class Changing(FakeCluster):
        planned = 0

        def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
            self.planned += act.kind == "drain"
            if self.planned > 2:
                raise ConfigurationError("it is another machine by now")
            return super().plan(act, state)

        def carry_out(self, call: Call) -> str:
            raise ClusterError("no answer in time")

    play.cluster = Changing(NODES, play.folder / "changing.json", clock=play.clock.now)
    play.begin()
    play.incident()
    play.rounds(6, MINUTE)
    (kept,) = play.kept("n1")
    assert (kept.status, kept.final) == ("held", True)
    assert "another machine" in kept.why


def test_who_is_returned_while_what_is_left_is_done_stays_returned(play: Rehearsal) -> None:
    cluster = Stubborn(NODES, play.folder / "steps.json", clock=play.clock.now, steps=4)
    begin_on(play, cluster)
    play.incident()
    play.rounds(2)
    cluster.refusing = False
    rest = cluster.rest

    def interrupted(act: Act, now: NodeState) -> tuple[Call, ...]:
        calls = rest(act, now)
        if calls:
            clear(play.state, cluster, "n1", "replaced the GPU", "kim@head")
        return calls

    cluster.rest = interrupted  # type: ignore[method-assign]
    before = len(cluster.calls("n1", "mark"))
    play.rounds(5, MINUTE)
    assert len(cluster.calls("n1", "mark")) == before


def test_a_node_that_is_returned_between_two_calls_is_left_alone(play: Rehearsal) -> None:
    class Returned(FakeCluster):
        """A person returns the node as soon as it is out, and knows nothing of bitwitness."""

        def carry_out(self, call: Call) -> str:
            said = super().carry_out(call)
            if "drain" in call.words:
                self.take_in("n1")
            return said

    cluster = Returned(NODES, play.folder / "returned.json", clock=play.clock.now, steps=4)
    begin_replacing(play, cluster)
    play.rounds(1)
    assert cluster.calls("n1") == [("drain", "n1")]


def test_an_act_of_many_slow_calls_is_spread_over_rounds(play: Rehearsal) -> None:
    class Slow(FakeCluster):
        def carry_out(self, call: Call) -> str:
            said = super().carry_out(call)
            play.clock.passed += 40.0
            return said

    cluster = Slow(NODES, play.folder / "slow.json", clock=play.clock.now, steps=4)
    begin_on(play, cluster)
    play.incident()
    play.rounds()
    assert len(cluster.calls("n1")) == 1  # what a round may take is over
    play.rounds(5, timedelta(seconds=2))
    assert len(cluster.calls("n1")) == 4  # and each of the next does some more, without waiting for a minute
    assert play.statuses() == {"n1": "done"}


def test_what_is_held_by_the_hour_needs_no_count(play: Rehearsal) -> None:
    class Counted(FakeCluster):
        counts = 0

        def census(self) -> Census:
            self.counts += 1
            play.clock.passed += 2.0  # as it takes with ten thousand nodes
            return super().census()

    cluster = Counted(NODES, play.folder / "counted.json", clock=play.clock.now)
    play.cluster = cluster
    play.begin(nodes_per_hour=1, cluster_share=0.5)
    play.incident(1, [1])
    play.incident(2, [2])
    play.rounds(1)
    before = cluster.counts
    play.rounds(30)
    assert cluster.counts == before
    cluster.take_out("n3", "fan broken")
    play.clock.move(timedelta(hours=1))
    play.rounds(15)  # held by the share now, which has to be counted, and not in each round
    assert before < cluster.counts <= before + 3
    cluster.take_in("n3")
    play.rounds(30)
    assert cluster.calls(kind="drain") == [("drain", "n1"), ("drain", "n2")]


@pytest.mark.parametrize("refused", [True, False])
def test_a_node_that_a_person_returns_while_its_replacement_is_refused_stays_in(play: Rehearsal, refused: bool) -> None:
    class Refusing(FakeCluster):
        asked = 0

        def carry_out(self, call: Call) -> str:
            if "replace" in call.words:
                self.asked += 1
                raise ClusterError("throttled", refused=refused)
            return super().carry_out(call)

    cluster = Refusing(NODES, play.folder / "refusing.json", clock=play.clock.now, steps=2)
    begin_replacing(play, cluster)
    play.rounds(2)
    cluster.take_in("n1")
    play.rounds(20, 10 * MINUTE)
    assert cluster.asked == 1
    assert cluster.calls("n1", "drain") == [("drain", "n1")]
    assert cluster.look("n1").service == "in"
    assert [text for text in play.trail("trouble") if "n1 is in service again" in text]


def test_a_replacement_that_cannot_be_planned_drains(play: Rehearsal) -> None:
    class Ambiguous(FakeCluster):
        def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
            if act.kind == "replace":
                raise ConfigurationError("two machines are called n1")
            return super().plan(act, state)

    begin_replacing(play, Ambiguous(NODES, play.folder / "ambiguous.json", clock=play.clock.now))
    play.rounds(2)
    assert play.statuses() == {"n1": "done"}
    assert play.cluster.calls("n1") == [("drain", "n1")]
    assert any("two machines" in text for text in play.trail("intent"))


def test_each_gets_its_turn_where_looking_is_slow(tmp_path: Path) -> None:
    class Slow(FakeCluster):
        clock: HandClock

        def look(self, node: str) -> NodeState:
            self.clock.passed += 2.0
            return super().look(node)

        def carry_out(self, call: Call) -> str:
            if "mark" in call.words:
                raise ClusterError("not yet, as it was told")
            return super().carry_out(call)

    nodes = [f"n{number}" for number in range(24)]
    play = Rehearsal(tmp_path, nodes)
    cluster = Slow(nodes, tmp_path / "slow.json", clock=play.clock.now, steps=2)
    cluster.clock = play.clock
    begin_on(play, cluster)
    for number in range(20):
        play.incident(number, [number])
    play.rounds(60, timedelta(seconds=10))
    asked = {node for kind, node in cluster.calls() if kind == "drain"}
    assert len(asked) == 20
    told = {text.partition(" ")[0] for text in troubles(play)}
    assert told == asked
    play.rounds(40, timedelta(hours=1))
    assert troubles(play) == []
    assert len(play.trail("given up")) == 20
    assert any("not all was done" in subject for subject in play.told())
    play.end()
