"""`bitwitness campaign`: inject the faults of a file into real training, and show which check caught what.

The command can be killed at any moment and given again: results are kept one by one, and it goes on with what is missing.
What trains is started by `bitwitness.faults.runner`, in processes of its own.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from bitwitness.cli.output import console, plain, print_json, print_list, styled, this_command
from bitwitness.errors import BitwitnessError, ConfigurationError, MissingExtra, RunFilesError

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table as Screen

    from bitwitness.faults.campaign import Campaign
    from bitwitness.faults.cells import CellResult, CellSpec
    from bitwitness.faults.database import Results
    from bitwitness.faults.table import Table

_FAILED_ENDS = ("guard_failure", "refused", "crash", "hang")
_SHOWN = 8


@click.command()
@click.argument("file_or_name", required=False, metavar="FILE_OR_NAME")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the results and the report; default: campaigns/NAME.",
)
@click.option("--jobs", "-j", type=click.IntRange(1, 4096), help="Runs at a time; default: as many as the cores carry.")
@click.option("--dry-run", is_flag=True, help="Check the campaign and say what would be run.")
@click.option(
    "--retry", is_flag=True, help="Run those again that crashed, hung, were refused or in which the guard failed."
)
@click.option("--list", "as_list", is_flag=True, help="List the campaigns that ship.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def campaign(
    context: click.Context,
    file_or_name: str | None,
    out: Path | None,
    jobs: int | None,
    dry_run: bool,
    retry: bool,
    as_list: bool,
    as_json: bool,
) -> None:
    """Inject faults into training jobs and report which check caught them, how late, and who was named.

    FILE_OR_NAME is a campaign file (YAML), or the name of a campaign that ships; --list shows these. Results are kept one by
    one: the same command goes on where it was killed. The report is written to report.html, table.csv and table.json.

    Exit codes: 0 everything promised was seen; 1 a covered fault was missed or caught late, a wrong rank was named, a
    fault-free run alarmed, or a run could not be made or kept; 2 the campaign is wrong or cannot begin, and nothing was run.
    """
    for module, needed in (("yaml", "PyYAML"), ("jinja2", "Jinja2")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"bitwitness campaign needs {needed}: pip install 'bitwitness[campaign]'")
    if as_list:
        _list(as_json)
        return
    if file_or_name is None:
        raise click.UsageError(f"which campaign? A file, or a name from: {this_command()} campaign --list")
    from bitwitness.faults.campaign import load

    asked = load(file_or_name)
    cells = asked.cells()
    if dry_run:
        _survey(asked, cells)
        _describe(asked, cells, as_json)
        return
    folder = Path("campaigns") / asked.name if out is None else out
    table = _run(asked, cells, folder, jobs, retry, as_json)
    with _under_way(folder):
        if as_json:
            print_json(table.to_json() | {"report": str(folder / "report.html")})
        else:
            _print(table, folder)
    if table.summary.problems():
        context.exit(1)


def _list(as_json: bool) -> None:
    from bitwitness.faults.campaign import load, shipped

    found = [(name, load(path)) for name, path in shipped().items()]
    if as_json:
        names = [{"name": name, "runs": len(one.cells()), "description": one.description} for name, one in found]
        print_json({"campaigns": names})
        return
    screen = _screen("campaign", "runs", "what it is")
    for name, one in found:
        screen.add_row(styled(name), str(len(one.cells())), styled(one.description))
    console().print(screen if found else "no campaigns ship with this version")


def _describe(asked: Campaign, cells: Sequence[CellSpec], as_json: bool) -> None:
    """What would be run, and what is promised of it."""
    from bitwitness.faults import grammar
    from bitwitness.faults.coverage import covers

    roles = Counter(cell.role for cell in cells)
    promised = [
        {
            **cell.to_json(),
            "coverage": covers([grammar.parse(line) for line in cell.faults], cell.options, cell.policy).to_json(),
        }
        for cell in cells
        if cell.role == "fault"
    ]
    if as_json:
        print_json({"campaign": asked.name, "runs": len(cells), "roles": dict(roles), "faults": promised})
        return
    screen = _screen("fault", "job", "seed", "promised")
    for one in promised:
        coverage = one["coverage"]
        chance = "" if coverage["certain"] or not coverage["covered"] else f" ({100 * coverage['probability']:.1f} %)"
        words = f"{coverage['check']}{chance}" if coverage["covered"] else f"not covered: {coverage['words']}"
        screen.add_row(styled(" & ".join(one["faults"])), styled(one["job"]), str(one["seed"]), styled(words))
    print_list(screen, console())
    told = ", ".join(f"{count} {role}" for role, count in roles.items())
    console().print(styled(f"{asked.name}: {len(cells)} runs ({told}); nothing was run"))


def _survey(asked: Campaign, cells: Sequence[CellSpec]) -> None:
    """Refuse faults that are impossible in their jobs, before the first of them is run: only the models know shapes and names.

    Raises:
        ConfigurationError: some are, or a job cannot be made.
    """
    if importlib.util.find_spec("torch") is None:
        return  # a dry run on a machine that cannot train either
    from bitwitness.faults import survey
    from bitwitness.faults.job import search_path

    path, places = search_path(asked.folder), asked.places()
    jobs: dict[str, list[CellSpec]] = {}
    for cell in cells:
        jobs.setdefault(cell.job, []).append(cell)
    found: list[str] = []
    with console(stderr=True).status("looking at the jobs"):
        for name, runs in jobs.items():
            try:
                wrong = survey.ask(runs, path)
            except ConfigurationError as error:
                raise ConfigurationError(f"{asked.place_of(name, str(error))}: job {name}: {error}") from error
            told = [f"{places[key]}: job {name}: {problem}" for key, problem in wrong.items()]
            found += dict.fromkeys(told)
    if found:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise ConfigurationError(
            "\n".join([f"{len(found)} faults are impossible; nothing was run", *found[:_SHOWN], *more])
        )


# Running -------------------------------------------------------------------------------------------------------------


def _run(
    asked: Campaign, cells: Sequence[CellSpec], folder: Path, jobs: int | None, retry: bool, as_json: bool
) -> Table:
    """Make the runs that are missing, and the report; also where it is interrupted, of what there is."""
    from bitwitness.faults import report, table
    from bitwitness.faults.database import Results

    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("bitwitness campaign trains models: pip install 'bitwitness[train,campaign]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made: {error.strerror or error}") from error
    with Results(folder / "results.sqlite") as results, _alone(folder):
        results.begin(asked.name, cells, asked.folder)
        # What failed keeps its result until there is another.
        failed = {spec.key for spec, result in results.all() if result.end in _FAILED_ENDS} if retry else set()
        kept = results.done() - failed
        missing = [cell for cell in cells if cell.key not in kept]
        if missing:
            _survey(asked, missing)
        with _under_way(folder):
            try:
                _make(asked, missing, len(cells), folder, results, jobs, as_json)
            finally:
                # A label may have been changed in the file since: what counts is what it says now.
                now = {cell.key: cell for cell in cells}
                given = [(now.get(spec.key, spec), result) for spec, result in results.all()]
                made = table.build(given, asked.classify, len(cells))
                report.write(folder, asked, made, given)
    return made


@contextmanager
def _under_way(folder: Path) -> Iterator[None]:
    """Whatever fails from here on, something was run: the exit code must not say otherwise."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (BitwitnessError, OSError) as error:
        if isinstance(error, BitwitnessError) and error.exit_code != ConfigurationError.exit_code:
            raise
        named = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BitwitnessError(
            f"{named}{said}\nThe results until then are in {folder}: the same command goes on with what is missing"
        ) from error


def _make(
    asked: Campaign,
    missing: Sequence[CellSpec],
    planned: int,
    folder: Path,
    results: Results,
    jobs: int | None,
    as_json: bool,
) -> None:
    from bitwitness.faults import runner
    from bitwitness.faults.job import search_path

    if not missing:
        return
    caught: Counter[str] = Counter()
    with _progress(as_json) as progress:
        before = planned - len(missing)
        task = progress.add_task(plain(asked.name), total=planned, completed=before, now="")

        def on_result(spec: CellSpec, result: CellResult) -> None:
            results.put(spec, result)
            caught[result.end] += 1

        def on_progress(seen: _Seen) -> None:
            names = ", ".join(dict.fromkeys(plain(cell.label or cell.role) for cell in seen.running))
            ends = ", ".join(f"{count} {end}" for end, count in sorted(caught.items()))
            progress.update(task, completed=before + seen.done, now=f"{ends}  {_left(seen.remaining)}  {names[:40]}")

        runner.run(
            missing,
            parallel=jobs,
            deadline=asked.deadline,
            on_result=on_result,
            on_progress=on_progress,
            weights=folder / "weights",
            path=search_path(asked.folder),
        )


class _Seen(Protocol):
    """What a runner tells of its progress."""

    @property
    def done(self) -> int: ...

    @property
    def running(self) -> tuple[CellSpec, ...]: ...

    @property
    def remaining(self) -> float | None: ...


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "ETA unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"ETA {hours}:{minutes:02d}:{rest:02d}"


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    """On stderr, so that what is printed can be piped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=errors, transient=True, disable=as_json and not errors.is_terminal) as progress:
        yield progress


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two commands on one folder would make every run twice."""
    import fcntl

    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFilesError(f"{folder}: another bitwitness campaign is at work here") from error
        yield


# Showing -------------------------------------------------------------------------------------------------------------


def _print(table: Table, folder: Path) -> None:
    from bitwitness.faults.table import PROBLEMS

    screen = console()
    summary = table.summary
    if table.matrix:
        columns = table.columns
        grid = _screen("fault", *columns)
        for label, row in table.matrix.items():
            grid.add_row(styled(label), *(str(row.get(name, "")) for name in columns))
        print_list(grid, screen)
    for chance in table.chances:
        screen.print(
            styled(
                f"{chance.job}, {chance.policy}: predicted {100 * chance.predicted:.1f} %, measured {chance.measured}, "
                f"{chance.nonfinite} of them as NaN or Inf"
            )
        )
    for shares in table.shares:
        told = "; ".join(f"{name} {share}" for name, share in shares.shares.items())
        screen.print(styled(f"{shares.job}, {shares.label}: {told}"))
    for one in table.norms:
        screen.print(
            styled(
                f"{one.job}: gradient norms stray up to {one.calm:.1f} median absolute deviations in {one.calm_steps} fault-free "
                f"steps, {one.middle:.1f} (at most {one.highest:.1f}) in the steps of {one.faults} finite faults, {one.above} above all"
            )
        )
    screen.print(
        styled(
            f"{summary.runs} of {summary.planned} runs: {summary.caught} caught, {summary.masked} masked, "
            f"{len(summary.unattributed)} with nobody named, {len(summary.not_landed)} not landed; "
            f"{table.controls} controls with {table.control_steps} steps, {len(summary.false_alarms)} false alarms"
        )
    )
    for why, count in Counter(one["why"] for one in summary.not_covered).items():
        screen.print(styled(f"not covered ({count}): {why}"))
    for problem in summary.problems():
        screen.print(styled(f"PROBLEM: {problem}", "bold red"))
    for remark in summary.remarks():
        screen.print(styled(f"note: {remark}", "yellow"))
    named: dict[str, list[Any]] = summary.to_json()
    for name in PROBLEMS:
        for fault in named[name][:_SHOWN]:
            screen.print(styled(f"  {name}: {fault}"))
        if len(named[name]) > _SHOWN:
            screen.print(styled(f"  {name}: and {len(named[name]) - _SHOWN} more, see the report"))
    screen.print(styled(f"Report: {folder / 'report.html'}"))


def _screen(title: str, *columns: str) -> Screen:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
