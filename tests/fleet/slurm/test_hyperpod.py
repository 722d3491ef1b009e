"""HyperPod is asked by a word in a reason, and may ignore it: what was asked for is watched until it has happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError
from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters import slurm_json, slurm_text
from bitwitness.fleet.clusters.slurm import SlurmCluster
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.outbox import deliver
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.fleet.view import report
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.rehearsal import HandClock, Listener

POLICY = FleetPolicy(
    act=True, may=frozenset({"drain", "replace"}), nodes_per_hour=9, cluster_share=1.0, cluster={"kind": "slurm"}
)
NODES = ("n0", "n1", "n2", "n3")
BROKEN = Signal("kernel", "xid:64", "GPU-n1-0", stamp(NOW), "memory", "strong", "no spare rows", host="n1")


class Scontrol:
    """As much of Slurm's commands as a replacement needs."""

    def __init__(self) -> None:
        self.state, self.reason, self.booted, self.away = "IDLE", "", "2026-11-29T09:00:00", False
        self.changes: list[str] = []

    def __call__(self, words: Sequence[str], timeout: float) -> Answer:
        if self.away:
            raise ClusterError("scontrol did not answer, as it was told")
        if words[0] == "sinfo":
            return Answer(0, "".join(f"{node} idle\n" for node in NODES))
        if "update" in words:
            self.changes.append(" ".join(words))
            self.state, self.reason = "IDLE+FAIL", words[-1].removeprefix("reason=")
            return Answer(0, "")
        reason = f"   Reason={self.reason} [root@2026-11-29T12:00:00]\n" if self.reason else ""
        return Answer(0, f"NodeName={words[-1]} State={self.state} \n   BootTime={self.booted}\n{reason}")


class Place:
    """A controller of a HyperPod cluster whose n1 is to be replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.slurm, self.listener = folder, HandClock(), Scontrol(), Listener()
        run_dir, where = folder / "run", topology(NODES, per_node=1)
        run_dir.mkdir()
        write(run_dir, 1, verdict(where, (1,)), where, NOW)
        self.begin()

    def begin(self) -> None:
        """Start a controller, as after the end of the one before."""
        if hasattr(self, "state"):
            self.end()
        self.state = State(self.folder / "state", clock=self.clock)
        cluster = SlurmCluster(self.slurm, hyperpod=True)
        runs, notifiers = [self.folder / "run"], [self.listener]
        self.controller = Controller(
            runs, self.state, cluster, POLICY, notifiers=notifiers, read_signals=lambda _: (BROKEN,)
        )

    def passes(self, minutes: int) -> None:
        """Time passes, with a round every ten minutes."""
        for _ in range(max(1, minutes // 10)):
            self.clock.move(timedelta(minutes=min(10, minutes)))
            self.controller.round()
            deliver(self.state, [self.listener])

    def critical(self) -> list[str]:
        return [one.subject for one in self.listener.got if one.severity == "critical"]

    def todo(self) -> str:
        return "\n".join(report(self.state).todo)

    def end(self) -> None:
        self.controller.close()
        self.state.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def test_a_replacement_that_nobody_makes_is_said_after_90_minutes(place: Place) -> None:
    place.passes(1)
    assert place.slurm.changes == ["scontrol update node=n1 state=fail reason=Action:Replace"]
    assert [one.status for one in place.controller.book.proposals()] == ["done"]
    place.passes(80)
    assert place.critical() == []
    place.passes(20)
    assert len(place.critical()) == 1
    assert "HyperPod has not replaced it within 90 minutes" in place.todo()
    place.begin()
    place.slurm.away = True  # nothing new is known: it is neither over nor said anew
    place.passes(120)
    assert len(place.critical()) == 1
    assert "HyperPod has not replaced it" in place.todo()
    assert len(place.slurm.changes) == 1


def test_one_that_comes_about_is_noted_and_watched_no_more(place: Place) -> None:
    place.passes(120)
    assert "HyperPod has not replaced it" in place.todo()
    place.slurm.state, place.slurm.reason, place.slurm.booted = "IDLE", "", "2026-11-29T13:55:00"
    place.passes(10)
    place.passes(1)
    assert "HyperPod" not in place.todo()
    over = [one.text for one in place.state.history(node="n1") if one.what == "over"]
    assert over == ["n1 waits for no replace any more: it is IDLE, booted at 2026-11-29T13:55:00.000Z"]
    place.slurm.state, place.slurm.reason = "IDLE+FAIL", "Action:Replace"  # somebody else asks: not ours to watch
    place.passes(300)
    assert "HyperPod" not in place.todo()


@pytest.mark.parametrize(
    ("state", "reason", "awaits"),
    [
        ("IDLE+FAIL", "Action:Replace", "Action:Replace"),
        ("DOWN+NOT_RESPONDING", "Action:Reboot", "Action:Reboot"),
        ("IDLE", "Action:Replace", ""),
        ("IDLE+DRAIN+REBOOT_REQUESTED", "bitwitness x: y", "reboot"),
        ("DOWN", "bitwitness x: y", ""),
    ],
)
def test_what_a_node_waits_for(state: str, reason: str, awaits: str) -> None:
    text = f"NodeName=n1 State={state}\n   Reason={reason} [root@2026-11-29T12:00:00]\n"
    assert slurm_text.node_state(text, "n1").awaits == awaits
    record = {"name": "n1", "state": state.split("+"), "reason": reason, "reason_set_by_user": "root"}
    assert slurm_json.node_state({"nodes": [record]}, "n1").awaits == awaits
