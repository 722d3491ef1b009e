"""What a controller knows, in a database that survives whatever happens to the controller.

Everything that is done is noted here before it is done, so a `kill -9` at any instant leaves either nothing that was started
or a note of what may have been. SQLite because a transaction of it is whole or absent, also after a loss of power, because
it needs no server, and because whoever wants other tables than ours can read it.

A database that is damaged is never replaced by a new one: a controller that has forgotten what it did would do it again.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwitness._version import __version__
from bitwitness.errors import ConfigurationError, RunFilesError, StorageBusy
from bitwitness.fleet.clock import Clock, stamp
from bitwitness.fleet.state_reading import Reading
from bitwitness.fleet.tables import MIGRATIONS, SCHEMA, TABLES
from bitwitness.runfiles.files import sync_folder

NAME = "state.db"
_WAL = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit trail.

    Attributes:
        number: counts up; nothing is ever changed or removed.
        time: UTC in ISO 8601.
        who: `user@host` of whoever did it, or `controller`.
        what: in a word, e.g. `proposed`, `held`, `intent`, `call`, `done`, `cleared`.
        incident, node: which it is about, or "".
        text: a sentence.
        record: what belongs to it, JSON values.
    """

    number: int
    time: str
    who: str
    what: str
    incident: str
    node: str
    text: str
    record: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


class State:
    """The database of one controller; others read it, and `fleet clear` writes to it.

    One object is used by one thread; each thread opens its own.

    Args:
        folder: in which it lies; made where it does not exist, if `create`.
        clock: the time.
        create: make an empty one where there is none.
        write: whether anything is to be changed; else nothing of it is, and no file is made beside it.
        check: look through the whole file for damage; whoever reads often may leave that out.

    Raises:
        RunFilesError: it is damaged, of something else, of another version, or cannot be read or written; nothing is changed.
        ConfigurationError: there is none, and none is to be made.
    """

    def __init__(
        self, folder: Path, *, clock: Clock | None = None, create: bool = True, check: bool = True, write: bool = True
    ) -> None:
        self.folder, self.path, self._create = folder, folder / NAME, create
        self.clock = clock or Clock()
        if not self.path.exists():
            self._begin(create and write)
        if self.path.stat().st_size == 0:
            raise RunFilesError(f"{self.path} is empty, so what was in it is lost: {_MEND}")
        self._inode = self.path.stat().st_ino
        self._reading: Reading | None = None
        self._connection = self._open(check, write)

    def _begin(self, create: bool) -> None:
        """Make the file under another name first: one that is there under its own is whole."""
        if not create:
            raise ConfigurationError(
                f"{self.folder} holds no state of a controller (no {NAME}): give the --state of `bitwitness fleet watch`"
            )
        if any(path.exists() for path in self._beside()):
            raise RunFilesError(f"{self.path} is gone, but what belongs to it is still there: {_MEND}")
        new = self.folder / f".{NAME}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            made = sqlite3.connect(new)
            try:
                made.executescript(f"BEGIN;{TABLES}COMMIT;")  # each table by itself would be flushed by itself
                made.execute("PRAGMA synchronous=FULL")
                about = {"schema": str(SCHEMA), "version": __version__, "created": stamp(self.clock.now())}
                made.executemany("INSERT INTO about VALUES (?, ?)", about.items())
                made.commit()
            finally:
                made.close()
            with suppress(FileExistsError):  # somebody else was faster: theirs
                os.link(new, self.path)
            sync_folder(self.folder)
        except (sqlite3.Error, OSError) as error:
            kind = StorageBusy if _may_pass(error) else RunFilesError
            raise kind(f"{self.path} cannot be made: {error}: mend that, or choose another --state") from error
        finally:
            with suppress(OSError):
                new.unlink()

    def _open(self, check: bool, write: bool) -> sqlite3.Connection | None:
        connection: sqlite3.Connection | None = None
        try:
            if write:
                # Opened and closed by one thread, but the one that closes may be another.
                connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
                connection.execute("PRAGMA synchronous=FULL")
            else:
                self._reading = Reading(self.path)
            self._look(connection, check)
            if connection is not None:
                connection.execute("PRAGMA journal_mode=WAL")
                if self._create:
                    _migrate(connection)
        except (sqlite3.Error, OSError) as error:
            self._let_go(connection)
            if _may_pass(error):
                raise StorageBusy(f"{self.path} cannot be used now: {error}. {self._why_not(write)}") from error
            raise RunFilesError(f"{self.path} is damaged, or no state of a controller ({error}): {_MEND}") from error
        except RunFilesError:
            self._let_go(connection)
            raise
        return connection

    def _look(self, connection: sqlite3.Connection | None, check: bool) -> None:
        """Whether it is what we can read, and whole."""

        def rows(query: str) -> list[tuple[Any, ...]]:
            return self._reading.rows(query) if self._reading is not None else connection.execute(query).fetchall()  # type: ignore[union-attr]

        schema = dict(rows("SELECT name, value FROM about")).get("schema")
        if schema not in _READ:
            raise RunFilesError(
                f"{self.path} has schema {schema}, this version reads {' and '.join(_READ)}: use the version that wrote it"
            )
        said = [str(row[0]) for row in rows("PRAGMA quick_check(3)")] if check else ["ok"]
        if said != ["ok"]:
            raise RunFilesError(f"{self.path} is damaged ({'; '.join(said)[:300]}): {_MEND}")

    def _let_go(self, connection: sqlite3.Connection | None) -> None:
        if connection is not None:
            connection.close()
        if self._reading is not None:
            self._reading.close()

    def _why_not(self, write: bool) -> str:
        """What to look at, where it cannot be used now."""
        wanted = os.R_OK | os.W_OK if write else os.R_OK
        found = [self.folder, *(path for path in (self.path, *self._beside()) if path.exists())]
        closed = [path.name for path in found if not os.access(path, wanted)]
        what = "write" if write else "read"
        if closed:
            return f"Nothing was changed; this user may not {what} {', '.join(closed)}"
        return "Nothing was changed; look at the disk"

    def _beside(self) -> list[Path]:
        return [self.path.with_name(NAME + suffix) for suffix in _WAL]

    # Reading and changing ---------------------------------------------------------------------------------------------

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query.

        Raises:
            RunFilesError: the database cannot be read.
        """
        try:
            if self._reading is not None:
                return self._reading.rows(query, values)
            return self._writing.execute(query, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise _kind(error)(f"{self.path} cannot be read: {error}") from error

    @property
    def _writing(self) -> sqlite3.Connection:
        assert self._connection is not None, "this state was opened to be read"
        return self._connection

    def write(self, query: str, values: Sequence[Any] = ()) -> int:
        """Change something, inside `change`; of INSERT INTO the number of the row, of all else how many rows were changed."""
        assert self._writing.in_transaction, "what is changed alone may contradict what should have come with it"
        done = self._writing.execute(query, values)
        return int(done.lastrowid or 0) if query.startswith("INSERT INTO") else done.rowcount

    @contextmanager
    def change(self) -> Iterator[None]:
        """All changes inside, or none of them; on the disk when this ends.

        Raises:
            RunFilesError: they cannot be written, e.g. because the disk is full; none of them is.
        """
        try:
            _migrate(self._writing)
            self._writing.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._writing.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a full disk has ended it already
                    self._writing.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _kind(error)(
                f"{self.path} cannot be written: {error}. Nothing is done to any node before it is noted there"
            ) from error

    def check(self) -> None:
        """Whether the file is still the one that was opened: what is written to one that was removed is lost.

        Raises:
            RunFilesError: it was removed or replaced.
        """
        try:
            now = self.path.stat().st_ino
        except OSError:
            now = -1
        if now != self._inode:
            raise RunFilesError(
                f"{self.path} was removed or replaced while it was in use: nothing is done until this controller is started again"
            )

    def close(self) -> None:
        """Close the file."""
        self._let_go(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def schema(self) -> int:
        """Of the file now: whoever only reads leaves an older one as it is, and whoever writes brings it up to date."""
        return int(self.read("SELECT value FROM about WHERE name = 'schema'")[0][0])

    # What is known of the controller itself ---------------------------------------------------------------------------

    def about(self) -> dict[str, str]:
        """What is known of the controller: `mode`, `round`, `every`, `pid`, `host`, ..."""
        return dict(self.read("SELECT name, value FROM about"))

    def set_about(self, **values: str) -> None:
        """Note it, inside `change`."""
        for name, value in values.items():
            self.write("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, value))

    # The audit trail --------------------------------------------------------------------------------------------------

    def note(
        self,
        what: str,
        text: str,
        *,
        incident: str = "",
        node: str = "",
        who: str = "controller",
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a line to the audit trail, inside `change`."""
        row = (self.stamp(), who, what, incident, node, text, json.dumps(dict(record or {})))
        self.write("INSERT INTO audit (time, who, what, incident, node, text, record) VALUES (?,?,?,?,?,?,?)", row)

    def history(self, *, node: str = "", incident: str = "", what: str = "", last: int = 0) -> list[Entry]:
        """The audit trail, oldest first: of a node, an incident or a kind where one is given, and only the last so many lines."""
        rows = self.read(
            "SELECT number, time, who, what, incident, node, text, record FROM audit "
            "WHERE (? = '' OR node = ?) AND (? = '' OR incident = ?) AND (? = '' OR what = ?) ORDER BY number DESC LIMIT ?",
            (node, node, incident, incident, what, what, last or -1),
        )
        return [_entry(*row) for row in reversed(rows)]

    def news(self, after: int) -> list[Entry]:
        """The lines of the audit trail after this number."""
        rows = self.read(
            "SELECT number, time, who, what, incident, node, text, record FROM audit WHERE number > ? ORDER BY number",
            (after,),
        )
        return [_entry(*row) for row in rows]

    # What is said once ------------------------------------------------------------------------------------------------

    def say_once(self, key: str, text: str) -> bool:
        """Whether this was not said yet, inside `change`; from now on it was. Another text is another saying."""
        said = self.read("SELECT text FROM said WHERE key = ?", (key,))
        if said and said[0][0] == text:
            return False
        self.write("INSERT OR REPLACE INTO said VALUES (?, ?, ?)", (key, text, self.stamp()))
        return True

    def unsay(self, key: str) -> bool:
        """It is over, inside `change`: when it comes again it is said again. Whether it was said."""
        return self.write("DELETE FROM said WHERE key = ?", (key,)) > 0

    def said(self, prefix: str = "") -> dict[str, tuple[str, str]]:
        """What was said and is not over: key to text and time."""
        rows = self.read("SELECT key, text, time FROM said ORDER BY time, key")
        return {key: (text, time) for key, text, time in rows if key.startswith(prefix)}

    def stamp(self, at: datetime | None = None) -> str:
        """A time as it is stored; of now."""
        return stamp(self.clock.now() if at is None else at)


def _entry(number: int, time: str, who: str, what: str, incident: str, node: str, text: str, record: str) -> Entry:
    return Entry(number, time, who, what, incident, node, text, json.loads(record))


def _schema(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT value FROM about WHERE name = 'schema'").fetchone()[0])


def _migrate(connection: sqlite3.Connection) -> None:
    """Bring a file of an older schema up to this one: all of it or nothing, whoever else does so at the same time.

    Raises:
        sqlite3.Error: it cannot be written; it is as it was.
    """
    if _schema(connection) == SCHEMA:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = _schema(connection)  # another process may have been faster
        for step in range(found, SCHEMA):
            for statement in _statements(MIGRATIONS[step]):
                connection.execute(statement)
        connection.execute("UPDATE about SET value = ? WHERE name = 'schema'", (str(max(found, SCHEMA)),))
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, because `executescript` would end the transaction."""
    rest = ""
    for line in script.splitlines(keepends=True):
        rest += line
        if sqlite3.complete_statement(rest):
            yield rest
            rest = ""


def _kind(error: BaseException) -> type[RunFilesError]:
    return StorageBusy if _may_pass(error) else RunFilesError


def _may_pass(error: BaseException) -> bool:
    """Whether it may be over by itself: a full disk, a lock, an error of the storage; not what is damaged or not ours."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
    return not str(error).startswith(("no such table", "no such column", "near "))


_READ = tuple(str(schema) for schema in (*MIGRATIONS, SCHEMA))
"""Schemas of files that this version reads."""
_MEND = (
    "nothing was changed. Do not remove it: a controller that has forgotten what it did would do it again. "
    "Restore it from a copy, or start with a new --state once you have looked at every node by hand"
)
