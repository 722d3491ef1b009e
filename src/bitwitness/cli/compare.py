"""`bitwitness compare`: how a device that is under suspicion is wrong, beside healthy ones that do the same work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bitwitness.cli.options import FiniteRange, seconds_up_to
from bitwitness.cli.output import console, print_json
from bitwitness.cli.runs import NAMED_PATH
from bitwitness.compare.records import MODES, Mode
from bitwitness.errors import MissingExtra, RunFilesError

_DAY = 86_400.0


def _pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise click.BadParameter(f"{text!r:.60} is no NAME=VALUE", ctx, param)
        if name in found:
            raise click.BadParameter(f"{name} is given twice", ctx, param)
        found[name] = value
    return found


def _modes(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> tuple[Mode, ...]:
    return tuple(mode for mode in MODES if mode in values) or MODES


@click.group(invoke_without_command=True)
@click.option(
    "--workload", default="gpt", show_default=True, metavar="NAME", help="gpt, digits, module:function or FILE.py:f."
)
@click.option("--set", "pairs", multiple=True, callback=_pairs, metavar="K=V", help="Option of the workload.")
@click.option("--suspect", metavar="DEVICE", help="E.g. cuda:0; under torchrun: its node.")
@click.option("--suspect-rank", type=click.IntRange(0), help="Under torchrun: the rank under suspicion.")
@click.option("--reference", "references", multiple=True, metavar="DEVICE", help="A healthy one. Default: two others.")
@click.option(
    "--devices", type=click.IntRange(3, 64), help="Try it without GPUs: so many stand-ins, the first suspect."
)
@click.option("--cpu", is_flag=True, help="Under torchrun: compare processors where there is no GPU.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), callback=_modes, help="Default: all three.")
@click.option("--module", "globs", multiple=True, metavar="GLOB", help="Submodules to compare. Default: the innermost.")
@click.option("--steps", type=click.IntRange(1, 10_000_000), help="In each mode. Default: 200.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 2), default=0, show_default=True, help="Of order of data.")
@click.option("--every", type=click.IntRange(1), default=1, show_default=True, help="Steps between looks at drift.")
@click.option("--control/--no-control", default=True, show_default=True, help="A reseeded healthy one in the free run.")
@click.option("--simulate", "faults", multiple=True, metavar="FAULT", help="Play it on the suspect. Repeatable.")
@click.option(
    "--confidence",
    type=FiniteRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Of intervals and bounds.",
)
@click.option("--bundle", type=NAMED_PATH, metavar="FOLDER", help="Make evidence for the vendor there.")
@click.option("--study", is_flag=True, help="Instead: repeat the published study on invented nodes.")
@click.option("--out", type=NAMED_PATH, metavar="DIR", help="New or empty. Default: comparisons/TIME-ID.")
@click.option(
    "--timeout",
    default="10m",
    show_default=True,
    metavar="TIME",
    callback=seconds_up_to(_DAY, "a day"),
    help="Under torchrun: for which one rank waits for another.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; all else goes to stderr.")
@click.pass_context
def compare(ctx: click.Context, /, **options: Any) -> None:
    """Compare a suspect device with healthy ones of its kind, bit for bit, on the same training steps.

    Three modes: lock-step makes everything equal again after each submodule, so that errors do not spread; parameters does so after
    each step; free never. The report in DIR says how often, how far and in which bits the suspect is wrong, or which rate is ruled
    out. At least two references are needed.

    On one machine: bitwitness compare --suspect cuda:3. On several: torchrun ... -m bitwitness compare --suspect NODE --out DIR on
    each, DIR on shared storage. Without GPUs, to see how it works: bitwitness compare --devices 3 --steps 20 --simulate
    "op:addmm @ every=1 : rate=1e-3 -> bit=20 ; permanent"

    Exit code: 0 nothing seen, 1 the suspect differs, 3 not characterised, 2 nothing was started; 130 and 143 interrupted.
    """
    if ctx.invoked_subcommand is not None:
        return
    _need_torch("bitwitness compare")
    if options["study"]:
        from bitwitness.cli.compare_study import study

        ctx.exit(study(ctx, options))
    from bitwitness.cli.compare_start import start

    ctx.exit(start(options, os.environ))


@compare.command()
@click.argument("directory", type=NAMED_PATH, metavar="DIR")
@click.option("--suspect", metavar="NAME", help="Of several, as in the comparisons of a study.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(directory: Path, suspect: str | None, as_json: bool) -> None:
    """Show the report of the comparison in DIR, or what its files say so far. Needs no torch.

    Of a study (--study) it shows the tables; each of its comparisons has a directory in it.
    """
    from bitwitness.cli.compare_show import echo_study, is_study, record_of
    from bitwitness.cli.compare_view import show as show_record

    if is_study(directory):
        echo_study(directory, as_json=as_json)
        return
    record = record_of(directory, suspect)
    if as_json:
        print_json(record)
        return
    screen = console()
    try:  # all of it before any of it is printed: what is damaged shows only when it is used
        with screen.capture() as page:
            show_record(record, screen)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFilesError(f"{directory}: its files are damaged: {error!r}") from error
    click.echo(page.get(), nl=False)


def _need_torch(command: str) -> None:
    missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{command} computes and needs {missing[0]}: pip install 'bitwitness[train]'")
