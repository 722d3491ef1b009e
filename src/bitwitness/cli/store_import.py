"""`bitwitness store import`: runs and the fleet into the database, once or again and again."""

from __future__ import annotations

import time
from pathlib import Path

import click

from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, plain, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.cli.store import database_option
from bitwitness.errors import ConfigurationError, StoreError
from bitwitness.store.database import Database
from bitwitness.store.importing import Imported, Importer, Progress

_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a database that took nothing is tried again; each time twice as long."""
_read_every = seconds_up_to(86_400, "a day")


def _every(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    return None if value is None else _read_every(ctx, param, value)


@click.command("import")
@click.argument("runs", nargs=-1, metavar="[RUN_DIR]...", type=GIVEN_PATH)
@click.option("--parent", "parents", multiple=True, type=GIVEN_PATH, metavar="DIR", help="All runs below this folder.")
@click.option("--fleet", "fleets", multiple=True, type=GIVEN_PATH, metavar="STATE", help="Of `bitwitness fleet watch`.")
@click.option(
    "--every", callback=_every, metavar="TIME", help="Go on until interrupted, with this between two rounds, e.g. 5s."
)
@database_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a round.")
def import_(
    runs: tuple[Path, ...],
    parents: tuple[Path, ...],
    fleets: tuple[Path, ...],
    every: float | None,
    url: str,
    as_json: bool,
) -> None:
    """Import what is new in runs and in the fleet's states. Safe beside jobs that write, and at any number of times.

    What cannot be read is counted and left out, and `bitwitness store status` tells it. With --every, a database that is away is waited
    for.
    """
    if not (runs or parents or fleets):
        raise ConfigurationError("nothing to import: give a RUN_DIR, --parent DIR or --fleet STATE")
    for path in (*runs, *parents, *fleets):
        if not path.is_dir():
            raise ConfigurationError(f"{path} is no directory")
    with Database(url) as database:
        importer = Importer(database, runs, parents=parents, fleets=fleets)
        pause = every
        while True:
            try:
                _print(importer.round(None if as_json else _Shown()), as_json)
                pause = every
            except StoreError as error:
                if every is None or pause is None:
                    raise
                pause = min(max(2 * pause, _SHORTEST_PAUSE), max(_LONGEST_PAUSE, every))
                _tell(error, pause, as_json)
            if pause is None:
                return
            time.sleep(pause)


class _Shown:
    """Shows on a terminal how far a round has come."""

    def __init__(self) -> None:
        self._screen = console(stderr=True)
        self._next = time.monotonic() + 2.0

    def __call__(self, progress: Progress) -> None:
        if self._screen.is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + 2.0
            self._screen.print(styled(progress, "dim"))


def _tell(error: StoreError, pause: float, as_json: bool) -> None:
    """The database takes nothing now; what was not written is read again."""
    if as_json:
        print_json({"error": str(error), "retry_seconds": pause})
    else:
        console(stderr=True).print(styled(plain(f"{error}. Tried again in {pause:.0f} s")))


def _print(done: Imported, as_json: bool) -> None:
    if as_json:
        record = {"runs": len(done.runs), "records": done.records, "problems": done.problems, "fleet": done.fleet}
        print_json(record)
        return
    fleet = ", and the fleet has changed" if done.fleet else ""
    wrong = f"; {done.problems} files could not be read, wholly or in part" if done.problems else ""
    console().print(styled(plain(f"{done.records} records of {len(done.runs)} runs that changed{fleet}{wrong}")))
