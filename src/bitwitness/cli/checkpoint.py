"""`bitwitness checkpoint`: which checkpoints there are, what their labels say, and whether their bytes are still those that
were saved. No torch: the box on which a person asks at night may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from bitwitness.cli.output import console, plain, print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH, is_run, open_run
from bitwitness.errors import CheckpointError, RunFilesError
from bitwitness.runfiles import (
    Incident,
    Label,
    RunFiles,
    checkpoint_step,
    distrust,
    label_path,
    labelled,
    read_incident,
    read_label,
    verify_files,
)

_FOLDER = "checkpoints"


@click.group()
def checkpoint() -> None:
    """Look at checkpoints: what was verified, and whether they are whole."""


@dataclass(slots=True)
class _Found:
    """A checkpoint as far as it is known: `problems` says why it is not whole, `refused` why an incident forbids it."""

    path: Path
    label: Label | None = None
    problems: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def usable(self) -> bool:
        return not self.problems and not self.refused

    def to_json(self) -> dict[str, Any]:
        label = self.label
        about: dict[str, Any] = {"path": str(self.path), "problems": self.problems, "refused": self.refused}
        if label is None:
            return about
        return about | {
            "step": label.step,
            "saved": label.saved,
            "world_size": label.world_size,
            "files": len(label.files),
            "bytes": _size(label),
            "passed": dict(label.passed),
            "failed": dict(label.failed),
            "incidents": list(label.incidents),
            "read_back": label.read_back,
            "supervision": label.supervision,
        }


@checkpoint.command(name="list")
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_(directory: Path, as_json: bool) -> None:
    """List the checkpoints of a run, newest first, by their labels.

    What is in the files is not read: `bitwitness checkpoint verify` does that.
    """
    found, unread = _of_run(open_run(directory))
    if as_json:
        entries = [one.to_json() for one in found]
        print_json({"run_dir": str(directory), "checkpoints": entries, "incidents_unread": unread})
    elif found:
        _print_list(found)
        _print_unread(unread)
    else:
        console().print(styled(f"{directory}: no checkpoints"))


@checkpoint.command()
@click.argument("paths", type=GIVEN_PATH, metavar="PATH_OR_RUN_DIR...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(context: click.Context, paths: Sequence[Path], as_json: bool) -> None:
    """Compare every file of a checkpoint with its label: size and SHA-256.

    A PATH is a checkpoint with a label: a folder with label.json in it, a file with NAME.label.json beside it, or that
    label. A RUN_DIR stands for all checkpoints of the run; which of them resume() would take is said then, and why not
    a newer one.

    Exit codes: 0 everything that was asked for is whole, 1 something is damaged, 2 there is nothing to verify by.
    """
    asked = [_asked(path) for path in paths]  # all of them before the first byte is read, which may take an hour
    damaged = False
    reports = []
    with _progress(as_json) as show:
        for directory, found, unread in asked:
            for one in found:
                if one.label is not None:
                    show(str(one.path))
                    one.problems += verify_files(one.path, one.label)
            damaged |= bool(unread) or any(one.problems for one in found)
            reports.append(_report(directory, found, unread))
    if as_json:
        print_json({"whole": not damaged, "asked": reports})
    else:
        for report, (_, found, unread) in zip(reports, asked, strict=True):
            _print_verified(report, found, unread)
    context.exit(1 if damaged else 0)


# What was asked for --------------------------------------------------------------------------------------------------

_Asked = tuple[Path | None, list[_Found], list[str]]
"""The directory of the run, unless a single checkpoint was asked for; what was found; incidents that cannot be read."""


def _asked(path: Path) -> _Asked:
    """What an argument stands for, nothing but the labels read.

    Raises:
        RunFilesError: nothing that could be verified.
    """
    checkpoint = labelled(path)
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint} does not exist: give a checkpoint or the directory of a run")
    if not label_path(checkpoint).exists() and checkpoint_step(checkpoint) is None:
        run = checkpoint.parent if checkpoint.name == _FOLDER and is_run(checkpoint.parent) else checkpoint
        if run.is_dir() and is_run(run):
            return (run, *_of_run(open_run(run)))
        if checkpoint.is_dir():
            open_run(checkpoint, "a checkpoint (no label.json)")  # says what is wrong
        raise CheckpointError(
            f"{checkpoint} has no label ({label_path(checkpoint).name}): there is nothing to verify it by"
        )
    owner = checkpoint.absolute().parent.parent
    if checkpoint.absolute().parent.name != _FOLDER or not is_run(owner):
        return None, [_look(checkpoint, [])], []
    incidents, unread = _incidents(RunFiles(owner))
    return None, [_look(checkpoint, incidents, checkpoint_step(checkpoint))], unread


def _of_run(files: RunFiles) -> tuple[list[_Found], list[str]]:
    incidents, unread = _incidents(files)
    return [_look(path, incidents, checkpoint_step(path)) for path in files.checkpoints.list()], unread


def _incidents(files: RunFiles) -> tuple[list[Incident], list[str]]:
    read, unread = [], []
    for path in files.incidents():
        try:
            read.append(read_incident(path))
        except RunFilesError as error:
            unread.append(str(error))
    return read, unread


def _look(path: Path, incidents: Sequence[Incident], step: int | None = None) -> _Found:
    try:
        label = read_label(path)
    except CheckpointError as error:
        return _Found(path, problems=[str(error)])
    found = _Found(path, label, refused=distrust(label, incidents))
    if step is not None and step != label.step:
        found.problems.append(f"its label is that of step {label.step}: it was renamed, or the label is of another")
    return found


# What is said --------------------------------------------------------------------------------------------------------


def _report(directory: Path | None, found: Sequence[_Found], unread: Sequence[str]) -> dict[str, Any]:
    checkpoints = [one.to_json() | {"whole": not one.problems} for one in found]
    if directory is None:
        return {"checkpoints": checkpoints, "incidents_unread": list(unread)}
    chosen = next((str(one.path) for one in found if one.usable), None) if not unread else None
    about = {"run_dir": str(directory), "resumes_from": chosen}
    return about | {"checkpoints": checkpoints, "incidents_unread": list(unread)}


def _print_verified(report: dict[str, Any], found: Sequence[_Found], unread: Sequence[str]) -> None:
    screen = console()
    for one in found:
        # Not wrapped: a path must survive being copied, and a line being searched for.
        screen.print(styled(f"{one.path}: {_state(one)}", "bold red" if one.problems else "green"), soft_wrap=True)
        for problem in (*one.problems, *([f"not to be resumed from: {one.refused}"] if one.refused else [])):
            screen.print(styled(f"  {problem}"), soft_wrap=True)
    _print_unread(unread)
    if "run_dir" not in report:
        return
    if unread:
        screen.print("Which one resume() would take cannot be told while there are incidents that cannot be read.")
    elif not found:
        screen.print(styled(f"{report['run_dir']}: no checkpoints; resume() would begin at step 0"))
    elif report["resumes_from"] is None:
        screen.print(styled("resume() would refuse all of them, and start nothing.", "bold red"))
    else:
        screen.print(styled(f"resume() would take {Path(report['resumes_from']).name}{_passed_over(report, found)}."))


def _state(one: _Found) -> str:
    if one.problems or one.label is None:
        return "damaged"
    count = len(one.label.files)
    return f"whole, {count} file{'s' * (count != 1)}, {_human(_size(one.label))}"


def _passed_over(report: dict[str, Any], found: Sequence[_Found]) -> str:
    newer = list(takewhile(lambda one: str(one.path) != report["resumes_from"], found))
    return f", not the newer {', '.join(f'{one.path.name} ({_why_not(one)})' for one in newer)}" if newer else ""


def _why_not(one: _Found) -> str:
    if one.problems:
        return "damaged"
    return "not a verified one" if one.label is not None and one.label.failed else "forbidden by an incident"


def _print_unread(unread: Sequence[str]) -> None:
    for error in unread:
        console().print(styled(f"An incident cannot be read, so what it forbids is not known: {error}", "yellow"))


def _print_list(found: Sequence[_Found]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("checkpoint", "saved", "size", "passed up to step", ""):
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=column in ("checkpoint", "size"))
    for one in found:
        if one.label is None:
            table.add_row(styled(one.path.name), "", "", styled("damaged", "yellow"), styled(one.problems[0]))
            continue
        passed = ", ".join(f"{check} {step}" for check, step in sorted(one.label.passed.items())) or "nothing"
        about = "; ".join([*one.problems, *([one.refused] if one.refused else [])])
        row = (one.path.name, one.label.saved, _human(_size(one.label)), passed, about)
        table.add_row(*(styled(cell, "yellow" if about else "") for cell in row))
    print_list(table, console())


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Say on a terminal which checkpoint is being read."""
    errors = console(stderr=True)
    if quiet or not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status("") as status:
        yield lambda name: status.update(styled(f"reading {plain(name)}"))


def _size(label: Label) -> int:
    return sum(one.bytes for one in label.files.values())


def _human(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
