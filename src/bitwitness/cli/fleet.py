"""`bitwitness fleet`: from an incident to a node that is out of service, and back."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "admit": "bitwitness.cli.fleet_admit",
    "agent": "bitwitness.cli.fleet_agent",
    "approve": "bitwitness.cli.fleet_approve",
    "check": "bitwitness.cli.fleet_check",
    "clear": "bitwitness.cli.fleet_clear",
    "history": "bitwitness.cli.fleet_history",
    "rehearse": "bitwitness.cli.fleet_rehearse",
    "reject": "bitwitness.cli.fleet_reject",
    "send": "bitwitness.cli.fleet_send",
    "signals": "bitwitness.cli.fleet_signals",
    "status": "bitwitness.cli.fleet_status",
    "watch": "bitwitness.cli.fleet_watch",
}
"""Each command, and the module that holds a click command of that name."""


class _Commands(click.Group):
    """Commands that are imported when they are used: reading a log must not wait for a web server."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by name; None where there is none."""
        home = _COMMANDS.get(cmd_name)
        if home is None:
            return None
        command: click.Command = getattr(importlib.import_module(home), cmd_name)
        return command


@click.group(cls=_Commands)
def fleet() -> None:
    """Read hardware signals, decide on incidents, and take nodes out of service."""
