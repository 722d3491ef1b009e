"""`bitwitness fleet rehearse`: what would fail, told on an afternoon."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.clusters.base import ActKind, Check
from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.rehearsing import Part, Result
from bitwitness.fleet.rehearsing_walk import Asked
from bitwitness.fleet.rehearsing_walk import rehearse as walk

_STYLES = {"good": "green", "bad": "bold red", "unknown": "yellow"}


@click.command()
@click.option("--policy", "policy_file", type=GIVEN_PATH, required=True, metavar="FILE", help="Of the controller.")
@click.option(
    "--node", default="", metavar="NODE", help="With which. Default: one that is in service and not protected."
)
@click.option("--run", type=GIVEN_PATH, metavar="RUN_DIR", help="Look up the names of its nodes.")
@click.option("--job", default="", metavar="SCHEDULER:ID", help="See whether this job would go on without the node.")
@click.option(
    "--act", "acts", type=click.Choice(["drain", "reboot", "replace"]), multiple=True, help="Default: all that may be."
)
@click.option("--tell", is_flag=True, help="Send everybody in the policy a message that says REHEARSAL.")
@click.option("--state", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--publish", type=GIVEN_PATH, metavar="DIR", help="As for watch. Default: as the controller has it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rehearse(
    policy_file: Path,
    node: str,
    run: Path | None,
    job: str,
    acts: tuple[str, ...],
    tell: bool,
    state: Path,
    publish: Path | None,
    as_json: bool,
) -> None:
    """Carry an invented incident through signals, decision and adapter on the real cluster, and change nothing.

    Run it as the user and on the host of the controller. It says what would fail and what to do about that; what could not be
    tried is called unknown. It ends with 0 where nothing would fail, with 1 where something would, and with 2 where what was
    asked for makes no sense.
    """
    logging.basicConfig(level=logging.ERROR)
    policy = FleetPolicy.load(policy_file)
    runs = [run] if run is not None else []
    kinds = cast("tuple[ActKind, ...]", acts)
    asked = Asked(policy, lambda: cluster_of(policy, runs), state, node, run, job, kinds, tell, publish)
    found = walk(asked)
    if as_json:
        print_json({"policy": str(policy_file), **found.to_json()})
    else:
        _show(found, console())
    raise SystemExit(found.code)


def _show(found: Result, screen: Console) -> None:
    for part in found.parts:
        screen.print(styled(part.name, "bold"))
        print_list(_pieces(part) if screen.is_terminal else _lines(part), screen)
        for call in part.calls:
            screen.print(styled(f"  would call: {call}"), soft_wrap=True)
    screen.print()
    style = "bold red" if found.code else "green"
    screen.print(styled(f"{found.summary}; nothing was changed", style), soft_wrap=True)


def _lines(part: Part) -> Table:
    """One line each, for other programs and for files."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for one in part.checks:
        table.add_row(styled(f"  {one.outcome}"), styled(one.what), styled(_text(one)))
    return table


def _pieces(part: Part) -> Table:
    """The same for a terminal: what to do stands below what was found."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for one in part.checks:
        lines = [styled(one.text), *([styled(f"-> {one.remedy}", "bold")] if one.remedy else [])]
        table.add_row(styled(f"  {one.outcome}", _STYLES[one.outcome]), styled(one.what), Text("\n").join(lines))
    return table


def _text(one: Check) -> str:
    return f"{one.text} -> {one.remedy}" if one.remedy else one.text
