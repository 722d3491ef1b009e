"""`bitwitness scan`: judge devices that run no job, by work whose right answer is the same on all that are alike."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bitwitness.cli.options import FINITE, FiniteRange
from bitwitness.cli.output import console, plain, print_json
from bitwitness.cli.runs import NAMED_PATH
from bitwitness.errors import BitwitnessError, ConfigurationError, MissingExtra, RunFilesError
from bitwitness.scan.exiting import STYLES, unusable, unusable_line
from bitwitness.scan.items import SUITES, Suite

logger = logging.getLogger(__name__)


def _suites(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Suite, ...]:
    words = [word.strip() for word in value.split(",")]
    unknown = [word for word in words if word not in SUITES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r:.40} is no suite: choose of {','.join(SUITES)}", ctx, param)
    return tuple(suite for suite in SUITES if suite in words)


@click.group(invoke_without_command=True)
@click.option(
    "--suite", "suites", callback=_suites, default=",".join(SUITES), show_default=True, help="What is computed."
)
@click.option(
    "--minutes",
    type=FiniteRange(0, 10_000, min_open=True),
    default=10.0,
    show_default=True,
    help="Time for which each device works, from when it begins.",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 1024),
    help="Try it without GPUs: so many processes of this machine stand for devices.",
)
@click.option("--cpu", is_flag=True, help="Under torchrun: judge processors where there is no GPU.")
@click.option("--ranks-per-node", type=click.IntRange(1), default=1, help="With --devices: so many share a node.")
@click.option("--out", type=NAMED_PATH, help="New or empty directory, shared by all nodes. Default: scans/TIME-ID.")
@click.option("--golden", type=NAMED_PATH, help="Signed file of answers that are known to be right.")
@click.option("--verify-key", type=NAMED_PATH, help="Public key by which it is checked.")
@click.option("--learn", type=NAMED_PATH, help="Write golden answers to this file, if nothing fails.")
@click.option("--sign-key", type=NAMED_PATH, help="Private key by which it is signed (scan key makes one).")
@click.option(
    "--confidence",
    type=FiniteRange(0.5, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Of the bounds on error rates.",
)
@click.option(
    "--exit-codes", type=click.Choice(STYLES), default="plain", show_default=True, help="For whom: see below."
)
@click.option(
    "--vendor", multiple=True, help="Run a vendor's diagnostic after it: auto, dcgm, ascend or rvs; repeatable."
)
@click.option("--vendor-level", type=click.IntRange(1, 4), default=1, show_default=True, help="How thorough it is.")
@click.option("--vendor-timeout", type=FiniteRange(0), help="Seconds for each. Default: by level.")
@click.option("--drill", "drills", multiple=True, help='A fault on purpose: "rank=5 p=0.001" or "link=3-7 p=0.1".')
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Of drills and messages. Default: drawn, and shown.")
@click.option("--ripple", type=NAMED_PATH, help="Compute slices between the steps of the running job in RUN_DIR.")
@click.option("--budget", type=FINITE, default=0.005, show_default=True, help="With --ripple: share of its time.")
@click.option("--slice-ms", type=FINITE, default=3.0, show_default=True, help="With --ripple: length of a slice.")
@click.option("--detach", is_flag=True, help="With --ripple: ask, and do not wait.")
@click.option("--stop", is_flag=True, help="With --ripple: end the slices that were asked for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; all else goes to stderr.")
@click.pass_context
def scan(ctx: click.Context, /, **options: Any) -> None:
    """Judge the devices of this machine, or of all nodes under torchrun, by work that has one right answer.

    Every device computes the same items for some time. A device whose answers differ from those that all others of its kind give
    is wrong; three of a kind are needed, or golden answers. A pass comes with the bound on the error rate that it shows, and what
    was not seen is *not judged*, never a pass.

    On one machine: bitwitness scan. On several: torchrun ... -m bitwitness scan --out DIR on each, DIR on shared storage. Without
    GPUs, to see how it works: bitwitness scan --devices 4 --minutes 0.5 --drill "rank=2 p=0.01"

    Exit code: 0 all pass; 1 somebody fails; 3 somebody is not judged, and nobody fails; 2 nothing was started; 130 and 143
    interrupted. --exit-codes has those of Nagios, node-problem-detector, Kubernetes and Slurm.
    """
    if ctx.invoked_subcommand is not None:
        return
    if options["ripple"] is not None:
        ctx.exit(_ripple(options))
    if options["detach"] or options["stop"]:
        raise ConfigurationError("--detach and --stop are about slices beside a running job: give --ripple RUN_DIR too")
    style = options["exit_codes"]
    try:
        _need_torch("bitwitness scan")
        from bitwitness.cli.scan_start import start

        code = start(options, os.environ)
    except BitwitnessError as error:
        if style in ("nagios", "npd"):  # they show what is on standard output
            click.echo(unusable_line(style, plain(error)))
        failure = click.ClickException(plain(error))
        failure.exit_code = unusable(style)  # type: ignore[misc]  # never that of a failure
        raise failure from error
    ctx.exit(code)


def _ripple(options: dict[str, Any]) -> int:
    """Slices beside a running job, instead of a scan of its own."""
    from bitwitness.cli.scan_ripple import ripple
    from bitwitness.scan import exiting, golden
    from bitwitness.scan.drill import parse

    known = None if options["golden"] is None else golden.load(options["golden"], options["verify_key"])
    return ripple(
        options["ripple"],
        options["budget"],
        options["slice_ms"],
        options["minutes"],
        detach=options["detach"],
        stop=options["stop"],
        golden=known,
        confidence=options["confidence"],
        drills=tuple(parse(text) for text in options["drills"]),
        seed=options["seed"],
        as_json=options["as_json"],
        code=lambda judgement: exiting.code(judgement, options["exit_codes"]),
    )


@scan.command()
@click.argument("evidence", type=NAMED_PATH)
@click.option("--calls", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="Computations.")
@click.option("--device", "name", default="", help="E.g. cuda:3 or cpu. Default: the first GPU, else the processor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def replay(ctx: click.Context, evidence: Path, calls: int, name: str, as_json: bool) -> None:
    """Compute the item of EVIDENCE (a file of DIR/evidence/) again on this device.

    Exit code: 0 it gives the expected answer, so the suspect was wrong; 1 it gives the suspect's; 3 nothing can be concluded,
    e.g. on a device of another kind; 2 the file is none.
    """
    _need_torch("bitwitness scan replay")
    from bitwitness.cli.scan_show import show_replay
    from bitwitness.scan.devices import this_device
    from bitwitness.scan.evidence import read
    from bitwitness.scan.replaying import CODES, here
    from bitwitness.scan.replaying import replay as compute
    from bitwitness.topology import node_name

    found = read(evidence)
    try:
        device = here(name, found.played)
        who = this_device(0, device, node_name(os.environ))
        seen = compute(evidence, found, who, device, calls)
        shown = {"evidence": str(evidence), "item": found.item.id, "drill": found.drill, **seen.to_json()}
    except Exception as error:
        if isinstance(error, BitwitnessError) and error.exit_code == 2:
            raise
        # whatever a device or a damaged file ends in: 1 would say that somebody is wrong
        logger.debug("the replay of %s ended in an error", evidence, exc_info=True)
        why = plain(f"{type(error).__name__}: {error}")[:500]
        failure = click.ClickException(
            f"nothing can be concluded: computing {plain(found.item.id)} ended in an error here ({why})"
        )
        failure.exit_code = CODES["cannot conclude"]  # type: ignore[misc]
        raise failure from error
    if as_json:
        print_json(shown)
    else:
        show_replay(found, seen, console())
    ctx.exit(CODES[seen.outcome])


@scan.command()
@click.argument("directory", type=NAMED_PATH, metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(directory: Path, as_json: bool) -> None:
    """Show the result of the scan in DIR, or how it stands if it has none. Needs no torch.

    DIR may be the directory of a run as well: then it is about the newest slices beside that job (--ripple).
    """
    if (directory / "ripple" / "request.json").is_file():
        from bitwitness.cli.scan_ripple import show_slices

        show_slices(directory, as_json)
        return
    from bitwitness.cli.scan_show import record_of
    from bitwitness.cli.scan_view import show as show_result

    record = record_of(directory)
    if as_json:
        print_json(record)
        return
    screen = console()
    try:  # all of it before any of it is printed: what is damaged shows only when it is used
        with screen.capture() as page:
            show_result(record, directory, screen)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFilesError(f"{directory / 'result.json'} is damaged: {error!r}") from error
    click.echo(page.get(), nl=False)


@scan.command()
@click.argument("file", type=NAMED_PATH)
def key(file: Path) -> None:
    """Make a pair of keys: FILE signs golden answers and is secret, FILE.pub verifies them and belongs on every node."""
    from bitwitness.scan.golden import make_key

    public = make_key(file)
    click.echo(f"{file}: signs golden answers (--sign-key); keep it where nobody else reads it")
    click.echo(f"{public}: verifies them (--verify-key); copy it to every node")


def _need_torch(command: str) -> None:
    missing: Sequence[str] = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"{command} computes and needs {missing[0]}: pip install 'bitwitness[scan]'")
