"""One controller for each state and each run: two that race for a node would take it out and return it in turns.

A lock of the operating system, because it ends with the process that holds it, however that ends. What is written into the
file is for people, who want to know whose lock it is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles import utc_now
from bitwitness.runfiles.files import open_plain

RUN_LOCK = ".fleet.lock"
STATE_LOCK = ".lock"

_FLOCK = "hhqqi0q"
"""`struct flock` of Linux: type, from where, start, length, process."""
_HELD: set[str] = set()
"""Paths that this process holds: a POSIX lock does not keep a process from its own, and closing any handle ends it."""


class Lock:
    """A lock on a file, held until `release` or the end of the process.

    Args:
        path: of the file; it stays.
        what: what one owns with it, for the message.

    Raises:
        ConfigurationError: another process holds it; says which.
        RunFilesError: the file cannot be made or locked.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path = str(path.absolute())
        if self._path in _HELD:
            raise ConfigurationError(f"{what} has an owner already: this process (pid {os.getpid()})")
        try:
            self._descriptor = open_plain(path)
        except OSError as error:
            raise RunFilesError(f"{path} cannot be opened for locking: {error.strerror or error}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _HELD.add(self._path)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{_self()} since {utc_now()}\n".encode(), 0)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                whose = os.pread(self._descriptor, 300, 0).decode(errors="replace").strip() or "another process"
                os.close(self._descriptor)
                raise ConfigurationError(
                    f"{what} has an owner already: {whose}. Two controllers would act twice; end that one first"
                ) from error
            self.release()
            raise RunFilesError(f"{path} cannot be locked: {error.strerror or error}") from error

    def release(self) -> None:
        """Give it up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _HELD.discard(self._path)


def owned(path: Path) -> bool | None:
    """Whether a process holds the lock, which is asked without taking it; None where that cannot be told from here."""
    if str(path.absolute()) in _HELD:
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        said = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except (OSError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return bool(said[0] != fcntl.F_UNLCK)


def _self() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
