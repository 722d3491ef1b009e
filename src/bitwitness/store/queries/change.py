"""Whether anything has changed: asked every second by every page that is open, so it reads one row."""

from __future__ import annotations

import sqlalchemy as sa

from bitwitness.store.database import Database
from bitwitness.store.tables import meta


def change(database: Database) -> int:
    """A number that goes up with every import that changed something.

    Raises:
        StoreError: the database does not answer.
    """
    with database.read() as connection:
        return int(connection.scalar(sa.select(meta.c.number).where(meta.c.name == "change")) or 0)
