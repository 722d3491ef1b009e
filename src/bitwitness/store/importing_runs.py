"""One run, one round: everything in its directory that is new goes into the database.

Each file is read by itself, and what is wrong with one never keeps another from being read. What an importer remembers between
rounds only spares it to look again; forgetting it costs time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.reading import (
    CHECKPOINTS,
    FAULTS,
    INCIDENT,
    INCIDENTS,
    JOURNALS,
    LOG,
    QUARANTINE,
    RUN,
    SESSION,
    Folder,
    rank_of,
    stop_name,
    to_object,
)
from bitwitness.store import importing_incidents, importing_journal, importing_problems, importing_rest
from bitwitness.store.database import Database, changed
from bitwitness.store.importing_about import key_of, write_about
from bitwitness.store.importing_incidents import actions_path
from bitwitness.store.importing_problems import Problems
from bitwitness.store.importing_rest import label_path
from bitwitness.store.importing_sources import (
    PATIENCE,
    Followed,
    Follower,
    Source,
    Take,
    locked,
    set_source,
    sources_of,
)
from bitwitness.store.importing_sums import add_up
from bitwitness.store.importing_values import moment, stamp, text
from bitwitness.store.tables import checkpoints, incidents, runs

_LARGEST = 64 << 20
_GONE = "is gone; what was read of it before is kept"


@dataclass(slots=True)
class Memory:
    """What an importer remembers of a run.

    Attributes:
        looks: how each file looked when all of it had been read, or was found to be damaged.
        glance: how all of them looked together; None: there may be more to read.
        run: id of run.json.
        start: what run.json says of the newest start: its session of `bitwitness run`, "" without one, and its time.
        session: the newest session.
        end: the last word on how it ended.
        beat: the session that goes on, and how often it has said so.
        rounds: how often it was read.
        unfinished: the last round failed: what it has written was not added up.
    """

    looks: dict[str, str] = field(default_factory=dict)
    glance: object = None
    run: str | None = None
    start: tuple[str, str] | None = None
    session: str = ""
    end: object = None
    beat: tuple[str, int] = ("", 0)
    rounds: int = 0
    unfinished: bool = False

    def forget(self) -> None:
        """Look at everything again: what was read may not have been written."""
        self.looks.clear()
        self.glance = self.end = None
        self.unfinished = True


@dataclass(slots=True)
class Round:
    """What a round of one run came to."""

    run: int = 0
    records: int = 0
    problems: int = 0
    changed: bool = False


class RunImporter:
    """Imports one run after another.

    Args:
        database: where it goes.
        clock: the importer's.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime]) -> None:
        self._database, self._clock = database, clock
        self._follower = Follower(database, clock)
        self._memory: dict[int, Memory] = {}
        self._keys: dict[Path, int] = {}

    def tell(self, told: Callable[[int], object] | None) -> None:
        """From now on, say of each part of a run that is written how many records it had."""
        self._follower.told = told

    def round(self, path: Path) -> Round:
        """Read what is new in a run.

        Raises:
            OSError: the directory cannot be opened.
            StoreError: the database does not take it.
        """
        with Folder(path) as folder:
            known = self._memory.get(self._keys.get(path, 0))
            glance = _glance(folder, "" if known is None else known.session)
            if known is not None and glance is not None and known.glance == glance:
                return Round(self._keys[path])
            problems = Problems()
            record, run = _about(folder, problems, known)
            key = self._database.change(lambda connection: key_of(connection, path, run))
            memory = self._memory.setdefault(key, Memory())
            self._keys[path], memory.run = key, run
            try:
                reading = _Reading(self._database, self._follower, folder, key, problems, memory)
                reading.about(record)
                reading.all()
                done = reading.finish(self._clock())
            except BaseException:
                memory.forget()
                raise
            memory.glance = glance if reading.complete else None
            return done


def _glance(folder: Folder, session: str) -> object:
    """How all files of a run look: most runs of a long list have ended, and looking must cost next to nothing.

    Whatever is read below must be here, or a change of it alone is not seen. `session`: the newest one that was known.
    """
    try:
        seen = {one: folder.look(one) for one in (RUN, LOG, QUARANTINE, SESSION, stop_name(session)) if one}
        for inside in (JOURNALS, FAULTS):
            seen |= {one: folder.look(f"{inside}/{one}") for one in folder.names(inside)}
        for one in folder.names(INCIDENTS):
            seen |= {each: folder.look(each) for each in (f"{INCIDENTS}/{one}/{INCIDENT}", actions_path(one))}
        seen |= {one: folder.look(label_path(one)) for one in folder.names(CHECKPOINTS)}
    except OSError:
        return None
    return seen


def _about(folder: Folder, problems: Problems, known: Memory | None) -> tuple[dict[str, Any] | None, str | None]:
    """run.json and the id in it; the former None where it is the same as before, both None where it cannot be read."""
    path, look = str(folder.path / RUN), folder.look(RUN)
    if known is not None and look and known.looks.get(RUN) == look:
        return None, known.run
    try:
        record = to_object(folder.read(RUN, _LARGEST), RUN)
    except (OSError, RunFilesError) as error:
        if isinstance(error, FileNotFoundError) and _begins(folder):
            problems.clear(path)
            return None, None
        what = "is not there" if isinstance(error, FileNotFoundError) else f"could not be read: {error}"
        problems.note(path, f"{RUN} {what}, so it is not known which run this is; everything else was read")
        return None, None
    problems.clear(path)
    return record, text(record.get("run"), 100)


def _begins(folder: Folder) -> bool:
    """Whether a session goes on that has come to no guard yet: it is the guard that writes run.json, before its journals."""
    try:
        return bool(importing_rest.beat_of(folder)[0]) and not folder.names(JOURNALS)
    except OSError:
        return False


class _Reading:
    """One run in one round."""

    def __init__(
        self, database: Database, follower: Follower, folder: Folder, run: int, problems: Problems, memory: Memory
    ) -> None:
        self._database, self._follower, self._folder = database, follower, folder
        self._run, self._problems, self._memory = run, problems, memory
        self._round = Round(run)
        self._grew = self._starts = False
        self._seen: set[str] = set()
        self.complete = True
        with database.read() as connection:
            self._sources = sources_of(connection, run)

    # Each kind of file ------------------------------------------------------------------------------------------------

    def about(self, record: dict[str, Any] | None) -> None:
        """run.json."""
        if record is None:
            return
        self._memory.end = None
        self._memory.start = (text(record.get("supervision"), 100), moment(record.get("started")))
        look = self._look(RUN)

        def write(connection: sa.Connection) -> None:
            write_about(connection, self._run, record)
            self._stamp(connection, RUN, look)

        if look and look != self._known(RUN).stamp:
            try:
                self._database.change(write)
            except (ConfigurationError, *importing_rest.Damaged) as error:
                self._problems.note(self._path(RUN), f"where its ranks are could not be read: {text(repr(error), 300)}")
            self._round.changed = True
        self._memory.looks[RUN] = look

    def all(self) -> None:
        """Everything else."""
        # The end comes before the journals: what these hold when it is there is not written after it.
        for part in (
            self._log,
            self._end,
            self._beats,
            self._journals,
            self._incidents,
            self._checkpoints,
            self._quarantine,
            self._faults,
            self._gone,
        ):
            try:
                part()
            except OSError as error:
                where = str(error.filename or self._folder.path)
                self._problems.note(self._path(where), f"could not be read: {error.strerror or error}")

    def _journals(self) -> None:
        for one in self._folder.names(JOURNALS):
            path, rank = f"{JOURNALS}/{one}", rank_of(one)
            if rank is None:
                self._problems.note(self._path(path), "is not the journal of a rank, and was left out")
                continue
            take = importing_journal.taking(self._run, rank)
            self._grown(path, take, partial(importing_journal.forget, run=self._run, rank=rank), tells=True)

    def _log(self) -> None:
        take = partial(importing_rest.take_log, run=self._run)
        before = self._memory.looks.get(LOG)
        self._grown(LOG, take, partial(importing_rest.forget_log, run=self._run))
        if self._memory.looks.get(LOG) != before:
            self._memory.end = None  # it tells when a session ended

    def _faults(self) -> None:
        for one in self._folder.names(FAULTS):
            rank = rank_of(one)
            if rank is not None:
                take = partial(importing_rest.take_faults, run=self._run, time=stamp(self._follower.now()))
                self._grown(f"{FAULTS}/{one}", take, partial(importing_rest.forget_faults, run=self._run, rank=rank))

    def _incidents(self) -> None:
        with self._database.read() as connection:
            chosen = sa.select(incidents.c.name, incidents.c.stamp, incidents.c.id).where(
                incidents.c.run_id == self._run
            )
            known = {row.name: (row.stamp, row.id) for row in connection.execute(chosen)}
        there = importing_incidents.listed(self._folder, self._problems)
        for one in known.keys() - set(there):
            self._problems.note(self._path(f"{INCIDENTS}/{one}/{INCIDENT}"), _GONE)
        for one in there:
            where = f"{INCIDENTS}/{one}/{INCIDENT}"
            look = self._look(where)
            if look and look == known.get(one, ("", 0))[0]:
                self._problems.clear(self._path(where))
            if look and look not in (known.get(one, ("", 0))[0], self._memory.looks.get(where)):
                self._memory.looks[where] = look
                found = importing_incidents.read(self._folder, one, self._problems)
                if found is not None:
                    files = self._folder.sizes(f"{INCIDENTS}/{one}", importing_incidents.FILES)
                    path = self._folder.path / INCIDENTS / one
                    write = importing_incidents.write
                    self._database.change(
                        partial(write, run=self._run, incident=one, path=path, found=found, files=files, stamp=look)
                    )
                    self._count(1)
            if one not in known:
                with self._database.read() as connection:
                    here = sa.and_(incidents.c.run_id == self._run, incidents.c.name == one)
                    key = connection.execute(sa.select(incidents.c.id).where(here)).scalar()
            else:
                key = known[one][1]
            if key is not None:
                take = partial(importing_incidents.take_actions, run=self._run, incident=key)
                forget = partial(importing_incidents.forget_actions, incident=key)
                self._grown(actions_path(one), take, forget)

    def _checkpoints(self) -> None:
        with self._database.read() as connection:
            chosen = sa.select(checkpoints.c.step, checkpoints.c.stamp, checkpoints.c.present)
            rows = connection.execute(chosen.where(checkpoints.c.run_id == self._run)).all()
        known = {row.step: (row.stamp, row.present) for row in rows}
        there = importing_rest.checkpoint_steps(self._folder)
        found = set()
        for step, one in there.items():
            where = label_path(one)
            look = self._look(where)
            if known.get(step) == (look, True):
                found.add(step)
            if not look or step in found or self._memory.looks.get(where) == look:
                continue
            self._memory.looks[where] = look
            label = importing_rest.read_label(self._folder, one, step, self._problems)
            if label is not None:
                self._database.change(partial(importing_rest.write_checkpoint, run=self._run, label=label, stamp=look))
                found.add(step)
                self._count(1)
        gone = [step for step, (_, present) in known.items() if present and step not in found]
        if gone:
            here = sa.and_(checkpoints.c.run_id == self._run, checkpoints.c.step.in_(gone))
            self._database.change(
                lambda connection: connection.execute(sa.update(checkpoints).where(here).values(present=False))
            )
            self._round.changed = True

    def _quarantine(self) -> None:
        look = self._look(QUARANTINE)
        if look and look == self._known(QUARANTINE).stamp:
            self._problems.clear(self._path(QUARANTINE))
            return
        if not look or look == self._memory.looks.get(QUARANTINE):
            return
        self._memory.looks[QUARANTINE] = look
        found = importing_rest.read_quarantine(self._folder, self._problems)
        if found is None:
            return

        def write(connection: sa.Connection) -> None:
            importing_rest.write_quarantine(connection, self._run, found)
            self._stamp(connection, QUARANTINE, look)

        self._database.change(write)
        self._count(1)

    def _gone(self) -> None:
        """Files that were read and are there no more. What came of them stays, for it is still true, and pages say so."""
        for path in self._sources:
            if path == RUN or path in self._seen or self._look(path):
                continue
            self._memory.looks.pop(path, None)
            self._problems.note(self._path(path), _GONE)

    def _end(self) -> None:
        session, columns = importing_rest.read_end(self._folder)
        self._memory.session = session
        started = self._memory.start
        if (session, columns, started) == self._memory.end:
            return
        now = self._follower.now()

        def write(connection: sa.Connection) -> bool:
            here = runs.c.id == self._run
            old = connection.execute(sa.select(runs).where(here)).mappings().one()
            values = importing_rest.end_of(session, columns, started, str(old["ended"]))
            if not values.get("outcome", old["outcome"]):
                values["over"] = ""
            elif not old["over"] or old["outcome"] == "" or old["supervision"] != session:
                values["over"] = stamp(now + PATIENCE)  # a network file system may show the last lines late
            new = {each: value for each, value in values.items() if old[each] != value}
            if new:
                connection.execute(sa.update(runs).where(here).values(**new))
            return bool(new)

        self._round.changed |= self._database.change(write)
        self._memory.end = (session, columns, started)

    def _beats(self) -> None:
        """A session is life until it has come to a guard; later only journals are: a supervisor outlives ranks that hang."""
        beat, before = importing_rest.beat_of(self._folder), self._memory.beat
        self._memory.beat = beat
        if not beat[0] or beat == before or self._memory.rounds == 0:
            return
        started = self._memory.start
        if (started[0] != beat[0]) if started is not None else not self._folder.names(JOURNALS):
            self._starts = self._round.changed = True

    # How files are followed -------------------------------------------------------------------------------------------

    def _grown(self, path: str, take: Take, forget: Callable[[sa.Connection], object], *, tells: bool = False) -> None:
        """Read what is new in a file that grows. `tells`: that it grows says that the run trains."""
        look = self._look(path)
        before = self._memory.looks.get(path)
        if not look:
            return
        self._seen.add(path)
        if look == before:
            return
        try:
            found = self._follower.follow(self._folder, self._run, path, self._sources, take, forget)
        except FileNotFoundError:
            return
        except OSError as error:
            self._problems.note(self._path(path), f"could not be read: {error.strerror or error}")
            return
        self._account(path, found)
        # Only what this importer saw itself is growth: what was written before it looked may be old.
        self._grew |= tells and found.records > 0 and self._memory.rounds > 0
        if found.complete:
            self._memory.looks[path] = look
        self.complete &= found.complete

    def _account(self, path: str, found: Followed) -> None:
        if found.replaced:
            self._round.changed = True
        if found.records or found.skipped:
            self._count(found.records)
        source = self._known(path)
        lines = found.skipped + (0 if found.replaced else source.skipped)
        if found.unended:
            self._problems.note(
                self._path(path),
                f"a line has no end within {found.unended} bytes; it is looked for, some in each round, and what comes after it "
                "is read then",
                lines,
            )
            return
        self._problems.skipped(self._path(path), lines)

    def finish(self, time: datetime) -> Round:
        """Add up, and say that something has changed."""
        now = stamp(time)
        first = self._memory.rounds == 0
        self._memory.rounds += 1
        self._round.changed |= self._memory.unfinished

        def write(connection: sa.Connection) -> bool:
            moved = importing_problems.write(connection, self._run, self._problems, now) > 0
            fresh = connection.execute(sa.select(runs.c.imported, runs.c.missing).where(runs.c.id == self._run)).one()
            if not (self._round.changed or moved or first or fresh.missing):
                return False
            values = {
                "missing": False,
                **({"grew": now, "starting": not self._grew} if self._grew or self._starts else {}),
            }
            values |= {"imported": now} if not fresh.imported else {}
            connection.execute(sa.update(runs).where(runs.c.id == self._run).values(**values))
            add_up(connection, self._run)
            if self._round.changed or moved or fresh.missing or not fresh.imported:
                changed(connection)
                return True
            return False

        self._round.changed |= self._database.change(write)
        self._memory.unfinished = False
        self._round.problems = len(self._problems.found)
        return self._round

    def _count(self, records: int) -> None:
        self._round.records += records
        self._round.changed = True

    def _stamp(self, connection: sa.Connection, path: str, look: str) -> None:
        set_source(connection, locked(connection, self._run, path), stamp=look)

    def _known(self, path: str) -> Source:
        return self._sources.get(path, _NOTHING)

    def _look(self, path: str) -> str:
        try:
            return self._folder.look(path)
        except OSError as error:
            self._problems.note(self._path(path), f"could not be read: {error.strerror or error}")
            return ""

    def _path(self, path: str) -> str:
        return str(self._folder.path / path)


_NOTHING = Source(0, "", "", 0, 0, 0, 0, 0, 0, "")
