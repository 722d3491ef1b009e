"""What every adapter must do alike: the controller knows none of them, and blames and acts the same on all.

An adapter passes by a class that inherits from `Contract` and has a fixture `bench`.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters.base import (
    Act,
    ActKind,
    Call,
    Check,
    Cluster,
    Finishing,
    Foreseeing,
    Listing,
    NodeState,
    Rehearsing,
)
from tests.fleet.clusters.bench import INCIDENT, Bench, do, drain, rest, untouched
from tests.fleet.clusters.kills import Killed, Scene, kill_at, numbered

BAD_NAMES = (
    "",
    "-n1",
    ".n1",
    "n1 n2",
    "n1\nn2",
    "n[1-3]",
    "../n1",
    "n1/status",
    "n1;reboot",
    "n1,n2",
    "n" * 300,
    "nœud",
    "n1\0",
)
REASONS = (
    "two\nlines\r\nand\ttabs",
    "\x1b[31mred\x07 \x9b \u202e turned \u2028 line",
    "Ünïcode — 数値が違う 🔥",
    "quotes ' \" and $(reboot) `reboot` ; | & \\ [anna@2026-11-29T09:00:00] Reason=none State=RESUME",
    "x" * 2000,
    "",
)
FOREIGN = (
    Call(()),
    Call(("rm", "-rf", "/")),
    Call(("drain", "n1")),
    Call(("scontrol", "shutdown")),
    Call(("GET", "http://127.0.0.1:9/")),
    Call(("PATCH", "http://127.0.0.1:9/api/v1/nodes/n1"), {"spec": {"unschedulable": True}}),
    Call(("DELETE", "/api/v1/nodes/n1")),
    Call(("sagemaker", "DeleteCluster"), {"ClusterName": "c"}),
)


class Contract:
    """The tests. `bench` is a fixture of the class that inherits."""

    # One node ---------------------------------------------------------------------------------------------------------

    def test_a_node_that_is_not_there(self, bench: Bench) -> None:
        cluster, name = bench.client(), "no-such-node"
        state = cluster.look(name)
        assert (state.node, state.service, state.ours) == (name, "absent", False)
        with untouched(bench):
            assert _planned(cluster, drain(name), state) == ()
            assert cluster.landed(drain(name), state, state) == "unknown"
            assert rest(cluster, drain(name), state) == ()

    def test_out_and_in_again(self, bench: Bench) -> None:
        cluster, node = bench.client(), bench.nodes[0]
        act, before, counted = drain(node), cluster.look(node), cluster.census()
        assert (before.service, before.ours, before.awaits) == ("in", False, "")
        assert cluster.landed(act, before, before) == "no"
        assert (counted.total, counted.out) == (len(bench.nodes), 0)
        calls = cluster.plan(act, before)
        cluster.carry_out(calls[0])
        out = cluster.look(node)
        assert out.service in ("out", "draining"), "the first call takes the node out"
        assert out.ours
        assert INCIDENT in out.reason
        assert cluster.landed(act, before, out) == "yes"
        for call in calls[1:]:
            cluster.carry_out(call)
        bench.finish()
        end = cluster.look(node)
        assert cluster.plan(act, end) == ()
        assert rest(cluster, act, end) == ()
        assert end.ours
        assert cluster.census().out == 1
        assert all(bench.client().look(other).service == "in" for other in bench.nodes[1:]), "another node was touched"
        back = Act("clear", node, "", "repaired")
        now = do(cluster, back)
        assert (now.service, now.ours) == ("in", False)
        assert cluster.landed(back, end, now) == "yes"
        assert cluster.plan(back, now) == ()
        assert rest(cluster, act, now) == rest(cluster, back, now) == ()
        assert cluster.census() == counted

    def test_what_is_left_of_a_drain_is_told_until_it_is_done(self, bench: Bench) -> None:
        cluster, act = bench.client(), drain(bench.nodes[0])
        first, *others = cluster.plan(act, cluster.look(act.node))
        if not others:
            return
        assert isinstance(cluster, Finishing), "a drain of several calls needs a rest"
        cluster.carry_out(first)
        for _ in range(20):  # each of them again from what the node shows, as after a kill
            left = cluster.rest(act, cluster.look(act.node))
            if not left:
                break
            assert all(call.repeatable for call in left)
            cluster.carry_out(left[0])
            cluster.carry_out(left[0])
            bench.finish()
        assert cluster.rest(act, cluster.look(act.node)) == ()
        once = bench.shown(act.node)
        bench.reset()
        do(bench.client(), act)
        bench.finish()
        assert bench.shown(act.node) == once

    def test_what_somebody_else_took_out_is_theirs(self, bench: Bench, tmp_path: Path) -> None:
        cluster, node = bench.client(), bench.nodes[0]
        before = cluster.look(node)
        bench.take_out(node)
        theirs = cluster.look(node)
        assert theirs.service in ("out", "draining")
        assert not theirs.ours
        with untouched(bench):
            assert _planned(cluster, drain(node), theirs) == ()
            assert rest(cluster, drain(node), theirs) == ()
            assert _planned(cluster, Act("clear", node, "", "repaired"), theirs) == ()
            with Scene(bench, tmp_path) as scene:
                with pytest.raises(ConfigurationError, match="not by bitwitness"):
                    clear(scene.state, cluster, node, "repaired", "kim@head")
                scene.incident(node)
                scene.rounds()
                assert scene.stands() == [("held", "not-ours")]
        assert cluster.landed(drain(node), before, theirs) == "yes"

    def test_a_node_that_a_person_has_returned_is_in(self, bench: Bench) -> None:
        cluster, act = bench.client(), drain(bench.nodes[0])
        do(cluster, act)
        bench.take_in(act.node)
        now = cluster.look(act.node)
        assert (now.service, now.ours) == ("in", False)
        assert rest(cluster, act, now) == ()

    def test_census_counts_whoever_is_out(self, bench: Bench) -> None:
        cluster = bench.client()
        total = cluster.census().total
        bench.take_out(bench.nodes[1])
        assert (cluster.census().total, cluster.census().out) == (total, 1)
        do(cluster, drain(bench.nodes[0]))
        assert (cluster.census().total, cluster.census().out) == (total, 2)

    # What is planned and called ---------------------------------------------------------------------------------------

    def test_a_plan_is_pure(self, bench: Bench) -> None:
        cluster, other, node = bench.client(), bench.client(), bench.nodes[0]
        before = cluster.look(node)
        do(cluster, drain(node))
        after = cluster.look(node)
        other.look(node)
        acts = [
            drain(node),
            Act("clear", node, "", "repaired"),
            *(Act(kind, node, INCIDENT, "x") for kind in _severe(cluster)),
        ]
        asked = bench.traffic()
        for act in acts:
            for state in (before, after):
                assert _planned(cluster, act, state) == _planned(other, act, state) == _planned(cluster, act, state)
                assert rest(cluster, act, state) == rest(other, act, state)
            assert cluster.landed(act, before, after) == other.landed(act, before, after)
        assert bench.traffic() == asked, "planning asked the cluster"

    def test_what_may_be_called_twice(self, bench: Bench) -> None:
        cluster, node = bench.client(), bench.nodes[0]
        state = cluster.look(node)
        assert all(call.repeatable for call in cluster.plan(drain(node), state))
        if "reboot" in cluster.acts:
            calls = cluster.plan(Act("reboot", node, INCIDENT, "x"), state)
            assert [call.repeatable for call in calls] == [True] * (len(calls) - 1) + [False]
        out = do(cluster, drain(node))
        assert all(call.repeatable for call in cluster.plan(Act("clear", node, "", "x"), out))

    def test_a_plan_survives_being_written_down(self, bench: Bench) -> None:
        """After a kill, the next process has of the node what was written as JSON."""
        cluster, node = bench.client(), bench.nodes[0]
        state = cluster.look(node)
        assert json.loads(json.dumps(dict(state.more))) == dict(state.more)
        assert len(json.dumps(dict(state.more))) < 20_000

    @pytest.mark.parametrize("call", FOREIGN, ids=str)
    def test_no_other_call_is_made(self, bench: Bench, call: Call) -> None:
        with untouched(bench), pytest.raises((ClusterError, ConfigurationError)):
            bench.client().carry_out(call)

    @pytest.mark.parametrize("number", range(len(BAD_NAMES)))
    def test_no_other_name_reaches_the_cluster(self, bench: Bench, number: int) -> None:
        cluster, name = bench.client(), BAD_NAMES[number]
        seen, asked = cluster.look(bench.nodes[0]), bench.traffic()
        with pytest.raises(ConfigurationError):
            cluster.plan(drain(name), NodeState(name, "in"))
        with pytest.raises(ConfigurationError):
            cluster.plan(drain(name), seen)
        try:
            assert cluster.look(name).service == "absent"
        except ConfigurationError:
            assert bench.traffic() == asked

    @pytest.mark.parametrize("number", range(len(REASONS)))
    def test_a_reason_stays_one_safe_line(self, bench: Bench, number: int) -> None:
        cluster, act = bench.client(), drain(bench.nodes[0], REASONS[number])
        for call in cluster.plan(act, cluster.look(act.node)):
            assert not [word for word in call.words if _controls(word)]
        now = do(cluster, act)
        assert now.ours, now.reason
        assert now.reason.startswith(act.tag)
        assert not _controls(now.reason)
        assert len(now.reason) <= 1100
        assert now.service in ("out", "draining")
        assert all(cluster.look(other).service == "in" for other in bench.nodes[1:])

    # What goes wrong --------------------------------------------------------------------------------------------------

    def test_a_cluster_that_does_not_answer(self, bench: Bench, tmp_path: Path) -> None:
        cluster, node = bench.client(), bench.nodes[0]
        calls = cluster.plan(drain(node), cluster.look(node))
        job = bench.job("running")
        bench.unreachable(True)
        asks: list[Callable[[], object]] = [
            lambda: cluster.look(node),
            cluster.census,
            lambda: cluster.carry_out(calls[0]),
        ]
        for ask in asks + ([lambda: cluster.job(job)] if job else []):
            with pytest.raises(ClusterError):
                ask()
        with Scene(bench, tmp_path) as scene:
            scene.incident(node)
            scene.rounds(2)
            assert scene.stands() == [("held", "cluster")]
            bench.unreachable(False)
            assert bench.client().look(node).service == "in"
            scene.rounds(3)
            assert scene.stands() == [("done", "")]
        assert bench.client().look(node).ours

    def test_a_cluster_that_refuses_is_told_and_asked_again(self, bench: Bench, tmp_path: Path) -> None:
        node = bench.nodes[0]
        bench.refuse(True)
        cluster = bench.client()
        with untouched(bench), Scene(bench, tmp_path) as scene:
            with pytest.raises(ClusterError) as caught:
                cluster.carry_out(cluster.plan(drain(node), cluster.look(node))[0])
            assert "\n" not in str(caught.value)
            scene.incident(node)
            scene.rounds(2)
            assert scene.stands() == [("failed", "")]
            assert any("FAILED" in subject for subject in scene.told())
        with Scene(bench, tmp_path) as scene:
            bench.refuse(False)
            scene.rounds(3, apart=120)
            assert scene.stands() == [("done", "")]

    @pytest.mark.parametrize("kind", ["drain", "reboot", "replace"])
    def test_no_act_on_what_has_changed_meanwhile(self, bench: Bench, tmp_path: Path, kind: str) -> None:
        with Scene(bench, tmp_path) as scene:
            scene.incident(bench.nodes[0], kind)
            scene.before_look(2, lambda: bench.take_out(bench.nodes[0]))
            scene.rounds(1)
            shown = bench.shown(bench.nodes[0])
            scene.rounds(3)
            assert scene.stands() == [("held", "not-ours")]
        assert bench.shown(bench.nodes[0]) == shown
        assert not bench.client().look(bench.nodes[0]).ours
        assert not bench.changes()

    # Jobs -------------------------------------------------------------------------------------------------------------

    def test_jobs(self, bench: Bench) -> None:
        absent, running = bench.job("absent"), bench.job("running")
        if absent is None or running is None:
            return
        cluster = bench.client()
        assert cluster.job(absent).state == "absent"
        now = cluster.job(running)
        assert (now.state, now.nodes) == ("running", (bench.nodes[1],))
        with untouched(bench):
            _not_requeued(cluster, running, bench.nodes[1])
            _not_requeued(cluster, absent, bench.nodes[1])
        ended = bench.job("ended")
        assert ended is not None
        assert cluster.job(ended).state == "ended"

    # Rehearsals -------------------------------------------------------------------------------------------------------

    def test_what_is_tried_beforehand_changes_nothing(self, bench: Bench) -> None:
        cluster, node, job = bench.client(), bench.nodes[0], bench.job("running")
        if not isinstance(cluster, Rehearsing):
            return
        state = cluster.look(node)
        with untouched(bench):
            for kind in sorted(cluster.acts - {"clear"}):
                act = Act(kind, node, INCIDENT, "wrong numbers")
                calls = cluster.plan(act, state)
                assert cluster.check(act, state, calls)
                if isinstance(cluster, Foreseeing):
                    self._foreseen(cluster, act, state)
            absent = cluster.look("no-such-node")
            assert _outcomes(cluster.check(drain(absent.node), absent, ())) <= {"good", "bad", "unknown"}
            if job:
                assert cluster.check_job(job)
        if isinstance(cluster, Listing):
            assert set(cluster.nodes()) == set(bench.nodes)
        bench.unreachable(True)
        try:
            outcomes = _outcomes(cluster.check(drain(node), state, cluster.plan(drain(node), state)))
        except ClusterError:
            outcomes = {"unknown"}
        assert outcomes - {"good"} or bench.traffic() == 0, "all is good, they say, on a cluster that does not answer"

    def _foreseen(self, cluster: Cluster, act: Act, state: NodeState) -> None:
        """What is foreseen is a node of ours, that can be returned."""
        assert isinstance(cluster, Foreseeing)
        after, back = cluster.foreseen(act, state), Act("clear", act.node, "", "repaired")
        assert after.service in ("out", "draining") or act.kind != "drain"
        assert cluster.landed(act, state, after) == "yes" or act.kind != "drain"
        assert rest(cluster, act, after) == ()
        assert cluster.plan(back, after)
        assert cluster.foreseen(back, after).service == "in"

    # Kills ------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["drain", "reboot", "replace"])
    def test_killed_between_any_two_calls(self, bench: Bench, tmp_path: Path, kind: str) -> None:
        if kind not in bench.client().acts:
            return
        node = bench.nodes[0]
        with Scene(bench, tmp_path / "whole") as scene:
            scene.incident(node, kind)
            calls = kill_at(scene, "never", 0)
            scene.later()
            assert scene.stands() == [("done", "")], scene.why()
            assert scene.acted() == [kind]
        want, made = bench.shown(node), _once(bench)
        assert calls >= 1
        assert all(count == 1 for count in made.values()), made
        for when, number in numbered(calls):
            bench.reset()
            with Scene(bench, tmp_path / f"{when}-{number}") as scene:
                scene.incident(node, kind)
                with pytest.raises(Killed):
                    kill_at(scene, when, number)
                scene.again()
                scene.later()
                ((status, _),) = scene.stands()
                again = _once(bench)
                assert all(count <= 1 for count in again.values()), f"{when} call {number}: twice: {again}"
                if when == "before" and not scene.last.repeatable:
                    # It may have happened, and nobody can tell: a person is asked, and nothing is done a second time.
                    assert status == "unclear", f"{when} call {number}: {status}, {scene.why()}"
                    continue
                assert status in ("done", "already out"), f"{when} call {number}: {status}, {scene.why()}"
                assert bench.shown(node) == want, f"{when} call {number}"
                assert again == made, f"{when} call {number}"
            assert all(bench.client().look(other).service == "in" for other in bench.nodes[1:])

    def test_a_return_that_is_killed_between_any_two_calls(self, bench: Bench, tmp_path: Path) -> None:
        node = bench.nodes[0]
        want, calls = self._returned(bench, tmp_path / "whole", "never", 0)
        for when, number in numbered(calls):
            bench.reset()
            assert self._returned(bench, tmp_path / f"{when}-{number}", when, number)[0] == want, (
                f"{when} call {number}"
            )
            assert bench.client().look(node).service == "in"

    def _returned(self, bench: Bench, folder: Path, when: str, number: int) -> tuple[object, int]:
        """A drain, and a person who returns the node, and is killed at a call; what it shows then, and how many calls it were."""
        node = bench.nodes[0]
        with Scene(bench, folder) as scene:
            scene.incident(node)
            scene.rounds()
            scene.later()
            assert scene.stands() == [("done", "")]
            calls = 0
            try:
                calls = kill_at(
                    scene, when, number, lambda cluster: clear(scene.state, cluster, node, "repaired", "kim@head")
                )
            except Killed:
                scene.again()
                clear(scene.state, scene.cluster, node, "repaired", "kim@head")
            scene.later()
            assert scene.stands() == [("done", "")], "the node that a person has returned was acted upon"
        return bench.shown(node), calls


def _planned(cluster: Cluster, act: Act, state: NodeState) -> tuple[Call, ...]:
    """The calls of an act; none where the cluster says that there are to be none."""
    try:
        return cluster.plan(act, state)
    except ConfigurationError:
        return ()


def _severe(cluster: Cluster) -> list[ActKind]:
    return sorted(cluster.acts & {"reboot", "replace"})


def _not_requeued(cluster: Cluster, job: str, node: str) -> None:
    """Neither one that runs nor one that is gone is started a second time."""
    try:
        calls = cluster.plan_requeue(cluster.job(job), [node])
    except ConfigurationError:
        calls = ()
    assert calls == ()


def _outcomes(found: Sequence[Check]) -> set[str]:
    assert all(one.what and one.text for one in found)
    return {one.outcome for one in found}


def _controls(text: str) -> list[str]:
    return [char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")]


def _once(bench: Bench) -> Counter[tuple[str, str]]:
    return Counter(one for one in bench.changes() if one[0] in bench.once)
