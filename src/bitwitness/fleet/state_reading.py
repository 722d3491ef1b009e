"""Reading the state of a controller that somebody else runs: nothing of it is changed, and nothing is left beside it.

SQLite makes files beside a database that it opens, also to read it, and they belong to whoever was first: a controller that runs
as another user could then not write its own state. So how a state is opened is decided by what lies there. With both files of a
controller that runs, or was killed, SQLite needs no other. With none it is read as it lies, and read again where it turns out to
have changed meanwhile. With one alone, as in a backup, a copy is read.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from bitwitness.errors import StorageBusy

_TRIES = 5
_Found = TypeVar("_Found")
_Seen = tuple[tuple[int, ...], ...]


class Reading:
    """A connection through which nothing can be changed.

    Args:
        path: the database.

    Raises:
        sqlite3.Error, OSError: it cannot be opened.
        StorageBusy: it changes faster than it can be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._lies: _Seen | None = None
        self._connection = self._open()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query, all of one moment.

        Raises:
            sqlite3.Error, StorageBusy: as above.
        """
        return self._at_one_moment(lambda: self._connection.execute(query, values).fetchall())

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Copy all of it, as it is at one moment.

        Raises:
            sqlite3.Error, StorageBusy: as above.
        """
        self._at_one_moment(lambda: self._connection.backup(target))

    def _at_one_moment(self, read: Callable[[], _Found]) -> _Found:
        for _ in range(_TRIES):
            try:
                found = read()
            except sqlite3.Error:
                if self._as_it_was():
                    raise
            else:
                if self._as_it_was():
                    return found
            self.close()
            self._connection = self._open()
        raise StorageBusy(f"{self._path} changes faster than it can be read: try again")

    def close(self) -> None:
        """Let go of it."""
        with suppress(AttributeError):  # it was never open
            self._connection.close()
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    def _as_it_was(self) -> bool:
        return self._lies is None or self._lies == _seen(self._path)

    def _open(self) -> sqlite3.Connection:
        self._lies = None
        database, *beside = seen = _seen(self._path)
        if database and not any(beside[:1] + beside[2:]):
            self._lies = seen
            return _connect(self._path, "?immutable=1")
        if all(beside[:2]):
            return _connect(self._path, "?mode=ro")
        return _connect(self._copied(), "")

    def _copied(self) -> Path:
        """A copy of what lies there, all of one moment."""
        self._copy = tempfile.TemporaryDirectory(prefix="bitwitness-state-")
        copy = Path(self._copy.name) / self._path.name
        try:
            for _ in range(_TRIES):
                before = _seen(self._path)
                for file in (copy, *_beside(copy)):
                    file.unlink(missing_ok=True)
                for source, target in zip(_files(self._path), _files(copy), strict=True):
                    with suppress(FileNotFoundError):
                        shutil.copyfile(source, target)
                if before == _seen(self._path):
                    return copy
        except BaseException:
            self.close()
            raise
        self.close()
        raise StorageBusy(f"{self._path} changes faster than it can be copied: try again")


def _connect(path: Path, how: str) -> sqlite3.Connection:
    # Opened and closed by one thread, but the one that closes may be another.
    address = path.absolute().as_uri() + how
    return sqlite3.connect(address, uri=True, timeout=30.0, isolation_level=None, check_same_thread=False)


def _beside(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))


def _files(path: Path) -> tuple[Path, ...]:
    """What holds content; `-shm` is made anew of it."""
    wal, _, journal = _beside(path)
    return path, wal, journal


def _seen(path: Path) -> _Seen:
    """What lies there; () for a file that does not."""
    found: list[tuple[int, ...]] = []
    for one in (path, *_beside(path)):
        try:
            state = one.stat()
        except FileNotFoundError:
            found.append(())
        else:
            found.append((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    return tuple(found)
