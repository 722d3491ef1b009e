"""`bitwitness store status`: what is in the database, and what could not be read."""

from __future__ import annotations

from typing import Any

import click
import sqlalchemy as sa

from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.store import database_option
from bitwitness.store.database import Database
from bitwitness.store.queries.copies import counted_incident, counted_run
from bitwitness.store.tables import audit, controllers, incidents, meta, problems, runs

_SHOWN = 50


@click.command()
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(url: str, as_json: bool) -> None:
    """Show how much is in the database, and which files could not be read, since when and why."""
    with Database(url, create=False) as database:
        record = _read(database)
    if as_json:
        print_json(record)
        return
    screen = console()
    counts = record["counts"]
    screen.print(styled(f"database      {record['database']}, {record['bytes'] / (1 << 20):.1f} MiB"))
    screen.print(
        styled(
            f"runs          {counts['runs']}, with {counts['observations']} observations; raw records of "
            f"{counts['pruned']} were removed; {counts['missing']} are gone from the disk"
            + (f"; {counts['copies']} more are copies, and not counted" if counts["copies"] else "")
        )
    )
    found = f"{counts['attributed']} attributed, {counts['unattributed']} unattributed; {counts['open']} open"
    screen.print(styled(f"incidents     {found}"))
    screen.print(styled(f"fleet         {counts['controllers']} controllers, {counts['audit']} lines of audit"))
    screen.print(styled(f"problems      {counts['problems']}"))
    for one in record["problems"]:
        screen.print(styled(f"  {one['path']}: {one['text']} (since {one['time']})"))
    if counts["problems"] > len(record["problems"]):
        screen.print(styled(f"  and {counts['problems'] - len(record['problems'])} more"))


def _read(database: Database) -> dict[str, Any]:
    def many(connection: sa.Connection, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one())

    with database.read() as connection:
        total = sa.select(sa.func.coalesce(sa.func.sum(runs.c.observations), 0))
        newest = sa.select(problems.c.path, problems.c.text, problems.c.time, problems.c.lines)
        told = connection.execute(newest.order_by(problems.c.time.desc(), problems.c.id).limit(_SHOWN)).mappings().all()
        counts = {
            "runs": many(connection, runs, counted_run()),
            "copies": many(connection, runs, ~counted_run()),
            "missing": many(connection, runs, runs.c.missing),
            "pruned": many(connection, runs, runs.c.pruned != ""),
            "observations": int(connection.execute(total).scalar_one()),
            "attributed": many(connection, incidents, incidents.c.status == "attributed", counted_incident()),
            "unattributed": many(connection, incidents, incidents.c.status == "unattributed", counted_incident()),
            "open": many(connection, incidents, incidents.c.judgement == "", ~incidents.c.acted, counted_incident()),
            "controllers": many(connection, controllers),
            "audit": many(connection, audit),
            "problems": many(connection, problems),
        }
        change = connection.execute(sa.select(meta.c.number).where(meta.c.name == "change")).scalar()
    return {
        "database": database.name,
        "kind": database.dialect,
        "bytes": database.size(),
        "change": change,
        "counts": counts,
        "problems": [dict(one) for one in told],
    }
