"""What commands print with: consoles that show data as it is, and JSON.

Names of nodes and tensors come from elsewhere. Whatever is in them, a `[bold]` or an escape sequence, is shown as the
characters it consists of: no markup is interpreted anywhere, and what a terminal would act on is spelled out.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST = 110
"""Columns: longer lines of prose are hard to read."""


_UNLIMITED = 1_000_000

_LONGEST = 8_000
"""Characters of one value that are shown; `--json` has all of it."""


def console(stderr: bool = False) -> Console:
    """A console that interprets no markup, no emoji codes and highlights nothing by itself."""
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    made.width = min(made.width, _WIDEST)
    return made


def print_list(table: Table, screen: Console) -> None:
    """Print a table; where no terminal shows it, as wide as it is: an id or a time in two parts is found by nobody.

    Nothing is put behind the last word of a line then: one long sentence would have all lines filled up with blanks.
    """
    if screen.is_terminal:
        screen.print(table)
        return
    width, screen.width = screen.width, _UNLIMITED
    with screen.capture() as held:
        screen.print(table)
    screen.width = width
    screen.file.write("\n".join(line.rstrip(" ") for line in held.get().split("\n")))


def plain(value: object) -> str:
    """A value as text of one line, with control characters spelled out, and cut where nobody would read on."""
    text = str(value)
    cut = f" ... ({len(text) - _LONGEST} more characters)" if len(text) > _LONGEST else ""
    shown = text[:_LONGEST]
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown) + cut


def styled(value: object, style: str = "") -> Text:
    """The same as text in a style."""
    return Text(plain(value), style=style)


def this_command() -> str:
    """How to call this program from where the user is: its name if the shell finds it, else the path it was started by."""
    script = Path(sys.argv[0])
    if script.name != "bitwitness":
        return f"{shlex.quote(sys.executable)} -m bitwitness"
    found = shutil.which(script.name)
    return script.name if found is not None and script.resolve() == Path(found).resolve() else shlex.quote(str(script))


def print_json(record: Mapping[str, Any]) -> None:
    """Print exactly one JSON object on stdout."""
    click.echo(json.dumps(record, indent=2, allow_nan=False), file=sys.stdout)
