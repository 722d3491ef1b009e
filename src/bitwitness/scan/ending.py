"""The process that ends somebody else's program where the one that runs it is gone.

Run as a program of its own (`python -I -S ending.py`), in a session of its own, so that nothing that ends a scan ends it too. Its
standard input is a pipe from the scan, which tells it the process group and at last that all is over; where the pipe closes without
that, as it does however a process ends, the group is killed. It is started before the program, which so is never without it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

OVER = b" over"


def main() -> None:
    """Wait for the other end of standard input to close."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    heard = b""
    while more := os.read(0, 64):
        heard += more
    if heard and not heard.endswith(OVER):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(heard), signal.SIGKILL)


if __name__ == "__main__":
    main()
