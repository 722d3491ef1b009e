"""`bitwitness run`: a training job under torchrun that goes on without the node that corrupted it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import click

from bitwitness.cli.output import console, print_json
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.durations import seconds_of
from bitwitness.errors import ConfigurationError, MissingExtra


class _Seconds(click.ParamType[float]):
    """A time: a number of seconds, or of minutes, hours or days with `m`, `h` or `d` behind it."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds of what the user wrote."""
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


_TIME = _Seconds()


def _not_empty(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is not None and not value.strip():
        raise click.BadParameter("is empty: is a variable unset?", ctx, param)
    return value or ""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes that train together.")
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, show_default=True, help="Processes on each.")
@click.option("--run-dir", type=GIVEN_PATH, required=True, help="The guard's run_dir, on shared storage.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--local", is_flag=True, help="Play all nodes on this machine, whatever a scheduler has set.")
@click.option(
    "--spares", type=click.IntRange(0), default=0, show_default=True, help="Nodes to play beside; implies --local."
)
@click.option(
    "--node-rank", type=click.IntRange(0), help="Of this machine in a cluster. Default: as the scheduler says."
)
@click.option("--address", callback=_not_empty, help="By which other nodes reach this one. Default: found out.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="After other failures.")
@click.option(
    "--max-recoveries", type=click.IntRange(0), default=3, show_default=True, help="Restarts after corruption."
)
@click.option(
    "--when-short",
    type=click.Choice(["stop", "wait"]),
    default="stop",
    show_default=True,
    help="When no node is left for one that is left out.",
)
@click.option("--strikes", type=click.IntRange(1), default=3, show_default=True, help="So many deny a device ...")
@click.option("--strike-window", type=_TIME, default="7d", show_default=True, help="... within this time.")
@click.option(
    "--hang-timeout", type=_TIME, default="30m", show_default=True, help="Without progress on a node; 0: off."
)
@click.option("--grace", type=_TIME, default="30s", show_default=True, help="To save in when asked to stop.")
@click.option(
    "--lost-after", type=_TIME, default="60s", show_default=True, help="Silence that makes a node count as lost."
)
@click.option(
    "--join-timeout", type=_TIME, default="10m", show_default=True, help="To wait for nodes, or for a leader."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end; all else goes to stderr.")
@click.argument("script", callback=_not_empty)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, /, script: str, args: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run SCRIPT with ARGS under torchrun, and after corruption go on without the device that was named.

    On one machine, nodes are played by processes: bitwitness run --nodes 3 --spares 1 --run-dir DIR train.py

    On a cluster, start it once on each node (srun, an indexed Job, ssh) with the same arguments. The scheduler's variables
    or --node-rank tell the nodes apart; whoever is started beyond --nodes is a spare.

    Exit code: 0 done; 160 corruption, attributed; 3 corruption, unattributed: a person must look; 4 the guard failed; 2
    nothing was started; 124 hang; 137 a node was lost; 143 SIGTERM; 130 Ctrl-C; 1 the run directory could not be written
    any more; 1 and all else the job's own. docs/supervision.md has what follows from each.
    """
    from bitwitness.cli.run_view import conclude, printer
    from bitwitness.supervise.identity import identify, index_of
    from bitwitness.supervise.local import run_local
    from bitwitness.supervise.settings import Settings, check_script
    from bitwitness.supervise.wrapper import run_node

    given, address = options.pop("node_rank"), options.pop("address")
    index = None if options["local"] or options["spares"] else index_of(given, os.environ)
    if given is not None and index is None:
        raise ConfigurationError("--node-rank is for a cluster, --local and --spares are for one machine: give either")
    options["local"] = index is None
    options["tick"] = 0.25 if index is None else 1.0  # each look costs shared storage some reads, from every node
    settings = Settings(script=script, args=args, **{**options, "run_dir": options["run_dir"].absolute()})
    check_script(settings)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("bitwitness run starts torchrun and needs torch: pip install 'bitwitness[train]'")
    _check_faults(os.environ, settings.world_size)
    screen = console(stderr=True)
    if index is None:
        stop = run_local(settings, printer(screen), as_json)
    else:
        stop = run_node(
            settings, identify(index, settings.nproc_per_node, os.environ, address), printer(screen), as_json
        )
    conclude(stop, screen)
    if as_json:
        print_json(stop.summary or stop.to_json())
    ctx.exit(stop.exit_code)


def _check_faults(environment: Mapping[str, str], world_size: int) -> None:
    """Faults on purpose, before anything is started: a slip in them must not cost a place in the queue."""
    from bitwitness.faults.asked import FAULT, asked

    if environment.get(FAULT):
        asked(environment, world_size)
