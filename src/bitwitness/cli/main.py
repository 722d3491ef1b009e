"""The command `bitwitness`: which commands there are, and how errors end.

Commands are imported when they are used, because half of them need torch and the other half must answer at once on a
machine that has none. An error that bitwitness raises on purpose is one clear message and an exit code of its own.
"""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import click

from bitwitness._version import __version__
from bitwitness.cli.entry import INTERRUPTED
from bitwitness.cli.output import plain
from bitwitness.errors import BitwitnessError

COMMANDS = {
    "bench": "bitwitness.cli.bench",
    "campaign": "bitwitness.cli.campaign",
    "checkpoint": "bitwitness.cli.checkpoint",
    "compare": "bitwitness.cli.compare",
    "console": "bitwitness.cli.console",
    "demo": "bitwitness.cli.demo",
    "fault": "bitwitness.cli.fault",
    "find-bad": "bitwitness.cli.find_bad",
    "fleet": "bitwitness.cli.fleet",
    "incident": "bitwitness.cli.incident",
    "report": "bitwitness.cli.report",
    "run": "bitwitness.cli.run",
    "quarantine": "bitwitness.cli.quarantine",
    "scan": "bitwitness.cli.scan",
    "serve": "bitwitness.cli.serve",
    "store": "bitwitness.cli.store",
}
"""Each command, and the module that holds a click command of that name (with _ for -)."""


class Failure(click.ClickException):
    """An error as the command line shows it: `Error: ...` on stderr, then this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        # A message may hold names from a file or a directory: none of them may steer the terminal.
        super().__init__("\n".join(plain(line) for line in message.splitlines()))
        self.exit_code = exit_code  # type: ignore[misc]  # click has one a class, we have one an error


class Commands(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name; None where there is none."""
        home = COMMANDS.get(cmd_name)
        if home is None:
            return None
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name == home:
                return None
            raise
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; its errors are messages and exit codes, never tracebacks."""
        try:
            return super().invoke(ctx)
        except BitwitnessError as error:
            raise Failure(str(error), error.exit_code) from error
        except BrokenPipeError:
            raise  # click ends quietly where a reader such as `head` has had enough
        except OSError as error:
            # What no part of the program foresaw: a path that is too long, a folder that may not be read, a full disk.
            where = f"{error.filename}: " if error.filename else ""
            raise Failure(f"{where}{error.strerror or error}", 2) from error
        except (KeyboardInterrupt, click.Abort) as error:
            raise Failure("interrupted", INTERRUPTED) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bitwitness", message="%(prog)s %(version)s")
def cli() -> None:
    """Find silent data corruption in distributed PyTorch training.

    Exit codes: 0 all went well, 1 it did not, 2 the command was wrong, 130 interrupted.
    """


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows another, and nothing fails
    cli(prog_name="bitwitness")
