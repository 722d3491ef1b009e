"""The quarantine file: no change is lost, none is silent, and a file that cannot be read is never an empty one.

And the actions of an incident, which are written by the same hands.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles import Quarantine, QuarantineFile, RunFiles, Strike, read_actions
from bitwitness.runfiles import quarantine as module
from tests.cli import samples


@pytest.fixture
def file(tmp_path: Path) -> QuarantineFile:
    return RunFiles(tmp_path).create().quarantine


def filled(file: QuarantineFile) -> QuarantineFile:
    file.strike("GPU-1", incident="i-1", node="node-1", persistence="transient", who="supervise@node-0")
    file.strike("GPU-1", incident="i-2", node="node-2", persistence="persistent")
    file.deny_devices(["GPU-1", "GPU-9"], node="node-2", reason="two strikes", incident="i-2")
    file.deny_node("node-3", reason="several devices of it were named")
    return file


# What it says --------------------------------------------------------------------------------------------------------


def test_no_file_is_an_empty_quarantine(file: QuarantineFile) -> None:
    assert file.read() == Quarantine()
    assert file.read().why_denied("node-1", ["GPU-1"]) == ""
    assert not file.path.exists()
    with file.edit():
        pass
    assert not file.path.exists(), "nothing was changed"


def test_what_was_written_is_read_again(file: QuarantineFile) -> None:
    held = filled(file).read()
    assert [(one.incident, one.node, one.persistence) for one in held.strikes["GPU-1"]] == [
        ("i-1", "node-1", "transient"),
        ("i-2", "node-2", "persistent"),
    ]
    assert set(held.denied_devices) == {"GPU-1", "GPU-9"}
    assert set(held.denied_nodes) == {"node-3"}
    assert held.names() == ["GPU-1", "GPU-9", "node-3"]
    assert [(one["what"], one["name"]) for one in held.log] == [
        ("strike", "GPU-1"),
        ("strike", "GPU-1"),
        ("deny device", "GPU-1"),
        ("deny device", "GPU-9"),
        ("deny node", "node-3"),
    ]
    assert held.log[0]["who"] == "supervise@node-0"
    assert "@" in held.log[1]["who"]
    assert Quarantine.from_json(held.to_json()) == held


def test_why_somebody_must_not_join(file: QuarantineFile) -> None:
    held = filled(file).read()
    assert held.why_denied("node-1", ["GPU-2", "GPU-3"]) == ""
    there = held.why_denied("node-2", ["GPU-2", "GPU-9"])
    assert there.startswith("device GPU-9 is in quarantine since 2")
    assert there.endswith(": two strikes (incident i-2)")
    assert held.why_denied("node-7", ["GPU-9"]).startswith("device GPU-9 (then on node node-2) is in quarantine since")
    both = held.why_denied("node-3", ["GPU-1", "GPU-1", "GPU-2"])
    assert both.startswith("node node-3 is in quarantine since ")
    assert "several devices of it were named; device GPU-1 (then" in both
    assert both.count("GPU-1") == 1


def test_saying_it_again_changes_nothing(file: QuarantineFile) -> None:
    """Each node's wrapper says what it has read in the same incident."""
    before = filled(file).path.read_bytes()
    filled(file)
    file.deny_devices(["GPU-1"], node="node-5", reason="another")
    file.deny_node("node-3", reason="another")
    assert file.path.read_bytes() == before


def test_strikes_within_a_time(file: QuarantineFile) -> None:
    now = datetime(2026, 11, 29, 12, tzinfo=UTC)
    ages = (-5, 0, 59, 60, 61, 3600)
    times = [(now - timedelta(seconds=age)).isoformat().replace("+00:00", "Z") for age in ages]
    held = Quarantine(strikes={"GPU-1": [Strike(time, str(number), "n", "") for number, time in enumerate(times)]})
    assert [held.strikes_within("GPU-1", seconds, now) for seconds in (0, 60, 61, 10_000)] == [2, 4, 5, 6]
    assert held.strikes_within("GPU-1", 60, "2026-11-29T12:00:00.000Z") == 4
    assert held.strikes_within("GPU-2", 60, now) == 0
    file.strike("GPU-1", incident="i", node="n", persistence="transient")
    assert file.read().strikes_within("GPU-1", 600) == 1


# Clearing ------------------------------------------------------------------------------------------------------------


def test_clearing_is_logged_with_what_was_there(file: QuarantineFile) -> None:
    filled(file)
    (entry,) = file.clear(["GPU-1"], who="ada@desk", reason="replaced, RMA 4711")
    assert (entry["what"], entry["name"], entry["who"], entry["reason"]) == (
        "clear",
        "GPU-1",
        "ada@desk",
        "replaced, RMA 4711",
    )
    assert entry["cleared"]["device"]["reason"] == "two strikes"
    assert len(entry["cleared"]["strikes"]) == 2
    held = file.read()
    assert held.log[-1] == entry
    assert held.names() == ["GPU-9", "node-3"]
    assert held.strikes_within("GPU-1", 600) == 0
    assert held.why_denied("node-2", ["GPU-1"]) == ""


def test_clearing_all(file: QuarantineFile) -> None:
    assert [entry["name"] for entry in filled(file).clear(None, reason="new racks")] == ["GPU-1", "GPU-9", "node-3"]
    assert file.read().names() == []
    assert len(file.read().log) == 8
    assert file.clear(None, reason="once more") == []


def test_clearing_a_node_leaves_its_devices(file: QuarantineFile) -> None:
    file.deny_node("node-2", reason="fan")
    file.deny_devices(["GPU-1"], node="node-2", reason="wrong results")
    file.clear(["node-2", "node-2"], reason="fan replaced")
    assert file.read().names() == ["GPU-1"]


def test_clearing_who_is_not_there_says_who_is_and_clears_nobody(file: QuarantineFile) -> None:
    with pytest.raises(RunFilesError, match=r"GPU-1: not in the quarantine .*quarantine\.json; nobody is"):
        file.clear(["GPU-1"], reason="x")
    before = filled(file).path.read_bytes()
    with pytest.raises(RunFilesError, match=r"node-2: not in the quarantine .*; there are: GPU-1, GPU-9, node-3"):
        file.clear(["GPU-1", "node-2"], reason="x")
    with pytest.raises(ConfigurationError, match="needs a reason"):
        file.clear(["GPU-1"], reason="  ")
    assert file.path.read_bytes() == before


# Damage --------------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda record: "",
    "torn": lambda record: json.dumps(record)[:-10],
    "a newer schema": lambda record: {**record, "schema": 2},
    "nothing in it": lambda record: {"schema": 1},
    "no strikes": lambda record: {key: value for key, value in record.items() if key != "strikes"},
    "no log": lambda record: {key: value for key, value in record.items() if key != "log"},
    "a list of devices": lambda record: {**record, "denied_devices": ["GPU-1"]},
    "a denial of words": lambda record: {**record, "denied_devices": {"GPU-1": "yes"}},
    "a denial without a reason": lambda record: {**record, "denied_nodes": {"n": {"since": "", "node": "n"}}},
    "a reason of numbers": lambda record: {
        **record,
        "denied_nodes": {"n": {"since": "", "reason": 1, "incident": "", "node": ""}},
    },
    "strikes that are one": lambda record: {**record, "strikes": {"GPU-1": record["strikes"]["GPU-1"][0]}},
    "strikes at no time": lambda record: {
        **record,
        "strikes": {"GPU-1": [{**record["strikes"]["GPU-1"][0], "time": "yesterday"}]},
    },
    "strikes at the time of nowhere": lambda record: {
        **record,
        "strikes": {"GPU-1": [{**record["strikes"]["GPU-1"][0], "time": "2026-11-29T12:00:00"}]},
    },
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_quarantine_is_an_error_and_never_empty(file: QuarantineFile, damage: str) -> None:
    content = DAMAGES[damage](json.loads(filled(file).path.read_text()))
    file.path.write_text(content if isinstance(content, str) else json.dumps(content))
    before = file.path.read_bytes()
    uses: list[Callable[[], object]] = [
        file.read,
        lambda: file.strike("GPU-1", incident="i-3", node="node-1", persistence="transient"),
        lambda: file.deny_node("node-1", reason="x"),
        lambda: file.clear(None, reason="x"),
    ]
    for use in uses:
        with pytest.raises(RunFilesError, match="nobody can say who is in quarantine") as caught:
            use()
        assert str(file.path) in str(caught.value)
    assert file.path.read_bytes() == before


def test_a_link_that_leads_nowhere_is_no_empty_quarantine(file: QuarantineFile) -> None:
    file.path.symlink_to("nowhere")
    with pytest.raises(RunFilesError, match="does not exist"):
        file.read()


def test_a_file_that_another_node_replaces_is_read_again(file: QuarantineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says ESTALE of a file that was replaced between being opened and being read."""
    real, stale = Path.read_bytes, 3

    def read(path: Path) -> bytes:
        nonlocal stale
        stale -= 1
        if stale >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path)

    filled(file)
    monkeypatch.setattr(Path, "read_bytes", read)
    assert "GPU-1" in file.read().denied_devices
    stale = 100
    with pytest.raises(RunFilesError, match="Stale file handle"):
        file.read()


# Several writers, kills, disks ---------------------------------------------------------------------------------------

WRITER = """
import sys
from bitwitness.runfiles import RunFiles
file = RunFiles(sys.argv[1]).quarantine
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    file.strike(f"GPU-{number % 5}", incident=f"{sys.argv[2]}-{number}", node=sys.argv[2], persistence="transient")
"""


def start(run_dir: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(run_dir), name, str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()


def test_no_change_is_lost_between_processes_and_threads(file: QuarantineFile) -> None:
    count = 30
    writers = [start(file.path.parent, name, count) for name in ("a", "b")]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        go(writer)

    def strike(name: str) -> None:
        for number in range(count):
            file.strike("GPU-0", incident=f"{name}-{number}", node=name, persistence="transient")

    threads = [threading.Thread(target=strike, args=(name,)) for name in ("c", "d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    held = file.read()
    expected = {f"{name}-{number}" for name in "abcd" for number in range(count)}
    assert {one.incident for each in held.strikes.values() for one in each} == expected
    assert {entry["incident"] for entry in held.log} == expected
    assert len(held.log) == len(expected)


def test_a_kill_leaves_the_file_whole_and_the_lock_free(file: QuarantineFile) -> None:
    known = 0
    for number in range(4):
        writer = start(file.path.parent, f"w{number}", 10**6)
        assert writer.stdout is not None
        assert select.select([writer.stdout], [], [], 60)[0], "the writer did not start"
        go(writer)
        while len(file.read().log) < known + 3:  # read all the while: whole at every instant
            assert writer.poll() is None, writer.communicate()
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        assert len(file.read().log) >= known
        file.strike("GPU-0", incident=f"after-{number}", node="n", persistence="transient")
        known = len(file.read().log)
    left = file.path.parent / ".quarantine.json.1.ab.tmp"
    left.write_text("half")
    RunFiles(file.path.parent).discard_staged()
    assert left.exists(), "a guard is made while others edit: what they are writing is not its business"
    file.deny_node("node-9", reason="x")
    assert {path.name for path in file.path.parent.glob(".*")} == {".quarantine.json.lock"}


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_old_file(
    file: QuarantineFile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = filled(file).path.read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        with pytest.raises(RunFilesError, match=r"quarantine\.json could not be written: No space left"):
            file.deny_node("node-9", reason="x")
    assert file.path.read_bytes() == before
    file.deny_node("node-9", reason="x")
    assert "node-9" in file.read().denied_nodes


def test_an_edit_that_raises_changes_nothing(file: QuarantineFile) -> None:
    before = filled(file).path.read_bytes()

    def half() -> None:
        with file.edit() as held:
            held.denied_devices.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert file.path.read_bytes() == before
    with file.edit() as held:
        held.denied_devices.clear()
    assert not file.read().denied_devices


def test_a_file_system_without_locks_is_named(file: QuarantineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        with pytest.raises(RunFilesError, match=r"could not be locked: No locks available.*locks files across nodes"):
            file.deny_node("node-9", reason="x")
    assert not file.path.exists()


def test_a_lock_that_is_never_released_is_named(file: QuarantineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "lockf", busy)
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    with pytest.raises(RunFilesError, match="locked by another process"):
        file.deny_node("node-9", reason="x")


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> pwd.struct_passwd:
        raise KeyError("no such user")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert module.who_asks().startswith(f"uid-{os.getuid()}@")


@pytest.mark.parametrize("variable", ["LOGNAME", "USER", "LNAME", "USERNAME"])
def test_who_asks_is_the_user_of_the_system_and_not_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "carol (console)")
    assert module.who_asks().partition("@")[0] == pwd.getpwuid(os.getuid()).pw_name


def test_no_user_of_a_system_looks_like_one_of_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = pwd.struct_passwd(("carol (console)", "x", 1, 1, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: odd)
    assert module.who_asks().startswith("carol__console_@")


# Actions -------------------------------------------------------------------------------------------------------------


def test_actions_of_an_incident(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, samples.BAD), where)
    files = RunFiles(tmp_path)
    assert files.actions(path.name) == []
    files.note_action(path.name, "denied device GPU-4", node="node-2", devices=["GPU-4"])
    with (path / "actions.jsonl").open("ab") as torn:
        torn.write(b'{"schema":1,"action":"resta')
    files.note_action(path.name, "restarted", generation=2)
    found = files.actions(path.name)
    assert [one["action"] for one in found] == ["denied device GPU-4", "restarted"]
    assert (found[0]["devices"], found[1]["generation"], found[0]["schema"]) == (["GPU-4"], 2, 1)
    assert found[0]["time"].endswith("Z")
    assert read_actions(path) == found
    assert "skipped 1 torn or damaged line" in caplog.text


def test_actions_of_no_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path).create()
    for name in ("20261129T153821Z-247ef9", "..", ".staging-x"):
        with pytest.raises(RunFilesError, match="is no incident: nothing can be noted about it"):
            files.note_action(name, "x")
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, samples.BAD), where)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunFilesError, match=r"actions\.jsonl could not be written: Input/output error"):
        files.note_action(path.name, "x")
