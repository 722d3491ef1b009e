"""The databases of the tests of the store: SQLite, and a real PostgreSQL for the files in `BOTH` (exhaustively, for all)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from bitwitness.store.database import Database
from bitwitness.store.tables import metadata
from tests.postgres import Postgres, binaries
from tests.store.filling import Filling, emptied

KINDS = ("sqlite", "postgresql")
BOTH = (
    "test_database",
    "test_importing",
    "test_importing_fleet",
    "test_importing_kills",
    "test_queries_imported",
    "test_queries_lists",
    "test_retention",
)
"""Files that run on both by default; what is only about SQL is the same SQL in the others, which do with `BITWITNESS_EXHAUSTIVE=1`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which databases a test runs on."""
    both = os.environ.get("BITWITNESS_EXHAUSTIVE") == "1" or metafunc.module.__name__.rpartition(".")[2] in BOTH
    given = {one for mark in metafunc.definition.iter_markers("parametrize") for one in str(mark.args[0]).split(",")}
    for name in ("empty_url", "url", "shared"):
        if name in metafunc.fixturenames and name not in given:
            metafunc.parametrize(
                name, KINDS if both else KINDS[:1], indirect=True, scope="module" if name == "shared" else None
            )


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for all tests of one worker. Skipped where it is not installed, unless everything must be real."""
    home = binaries()
    if home is None:
        if os.environ.get("BITWITNESS_REAL") == "1":
            pytest.fail("PostgreSQL is not installed, and BITWITNESS_REAL=1 asks for it: apt-get install postgresql")
        pytest.skip("PostgreSQL is not installed")
    with Postgres(home) as server:
        yield server


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Databases that have their tables, by kind: making these for every test would take most of the time."""
    path = tmp_path_factory.mktemp("made") / "store.db"
    Database(path).close()
    return {"sqlite": str(path)}


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database that is not there yet, or has no tables."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.fresh()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, made: dict[str, str]) -> str:
    """The address of a database with all tables, and nothing in them."""
    if request.param == "sqlite":
        return str(shutil.copy(made["sqlite"], tmp_path / "store.db"))
    server: Postgres = request.getfixturevalue("postgres")
    if "postgresql" not in made:
        made["postgresql"] = server.fresh()
        Database(made["postgresql"]).close()
    names = ", ".join(f'"{name}"' for name in metadata.tables if name != "meta")
    with psycopg.connect(made["postgresql"]) as connection:  # waits for whatever a test before has left to end
        connection.execute(f"TRUNCATE {names} RESTART IDENTITY".encode())
        connection.execute("DELETE FROM meta WHERE name <> 'change'")
        connection.execute("UPDATE meta SET number = 0")
    return made["postgresql"]


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A database with all tables, and nothing in them."""
    with Database(url) as made:
        yield made


@pytest.fixture
def opened(url: str) -> Iterator[Callable[[], Database]]:
    """Opens the same database once more, as another process would; all are closed at the end."""
    all_of_them: list[Database] = []

    def open_again() -> Database:
        all_of_them.append(Database(url))
        return all_of_them[-1]

    yield open_again
    for one in all_of_them:
        one.close()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database for all tests of a module: making the tables takes longer than what most tests of pages do with them."""
    if request.param == "sqlite":
        address = str(tmp_path_factory.mktemp("shared") / "store.db")
    else:
        address = request.getfixturevalue("postgres").fresh()
    with Database(address) as made:
        yield made


@pytest.fixture
def filling(shared: Database) -> Filling:
    """Fills the tables of a database that is empty."""
    emptied(shared)
    return Filling(shared)
