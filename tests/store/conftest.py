"""The databases of the tests of the store: each test that asks for `url` runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bitwitness.store.database import Database
from tests.postgres import Postgres, binaries
from tests.store.filling import Filling, emptied


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


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database that is new."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.fresh()


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


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
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
