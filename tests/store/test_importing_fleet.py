"""The state of a controller in the database: its audit trail once and whole, its proposals as they stand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bitwitness.fleet.decision import Naming, Proposal
from bitwitness.fleet.kept import Book, Known
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from tests.store.making import INCIDENT, Clock, make_incident, make_run, rows, topology, verdict

SIGNAL = Signal("kernel", "xid:63", "GPU-n1-0", "2026-11-30T11:00:00Z", "memory", "strong", "a row was remapped")
PROPOSAL = Proposal(INCIDENT, "n1", ("GPU-n1-0",), "drain", "drain", "high", "it computes wrongly", (SIGNAL,))
NAMING = Naming("2026-11-30T11:30:00.000Z", INCIDENT, "run", 2, "GPU-n1-0", "n1", "persistent")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state with a proposal that waits, a naming and two lines of audit."""
    with State(tmp_path / "state") as state, state.change():
        state.set_about(mode="act", cluster="slurm", policy="p.toml", password="hidden")
        Book(state).add_proposal(PROPOSAL, 0)
        Book(state).add_namings([NAMING])
        state.note("proposed", "drain n1", incident=INCIDENT, node="n1", record={"a": 1})
        state.note("approved", "\x1b[31m go", who="ann@host", node="n1")
    return tmp_path / "state"


def test_a_state_is_imported_once(database: Database, opened: Callable[[], Database], folder: Path) -> None:
    importer = Importer(database, [], fleets=[folder], clock=Clock())
    assert importer.round().fleet
    assert not importer.round().fleet
    assert not Importer(opened(), [], fleets=[folder], clock=Clock()).round().fleet
    (controller,) = rows(database, "controllers")
    assert (controller["mode"], controller["cluster"], controller["life"]) == ("act", "slurm", "never")
    assert "hidden" not in repr(controller)
    assert [(row["number"], row["who"], row["what"]) for row in rows(database, "audit")] == [
        (1, "controller", "proposed"),
        (2, "ann@host", "approved"),
    ]
    (proposal,) = rows(database, "proposals")
    assert (proposal["node"], proposal["devices"], proposal["act"], proposal["waits"]) == (
        "n1",
        ["GPU-n1-0"],
        "drain",
        False,
    )
    assert proposal["signals"] == ["xid:63 on GPU-n1-0 at 2026-11-30T11:00:00Z (kernel, strong): a row was remapped"]
    assert [(row["device"], row["cleared"]) for row in rows(database, "namings")] == [("GPU-n1-0", "")]


def test_what_changes_is_seen(database: Database, folder: Path) -> None:
    importer = Importer(database, [], fleets=[folder], clock=Clock())
    importer.round()
    with State(folder) as state, state.change():
        (kept,) = Book(state).proposals()
        Book(state).set_status(kept.key, "held", "a person must answer", hold="approval")
        Book(state).add_clear("n1", ["GPU-n1-0"], "ann@host")
        Book(state).add_proposal(replace(PROPOSAL, node="n2"), 1)
        for number in range(10):
            state.note("held", f"still {number}")
    assert importer.round().fleet
    found = {row["node"]: (row["status"], row["waits"]) for row in rows(database, "proposals")}
    assert found == {"n1": ("held", True), "n2": ("proposed", False)}
    assert [row["number"] for row in rows(database, "audit")] == list(range(1, 13))


def test_a_state_that_is_damaged_is_told_and_what_was_known_stays(database: Database, folder: Path) -> None:
    importer = Importer(database, [], fleets=[folder, folder.parent / "none"], clock=Clock())
    importer.round()
    for path in folder.iterdir():
        path.unlink()
    (folder / "state.db").write_bytes(b"nonsense" * 1000)
    assert importer.round().fleet
    found = {Path(row["path"]).name: row["life"] for row in rows(database, "controllers")}
    assert found == {"state": "unreadable", "none": "unreadable"}
    assert len(rows(database, "audit")) == 2


def test_another_state_at_the_same_place_is_another_controller(
    database: Database, folder: Path, tmp_path: Path
) -> None:
    clock = Clock()
    importer = Importer(database, [], fleets=[folder], clock=clock)
    importer.round()
    shutil.rmtree(folder)
    with State(folder) as state, state.change():
        state.set_about(created="2027-01-01T00:00:00.000Z")
        state.note("proposed", "something else", node="n9")
    importer.round()
    assert len(rows(database, "controllers")) == 2
    assert sorted(row["node"] for row in rows(database, "audit")) == ["n1", "n1", "n9"]


# What people do ---------------------------------------------------------------------------------------------------------


CASES = [
    # who, what, whether about the incident, on which node; whether a person has acted then
    ("ann@host", "approved", True, "n0", True),
    ("bob (console)", "rejected", True, "n1", True),
    ("ann@host", "cleared", False, "n2", True),
    ("controller", "done", True, "n3", False),
    ("controller", "cleared", False, "n4", False),
    ("ann@host", "approved", False, "n5", False),
    ("ann@host", "clear", False, "n6", False),
]
OLD = "2026-01-02T03:04:05.000Z"


def name_of(case: int) -> str:
    return f"20260102T030405Z-{case:06x}"


def acted(database: Database) -> tuple[list[bool], int]:
    """Whether a person has acted because of each incident, and how many are open, as the run counts them."""
    found = sorted(rows(database, "incidents"), key=lambda one: str(one["name"]))
    return [bool(one["acted"]) for one in found], rows(database, "runs")[0]["open"]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_person_does_through_the_fleet_counts_as_acted(database: Database, tmp_path: Path, late: bool) -> None:
    """Whichever of the two is read first."""
    where = topology(tuple(case[3] for case in CASES), per_node=1)
    files = make_run(tmp_path / "run", where)
    for number in range(len(CASES)):
        make_incident(files, verdict(where, (number,)), where, name_of(number), time=OLD)
    make_incident(files, verdict(where, (2,)), where, name_of(len(CASES)), time="2999-01-01T00:00:00.000Z")

    def note() -> None:
        with State(tmp_path / "state") as state, state.change():
            for number, (who, what, about, node, _) in enumerate(CASES):
                path = files.path / "incidents" / name_of(number)
                known = Known(path.name, str(files.path), path, "attributed", "", "", OLD)
                Book(state).add_incident(known)
                state.note(what, "as a test says", incident=path.name if about else "", node=node, who=who)

    importer = Importer(database, [files.path], fleets=[tmp_path / "state"], clock=Clock())
    if late:
        with State(tmp_path / "state"):
            pass
        importer.round()
        assert acted(database) == ([False] * 8, 8)
    note()
    importer.round()
    assert acted(database) == ([*(case[4] for case in CASES), False], 5), "a return answers nothing that is found later"


def test_what_a_person_notes_beside_an_incident_counts_as_acted_and_what_a_machine_notes_does_not(
    database: Database, tmp_path: Path
) -> None:
    where = topology()
    files = make_run(tmp_path / "run", where)
    for number, who in enumerate(("", "controller", "ann@host")):
        make_incident(files, verdict(where), where, name_of(number))
        files.note_action(name_of(number), "replaced", who=who)
    Importer(database, [files.path], clock=Clock()).round()
    assert acted(database) == ([False, False, True], 2)
