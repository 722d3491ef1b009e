"""`bitwitness find-bad`: which nodes of a set make a test fail, found by testing groups of them.

It needs nothing of bitwitness on the nodes, nor torch here: the test is the user's command, or `bitwitness scan` started by one.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, print_json, styled
from bitwitness.errors import ClusterError, ConfigurationError, RunFilesError
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.clusters.slurm_names import expand
from bitwitness.scan.groups.designs import DESIGNS
from bitwitness.scan.groups.planning import Planner, Settings
from bitwitness.scan.groups.running import check_program, check_template
from bitwitness.scan.groups.searching import Searching, suspects
from bitwitness.scan.groups.state import State, default_path

NOT_CONCLUDED = 3

_MOST = 10_000
_WEEK = 7 * 86_400.0
_LEAST_RATE = 1e-5
_SUITES = re.compile(r"(train|ops|comm|mix)(,(train|ops|comm|mix))*")


def read_nodes(given: str) -> list[str]:
    """The names in `a,b,n[01-16]`, or in the file of `@FILE`, one or a list a line, with # before what is no name.

    Raises:
        ConfigurationError: there are fewer than two, one is named twice, or something is no name.
    """
    text = given
    if given.startswith("@"):
        try:
            lines = Path(given[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise ConfigurationError(f"--nodes {given}: the file cannot be read: {error}") from None
        text = ",".join(line for line in (line.partition("#")[0].strip() for line in lines) if line)
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        try:
            names += expand(part.strip())
        except ClusterError as error:
            raise ConfigurationError(f"--nodes: {error}") from None
    for name in names:
        valid_node(name)
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigurationError(f"--nodes: named twice: {', '.join(twice[:5])}")
    if len(names) < 2:
        raise ConfigurationError("--nodes: at least two are needed: one is only bad beside another that passes")
    if len(names) > _MOST:
        raise ConfigurationError(f"--nodes: at most {_MOST:,} nodes, not {len(names):,}")
    return names


def template(test: str | None, suite: str | None, launch: str | None, minutes: float) -> list[str]:
    """The words of the command to run for a group: the user's, or our scan behind what starts it on nodes.

    Raises:
        ConfigurationError: both or neither are given, or one is no command.
    """
    if (test is None) == (suite is None):
        raise ConfigurationError("give either --test 'CMD {nodes}' or --suite with --launch 'srun -w {nodes} ...'")
    if test is not None:
        if launch is not None:
            raise ConfigurationError("--launch goes with --suite: --test is a whole command")
        return check_template(test)
    if suite is None or not _SUITES.fullmatch(suite):
        raise ConfigurationError(f"--suite {suite}: give train, ops, comm or mix, or several with commas between them")
    if launch is None:
        raise ConfigurationError("--suite needs --launch: what starts it on nodes, e.g. 'srun -w {nodes} -N {count}'")
    return check_template(f"{launch} bitwitness scan --suite {shlex.quote(suite)} --minutes {minutes:g}")


def settings_of(size: int, given: dict[str, Any]) -> Settings:
    """What is asked for, checked.

    Raises:
        ConfigurationError: a number is out of range.
    """
    limits = (
        ("max_bad", 1, size),
        ("min_group", 1, size - 1),
        ("parallel", 1, size),
        ("max_tests", 1, 10**9),
    )
    for name, least, most in limits:
        value = given[name]
        if value is not None and not least <= value <= most:
            raise ConfigurationError(f"--{name.replace('_', '-')} {value}: must be from {least} to {most}")
    if not 0.5 < given["confidence"] <= 1 - 1e-9:
        raise ConfigurationError(f"--confidence {given['confidence']}: must be above 0.5 and below 1")
    if given["rate"] is not None and not _LEAST_RATE <= given["rate"] <= 1:
        raise ConfigurationError(f"--rate {given['rate']}: must be from {_LEAST_RATE} to 1")
    return Settings(size=size, **given)


@click.command("find-bad")
@click.option("--nodes", required=True, metavar="LIST", help="a,b,n[01-16], or @FILE with one or a list a line.")
@click.option("--test", metavar="CMD", help="Run for a group; ends with 0: passed, 1: failed, else: not judged.")
@click.option("--suite", metavar="SUITES", help="Instead of --test: bitwitness scan with these suites.")
@click.option("--launch", metavar="CMD", help="With --suite: what starts it on a group.")
@click.option("--minutes", type=float, default=2.0, show_default=True, help="With --suite: of each scan.")
@click.option(
    "--max-bad", type=int, metavar="K", help="Stop once so many are found. Default: until nothing else fails."
)
@click.option("--confidence", type=float, default=0.99, show_default=True, help="Of every accusation, and of the rest.")
@click.option("--rate", type=float, metavar="Q", help="Lowest rate to find, e.g. 0.01: shows in one test of a hundred.")
@click.option("--parallel", type=int, metavar="N", help="Tests at a time, at most. Default: as many as are worth it.")
@click.option("--design", type=click.Choice(DESIGNS), default="halving", show_default=True, help="Which groups first.")
@click.option("--min-group", type=int, default=1, show_default=True, help="Fewest nodes that can be tested.")
@click.option("--max-tests", type=int, metavar="N", help="Give up after so many.")
@click.option(
    "--timeout",
    default="1h",
    show_default=True,
    metavar="TIME",
    callback=seconds_up_to(_WEEK, "7 days"),
    help="Of one test, which is not judged after it.",
)
@click.option("--state", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the search is kept.")
@click.option("--trust-test", is_flag=True, help="A healthy group never fails: one failure alone is enough.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in which nodes are grouped.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def find_bad(
    nodes: str,
    test: str | None,
    suite: str | None,
    launch: str | None,
    minutes: float,
    timeout: float,
    path: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the nodes of a set, and the links between them, because of which a test fails.

    In CMD, {nodes} stands for a group (a,b,c), {count} for how many they are, {nodefile} for a file with one a line, {first} for one of
    them. No shell runs it. A search that was killed goes on where it was when it is called again.

    Exit codes: 0 it came to a conclusion, 3 it did not, 2 the command was wrong.
    """
    names = read_nodes(nodes)
    words = template(test, suite, launch, minutes)
    settings = settings_of(len(names), given)
    check_program(words)
    arguments = {"nodes": names, "test": words, **given}
    with State((path or default_path(arguments)).absolute(), arguments) as state:
        searching = Searching(names, words, Planner(settings), state, timeout)
        if sys.stderr.isatty():
            with console(stderr=True).status("") as status:
                searching.heard = lambda now: status.update(styled(progress(now)))
                searching.run()
        else:
            searching.run()
        result = searching.result()
        result["state"] = str(state.finish(result))
        if as_json:
            print_json(result)
        else:
            show(result)
        try:
            state.put_away()  # after it has been said: killed in between, the same command says it again
        except RunFilesError as error:
            click.echo(f"bitwitness: {error}; the state stays {state.path}", err=True)
    sys.exit(0 if result["finished"] else NOT_CONCLUDED)


def progress(searching: Searching) -> str:
    """What a search is at, in a line."""
    planner = searching.planner
    found = f", {len(planner.found)} found" if planner.found else ""
    trial = f", {len(planner.on_trial)} on trial" if planner.on_trial else ""
    return f"round {searching.rounds + 1}, {planner.tests} tests, {suspects(planner)} nodes suspected{found}{trial}"


def show(result: dict[str, Any]) -> None:
    """Print what was found for people."""
    screen = console()

    def line(text: str, style: str = "") -> None:
        screen.print(styled(text, style), soft_wrap=True)

    if result["hardly_judged"]:
        line(f"{result['why']}.", "yellow")
    for node in result["bad"]:
        line(f"bad: {node}, which fails in {result['rates'][node]:.2g} of the tests", "red")
    for one, two in result["pairs"]:
        line(f"bad link: {one} - {two}: each passes without the other", "red")
    if not result["bad"] and not result["pairs"]:
        line("nobody is shown to be bad", "green" if result["finished"] else "yellow")
    for group in result["candidates"]:
        line(f"not resolved: {', '.join(group[:16])}{' ...' if len(group) > 16 else ''}", "yellow")
    for node in result["not_judged"]:
        line(f"not judged: {node}: no test with it ended with 0 or 1", "yellow")
    for why, count in result["tests_not_judged"].items():
        line(f"tests not judged: {count} ({why})", "yellow")
    if not result["hardly_judged"]:
        line(f"{'Finished' if result['finished'] else 'Not finished'}: {result['why']}.")
    if result["finished"] and result["rate"] is not None:
        line(f"Any other that fails in {result['rate']:.2g} of its tests or more would have shown.")
    line(
        f"{result['tests']} tests in {result['rounds']} rounds, confidence {result['confidence']:g};"
        f" any search needs about {result['bound']['tests']:.0f} (docs/find-bad.md). State: {result['state']}"
    )
