"""What alembic runs: the steps that are missing, on the connection and in the transaction that `store.database` holds.

No alembic.ini and no address stand here: a user of the console never meets alembic.
"""

from __future__ import annotations

from alembic import context

from bitwitness.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=context.config.attributes["version_table"],
    transaction_per_migration=False,
)
context.run_migrations()
