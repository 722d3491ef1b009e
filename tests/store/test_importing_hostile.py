"""Files that lie, tear, vanish or attack: each is told and left out, and everything beside it is imported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bitwitness.runfiles import RunFiles, reading
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer, Progress
from bitwitness.store.importing_sources import PATIENCE
from tests.store.making import (
    INCIDENT,
    Clock,
    append,
    make_checkpoint,
    make_incident,
    make_run,
    rows,
    strike,
    topology,
    train,
    verdict,
)

WHERE = topology()


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    made = make_run(tmp_path / "run", WHERE)
    train(made, 2, 0, 3)
    return made


def line(**record: Any) -> str:
    return json.dumps({"schema": 1, "time": "2026-11-30T11:00:00.000Z", "rank": 0, **record}) + "\n"


def imported(database: Database, files: RunFiles) -> list[dict[str, Any]]:
    """One round, and the problems that it told; the two honest journals are always read."""
    Importer(database, [files.path], clock=Clock()).round()
    assert len(rows(database, "observations", rank=1)) == 4
    return rows(database, "problems")


DEEP = "[" * 100_000
HOSTILE = [
    '{"schema":1,"rank":0,"kind":"observation","check":"replay","step":' + "9" * 5000 + "}",
    '{"schema":1,"rank":0,"kind":"observation","check":"replay","step":99999999999999999999}',
    '{"schema":1,"rank":0,"kind":"observation","check":{"a":1},"step":1}',
    '{"schema":1,"rank":0,"kind":["observation"],"check":"replay","step":1}',
    '{"schema":1,"rank":0,"kind":"ledger","check":"replay","first":5,"last":4,"outcome":"passed"}',
    '{"schema":1,"rank":0,"kind":"ledger","check":"replay","first":5,"last":6,"outcome":"clean"}',
    '{"schema":1,"rank":0,"kind":"ledger","check":"replay","first":true,"last":6,"outcome":"passed"}',
    '{"schema":1,"rank":0,"kind":"ledger","check":"replay","first":5,"last":6,"outcome":["passed"]}',
    '{"schema":1,"rank":0,"kind":"steps","first":0,"last":1,"cost":[]}',
    '{"schema":1,"rank":1,"kind":"observation","check":"replay","step":1}',
    '{"schema":99,"rank":0,"kind":"observation","check":"replay","step":1}',
    DEEP,
    "null",
    "\xff\xfe",
]


def test_lines_that_are_none_are_left_out(database: Database, files: RunFiles) -> None:
    append(files.path / "journal/rank-00000.jsonl", b"".join(text.encode("latin-1") + b"\n" for text in HOSTILE))
    train(files, 1, 4, 5, start=False)
    (problem,) = imported(database, files)
    assert problem["lines"] == len(HOSTILE)
    assert [row["step"] for row in rows(database, "observations", rank=0)] == [0, 1, 2, 3, 4, 5]
    assert [(row["check"], row["passed"]) for row in rows(database, "coverage")] == [("replay", 10)]


STRANGE = "a\0b\ud800\u202e<script>" + "x" * 100_000


def test_strange_text_and_numbers_are_stored_as_they_can_be(database: Database, files: RunFiles) -> None:
    """PostgreSQL refuses NUL, and neither database takes half of a character."""
    detail = {STRANGE: [1e999, 10**400, -(10**400), float("nan"), {"deep": json.loads("[" * 90 + "]" * 90)}]}
    seen = {
        "check": "replay",
        "place": STRANGE,
        "value": STRANGE,
        "error": STRANGE,
        "detail": detail,
        "repeats": [STRANGE],
    }
    append(files.path / "journal/rank-00000.jsonl", line(kind="observation", step=1, **seen))
    append(
        files.path / "journal/rank-00000.jsonl",
        line(kind="ledger", check="replay", first=0, last=1, outcome="failed", reason=STRANGE),
    )
    append(files.path / "journal/rank-00000.jsonl", line(kind="guard_failure", step=1, error=STRANGE))
    append(
        files.path / "journal/rank-00000.jsonl",
        line(kind="steps", first=0, last=1, loss=float("nan"), norm=10**400, nonfinite=1),
    )
    files.write_run({"run": STRANGE, "scheduler_job": STRANGE, "placement": WHERE.to_json(), "limits": [STRANGE, 1]})
    assert imported(database, files) == []
    assert len(rows(database, "observations", rank=0)) == 5
    (stretch,) = rows(database, "steps")
    assert (stretch["loss"], stretch["norm"], stretch["nonfinite"]) == (None, None, 1)
    for table in ("observations", "ledger", "marks", "runs"):
        assert "\0" not in repr(rows(database, table))


def test_lines_that_no_guard_writes_spoil_no_sum(database: Database, files: RunFiles) -> None:
    """Checks that nobody knows, steps that nobody can have made, times that nobody can have taken: told, and left out."""
    path = files.path / "journal/rank-00000.jsonl"
    whole = {"first": 0, "last": 3, "loss": 1.0, "nonfinite": 0, "clock": "host"}
    append(path, line(kind="steps", **whole, seconds=4.0, cost={"replay": 1.0, "unheard of": 1e308}))
    imported(database, files)
    before = (rows(database, "coverage"), rows(database, "costs"), rows(database, "runs")[0]["step"])
    for number in range(500):
        append(path, line(kind="ledger", check=f"check {number}", first=0, last=1, outcome="passed"))
    for first, last in ((4, 1 << 40), (4, 10**30), (1 << 39, 1 << 39), (4, 2_000_004), (True, 4)):
        append(path, line(kind="ledger", check="replay", first=first, last=last, outcome="passed"))
        append(path, line(kind="steps", **{**whole, "first": first, "last": last}, seconds=1.0, cost={}))
    append(path, line(kind="resume", step=1 << 39) + line(kind="observation", check="replay", step=1 << 39))
    for seconds, cost in ((1e-300, 1.0), (1e308, 1.0), (1.0, 1e308)):
        append(path, line(kind="steps", **whole, seconds=seconds, cost={"replay": cost}))
    (problem,) = imported(database, files)
    assert problem["lines"] == 500 + 10 + 2 + 3
    (run,) = rows(database, "runs")
    assert (rows(database, "coverage"), rows(database, "costs"), run["step"]) == before
    assert (run["cost"], run["pace"]) == (0.25, 1.0)
    append(path, line(kind="steps", **{**whole, "loss": 1e308, "loss_high": 1e200}, seconds=4.0, cost={}))
    imported(database, files)
    (stretch,) = rows(database, "steps")
    assert (stretch["loss"], stretch["loss_high"]) == (None, None), "sums of such are no numbers"


def test_a_line_without_end_is_never_held_in_memory(database: Database, files: RunFiles) -> None:
    """A sparse file of 3 GiB without a line end; then one comes, and what follows is read."""
    path = files.path / "journal/rank-00000.jsonl"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size + (3 << 30 if os.environ.get("BITWITNESS_EXHAUSTIVE") else 40 << 20))
    clock = Clock()
    importer = Importer(database, [files.path], clock=clock)
    for _ in range(20):
        importer.round()
    assert rows(database, "sources", path="journal/rank-00000.jsonl")[0]["offset"] == size
    append(path, b"\n")
    train(files, 1, 4, 4, start=False)
    for _ in range(20):
        importer.round()
    assert [row["step"] for row in rows(database, "observations", rank=0)] == [0, 1, 2, 3, 4]
    assert rows(database, "problems")[0]["lines"] == 1


def test_zeros_may_be_what_has_not_arrived(database: Database, files: RunFiles) -> None:
    """A network file system shows what is on its way as zeros: a line is not given up before it had time to arrive."""
    path = files.path / "journal/rank-00000.jsonl"
    size = path.stat().st_size
    late = line(kind="observation", check="replay", step=4)
    append(path, b"\0" * (len(late) - 10) + late[-10:].encode())
    append(path, line(kind="observation", check="replay", step=5))
    clock = Clock()
    importer = Importer(database, [files.path], clock=clock)
    importer.round()
    clock.pass_(PATIENCE / timedelta(seconds=2))
    importer.round()
    assert rows(database, "sources", path="journal/rank-00000.jsonl")[0]["offset"] == size
    with path.open("r+b") as file:
        file.seek(size)
        file.write(late.encode())
    importer.round()
    assert [row["step"] for row in rows(database, "observations", rank=0)][-2:] == [4, 5]


def test_zeros_that_stay_are_a_damaged_line(database: Database, files: RunFiles) -> None:
    append(
        files.path / "journal/rank-00000.jsonl",
        b"\0" * 100 + b"\n" + line(kind="observation", check="replay", step=5).encode(),
    )
    clock = Clock()
    importer = Importer(database, [files.path], clock=clock)
    importer.round()
    clock.pass_(PATIENCE.total_seconds() + 1)
    importer.round()
    assert rows(database, "observations", rank=0)[-1]["step"] == 5
    assert rows(database, "problems")[0]["lines"] == 1


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.with_name(f"{path.name}.elsewhere")
    target.write_text('{"schema":1}')
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.mkdir()


NAMES = (
    "journal/rank-00002.jsonl",
    "quarantine.json",
    "supervise/log.jsonl",
    f"incidents/{INCIDENT}/incident.json",
    f"incidents/{INCIDENT}/actions.jsonl",
    "checkpoints/step-00000004/label.json",
    "faults/rank-00000.jsonl",
    "run.json",
)


@pytest.mark.parametrize("make", [_fifo, _link, _folder])
def test_what_is_no_file_is_told_and_not_followed(
    database: Database, files: RunFiles, make: Callable[[Path], None]
) -> None:
    make_incident(files, verdict(WHERE), WHERE)
    Importer(database, [files.path], clock=Clock()).round()
    for name in NAMES:
        path = files.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)
    told = {row["path"] for row in imported(database, files)}
    assert told >= {str(files.path / name) for name in NAMES}


def test_folders_that_are_links_are_not_entered(database: Database, files: RunFiles, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    make_incident(other, verdict(WHERE), WHERE)
    shutil.rmtree(files.path / "incidents")
    (files.path / "incidents").symlink_to(other.path / "incidents")
    imported(database, files)
    assert rows(database, "incidents") == []


def contradictions() -> dict[str, Callable[[dict[str, Any]], None]]:
    """What may be written into an incident that names nobody, or another than it shows."""
    return {
        "ranks of an unattributed one": lambda one: one["verdict"].update(status="unattributed"),
        "no ranks": lambda one: one["verdict"].update(ranks=[]),
        "another node": lambda one: one["verdict"].update(nodes=["n0"]),
        "another device": lambda one: one["verdict"].update(devices=["GPU-n0-0"]),
        "a rank that is not there": lambda one: one["verdict"].update(ranks=[77]),
        "a rank that is no number": lambda one: one["verdict"].update(ranks=["2"]),
        "a rank that is true": lambda one: one["verdict"].update(ranks=[True]),
        "clean": lambda one: one["verdict"].update(status="clean", ranks=[], kind=None),
        "no placement": lambda one: one.update(placement=[]),
        "a placement that is none": lambda one: one.update(placement=[{"rank": 0}]),
        "no verdict": lambda one: one.update(verdict=[]),
        "a step that is none": lambda one: one["verdict"].update(step=-5),
        "no window": lambda one: one["verdict"].update(window=[1]),
        "ranks without end": lambda one: one["verdict"].update(ranks={"a": 1}),
    }


def test_an_incident_that_contradicts_itself_names_nobody(database: Database, files: RunFiles) -> None:
    told = set()
    for number, change in enumerate(contradictions().values()):
        path = make_incident(files, verdict(WHERE), WHERE, f"20261130T120000Z-{number:06x}") / "incident.json"
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
        told.add(str(path))
    honest = "20261130T120000Z-0000ff"
    make_incident(files, verdict(WHERE, ()), WHERE, honest)
    assert {row["path"] for row in imported(database, files)} == told
    assert [row["name"] for row in rows(database, "incidents")] == [honest]
    assert [row for row in rows(database, "incident_ranks") if row["role"] == "named"] == []
    assert rows(database, "runs")[0]["attributed"] == 0


def test_nodes_that_an_unattributed_incident_claims_are_not_believed(database: Database, files: RunFiles) -> None:
    path = make_incident(files, verdict(WHERE, ()), WHERE) / "incident.json"
    record = json.loads(path.read_text())
    record["verdict"].update(nodes=["n1"], devices=["GPU-n1-0"])
    path.write_text(json.dumps(record))
    imported(database, files)
    assert {row["role"] for row in rows(database, "incident_ranks")} == {"candidate", "involved"}


def test_every_other_file_may_be_damaged(database: Database, files: RunFiles) -> None:
    make_checkpoint(files, 4, WHERE)
    make_incident(files, verdict(WHERE), WHERE)
    for name in ("run.json", "quarantine.json", "checkpoints/step-00000004/label.json", "supervise/session.json"):
        (files.path / name).parent.mkdir(exist_ok=True)
        (files.path / name).write_text('{"schema": 1, "strikes": 7, "placement": 7, "log": {}, "id": []}')
    append(
        files.path / f"incidents/{INCIDENT}/actions.jsonl",
        '{"schema":1,"action":7}\n{"schema":1,"action":"judged","judgement":"x"}\n',
    )
    (files.path / "faults").mkdir()
    append(files.path / "faults/rank-00000.jsonl", "{}\n" + strike(0, 1) + '{"schema":1,"site":{"rank":-1}}\n')
    (files.path / "journal/rank-1.jsonl").write_text("")
    (files.path / "incidents/nonsense").mkdir()
    told = {Path(row["path"]).name for row in imported(database, files)}
    assert told == {
        "run.json", "quarantine.json", "label.json", "actions.jsonl", "rank-00000.jsonl", "rank-1.jsonl", "incidents",
    }  # fmt: skip
    assert len(rows(database, "drills")) == len(rows(database, "incidents")) == 1


def test_a_file_that_is_mended_is_no_problem_any_more(database: Database, files: RunFiles) -> None:
    path = files.path / "quarantine.json"
    path.write_text("{")
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    importer.round()
    assert len(rows(database, "problems")) == 1
    path.unlink()
    files.quarantine.deny_node("n1", reason="wrong")
    importer.round()
    assert rows(database, "problems") == []
    assert rows(database, "runs")[0]["problems"] == 0


def test_files_that_vanish_between_looking_and_reading(database: Database, files: RunFiles) -> None:
    make_incident(files, verdict(WHERE), WHERE)
    with reading.Folder(files.path) as folder:
        shutil.rmtree(files.path)
        assert (folder.names("incidents"), folder.look("run.json"), folder.sizes("incidents", 5)) == ([], "", {})
    Importer(database, [files.path], clock=Clock()).round()
    assert [Path(row["path"]).name for row in rows(database, "problems")] == ["run"]


def test_what_ends_a_round_loses_nothing(database: Database, files: RunFiles) -> None:
    class Stopped(BaseException):
        pass

    told: list[int] = []

    def stop(progress: Progress) -> None:
        told.append(progress.records)
        if len(told) != 2:
            raise Stopped  # before the run, and when some of it is read

    importer = Importer(database, [files.path], clock=Clock())
    for _ in range(2):
        with pytest.raises(Stopped):
            importer.round(stop)
    assert told[:2] == [0, 0]
    assert told[2] > 0
    importer.round()
    assert len(rows(database, "observations")) == 8


def test_a_run_that_nobody_may_write_to(database: Database, files: RunFiles) -> None:
    """Nothing is ever written into a run: neither a file nor a time of reading that a reader could see."""
    before = sorted((path, path.stat().st_mtime_ns) for path in files.path.rglob("*"))
    Importer(database, [files.path], clock=Clock()).round()
    assert sorted((path, path.stat().st_mtime_ns) for path in files.path.rglob("*")) == before
