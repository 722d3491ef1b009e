"""One controller acts, whoever dies or sleeps, and an API server that is away makes it wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, Cluster
from bitwitness.fleet.clusters.kubernetes import KubernetesCluster
from tests.fleet.clusters.bench import Bench
from tests.fleet.clusters.kills import Scene
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_acting import DRAIN, add

NODES = ("n0", "n1", "n2")
LEASE = "bitwitness/fleet"


class Ticks:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.passed = 0.0

    def __call__(self) -> float:
        return self.passed


class Where:
    """What a scene needs of a bench: nodes and clients."""

    nodes = NODES

    def __init__(self, client: Callable[[], KubernetesCluster]) -> None:
        self.client = client

    def finish(self) -> None:
        """Nothing takes its time here."""


def scene(client: Callable[[], KubernetesCluster], folder: Path) -> Scene:
    """A controller on clients of a server."""
    where: Bench = Where(client)  # type: ignore[assignment]  # the parts that are used
    return Scene(where, folder)


def cordons(server: KubernetesServer) -> list[str]:
    """Nodes that were patched, in order."""
    return [name for what, name in server.applied if what == "patch nodes"]


@pytest.fixture
def nodes(server: KubernetesServer) -> KubernetesServer:
    for node in NODES:
        server.add_node(node)
    return server


def test_ten_minutes_without_the_server(nodes: KubernetesServer, make: Make, tmp_path: Path) -> None:
    with scene(lambda: make(lease=LEASE), tmp_path) as play:
        play.rounds(1)
        nodes.down()
        play.incident("n1")
        play.rounds(60, apart=10.0)
        assert play.stands() == [("held", "cluster")]
        assert "cannot be reached" in str(play.why())
        assert cordons(nodes) == []
        nodes.up()
        play.rounds(8, apart=60.0)
        assert play.stands() == [("done", "")], play.why()
    assert cordons(nodes) == ["n1"]
    assert nodes.node("n1")["spec"]["unschedulable"] is True


def test_of_two_controllers_one_acts(nodes: KubernetesServer, make: Make, tmp_path: Path) -> None:
    passed = Ticks()
    first = scene(lambda: make(lease=LEASE, identity="first", ticks=passed), tmp_path / "first")
    second = scene(lambda: make(lease=LEASE, identity="second", ticks=passed), tmp_path / "second")
    with first, second:
        for play in (first, second):
            play.incident("n1")
        for _ in range(4):
            second.rounds(0)
            for play in (first, second):
                play.rounds(1, apart=2.0)
            passed.passed += 2.0
        assert (first.stands(), second.stands()) == ([("done", "")], [])
        assert second.state.about()["leader"] == "first"
        assert cordons(nodes) == ["n1"]
        stale = first.cluster.plan(Act("drain", "n2", "i2", "x"), first.cluster.look("n2"))
        for _ in range(20):  # the first one dies, or sleeps
            second.rounds(1, apart=2.0)
            passed.passed += 2.0
        assert second.state.about()["leader"] == ""
        assert second.stands() == [("already out", "")]
        for _ in range(2):  # and wakes
            with pytest.raises(ClusterError, match=r"was not renewed for 30 s|second leads on this cluster") as caught:
                first.cluster.carry_out(stale[0])
            assert caught.value.refused  # nothing was sent
            first.rounds(1)
        assert first.state.about()["leader"] == "second"
        assert cordons(nodes) == ["n1"]
        assert nodes.get("leases", "bitwitness", "fleet")["spec"]["holderIdentity"] == "second"
    assert nodes.get("leases", "bitwitness", "fleet")["spec"]["holderIdentity"] == "", "given up at the end"


def test_many_want_it_at_once(nodes: KubernetesServer, make: Make) -> None:
    for number in range(5):
        clusters = [make(lease=f"bitwitness/race-{number}", identity=f"c{one}") for one in range(4)]
        start, said = threading.Barrier(4), [""] * 4

        def ask(one: int, clusters: list[KubernetesCluster] = clusters, start: threading.Barrier = start) -> None:
            start.wait()
            said[one] = clusters[one].leader()  # noqa: B023 - joined below

        threads = [threading.Thread(target=ask, args=(one,)) for one in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        holder = nodes.get("leases", "bitwitness", f"race-{number}")["spec"]["holderIdentity"]
        assert sorted(said) == sorted("" if f"c{one}" == holder else holder for one in range(4))


def test_a_lease_and_its_time(nodes: KubernetesServer, make: Make) -> None:
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed) for name in ("one", "other"))
    call = one.plan(DRAIN, one.look("n1"))[0]
    assert one.leader() == ""
    renewed = nodes.get("leases", "bitwitness", "fleet")["metadata"]["resourceVersion"]
    passed.passed += 9.0
    assert one.leader() == ""
    assert nodes.get("leases", "bitwitness", "fleet")["metadata"]["resourceVersion"] == renewed, "not renewed yet"
    assert other.leader() == "one"
    passed.passed += 29.0
    assert other.leader() == "one", "seen for the first time 29 s ago"
    with pytest.raises(ClusterError, match="was not renewed for 30 s"):
        one.carry_out(call)
    assert one.leader() == "", "nobody else took it"
    assert other.leader() == "one", "renewed"
    passed.passed += 29.0
    nodes.down()
    with pytest.raises(ClusterError, match="cannot be reached"):
        one.leader()
    with pytest.raises(ClusterError):
        one.carry_out(call)
    nodes.up()
    passed.passed += 2.0
    assert other.leader() == ""
    with pytest.raises(ClusterError, match="was not renewed"):
        one.carry_out(call)
    assert one.leader() == "other"
    other.resign()
    assert one.leader() == "", "given up: nobody has to wait"
    one.carry_out(call)
    assert nodes.get("leases", "bitwitness", "fleet")["spec"]["leaseTransitions"] == 2


def test_a_lease_that_is_renewed_is_never_taken(nodes: KubernetesServer, make: Make) -> None:
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed) for name in ("one", "other"))
    for _ in range(20):
        assert (one.leader(), other.leader()) == ("", "one")
        passed.passed += 11.0


def test_an_answer_that_takes_long_is_no_older_lease(nodes: KubernetesServer, make: Make) -> None:
    """The lease is renewed while another one waits for the answer: it counts from the answer, not from the question."""
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed) for name in ("one", "other"))
    assert one.leader() == ""

    def renewed() -> None:
        passed.passed += 25.0
        nodes.change("leases", "bitwitness", "fleet", lambda lease: lease["spec"].update(renewTime="now"))

    nodes.while_read("leases", renewed)
    assert other.leader() == "one"
    passed.passed += 29.0
    assert other.leader() == "one", "renewed 29 s ago"
    passed.passed += 1.0
    assert other.leader() == ""


def test_a_lead_is_made_sure_of_before_each_try(nodes: KubernetesServer, make: Make) -> None:
    """Another one takes it while a conflict is looked at: the second try is not made, and certainly nothing was done."""
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed, pause=lambda _: None) for name in ("one", "other"))
    call = one.plan(DRAIN, one.look("n1"))[0]
    assert (one.leader(), other.leader()) == ("", "one")

    def slow() -> None:
        passed.passed += 31.0

    nodes.conflict(1)
    nodes.while_read("nodes", slow)
    with pytest.raises(ClusterError, match="was not renewed") as caught:
        one.carry_out(call)
    assert caught.value.refused
    assert not cordons(nodes)


def test_whatever_keeps_the_lease_from_being_known_is_a_refusal(nodes: KubernetesServer, make: Make) -> None:
    """Nothing was sent, so a reboot may be asked for again."""
    passed = Ticks()
    one = make(lease=LEASE, identity="one", ticks=passed, timeout=0.15)
    call = one.plan(DRAIN, one.look("n1"))[0]
    assert one.leader() == ""
    passed.passed += 11.0
    nodes.slow = 0.4
    with pytest.raises(ClusterError, match="was not answered") as caught:
        one.carry_out(call)
    assert caught.value.refused
    assert not cordons(nodes)


def test_somebody_is_faster(nodes: KubernetesServer, make: Make) -> None:
    """Two want a lease that is over: one of them takes it between the other's reading and writing."""
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed) for name in ("one", "other"))
    assert (one.leader(), other.leader()) == ("", "one")
    passed.passed += 31.0
    nodes.conflict(1, lambda lease: lease["spec"].update(holderIdentity="faster"), plural="leases")
    assert other.leader() == "faster"
    assert one.leader() == "faster"


def test_a_lead_that_is_lost_between_two_calls(nodes: KubernetesServer, make: Make) -> None:
    passed = Ticks()
    one, other = (make(lease=LEASE, identity=name, ticks=passed) for name in ("one", "other"))
    call = one.plan(DRAIN, one.look("n1"))[0]
    assert (one.leader(), other.leader()) == ("", "one")
    nodes.change("leases", "bitwitness", "fleet", lambda lease: lease["spec"].update(holderIdentity="other"))
    passed.passed += 11.0
    with pytest.raises(ClusterError, match="other leads on this cluster"):
        one.carry_out(call)
    assert not cordons(nodes)


def test_who_leads_nothing_is_not_hindered(nodes: KubernetesServer, make: Make) -> None:
    make(lease=LEASE, identity="controller").leader()
    person = make(lease=LEASE)
    person.carry_out(person.plan(DRAIN, person.look("n1"))[0])
    assert cordons(nodes) == ["n1"]
    assert make().leader() == ""
    make().resign()
    nodes.down()
    make(lease=LEASE).resign()
    nodes.up()


def test_a_lease_that_is_not_renewed_says_why(nodes: KubernetesServer, make: Make) -> None:
    passed = Ticks()
    one = make(lease=LEASE, ticks=passed)
    call = one.plan(DRAIN, one.look("n1"))[0]
    assert one.leader() == ""
    nodes.forbid("update", "leases")
    passed.passed += 31.0
    with pytest.raises(ClusterError):
        one.leader()
    with pytest.raises(ClusterError, match=r"was not renewed for 30 s \(.*resources: \[leases\], verbs: \[update\]"):
        one.carry_out(call)


def test_a_renewal_that_takes_long_counts_from_its_beginning(nodes: KubernetesServer, make: Make) -> None:
    passed = Ticks()
    one = make(lease=LEASE, ticks=passed)
    call = one.plan(DRAIN, one.look("n1"))[0]

    def slow() -> None:
        passed.passed += 31.0

    nodes.while_read("leases", slow)
    assert one.leader() == ""
    with pytest.raises(ClusterError, match="was not renewed"):
        one.carry_out(call)
    assert one.leader() == ""
    passed.passed += 11.0
    nodes.while_read("leases", slow)
    with pytest.raises(ClusterError, match=r"nobody leads|was not renewed"):
        one.carry_out(call)
    assert not cordons(nodes)


def test_only_the_own_lease_is_given_up(nodes: KubernetesServer, make: Make) -> None:
    one = make(lease=LEASE, identity="one")
    assert one.leader() == ""
    nodes.change("leases", "bitwitness", "fleet", lambda lease: lease["spec"].update(holderIdentity="other"))
    one.resign()
    assert nodes.get("leases", "bitwitness", "fleet")["spec"]["holderIdentity"] == "other"


def test_a_lease_that_may_not_be_taken(nodes: KubernetesServer, make: Make) -> None:
    nodes.forbid("create", "leases")
    rule = "Role in namespace bitwitness: apiGroups: ..coordination.k8s.io.., resources: .leases., verbs: .create."
    with pytest.raises(ClusterError, match=rule):
        make(lease=LEASE).leader()
    with pytest.raises(ConfigurationError, match="NAMESPACE/NAME"):
        make(lease="no slash")


_PROCESS = """
import sys
from pathlib import Path
from bitwitness.fleet.clusters.kubernetes import from_settings
from tests.fleet.kubernetes.test_leading import live
live(from_settings({"kubeconfig": sys.argv[1]}), Path(sys.argv[2]))
"""


def live(cluster: Cluster, folder: Path) -> None:
    """A controller, in a process of its own."""
    with scene(lambda: cluster, folder) as play:  # type: ignore[arg-type,return-value]
        play.rounds(3)


def test_a_process_that_is_killed_when_the_node_is_out(nodes: KubernetesServer, make: Make, tmp_path: Path) -> None:
    """SIGKILL after the first of three calls; another one adds a taint before the next process ends what was begun."""
    config = nodes.kubeconfig(tmp_path / "config")
    with scene(make, tmp_path / "play") as play:
        play.incident("n1")
    with subprocess.Popen([sys.executable, "-c", _PROCESS, str(config), str(tmp_path / "play")]) as process:

        def kill(number: int, when: str) -> None:
            if (number, when) == (1, "after"):
                os.kill(process.pid, signal.SIGKILL)

        nodes.watch_writes(kill)
        assert process.wait(60) == -signal.SIGKILL
    nodes.watch_writes(lambda number, when: None)
    assert nodes.applied == [("patch nodes", "n1")]
    taint = {"key": "somebody.example/else", "effect": "NoExecute"}
    nodes.change_node("n1", add(taint))
    with scene(make, tmp_path / "play") as play:
        play.later()
        assert play.stands() == [("done", "")], play.why()
    assert [what for what, _ in nodes.applied] == ["patch nodes", "create events", "patch nodes/status"]
    assert taint in nodes.node("n1")["spec"]["taints"]
