"""Which incident a controller of the fleet means by an id: what it proposes and does must stand beside that one only.

Ids are unique in a run and in a controller's state, and nowhere else: a copy of a run, or a run that was restored, has the same ones. A
controller knows the directory of each incident that it has picked up. Where that does not tell, nobody's page shows it as certain;
the pages of the fleet and of the node show it anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import sqlalchemy as sa

from bitwitness.store.tables import controllers, incidents, picked, runs

_CONTROLLERS = 1_000
_TAIL = 3
"""The directory of the run, `incidents`, and the incident: alike on machines that have the runs in other places."""

Meant = Mapping[tuple[int, str], frozenset[int]]
"""Key of a run and id of an incident -> keys of the controllers that mean this one."""


def meant(connection: sa.Connection, names: Iterable[str]) -> Meant:
    """Of all incidents of these ids, who means them."""
    wanted = set(names)
    every: dict[str, list[Any]] = defaultdict(list)
    columns = (
        incidents.c.run_id,
        incidents.c.name.label("incident"),
        incidents.c.path,
        incidents.c.copied,
        runs.c.copy_of,
    )
    joined = sa.select(*columns).join(runs, runs.c.id == incidents.c.run_id).order_by(incidents.c.id)
    for row in connection.execute(joined.where(incidents.c.name.in_(wanted))):
        every[row.incident].append(row)
    paths: dict[tuple[int, str], str] = {
        (row.controller_id, row.incident): row.path
        for row in connection.execute(sa.select(picked).where(picked.c.incident.in_(wanted)))
    }
    watching = connection.scalars(
        sa.select(controllers.c.id).order_by(controllers.c.id.desc()).limit(_CONTROLLERS)
    ).all()
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for name, alike in every.items():
        for key in watching:
            path = paths.get((key, name))
            # Of copies that lie elsewhere all are the same incident: who means one of them by its path means each.
            exact = [row for row in alike if row.path == path]
            run = which([(row.run_id, row.path) for row in exact or alike if exact or not row.copied], path)
            for row in alike:
                if run is not None and _same(row, run, alike):
                    found[row.run_id, name].add(key)
    return {one: frozenset(keys) for one, keys in found.items()}


def _same(row: Any, run: int, alike: Sequence[Any]) -> bool:
    """Whether an incident is that of this run, or a copy of it, or what it was copied from."""
    mains = {one.run_id: one.run_id if one.copy_of is None else one.copy_of for one in alike}
    return bool(row.run_id == run or mains[row.run_id] == mains[run])


def which(alike: Sequence[tuple[int, str]], path: str | None) -> int | None:
    """The run whose incident is meant, of those that have one of this id; None where that cannot be told.

    Args:
        alike: key of each run, and the directory of its incident.
        path: the directory that the controller has; None where it has none on record.
    """
    exact = [run for run, where in alike if where == path]
    if exact:
        return exact[0] if len(exact) == 1 else None
    if len(alike) != 1:
        return None
    run, where = alike[0]
    return run if path is None or PurePath(where).parts[-_TAIL:] == PurePath(path).parts[-_TAIL:] else None
