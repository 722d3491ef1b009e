"""From the files of a run to what its pages say: the importer and the queries together, on runs of the demo's three kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bitwitness.runfiles import RunFiles
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.pages import IncidentPage, RunPage
from bitwitness.topology import Topology
from tests.store.filling import Filling
from tests.store.making import (
    INCIDENT,
    NOW,
    Clock,
    append,
    make_checkpoint,
    make_incident,
    make_run,
    strike,
    topology,
    train,
    verdict,
)

WHERE = topology()
DEVICE, NODE = "GPU-n1-0", "n1"


def guarded(path: Path, found: tuple[int, ...], where: Topology = WHERE) -> RunFiles:
    """Steps 0 to 7, an incident at step 7, and from the checkpoint of step 4 to the end at step 9."""
    files = make_run(path, where, policy={"audit": "gradients", "audit_every": 1})
    train(files, where.world_size, 0, 6)
    for rank in range(where.world_size):
        with_failure = files.journal(rank)
        failed = not found or rank in found
        with_failure.append(
            "ledger", {"check": "replay", "first": 7, "last": 7, "outcome": "failed" if failed else "passed"}
        )
        with_failure.close()
    make_checkpoint(files, 4, where)
    make_incident(files, verdict(where, found), where, time="2026-01-01T00:00:00.000Z")
    return files


def goes_on(files: RunFiles, where: Topology = WHERE) -> None:
    """A second start, which makes steps 4 to 9, those up to 7 once more."""
    for rank in range(where.world_size):
        journal = files.journal(rank)
        journal.append("start", {"world_size": where.world_size, "node": "n0", "generation": 2})
        journal.append("ledger", {"check": "replay", "first": 4, "last": 9, "outcome": "passed"})
        journal.close()


def pages(database: Database, path: Path) -> tuple[RunPage, IncidentPage]:
    importer = Importer(database, [path], clock=Clock())
    importer.round()
    (row,) = queries.runs_page(database, now=NOW).runs
    return queries.run_page(database, row.key, now=NOW), queries.incident_page(database, row.key, INCIDENT, now=NOW)


def test_a_run_that_was_hit_caught_and_went_on(filling: Filling, tmp_path: Path) -> None:
    files = guarded(tmp_path / "run", (2,))
    goes_on(files)
    files.quarantine.deny_devices([DEVICE], node=NODE, reason="persistent corruption", incident=INCIDENT)
    files.note_action(INCIDENT, "quarantined", device=DEVICE, node=NODE, reason="persistent corruption")
    run, incident = pages(filling.database, files.path)
    assert (run.run.step, run.run.checkpoint, run.run.attributed, run.run.unattributed, run.run.open) == (9, 4, 1, 0, 1)
    covered = {one.check: one for one in run.run.coverage}
    assert (covered["replay"].passed, covered["replay"].failed, covered["replay"].all) == (60, 0, 60)
    assert covered["numerics"].passed == 0, "the policy wants it, and no journal has it"
    replay = next(one for one in run.maps if one.check == "replay")
    failed = [
        (row, column) for row, cells in enumerate(replay.cells) for column, cell in enumerate(cells) if cell != "passed"
    ]
    assert failed == [(2, 7)]
    assert replay.reasons["2,7"].endswith("and was made again since")
    assert [one.kind for one in run.marks if one.step == 7] == ["attributed"]
    assert incident.checkpoint == 4
    assert (incident.incident.ranks, incident.incident.nodes, incident.incident.devices) == ((2,), (NODE,), (DEVICE,))
    assert incident.incident.action == "quarantined"
    assert {one.source for one in incident.history} == {"incident", "quarantine"}
    node = queries.node_page(filling.database, NODE, now=NOW)
    assert node.row is not None
    assert (node.row.state, node.row.strikes, node.row.quarantined, node.row.devices) == ("suspected", 1, 1, 2)
    files.quarantine.clear([DEVICE], who="ann@login", reason="exchanged")
    Importer(filling.database, [files.path], clock=Clock()).round()
    cleared = queries.device_page(filling.database, DEVICE, now=NOW)
    assert [(one.counts, "ann@login" in one.cleared) for one in cleared.strikes] == [(False, True)]
    assert cleared.denied == ()
    assert cleared.row is not None
    assert cleared.row.state == "unknown"


def test_a_run_of_which_nobody_can_be_named(filling: Filling, tmp_path: Path) -> None:
    two = topology(("n0", "n1"))
    run, incident = pages(filling.database, guarded(tmp_path / "run", (), two).path)
    assert (run.run.attributed, run.run.unattributed) == (0, 1)
    assert (incident.incident.ranks, incident.incident.devices, incident.incident.candidates) == ((), (), (0, 2))
    replay = next(one for one in run.maps if one.check == "replay")
    assert {cells[7] for cells in replay.cells} == {"failed"}
    assert [one.kind for one in run.marks if one.step == 7] == ["unattributed"]
    fleet = queries.fleet_page(filling.database, now=NOW)
    assert {one.name: (one.state, one.strikes, one.involved) for one in fleet.nodes} == {
        "n0": ("unknown", 0, 1),
        "n1": ("unknown", 0, 1),
    }
    assert queries.device_page(filling.database, DEVICE, now=NOW).strikes == ()


def test_what_a_person_says_of_an_incident_is_what_every_page_says(filling: Filling, tmp_path: Path) -> None:
    files = guarded(tmp_path / "run", (2,))
    database = filling.database
    assert queries.runs_page(database, now=NOW).attributed == 0
    pages(database, files.path)
    assert queries.runs_page(database, now=NOW).attributed == 1
    files.note_action(INCIDENT, "judged", judgement="false alarm", who="ann@login", why="a bug of ours")
    run, incident = pages(database, files.path)
    assert (run.run.attributed, run.run.false_alarms, run.run.open) == (0, 1, 0)
    assert incident.incident.judgement == "false alarm"
    assert [one.kind for one in run.marks if one.step == 7] == ["false alarm"]
    drills = queries.drills_page(database, now=NOW)
    assert [one.id for one in drills.false_alarms] == [INCIDENT]
    assert {one.check: one.false_alarms for one in drills.tallies}["replay"] == 1
    (struck,) = queries.device_page(database, DEVICE, now=NOW).strikes
    assert (struck.counts, struck.cleared.startswith("called a false alarm by ann@login")) == (False, True)
    files.note_action(INCIDENT, "judged", judgement="confirmed", who="bob (console)", why="it was real")
    pages(database, files.path)
    told = {one.who: (one.source, one.text) for one in queries.history(database, incident=INCIDENT)}
    assert told == {
        "ann@login": ("incident", "false alarm: a bug of ours"),
        "bob (console)": ("console", "confirmed: it was real"),
    }
    assert queries.device_page(database, DEVICE, now=NOW).strikes[0].counts


def test_a_drill_that_names_somebody_else_is_told(filling: Filling, tmp_path: Path) -> None:
    files = guarded(tmp_path / "run", (2,))
    (files.path / "faults").mkdir()
    append(files.path / "faults/rank-00004.jsonl", strike(4, 7))
    run, incident = pages(filling.database, files.path)
    assert incident.incident.judgement == "", "no fault hit whom it names, so it is as real as any other"
    assert (run.run.attributed, run.run.drills) == (1, 0)
    page = queries.drills_page(filling.database, now=NOW)
    assert [(one.outcome, one.rank, one.incident) for one in page.drills] == [("named wrongly", 4, INCIDENT)]
    append(files.path / "faults/rank-00002.jsonl", strike(2, 7))
    pages(filling.database, files.path)
    page = queries.drills_page(filling.database, now=NOW)
    assert {one.rank: one.outcome for one in page.drills} == {2: "caught", 4: "unclear"}, "it is the other's"


def test_a_device_that_moved_is_one_device(filling: Filling, tmp_path: Path) -> None:
    files = guarded(tmp_path / "run", (2,))
    moved = tuple(replace(one, node="n9" if one.device == DEVICE else one.node) for one in WHERE.placements)
    other = make_run(tmp_path / "other", Topology(moved), run="run-2", started="2026-11-30T11:59:00.000Z")
    train(other, 6, 0, 3)
    Importer(filling.database, [files.path, other.path], clock=Clock()).round()
    page = queries.device_page(filling.database, DEVICE, now=NOW)
    assert {(one.run_name, one.node) for one in page.stays} == {("run", "n1"), ("other", "n9")}
    assert [one.node for one in page.strikes] == ["n1"]
    assert page.row is not None
    assert page.row.name == "n9"
