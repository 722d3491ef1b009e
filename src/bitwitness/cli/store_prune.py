"""`bitwitness store prune`: raw records of runs that ended long ago leave the database; incidents and sums stay."""

from __future__ import annotations

from datetime import timedelta

import click

from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.store import database_option
from bitwitness.store import retention
from bitwitness.store.database import Database

_LONGEST = 36_500 * 86_400.0


@click.command()
@click.option(
    "--keep",
    default="90d",
    show_default=True,
    metavar="TIME",
    callback=seconds_up_to(_LONGEST, "100 years"),
    help="Raw observations and ranges of the ledger stay for so long after a run was last heard of.",
)
@click.option(
    "--evidence",
    default=None,
    metavar="TIME",
    callback=lambda ctx, param, value: value and seconds_up_to(_LONGEST, "100 years")(ctx, param, value),
    help="So long settled incidents keep what they were decided from; without it forever.",
)
@click.option("--shrink", is_flag=True, help="Give the room back to the disk (SQLite; nobody else may be writing).")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def prune(keep: float, evidence: float | None, shrink: bool, dry_run: bool, url: str, as_json: bool) -> None:
    """Remove raw records of runs that ended long ago. Incidents, sums, charts and who did what stay."""
    settled = None if evidence is None else timedelta(seconds=evidence)
    with Database(url, create=False) as database:
        done = retention.prune(database, keep=timedelta(seconds=keep), evidence_keep=settled, dry_run=dry_run)
        if shrink and not dry_run:
            retention.shrink(database)
    if as_json:
        counts = {"runs": done.runs, "observations": done.observations, "ranges": done.ranges}
        print_json({**counts, "incidents": done.incidents, "dry_run": dry_run})
        return
    would = "would be " if dry_run else ""
    text = f"{done.observations} observations and {done.ranges} ranges of the ledger of {done.runs} runs {would}removed"
    more = f"; what {done.incidents} settled incidents were decided from likewise" if done.incidents else ""
    console().print(styled(text + more))
