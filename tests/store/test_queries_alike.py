"""What is alike and must not be taken for one another: runs of one name, incidents of one id, starts of one run, unnamed writers."""

from __future__ import annotations

import random
import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.kept import Book, Known
from bitwitness.fleet.kept_answers import Questions
from bitwitness.fleet.notify import answer_commands
from bitwitness.fleet.state import State
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.importing_names import shortest
from bitwitness.store.pages import IncidentPage
from bitwitness.store.queries.meaning import which
from bitwitness.web import reasons
from tests.store.filling import Filling
from tests.store.making import INCIDENT, NOW, Clock, make_incident, make_run, topology, verdict

WHERE = topology()


def hit(path: Path, run: str = "run-1") -> Path:
    """A run with an incident."""
    files = make_run(path, WHERE, run=run)
    make_incident(files, verdict(WHERE), WHERE, policy={"on_detection": "raise"})
    return path


def state(folder: Path, incident: Path) -> str:
    """A controller that has picked up this incident and asks about a drain; by what that is answered."""
    with State(folder) as state, state.change():
        book = Book(state)
        book.add_incident(Known(INCIDENT, str(incident.parent.parent), incident, "attributed", "it", "", ""))
        about = Proposal(INCIDENT, "n1", ("GPU-n1-0",), "drain", "drain", "high", "it computes wrongly", ())
        book.add_proposal(about, 0)
        (kept,) = book.proposals()
        book.set_status(kept.key, "held", "a person must answer", hold="approval")
        (kept,) = book.proposals()
        asked = Questions(state).ask(kept, "drain", "machine-1", (), "")
        state.note("proposed", "drain n1", incident=INCIDENT, node="n1")
    return asked.name


def by_path(database: Database) -> dict[str, IncidentPage]:
    rows = queries.runs_page(database, now=NOW).runs
    return {row.path: queries.incident_page(database, row.key, INCIDENT, now=NOW) for row in rows}


# Runs of one name -----------------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_told_apart_everywhere(database: Database, tmp_path: Path) -> None:
    first, second = hit(tmp_path / "a" / "guarded", "run-1"), hit(tmp_path / "b" / "guarded", "run-2")
    Importer(database, [first], clock=Clock()).round()
    assert [one.name for one in queries.runs_page(database, now=NOW).runs] == ["guarded"]
    importer = Importer(database, [first, second, hit(tmp_path / "other", "run-3")], clock=Clock())
    importer.round()
    found = queries.runs_page(database, now=NOW)
    assert sorted(one.name for one in found.runs) == ["a/guarded", "b/guarded", "other"]
    assert sorted(one.run_name for one in found.incidents) == ["a/guarded", "b/guarded", "other"]
    for one in found.incidents:
        assert one.run_path.endswith(f"/{one.run_name}")
    strikes = queries.node_page(database, "n1", now=NOW).strikes
    assert {one.run_path: one.run_name for one in strikes} == {one.path: one.name for one in found.runs}
    _, rows = queries.export(database, "incidents")
    assert sorted(str(row[0]) for row in rows) == ["a/guarded", "b/guarded", "other"]
    before = queries.change(database)
    importer.round()
    assert queries.change(database) == before, "nothing is named anew"


def test_the_run_that_was_replaced_at_a_path_is_called_otherwise(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "guarded", WHERE, run="first-of-them")
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    files.write_run({**files.read_run(), "run": "second"})
    importer.round()
    assert {one.run: one.name for one in queries.runs_page(database, now=NOW).runs} == {
        "first-of-them": "guarded (first-of)",
        "second": "guarded",
    }


def test_names_are_the_shortest_that_are_unique() -> None:
    assert shortest(["/guarded", "/a/guarded", "/b/a/guarded", "/c/x"]) == {
        "/guarded": "/guarded",
        "/a/guarded": "/a/guarded",
        "/b/a/guarded": "b/a/guarded",
        "/c/x": "x",
    }
    seed = 7
    drawn = random.Random(seed)
    paths = sorted({"/" + "/".join(drawn.choices("abc", k=drawn.randint(1, 5))) for _ in range(120)})
    named = shortest(paths)
    assert len(set(named.values())) == len(paths), seed
    for path, name in named.items():
        assert path.endswith(name), seed
        less = name.partition("/")[2] if not name.startswith("/") else name[1:]
        others = [other for other in paths if other != path and f"/{less}" == other[-len(less) - 1 :]]
        assert not less or others, (seed, path, name)


def test_names_of_a_thousand_runs_take_no_time() -> None:
    paths = [f"/runs/{number % 10}/{number}/guarded" for number in range(1_000)]
    begun = time.process_time()
    assert shortest(paths)[paths[7]] == "7/guarded"
    assert time.process_time() - begun < 1.0


# Incidents of one id --------------------------------------------------------------------------------------------------


def test_what_the_fleet_does_stands_beside_the_incident_that_it_means(database: Database, tmp_path: Path) -> None:
    first, copy = hit(tmp_path / "a" / "guarded"), hit(tmp_path / "b" / "guarded", "run-2")
    name = state(tmp_path / "state", copy / "incidents" / INCIDENT)
    Importer(database, [first, copy], fleets=[tmp_path / "state"], clock=Clock()).round()
    pages = by_path(database)
    assert (pages[str(first)].proposals, pages[str(first)].history) == ((), ())
    assert pages[str(first)].incident.action == ""
    (proposal,) = pages[str(copy)].proposals
    assert [one.what for one in pages[str(copy)].history] == ["proposed"]
    assert pages[str(copy)].incident.action == "drain: waits for approval"
    assert (proposal.question, proposal.state) == (name, str(tmp_path / "state"))
    assert reasons.answers(proposal) == list(answer_commands(name, str(tmp_path / "state")))
    runs = {one.path: queries.run_page(database, one.key, now=NOW) for one in queries.runs_page(database, now=NOW).runs}
    assert [len(runs[str(one)].history) for one in (first, copy)] == [0, 1]


def test_where_it_cannot_be_told_which_is_meant_neither_shows_it(database: Database, tmp_path: Path) -> None:
    first, copy = hit(tmp_path / "a" / "guarded"), hit(tmp_path / "b" / "guarded", "run-2")
    state(tmp_path / "state", tmp_path / "elsewhere" / "guarded" / "incidents" / INCIDENT)
    Importer(database, [first, copy], fleets=[tmp_path / "state"], clock=Clock()).round()
    assert [page.proposals for page in by_path(database).values()] == [(), ()]
    assert queries.device_page(database, "GPU-n1-0", now=NOW).proposals == ()
    assert len(queries.node_page(database, "n1", now=NOW).proposals) == 1


@pytest.mark.parametrize(
    ("alike", "path", "meant"),
    [
        ([(1, "/a/r/incidents/i")], "/a/r/incidents/i", 1),
        ([(1, "/a/r/incidents/i")], "/mnt/r/incidents/i", 1),
        ([(1, "/a/r/incidents/i")], "/a/other/incidents/i", None),
        ([(1, "/a/r/incidents/i")], None, 1),
        ([(1, "/a/r/incidents/i"), (2, "/b/r/incidents/i")], "/b/r/incidents/i", 2),
        ([(1, "/a/r/incidents/i"), (2, "/b/r/incidents/i")], "/c/r/incidents/i", None),
        ([(1, "/a/r/incidents/i"), (2, "/b/r/incidents/i")], None, None),
        ([(1, "/a/r/incidents/i"), (2, "/a/r/incidents/i")], "/a/r/incidents/i", None),
    ],
    ids=["same", "another-mount", "another-run", "only-one", "exact", "neither", "unknown", "one-path-twice"],
)
def test_which_incident_is_meant(alike: list[tuple[int, str]], path: str | None, meant: int | None) -> None:
    assert which(alike, path) == meant


# Commands, starts, writers --------------------------------------------------------------------------------------------


def test_the_commands_that_a_page_shows_answer_the_question(database: Database, tmp_path: Path) -> None:
    """By what is shown, not by what was meant: the words are run."""
    run = hit(tmp_path / "a b" / "guarded")
    state(tmp_path / "the state", run / "incidents" / INCIDENT)
    importer = Importer(database, [run], fleets=[tmp_path / "the state"], clock=Clock())
    importer.round()
    (proposal,) = by_path(database)[str(run)].proposals
    assert proposal in queries.fleet_page(database, now=NOW).waiting
    _, reject = reasons.answers(proposal)
    done = CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, shlex.split(reject)[1:])
    assert done.exit_code == 0, (reject, done.output)
    importer.round()
    (proposal,) = by_path(database)[str(run)].proposals
    assert proposal.question == ""


def test_a_run_has_started_with_its_first_guard(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run", WHERE, started="2026-11-30T11:00:00.000Z")
    journal = files.journal(0)
    importer = Importer(database, [files.path], clock=Clock())
    importer.round()
    files.write_run({**files.read_run(), "started": "2026-11-30T11:30:00.000Z"})
    importer.round()
    assert queries.runs_page(database, now=NOW).runs[0].started == "2026-11-30T11:00:00.000Z"
    late = make_run(tmp_path / "late", WHERE, run="run-9", started="2099-01-01T00:00:00.000Z")
    with_start = late.journal(0)
    with_start.append("start", {"world_size": WHERE.world_size, "node": "n0", "generation": 1})
    for one in (journal, with_start):
        one.close()
    Importer(database, [late.path], clock=Clock()).round()
    (row,) = [one for one in queries.runs_page(database, now=NOW).runs if one.path == str(late.path)]
    assert "" < row.started < "2099", "it is that of its journals"


def test_who_noted_an_action_is_told(database: Database, tmp_path: Path) -> None:
    path = hit(tmp_path / "run")
    files = make_run(path, WHERE)
    noted = ["skipped", "retried", "strike", "quarantined", "fleet drain", "something new"]
    for action in noted:
        files.note_action(INCIDENT, action)
    files.note_action(INCIDENT, "settled at the next start", supervision="s-1")
    files.note_action(INCIDENT, "looked at", who="ann@x")
    Importer(database, [path], clock=Clock()).round()
    (page,) = by_path(database).values()
    assert page.on_detection == "raise"
    assert not any("whether the job was stopped" in one.text for one in reasons.advice(page))
    assert {one.what: one.who for one in page.history} == {
        "skipped": "guard",
        "retried": "guard",
        "strike": "supervisor",
        "quarantined": "supervisor",
        "fleet drain": "controller",
        "settled at the next start": "supervisor",
        "something new": "",
        "looked at": "ann@x",
    }


def test_what_the_log_of_a_quarantine_does_not_tell_is_not_said(filling: Filling) -> None:
    run = filling.run()
    for place, what in enumerate(("strike", "deny device", "clear")):
        filling.quarantine(run, place, what, "GPU-1", who="root@vm")
    said = {one.what: (one.who, one.text) for one in queries.run_page(filling.database, run, now=NOW).history}
    assert said == {
        "strike": ("root@vm", "GPU-1: why (by the supervisor)"),  # nothing else gives strikes
        "deny device": ("root@vm", "GPU-1: why"),
        "clear": ("root@vm", "GPU-1: why"),
    }
