"""Whether a run trains, and how it ended: as rounds of an importer see it beside jobs, supervisors and clocks that do what they do."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import Session, Stop, SupervisionFiles
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.store.queries.run import run_page
from bitwitness.store.queries.running import running
from bitwitness.store.queries.states import state_of
from bitwitness.store.tables import runs
from tests.store.making import Clock, about, make_run, rows, topology, train

WHERE = topology(("n0",))


class Life:
    """A run of a supervisor, its importer, and the clock of the database."""

    def __init__(self, database: Database, path: Path, *, supervision: str = "s1", most: int = 5) -> None:
        self.database, self.path, self.clock, self.step = database, path, Clock(), 0
        self.files: RunFiles = make_run(path, WHERE, supervision=supervision, started="2026-11-30T07:00:00.000Z")
        self.importer = Importer(database, [path], clock=self.clock)
        self.supervision = SupervisionFiles(path)
        if supervision:
            self.supervision.create(supervision)
            self.supervision.write_session(Session(supervision))
        self.train(start=True)

    def train(self, *, start: bool = False) -> None:
        """Some steps more."""
        train(self.files, 2, self.step, self.step + 1, start=start)
        self.step += 2

    def round(self, seconds: float = 10.0) -> str:
        """Some time later; the state after it."""
        self.clock.pass_(seconds)
        self.importer.round()
        return self.state()

    def state(self) -> str:
        """What the run is said to do."""
        return run_page(self.database, 1, now=self.clock()).run.state

    def text(self) -> str:
        """The same in a sentence."""
        return run_page(self.database, 1, now=self.clock()).run.state_text


@pytest.fixture
def life(tmp_path: Path, made: dict[str, str]) -> Life:
    """A run that has trained, on SQLite: there is no other SQL for PostgreSQL but for what the time is."""
    shutil.copy(made["sqlite"], tmp_path / "store.db")
    return Life(Database(tmp_path / "store.db"), tmp_path / "run")


def test_a_word_on_the_end_is_seen_when_nothing_else_changes(life: Life) -> None:
    life.round()
    life.train()
    assert [life.round(), life.round(), life.round()] == ["training"] * 3
    life.supervision.write_stop("s1", Stop(3, "corruption", "n0 is wrong"))
    assert life.round() == "failed"
    assert "n0 is wrong" in life.text()


def test_a_run_that_is_started_again_without_a_supervisor_trains(life: Life) -> None:
    life.supervision.write_stop("s1", Stop(0, "finished", "all ranks have finished"))
    assert [life.round(), life.round(300)] == ["finished"] * 2
    life.files.write_run(about(WHERE, started="2026-11-30T13:00:00.000Z"))
    life.train(start=True)
    assert life.round() == "training"
    assert "no supervisor" in life.text() or "trains" in life.text()
    assert life.round(3600) == "silent"
    assert "nobody can tell" in life.text()


def test_a_session_that_failed_before_any_guard_has_failed(life: Life) -> None:
    """Although the newest start was without a supervisor: that was before the session ended."""
    life.files.write_run(about(WHERE, started="2020-11-30T13:00:00.000Z"))
    life.supervision.log("s1", "session", text="begins")
    life.supervision.log("s1", "ended", text="failed")
    life.supervision.write_stop("s1", Stop(1, "startup", "a node is missing"))
    assert life.round() == "failed"


def test_a_session_that_has_begun_is_life_until_it_comes_to_a_guard(life: Life) -> None:
    """After that a supervisor that goes on says nothing of ranks that may hang."""
    life.round()
    life.supervision.write_stop("s1", Stop(3, "failed", "a node is lost"))
    assert life.round() == "failed"
    life.clock.pass_(3600)
    life.supervision.create("s2")
    for beat in range(1, 4):
        life.supervision.write_session(Session("s2", beat=beat))
        assert life.round(600) == "training"
        assert "no step of it is on record yet" in life.text()
    life.files.write_run(about(WHERE, supervision="s2", started="2026-11-30T13:00:00.000Z"))
    life.train(start=True)
    assert life.round() == "training"
    assert life.text().startswith("It trains: its journals were last seen growing at 20")
    life.supervision.write_session(Session("s2", beat=5))
    assert life.round(3600) == "silent"


def test_a_first_start_has_no_problem_before_its_guard_is_made(life: Life) -> None:
    path = life.path.with_name("new")
    begun = SupervisionFiles(path)
    begun.create("s1")
    importer = Importer(life.database, [path], clock=life.clock)

    def look(session: Session) -> tuple[str, str]:
        begun.write_session(session)
        life.clock.pass_(5)
        assert importer.round().problems == (1 if session.ended else 0)
        found = run_page(life.database, 1, now=life.clock()).run
        return found.state, found.state_text

    state, said = look(Session("s1", beat=1))
    assert (state, "has noted no end" in said) == ("unknown", True)
    state, said = look(Session("s1", beat=2))
    assert (state, "being started" in said) == ("training", True)
    look(Session("s1", beat=3, ended=True))


def test_what_grows_long_after_the_end_is_not_of_that_session(life: Life) -> None:
    """Whatever run.json says. Lines that a network file system shows late are no life."""
    life.round()
    life.supervision.write_stop("s1", Stop(0, "finished", "all ranks have finished"))
    assert life.round() == "finished"
    life.train()
    assert [life.round(60), life.round(600)] == ["finished"] * 2
    life.train()
    assert life.round(60) == "training"
    assert "had ended before (finished)" in life.text()
    life.supervision.create("s2")
    life.supervision.write_session(Session("s2"))
    life.supervision.write_stop("s2", Stop(0, "stopped", "asked to"))
    assert life.round(60) == "stopped"


def test_that_nobody_looks_says_nothing_of_a_run(life: Life) -> None:
    """Its steps are quick: nothing for two minutes is much, where somebody has looked."""
    life.round()
    life.train()
    assert life.round() == "training"
    with life.database.write() as connection:
        connection.execute(runs.update().values(pace=1.0))
    life.clock.pass_(250)
    assert life.state() == "training"
    life.clock.pass_(100)
    assert life.state() == "unknown"
    assert life.round() == "silent"


@pytest.mark.parametrize("hours", [3, -3])
def test_a_clock_that_steps_does_not_keep_a_dead_run_alive(life: Life, hours: int) -> None:
    life.round()
    life.clock.pass_(hours * 3600)
    life.train()
    assert life.round() == "training"
    life.clock.pass_(-hours * 3600)
    life.round(60)
    assert life.round(3600) == "silent"


def test_a_run_whose_directory_is_gone_is_not_said_to_train(life: Life) -> None:
    life.round()
    life.train()
    assert life.round() == "training"
    shutil.rmtree(life.path)
    assert life.round() == "unknown"
    now = running(life.database, now=life.clock())
    assert (now.states["training"], now.states["unknown"], now.runs, now.left_out) == (0, 1, (), 0)


def test_files_that_are_gone_are_told_until_they_are_back(life: Life) -> None:
    life.files.quarantine.deny_devices(["GPU-n0-0"], node="n0", reason="wrong", incident="")
    life.round()
    gone = [life.path / "journal/rank-00001.jsonl", life.path / "quarantine.json"]
    for path in gone:
        path.rename(path.with_suffix(".away"))
    (life.path / "journal/rank-00001.away").rename(life.path / "away")
    life.round()
    told = {row["path"]: row["text"] for row in rows(life.database, "problems")}
    assert set(told) == {str(path) for path in gone}
    assert all("is gone" in text for text in told.values())
    assert rows(life.database, "runs")[0]["problems"] == 2
    Importer(life.database, [life.path], clock=life.clock).round()
    assert len(rows(life.database, "problems")) == 2
    (life.path / "away").rename(gone[0])
    (life.path / "quarantine.away").rename(gone[1])
    life.round()
    assert rows(life.database, "problems") == []


def test_a_line_without_an_end_holds_up_nobody_and_is_told(life: Life) -> None:
    """A GiB of nothing: some of it is looked through in each round."""
    path = life.path / "journal/rank-00001.jsonl"
    with path.open("ab") as file:
        file.truncate(1 << 30)
    life.round()
    (source,) = rows(life.database, "sources", path="journal/rank-00001.jsonl")
    assert 0 < source["scanned"] <= 600 << 20
    (problem,) = rows(life.database, "problems")
    assert "no end" in problem["text"]
    life.round()
    (more,) = rows(life.database, "sources", path="journal/rank-00001.jsonl")
    assert source["scanned"] < more["scanned"] <= 1200 << 20
    with path.open("ab") as file:
        file.truncate(source["offset"])
    life.round()
    assert rows(life.database, "problems") == []


def test_a_round_that_fails_at_its_end_is_made_up_for(life: Life) -> None:
    """Its lines were written, and what follows of them was not."""
    life.round()
    life.train()
    with life.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE coverage RENAME TO away")
    assert life.importer.round().problems == 1
    with life.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE away RENAME TO coverage")
    life.importer.round()
    assert rows(life.database, "runs")[0]["step"] == 3
    assert rows(life.database, "coverage")[0]["passed"] == 8
    assert rows(life.database, "problems") == []


def test_everybody_goes_by_the_clock_of_the_database(database: Database, tmp_path: Path) -> None:
    """On PostgreSQL, that of the server, in the same form as the text that is compared with it."""
    make_run(tmp_path / "run", WHERE)
    importer = Importer(database, [tmp_path / "run"])
    importer.round()
    train(RunFiles(tmp_path / "run"), 1, 0, 3)
    importer.round()
    (row,) = rows(database, "runs")
    assert abs(datetime.fromisoformat(row["grew"]) - database.now()) < timedelta(minutes=1)
    chosen = runs.select().with_only_columns(state_of(None).label("state"))
    with database.write() as connection:
        assert connection.scalar(chosen) == "training"
        back = (datetime.fromisoformat(row["grew"]) - timedelta(seconds=901)).isoformat(timespec="milliseconds")
        moved = {"grew": back.replace("+00:00", "Z"), "imported": ""}
        connection.execute(runs.update().values(**moved))
        assert connection.scalar(chosen) == "silent"
