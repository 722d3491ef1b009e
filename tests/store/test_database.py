"""Opening a database: made, brought up to date, shared, and refused by name where it is not ours."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from bitwitness.errors import ConfigurationError, StoreError
from bitwitness.store.database import VERSION_TABLE, Database, changed, upsert
from bitwitness.store.tables import meta, metadata, runs
from tests.store.making import rows


def test_the_migrations_make_the_tables(empty_url: str) -> None:
    """Whoever changes a table writes a migration: what both come to is the same, column by column."""
    with Database(empty_url) as database, database.read() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": VERSION_TABLE,
                "compare_type": True,
                "compare_server_default": database.dialect != "sqlite",
            },
        )
        assert compare_metadata(context, metadata) == []


def test_opening_again_changes_nothing(database: Database, opened: Callable[[], Database]) -> None:
    with database.write() as connection:
        changed(connection)
    assert rows(opened(), "meta") == rows(database, "meta") == [{"name": "change", "number": 1, "text": ""}]


def test_processes_that_open_at_once_do_not_both_migrate(empty_url: str) -> None:
    script = f"from bitwitness.store.database import Database; Database({empty_url!r}).close()"
    processes = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 0, said.decode()
    with Database(empty_url) as database:
        assert rows(database, "meta") == [{"name": "change", "number": 0, "text": ""}]


def test_a_database_of_a_newer_version_is_refused_and_stays_as_it_is(empty_url: str) -> None:
    with Database(empty_url) as database, database.write() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"9999.*nothing was changed.*newer"):
        Database(empty_url)


def test_a_database_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE customers (name TEXT)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"something else.*'customers'.*nothing was changed"):
        Database(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_text("this is no database, and somebody may want to keep it\n" * 100)
    with pytest.raises(StoreError, match=r"other\.db failed: file is not a database"):
        Database(path)
    assert path.read_text().startswith("this is no database")


def test_none_is_made_where_none_is_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no database"):
        Database(tmp_path / "none.db", create=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:secret@h/d",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql://u:secret@:x/d",
        "a://",
        "host=h password=secret",
        "postgresql://u:p@secret@127.0.0.1:1/d",
        "postgresql://u:p@secret/x@127.0.0.1:1/d",
        "postgresql://u:p?@secret@127.0.0.1:1/d",
        "postgresql://127.0.0.1:1/d?password=p@secret",
        " postgresql://u:p@secret@127.0.0.1:1/d\n",
        "postgresql:/u:secret@h/d",
        "postgresql//u:secret@h/d",
        "://u:secret@h/d",
        "//u:secret@h/d",
        "u:secret@h/d",
        "u_1:sec/secret@h/d",
        "'postgresql://secret/d'",
        "sqlite://u:secret@h/d",
        "a:secret.db",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        Database(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value)).replace(url, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["store.db", " store.db\n", "./a:b@c.db", "a@b.db", "of/a.db", "sqlite:///a@b:c@d.db"])
def test_a_path_is_a_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Database(path) as database:
        assert database.name == str(tmp_path / path.strip().removeprefix("sqlite:///"))
        assert Path(database.name).exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cr%2Ft@/d?host={}",
        "postgresql://me@/d?host={}&password=s3cr%2Ft",
        "postgresql://me@/d?host={}&sslpassword=s3cr/t",
        "postgresql://me@/d?host={}&password=s3cr%2Ft&port=x",
        "postgresql://me@/d?host={}&password=one&password=s3cr/t",
        "postgresql://me@/d?host={}&passwort=s3cr/t",
        " postgresql://me:s3cr%2Ft@/d?host={}\n",
        "postgresql://me@/s3cr?host={}/s3cr%2Ft&password=s3cr/t",
    ],
)
def test_a_server_that_is_away_is_told_without_its_password(url: str, tmp_path: Path) -> None:
    """Wherever the password stands, and also where the driver repeats what it was given, as the last one makes it do."""
    with pytest.raises(StoreError) as caught:
        Database(url.format(tmp_path))
    told = "".join(traceback.format_exception(caught.value))
    assert not [one for one in ("s3cr/t", "s3cr%2Ft", "?host") if one in told]
    assert f"postgresql://{tmp_path}" in str(caught.value)
    assert "server" in str(caught.value) or "port" in str(caught.value)


def test_a_file_is_its_owners_alone(tmp_path: Path) -> None:
    with Database(tmp_path / "store.db") as database, database.write() as connection:
        changed(connection)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}
    (tmp_path / "store.db").chmod(0o640)
    Database(tmp_path / "store.db").close()
    assert stat.S_IMODE((tmp_path / "store.db").stat().st_mode) == 0o640, "what somebody has decided stays"


def test_a_transaction_is_whole_or_absent(database: Database) -> None:
    def fail(connection: sa.Connection) -> None:
        changed(connection)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.change(fail)
    assert rows(database, "meta")[0]["number"] == 0


def test_writers_wait_for_one_another(database: Database, opened: Callable[[], Database]) -> None:
    """Two threads with a database each: no change of either is lost, and none is refused."""

    def count(one: Database) -> None:
        for _ in range(30):
            one.change(changed)

    threads = [threading.Thread(target=count, args=(one,)) for one in (database, opened())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(database, "meta")[0]["number"] == 60


def test_upsert_inserts_sets_and_leaves(database: Database) -> None:
    with database.write() as connection:
        upsert(connection, meta, [{"name": "a", "number": 1}, {"name": "b", "number": 1}])
        upsert(connection, meta, [{"name": "a", "number": 2}])
        upsert(connection, meta, [{"name": "b", "number": 2}], update=())
        upsert(connection, meta, [])
    assert {row["name"]: row["number"] for row in rows(database, "meta")} == {"a": 2, "b": 1, "change": 0}


def test_an_error_of_the_database_names_it_and_not_the_values(database: Database) -> None:
    with pytest.raises(StoreError) as caught, database.write() as connection:
        connection.execute(sa.insert(runs), [{"place": "x", "run": "hidden-value"}] * 2)
    assert "hidden-value" not in str(caught.value).replace("Key (place, run)=(x, hidden-value)", "")


def test_one_in_memory_is_like_any_other() -> None:
    with Database.memory() as database:
        with database.write() as connection:
            changed(connection)
        assert rows(database, "meta")[0]["number"] == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be made"):
        Database(tmp_path / "closed" / "inner" / "x.db")
