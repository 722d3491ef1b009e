"""The import beside the pages: whatever it raises, the console goes on, says so, and says when it is over."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import StoreError
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.web.background import Background
from bitwitness.web.status import Notice, Status
from tests.web.client import console


class Scripted:
    """Imports that do one thing after another, and then nothing."""

    def __init__(self, *script: Callable[[Any], object]) -> None:
        self._script, self.rounds = list(script), 0
        self.over = threading.Event()

    def round(self, progress: Any = None) -> None:
        self.rounds += 1
        if not self._script:
            self.over.set()
            return
        self._script.pop(0)(progress)


def failing(error: BaseException) -> Callable[[Any], object]:
    def act(progress: Any) -> None:
        raise error

    return act


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_error_is_told_and_tried_again_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    status, told = Status(), list[tuple[Notice, ...]]()
    look = [lambda _: told.append(status.notices())] * 3
    script = [failing(StoreError("the disk is full")), look[0], failing(ZeroDivisionError("inside")), look[1]]
    imports = Scripted(*script)
    with Background(lambda: imports, status, every=0.01):
        assert imports.over.wait(20)
        until(lambda: status.notices() == ())
    assert told[0][0].kind == "error"
    assert "the import fails: the disk is full" in told[0][0].text
    assert "It is tried again" in told[0][0].text
    assert "What is shown is of 20" in told[1][0].text  # when it had worked in between
    assert "ZeroDivisionError" in told[1][0].text
    assert "inside" not in told[1][0].text
    assert "inside" in caplog.text  # the log has the rest


def test_the_same_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    imports = Scripted(*(failing(StoreError("away")) for _ in range(4)))
    with Background(lambda: imports, Status(), every=0.001):
        assert imports.over.wait(20)
    assert caplog.text.count("away") == 1


def test_an_importer_that_cannot_be_made_is_made_again() -> None:
    tries, imports, status = itertools.count(), Scripted(), Status()

    def make() -> Scripted:
        if next(tries) < 2:
            raise StoreError("the server is away")
        return imports

    with Background(make, status, every=0.001):
        assert imports.over.wait(20)


def test_a_long_round_says_how_far_it_is_and_ends_with_the_console() -> None:
    status, ended, going = Status(), list[BaseException](), threading.Event()

    def long(progress: Any) -> None:
        try:
            for number in itertools.count():
                progress(f"{number} of many")
                going.set()
                time.sleep(0.001)
        except BaseException as error:
            ended.append(error)
            raise

    work = Background(lambda: Scripted(long), status, every=0.01)
    assert "the first import begins" in status.notices()[0].text
    work._begun = -100.0
    with work:
        assert going.wait(20)
    assert len(ended) == 1
    assert not work._thread.is_alive()
    assert status.to_json()["errors"] == []


def test_retention_runs_after_an_import_and_its_error_is_told_too() -> None:
    status, pruned, imports = Status(), threading.Event(), Scripted()

    def prune() -> None:
        pruned.set()
        raise StoreError("locked")

    with Background(lambda: imports, status, every=0.001, prune=prune):
        assert pruned.wait(20)
        assert imports.over.wait(20)
        until(lambda: any("removing what is too old fails: locked" in one.text for one in status.notices()))


def test_pages_work_while_the_database_is_taken_by_somebody_else(tmp_path: Path) -> None:
    """A writer that holds the database keeps the import out, and no page."""
    with Database(tmp_path / "console.db") as database, console(database) as made:
        other = sqlite3.connect(tmp_path / "console.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert made.browser().get("/").status_code == 200
        other.execute("ROLLBACK")
        other.close()


def test_a_database_that_is_gone_is_told_by_every_page(tmp_path: Path) -> None:
    folder = tmp_path / "database"
    folder.mkdir()
    status = Status()
    with Database(folder / "console.db") as database, console(database, status=status) as made:
        assert made.browser().get("/").status_code == 200
        database.close()
        for file in folder.iterdir():
            file.unlink()
        (folder / "console.db").write_bytes(b"no database at all" * 1000)
        page, twin = made.browser().get("/"), made.program().get("/api/runs")
        assert (page.status_code, twin.status_code) == (503, 503)
        assert "console.db failed" in page.text
        assert "console.db failed" in twin.json()["error"]
        assert twin.headers["retry-after"] == "5"
        health = made.program().get("/healthz")
        assert (health.status_code, health.json()["ok"]) == (503, False)
        imports = Background(lambda: Importer(database, [tmp_path]), status, every=0.01)
        with imports:
            until(lambda: bool(status.to_json()["errors"]))
        assert "the import fails" in made.browser().get("/").text
