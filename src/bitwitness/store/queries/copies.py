"""What is left out of every list, count and total because the same run is counted elsewhere (see `store/importing_copies.py`).

The page of a copy shows what is in it, and which run is counted instead. Everywhere else one of these three is asked.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import Twin
from bitwitness.store.tables import drills, incidents, runs

_TWINS = 50


def counted_run() -> sa.ColumnElement[bool]:
    """Whether a row of `runs` is of a run of its own."""
    return sa.or_(runs.c.copy_of.is_(None), runs.c.apart)


def counted_incident() -> sa.ColumnElement[bool]:
    """Whether a row of `incidents` is not counted in another run."""
    return ~incidents.c.copied


def counted_drill() -> sa.ColumnElement[bool]:
    """Whether a row of `drills` is not counted in another run."""
    return ~drills.c.copied


def of_counted_run(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """Whether a row with the key of a run is of a run of its own; where `runs` is not joined."""
    return column.not_in(sa.select(runs.c.id).where(~counted_run()))


def twins_of(connection: sa.Connection, row: Any) -> tuple[Twin, ...]:
    """The other runs with the same id, the one that is counted first; `row` has the columns of `runs`."""
    main = row.id if row.copy_of is None else row.copy_of
    same = sa.or_(runs.c.id == main, runs.c.copy_of == main)
    columns = (runs.c.id, runs.c.name, runs.c.path, runs.c.copy_of, runs.c.apart, runs.c.missing)
    query = sa.select(*columns).where(same, runs.c.id != row.id).order_by(runs.c.copy_of.is_not(None), runs.c.id)
    return tuple(
        Twin(one.id, one.name, one.path, counted=one.copy_of is None, apart=one.apart or row.apart, missing=one.missing)
        for one in connection.execute(query.limit(_TWINS))
    )
