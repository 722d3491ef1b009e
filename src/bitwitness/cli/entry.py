"""Where the command begins: Ctrl-C while its modules are still being imported is no traceback."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process."""
    try:
        from bitwitness.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("Error: interrupted\n")
        sys.exit(INTERRUPTED)
