"""Import rounds: all runs and all states of the fleet, again and again, beside jobs that write, die and start again.

Nothing that a run holds may stop the import of another. What cannot be read becomes a problem that pages show; only a database
that takes nothing ends a round.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from bitwitness.errors import BitwitnessError, StoreError
from bitwitness.runfiles.reading import JOURNALS, RUN
from bitwitness.store import importing_problems
from bitwitness.store.database import Database, changed, upsert
from bitwitness.store.importing_copies import settle
from bitwitness.store.importing_fleet import import_fleet, unreadable
from bitwitness.store.importing_names import look_of, name_runs
from bitwitness.store.importing_problems import Problems
from bitwitness.store.importing_runs import RunImporter
from bitwitness.store.importing_sources import PATIENCE
from bitwitness.store.importing_values import digest, stamp, text
from bitwitness.store.tables import meta, runs

logger = logging.getLogger(__name__)

_MOST = 100_000
"""Directories that are looked at below one folder of runs."""
_NAMED_EVERY = 2.0
"""Seconds between two looks at the names of runs in a round."""
_NOTED_EVERY = timedelta(seconds=20)
"""How often a round is noted that found nothing: rounds may come every second."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a round has come.

    Attributes:
        done, total: runs and states that were read, of how many.
        path: which comes next.
        records: lines and files that were read in this round.
    """

    done: int
    total: int
    path: str
    records: int

    def __str__(self) -> str:
        return f"{self.done} of {self.total}, {self.records} records: {self.path}"


@dataclass(frozen=True, slots=True)
class Imported:
    """What a round came to.

    Attributes:
        runs: keys of the runs of which something changed.
        records: lines and files that were new.
        problems: files that could not be read in this round, wholly or in part.
        fleet: whether something of the fleet changed.
    """

    runs: frozenset[int]
    records: int
    problems: int
    fleet: bool


class Importer:
    """Reads runs and the fleet into a database; one thread uses it.

    Args:
        database: where it goes.
        runs: directories of runs.
        parents: folders of runs, up to two levels deep; new ones are found in each round.
        fleets: state folders of `bitwitness fleet watch`.
        clock: the time; the database's where it is None, because whoever reads it there must go by the same one. That of the
            writers is never compared with it.
    """

    def __init__(
        self,
        database: Database,
        runs: Sequence[str | os.PathLike[str]],
        *,
        parents: Sequence[str | os.PathLike[str]] = (),
        fleets: Sequence[str | os.PathLike[str]] = (),
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database, self._clock = database, clock or database.now
        self._runs = tuple(dict.fromkeys(Path(os.path.realpath(one)) for one in runs))
        self._parents = tuple(dict.fromkeys(Path(os.path.realpath(one)) for one in parents))
        self._fleets = tuple(dict.fromkeys(Path(os.path.realpath(one)) for one in fleets))
        self._importer = RunImporter(database, self._clock)
        self._present: frozenset[Path] | None = None
        self._noted: datetime | None = None
        self._named: object = None
        self._named_at = -math.inf
        self._sizes: dict[int, int] | None = None

    def round(self, progress: Callable[[Progress], object] | None = None) -> Imported:
        """Read what is new.

        Args:
            progress: called before each run, and after each part of one, where it may only raise a BaseException; what it
                raises ends the round, and loses nothing.

        Raises:
            StoreError: the database takes nothing.
        """
        problems = Problems()
        paths = list(dict.fromkeys([*self._runs, *self._found(problems)]))
        total = len(paths) + len(self._fleets)
        keys: set[int] = set()
        records = broken = 0
        for number, path in enumerate(paths):
            if progress is not None:
                progress(Progress(number, total, str(path), records))
            told = None if progress is None else _within(progress, number, total, str(path), records)
            self._importer.tell(told)
            try:
                done = self._importer.round(path)
            except OSError as error:
                if self._is_news(path):
                    problems.note(str(path), f"this directory of a run could not be opened: {error.strerror or error}")
                continue
            except Exception as error:  # noqa: BLE001  (whatever a run holds, the others are read)
                self._give_up(path, error, problems)
                continue
            problems.clear(str(path))
            self._name_runs(at_most=_NAMED_EVERY)
            records += done.records
            broken += done.problems
            if done.changed:
                keys.add(done.run)
        self._database.change(lambda connection: importing_problems.write(connection, None, problems, self._now()))
        self._name_runs()
        if self._note_missing(frozenset(paths)) or keys or self._sizes is None:
            before, now = self._sizes or {}, self._now()
            self._sizes = self._database.change(lambda connection: settle(connection, before, now))
        fleet = False
        for number, folder in enumerate(self._fleets, len(paths)):
            if progress is not None:
                progress(Progress(number, total, str(folder), records))
            lines, moved = self._fleet(folder)
            records += lines
            fleet |= moved
        self._note_round()
        return Imported(frozenset(keys), records, broken + len(problems.found), fleet)

    def _name_runs(self, at_most: float = 0.0) -> None:
        """Give each run the name that tells it apart, when there are others than before; in a long round not after each."""
        if time.monotonic() - self._named_at < at_most:
            return
        with self._database.read() as connection:
            look = look_of(connection)
        if look != self._named:
            self._database.change(name_runs)
            self._named = look
        self._named_at = time.monotonic()

    def _note_round(self) -> None:
        """That somebody has looked now: of a run that nobody looks at any more, it cannot be said that it is silent."""
        now = self._clock()
        if self._noted is None or abs(now - self._noted) >= _NOTED_EVERY:
            self._database.change(lambda connection: _note_round(connection, now))
            self._noted = now

    def _now(self) -> str:
        return stamp(self._clock())

    def _give_up(self, path: Path, error: Exception, problems: Problems) -> None:
        """One run could not be imported; where the database is to blame for more than that, the next statement says so."""
        if not isinstance(error, BitwitnessError):
            logger.error("%s could not be imported", path, exc_info=error)
        said = str(error) if isinstance(error, BitwitnessError) else repr(error)
        problems.note(str(path), f"this run could not be imported to its end: {text(said, 500)}")
        if isinstance(error, StoreError):
            with self._database.write() as connection:  # raises where it takes nothing at all
                importing_problems.write(connection, None, problems, self._now())

    # Which runs there are ---------------------------------------------------------------------------------------------

    def _found(self, problems: Problems) -> Iterator[Path]:
        for parent in self._parents:
            try:
                yield from runs_below(parent)
                problems.clear(str(parent))
            except OSError as error:
                problems.note(str(parent), f"this folder of runs could not be read: {error.strerror or error}")

    def _is_news(self, path: Path) -> bool:
        """Whether nothing is known of a run that is not there: one that was imported is known to be missing instead."""
        chosen = sa.select(sa.func.count()).where(runs.c.place == digest(str(path)))
        with self._database.read() as connection:
            return not connection.execute(chosen).scalar()

    def _note_missing(self, paths: frozenset[Path]) -> bool:
        """Directories that are gone: what was imported of them stays, and says so. Whether there are new ones of these."""
        if self._present == paths and all(path.is_dir() for path in self._runs):
            return False
        self._present = paths
        with self._database.read() as connection:
            rows = connection.execute(sa.select(runs.c.id, runs.c.path).where(runs.c.current, ~runs.c.missing)).all()
        mine = [(row.id, Path(row.path)) for row in rows]
        gone = [key for key, path in mine if self._is_mine(path) and not (path in paths and path.is_dir())]
        gone = [key for key in gone if not Path(dict(mine)[key]).exists()]
        if gone:

            def note(connection: sa.Connection) -> None:
                connection.execute(sa.update(runs).where(runs.c.id.in_(gone)).values(missing=True))
                changed(connection)

            self._database.change(note)
        return bool(gone)

    def _is_mine(self, path: Path) -> bool:
        return path in self._runs or any(path.is_relative_to(parent) for parent in self._parents)

    # The fleet --------------------------------------------------------------------------------------------------------

    def _fleet(self, folder: Path) -> tuple[int, bool]:
        try:
            return import_fleet(self._database, folder, self._now())
        except StoreError:
            raise
        except Exception as error:  # a state that is damaged or made up stops nothing
            if not isinstance(error, BitwitnessError):
                logger.exception("%s could not be imported", folder)
            said = str(error) if isinstance(error, BitwitnessError) else f"it is damaged: {error!r}"
            return 0, unreadable(self._database, folder, said, self._now())


def _within(
    progress: Callable[[Progress], object], done: int, total: int, path: str, records: int
) -> Callable[[int], None]:
    """Tells how far it is in the middle of a run."""

    def tell(more: int) -> None:
        nonlocal records
        records += more
        progress(Progress(done, total, path, records))

    return tell


def _note_round(connection: sa.Connection, now: datetime) -> None:
    """A clock that was set back leaves times that are yet to come: what was seen then was seen now at the latest."""
    upsert(connection, meta, [{"name": "round", "text": stamp(now)}])
    at, latest, before = stamp(now), stamp(now + PATIENCE), stamp(now - PATIENCE)
    for column, limit, most in ((runs.c.grew, at, at), (runs.c.imported, at, before), (runs.c.over, latest, latest)):
        connection.execute(sa.update(runs).where(column > limit).values({column.name: most}))


def runs_below(parent: Path) -> Iterator[Path]:
    """The runs in a folder and in its folders; links are not followed, and what is in a run is no run.

    Raises:
        OSError: the folder cannot be read.
    """
    left = _MOST
    for child in _folders(parent):
        if is_run(child):
            yield child
            continue
        try:
            inner = list(_folders(child))
        except OSError:
            continue
        left -= len(inner)
        if left < 0:
            return
        yield from (one for one in inner if is_run(one))


def is_run(folder: Path) -> bool:
    """Whether a folder looks like that of a run: it says what it is, or ranks have written to it."""
    try:
        return (folder / RUN).is_file() or (folder / JOURNALS).is_dir()
    except OSError:
        return False


def _folders(parent: Path) -> list[Path]:
    with os.scandir(parent) as found:
        names = [one.name for one in found if not one.name.startswith(".") and one.is_dir(follow_symlinks=False)]
    return [parent / name for name in sorted(names)[:_MOST]]
