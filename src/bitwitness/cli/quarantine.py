"""`bitwitness quarantine`: who must not join, and taking somebody out again, which is always a person's decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bitwitness.cli.output import console, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH, open_run
from bitwitness.runfiles import Denial, Quarantine, Strike

_SHOWN = 10


@click.group()
def quarantine() -> None:
    """Devices and nodes that must not join a run, and their strikes."""


@quarantine.command(name="list")
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(directory: Path, as_json: bool) -> None:
    """Show who is in quarantine, since when and why, the strikes of every device, and the last changes."""
    held = open_run(directory).quarantine.read()
    if as_json:
        print_json({"run_dir": str(directory), **held.to_json()})
    else:
        _show(held, console(), directory)


@quarantine.command()
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.argument("names", metavar="DEVICE_OR_NODE...", nargs=-1, required=True)
@click.option("--reason", required=True, metavar="TEXT", help="Why; it is logged.")
@click.option(
    "--node", "nodes", is_flag=True, help="The names are nodes. Default: what is known of them, else devices."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def add(directory: Path, names: Sequence[str], reason: str, nodes: bool, as_json: bool) -> None:
    """Let devices and nodes join no more, by hand.

    A device is named as incidents name it, e.g. by the UUID of a GPU. A name that the quarantine knows as a node's is
    one. Who denied whom, and why, is logged in the file itself; one that is denied already keeps its first reason.
    """
    _check(names, reason, "say what they are suspected of")
    file = open_run(directory).quarantine
    known = _nodes(file.read())
    old = len(file.read().log)
    for name in dict.fromkeys(names):
        if nodes or name in known:
            file.deny_node(name, reason=reason)
        else:
            file.deny_devices([name], node="", reason=reason)
    held = file.read()
    entries = [entry for entry in held.log[old:] if entry["what"].startswith("deny") and entry["name"] in names]
    if as_json:
        print_json({"run_dir": str(directory), "added": entries, "denied": _denied(held)})
        return
    screen = console()
    for entry in entries:
        kind = entry["what"].removeprefix("deny ")
        screen.print(styled(f"denied {kind} {entry['name']}, logged as {entry['who']}"), soft_wrap=True)
    for name in dict.fromkeys(names):
        if name not in {entry["name"] for entry in entries}:
            screen.print(styled(f"{name} was in quarantine already", "yellow"), soft_wrap=True)


@quarantine.command()
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.argument("names", metavar="DEVICE_OR_NODE...", nargs=-1)
@click.option("--reason", required=True, metavar="TEXT", help="What was repaired or found out; it is logged.")
@click.option("--all", "everything", is_flag=True, help="Clear every device and node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clear(directory: Path, names: Sequence[str], reason: str, everything: bool, as_json: bool) -> None:
    """Let devices and nodes join again, and forget their strikes.

    Who cleared whom, and why, is logged in the file itself. A node is not cleared with its devices, nor they with it:
    a device that computes wrongly does so in any node.
    """
    if bool(names) == everything:
        raise click.UsageError("name the devices and nodes to clear, or give --all")
    _check(names, reason, "say what was repaired or found out")
    file = open_run(directory).quarantine
    entries = file.clear(None if everything else names, reason=reason)
    remaining = file.read()
    if as_json:
        print_json({"run_dir": str(directory), "cleared": entries, "remaining": remaining.names()})
        return
    screen = console()
    for entry in entries:
        screen.print(styled(f"cleared {entry['name']} ({_what(entry['cleared'])}), logged as {entry['who']}"))
    if not entries:
        screen.print(styled(f"{directory}: nobody was in quarantine"))
    for device, denial in sorted(remaining.denied_devices.items()):
        if denial.node in {entry["name"] for entry in entries}:
            screen.print(styled(f"still in quarantine: device {device}, then on node {denial.node}", "yellow"))


def _check(names: Sequence[str], reason: str, advice: str) -> None:
    if not reason.strip():
        raise click.BadParameter(advice, param_hint="--reason")
    if not all(name.strip() for name in names):
        raise click.BadParameter("is empty: is a variable unset?", param_hint="DEVICE_OR_NODE")


def _nodes(held: Quarantine) -> set[str]:
    """The names that are known to be those of nodes."""
    of_devices = [denial.node for denial in held.denied_devices.values()]
    of_strikes = [strike.node for each in held.strikes.values() for strike in each]
    return {*held.denied_nodes, *of_devices, *of_strikes} - {""}


def _denied(held: Quarantine) -> list[str]:
    return sorted({*held.denied_nodes, *held.denied_devices})


def _what(cleared: Mapping[str, Any]) -> str:
    parts = [f"denied as a {kind}" for kind in ("node", "device") if kind in cleared]
    strikes = len(cleared.get("strikes", ()))
    return ", ".join([*parts, *([f"{strikes} strike{'s' * (strikes > 1)}"] if strikes else [])])


def _show(held: Quarantine, screen: Console, directory: Path) -> None:
    denied = [("node", *one) for one in sorted(held.denied_nodes.items())]
    denied += [("device", *one) for one in sorted(held.denied_devices.items())]
    if denied:
        screen.print("In quarantine", style="bold")
        print_list(_denials(denied), screen)
    else:
        screen.print(styled(f"{directory}: nobody is in quarantine"))
    if held.strikes:
        screen.print("\nStrikes", style="bold")
        print_list(_strikes(held.strikes), screen)
    if held.log:
        screen.print("\nLast changes", style="bold")
        print_list(_changes(held.log[: -_SHOWN - 1 : -1]), screen)


def _denials(denied: Sequence[tuple[str, str, Denial]]) -> Table:
    table = _table("", "name", "since", "node", "reason", "incident")
    for kind, name, one in denied:
        row = (kind, name, one.since, one.node if kind == "device" else "", one.reason, one.incident)
        table.add_row(*(styled(cell) for cell in row))
    return table


def _strikes(strikes: Mapping[str, Sequence[Strike]]) -> Table:
    table = _table("device", "strikes", "last", "node", "persistence", "incident")
    for device, each in sorted(strikes.items()):
        for one in each[-1:]:
            row = (device, len(each), one.time, one.node, one.persistence, one.incident)
            table.add_row(*(styled(cell) for cell in row))
    return table


def _changes(log: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("time", "what", "name", "by", "reason")
    for entry in log:
        table.add_row(*(styled(entry.get(key, "")) for key in ("time", "what", "name", "who", "reason")))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
