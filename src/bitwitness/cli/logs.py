"""The log of commands that run for long: on stderr, in lines that stay lines."""

from __future__ import annotations

import logging

from bitwitness.cli.output import plain


class _Plain(logging.Formatter):
    """Names of runs and of nodes come from elsewhere, and must not forge other lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name
        """The line; a traceback, which is ours, comes behind it as it is."""
        return plain(super().formatMessage(record))


def log_to_stderr() -> None:
    """Show warnings and errors of this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
