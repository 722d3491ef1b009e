"""The quarantines of runs as a cluster, a rehearsed one, the fake one, and how a policy names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.clusters import Act, Call, Census, Cluster, FakeCluster
from bitwitness.fleet.clusters.base import NodeState
from bitwitness.fleet.clusters.local import LocalCluster
from bitwitness.fleet.clusters.rehearsed import Rehearsed
from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.state import State
from bitwitness.runfiles import RunFiles
from tests.fleet.incidents import incident_id, topology, write
from tests.fleet.rehearsal import ACT

ID = incident_id(1)
DRAIN = Act("drain", "n1", ID, "computes wrongly", ("GPU-n1-0",))
CLEAR = Act("clear", "n1", "", "repaired")


def run_of(path: Path, *nodes: str) -> RunFiles:
    files = RunFiles(path).create()
    files.write_run({"placement": topology(nodes).to_json(), "started": "2026-11-29T10:00:00Z"})
    return files


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    return run_of(tmp_path / "run", "n0", "n1", "n2")


def do(cluster: Cluster, act: Act) -> list[Call]:
    """Plan an act and carry it out."""
    calls = cluster.plan(act, cluster.look(act.node))
    for call in calls:
        cluster.carry_out(call)
    return list(calls)


def test_draining_denies_the_devices_and_clearing_lets_them_join(run: RunFiles) -> None:
    cluster = LocalCluster([run.path])
    before = cluster.look("n1")
    assert (before.service, cluster.census()) == ("in", Census(3, 0))
    (call,) = do(cluster, DRAIN)
    assert call.words[:4] == ("bitwitness", "quarantine", "add", str(run.path))
    held = run.quarantine.read()
    assert held.denied_devices["GPU-n1-0"].incident == ID
    assert held.denied_devices["GPU-n1-0"].node == "n1"
    now = cluster.look("n1")
    assert (now.service, now.ours, cluster.landed(DRAIN, before, now)) == ("out", True, "yes")
    assert cluster.census() == Census(3, 1)
    assert cluster.plan(DRAIN, now) == ()
    do(cluster, CLEAR)
    assert run.quarantine.read().names() == []
    assert cluster.landed(CLEAR, now, cluster.look("n1")) == "yes"
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "no"


def test_an_act_without_devices_denies_the_node(run: RunFiles) -> None:
    cluster = LocalCluster([run.path])
    do(cluster, replace(DRAIN, devices=()))
    assert list(run.quarantine.read().denied_nodes) == ["n1"]
    assert cluster.look("n1").ours


def test_what_the_supervisor_denied_is_ours_and_what_a_person_denied_is_not(run: RunFiles) -> None:
    cluster = LocalCluster([run.path])
    run.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="persistent corruption", incident=ID)
    assert (cluster.look("n1").service, cluster.look("n1").ours) == ("out", True)
    run.quarantine.deny_node("n2", reason="fan broken")
    state = cluster.look("n2")
    assert (state.service, state.ours, state.reason) == ("out", False, "fan broken")


def test_a_device_that_was_denied_elsewhere_counts_where_it_is(run: RunFiles) -> None:
    run.quarantine.deny_devices(["GPU-n2-1"], node="", reason="by hand")
    assert LocalCluster([run.path]).look("n2").service == "out"


def test_a_node_is_out_when_every_run_with_it_denies_it(tmp_path: Path, run: RunFiles) -> None:
    other, without = run_of(tmp_path / "more" / "other", "n1", "n5"), run_of(tmp_path / "more" / "without", "n9")
    cluster = LocalCluster([run.path], [tmp_path / "more"])
    run.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="persistent", incident=ID)
    assert cluster.look("n1").service == "in"
    (call,) = do(cluster, DRAIN)
    assert str(other.path) in call.words
    assert cluster.look("n1").service == "out"
    assert without.quarantine.read().names() == []
    assert cluster.census() == Census(5, 1)
    assert len(do(cluster, CLEAR)) == 2


def test_what_a_quarantine_cannot_do(run: RunFiles) -> None:
    cluster = LocalCluster([run.path])
    assert cluster.look("n7").service == "absent"
    assert cluster.job("7").state == "absent"
    assert cluster.plan_requeue(cluster.job("7"), ["n1"]) == ()
    for act, match in ((replace(DRAIN, kind="reboot"), "cannot reboot"), (replace(DRAIN, node="-x"), "no name")):
        with pytest.raises(ConfigurationError, match=match):
            cluster.plan(act, cluster.look("n1"))


def damaged_quarantine(run: RunFiles) -> None:
    (run.path / "quarantine.json").write_text("{")


def damaged_run(run: RunFiles) -> None:
    (run.path / "run.json").write_text("{")


@pytest.mark.parametrize("damage", [damaged_quarantine, damaged_run])
def test_what_cannot_be_read_is_an_error_and_no_empty_cluster(
    run: RunFiles, damage: Callable[[RunFiles], None]
) -> None:
    cluster = LocalCluster([run.path])
    calls = cluster.plan(DRAIN, cluster.look("n1"))
    damage(run)
    for ask in (lambda: cluster.look("n1"), cluster.census):
        with pytest.raises(ClusterError):
            ask()
    if damage is damaged_quarantine:
        with pytest.raises(ClusterError):
            cluster.carry_out(calls[0])


@pytest.mark.parametrize("damage", [damaged_quarantine, damaged_run])
def test_another_run_that_cannot_be_read_holds_nobody(
    tmp_path: Path, run: RunFiles, damage: Callable[[RunFiles], None]
) -> None:
    old = run_of(tmp_path / "old", "n1", "n8")
    write(run.path, where=topology(("n0", "n1", "n2")), at=datetime.now(UTC))
    damage(old)
    cluster = LocalCluster([run.path, old.path])
    assert (cluster.look("n1").service, cluster.census()) == ("in", Census(3, 0))
    with pytest.raises(ClusterError):
        cluster.look("n8")
    with State(tmp_path / "state") as state:
        controller = Controller([run.path, old.path], state, cluster, ACT, read_signals=lambda _: ())
        for _ in range(3):
            controller.round()
        assert [one.status for one in controller.book.proposals()] == ["done"]
        troubles = [one.text for one in state.history(what="trouble")]
        assert [str(old.path) in text for text in troubles] == [True] * (2 if damage is damaged_run else 1)
        for path in (old.path / "run.json", old.path / "quarantine.json"):
            path.unlink(missing_ok=True)
        controller.round()
        assert len(state.history(what="over")) == len(troubles)
        controller.close()


def test_the_run_of_the_incident_must_be_readable(tmp_path: Path, run: RunFiles) -> None:
    other = run_of(tmp_path / "other", "n1")
    write(run.path, where=topology(("n0", "n1", "n2")), at=datetime.now(UTC))
    (name,) = [path.name for path in run.incidents()]
    damaged_quarantine(run)
    cluster = LocalCluster([run.path, other.path])
    with pytest.raises(ClusterError):
        cluster.plan(replace(DRAIN, incident=name), cluster.look("n1"))
    assert other.quarantine.read().names() == []


def test_what_a_person_denied_in_an_old_run_neither_holds_nor_is_returned(tmp_path: Path, run: RunFiles) -> None:
    old = run_of(tmp_path / "old", "n1")
    old.quarantine.deny_node("n1", reason="fan broken")
    cluster = LocalCluster([run.path, old.path])
    assert cluster.look("n1").service == "in"
    (call,) = do(cluster, DRAIN)
    assert str(run.path) in call.words
    assert cluster.look("n1").ours
    assert len(cluster.plan(CLEAR, cluster.look("n1"))) == 1
    do(cluster, CLEAR)
    assert old.quarantine.read().names() == ["n1"]
    assert run.quarantine.read().names() == []


def test_a_controller_with_the_quarantine_as_its_cluster(tmp_path: Path, run: RunFiles) -> None:
    write(run.path, where=topology(("n0", "n1", "n2")), at=datetime.now(UTC))
    with State(tmp_path / "state") as state:
        policy = replace(ACT, cluster={"kind": "local"})
        controller = Controller([run.path], state, cluster_of(policy, [run.path]), policy, read_signals=lambda _: ())
        controller.round()
        controller.round()
        assert list(run.quarantine.read().denied_devices) == ["GPU-n1-0"]
        assert [one.status for one in controller.book.proposals()] == ["done"]
        controller.close()


def spare_took_over(run: RunFiles) -> None:
    """A device of n1 is out, and n3 has taken its place."""
    run.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="persistent corruption", incident=ID)
    run.write_run({"placement": topology(("n0", "n2", "n3")).to_json(), "started": "2026-11-29T10:00:00Z"})


def test_a_node_whose_place_a_spare_has_taken_is_returned_and_who_asked_is_on_record(
    tmp_path: Path, run: RunFiles
) -> None:
    spare_took_over(run)
    cluster = LocalCluster([run.path])
    assert cluster.look("n1").service == "out"
    with State(tmp_path / "state") as state:
        done = clear(state, cluster, "n1", "bench test passed", "alice (console)")
        assert [one.what for one in state.history()] == ["clear", "cleared"]
    assert "may join again; no run has it now" in done.text
    held = run.quarantine.read()
    assert held.denied_devices == {}
    assert [(one["what"], one["who"]) for one in held.log][1:] == [("clear", "alice (console)")]


class Blind(LocalCluster):
    """One that cannot be looked at once something was called."""

    called = False

    def carry_out(self, call: Call) -> str:
        self.called = True
        return super().carry_out(call)

    def look(self, node: str) -> NodeState:
        if self.called:
            raise ClusterError("as a test says")
        return super().look(node)


def test_a_return_that_was_done_is_no_failure_because_nobody_can_look(tmp_path: Path, run: RunFiles) -> None:
    run.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="persistent corruption", incident=ID)
    with State(tmp_path / "state") as state:
        done = clear(state, Blind([run.path]), "n1", "bench test passed", "kim@head")
        assert [one.what for one in state.history()] == ["clear", "cleared"]
    assert "as a test says" in done.warning
    assert run.quarantine.read().denied_devices == {}


def test_a_node_that_its_run_has_taken_out_needs_no_budget(tmp_path: Path, run: RunFiles) -> None:
    """The run's supervisor has denied the device already, and that is what fills the share."""
    write(run.path, where=topology(("n0", "n1", "n2")), at=datetime.now(UTC))
    run.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="persistent corruption", incident=ID)
    with State(tmp_path / "state") as state:
        policy = replace(ACT, cluster_share=0.34)
        controller = Controller([run.path], state, LocalCluster([run.path]), policy, read_signals=lambda _: ())
        assert policy.allowed_out(3) == LocalCluster([run.path]).census().out == 1
        controller.round()
        assert [(one.status, one.hold) for one in controller.book.proposals()] == [("already out", "")]
        controller.close()


# Rehearsed, fake, and named ------------------------------------------------------------------------------------------


def test_a_rehearsal_shows_what_would_be_and_touches_nothing(tmp_path: Path) -> None:
    real = FakeCluster(["n1", "n2"])
    real.add_job("7", state="ended", exit_code=160)
    cluster = Rehearsed(real)
    before = cluster.look("n1")
    do(cluster, DRAIN)
    assert (cluster.look("n1").ours, cluster.census()) == (True, Census(2, 1))
    assert cluster.landed(DRAIN, before, cluster.look("n1")) == "yes"
    for call in cluster.plan_requeue(cluster.job("7"), ["n1"]):
        cluster.carry_out(call)
    assert (cluster.job("7").state, cluster.job("7").restarts) == ("pending", 1)
    do(cluster, CLEAR)
    assert cluster.look("n1").service == "in"
    assert [call.words[1] for call in cluster.calls] == ["drain", "requeue", "release", "clear"]
    assert real.calls() == []


def test_a_fake_cluster_lives_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    first, second = FakeCluster(["n1"], path), FakeCluster((), path)
    do(first, DRAIN)
    assert second.look("n1").ours
    assert second.calls("n1", "drain") == [("drain", "n1")]
    do(second, replace(DRAIN, kind="reboot"))
    do(second, replace(DRAIN, kind="replace"))
    assert (first.look("n1").booted, first.look("n1").instance) == ("1++", "1+")
    path.write_text(json.dumps([]))
    with pytest.raises(ClusterError, match="no fake cluster"):
        first.look("n1")


def test_which_cluster_a_policy_names(tmp_path: Path) -> None:
    assert isinstance(cluster_of(FleetPolicy(), []), LocalCluster)
    file = str(tmp_path / "cluster.json")
    assert cluster_of(FleetPolicy(cluster={"kind": "fake", "file": file}), []).name == "fake"
    assert cluster_of(FleetPolicy(cluster={"kind": "slurm"}), []).name == "slurm"
    for settings in ({"kind": "nomad"}, {"kind": "fake"}):
        with pytest.raises(ConfigurationError):
            cluster_of(FleetPolicy(cluster=settings), [])
