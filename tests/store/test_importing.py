"""What is in a run must be in the database: once, whole, and nobody named who was not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwitness.runfiles import RunFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from tests.store.making import (
    INCIDENT,
    NOW,
    Clock,
    append,
    content,
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


def full_run(path: Path) -> RunFiles:
    """A run with something of everything."""
    files = make_run(path, WHERE)
    train(files, 6, 0, 9)
    journal = files.journal(0)
    numbers = {"loss": 2.0, "loss_low": 1.0, "loss_high": 3.0, "norm": 1.0, "norm_low": 1.0, "norm_high": 1.0}
    journal.append(
        "steps",
        {"first": 0, "last": 9, **numbers, "nonfinite": 0, "seconds": 20.0, "cost": {"replay": 2.0}, "clock": "host"},
    )
    journal.append("checkpoint", {"step": 8, "checkpoint": "x"})
    journal.close()
    make_checkpoint(files, 4, WHERE)
    make_checkpoint(files, 8, WHERE)
    make_incident(files, verdict(WHERE), WHERE)
    files.note_action(INCIDENT, "quarantined", device="GPU-n1-0", reason="wrong")
    files.quarantine.deny_devices(["GPU-n1-0"], node="n1", reason="wrong", incident=INCIDENT)
    return files


def test_everything_of_a_run_is_imported(database: Database, tmp_path: Path) -> None:
    full_run(tmp_path / "run")
    done = Importer(database, [tmp_path / "run"], clock=Clock()).round()
    assert (len(done.runs), done.problems) == (1, 0)
    (run,) = rows(database, "runs")
    assert (run["run"], run["job"], run["world_size"], run["nodes"], run["step"]) == ("run-1", "slurm:7", 6, 3, 9)
    assert (run["attributed"], run["unattributed"], run["open"], run["observations"]) == (1, 0, 1, 60)
    assert (run["pace"], run["cost"]) == (2.0, 0.1)
    assert run["checkpoint"] == 4, "the one at 8 holds step 7, in which something was wrong"
    assert [row["doubt"] == "" for row in rows(database, "checkpoints")] == [True, False]
    (covered,) = rows(database, "coverage")
    assert (covered["passed"], covered["all"], covered["last"]) == (60, 60, 9)
    (step,) = rows(database, "steps")
    assert (step["first"], step["last"], step["loss"], step["loss_high"], step["seconds"]) == (0, 9, 2.0, 3.0, 2.0)
    named = [(row["role"], row["rank"], row["node"], row["device"]) for row in rows(database, "incident_ranks")]
    assert [one for one in named if one[0] == "named"] == [("named", 2, "n1", "GPU-n1-0")]
    assert {one[0] for one in named} == {"named", "involved"}
    assert [row["name"] for row in rows(database, "denied")] == ["GPU-n1-0"]
    assert [row["what"] for row in rows(database, "quarantine")] == ["deny device"]
    assert [row["action"] for row in rows(database, "actions")] == ["quarantined"]
    assert {(row["kind"], row["step"]) for row in rows(database, "marks")} == {("start", 0), ("checkpoint", 8)}
    assert {(row["name"], row["devices"]) for row in rows(database, "nodes")} == {("n0", 2), ("n1", 2), ("n2", 2)}
    assert len(rows(database, "evidence")[0]["observations"]) == 4


def test_a_second_round_and_a_second_importer_change_nothing(
    database: Database, opened: Callable[[], Database], tmp_path: Path
) -> None:
    full_run(tmp_path / "run")
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    before, counter = content(database), rows(database, "meta", name="change")
    again = importer.round()
    other = Importer(opened(), [tmp_path / "run"], clock=Clock()).round()
    assert (again.runs, again.records, other.runs, other.records) == (frozenset(), 0, frozenset(), 0)
    assert (content(database), rows(database, "meta", name="change")) == (before, counter)


def test_what_is_read_in_pieces_is_what_is_read_at_once(database: Database, tmp_path: Path) -> None:
    """However a journal grows, a byte or a line at a time: the same comes of it."""
    full_run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "pieces")
    journal = tmp_path / "pieces/journal/rank-00000.jsonl"
    written = journal.read_bytes()
    journal.write_bytes(b"")
    importer = Importer(database, [tmp_path / "pieces"], clock=Clock())
    for at in range(0, len(written), 701):
        append(journal, written[at : at + 701])
        importer.round()
    with Database(tmp_path / "other.db") as other:
        Importer(other, [tmp_path / "whole"], clock=Clock()).round()
        assert _without_name(content(database)) == _without_name(content(other))


def _without_name(found: dict[str, list[dict[str, object]]]) -> dict[str, list[dict[str, object]]]:
    for row in found["runs"]:
        row.pop("name")
    return found


def test_a_torn_line_is_left_for_the_writer_to_cut_off(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    train(files, 1, 0, 3)
    path = tmp_path / "run/journal/rank-00000.jsonl"
    append(path, '{"schema":1,"kind":"observation","ra')
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    train(files, 1, 2, 5)  # a journal that is opened again cuts the torn line off
    importer.round()
    (run,) = rows(database, "runs")
    source = rows(database, "sources", path="journal/rank-00000.jsonl")[0]
    assert (run["observations"], source["skipped"], source["offset"], run["problems"]) == (8, 0, path.stat().st_size, 0)
    (covered,) = rows(database, "coverage")
    assert (covered["passed"], covered["all"]) == (6, 6), "steps that were made again count once"


def test_damaged_lines_in_the_middle_are_counted_and_told(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    train(files, 1, 0, 3)
    append(tmp_path / "run/journal/rank-00000.jsonl", '{"schema":1,"kind":"obser\n[]\n\xff\xfe\n{"schema":2}\n')
    train(files, 1, 4, 5, start=False)
    done = Importer(database, [tmp_path / "run"], clock=Clock()).round()
    (problem,) = rows(database, "problems")
    assert (done.problems, problem["lines"], rows(database, "runs")[0]["observations"]) == (1, 4, 6)
    assert "4 lines" in problem["text"]
    assert problem["path"].endswith("rank-00000.jsonl")


@pytest.mark.parametrize("shorter", [True, False])
def test_a_journal_that_was_replaced_is_read_anew(database: Database, tmp_path: Path, *, shorter: bool) -> None:
    files = make_run(tmp_path / "run")
    train(files, 2, 0, 9)
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    (tmp_path / "run/journal/rank-00000.jsonl").unlink()
    train(files, 1, 0, 4 if shorter else 30)
    importer.round()
    counts = {row["rank"]: row["observations"] for row in rows(database, "ranks")}
    assert counts == {0: 5 if shorter else 31, 1: 10}
    assert len(rows(database, "observations", rank=0)) == counts[0]
    assert {row["rank"]: row["passed"] for row in rows(database, "rank_coverage")} == counts


def test_another_run_at_the_same_path_is_another_run(database: Database, tmp_path: Path) -> None:
    train(make_run(tmp_path / "run", run="one"), 2, 0, 9)
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    shutil.rmtree(tmp_path / "run")
    importer.round()
    assert [row["missing"] for row in rows(database, "runs")] == [True]
    train(make_run(tmp_path / "run", run="two"), 1, 0, 4)
    importer.round()
    found = {row["run"]: (row["current"], row["observations"]) for row in rows(database, "runs")}
    assert found == {"one": (False, 20), "two": (True, 5)}


def test_a_run_is_known_before_its_run_json_can_be_read(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    train(files, 1, 0, 3)
    written = (tmp_path / "run/run.json").read_bytes()
    (tmp_path / "run/run.json").write_bytes(written[:50])
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    assert importer.round().problems == 1
    assert [(row["run"], row["observations"]) for row in rows(database, "runs")] == [("", 4)]
    (tmp_path / "run/run.json").write_bytes(written)
    importer.round()
    assert [(row["run"], row["problems"]) for row in rows(database, "runs")] == [("run-1", 0)]
    assert rows(database, "problems") == []


def test_growth_is_what_the_importer_saw_itself(
    database: Database, opened: Callable[[], Database], tmp_path: Path
) -> None:
    """A run that ended a year ago does not train because it is imported today."""
    files, clock = make_run(tmp_path / "run"), Clock()
    train(files, 1, 0, 3)
    importer = Importer(database, [tmp_path / "run"], clock=clock)
    importer.round()
    assert rows(database, "runs")[0]["grew"] == ""
    train(files, 1, 4, 5, start=False)
    clock.pass_(60)
    importer.round()
    assert rows(database, "runs")[0]["grew"] == "2026-11-30T12:01:00.000Z"
    train(files, 1, 6, 7, start=False)
    clock.pass_(3600)
    Importer(opened(), [tmp_path / "run"], clock=clock).round()
    assert rows(database, "runs")[0]["grew"] == "2026-11-30T12:01:00.000Z", "nobody saw when it grew"


def test_ranks_that_moved_are_remembered(database: Database, tmp_path: Path) -> None:
    files = make_run(tmp_path / "run")
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    after = topology(("n0", "n9"))
    files.write_run(
        {"run": "run-1", "world_size": 4, "placement": after.to_json(), "started": "2026-11-30T11:40:00.000Z"}
    )
    importer.round()
    now = {(row["rank"], row["node"]) for row in rows(database, "stays", current=True)}
    assert now == {(0, "n0"), (1, "n0"), (2, "n9"), (3, "n9")}
    assert {row["node"] for row in rows(database, "stays")} == {"n0", "n1", "n2", "n9"}
    assert rows(database, "runs")[0]["nodes"] == 2


def test_new_runs_below_a_folder_are_found(database: Database, tmp_path: Path) -> None:
    importer = Importer(database, [], parents=[tmp_path], clock=Clock())
    assert importer.round().runs == frozenset()
    make_run(tmp_path / "a")
    make_run(tmp_path / "team/b", run="run-2")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "nothing").mkdir()
    importer.round()
    assert [row["name"] for row in rows(database, "runs")] == ["a", "b"]


def test_incidents_of_one_name_in_two_runs_are_two(database: Database, tmp_path: Path) -> None:
    for name, ranks in (("a", (2,)), ("b", ())):
        files = make_run(tmp_path / name, run=name)
        make_incident(files, verdict(WHERE, ranks), WHERE)
    Importer(database, [], parents=[tmp_path], clock=Clock()).round()
    assert [row["status"] for row in rows(database, "incidents")] == ["attributed", "unattributed"]
    second = rows(database, "incidents")[1]["id"]
    assert {row["role"] for row in rows(database, "incident_ranks", incident_id=second)} == {"candidate", "involved"}


# Judgements and drills ------------------------------------------------------------------------------------------------


def test_the_last_word_on_an_incident_counts(database: Database, tmp_path: Path) -> None:
    files = full_run(tmp_path / "run")
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    for judgement, counts in (("false alarm", (0, 0, 1)), ("confirmed", (1, 0, 0))):
        files.note_action(INCIDENT, "judged", judgement=judgement, who="ann@host", why="looked at it")
        importer.round()
        (run,), (incident,) = rows(database, "runs"), rows(database, "incidents")
        assert (run["attributed"], run["unattributed"], run["false_alarms"]) == counts
        assert (incident["judgement"], incident["judged_by"], run["open"]) == (judgement, "ann@host", 0)


@pytest.mark.parametrize(
    ("step", "drill", "outcome"),
    [(7, True, "caught"), (6, False, "missed"), (8, False, "missed"), (9, False, "unclear")],
)
def test_an_incident_is_a_drill_only_where_a_fault_explains_it(
    database: Database, tmp_path: Path, step: int, outcome: str, *, drill: bool
) -> None:
    """The check had passed at 6 and found something at 7: a fault at 6 or before, or after 7, has nothing to do with it."""
    full_run(tmp_path / "run")
    (tmp_path / "run/faults").mkdir()
    append(tmp_path / "run/faults/rank-00002.jsonl", strike(2, step))
    Importer(database, [tmp_path / "run"], clock=Clock()).round()
    (incident,), (run,), (found,) = rows(database, "incidents"), rows(database, "runs"), rows(database, "drills")
    assert (incident["judgement"] == "drill", run["drills"], run["attributed"]) == (drill, int(drill), int(not drill))
    assert (found["outcome"], found["incident_id"] is not None, found["step"]) == (outcome, drill, step)


def test_a_fault_of_another_start_explains_nothing(database: Database, tmp_path: Path) -> None:
    full_run(tmp_path / "run")
    (tmp_path / "run/faults").mkdir()
    append(tmp_path / "run/faults/rank-00002.jsonl", strike(2, 7, start="s1/2"))
    Importer(database, [tmp_path / "run"], clock=Clock()).round()
    assert rows(database, "incidents")[0]["judgement"] == ""


def test_a_fault_that_strikes_often_is_one_drill(database: Database, tmp_path: Path) -> None:
    full_run(tmp_path / "run")
    (tmp_path / "run/faults").mkdir()
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    for step in (7, 8, 9):
        append(tmp_path / "run/faults/rank-00001.jsonl", strike(1, step))
        importer.round()
    (found,) = rows(database, "drills")
    assert (found["step"], found["last"], found["hits"], found["outcome"]) == (7, 9, 3, "named wrongly")


def test_the_end_of_a_supervised_run(database: Database, tmp_path: Path) -> None:
    from bitwitness.runfiles.supervision import Session, Stop, SupervisionFiles

    train(make_run(tmp_path / "run", supervision="s1"), 1, 0, 3)
    supervision = SupervisionFiles(tmp_path / "run")
    supervision.create("s1")
    supervision.write_session(Session("s1"))
    supervision.log("s1", "session", text="begins")
    supervision.log("s1", "restart", text="without n2")
    importer = Importer(database, [tmp_path / "run"], clock=Clock())
    importer.round()
    assert (rows(database, "runs")[0]["outcome"], rows(database, "runs")[0]["ended"]) == ("", "")
    supervision.log("s1", "ended", text="finished")
    supervision.write_stop("s1", Stop(0, "finished", "all ranks have finished"))
    importer.round()
    (run,) = rows(database, "runs")
    assert (run["outcome"], run["exit_code"], run["finished"], bool(run["ended"])) == ("finished", 0, True, True)
    assert run["supervision"] == "s1"
    supervision.write_session(Session("s2"))
    supervision.log("s2", "session", text="begins again")
    importer.round()
    (run,) = rows(database, "runs")
    assert (run["outcome"], run["exit_code"], run["finished"], run["ended"]) == ("", None, False, "")


def test_the_clock_is_the_importers(database: Database, tmp_path: Path) -> None:
    full_run(tmp_path / "run")
    Importer(database, [tmp_path / "run"], clock=Clock()).round()
    assert rows(database, "runs")[0]["imported"] == f"{NOW:%Y-%m-%dT%H:%M:%S}.000Z"
