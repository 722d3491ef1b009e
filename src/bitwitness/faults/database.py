"""The results of a campaign, one row a run, in a file that survives whatever happens to the campaign.

A campaign may take a night, and nights end with a closed laptop. Each result is committed when it comes, so that the same
command goes on where the last one was killed. SQLite because it is in the standard library, is atomic, and can be read by
whoever wants other tables than ours.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwitness._version import __version__
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.faults.cells import CellResult, CellSpec
from bitwitness.runfiles import utc_now

SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY,
    role TEXT NOT NULL,
    job TEXT NOT NULL,
    label TEXT NOT NULL,
    faults TEXT NOT NULL,
    end TEXT NOT NULL,
    caught_by TEXT NOT NULL,
    spec TEXT NOT NULL,
    result TEXT NOT NULL,
    time TEXT NOT NULL
) WITHOUT ROWID;
"""


class Results:
    """The results in a file.

    Args:
        path: of the database; made if it does not exist. Its folder must.

    Raises:
        RunFilesError: it is no database of a campaign, or cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        existed = path.exists() and path.stat().st_size > 0
        try:
            self._connection = sqlite3.connect(path, timeout=30.0)
        except sqlite3.Error as error:
            raise RunFilesError(f"{path} cannot be opened: {error}") from error
        try:
            if existed and not self._is_ours():
                raise RunFilesError(f"{path} is a database of something else: choose another folder with --out")
            # A committed result must outlive a loss of power, not only a kill.
            self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;" + _TABLES)
            self._connection.execute("INSERT OR IGNORE INTO about VALUES ('schema', ?)", (str(SCHEMA),))
            self._connection.commit()
            schema = self._about("schema")
        except sqlite3.Error as error:
            self._connection.close()
            raise RunFilesError(f"{path} cannot be used as a database of results: {error}") from error
        except RunFilesError:
            self._connection.close()
            raise
        if schema != str(SCHEMA):
            self._connection.close()
            raise RunFilesError(
                f"{path} has schema {schema}, this version reads {SCHEMA}: use the version that wrote it"
            )

    def _is_ours(self) -> bool:
        names = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return not names or {"about", "cells"} <= names

    def _about(self, name: str) -> str | None:
        row = self._connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def begin(self, campaign: str, cells: Iterable[CellSpec], folder: Path | None = None) -> None:
        """Say what this database is for, or make sure that it is for this.

        A campaign that was only extended goes on: its results stay. One in which runs were changed or taken out that have a
        result does not, because its tables would mix what was asked for then and now.

        Args:
            campaign: its name.
            cells: its runs.
            folder: of its file, None if it has none: kept with the current folder, because modules of jobs lie there.

        Raises:
            ConfigurationError: the results are of another campaign, of other runs or of another version of bitwitness.
        """
        order = [cell.key for cell in cells]
        was, version = self._about("campaign"), self._about("version")
        if was is not None and was != campaign:
            raise ConfigurationError(
                f"{self.path} holds results of the campaign {was!r}, not of {campaign!r}: {_OTHER}"
            )
        if version is not None and version != __version__:
            raise ConfigurationError(
                f"{self.path} holds results of bitwitness {version}, and this is {__version__}: {_OTHER}"
            )
        strangers = self.done() - set(order)
        if strangers:
            raise ConfigurationError(
                f"{self.path} holds results of {len(strangers)} runs that this campaign does not have: the file or the module of a job was changed since "
                f"({', '.join(sorted(strangers)[:2])}, ...). {_OTHER.capitalize()}"
            )
        beside = [] if folder is None else [str(folder.absolute())]
        places = json.dumps([*beside, str(Path.cwd())])
        about = {"campaign": campaign, "version": __version__, "cells": json.dumps(order), "places": places}
        with self._writing():
            self._connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())

    @property
    def places(self) -> list[str]:
        """The folders beside Python's own where the modules of jobs were looked for; empty where that is not known."""
        return [str(place) for place in json.loads(self._about("places") or "[]")]

    def _planned(self) -> list[str]:
        cells = self._about("cells")
        return [] if cells is None else [str(key) for key in json.loads(cells)]

    def done(self) -> set[str]:
        """The keys of the runs that have a result."""
        return {key for (key,) in self._read("SELECT key FROM cells")}

    def put(self, spec: CellSpec, result: CellResult) -> None:
        """Keep a result; on the disk when this returns. Of two for the same run the second stays."""
        row = (
            spec.key,
            spec.role,
            spec.job,
            spec.label,
            "\n".join(spec.faults),
            result.end,
            result.caught_by,
            json.dumps(spec.to_json()),
            json.dumps(result.to_json()),
            utc_now(),
        )
        with self._writing():
            self._connection.execute(f"INSERT OR REPLACE INTO cells VALUES ({','.join('?' * len(row))})", row)  # noqa: S608

    def all(self) -> list[tuple[CellSpec, CellResult]]:
        """Every run that has a result, in the order of the campaign.

        Raises:
            RunFilesError: a row is damaged.
        """
        found = {}
        for key, spec, result in self._read("SELECT key, spec, result FROM cells"):
            try:
                found[key] = (CellSpec.from_json(json.loads(spec)), CellResult.from_json(json.loads(result)))
            except (ValueError, TypeError, KeyError) as error:
                raise RunFilesError(f"{self.path}: the result {key} is damaged ({error})") from error
        place = {key: number for number, key in enumerate(self._planned())}
        return [found[key] for key in sorted(found, key=lambda key: (place.get(key, len(place)), key))]

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query).fetchall()
        except sqlite3.Error as error:
            raise RunFilesError(f"{self.path} cannot be read: {error}") from error

    def _writing(self) -> _Transaction:
        return _Transaction(self._connection, self.path)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Transaction:
    """Commits what was done inside, or none of it."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self._path = connection, path

    def __enter__(self) -> None:
        self._connection.rollback()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._connection.commit()
            else:
                self._connection.rollback()
        except sqlite3.Error as failure:
            raise RunFilesError(f"{self._path} cannot be written: {failure}") from failure
        if isinstance(error, sqlite3.Error):
            raise RunFilesError(f"{self._path} cannot be written: {error}") from error


_OTHER = "choose another folder with --out, or remove this one"
