"""The process between a search and one test: the test ends when the search does, when it does, and when this one is killed.

Run as a program of its own (`python -I -S keeper.py CMD ...`) and not imported by it, so that it starts in a moment and has no
threads of a search in it when it forks. Three things end the test and all that it started in its process group: standard input, a
pipe from the search, closes; or this process ends, which a second one sees by another pipe; and the kernel kills the command
itself at once when its parent is gone, in case both were killed.

It ends as the command did: its exit status, 125 after a signal, 126 where the search went away, 127 where nothing could be started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

SIGNALLED, ENDED, NOT_STARTED = 125, 126, 127

_PR_SET_PDEATHSIG = 1
_OVER = b" over"


def dying_with(parent: int) -> Callable[[], None]:
    """For a child, between fork and exec: be killed when its parent ends."""
    libc = ctypes.CDLL(None)  # loaded before the fork

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(ENDED)  # it ended before the kernel was asked

    return ask


def kill_group(leader: int) -> None:
    """Kill what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def second() -> tuple[int, int]:
    """Fork the process that ends the test if this one is killed; its number, and where to tell it the group."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, write
    os.setsid()
    for descriptor in (0, 1, 2, write):
        os.close(descriptor)
    heard = b""
    while more := os.read(read, 64):
        heard += more
    if heard and not heard.endswith(_OVER):
        kill_group(int(heard))
    os._exit(0)


def keep(words: Sequence[str]) -> int:
    """Run the command, and see that it ends."""
    pid, tell = second()
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 - there is no thread here yet
        )
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"cannot be started: {error}\n")
        return NOT_STARTED
    os.write(tell, str(child.pid).encode())

    def watch() -> None:
        while os.read(0, 64):
            pass
        kill_group(child.pid)
        os._exit(ENDED)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    kill_group(child.pid)
    os.write(tell, _OVER)
    os.close(tell)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return code if 0 <= code < 256 else SIGNALLED


if __name__ == "__main__":
    status = keep(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
