"""Where a run and the state of a controller lie: what an act needs of the database, which is never a reason for one."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store.database import Database
from bitwitness.store.tables import controllers, runs


def run_place(database: Database, key: int) -> tuple[Path, str]:
    """The directory of a run, and its id.

    Raises:
        NotFound: there is no such run, or another one lies there now.
    """
    with database.read() as connection:
        row = connection.execute(sa.select(runs.c.path, runs.c.run, runs.c.current).where(runs.c.id == key)).first()
    if row is None:
        raise NotFound(f"there is no run {key} in this database")
    if not row.current:
        raise NotFound(f"run {key} is not at {row.path} any more: another run is, and nothing is done to that")
    return Path(row.path), str(row.run)


def controller_place(database: Database, key: int) -> Path:
    """The folder of a controller's state.

    Raises:
        NotFound: there is no such controller.
    """
    with database.read() as connection:
        row = connection.execute(sa.select(controllers.c.path).where(controllers.c.id == key)).first()
    if row is None:
        raise NotFound(f"there is no controller {key} in this database")
    return Path(row.path)
