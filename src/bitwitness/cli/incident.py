"""`bitwitness incident`: read what a guard has found. No torch: the box it is read on may have none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bitwitness.cli.output import console, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH, open_run
from bitwitness.errors import RunFilesError
from bitwitness.runfiles import read_actions, read_incident
from bitwitness.runfiles.drills import Struck
from bitwitness.runfiles.faults import injected_into, judgement
from bitwitness.runfiles.judging import JUDGEMENTS, note_judgement, said
from bitwitness.runfiles.quarantine import who_asks


@click.group()
def incident() -> None:
    """Read incidents: what was found, who is named, what to do next."""


@incident.command()
@click.argument("directory", type=GIVEN_PATH, metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(directory: Path, as_json: bool) -> None:
    """Show an incident: what disagreed with what, why this rank or why nobody, what was done about it, what to do next.

    DIR is the directory of an incident, its incident.json, or the directory of a run, of which the newest is shown.
    """
    from bitwitness.cli.advice import next_steps, saved_micro_batches
    from bitwitness.cli.incident_view import show as show_incident

    others: list[Path] = []
    if not _is_incident(directory):
        others = _incidents_of(directory)
        if not others:
            raise RunFilesError(f"{directory} has no incidents: nothing was found in this run")
        directory = others[0]
    found = read_incident(directory)
    actions = read_actions(found.path)
    was = judgement(found, actions, injected_into(found.path.absolute().parent.parent))
    screen = console()
    try:  # all of it before any of it is printed: what is damaged shows only when it is used
        with screen.capture() as page:
            show_incident(found, screen, actions, was)
        steps = [step.to_json() for step in next_steps(found)]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFilesError(f"{found.path / 'incident.json'} is damaged: {error!r}") from error
    if as_json:
        files = [str(file) for file in saved_micro_batches(found)]
        about = {"path": str(found.path), "files": files, "incidents_of_run": [str(path) for path in others]}
        print_json({**found.record, **about, "judgement": was, "actions": actions, "next_steps": steps})
        return
    if len(others) > 1:
        _print_list(_entries(others))
        screen.print(f"\nThe newest of these {len(others)}:\n")
    click.echo(page.get(), nl=False)


@incident.command(name="list")
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(directory: Path, as_json: bool) -> None:
    """List the incidents of a run, newest first."""
    entries = _entries(_incidents_of(directory))
    if as_json:
        print_json({"run_dir": str(directory), "incidents": entries})
    elif entries:
        _print_list(entries)
    else:
        console().print(styled(f"{directory}: no incidents"))


@incident.command()
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.argument("name", metavar="ID")
@click.option(
    "--as", "word", type=click.Choice(JUDGEMENTS), required=True, help="What it was, as somebody has found out."
)
@click.option("--why", required=True, metavar="TEXT", help="How that is known; it is kept with it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def judge(directory: Path, name: str, word: str, why: str, as_json: bool) -> None:
    """Say what an incident was: `confirmed` by a test or a repair, a `false-alarm`, or a `drill`.

    It is noted beside the incident with your name, changes nothing of what was found, and touches no node. The last word counts.
    """
    done = note_judgement(open_run(directory, "an incident (no incident.json)"), name, said(word), why, who_asks())
    if as_json:
        print_json({"run_dir": str(directory), "incident": name, **done.to_json()})
    else:
        console().print(styled(done.text, "green" if done.new else "yellow"), soft_wrap=True)


def _is_incident(directory: Path) -> bool:
    return directory.name == "incident.json" or (directory / "incident.json").exists()


def _incidents_of(directory: Path) -> list[Path]:
    """The incidents of a run, newest first.

    Raises:
        RunFilesError: this is no directory of a run; says what it is, or where runs are.
    """
    return open_run(directory, "an incident (no incident.json)").incidents()[::-1]


def _entries(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Lines of the list, for incidents of one run."""
    faults = injected_into(paths[0].absolute().parent.parent) if paths else []
    return [_entry(path, faults) for path in paths]


def _entry(path: Path, faults: Sequence[Struck]) -> dict[str, Any]:
    """One line of the list; an incident that cannot be read is listed with the reason."""
    try:
        found = read_incident(path)
    except RunFilesError as error:
        return {"path": str(path), "id": path.name, "error": str(error)}
    verdict = found.verdict
    return {
        "path": str(path),
        "id": path.name,
        "time": found.record.get("time"),
        "step": verdict.step,
        "status": verdict.status,
        "kind": verdict.kind,
        "persistence": verdict.persistence,
        "check": verdict.check,
        "ranks": list(verdict.ranks),
        "nodes": list(verdict.nodes),
        "judgement": judgement(found, read_actions(path), faults),
    }


def _print_list(entries: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("incident", "step", "status", "kind", "persistence", "named"):
        table.add_column(column, header_style="dim", overflow="fold")
    for entry in entries:
        if "error" in entry:
            table.add_row(styled(entry["id"]), "", styled("damaged", "yellow"), "", "", styled(entry["error"]))
            continue
        ranks, nodes = (", ".join(map(str, entry[key][:8])) for key in ("ranks", "nodes"))
        named = f"rank {ranks} (node {nodes})" if ranks else "nobody"
        status = ", ".join(filter(None, (entry["status"], entry["judgement"])))
        row = [entry["id"], entry["step"], status, entry["kind"], entry["persistence"]]
        table.add_row(*(styled(cell) for cell in (*row, named)))
    print_list(table, console())
