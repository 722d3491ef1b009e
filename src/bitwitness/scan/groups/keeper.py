"""The process between a search and one test: the test ends when the search does, when it does, and when this one is killed.

Run as a program of its own (`python -I -S keeper.py FD CMD ...`) and not imported by it, so that it starts in a moment and has no
threads of a search in it when it forks. Three things end the test and all that it started: standard input, a
pipe from the search, closes; or this process ends, which a second one sees by another pipe; and the kernel kills the command
itself at once when its parent is gone, in case both were killed. What the test started and left its process group is a child of
this process as soon as its own parent is gone (`PR_SET_CHILD_SUBREAPER`, see prctl(2)), and is killed as such.

How the command ended is said on FD in words, as each exit status may be the command's own. What it prints goes to standard output:
the beginning and the end of it, as a test that prints for ever must not fill the disk.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

EXITED, SIGNALLED, NOT_STARTED = "exited", "signalled", "not-started"
"""What is said of the command; its status, the signal, or why follows."""

KEPT = 512 << 10
"""Bytes kept of the beginning of what a test prints, and as many of the end."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OVER = b" over"
_PATIENCE = 3.0  # seconds for what was killed to be gone, and its output read


class Log:
    """Standard output, of which the beginning and the end are written."""

    def __init__(self) -> None:
        self._room = KEPT
        self._end = bytearray()
        self._left_out = 0
        self._lock = threading.Lock()

    def add(self, text: bytes) -> None:
        """Something more was printed."""
        with self._lock:
            first, rest = text[: self._room], text[self._room :]
            self._room -= len(first)
            self._write(first)
            self._end += rest
            if len(self._end) > 2 * KEPT:
                self._cut()

    def close(self) -> None:
        """Write the end."""
        with self._lock:
            self._cut()
            if self._left_out:
                self._write(f"\n[{self._left_out} bytes left out]\n".encode())
            self._write(bytes(self._end))
            self._end.clear()

    def _cut(self) -> None:
        over = len(self._end) - KEPT
        if over > 0:
            self._left_out += over
            del self._end[:over]

    def _write(self, text: bytes) -> None:
        with suppress(OSError):  # a full disk changes nothing about the test
            while text:
                text = text[os.write(1, text) :]


def dying_with(parent: int, tell: int) -> Callable[[], None]:
    """For a child, between fork and exec: be killed when its parent ends; and say first who it is, by the pipe to the second one."""
    libc = ctypes.CDLL(None)  # loaded before the fork
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # of the parent: a child does not inherit it

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it ended before the kernel was asked
        os.write(tell, str(os.getpid()).encode())

    return ask


def kill_group(leader: int) -> None:
    """Kill what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def children() -> set[int]:
    """Our children, those included that became so when their parents ended."""
    found: set[int] = set()
    try:
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - pathlib takes longer to load than all of this
            with open(f"/proc/self/task/{task}/children") as file:  # noqa: PTH123
                found |= {int(pid) for pid in file.read().split()}
    except OSError:  # a kernel without that file, or a thread that has just ended
        for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
            with suppress(OSError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(name))
    return found


def kill_children(but: int) -> None:
    """Kill all that the test has left, however it got away from its process group: children of those killed become ours."""
    until = time.monotonic() + _PATIENCE
    while (left := children() - {but}) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def second(report: int) -> tuple[int, int]:
    """Fork the process that ends the test if this one is killed; its number, and where to tell it the group."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, write
    os.setsid()
    for descriptor in (0, 1, 2, write, report):
        os.close(descriptor)
    heard = b""
    while more := os.read(read, 64):
        heard += more
    if heard and not heard.endswith(_OVER):
        kill_group(int(heard))
    os._exit(0)


def keep(report: int, words: Sequence[str]) -> str:
    """Run the command, and see that it ends; how it did."""
    pid, tell = second(report)
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dying_with(os.getpid(), tell),  # noqa: PLW1509 - there is no thread here yet
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.write(1, f"cannot be started: {error}\n".encode())
        os.write(tell, _OVER)
        return f"{NOT_STARTED} {getattr(error, 'strerror', None) or error}"
    assert child.stdout is not None
    output, log = child.stdout.fileno(), Log()

    def watch() -> None:
        while os.read(0, 64):
            pass
        kill_group(child.pid)

    def listen() -> None:
        while text := os.read(output, 65_536):
            log.add(text)

    threading.Thread(target=watch, daemon=True).start()
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    code = child.wait()
    kill_group(child.pid)
    kill_children(but=pid)
    listening.join(_PATIENCE)
    log.close()
    os.write(tell, _OVER)
    os.close(tell)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return f"{EXITED} {code}" if code >= 0 else f"{SIGNALLED} {named(-code)}"


def named(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    where = int(sys.argv[1])
    ended = keep(where, sys.argv[2:])
    with suppress(OSError):  # the search does not listen any more
        os.write(where, ended.encode())
    os._exit(0)
