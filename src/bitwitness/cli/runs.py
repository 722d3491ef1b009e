"""Directories of runs, as arguments of commands: a wrong one is told what it is, and where runs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bitwitness.cli.output import plain
from bitwitness.errors import RunFilesError
from bitwitness.runfiles import RunFiles

_PARTS = ("incidents", "checkpoints")
_FILES = ("run.json", "quarantine.json")


class _GivenPath(click.Path):
    """A path that is not empty: `--run-dir "$UNSET"` must not mean the directory where one happens to be."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if not str(value).strip():
            self.fail("is empty: is a variable unset?", param, ctx)
        return super().convert(value, param, ctx)


class _NamedPath(_GivenPath):
    """A path that can be written in one line of a result, a log or a shell: a line break in it would forge what follows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if not str(value).isprintable():
            self.fail(f"{plain(value)} has characters in it that do not print", param, ctx)
        return super().convert(value, param, ctx)


GIVEN_PATH = _GivenPath(path_type=Path)
NAMED_PATH = _NamedPath(path_type=Path)


def is_run(directory: Path) -> bool:
    """Whether this is the directory of a run, by what is in it."""
    return any((directory / name).is_dir() for name in _PARTS) or any((directory / name).is_file() for name in _FILES)


def open_run(directory: Path, also: str = "") -> RunFiles:
    """The files of a run. `also`: what else the argument could have been, e.g. `an incident (no incident.json)`.

    Raises:
        RunFilesError: it is no directory of a run, or its run.json is damaged or foreign.
    """
    kinds = f"{also.partition(' (')[0]} or of a run" if also else "a run"
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise RunFilesError(f"{directory} {what}: give the directory of {kinds}")
    if not is_run(directory):
        runs = sorted(path.parent.name for path in directory.glob("*/run.json"))
        hint = f"; runs in it: {', '.join(runs[:8])}" if runs else ""
        neither = f"neither {also} nor a run (no run.json)" if also else "no directory of a run (no run.json)"
        raise RunFilesError(f"{directory} is {neither}{hint}")
    files = RunFiles(directory)
    if (directory / "run.json").exists():
        files.read_run()  # a damaged or foreign run must not read as one without incidents
    return files


def not_one(directory: Path, kind: str, file: str) -> RunFilesError:
    """That this is no directory of a kind, e.g. `scan`, because it lacks a file; names those that are in it."""
    what = f"is no directory of a {kind} (no {file})" if directory.is_dir() else "is not a directory"
    what = what if directory.exists() else "does not exist"
    found = sorted(path.parent.name for path in directory.glob(f"*/{file}")) if directory.is_dir() else []
    hint = f"; {kind}s in it: {', '.join(found[-8:])}" if found else ""
    return RunFilesError(f"{directory} {what}{hint}")
