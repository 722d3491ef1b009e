"""What a run is called: as little of its path as tells it apart from all others in the database.

Jobs that are started by the same script have directories of the same name, below folders that differ. A name that three runs share tells
nothing on a page, in a table or beside a figure. It depends on nothing but the runs that there are, so it is the same whoever imports
them, and in which order; a run that comes later may make the name of another longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import sqlalchemy as sa

from bitwitness.store.database import changed
from bitwitness.store.importing_values import name
from bitwitness.store.tables import runs


def look_of(connection: sa.Connection) -> object:
    """What changes whenever there are other runs than before, at next to no cost."""
    columns = (sa.func.count(), sa.func.max(runs.c.id), sa.func.sum(sa.case((runs.c.current, runs.c.id), else_=0)))
    return tuple(connection.execute(sa.select(*columns).select_from(runs)).one())


def name_runs(connection: sa.Connection) -> bool:
    """Write the names of all runs that are called otherwise; whether there were any."""
    columns = (runs.c.id, runs.c.path, runs.c.run, runs.c.current, runs.c.name)
    rows = connection.execute(sa.select(*columns).order_by(runs.c.id)).all()
    suffixes = shortest(sorted({row.path for row in rows}))
    new = []
    for row in rows:
        # Of runs that lay at one path one after the other, none but the one that is there now has it alone.
        called = name(suffixes[row.path] if row.current else f"{suffixes[row.path]} ({row.run[:8] or 'replaced'})")
        if called != row.name:
            new.append({"key": row.id, "called": called})
    if new:
        here = sa.update(runs).where(runs.c.id == sa.bindparam("key")).values(name=sa.bindparam("called"))
        connection.execute(here, new)
        changed(connection)
    return bool(new)


def shortest(paths: Sequence[str]) -> dict[str, str]:
    """Of each of these paths, which all differ, the shortest end that no other has; whole parts only. Pure."""
    parts = {path: PurePath(path).parts for path in paths}
    found: dict[str, str] = {}
    left, length = list(paths), 1
    while left:
        many = Counter(parts[path][-length:] for path in left)
        for path in left:
            if many[parts[path][-length:]] == 1 or length >= len(parts[path]):
                found[path] = str(PurePath(*parts[path][-length:])) if parts[path] else path
        left = [path for path in left if path not in found]
        length += 1
    return found
