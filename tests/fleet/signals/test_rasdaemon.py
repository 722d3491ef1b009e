"""rasdaemon's database: read only, whatever tables it has, however damaged it is."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bitwitness.fleet.signals import Signal, rasdaemon

NOW = datetime(2026, 11, 29, tzinfo=UTC)
MEMORY = (
    "CREATE TABLE mc_event (id INTEGER PRIMARY KEY, timestamp TEXT, err_count INTEGER, err_type TEXT, err_msg TEXT, label TEXT,"
    " mc INTEGER, top_layer INTEGER, middle_layer INTEGER, lower_layer INTEGER, address INTEGER, grain INTEGER, syndrome INTEGER,"
    " driver_detail TEXT)"
)
CHECKS = "CREATE TABLE mce_record (id INTEGER PRIMARY KEY, timestamp TEXT, status INTEGER, cpu INTEGER, bank INTEGER, error_msg TEXT)"


def database(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as opened:
        for statement in statements:
            opened.execute(statement)
        opened.commit()
    return path


def event(
    kind: object = "Corrected", count: object = 1, at: object = "2026-11-29 03:00:00 +0100", label: str = "DIMM_B1"
) -> str:
    values = ", ".join("NULL" if value is None else repr(value) for value in (at, count, kind, "read error", label))
    return f"INSERT INTO mc_event (timestamp, err_count, err_type, err_msg, label) VALUES ({values})"


def read(source: Path | bytes | str) -> list[Signal]:
    return list(rasdaemon.read(source, origin="ras.db", now=NOW))


def kinds(found: Sequence[Signal]) -> list[tuple[str, str]]:
    return [(one.code, one.kind) for one in found]


def test_events_of_memory(tmp_path: Path) -> None:
    path = database(tmp_path / "ras.db", MEMORY, event(count=3), event("Uncorrected"), event("Fatal"))
    found = read(path)
    assert [(one.code, one.weight, one.count, one.device) for one in found] == [
        ("edac:ue", "strong", 1, "DIMM_B1"), ("edac:ue", "strong", 1, "DIMM_B1"), ("edac:ce", "weak", 3, "DIMM_B1"),
    ]  # fmt: skip
    assert {(one.source, one.time) for one in found} == {("rasdaemon", "2026-11-29T02:00:00.000Z")}
    assert "3 Corrected: read error at DIMM_B1" in found[-1].evidence
    assert read(path.read_bytes()) == found, "a database that was compressed is read from memory"


@pytest.mark.parametrize("kind", [None, "", "Info", 7, "Korrigiert"])
def test_an_event_of_an_unknown_kind_is_neither_good_nor_bad(tmp_path: Path, kind: object) -> None:
    assert kinds(read(database(tmp_path / "ras.db", MEMORY, event(kind)))) == [("rasdaemon:unreadable", "no-evidence")]


@pytest.mark.parametrize("at", [None, "", "yesterday", "2026-13-29 03:00:00", "9999-12-31 23:59:59 -1200", 17])
def test_a_time_that_is_none(tmp_path: Path, at: object) -> None:
    (one,) = read(database(tmp_path / "ras.db", MEMORY, event("Uncorrected", at=at)))
    assert (one.code, one.time) == ("edac:ue", None)
    assert "When, the record does not say" in one.reason


def test_machine_checks_by_their_status(tmp_path: Path) -> None:
    rows = [
        f"INSERT INTO mce_record (status, cpu, bank) VALUES ({status}, 3, 7)"
        for status in (-(1 << 62) + 5, 1 << 62, -1 << 63, "'x'")
    ]
    assert kinds(read(database(tmp_path / "ras.db", CHECKS, *rows))) == [
        ("rasdaemon:unreadable", "no-evidence"), ("mce:corrected", "memory"), ("mce:corrected", "memory"), ("mce:corrected", "memory")
    ]  # fmt: skip
    rows = ["INSERT INTO mce_record (status) VALUES (-4971973988617027584)"]
    assert kinds(read(database(tmp_path / "bad.db", CHECKS, *rows))) == [("mce:uncorrected", "memory")]


def test_other_tables(tmp_path: Path) -> None:
    path = database(
        tmp_path / "ras.db",
        "CREATE TABLE aer_event (id INTEGER PRIMARY KEY, timestamp TEXT, dev_name TEXT, err_type TEXT, err_msg TEXT)",
        "INSERT INTO aer_event (dev_name, err_type) VALUES ('0000:9b:00.0', 'Corrected'), ('0000:9b:00.0', 'Uncorrected (Fatal)')",
        "CREATE TABLE memory_failure_event (id INTEGER PRIMARY KEY, pfn TEXT, page_type TEXT, action_result TEXT)",
        "INSERT INTO memory_failure_event (pfn) VALUES ('0x1')",
        "CREATE TABLE disk_errors (id INTEGER PRIMARY KEY)",
    )
    found = read(path)
    assert [(one.code, one.device) for one in found] == [
        ("rasdaemon:memory-failure", ""), ("aer:uncorrected", "0000:9b:00"), ("aer:corrected", "0000:9b:00")
    ]  # fmt: skip


def test_tables_that_are_missing_are_normal_and_none_at_all_is_no_evidence(tmp_path: Path) -> None:
    assert read(database(tmp_path / "ras.db", MEMORY)) == []
    other = database(tmp_path / "other.db", "CREATE TABLE people (name TEXT)")
    assert kinds(read(other)) == [("rasdaemon:not-collected", "no-evidence")]


def test_columns_that_are_missing(tmp_path: Path) -> None:
    path = database(
        tmp_path / "ras.db", "CREATE TABLE mc_event (err_type TEXT)", "INSERT INTO mc_event VALUES ('Uncorrected')"
    )
    assert kinds(read(path)) == [("edac:ue", "memory")]


def test_the_newest_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rasdaemon, "_ROWS", 2)
    found = read(database(tmp_path / "ras.db", MEMORY, *(event(label=f"D{number}") for number in range(4))))
    assert [one.device for one in found] == ["D3", "D2", ""]
    assert found[-1].code == "rasdaemon:more"


def beside(path: Path) -> dict[str, tuple[int, int]]:
    """What lies in the directory of a file, and when it was written."""
    return {one.name: (one.stat().st_size, one.stat().st_mtime_ns) for one in path.parent.iterdir()}


def test_nothing_is_written(tmp_path: Path) -> None:
    path = database(tmp_path / "ras.db", "PRAGMA journal_mode = WAL", MEMORY, event())
    before, content = beside(path), path.read_bytes()
    assert list(before) == ["ras.db"]
    assert kinds(read(path)) == [("edac:ce", "memory")]
    assert (beside(path), path.read_bytes()) == (before, content)


def test_what_stands_in_a_write_ahead_log_only_is_read_and_nothing_is_written(tmp_path: Path) -> None:
    path = database(tmp_path / "ras.db", "PRAGMA journal_mode = WAL", MEMORY)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute(event("Uncorrected"))
        writer.commit()
        before = beside(path)
        assert sorted(before) == ["ras.db", "ras.db-shm", "ras.db-wal"]
        assert kinds(read(path)) == [("edac:ue", "memory")]
        assert beside(path) == before


def test_a_write_that_was_cut_off_is_undone_in_a_copy(tmp_path: Path) -> None:
    path = database(tmp_path / "ras.db", MEMORY, event("Uncorrected"))
    copied = tmp_path / "copied"
    copied.mkdir()
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN")
        for number in range(300):
            writer.execute(event(label=f"D{number}" * 40))
        for one in (path, path.with_name("ras.db-journal")):
            shutil.copyfile(one, copied / one.name)
    before = beside(copied / "ras.db")
    assert kinds(read(copied / "ras.db")) == [("edac:ue", "memory")]
    assert beside(copied / "ras.db") == before


@pytest.mark.parametrize(("setting", "value", "why"), [("_LARGEST", 10, "larger than"), ("_TRIES", 0, "written to")])
def test_a_journal_that_cannot_be_copied_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: int, why: str
) -> None:
    monkeypatch.setattr(rasdaemon, setting, value)
    (one,) = read(database(tmp_path / "ras.db", "PRAGMA journal_mode = WAL", MEMORY, event()))
    assert (one.code, one.kind) == ("rasdaemon:unreadable", "no-evidence")
    assert why in one.reason


def test_what_nobody_had_used_yet_weighs_less(tmp_path: Path) -> None:
    checks = CHECKS.replace("error_msg", "mcistatus_msg")
    told = "INSERT INTO mce_record (status, mcistatus_msg) VALUES (1, 'Deferred_error MiscV')"
    found = read(database(tmp_path / "ras.db", MEMORY, event("Deferred"), checks, told))
    assert [(one.code, one.kind, one.weight) for one in found] == [
        ("edac:deferred", "memory", "medium"), ("mce:deferred", "memory", "medium")
    ]  # fmt: skip


def test_a_file_that_is_cut_tells_what_it_still_has_and_that_it_is_cut(tmp_path: Path) -> None:
    path = database(
        tmp_path / "ras.db", MEMORY, *(event("Uncorrected", label=f"D{number}" * 40) for number in range(100))
    )
    whole = path.read_bytes()
    for size in (20, 100, 4096, len(whole) // 2, len(whole) - 4096):
        path.write_bytes(whole[:size])
        found = read(path)
        assert "rasdaemon:unreadable" in [one.code for one in found], size


def test_a_view_that_never_ends_is_not_asked(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS err_type FROM n"
    path = database(tmp_path / "ras.db", f"CREATE VIEW mc_event AS {endless}")
    assert kinds(read(path)) == [("rasdaemon:not-collected", "no-evidence")]


def test_the_counts_that_ras_mc_ctl_prints() -> None:
    found = read("Label               \tCE\tUE\nCPU_SrcID#0_MC#0_Chan#0_DIMM#0\t3\t1\nmc#0csrow#1 channel#0\t0\t0\n")
    assert [(one.code, one.device, one.count, one.weight) for one in found] == [
        ("edac:ce", "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", 3, "weak"), ("edac:ue", "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", 1, "strong"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "Label CE UE\n", "Label CE UE\nA 1\n", "Label CE UE\nA x 0\n", "something else"])
def test_counts_that_cannot_be_read(text: str) -> None:
    assert kinds(read(text)) == [("rasdaemon:unreadable", "no-evidence")]


def test_a_file_that_is_absent(tmp_path: Path) -> None:
    assert kinds(read(tmp_path / "absent.db")) == [("rasdaemon:unreadable", "no-evidence")]


def test_what_looks_like_it(tmp_path: Path) -> None:
    assert rasdaemon.looks_like(database(tmp_path / "x", MEMORY).read_bytes()[:4096], "x")
    assert rasdaemon.looks_like(b"Label\tCE\tUE\nA\t0\t0\n", "x")
    assert not rasdaemon.looks_like(b"EDAC MC0: 1 CE memory read error", "x")
