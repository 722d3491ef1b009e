"""`bitwitness demo`: see it happen. A real training job on processes of this machine, hit on purpose, caught, and recovered."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from pathlib import Path

import click

from bitwitness.cli.output import console, print_json
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.errors import ConfigurationError, MissingExtra, RunFilesError

_FAULTS = ("matmul", "gradient", "nan", "weight", "moment", "none")


@click.command()
@click.option(
    "--fault",
    type=click.Choice(_FAULTS),
    default="matmul",
    show_default=True,
    help="What goes wrong on one rank: a product in a matrix multiplication, its gradient, a NaN in it, a weight or an "
    "optimizer moment in memory, or nothing.",
)
@click.option("--transient", is_flag=True, help="The fault strikes once. Default: each time from its step on.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Draws rank and step too."
)
@click.option("--steps", type=click.IntRange(6, 10_000), default=24, show_default=True, help="Steps of each training.")
@click.option("--nodes", type=click.IntRange(2, 16), default=4, show_default=True, help="Nodes that are played.")
@click.option("--ranks-per-node", type=click.IntRange(1, 8), default=2, show_default=True, help="Processes on each.")
@click.option(
    "--run-dir",
    type=GIVEN_PATH,
    help="New or empty directory for the report and all files. Default: runs/demo-TIME.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
@click.pass_context
def demo(
    ctx: click.Context,
    fault: str,
    transient: bool,
    seed: int,
    steps: int,
    nodes: int,
    ranks_per_node: int,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Train a small GPT on CPU processes, corrupt one of them, watch it being caught and the job recover.

    The same training runs three times from the same seed: guarded, with nothing wrong; unguarded, with the fault; and
    guarded, with the fault, under `bitwitness run` with a spare node. The text is the source of Python's standard
    library. Everything is checked at every step (Policy.every_step()), so that the fault is caught in the step in which
    it strikes. A report for a browser is left in the run directory: report.html.

    Exit code 0 if all went as it should: the right rank named, its device in quarantine if the fault lasts, the job
    finished with the very weights of the run that was never hit; or, with two nodes, nobody named. 1 if not.
    """
    for module in ("torch", "numpy", "jinja2"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"bitwitness demo needs {module}: pip install 'bitwitness[train]'")
    from bitwitness.cli.demo_summary import summarise
    from bitwitness.cli.demo_view import Live
    from bitwitness.examples import demo as example
    from bitwitness.examples.plan import FAULTS, Settings

    settings = Settings(
        fault=next(known for known in FAULTS if known == fault),
        transient=transient,
        seed=seed,
        steps=steps,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
    )
    directory = _prepare(run_dir)
    screen = console(stderr=as_json)
    with Live(settings, screen) as live:
        report = example.run(settings, directory, live.event)
    if as_json:
        print_json(report.to_json())
    else:
        summarise(report, screen)
    ctx.exit(1 if report.problems else 0)


def _prepare(run_dir: Path | None) -> Path:
    """The directory, made and empty.

    Raises:
        ConfigurationError, RunFilesError: it cannot be made, or something is in it.
    """
    try:
        if run_dir is None:
            return _fresh(Path("runs"))
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise ConfigurationError(f"{run_dir} is not empty: choose a new directory, nothing is overwritten")
    except OSError as error:
        where = run_dir if run_dir is not None else Path("runs")
        raise RunFilesError(f"{where} cannot be used as a run directory: {error.strerror or error}") from error
    return run_dir


def _fresh(parent: Path) -> Path:
    """A directory that did not exist before."""
    name = f"demo-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    for number in range(1, 100):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise
            continue
        return directory
    raise RunFilesError(f"{parent} already holds a hundred demos of this second: give --run-dir")
