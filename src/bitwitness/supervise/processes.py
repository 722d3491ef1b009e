"""Processes of this machine: dying with a parent, finding those of a job, ending them all.

Nothing that `bitwitness run` starts may train on after it, however it ends. The kernel sees to the chain of parents
(`die_with_parent`); what has left that chain, such as the workers of a data loader, is found by a variable that all
descendants of an agent have in their environment, and ended by whoever is left of their wrapper and the one that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")

PARENT = "BITWITNESS_PARENT"
"""Names the process that started this one and without which it must not live."""

MARKER = "BITWITNESS_SUPERVISED"
"""Holds session, generation and node: the same in every process of one node in one generation, and in no other."""


def die_with_parent(variable: str = PARENT) -> None:
    """For a process, first of all: be killed when the one that started it ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(variable)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)  # it ended before the kernel was asked


def when_closed(descriptor: int, act: Callable[[], None]) -> None:
    """In a thread: act once the other end of a pipe is closed, as it is however the process ends that holds it.

    For who must do something first, `die_with_parent` leaves no time.
    """

    def wait() -> None:
        with suppress(OSError):
            os.read(descriptor, 1)
        act()

    threading.Thread(target=wait, daemon=True).start()


def started(pid: int) -> int | None:
    """When a process started, in ticks since boot: with it a number that was given away again is another process.

    None where there is no such process, or it has ended and waits for its parent to notice.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (OSError, ValueError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def holding(marker: str, variable: str = MARKER) -> Iterator[int]:
    """The processes in whose environment the variable has this value or one that goes on with a colon; not this one."""
    wanted = f"{variable}={marker}".encode()
    for path in _PROC.iterdir():
        if not path.name.isdecimal() or int(path.name) == os.getpid():
            continue
        try:
            environment = (path / "environ").read_bytes()
        except OSError:
            continue  # gone, or somebody else's
        values = (entry for entry in environment.split(b"\0") if entry.startswith(wanted))
        if (
            any(entry == wanted or entry[len(wanted) :].startswith(b":") for entry in values)
            and started(int(path.name)) is not None
        ):
            yield int(path.name)


def kill(pids: Collection[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes; those that are gone do not mind."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def sweep(marker: str, keep: Collection[int] = ()) -> int:
    """Kill every process with this marker, and those they start meanwhile; how many were found."""
    found: set[int] = set()
    for _ in range(5):
        now = set(holding(marker)) - set(keep)
        if not now:
            break
        kill(now)
        found |= now
    return len(found)
