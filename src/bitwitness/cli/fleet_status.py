"""`bitwitness fleet status`: what somebody who is woken at three must see, and nothing to be scrolled past."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.kept import Kept
from bitwitness.fleet.state import State
from bitwitness.fleet.view import Report, report, shown

_SHOWN = 30
_LIVES = {"running": "green", "silent": "bold red", "stopped": "bold yellow", "never": "yellow"}
_URGENT = {status: rank for rank, status in enumerate(("unclear", "failed", "expired", "held", "acting"))}
_STYLES = {
    "done": "green",
    "already out": "green",
    "held": "yellow",
    "acting": "yellow",
    "failed": "red",
    "unclear": "bold red",
    "expired": "red",
}


@click.command()
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(folder: Path, as_json: bool) -> None:
    """Say whether the controller is alive, what it may still do, where every node stands, and what to do now."""
    folder = folder.absolute()
    with State(folder, create=False, write=False) as state:
        found = report(state)
    if as_json:
        print_json({"state": str(folder), **found.to_json()})
    else:
        _show(found, console(), folder)


def _show(found: Report, screen: Console, folder: Path) -> None:
    screen.print(styled(f"{found.life.upper()}: {found.text}", _LIVES[found.life]), soft_wrap=True)
    mode = found.about.get("mode", "observe")
    budget = found.budget
    screen.print(styled(f"mode      {mode}{': no node is touched' if mode == 'observe' else ''}"))
    until = f"; the next at {budget['free_at']}" if budget["free_at"] else ""
    limit = f"{budget['left']} of {budget['limit']} nodes may be touched within this hour{until}"
    screen.print(styled(f"budget    {limit}"), soft_wrap=True)
    screen.print(styled(f"share     {budget['cluster_share']:.0%} of all nodes may be out of service"))
    counted = ", ".join(f"{count} {status}" for status, count in found.incidents.items()) or "none"
    screen.print(styled(f"incidents {counted}"))
    if found.todo:
        screen.print("\nWhat to do now", style="bold")
        for number, text in enumerate(found.todo, 1):
            screen.print(styled(f"  {number}. {text}"), soft_wrap=True)
        if found.more:
            where = shlex.quote(str(folder))
            text = f"  and {found.more} more, less urgent or older: bitwitness fleet history --state {where} --last 0"
            screen.print(styled(text, "yellow"), soft_wrap=True)
    elif found.life == "running":
        screen.print()
        screen.print(styled("Nothing is to be done by you now.", "green"))
    # One row a node, except what nobody is named in: the last that happened there.
    nodes = {one.proposal.node: one for one in found.proposals if one.proposal.node}
    if nodes:
        screen.print("\nNodes", style="bold")
        rows = sorted(nodes.values(), key=lambda one: one.updated, reverse=True)
        rows = sorted(rows, key=lambda one: _URGENT.get(one.status, len(_URGENT)))[:_SHOWN]
        print_list(_pieces(rows) if screen.is_terminal else _lines(rows), screen)
        if len(nodes) > _SHOWN:
            where = shlex.quote(str(folder))
            text = f"  and {len(nodes) - _SHOWN} more: bitwitness fleet status --json --state {where}"
            screen.print(styled(text), soft_wrap=True)
    for row in found.requeues:
        screen.print(
            styled(f"job {row.job} is to be started again (incident {row.incident}): {shown(row.why)}"), soft_wrap=True
        )
    if found.messages["waiting"]:
        screen.print(styled(f"{found.messages['waiting']} messages wait to be delivered"))
    screen.print(
        styled(f"More: bitwitness fleet history --state {shlex.quote(str(folder))} [--node NODE]", "dim"),
        soft_wrap=True,
    )


def _lines(rows: list[Kept]) -> Table:
    """One line each and no column empty, for other programs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("node", "proposed", "sure", "stands", "hold", "since", "incident", "why"):
        table.add_column(column)
    for one in rows:
        what, status = one.proposal, one.status.replace(" ", "-")
        cells = (what.node, what.action, what.confidence, status, one.hold, one.updated, what.incident, _why(one))
        table.add_row(*(styled(cell or "-") for cell in cells))
    return table


def _pieces(rows: list[Kept]) -> Table:
    """The same for a terminal, where eight columns leave no room for the reason."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for one in rows:
        what = one.proposal
        stands = f"{one.status} ({one.hold})" if one.status == "held" and one.hold else one.status
        proposed = f"proposed: {what.action}, {what.confidence} confidence, because of incident {what.incident}"
        head = styled(f"{stands} since {one.updated}", f"bold {_STYLES.get(one.status, '')}".strip())
        table.add_row(styled(what.node, "bold"), Text("\n").join([head, styled(proposed), styled(_why(one))]))
    return table


def _why(one: Kept) -> str:
    return shown(one.why or one.proposal.reason)
