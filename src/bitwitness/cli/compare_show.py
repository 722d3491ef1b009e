"""Reading what a comparison has left, without torch: its report, or what its journals say where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bitwitness.cli.output import plain, print_json
from bitwitness.cli.runs import not_one
from bitwitness.compare import judging, report
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.settings import Settings
from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import read_json

_STUDY = "study.json"


def is_study(directory: Path) -> bool:
    """Whether it has the tables of a study."""
    return (directory / _STUDY).is_file()


def echo_study(directory: Path, *, as_json: bool = False) -> None:
    """Print the tables of a study.

    Raises:
        RunFilesError: they cannot be read.
    """
    if as_json:
        print_json(read_json(directory / _STUDY))
        return
    page = directory / "study.md"
    try:
        text = page.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunFilesError(f"{page} cannot be read: {error.strerror or error}") from error
    for line in text.splitlines():
        click.echo(plain(line) if not line.isprintable() else line)
    click.echo(f"\nThe same as a page: {directory / 'study.html'}")


def record_of(directory: Path, suspect: str | None = None) -> dict[str, Any]:
    """The report in the directory of a comparison, or one made now of what is there.

    Args:
        directory: of the comparison.
        suspect: of which, where there are several; None for the only one.

    Raises:
        RunFilesError: it is no directory of a comparison, or its files cannot be read.
    """
    files = CompareFiles(directory)
    if files.report.is_file():
        written = report.read(directory)
        name = written["suspect"]["name"]
        if suspect not in (None, name):
            raise RunFilesError(f"--suspect {suspect!r:.60}: the report of {directory} is about {name}")
        return written
    if not files.asked.is_file():
        raise not_one(directory, "comparison", "compare.json")
    try:
        asked = read_json(files.asked)
        settings = Settings.from_json(asked)
        if not isinstance(asked.get("suspect", ""), str):
            raise RunFilesError(f"suspect is {asked['suspect']!r:.60}")
    except RunFilesError as error:
        raise error if str(files.asked) in str(error) else RunFilesError(f"{files.asked}: {error}") from error
    suspects = [one.name for one in files.introduced() if one.role == "suspect"]
    if not suspects:
        raise RunFilesError(f"{files.participants} names no suspect: the comparison had not begun when it was ended")
    if (suspect is None and len(suspects) > 1) or suspect not in (None, *suspects):
        raise RunFilesError(
            f"{directory} has the suspects {', '.join(suspects)}: say with --suspect which is to be shown"
        )
    result = judging.judge(files, suspect or suspects[0], settings.confidence)
    done = {one.mode for one in result.modes if one.ended == "done"}
    finished = done >= set(settings.modes)
    return report.record(result, finished, may_run=not finished)
