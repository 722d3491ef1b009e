"""Following files that grow: what was read and how far go into the database in one transaction.

A process that is killed at any instant has therefore read a line wholly or not at all, and two importers on one database take
turns: whoever finds that the offset has moved since it looked reads on from there, and throws away what it had read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa

from bitwitness.runfiles.reading import Folder, Lines, after_line, identity, next_lines
from bitwitness.store.database import Database, upsert
from bitwitness.store.tables import sources

PATIENCE = timedelta(minutes=2)
"""How long zeros in a line may be what a network file system has not shown yet; later the line is damaged."""
MOST_USELESS = 256 << 20
"""Bytes of a file, in lines that are too long, that are looked through in one round: others wait for theirs meanwhile."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file and how far it was read; see `tables.sources`."""

    id: int
    path: str
    identity: str
    offset: int
    size: int
    lines: int
    skipped: int
    starts: int
    scanned: int
    stamp: str


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of some lines: how many were used and not, and how often a guard had been started after them."""

    records: int
    skipped: int
    starts: int = 0


Take = Callable[[sa.Connection, Source, Lines], Taken]
"""Writes what the lines say; called inside the transaction that moves the offset."""


_COLUMNS = tuple(sources.c[one] for one in Source.__dataclass_fields__)


def sources_of(connection: sa.Connection, run: int) -> dict[str, Source]:
    """The files of a run by path."""
    rows = connection.execute(sa.select(*_COLUMNS).where(sources.c.run_id == run))
    return {row.path: Source(*row) for row in rows}


def locked(connection: sa.Connection, run: int, path: str) -> Source:
    """A file's row, made where there is none, and locked until the transaction ends."""
    chosen = sa.select(*_COLUMNS).where(sources.c.run_id == run, sources.c.path == path).with_for_update()
    row = connection.execute(chosen).one_or_none()
    if row is None:
        upsert(connection, sources, [{"run_id": run, "path": path}], keys=("run_id", "path"), update=())
        row = connection.execute(chosen).one()
    return Source(*row)


def set_source(connection: sa.Connection, source: Source, **values: Any) -> Source:
    """Note how far a file was read."""
    connection.execute(sa.update(sources).where(sources.c.id == source.id).values(**values))
    return replace(source, **values)


@dataclass(slots=True)
class Followed:
    """What following a file came to.

    Attributes:
        records, skipped: lines that were used, and that were not.
        replaced: it is another file than before, and was read from its beginning.
        moved: another importer reads it at this moment.
        complete: all of it was read, as far as it can be.
        unended: bytes of a line that is too long and whose end was not found yet; 0 if there is none.
    """

    records: int = 0
    skipped: int = 0
    replaced: bool = False
    moved: bool = False
    complete: bool = False
    unended: int = 0


class Follower:
    """Reads files that grow, for one importer.

    Args:
        database: where it goes.
        clock: the importer's.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database, self._clock = database, clock
        self._zeros: dict[tuple[int, str], tuple[int, datetime]] = {}
        self.told: Callable[[int], object] | None = None  # how many records each part had that is written now

    def follow(
        self,
        folder: Folder,
        run: int,
        path: str,
        known: Mapping[str, Source],
        take: Take,
        forget: Callable[[sa.Connection], object],
    ) -> Followed:
        """Read what is new in a file.

        Args:
            folder: of the run.
            run: its key.
            path: of the file in it.
            known: `sources_of` the run.
            take: writes what lines say.
            forget: removes what was written of the file before: it was replaced by another.

        Raises:
            OSError: the file is gone or cannot be read; nothing was changed.
            StoreError: the database does not take it.
        """
        descriptor = folder.open(path)
        try:
            return self._follow(descriptor, run, path, known.get(path), take, forget)
        finally:
            os.close(descriptor)

    def _follow(
        self,
        descriptor: int,
        run: int,
        path: str,
        source: Source | None,
        take: Take,
        forget: Callable[[sa.Connection], object],
    ) -> Followed:
        found = Followed()
        size = os.fstat(descriptor).st_size
        if source is not None and not _is_same(descriptor, size, source):
            found.replaced = self._begin_anew(run, source, forget)
            found.moved = not found.replaced
            if found.moved:
                return found
            source = replace(source, offset=0, identity="", scanned=0)
        offset, scanned = (source.offset, source.scanned) if source is not None else (0, 0)
        useless = 0
        while True:
            lines = self._next(descriptor, run, path, offset, scanned if scanned <= size else 0)
            if lines.offset == offset and lines.scanned == scanned:
                found.unended = max(0, scanned - offset)
                found.complete = (run, path) not in self._zeros
                return found
            seen = identity(descriptor, lines.offset)
            taken = self._database.change(
                partial(_take, run=run, path=path, lines=lines, at=(offset, seen, size), take=take)
            )
            if taken is None:
                found.moved = True
                return found
            found.records += taken.records
            found.skipped += taken.skipped
            if self.told is not None:
                self.told(taken.records)
            if lines.scanned or lines.skipped:
                useless += max(lines.scanned, lines.offset) - max(scanned, offset)
            offset, scanned = lines.offset, lines.scanned
            found.unended = max(0, scanned - offset)
            if not lines.more and offset >= size:
                found.complete = True
                return found
            if useless >= MOST_USELESS:
                return found

    def now(self) -> datetime:
        """The time, by the importer's clock."""
        return self._clock()

    def _begin_anew(self, run: int, source: Source, forget: Callable[[sa.Connection], object]) -> bool:
        def begin(connection: sa.Connection) -> bool:
            now = locked(connection, run, source.path)
            if (now.offset, now.identity) != (source.offset, source.identity):
                return False  # another importer has seen it too
            forget(connection)
            set_source(connection, now, offset=0, identity="", lines=0, skipped=0, starts=0, scanned=0, size=0)
            return True

        return self._database.change(begin)

    def _next(self, descriptor: int, run: int, path: str, offset: int, scanned: int) -> Lines:
        """The next lines; past a line with zeros in it once these have stayed for long."""
        lines = next_lines(descriptor, offset, scanned)
        if lines.offset != offset or lines.scanned:
            self._zeros.pop((run, path), None)
            return lines
        end = after_line(descriptor, offset)
        if end == offset:
            self._zeros.pop((run, path), None)
            return lines
        now = self._clock()
        at, since = self._zeros.get((run, path), (-1, now))
        if at != offset:
            self._zeros[run, path] = (offset, now)
            return lines
        return lines if now - since < PATIENCE else Lines((), end, skipped=1, more=True)


def _is_same(descriptor: int, size: int, source: Source) -> bool:
    return size >= source.offset and identity(descriptor, source.offset) == source.identity


def _take(
    connection: sa.Connection, *, run: int, path: str, lines: Lines, at: tuple[int, str, int], take: Take
) -> Taken | None:
    """Write lines and move the offset; None where another importer has moved it. `at`: offset before, identity after, size."""
    offset, seen, size = at
    source = locked(connection, run, path)
    if source.offset != offset:
        return None
    taken = take(connection, source, lines) if lines.lines else Taken(0, 0, source.starts)
    set_source(
        connection,
        source,
        identity=seen,
        offset=lines.offset,
        scanned=lines.scanned,
        size=size,
        lines=source.lines + len(lines.lines) + lines.skipped,
        skipped=source.skipped + taken.skipped + lines.skipped,
        starts=taken.starts,
    )
    return Taken(taken.records, taken.skipped + lines.skipped, taken.starts)
