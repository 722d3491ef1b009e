"""One database for runs and the fleet: opening it, bringing its tables up to date, and transactions that are whole or absent.

SQLite for one machine, PostgreSQL for a fleet; everything above this module is written once for both. A database that was
made by a newer version, or by something else, is refused by name and never changed: it may be somebody's.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, quote_plus

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from bitwitness.errors import ConfigurationError, MissingExtra, StoreError
from bitwitness.store.tables import meta

logger = logging.getLogger(__name__)

VERSION_TABLE = "bitwitness_version"
_SCRIPTS = str(Path(__file__).parent / "migrations")
_LOCK = 0x6269_7477_6974_6E65
"""Of PostgreSQL's advisory locks: two processes that open a database at once do not both migrate it."""
_PATIENCE = 60.0
"""Seconds that one waits for the lock of another that writes."""
Result = TypeVar("Result")
_TURN = 500
"""Milliseconds that SQLite waits by itself for whoever writes, before it is asked again."""
_TOLD_AFTER = 1.5
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN = re.compile(r"\.{0,2}/(?!/)")
"""What begins so is the path of a file, whatever else is in it."""
_MISTYPED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|.*(?::.*@|://)", re.DOTALL)
"""An address with something wrong in it, which may hold a password: it must not become the name of a file."""
_BARE_AT = re.compile(r"[^@]*@.*@|[^?]*\?\w+=.*@", re.DOTALL)
"""A second `@`, or one in a parameter: the first would end the password, and the rest of it be taken for the host."""
_NO_ADDRESS = "that is no address of a database: it is a path, sqlite:///PATH or postgresql://..."
_SECRET = re.compile(r"passw|secret|token|options", re.IGNORECASE)
"""Parameters of an address that hold a secret, or may: `password`, `sslpassword`, `oauth_client_secret`, ..."""
_WRITTEN = re.compile(r"(?:passw\w*|\w*secret|\w*token)=([^&\s]+)", re.IGNORECASE)


class Database:
    """The console's database; may be used by several threads.

    Args:
        url: a path, `sqlite:///PATH` or `postgresql://...`.
        create: make it where it does not exist.

    Raises:
        ConfigurationError: there is none and none is to be made, or the address is not one of these.
        MissingExtra: PostgreSQL's driver is not installed.
        StoreError: it cannot be reached, is damaged, of a newer version, or of something else; nothing was changed.
    """

    def __init__(self, url: str | Path, *, create: bool = True) -> None:
        address = _address(str(url))
        self.dialect = address.get_backend_name()
        self._secrets = _secrets(address, str(url))
        self.name = str(address.database) if self.dialect == "sqlite" else _masked(_name(address), self._secrets)
        if self.dialect == "sqlite" and not create and not Path(str(address.database)).exists():
            raise ConfigurationError(
                f"there is no database {self.name}: make one by `bitwitness store import --db ...`"
            )
        local = self.dialect == "sqlite"
        with _named(self.name, self._secrets):
            engine = _sqlite(address, create=create) if local else _postgresql(address)
        self._open(engine, wal=local)

    @classmethod
    def memory(cls) -> Self:
        """One that is gone when it is closed, for one thread: a report needs no file."""
        made = cls.__new__(cls)
        made.name, made.dialect, made._secrets = "memory", "sqlite", ()
        made._open(_listening(sa.create_engine("sqlite://", poolclass=StaticPool, hide_parameters=True)))
        return made

    def _open(self, engine: sa.Engine, *, wal: bool = False) -> None:
        self.engine, self._wal = engine, wal
        self._writing = engine.execution_options(writing=True)
        try:
            with _named(self.name, self._secrets):
                self._migrate()
        except BaseException:
            engine.dispose()
            raise

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection for reading: everything that is read within is of one moment.

        Raises:
            StoreError: the database does not answer, or is damaged.
        """
        with _named(self.name, self._secrets), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A connection for writing: one transaction, whole or absent. SQLite has one writer at a time, so this waits for it.

        Raises:
            StoreError: nothing could be written, e.g. because the disk is full or somebody else writes for a minute.
        """
        with _named(self.name, self._secrets), self._writing.connect() as connection:
            transaction = _begin(connection)
            with transaction:
                yield connection

    def change(self, task: Callable[[sa.Connection], Result], *, tries: int = 5) -> Result:
        """Do something in one transaction; again, where PostgreSQL gave that of another process precedence (a deadlock).

        Raises:
            StoreError: as `write`.
        """
        for _ in range(tries - 1):
            try:
                with self.write() as connection:
                    return task(connection)
            except StoreError as error:
                cause = error.__cause__
                if not isinstance(cause, DBAPIError) or getattr(cause.orig, "sqlstate", "") not in ("40P01", "40001"):
                    raise
        with self.write() as connection:
            return task(connection)

    def now(self) -> datetime:
        """The time by the one clock that importers and consoles on all machines share: the server's; of SQLite, this machine's.

        Raises:
            StoreError: it does not answer.
        """
        if self.dialect != "postgresql":
            return datetime.now(UTC)
        with self.read() as connection:
            found: datetime = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
        return found.astimezone(UTC)

    def size(self) -> int:
        """Bytes on the disk, as far as the database knows.

        Raises:
            StoreError: it does not answer.
        """
        with self.read() as connection:
            if self.dialect == "postgresql":
                return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())

    def rewrite(self) -> None:
        """Write SQLite's file anew, without the room that was left by what was removed.

        Raises:
            StoreError: somebody else uses it, or there is no room for a second one.
        """
        with _named(self.name, self._secrets):
            connection = self.engine.raw_connection()
            try:
                cursor = connection.cursor()
                cursor.execute("VACUUM")  # in no transaction: not by way of a Connection
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                cursor.close()
            except sqlite3.Error as error:
                raise StoreError(f"{self.name} could not be made smaller: {error}. Nothing is lost") from error
            finally:
                connection.close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _migrate(self) -> None:
        """Up to the newest step, in one transaction: a kill on the way leaves what was there."""
        script = ScriptDirectory.from_config(_config())
        with self.engine.connect() as connection:
            there = self._version(connection, script)
        if self._wal:
            _to_wal(self.engine)  # only now: a file of somebody else keeps every byte
        if there == script.get_current_head():
            return
        with self._writing.connect() as connection, _begin(connection):
            if self.dialect == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            if self._version(connection, script) != script.get_current_head():
                config = _config()
                config.attributes.update(connection=connection, version_table=VERSION_TABLE)
                command.upgrade(config, "head")
                upsert(connection, meta, [{"name": "change", "number": 0}], update=())

    def _version(self, connection: sa.Connection, script: ScriptDirectory) -> str | None:
        tables = set(sa.inspect(connection).get_table_names())
        if VERSION_TABLE not in tables:
            foreign = sorted(tables)[:3]
            if foreign:
                raise StoreError(
                    f"{self.name} is a database of something else (it has tables {', '.join(map(repr, foreign))}): "
                    "nothing was changed; give another --db"
                )
            return None
        found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
        known = {one.revision for one in script.walk_revisions()}
        if found is not None and found not in known:
            raise StoreError(
                f"{self.name} has version {found!r:.40}, this bitwitness knows up to {script.get_current_head()}: "
                "nothing was changed; use the version that made it, or a newer one"
            )
        return found


def upsert(
    connection: sa.Connection,
    table: sa.Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    keys: Sequence[str] = (),
    update: Sequence[str] | None = None,
) -> int:
    """Insert rows; where one is there already, set these columns of it. How many rows were inserted or set, where that is known.

    Args:
        connection: of `Database.write`.
        table: where.
        rows: all with the same columns.
        keys: columns of the unique key; those of the primary key if none.
        update: columns to set; all but the key if None; none of them leaves what is there.
    """
    if not rows:
        return 0
    keys = tuple(keys) or tuple(column.name for column in table.primary_key)
    chosen = [name for name in rows[0] if name not in keys] if update is None else list(update)
    insert: Any = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
    if chosen:
        insert = insert.on_conflict_do_update(
            index_elements=list(keys), set_={name: insert.excluded[name] for name in chosen}
        )
    else:
        insert = insert.on_conflict_do_nothing(index_elements=list(keys))
    return max(0, connection.execute(insert, list(rows)).rowcount)


def changed(connection: sa.Connection) -> None:
    """Say, in the transaction of a change, that something has changed: pages that are open look again."""
    connection.execute(sa.update(meta).where(meta.c.name == "change").values(number=meta.c.number + 1))


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", _SCRIPTS.replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _address(text: str) -> sa.URL:
    """Where a database is. An error never shows the address as a whole: there may be a password in it."""
    text = text.strip()
    if not _SCHEME.match(text):
        if _WRITTEN.search(text):  # PostgreSQL's other form, and no name of a file
            raise ConfigurationError(_NO_ADDRESS)
        if not _PLAIN.match(text) and _MISTYPED.match(text):
            raise ConfigurationError(f"{_NO_ADDRESS}; write ./ before the name of a file that has a colon in it")
        return sa.URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        address = sa.make_url(text)
    except (SQLAlchemyError, ValueError):
        raise ConfigurationError(_NO_ADDRESS) from None
    kind = address.get_backend_name().replace("postgres", "postgresql").replace("postgresqlql", "postgresql")
    if kind == "postgresql":
        if _BARE_AT.match(text):
            raise ConfigurationError(
                "the address of the database has an @ too many: write @ in a password as %40, or use ~/.pgpass"
            )
        if find_spec("psycopg") is None:
            raise MissingExtra("PostgreSQL needs its driver: pip install 'bitwitness[postgresql]'")
        return address.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise ConfigurationError(
            f"{kind!r:.40} is no kind of database: it is a path, sqlite:///PATH or postgresql://..."
        )
    if not address.database or address.database == ":memory:" or address.host or address.username:
        raise ConfigurationError(
            "an address of SQLite names a file: sqlite:///PATH, with a fourth / for an absolute one"
        )
    return sa.URL.create("sqlite", database=str(Path(address.database).absolute()))


def _name(address: sa.URL) -> str:
    """A server's database as pages, logs and errors may show it: never its address, in which a password may stand anywhere."""
    port = address.port or address.query.get("port", "")
    host = address.host or address.query.get("host", "") or "local"
    where = ",".join(host) if isinstance(host, tuple) else host
    return f"postgresql://{where}{f':{port}' if isinstance(port, int | str) and port else ''}/{address.database or ''}"


def _secrets(address: sa.URL, text: str) -> tuple[str, ...]:
    """Whatever of an address must not be told, as it is and as it was written, the longest first."""
    found = {str(address.password)} if address.password else set()
    for name, value in address.query.items():
        if _SECRET.search(name):
            found |= {value} if isinstance(value, str) else set(value)
    found |= {match[1] for match in _WRITTEN.finditer(text)}
    found |= {quote(one, safe="") for one in found} | {quote_plus(one) for one in found}
    return tuple(sorted(filter(None, found), key=lambda one: (-len(one), one)))


def _masked(text: str, secrets: Sequence[str]) -> str:
    """What a driver says, without what it must not say: some repeat what they were given."""
    for one in secrets:
        inside = re.escape(one) if len(one) > 3 else rf"(?<!\w){re.escape(one)}(?!\w)"
        text = re.sub(inside, "***", text)
    return text


def _sqlite(address: sa.URL, *, create: bool = True) -> sa.Engine:
    path = Path(str(address.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be made ({error.strerror or error}): give another --db") from error
    if create:
        # Of its owner alone: it tells of everybody's runs. SQLite makes what it writes beside it in the same mode.
        with suppress(OSError):  # it is there, or opening it says what is wrong
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return _listening(sa.create_engine(address, connect_args={"timeout": _PATIENCE}, hide_parameters=True))


def _postgresql(address: sa.URL) -> sa.Engine:
    return sa.create_engine(
        address,
        pool_pre_ping=True,
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        connect_args={"connect_timeout": 10, "application_name": "bitwitness"},
    )


def _listening(engine: sa.Engine) -> sa.Engine:
    """Transactions of SQLite by our own word: its driver would begin them late, and a writer could then be refused midway."""

    @sa.event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cache_size=-32000")
        connection.execute("PRAGMA synchronous=NORMAL")  # a loss of power may take the last import: it is done again

    @sa.event.listens_for(engine, "begin")
    def _begun(connection: sa.Connection) -> None:
        if not connection.get_execution_options().get("writing", False):
            connection.exec_driver_sql("BEGIN")
            return
        # In short turns: who waits longer says so (`_begin`), which nobody can from inside of SQLite.
        connection.exec_driver_sql(f"PRAGMA busy_timeout={_TURN}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.exec_driver_sql(f"PRAGMA busy_timeout={int(_PATIENCE * 1000)}")

    return engine


def _to_wal(engine: sa.Engine) -> None:
    """Let readers and the one writer not wait for one another. Where others are just opening the file, it is tried again."""
    until = time.monotonic() + _PATIENCE
    raw = engine.raw_connection()
    try:
        while True:
            try:
                cursor = raw.cursor()
                cursor.execute("PRAGMA journal_mode=WAL")
                cursor.close()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise StoreError(f"{engine.url.database} cannot be used now: {error}") from error
                time.sleep(0.05)
            else:
                return
    finally:
        raw.close()


def _begin(connection: sa.Connection) -> sa.RootTransaction:
    """Begin to write. SQLite says at once that it is busy where waiting could last forever; then it is tried again."""
    begun, told = time.monotonic(), False
    while True:
        try:
            transaction = connection.begin()
        except OperationalError as error:
            waited = time.monotonic() - begun
            if "locked" not in str(error.orig) or waited > _PATIENCE:
                raise
            if not told and waited > _TOLD_AFTER:
                told = True
                logger.warning(
                    "%s is locked: somebody else writes to it; waiting for that", connection.engine.url.database
                )
            connection.rollback()
            time.sleep(0.05)
        else:
            if told:
                logger.warning("%s is free again", connection.engine.url.database)
            return transaction


@contextmanager
def _named(name: str, secrets: Sequence[str]) -> Iterator[None]:
    """Turn an error of the database into ours; without the statement, whose values come from files, and without secrets."""
    try:
        yield
    except DBAPIError as error:
        what = " ".join(_masked(str(error.orig), secrets).split())[:300]
        raise StoreError(
            f"the database {name} failed: {what}. Look at its disk, its server and its permissions"
        ) from _harmless(error, secrets)
    except SQLAlchemyError as error:
        what = _masked(str(error), secrets)[:300]
        raise StoreError(f"the database {name} failed: {type(error).__name__}: {what}") from _harmless(error, secrets)


def _harmless(error: SQLAlchemyError, secrets: Sequence[str]) -> SQLAlchemyError | None:
    """The error as a cause that may be logged; none where it holds a secret."""
    told = "".join(traceback.format_exception(error))
    return error if _masked(told, secrets) == told else None
