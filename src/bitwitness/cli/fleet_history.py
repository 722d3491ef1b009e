"""`bitwitness fleet history`: the audit trail, to which lines are added and of which none is ever changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.state import Entry, State


@click.command()
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--node", default="", metavar="NODE", help="Only of this node.")
@click.option("--incident", default="", metavar="ID", help="Only of this incident.")
@click.option("--last", type=click.IntRange(0), default=100, show_default=True, help="Only the last so many; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def history(folder: Path, node: str, incident: str, last: int, as_json: bool) -> None:
    """Show what was found, proposed, held, called, done and cleared, by whom and when, oldest first."""
    with State(folder, create=False, write=False) as state:
        entries = state.history(node=node, incident=incident, last=last)
    if as_json:
        print_json({"state": str(folder), "entries": [one.to_json() for one in entries]})
        return
    screen = console()
    if not entries:
        of = " and ".join(
            part for part in (f"node {node}" * bool(node), f"incident {incident}" * bool(incident)) if part
        )
        screen.print(styled(f"nothing has happened{f' to {of}' if of else ''}"))
        return
    print_list(_pieces(entries) if screen.is_terminal else _lines(entries), screen)
    if last and len(entries) == last:
        screen.print(styled(f"the last {last}: --last 0 shows all", "dim"))


def _lines(entries: Sequence[Entry]) -> Table:
    """One line each and no column empty, for other programs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("time", "what", "node", "incident", "by", "text"):
        table.add_column(column)
    for one in entries:
        cells = (one.time, one.what.replace(" ", "-"), one.node, one.incident, one.who, one.text)
        table.add_row(*(styled(cell or "-") for cell in cells))
    return table


def _pieces(entries: Sequence[Entry]) -> Table:
    """The same for a terminal, where six columns leave no room for what happened."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for one in entries:
        by = "" if one.who == "controller" else f"by {one.who}"
        what = "  ".join(part for part in (one.what, one.node, one.incident, by) if part)
        table.add_row(styled(one.time, "dim"), Text("\n").join([styled(what, "bold"), styled(one.text)]))
    return table
