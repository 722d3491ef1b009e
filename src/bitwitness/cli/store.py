"""`bitwitness store`: the console's database, without a console: fill it, see what is in it, and keep it small."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import click

from bitwitness.errors import MissingExtra

_COMMANDS = {
    "import": ("bitwitness.cli.store_import", "import_"),
    "prune": ("bitwitness.cli.store_prune", "prune"),
    "status": ("bitwitness.cli.store_status", "status"),
}
"""Each command, the module that holds it, and what it is called there."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Commands(click.Group):
    """Commands that are imported when they are used: the database needs an extra."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name; None where there is none."""
        if cmd_name not in _COMMANDS:
            return None
        home, name = _COMMANDS[cmd_name]
        if find_spec("sqlalchemy") is None or find_spec("alembic") is None:
            raise MissingExtra("the database of the console needs more: pip install 'bitwitness[web]'")
        command: click.Command = getattr(importlib.import_module(home), name)
        return command


def database_option(function: _Function) -> _Function:
    """`--db`, as every command of the store has it."""
    return click.option(
        "--db",
        "url",
        required=True,
        envvar="BITWITNESS_DB",
        metavar="URL",
        help="Of the database: a path, sqlite:///PATH or postgresql://... Give a password by BITWITNESS_DB: others see options.",
    )(function)


@click.group(cls=_Commands)
def store() -> None:
    """Fill the database of the console, see what is in it, and keep it small."""
