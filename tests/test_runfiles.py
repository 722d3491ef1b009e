"""The files of a run: what is written can be read, what is damaged is named, and what is torn is skipped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import RunFilesError
from bitwitness.evidence import LedgerEntry, Observation, Verdict
from bitwitness.runfiles import (
    SCHEMA,
    RunFiles,
    new_incident_id,
    read_incident,
    read_journal,
    read_json,
    utc_now,
    write_bytes,
    write_json,
)
from bitwitness.runfiles.journal import append_line
from bitwitness.topology import Placement, Topology

VERDICT = Verdict("unattributed", 7, candidates=(0, 1), kind="compute", reason="because", check="replay")
SEEN = Observation("replay", 7, 1, "witness", "aa", ("aa", "bb"), owner=0, micro=0, detail={"differs": ["w"]})
TOPOLOGY = Topology((Placement(0, "a", "gpu-0", 0, "H", "2"), Placement(1, "b", "gpu-1", 0, "H", "2")))
INCIDENT: dict[str, Any] = {
    "verdict": VERDICT.to_json(),
    "observations": [SEEN.to_json()],
    "placement": TOPOLOGY.to_json(),
    "policy": {},
}


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "runs" / "job").create()


def left_over(files: RunFiles) -> list[str]:
    return [path.name for path in files.path.rglob(".*")]


# The directory -------------------------------------------------------------------------------------------------------


def test_create_makes_the_folders_and_leaves_nothing_else(files: RunFiles) -> None:
    assert sorted(path.name for path in files.path.rglob("*")) == ["incidents", "journal"]
    files.write_run({"world_size": 2})
    RunFiles(str(files.path)).create()
    assert files.read_run() == {"schema": SCHEMA, "world_size": 2}
    assert files.path.is_absolute()


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = RunFiles("run").create()
    monkeypatch.chdir("/")
    files.write_run({})
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("below", ["", "deep/er", "journal-is-a-file"])
def test_a_file_in_place_of_a_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    run_dir = tmp_path / "file" / below
    if below == "journal-is-a-file":
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        (run_dir / "journal").write_text("mine")
    with pytest.raises(RunFilesError, match=r"could not be made: (Not a directory|File exists)") as caught:
        RunFiles(run_dir).create()
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_refuses_is_named() -> None:
    """Permissions do not stop root, /proc does."""
    with pytest.raises(RunFilesError, match=r"/proc/bitwitness could not be made: No such file"):
        RunFiles("/proc/bitwitness").create()


def test_a_directory_that_takes_no_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> int:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(RunFilesError, match=r"could not be written to \(choose another.*Read-only file system"):
        RunFiles(tmp_path).create()


def test_discard_staged_removes_what_dead_writers_left(files: RunFiles) -> None:
    files.stage_incident("20260101T000000Z-abcdef").joinpath("evidence").write_text("half")
    (files.path / ".run.json.1.ab.tmp").write_text("half")
    (files.path / "incidents" / ".incident.json.1.ab.tmp").write_text("half")
    (files.path / ".mine").write_text("not ours")
    done = files.commit_incident(new_incident_id(), INCIDENT)
    files.discard_staged()
    assert left_over(files) == [".mine"]
    assert files.incidents() == [done]


# Whole files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"schema": 1', "is not JSON"),
        (b"\xff\xfe\x00\x01", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "has schema None, this version reads 1"),
        (b"null", "has schema None"),
        (b"{}", "has schema None"),
        (b'{"schema": 2}', "has schema 2, this version reads 1: use the version that wrote it"),
        (b'{"schema": "1"}', "has schema '1'"),
    ],
)
def test_damaged_json_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "run.json"
    file.write_bytes(content)
    with pytest.raises(RunFilesError, match=re.escape(what)) as caught:
        read_json(file)
    assert str(file) in str(caught.value)


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFilesError, match=r"run\.json does not exist: is .* the right directory"):
        RunFiles(tmp_path).read_run()
    with pytest.raises(RunFilesError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFilesError, match="cannot be read: Not a directory"):
        read_json(tmp_path / "file" / "run.json")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"n": 1})
    before = file.open()
    write_json(file, {"n": 2, "schema": 7})
    with before:
        assert json.load(before)["n"] == 1
    assert read_json(file) == {"schema": 1, "n": 2}
    assert os.listdir(tmp_path) == ["a.json"]  # noqa: PTH208


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"n": 1})

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunFilesError, match=r"a\.json could not be written: No space left on device"):
        write_json(file, {"n": 2})
    monkeypatch.undo()
    assert read_json(file)["n"] == 1
    assert os.listdir(tmp_path) == ["a.json"]  # noqa: PTH208
    with pytest.raises(RunFilesError, match="could not be written: No such file"):
        write_bytes(tmp_path / "absent" / "a", b"")


def test_what_json_lacks_is_written_as_text(tmp_path: Path) -> None:
    knot: dict[str, Any] = {"name": "knot"}
    knot["self"] = knot
    record = {
        "numbers": [float("nan"), float("inf"), -float("inf"), 1.5, True, None, 2**70],
        "tuple": (1, {2}),
        3: {float("nan"): Path("x")},
        "knot": knot,
    }
    write_json(tmp_path / "a.json", record)  # type: ignore[arg-type]
    found = read_json(tmp_path / "a.json")
    assert found["numbers"] == ["nan", "inf", "-inf", 1.5, True, None, 2**70]
    assert (found["tuple"], found["3"]) == ([1, [2]], {"nan": "x"})
    assert found["knot"]["self"]["self"]["name"] == "knot"


# Incidents -----------------------------------------------------------------------------------------------------------


def test_an_incident_is_read_as_it_was_written(files: RunFiles) -> None:
    incident_id = new_incident_id()
    files.stage_incident(incident_id).joinpath("micro-batch.pt").write_bytes(b"evidence")
    assert files.incidents() == []
    path = files.commit_incident(incident_id, INCIDENT)
    assert files.incidents() == [path]
    assert (path / "micro-batch.pt").read_bytes() == b"evidence"
    for given_path in (path, str(path), path / "incident.json"):
        incident = read_incident(given_path)
        assert (incident.path, incident.verdict, incident.topology) == (path, VERDICT, TOPOLOGY)
        assert incident.observations == (SEEN,)
        assert incident.record["policy"] == {}
    assert left_over(files) == []


def test_incidents_are_sorted_by_time_and_what_is_not_ours_is_left_alone(files: RunFiles) -> None:
    ids = ["20260301T000000Z-000000", "20250101T000000Z-ffffff", "20260301T000000Z-ffffff"]
    made = [files.commit_incident(incident_id, INCIDENT) for incident_id in ids]
    folder = files.path / "incidents"
    (folder / "20260101T000000Z-abcdef").write_text("a file")
    for foreign in ("notes", ".snapshot", "20260101T000000Z-ABCDEF", "20260101T000000Z-abcdef.bak", "lost+found"):
        (folder / foreign).mkdir()
    files.stage_incident("20260101T000000Z-123456")
    assert files.incidents() == [made[1], made[0], made[2]]
    assert RunFiles(files.path / "absent").incidents() == []
    assert RunFiles(folder / "20260101T000000Z-abcdef").incidents() == []


def test_an_incident_is_never_overwritten(files: RunFiles) -> None:
    path = files.commit_incident("20260301T000000Z-000000", INCIDENT)
    with pytest.raises(RunFilesError, match="could not be published"):
        files.commit_incident("20260301T000000Z-000000", {**INCIDENT, "policy": {"audit": "off"}})
    assert read_incident(path).record["policy"] == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"verdict": None},
        {"verdict": []},
        {"verdict": {"status": "clean"}},
        {"verdict": {**VERDICT.to_json(), "status": "guilty"}},
        {"verdict": {**VERDICT.to_json(), "status": "attributed"}},
        {"verdict": {**VERDICT.to_json(), "ranks": 3}},
        {"observations": None},
        {"observations": [{}]},
        {"observations": [None]},
        {"observations": ["check"]},
        {"placement": None},
        {"placement": [1]},
        {"placement": [{"rank": 0}]},
        {"placement": [{**TOPOLOGY.to_json()[0], "rank": 5}]},
    ],
)
def test_a_damaged_incident_is_named(files: RunFiles, damage: dict[str, Any]) -> None:
    path = files.commit_incident(new_incident_id(), {**INCIDENT, **damage})
    with pytest.raises(RunFilesError, match=r"incident\.json is damaged"):
        read_incident(path)
    for key in damage:
        write_json(path / "incident.json", {name: value for name, value in INCIDENT.items() if name != key})
        with pytest.raises(RunFilesError, match=r"incident\.json is damaged: KeyError"):
            read_incident(path)


def test_an_incident_that_is_not_there_is_named(files: RunFiles) -> None:
    with pytest.raises(RunFilesError, match="does not exist"):
        read_incident(files.path / "incidents" / "20260301T000000Z-000000")


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_incident_id() for _ in range(1000)]
    assert len(set(ids)) >= 990  # 24 bits of chance within a second
    assert [one[:16] for one in ids] == sorted(one[:16] for one in ids)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", utc_now())


# Journals ------------------------------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_was_written(files: RunFiles) -> None:
    journal = files.journal(3)
    journal.append("observation", SEEN.to_json())
    journal.append("ledger", LedgerEntry("replay", 0, 9, "passed").to_json())
    journal.close()
    journal.close()
    assert journal.path.name == "rank-00003.jsonl"
    seen, ledger = files.read_journal(3)
    assert (seen["schema"], seen["kind"], seen["rank"]) == (1, "observation", 1)
    assert Observation.from_json(seen) == SEEN
    assert (ledger["kind"], ledger["rank"], ledger["last"]) == ("ledger", 3, 9)
    assert list(files.read_journal(4)) == []
    with pytest.raises(RunFilesError, match="could not be written"):
        journal.append("ledger", {})
    with pytest.raises(AssertionError, match="hide"):
        files.journal(3).append("verdict", VERDICT.to_json())


def test_a_journal_holds_what_json_lacks(files: RunFiles) -> None:
    journal = files.journal(0)
    journal.append("start", {"detail": {"norm": float("nan"), "largest": (float("inf"),)}, "path": Path("x")})
    journal.append("start", {"text": "line\nbreak \u2028 \ud800"})
    journal.close()
    first, second = files.read_journal(0)
    assert first["detail"] == {"norm": "nan", "largest": ["inf"]}
    assert second["text"] == "line\nbreak \u2028 \ud800"


@given(tail=st.binary(max_size=60), lines=st.integers(0, 3))
def test_what_follows_the_last_line_end_is_skipped_and_cut_off(tail: bytes, lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(folder).create()
        path = files.path / "journal" / "rank-00000.jsonl"
        good = b'{"schema":1,"n":0}\n' * lines
        path.write_bytes(good + tail.replace(b"\n", b" "))
        assert len(list(files.read_journal(0))) == lines
        files.journal(0).close()
        assert path.read_bytes() == good


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_a_long_torn_line_is_cut_off(files: RunFiles, size: int) -> None:
    path = files.path / "journal" / "rank-00000.jsonl"
    for good in (b"", b'{"schema":1}\n'):
        path.write_bytes(good + b"x" * size)
        files.journal(0).close()
        assert path.read_bytes() == good


def test_damage_in_the_middle_is_skipped_and_counted(files: RunFiles, caplog: pytest.LogCaptureFixture) -> None:
    path = files.path / "journal" / "rank-00000.jsonl"
    damaged = [b'{"schema":1,"n":', b"\x00\x00", b"\xff", b"[]", b"7", b"", b'{"schema":2}', b"{}", b"[" * 100_000]
    path.write_bytes(b"".join(b'{"schema":1,"n":%d}\n%s\n' % (n, bad) for n, bad in enumerate(damaged)))
    assert [record["n"] for record in files.read_journal(0)] == list(range(len(damaged)))
    assert f"skipped {len(damaged)} torn or damaged line(s)" in caplog.text
    with pytest.raises(RunFilesError, match="cannot be read: Is a directory"):
        list(read_journal(files.path))


def test_a_long_journal(files: RunFiles) -> None:
    journal = files.journal(0)
    for step in range(100_000):
        journal.append("ledger", {"step": step})
    journal.close()
    assert [record["step"] for record in files.read_journal(0)] == list(range(100_000))
    with (files.path / "journal" / "rank-00000.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"st')
    files.journal(0).close()
    assert sum(1 for _ in files.read_journal(0)) == 100_000


def test_a_journal_that_cannot_be_opened_is_named(files: RunFiles) -> None:
    (files.path / "journal" / "rank-00000.jsonl").mkdir()
    with pytest.raises(RunFilesError, match=r"rank-00000\.jsonl could not be opened for appending: Is a directory"):
        files.journal(0)


def test_a_full_device_is_named(files: RunFiles) -> None:
    (files.path / "journal" / "rank-00000.jsonl").symlink_to("/dev/full")
    journal = files.journal(0)
    with pytest.raises(RunFilesError, match="could not be written: No space left on device"):
        journal.append("start", {})


def test_a_line_that_does_not_fit_is_taken_back(files: RunFiles) -> None:
    """RLIMIT_FSIZE makes the system call write a part of a line, as a disk does that fills up."""
    program = f"""
import resource, signal
from bitwitness.errors import RunFilesError
from bitwitness.runfiles import RunFiles
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = RunFiles({str(files.path)!r}).journal(0)
journal.append("start", {{"text": "x" * 100}})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        journal.append("start", {{"text": "y" * 5000}})
    except RunFilesError as error:
        print(error)
try:
    RunFiles({str(files.path)!r}).write_run({{"text": "y" * 5000}})
except RunFilesError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append("start", {{"text": "z"}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(": ")[2] for line in done.stdout.splitlines()] == ["File too large"] * 3
    raw = (files.path / "journal" / "rank-00000.jsonl").read_bytes()
    assert [json.loads(line)["text"][0] for line in raw.splitlines()] == ["x", "z"]
    assert sorted(path.name for path in files.path.rglob("*")) == ["incidents", "journal", "rank-00000.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_writes_into_a_run_belongs_to_the_run(tmp_path: Path) -> None:
    """A controller, with a umask of its own, must not lock a job out of its own files."""
    run = tmp_path / "run"
    run.mkdir(mode=0o755)
    os.chown(run, 65534, 65534)
    before = os.umask(0o077)
    try:
        RunFiles(run).quarantine.deny_node("n1", reason="a test")
        append_line(run / "log.jsonl", {"kind": "a test"})
        append_line(run / "log.jsonl", {"kind": "a test"})
    finally:
        os.umask(before)
    for name in ("quarantine.json", ".quarantine.json.lock", "log.jsonl"):
        made = (run / name).stat()
        assert (made.st_uid, made.st_mode & 0o777) == (65534, 0o644), name


def _write(files: RunFiles, name: str) -> None:
    if name == "log.jsonl":
        append_line(files.path / name, {"kind": "a test"})
    else:
        files.quarantine.deny_node("n1", reason="a test")


def test_no_file_is_reached_through_a_link(tmp_path: Path) -> None:
    """Whoever owns a run must not lead a controller with more rights to other files."""
    run, secret = tmp_path / "run", tmp_path / "secret"
    files = RunFiles(run).create()
    secret.write_text("kept")
    for name in (".quarantine.json.lock", "log.jsonl"):
        for hard in (False, True):
            (run / name).unlink(missing_ok=True)
            (run / name).hardlink_to(secret) if hard else (run / name).symlink_to(secret)
            with pytest.raises(RunFilesError):
                _write(files, name)
    name = new_incident_id()
    (run / "log.jsonl.link").symlink_to(tmp_path / "absent")
    with pytest.raises(RunFilesError):
        append_line(run / "log.jsonl.link", {"kind": "a test"})
    assert not (tmp_path / "absent").exists()
    (tmp_path / "elsewhere").mkdir()
    (run / "incidents" / name).symlink_to(tmp_path / "elsewhere")
    assert files.incidents() == []
    with pytest.raises(RunFilesError, match="no incident"):
        files.note_action(name, "a test")
    assert (secret.read_text(), list((tmp_path / "elsewhere").iterdir())) == ("kept", [])
