"""What a run does now: decided in the database, because a list of runs is filtered and counted by it.

`training` and `silent` are told apart by when the importer last saw a file of the run grow, by its own clock: a writer whose
clock is wrong is no less alive. A run that was never seen growing is `unknown`, unless a supervisor says that it goes on; and so
is every run that has not ended, when nobody has looked for a while.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import get_args

from sqlalchemy import ColumnElement, and_, case, literal, or_, select

from bitwitness.store.pages import RunState
from bitwitness.store.tables import meta, runs

STATES: tuple[RunState, ...] = get_args(RunState)
_PATIENCE = ((6.0, 120), (60.0, 1_200), (600.0, 12_000))
"""Steps of at most so many seconds -> seconds without a word after which a run is silent: twenty steps, and two minutes at least."""
_LONGEST, _UNPACED = 86_400, 900
"""The same for steps that are slower still, and where nobody knows how long they take: ranges of steps come rarely then."""
_LOOKED = timedelta(minutes=5)
"""A round over many runs takes a minute."""


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def state_of(now: datetime | None) -> ColumnElement[str]:
    """The state of a row of `runs` at this moment."""
    at = now or datetime.now(UTC)
    lately = _after(runs.c.grew, at)
    # Of a database into which nobody imports any more, nobody can say who is silent.
    stale = select(meta.c.name).where(meta.c.name == "round", meta.c.text < _text(at - _LOOKED)).exists()
    return case(
        (or_(runs.c.finished, runs.c.outcome == "finished"), literal("finished")),
        (runs.c.outcome == "stopped", literal("stopped")),
        (runs.c.outcome != "", literal("failed")),
        (stale, literal("unknown")),
        (and_(runs.c.grew > runs.c.imported, lately), literal("training")),
        (runs.c.grew > runs.c.imported, literal("silent")),
        (and_(runs.c.supervision != "", ~_after(runs.c.imported, at)), literal("silent")),
        else_=literal("unknown"),
    )


def _after(column: ColumnElement[str], now: datetime) -> ColumnElement[bool]:
    """Whether a time is so late that a run of this pace may still be at work on the next step."""
    cut = {seconds: _text(now - timedelta(seconds=seconds)) for seconds in (_UNPACED, _LONGEST)}
    paces = [(runs.c.pace <= pace, column >= _text(now - timedelta(seconds=seconds))) for pace, seconds in _PATIENCE]
    return case((runs.c.pace.is_(None), column >= cut[_UNPACED]), *paces, else_=column >= cut[_LONGEST])


def state_text(state: RunState, row: object) -> str:
    """The same in a sentence; `row` has the columns of `runs`."""
    reason, code = getattr(row, "reason", ""), getattr(row, "exit_code", None)
    gone = " Its directory is gone." if getattr(row, "missing", False) else ""
    replaced = "" if getattr(row, "current", True) else " Another run lies in its directory now."
    said = {
        "training": "It trains: its journals grow.",
        "silent": f"It has not ended, and nothing has been written since {_since(row)}.",
        "finished": f"It has finished{_because(reason)}",
        "stopped": f"It was stopped{_because(reason)}",
        "failed": f"It has failed{'' if code is None else f' (exit code {code})'}{_because(reason)}",
        "unknown": "Nothing tells whether it still trains: it was not seen growing lately, and no supervisor says how it ended.",
    }[state]
    return said + gone + replaced


def _since(row: object) -> str:
    grew, imported = str(getattr(row, "grew", "")), str(getattr(row, "imported", ""))
    return grew or imported or "it was imported"


def _because(reason: str) -> str:
    text = reason.strip()
    return f": {text.removesuffix('.')}." if text else "."
