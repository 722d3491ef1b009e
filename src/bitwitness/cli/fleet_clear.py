"""`bitwitness fleet clear`: the undo of what `fleet watch` did, by a person, with a reason that stays in the audit trail."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.errors import RunFilesError
from bitwitness.fleet.clearing import Cleared
from bitwitness.fleet.clearing import clear as return_to_service
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.clusters.settings import timeout_of
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.state import State
from bitwitness.fleet.watched import cluster_as_watched, notifiers_as_watched, policy_as_watched, runs_as_watched
from bitwitness.runfiles import Quarantine, RunFiles
from bitwitness.runfiles.quarantine import who_asks


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--why", required=True, metavar="TEXT", help="What was repaired or found out; it is logged.")
@click.option("--state", "folder", type=GIVEN_PATH, default=STATE, show_default=True, help="Of the controller.")
@click.option("--policy", "policy_file", type=GIVEN_PATH, metavar="FILE", help="Default: the controller's.")
@click.option(
    "--quarantine", is_flag=True, help="Also take the node and its devices out of the quarantines of the runs."
)
@click.option("--dry-run", is_flag=True, help="Print the exact calls, and touch nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clear(
    node: str, why: str, folder: Path, policy_file: Path | None, quarantine: bool, dry_run: bool, as_json: bool
) -> None:
    """Return NODE to service, if bitwitness took it out; its devices may come back.

    The controller forgets its strikes, closes whatever still waited for the node, and acts on nothing that was found before. The
    quarantines of runs have strikes of their own, which stay unless --quarantine. What somebody else took out is theirs to return.
    """
    valid_node(node)
    folder = folder.absolute()
    with State(folder, create=False, write=not dry_run) as state:
        policy = policy_as_watched(state) if policy_file is None else FleetPolicy.load(policy_file)
        cluster, told = cluster_as_watched(state, policy), notifiers_as_watched(state)
        runs, parents = runs_as_watched(state)
        timeout = timeout_of(policy.cluster)
        done = return_to_service(state, cluster, node, why, who_asks(), notifiers=told, dry=dry_run, timeout=timeout)
        everywhere = [*runs, *_below(parents)]
        if quarantine:
            freed, stays = _from_quarantines(node, done, why, everywhere, dry_run)
        else:
            freed, stays = [], _that_stays(node, done, everywhere)
    _show(done, freed, stays, dry_run, as_json)


def _below(parents: Sequence[Path]) -> list[Path]:
    return [path for parent in parents if parent.is_dir() for path in sorted(parent.iterdir()) if path.is_dir()]


def _from_quarantines(
    node: str, done: Cleared, why: str, runs: Sequence[Path], dry: bool
) -> tuple[list[str], list[str]]:
    """Take the node and its devices out of the quarantines of runs; which were there, and what could not be read."""
    freed, wrong = [], []
    for path in runs:
        if not path.is_dir():
            continue
        file = RunFiles(path).quarantine
        try:
            names = _names(file.read(), node, done)
            if names and not dry:
                file.clear(names, reason=why)
        except RunFilesError as error:  # the node is in service already, and the other runs can be read
            wrong.append(f"# {error}")
            continue
        freed += [f"{path}: {name}" for name in names]
    return freed, wrong


def _names(held: Quarantine, node: str, done: Cleared) -> list[str]:
    """What a quarantine holds of a node and its devices: denials and strikes."""
    own = {name for name, one in held.denied_devices.items() if one.node == node}
    struck = {name for name, each in held.strikes.items() if any(one.node == node for one in each)}
    return sorted({node, *done.devices, *own, *struck} & set(held.names()))


def _that_stays(node: str, done: Cleared, runs: Sequence[Path]) -> list[str]:
    """The commands that would clear what the quarantines of runs still hold; a run that cannot be read is no reason to fail now."""
    commands = []
    for path in runs:
        try:
            names = _names(RunFiles(path).quarantine.read(), node, done) if path.is_dir() else []
        except RunFilesError as error:
            commands.append(f"# {error}")
            continue
        if names:
            words = ("bitwitness", "quarantine", "clear", str(path), *names, "--reason", "...")
            commands.append(shlex.join(words))
    return commands


def _show(done: Cleared, freed: Sequence[str], stays: Sequence[str], dry: bool, as_json: bool) -> None:
    if as_json:
        print_json({"dry_run": dry, **done.to_json(), "quarantines": list(freed), "stays": list(stays)})
        return
    screen = console()
    for call in done.calls:
        screen.print(styled(f"{'would call' if dry else 'called'}: {call}"), soft_wrap=True)
    if dry and not done.calls:
        screen.print(styled("nothing would be called: it is in service"))
    for name in freed:
        screen.print(styled(f"{'would leave' if dry else 'left'} quarantine: {name}"), soft_wrap=True)
    if dry:
        return
    screen.print(styled(done.text, "green"))
    if done.warning:
        console(stderr=True).print(styled(done.warning, "yellow"), soft_wrap=True)
    if done.closed:
        screen.print(styled(done.closing))
    if stays:
        text = (
            "Quarantines of runs are separate, and still hold denials or strikes of it (--quarantine clears them too):"
        )
        screen.print(styled(text, "yellow"), soft_wrap=True)
    for command in stays:
        screen.print(styled(f"  {command}"), soft_wrap=True)
