"""Runs that are there twice, by two paths or as copies: counted once, on every page, and never hidden where they differ."""

from __future__ import annotations

import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.importing_copies import Copy, in_order
from bitwitness.store.queries.drills import drills_page
from bitwitness.store.queries.exports import EXPORTS, export
from bitwitness.store.queries.fleet import fleet_page
from bitwitness.store.queries.history import history
from bitwitness.store.queries.incident import find_incident
from bitwitness.store.queries.node import device_page, node_page
from bitwitness.store.queries.run import run_page
from bitwitness.store.queries.running import running
from bitwitness.store.queries.runs import runs_page
from tests.store.making import INCIDENT, NOW, append, make_incident, make_run, rows, strike, topology, train, verdict

WHERE = topology()
_HIDDEN = ("path", "run_path", "name", "run_name", "imported", "time", "since")


def run_at(path: Path, **more: Any) -> RunFiles:
    """A run with incidents that name a device and nobody, a judged one, a drill, a quarantine, and a file that cannot be read."""
    files = make_run(path, WHERE, **more)
    train(files, 6, 0, 9)
    make_incident(files, verdict(WHERE), WHERE)
    make_incident(files, verdict(WHERE, ()), WHERE, name="20261130T120000Z-00000b")
    make_incident(files, verdict(WHERE, (3,), 9), WHERE, name="20261130T120000Z-00000c")
    files.note_action("20261130T120000Z-00000c", "judged", judgement="false alarm", who="ann", why="seen")
    files.note_action(INCIDENT, "quarantined", device="GPU-n1-0", reason="wrong")
    files.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="wrong", incident=INCIDENT)
    (path / "faults").mkdir()
    append(path / "faults/rank-00001.jsonl", strike(1, 3))
    (path / "journal/what").write_text("no journal")
    return files


def pages(database: Database) -> dict[str, Any]:
    """All that is listed, counted and added up over all runs."""
    found: dict[str, Any] = {
        "runs": runs_page(database, now=NOW),
        "searched": runs_page(database, query="n1", now=NOW),
        "by incident": runs_page(database, query=INCIDENT, now=NOW),
        "running": running(database, now=NOW),
        "drills": drills_page(database, now=NOW),
        "fleet": fleet_page(database, now=NOW),
        "history": history(database),
        "incident": find_incident(database, INCIDENT),
        **{f"node {name}": node_page(database, name, now=NOW) for name in ("n0", "n1", "n2")},
        "device": device_page(database, "GPU-n1-0", now=NOW),
    }
    for name in EXPORTS:
        columns, each = export(database, name)
        found[f"csv {name}"] = [dict(zip(columns, row, strict=True)) for row in each]
    return {name: plain(page) for name, page in found.items()}


def plain(value: Any) -> Any:
    """Without keys, and without what tells where a run lies and when it was imported."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value) if not _hidden(one.name)}
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items() if not _hidden(str(name))}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _hidden(name: str) -> bool:
    return name in (*_HIDDEN, "key", "run", "now", "denied")


def test_a_run_that_is_reached_by_two_paths_is_one_on_every_page(database: Database, tmp_path: Path) -> None:
    """As many of everything, on all pages and in all tables, as of one."""
    run_at(tmp_path / "a/run")
    Importer(database, [tmp_path / "a/run"]).round()
    alone = pages(database)
    shutil.copytree(tmp_path / "a/run", tmp_path / "b/run")
    shutil.copytree(tmp_path / "a/run", tmp_path / "c/run")
    importer = Importer(database, [tmp_path / "a/run"], parents=[tmp_path / "b", tmp_path / "c"])
    importer.round()
    assert [(row["copy_of"], row["apart"]) for row in rows(database, "runs")] == [(None, False), (1, False), (1, False)]
    now = pages(database)
    for name, page in alone.items():
        assert now[name] == page, name
    assert [(one.key, one.counted) for one in run_page(database, 2).twins] == [(1, True), (3, False)]
    assert [(one.key, one.counted) for one in run_page(database, 1).twins] == [(2, False), (3, False)]
    assert "It is a copy" in run_page(database, 3).run.state_text
    assert run_page(database, 2).run.attributed == 1
    shutil.rmtree(tmp_path / "a/run")
    importer.round()
    assert [row["copy_of"] for row in rows(database, "runs")] == [2, None, 2], "another one takes its place"
    assert pages(database)["csv incidents"] == alone["csv incidents"]


def test_a_directory_that_was_moved_is_the_same_run(database: Database, tmp_path: Path) -> None:
    run_at(tmp_path / "a")
    importer = Importer(database, [], parents=[tmp_path])
    importer.round()
    (tmp_path / "a").rename(tmp_path / "b")
    importer.round()
    assert [(row["missing"], row["copy_of"]) for row in rows(database, "runs")] == [(True, 2), (False, None)]
    assert [one.key for one in runs_page(database).runs] == [2]


def test_a_copy_that_went_its_own_way_is_shown_and_told(database: Database, tmp_path: Path) -> None:
    files = run_at(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    importer = Importer(database, [], parents=[tmp_path])
    importer.round()
    train(files, 6, 10, 12, start=False)
    importer.round()
    assert [one.key for one in runs_page(database).runs] == [1], "the other one is a part of it"
    train(RunFiles(tmp_path / "b"), 6, 10, 20)
    make_incident(RunFiles(tmp_path / "b"), verdict(WHERE), WHERE, name="20261130T120000Z-00000d")
    importer.round()
    importer.round()
    assert {one.key for one in runs_page(database).runs} == {1, 2}
    told = [run_page(database, key).problems for key in (1, 2)]
    assert ["went on by itself" in " ".join(one.text for one in each) for each in told] == [True, True]
    assert [row["problems"] for row in rows(database, "runs")] == [2, 2]
    assert [one.apart for one in run_page(database, 1).twins] == [True]
    strikes = device_page(database, "GPU-n1-0").strikes
    assert sorted(one.incident[-1] for one in strikes) == ["a", "d"], "what they share counts once"
    shutil.rmtree(tmp_path / "b")
    importer.round()
    assert {one.key for one in runs_page(database).runs} == {1, 2}, "gone, and still another run"


def test_what_the_console_shows_is_as_little_as_it_is_sure_of(database: Database, tmp_path: Path) -> None:
    """Runs without an id are never taken for one another, however alike they are."""
    for name in "ab":
        train(make_run(tmp_path / name, WHERE, run=""), 1, 0, 3)
    Importer(database, [], parents=[tmp_path]).round()
    assert [row["copy_of"] for row in rows(database, "runs")] == [None, None]


@pytest.mark.parametrize(
    ("group", "before", "first"),
    [
        ([(1, True, 5, None), (2, True, 5, None)], {}, 1),
        ([(1, True, 5, None), (2, True, 6, None)], {}, 2),
        ([(1, False, 9, None), (2, True, 6, 1)], {1: 9, 2: 6}, 2),
        ([(1, True, 9, None), (2, True, 10, 1)], {1: 8, 2: 9}, 1),
        ([(1, True, 9, None), (2, True, 11, 1)], {1: 9, 2: 10}, 2),
        ([(1, False, 9, 2), (2, False, 6, None)], {}, 1),
    ],
)
def test_which_one_is_counted(group: list[tuple[Any, ...]], before: dict[int, int], first: int) -> None:
    """Among these the last: nobody is there. Among those with two that grow: it does not change hands at every round."""
    made = [Copy(key, "", there, size, main) for key, there, size, main in group]
    assert in_order(made, before)[0].key == first
    assert in_order(made[::-1], before)[0].key == first
