"""Running somebody else's program so that whatever it does ends: in time, with bounded output, and with nothing left behind.

Diagnostics of vendors are run on machines that are suspected to be broken. They hang in the driver, print without end, and leave
processes; a scan that waits for one of them for ever would be the worse fault.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bitwitness.scan import ending

LARGEST = 16 << 20
"""Bytes of output that are read; a diagnostic of eight devices prints some hundred KiB."""
_ERRORS_KEPT = 8 << 10
_GRACE = 3.0
"""Seconds that a program has to end by itself after SIGTERM; `dcgmi` then tells its host engine to stop as well."""
_LOOK = 0.1
_AFTER = 1.0
"""Seconds in which output is still read from what the program has left running."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it.

    Attributes:
        code: its exit code, negative for a signal; None where it was ended here or could not be started.
        output: of standard output, at most `LARGEST` bytes.
        errors: the end of standard error.
        why: why it was ended or not started; "" where it ended by itself.
    """

    code: int | None
    output: bytes
    errors: bytes
    why: str = ""


INTERRUPTED = "it was ended before its time, because the scan was interrupted"


def _never() -> bool:
    return False


def run(
    words: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    stop: Callable[[], bool] = _never,
) -> Ran:
    """Run a program in a process group of its own, which is killed at the end, whatever the end is: also where this process is
    killed. `stop` is asked now and then whether to end it. Never raises OSError.
    """
    try:
        with _guarded() as tell:
            return _run(words, timeout, env, stop, tell)
    except OSError as error:
        return Ran(None, b"", b"", f"it could not be started: {error.strerror or error}")


@contextmanager
def _guarded() -> Iterator[int]:
    """A process that kills the group which is told to it once this process is gone; gives where to tell it."""
    read, write = os.pipe()
    try:
        try:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", ending.__file__],
                stdin=read,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read)
        try:
            yield write
            with suppress(OSError):
                os.write(write, ending.OVER)
        finally:
            os.close(write)
            write = -1
            guard.wait()
    finally:
        if write >= 0:
            os.close(write)


def _run(
    words: Sequence[str], timeout: float, env: Mapping[str, str] | None, stop: Callable[[], bool], tell: int
) -> Ran:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=None if env is None else dict(env),
        )
    except (OSError, ValueError) as error:
        return Ran(None, b"", b"", f"it could not be started: {getattr(error, 'strerror', None) or error}")
    try:
        os.write(tell, str(process.pid).encode())
        return _watch(process, timeout, stop)
    finally:
        _kill(process)


def _watch(process: subprocess.Popen[bytes], timeout: float, stop: Callable[[], bool]) -> Ran:
    output, errors = bytearray(), bytearray()
    assert process.stdout is not None
    assert process.stderr is not None
    end, why = time.monotonic() + timeout, ""
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        gone = 0.0
        while selector.get_map() and not why:
            now = time.monotonic()
            if process.poll() is not None:
                gone = gone or now
                end = min(end, gone + _AFTER)
            if now >= end:
                why = "" if gone else f"it did not end within {timeout:g} s"
                break
            if stop():
                why = INTERRUPTED
                break
            for key, _ in selector.select(min(0.2, end - now)):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors += chunk
                    del errors[:-_ERRORS_KEPT]
                elif len(output) + len(chunk) > LARGEST:
                    why = f"it printed more than {LARGEST >> 20} MiB"
                else:
                    output += chunk
    while not why and process.poll() is None:  # it has closed its output, and goes on
        why = INTERRUPTED if stop() else f"it did not end within {timeout:g} s" if time.monotonic() >= end else ""
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK)
    return Ran(None if why else process.returncode, bytes(output), bytes(errors), why)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: first so that it can clean up, then so that it cannot."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    with suppress(
        subprocess.TimeoutExpired
    ):  # a process that hangs in the driver cannot be killed, and must not hold us
        process.wait(_GRACE)
