"""`bitwitness fleet admit`: run by a node before a job starts there, so that a device that was taken out does not come back unseen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.fleet.identity import Sighting, read_condemned, returned_at_admission, slices_of, words_of
from bitwitness.fleet.signals.record import Signal
from bitwitness.runfiles import utc_now
from bitwitness.topology import node_name


@click.command()
@click.option(
    "--condemned",
    "file",
    type=GIVEN_PATH,
    required=True,
    help="condemned.json, where the controller publishes it (fleet watch --publish).",
)
@click.option("--node", default="", help="Name of this node. Default: as the cluster says.")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="ID",
    help="A device of this node; repeat. Default: what the driver says.",
)
@click.option("--strict", is_flag=True, help="Refuse as well where the devices of this node cannot be told.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def admit(file: Path, node: str, devices: tuple[str, ...], strict: bool, as_json: bool) -> None:
    """Say whether this node may take jobs: exit code 0, or 1 where it carries a device that was taken out.

    A node whose devices cannot be told is admitted with a warning, unless --strict: a missing driver must not drain a cluster.
    A file that does not exist is an error (2), and so is one that is damaged.
    """
    here = node or node_name(os.environ)
    condemned = read_condemned(file)
    sightings = list(_sightings(here, devices))
    found = returned_at_admission(condemned, sightings)
    unknown = not sightings and bool(condemned)
    refused = bool(found) or (strict and unknown)
    if as_json:
        print_json(
            {
                "node": here,
                "admitted": not refused,
                "devices": [one.device for one in sightings],
                "returned": [one.text for one in found],
            }
        )
    else:
        screen = console(stderr=True)
        for one in found:
            screen.print(styled(one.text, "bold red"), soft_wrap=True)
        if unknown:
            text = "the devices of this node cannot be told (no driver answered), so nobody knows whether one of them was taken out"
            screen.print(styled(f"{here}: {text}", "yellow"), soft_wrap=True)
        screen.print(styled(f"{here}: {'refused' if refused else 'admitted'}"), soft_wrap=True)
    if refused:
        raise SystemExit(1)


def _sightings(node: str, devices: Iterable[str]) -> Iterable[Sighting]:
    """What is in this node: as given, else as the driver says."""
    now = utc_now()
    given = [Sighting(device, "", node, now, "named on the command line") for device in devices]
    if given:
        return given
    told = [one for one in _of_driver() if one.device]
    return [
        Sighting(one.device, _serial(one), node, now, "the driver of this node", slices_of(one.evidence))
        for one in told
    ]


def _of_driver() -> list[Signal]:
    from bitwitness.fleet.signals import nvml

    return [one for one in nvml.read() if one.code == "identity:pci"]


def _serial(one: Signal) -> str:
    return words_of(one.evidence).get("serial", "")
