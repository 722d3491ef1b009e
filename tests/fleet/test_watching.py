"""What the controller watches: runs that come and go, devices that come back, logs that hang, people who are told."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.fleet import watching
from bitwitness.fleet.clearing import clear
from bitwitness.fleet.identity import read_condemned
from bitwitness.fleet.notify import Message
from bitwitness.fleet.outbox import Deliverer, Outbox, deliver
from bitwitness.fleet.owning import Lock
from bitwitness.fleet.publishing import CONDEMNED
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.watching import SignalReader
from bitwitness.runfiles import RunFiles, read_incident
from tests.fleet.rehearsal import ACT, Listener, Rehearsal

HOUR = timedelta(hours=1)
DRAINED = [("drain", "n1")]


# What is wrong elsewhere ----------------------------------------------------------------------------------------------


def test_a_damaged_incident_stops_no_other_and_is_said_once(play: Rehearsal) -> None:
    bad = play.incident(1, ranks=(2,)) / "incident.json"
    whole = bad.read_text()
    bad.write_text(whole[:200])
    play.incident(2)
    play.rounds(5)
    assert play.cluster.calls() == DRAINED
    assert len(play.trail("trouble")) == 1
    bad.write_text(whole)
    play.rounds(2)
    assert play.cluster.calls() == [*DRAINED, ("drain", "n2")]
    assert len(play.trail("over")) == 1
    assert play.state.said("damaged:") == {}


def test_a_run_that_vanishes_is_said_once_and_comes_back(play: Rehearsal) -> None:
    play.rounds()
    away = play.run_dir.rename(play.folder / "away")
    play.rounds(3)
    assert len(play.trail("trouble")) == 1
    away.rename(play.run_dir)
    play.incident()
    play.rounds(2)
    assert play.cluster.calls() == DRAINED
    assert len(play.trail("over")) == 1


@pytest.mark.parametrize(("held", "watched"), [(False, True), (True, False)])
def test_a_run_that_cannot_be_written_is_watched_unless_somebody_else_holds_it(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch, held: bool, watched: bool
) -> None:
    def refused(path: object, *_: object) -> Lock:
        error = PermissionError(errno.EACCES, "Permission denied")
        raise RunFilesError(f"{path} cannot be opened for locking") from error

    play.controller.close()
    monkeypatch.setattr("bitwitness.fleet.watching.Lock", refused)
    monkeypatch.setattr("bitwitness.fleet.watching.owned", lambda path: held)
    play.incident()
    play.rounds(2)
    assert bool(play.cluster.calls()) is watched
    assert bool([text for text in play.trail("trouble") if "is not watched" in text]) is not watched


def test_runs_that_come_later_are_picked_up(play: Rehearsal) -> None:
    play.controller._runs._parents += (play.folder / "runs",)
    play.rounds()
    play.incident(run_dir=play.folder / "runs" / "late")
    play.rounds(2)
    assert play.cluster.calls() == DRAINED


def test_a_message_that_is_refused_is_handed_over_later_and_once(play: Rehearsal) -> None:
    play.listener.refuses = True
    play.incident()
    play.rounds(3)
    assert play.told() == []
    play.listener.refuses = False
    play.begin()
    play.rounds(3, timedelta(minutes=1))
    assert len(play.told()) == 1
    assert deliver(play.state, [play.listener]) == 0


def test_two_notifiers_of_one_name_are_refused(play: Rehearsal) -> None:
    with pytest.raises(ConfigurationError, match="listener"):
        Outbox(play.state, ["listener", "listener"])


def test_messages_for_a_notifier_that_is_gone_are_given_up(play: Rehearsal) -> None:
    play.listener.refuses = True
    play.incident()
    play.rounds()
    play.listener.name = "another"
    play.begin()
    assert Outbox(play.state, []).waiting()["waiting"] == 0
    assert len(play.trail("given up")) == 1


def test_a_thread_delivers(play: Rehearsal) -> None:
    play.incident()
    play.controller.round()
    got = threading.Event()
    told = Listener()
    send = told.send

    def taken(message: Message) -> None:
        send(message)
        got.set()

    told.send = taken  # type: ignore[method-assign]
    deliverer = Deliverer(play.state.folder, [told], 0.01, play.clock)
    deliverer.start()
    assert got.wait(60)
    deliverer.stop()
    assert len(told.got) == 1


# Devices that come back -----------------------------------------------------------------------------------------------


def started(play: Rehearsal, node: str, name: str = "later") -> None:
    """A job starts, and n1's old device is in this node."""
    where = [{**one, "node": node} if one["node"] == "n1" else one for one in play.where.to_json()]
    where = [one for one in where if one["node"] != node or one["device"] == "GPU-n1-0"]
    where = [{**one, "rank": rank} for rank, one in enumerate(where)]
    files = RunFiles(play.run_dir if name == "" else play.folder / "runs" / name).create()
    files.write_run({"placement": where, "started": play.clock.wall.isoformat()})


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_a_device_that_comes_back_is_said_loudly_once_and_its_node_drained(play: Rehearsal, node: str) -> None:
    (play.folder / "runs").mkdir()
    play.controller._runs._parents += (play.folder / "runs",)
    started(play, "n1", "")
    play.incident()
    play.rounds(2)
    play.cluster.take_in("n1")  # with a note that it was repaired
    play.clock.move(HOUR)
    started(play, node)
    play.rounds(3)
    play.begin()
    play.controller._runs._parents += (play.folder / "runs",)
    play.rounds(3)
    loud = [one for one in play.listener.got if one.severity == "critical"]
    assert len([one for one in loud if "SAME SILICON" in one.text]) == 1
    assert len(play.trail("returned")) == 1
    assert play.cluster.calls() == [("drain", "n1"), ("drain", node)]
    assert len(play.controller.book.returns()) == 1


def test_a_device_that_comes_back_a_second_time_is_said_a_second_time(play: Rehearsal) -> None:
    started(play, "n1", "")
    play.incident()
    play.rounds(2)
    for _ in range(2):
        play.cluster.take_in("n1")
        play.clock.move(HOUR)
        started(play, "n1", "")
        play.rounds(3)
    loud = [one for one in play.listener.got if one.severity == "critical" and "SAME SILICON" in one.text]
    assert len(loud) == 2
    assert play.cluster.calls() == DRAINED * 3


def test_a_device_that_a_person_cleared_may_come_back(play: Rehearsal) -> None:
    started(play, "n1", "")
    play.incident()
    play.rounds(2)
    clear(play.state, play.cluster, "n1", "tested for a week", "kim@head")
    play.clock.move(HOUR)
    started(play, "n1", "")
    play.rounds(3)
    assert play.cluster.calls() == [*DRAINED, ("clear", "n1")]
    assert read_condemned(play.state.folder / CONDEMNED) == []
    assert play.trail("returned") == []


def test_a_serial_number_recognises_a_device_under_another_name(play: Rehearsal) -> None:
    evidence = "pci=0000:9b:00 serial=1650921"
    play.signals = [Signal("nvml", IDENTITY, "GPU-n1-0", None, "noise", "none", "x", host="n1", evidence=evidence)]
    play.incident()
    play.rounds()
    assert [one.serial for one in play.controller.book.condemned()] == ["1650921"]
    assert play.kept("n1")[0].proposal.signals == ()


# Signals --------------------------------------------------------------------------------------------------------------


def test_signals_come_from_logs_and_from_beside_the_run_and_from_no_other_node(play: Rehearsal) -> None:
    line = "2026-11-29T11:59:00+00:00 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 48, pid=1, name=x, DBE"
    (play.folder / "n1.log").write_text(line)
    (play.folder / "n2.log").write_text(line.replace(" 48,", " 64,"))
    beside = play.run_dir / "signals" / "n1"
    beside.mkdir(parents=True)
    (beside / "dmesg").write_text(line.replace(" 48,", " 63,"))
    (beside / "broken.json").write_text("{")
    policy = replace(
        ACT, logs=(f"{play.folder}/{{node}}.log", f"{play.folder}/absent-{{node}}"), metrics="http://127.0.0.1:9"
    )
    found = SignalReader(policy)(read_incident(play.incident()))
    codes = {one.code for one in found}
    assert {"xid:48", "xid:63", "logs:absent"} <= codes
    assert "xid:64" not in codes
    assert any(one.kind == "no-evidence" and "127.0.0.1" in one.reason + one.origin for one in found)


def test_a_log_that_hangs_is_said_and_not_asked_again(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked = threading.Event(), []

    def hang(*_: object) -> list[Signal]:
        asked.append(1)
        go.wait(60)
        return []

    reader = SignalReader(replace(ACT, logs=("/{node}.log",)), patience=0.01)
    monkeypatch.setattr(reader, "_logs", hang)
    incident = read_incident(play.incident())
    for _ in range(3):
        assert [one.code for one in reader(incident)] == ["logs:hangs"]
    go.set()
    assert len(asked) == 1


def test_the_newest_of_many_logs_are_read_and_that_there_are_more_is_said(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_MOST_FILES", 3)
    for number in range(9):
        log = play.folder / f"n1-{number}.log"
        log.write_text(
            f"2026-11-29T11:59:0{number}+00:00 n1 kernel: NVRM: Xid (PCI:0000:9b:00): {60 + number}, pid=1, x\n"
        )
        os.utime(log, (1e9 + (number + 4) % 9, 1e9 + (number + 4) % 9))
    found = SignalReader(replace(ACT, logs=(f"{play.folder}/{{node}}-*.log",)))(read_incident(play.incident()))
    assert [one.code for one in found] == ["xid:62", "xid:63", "xid:64", "logs:too-many"]
    assert "9 files" in found[-1].reason


def test_what_weighs_most_is_kept_of_many_signals(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_MOST_SIGNALS", 6)
    xids = [48, *[13] * 9, 94, *[31] * 9]
    lines = [
        f"2026-11-29T11:59:{at:02}Z n1 kernel: NVRM: Xid (PCI:0000:9b:00): {xid}, pid=1, x"
        for at, xid in enumerate(xids)
    ]
    (play.folder / "n1.log").write_text("\n".join([*lines, ""]))
    told = Signal(
        "nvml", IDENTITY, "GPU-n1-1", None, "noise", "none", "x", evidence="serial=1650921", host="n1"
    ).to_json(details=True)
    (play.folder / "n1.json").write_text(json.dumps([told]))
    logs = (*(f"{play.folder}/absent-{number}" for number in range(9)), f"{play.folder}/{{node}}.*")
    found = SignalReader(replace(ACT, logs=logs))(read_incident(play.incident()))
    assert sorted(one.code for one in found) == sorted(
        [IDENTITY, "signals:too-many", "xid:31", "xid:31", "xid:48", "xid:94"]
    )


@pytest.mark.parametrize("patience", [0.01, 10])
def test_the_password_of_an_address_is_shown_nowhere(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    go = threading.Event()

    def query(url: str, **_: object) -> Iterator[Signal]:
        if patience < 1:
            go.wait(60)
        raise OSError(f"no route to {url}/api")

    monkeypatch.setattr("bitwitness.fleet.signals.metrics.query", query)
    policy = replace(ACT, metrics="http://u:hunter2@prom:9090?token=hunter2")
    (one,) = SignalReader(policy, patience=patience)(read_incident(play.incident()))
    go.set()
    assert one.code == ("metrics:hangs" if patience < 1 else "metrics:unreadable")
    assert one.origin == "http://prom:9090"
    assert "hunter2" not in str(one)


def test_an_unattributed_incident_asks_for_no_signals(play: Rehearsal) -> None:
    assert SignalReader(replace(ACT, logs=("/{node}.log",)))(read_incident(play.incident(ranks=()))) == []


def test_of_a_log_of_the_whole_cluster_only_lines_that_name_a_node_count(play: Rehearsal) -> None:
    at = play.clock.wall.isoformat(timespec="seconds")
    xid = "kernel: NVRM: Xid (PCI:0000:9b:00)"
    (play.folder / "all.log").write_text(
        f"{at} n1 {xid}: 48, x\n{at} n2 {xid}: 64, x\n[ 1.5] NVRM: Xid (PCI:0000:9b:00): 95, x\n"
    )
    found = SignalReader(replace(ACT, logs=(f"{play.folder}/all.log",)))(read_incident(play.incident()))
    assert [(one.code, one.host) for one in found if one.kind != "no-evidence"] == [("xid:48", "n1")]


def test_a_folder_that_may_not_be_looked_into_is_said_and_stops_no_other(
    play: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = play.folder / "runs"
    (parent / "private").mkdir(parents=True)
    play.incident(run_dir=parent / "run")
    play.controller._runs._parents += (parent,)
    is_dir = Path.is_dir

    def refused(path: Path) -> bool:
        if path.parent.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    play.rounds(3)
    assert play.cluster.calls() == [("drain", "n1")]
    (told,) = play.trail("trouble")
    assert "private is not watched: Permission denied" in told


def test_a_file_that_is_too_large_is_not_read(play: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LARGEST_FILE", 100)
    play.incident()
    play.rounds(2)
    assert play.cluster.calls() == []
    assert "more than" in play.trail("trouble")[0]


def test_a_lock_leads_to_no_other_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(RunFilesError, match="cannot be opened for locking"):
        Lock(tmp_path / "lock", "a test")
    assert victim.read_text() == "kept"
