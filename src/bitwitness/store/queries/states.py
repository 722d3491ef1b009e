"""What a run does now: decided in the database, because a list of runs is filtered and counted by it.

`training` and `silent` are told apart by when the importer last saw a file of the run grow, and by one clock alone, that of the
database: a writer whose clock is wrong is no less alive, and importers and consoles may be on machines that disagree. A run that was never seen growing is `unknown`, unless a supervisor says that it goes on; and so
is every run that has not ended, when nobody has looked for a while. Until then, how long nothing was written is counted up to
the last look: that an importer has stopped says nothing of a run.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from sqlalchemy import ColumnElement, Text, and_, case, literal, literal_column, or_, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from bitwitness.store.pages import RunState
from bitwitness.store.tables import meta, runs

STATES: tuple[RunState, ...] = get_args(RunState)
_PATIENCE = ((6.0, 120), (60.0, 1_200), (600.0, 12_000))
"""Steps of at most so many seconds -> seconds without a word after which a run is silent: twenty steps, and two minutes at least."""
_LONGEST, _UNPACED = 86_400, 900
"""The same for steps that are slower still, and where nobody knows how long they take: ranges of steps come rarely then."""
_LOOKED = 300
"""A round over many runs takes a minute."""


class _Ago(FunctionElement[str]):
    """The time so many seconds ago, by the clock of the database, as text: importers, too, go by that one."""

    type = Text()
    inherit_cache = True


@compiles(_Ago, "sqlite")
def _in_sqlite(element: _Ago, compiler: SQLCompiler, **more: Any) -> str:
    seconds = compiler.process(element.clauses, **more)
    return f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (-({seconds})) || ' seconds')"


@compiles(_Ago, "postgresql")
def _in_postgresql(element: _Ago, compiler: SQLCompiler, **more: Any) -> str:
    seconds = compiler.process(element.clauses, **more)
    ago = f"(now() - make_interval(secs => {seconds})) AT TIME ZONE 'UTC'"
    return f"""to_char({ago}, 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


def _ago(now: datetime | None, seconds: float) -> ColumnElement[str]:
    """A time so long before now; `now` is that of the database where it is None."""
    if now is None:
        return _Ago(literal_column(str(int(seconds))))
    moment = now.astimezone(UTC) - timedelta(seconds=seconds)
    return literal(moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"))


class _Earlier(FunctionElement[str]):
    """So many seconds before a time that is text."""

    type = Text()
    inherit_cache = True


@compiles(_Earlier, "sqlite")
def _earlier_in_sqlite(element: _Earlier, compiler: SQLCompiler, **more: Any) -> str:
    time, seconds = (compiler.process(one, **more) for one in element.clauses)
    return f"strftime('%Y-%m-%dT%H:%M:%fZ', {time}, (-({seconds})) || ' seconds')"


@compiles(_Earlier, "postgresql")
def _earlier_in_postgresql(element: _Earlier, compiler: SQLCompiler, **more: Any) -> str:
    time, seconds = (compiler.process(one, **more) for one in element.clauses)
    ago = f"(CAST({time} AS timestamptz) - make_interval(secs => {seconds})) AT TIME ZONE 'UTC'"
    return f"""to_char({ago}, 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""


def _before_look(now: datetime | None, seconds: int) -> ColumnElement[str]:
    """A time so long before the last look of an importer, or before now where that is earlier or there was none."""
    look = select(meta.c.text).where(meta.c.name == "round").scalar_subquery()
    last = case((look < _ago(now, 0), look), else_=_ago(now, 0))
    return _Earlier(last, literal_column(str(seconds)))


def state_of(now: datetime | None) -> ColumnElement[str]:
    """The state of a row of `runs` at this moment, by the clock of the database where that is None."""
    lately = _after(runs.c.grew, now)
    # Of a database into which nobody imports any more, nobody can say who is silent.
    looked = meta.c.text.between(_ago(now, _LOOKED), _ago(now, -_LOOKED))
    stale = select(meta.c.name).where(meta.c.name == "round", ~looked).exists()
    # What grows long after a session had ended is not of that session.
    ended = or_(runs.c.over == "", runs.c.grew <= runs.c.over)
    seen = runs.c.grew > runs.c.imported
    return case(
        (and_(ended, or_(runs.c.finished, runs.c.outcome == "finished")), literal("finished")),
        (and_(ended, runs.c.outcome == "stopped"), literal("stopped")),
        (and_(ended, runs.c.outcome != ""), literal("failed")),
        (or_(stale, runs.c.missing, ~runs.c.current), literal("unknown")),
        (and_(seen, lately), literal("training")),
        (seen, literal("silent")),
        (and_(runs.c.supervision != "", ~_after(runs.c.imported, now)), literal("silent")),
        else_=literal("unknown"),
    )


def _after(column: ColumnElement[str], now: datetime | None) -> ColumnElement[bool]:
    """Whether a time is so late that a run of this pace may still have been at work on the next step when it was looked at."""
    cut = {seconds: _before_look(now, seconds) for seconds in (_UNPACED, _LONGEST)}
    paces = [(runs.c.pace <= pace, column >= _before_look(now, seconds)) for pace, seconds in _PATIENCE]
    return case((runs.c.pace.is_(None), column >= cut[_UNPACED]), *paces, else_=column >= cut[_LONGEST])


def state_text(state: RunState, row: object) -> str:
    """The same in a sentence; `row` has the columns of `runs`."""
    reason, code = getattr(row, "reason", ""), getattr(row, "exit_code", None)
    gone = " Its directory is gone." if getattr(row, "missing", False) else ""
    replaced = "" if getattr(row, "current", True) else " Another run lies in its directory now."
    copy = " It is a copy: the run with the same id that has more on record is counted instead of it."
    copy = copy if getattr(row, "copy_of", None) is not None and not getattr(row, "apart", False) else ""
    said = {
        "training": _training(row),
        "silent": _silent(row),
        "finished": f"It has finished{_because(reason)}",
        "stopped": f"It was stopped{_because(reason)}",
        "failed": f"It has failed{'' if code is None else f' (exit code {code})'}{_because(reason)}",
        "unknown": f"Nothing tells whether it still trains: it was not seen growing lately, and {_no_end(row)}.",
    }[state]
    before = getattr(row, "outcome", "") if state in ("training", "silent", "unknown") else ""
    since = f" A session of `bitwitness run` had ended before ({before}), and it has grown since." if before else ""
    return said + since + gone + replaced + copy


def _training(row: object) -> str:
    if getattr(row, "starting", False) and not getattr(row, "outcome", ""):
        return "It is being started: a session of `bitwitness run` has begun, and no step of it is on record yet."
    return f"It trains: its journals were last seen growing at {_since(row)}."


def _no_end(row: object) -> str:
    if getattr(row, "supervision", "") and not getattr(row, "outcome", ""):
        return "its supervisor has noted no end"
    return "no supervisor says how it ended"


def _silent(row: object) -> str:
    nothing = f"othing has been written since {_since(row)}"
    if getattr(row, "supervision", "") and not getattr(row, "outcome", ""):
        return f"It has not ended, and n{nothing}."
    return f"N{nothing}. No supervisor was there to note an end, so nobody can tell whether it has ended or hangs."


def _since(row: object) -> str:
    grew, imported = str(getattr(row, "grew", "")), str(getattr(row, "imported", ""))
    return grew or imported or "it was imported"


def _because(reason: str) -> str:
    text = reason.strip()
    return f": {text.removesuffix('.')}." if text else "."
