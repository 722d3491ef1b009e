"""`bitwitness fleet check`: a person has the cluster check the health of a node that is out of service."""

from __future__ import annotations

from pathlib import Path

import click

from bitwitness.cli.fleet_approve import show_preview
from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.checking import preview_check, start_check
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.state import State
from bitwitness.fleet.watched import cluster_as_watched, timeout_as_watched
from bitwitness.runfiles.quarantine import who_asks


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--why", required=True, metavar="TEXT", help="What it is for; it is logged.")
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--dry-run", is_flag=True, help="Print the exact calls and what they need, and touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(node: str, why: str, folder: Path, dry_run: bool, as_json: bool) -> None:
    """Start a health check of NODE, which bitwitness has taken out of service, where the cluster has one (SageMaker HyperPod).

    A check that passes rules out no silent corruption, and returns no node: `fleet clear` does. It is asked for once: a second time
    within 30 minutes says who has asked.
    """
    valid_node(node)
    with State(folder.absolute(), create=False, write=not dry_run) as state:
        cluster = cluster_as_watched(state)
        if dry_run:
            found = preview_check(cluster, node)
            if as_json:
                print_json({"dry_run": True, **found.to_json()})
            else:
                show_preview(found)
            return
        done = start_check(state, cluster, node, why, who_asks(), limit=timeout_as_watched(state))
    if as_json:
        print_json(done.to_json())
        return
    for call in done.calls:
        console().print(styled(f"{'called' if done.new else 'called before'}: {call}"), soft_wrap=True)
    console().print(styled(done.text, "green" if done.new else "yellow"), soft_wrap=True)
