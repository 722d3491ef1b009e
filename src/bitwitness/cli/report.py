"""`bitwitness report`: one incident as a document for a vendor or a ticket. No torch: the box it is made on may have none."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bitwitness.cli.logs import log_to_stderr
from bitwitness.cli.output import console, print_json, styled
from bitwitness.cli.runs import GIVEN_PATH, open_run
from bitwitness.errors import ConfigurationError, MissingExtra, RunFilesError
from bitwitness.runfiles import RunFiles, write_bytes

if TYPE_CHECKING:
    from bitwitness.web.report_records import Report

_LOOK = 4096
"""Bytes at either end of a file in which it says who made it."""
_LARGE = 32 << 20
"""Bytes of journals that take longer to read than anybody waits without a word."""


@click.command()
@click.argument("directory", type=GIVEN_PATH, metavar="RUN_DIR")
@click.option("--incident", metavar="ID", default="", help="Which one. Default: the newest of the run.")
@click.option("--html", type=GIVEN_PATH, metavar="FILE", help="Write one page that needs nothing else, with figures.")
@click.option("--markdown", metavar="FILE", help="Write Markdown for a ticket; - prints it.")
@click.option(
    "--fleet",
    type=GIVEN_PATH,
    metavar="STATE",
    help="State folder of `bitwitness fleet watch`: signals, what was done.",
)
@click.option(
    "--redact", is_flag=True, help="Leave out what may name a node, a path or a person; devices keep their identity."
)
@click.option("--force", is_flag=True, help="Overwrite files that are no reports.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(
    directory: Path,
    incident: str,
    html: Path | None,
    markdown: str | None,
    fleet: Path | None,
    redact: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write an incident down to hand on: which device, what it rests on, how to check it, what it does not prove.

    For a vendor who is to replace a device, or for a ticket. It says what the console says. The verdict is decided again from the
    observations. An unattributed incident names nobody, and its report says so. Without --html, --markdown or --json it prints
    Markdown.
    """
    log_to_stderr()
    files = open_run(directory)
    try:
        from bitwitness.web.report import gather
        from bitwitness.web.report_redacting import redact as without_names
        from bitwitness.web.report_rendering import html as page_of
        from bitwitness.web.report_rendering import markdown as markdown_of
        from bitwitness.web.report_words import standing
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("bitwitness"):
            raise
        raise MissingExtra(f"reports need {missing.name}: pip install 'bitwitness[web]'") from missing
    printed = markdown == "-" or (html is None and markdown is None and not as_json)
    if as_json and printed:
        raise ConfigurationError("--json and --markdown - both print: give --markdown a FILE")
    paths = [path for path in (html, Path(markdown) if markdown and markdown != "-" else None) if path is not None]
    if len(paths) == 2 and paths[0].absolute() == paths[1].absolute():
        raise ConfigurationError(f"--html and --markdown are the same file, {paths[0]}: give two")
    for path in paths:
        _refuse_others(path, force)
    _say_if_large(files)
    found = gather(files, incident, fleet)
    if redact:
        found = without_names(found)
    if html is not None:
        write_bytes(html, page_of(found).encode())
    if markdown and markdown != "-":
        write_bytes(Path(markdown), markdown_of(found).encode())
    if as_json:
        written = {} if redact else {"written": [str(path) for path in paths]}  # a path names whoever has the folder
        print_json({"standing": standing(found).kind, **written, **found.to_json()})
        return
    if printed:
        click.echo(markdown_of(found), nl=False)
    _say(found, paths)


def _refuse_others(path: Path, force: bool) -> None:
    """Raise if a file must not be overwritten: a report of ours may be, everything else only by force."""
    from bitwitness.web.report_rendering import MADE_BY

    if not path.parent.is_dir():
        raise ConfigurationError(f"{path.parent} is no directory: {path.name} cannot be written there")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigurationError(f"{path} is no regular file: it is not overwritten")
    if force:
        return
    try:
        with path.open("rb") as file:
            head = file.read(_LOOK)
            file.seek(max(0, path.stat().st_size - _LOOK))
            tail = file.read(_LOOK)
    except OSError as error:
        raise RunFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    if MADE_BY.encode() not in head + tail:
        raise ConfigurationError(f"{path} is there and is no report: give another name, or --force to overwrite it")


def _say_if_large(files: RunFiles) -> None:
    """On stderr, that it takes a while: all of a run is read, so that a report says what the console says."""
    size = files.size()
    if size >= _LARGE:
        screen = console(stderr=True)
        screen.print(
            styled(f"Reading {size >> 20} MiB of journals in {files.path}, which takes a while"), soft_wrap=True
        )


def _say(found: Report, paths: list[Path]) -> None:
    """On stderr, which incident was taken and what was written."""
    screen = console(stderr=True)
    if found.newest and len(found.incidents) > 1:
        others = len(found.incidents) - 1
        more = f"the newest of {len(found.incidents)}; --incident ID takes another" if others else ""
        screen.print(styled(f"Incident {found.page.incident.id}: {more}", "yellow"), soft_wrap=True)
    for path in paths:
        screen.print(styled(f"Written: {path}"), soft_wrap=True)
