"""`bitwitness fault`: faults on purpose, one at a time: what can be written, what has landed, and the same again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from bitwitness.cli.output import console, plain, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.errors import ConfigurationError, MissingExtra
from bitwitness.runfiles.supervision import SupervisionFiles

if TYPE_CHECKING:
    from bitwitness.faults.record import Site, Strike

DATABASE = "results.sqlite"

_SHOWN = 20

_CORRUPTION = (160, 3)
"""What a command ends with that has found what it was hit by."""


@click.group()
def fault() -> None:
    """Faults on purpose: their grammar, the published models, and what has landed.

    A job is hit by BITWITNESS_FAULT='rank=1 fwd_out:head @ step=8 : n=1 -> bit=20' bitwitness run ... train.py
    """


@fault.command()
@click.argument("faults", metavar="FAULT...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(faults: Sequence[str], as_json: bool) -> None:
    """Read faults as an injector would, and print them with everything that was left open.

    An error points at the column. Whether a job has such a module is seen when it starts.
    """
    from bitwitness.faults.grammar import parse_all

    parsed = [one for text in faults for one in parse_all(text)]
    if as_json:
        print_json({"faults": [str(one) for one in parsed]})
        return
    for one in parsed:
        console().print(styled(one), soft_wrap=True)


@fault.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def presets(as_json: bool) -> None:
    """List the published fault models that a fault may name in place of what it selects and does."""
    from bitwitness.faults.presets import describe

    rows = describe()
    if as_json:
        print_json({"presets": [{"name": row.name, "fault": row.line, "source": row.source} for row in rows]})
        return
    table = Table("preset", "what it stands for", "source", box=None)
    for row in rows:
        table.add_row(styled(row.name, "bold"), styled(row.line), styled(row.source))
    print_list(table, console())


@fault.command()
@click.argument("record", type=GIVEN_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the packed bits included.")
def show(record: Path, as_json: bool) -> None:
    """Show what has landed, by RECORD: a file that an injector has written, or the folder RUN_DIR/faults."""
    _require_torch()
    from bitwitness.faults.record import read

    strikes = read(record, of_one_run=False)
    if as_json:
        print_json({"record": str(record), "strikes": [one.to_json() for one in strikes]})
        return
    table = Table("step", "rank", "node", "work", "site", "elements", "first", "before", "after", box=None)
    for one in strikes[:_SHOWN]:
        site, example = one.site, one.example
        where = f"{site.target} {site.name}" if site.name != site.target else site.target
        numbers = (example["index"], example["before"], example["after"])
        table.add_row(*map(styled, (site.step, site.rank, one.node or "-", site.work, where, one.count, *numbers)))
    screen = console()
    for spec in dict.fromkeys(one.spec for one in strikes):
        screen.print(styled(spec, "bold"), soft_wrap=True)
    print_list(table, screen)
    if len(strikes) > _SHOWN:
        screen.print(f"... and {len(strikes) - _SHOWN} more: --json has all")


@fault.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; what the command prints goes to stderr.")
@click.argument("record", type=GIVEN_PATH)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def replay(ctx: click.Context, as_json: bool, record: Path, command: tuple[str, ...]) -> None:
    """Have the strikes of RECORD again, bit for bit, in the job that COMMAND runs.

    COMMAND is the one that the job was run by, with a new run directory: fault replay old/faults bitwitness run --run-dir
    new ... RECORD may be the folder of a campaign instead, and in place of COMMAND stands the key of one of its runs, or the
    beginning of it.

    Exit code 0: the very same bits were changed, at the same moments, and no others. 1: not, or COMMAND has failed with a code
    that is not of corruption (160, 3) and not that of the recorded run, as it then says.
    """
    _require_torch()
    of_campaign = (record / DATABASE).is_file()
    found = _replay_cell(record, command) if of_campaign else _replay_command(record, command, as_json)
    if as_json:
        print_json(found)
    else:
        style = "bold green" if found["reproduced"] else "bold red"
        console().print(styled(found["words"], style), soft_wrap=True)
    ctx.exit(0 if found["reproduced"] else 1)


def _replay_command(record: Path, command: Sequence[str], quiet: bool) -> dict[str, Any]:
    """Run a command with the record in its environment, and compare what it records."""
    from bitwitness.faults.record import landed, read

    before = read(record)
    if not command:
        raise ConfigurationError(
            f"say what to run: bitwitness fault replay {record} bitwitness run --run-dir NEW ... SCRIPT"
        )
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "BITWITNESS_FAULT": f"@{record.absolute()}",
            "BITWITNESS_FAULT_RECORD": folder,
        }
        try:
            code = subprocess.run(command, env=environment, check=False, stdout=2 if quiet else None).returncode
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be run: {error.strerror or error}") from error
        after = landed(Path(folder))
    then = _ended_with(record)
    found = {**_compared(before, after), "command": list(command), "exit_code": code, "recorded_exit_code": then}
    if code != (then or 0):
        found["words"] += f"; {plain(command[0])} {_how(code)}" + (f", the recorded run with {then}" if then else "")
    if code not in (0, *_CORRUPTION, then):
        found["reproduced"] = False
    return found


def _ended_with(record: Path) -> int | None:
    """The exit code of the run in whose directory a record lies; None where it is not known."""
    run_dir = record.absolute().parent if record.is_dir() else record.absolute().parent.parent
    files = SupervisionFiles(run_dir)
    session = files.read_session()
    stop = files.read_stop(session.id) if session is not None else None
    return stop.exit_code if stop is not None else None


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _replay_cell(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Make one run of a campaign again, with the recorded strikes in the place of its faults."""
    from bitwitness.faults import again

    if len(words) > 1:
        raise ConfigurationError(f"{folder} is a campaign's: give the key of one of its runs, and nothing else")
    before, after, differs = again.run(folder, words[0] if words else "")
    found = _compared(before, after)
    if found["reproduced"] and differs:
        return {
            **found,
            "reproduced": False,
            "words": f"the same bits were changed, but not with the same result: {differs}",
        }
    return found


def _compared(before: Sequence[Strike], after: Sequence[Strike]) -> dict[str, Any]:
    wanted = {one.site: one.to_json() for one in before}
    got = {one.site: one.to_json() for one in after}
    missing = [site for site in wanted if got.get(site) != wanted[site]]
    additional = [site for site in got if site not in wanted]
    words = f"{len(wanted)} strikes again, bit for bit"
    if missing:
        words = (
            f"{len(missing)} of {len(wanted)} recorded strikes were not met, the first {_at(missing[0])}: is it the same job, with "
            "the same seed, data and number of ranks?"
        )
    if additional:
        words += (
            f"{'' if missing else ', but'} {len(additional)} landed that the record does not have, the first {_at(additional[0])}: "
            "is the command hit by something else as well?"
        )
    return {
        "reproduced": not missing and not additional,
        "strikes": len(wanted),
        "missing": len(missing),
        "additional": len(additional),
        "words": words,
    }


def _at(site: Site) -> str:
    start = f" of start {site.start}" if site.start > 1 else ""
    return f"at step {site.step}{start} on rank {site.rank} ({site.target} {plain(site.name)})"


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "records of faults hold bits of tensors, and reading them needs torch: pip install 'bitwitness[train]'"
        )
