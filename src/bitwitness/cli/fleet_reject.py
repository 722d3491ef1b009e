"""`bitwitness fleet reject`: a person says no to one act of the controller, and why."""

from __future__ import annotations

from pathlib import Path

import click

from bitwitness.cli.fleet_approve import give_answer
from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.runs import GIVEN_PATH


@click.command()
@click.argument("which", metavar="KEY")
@click.option("--why", required=True, metavar="TEXT", help="What was looked at; it is logged.")
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--dry-run", is_flag=True, help="Print what is asked, and note nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def reject(which: str, why: str, folder: Path, dry_run: bool, as_json: bool) -> None:
    """Reject one act that waits for approval: it is not done, and its proposal is at its end.

    What was found counts on as a strike, and another incident that names the node is asked about anew. KEY is as for `fleet approve`.
    """
    give_answer(which, "rejected", why, folder.absolute(), dry_run=dry_run, as_json=as_json)
