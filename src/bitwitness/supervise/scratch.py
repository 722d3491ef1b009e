"""Folders of this node for what need not be shared, and the removal of those whose owner was killed.

A lock on a file in it says whether the owner lives: the kernel lets go of it however the owner ends, and it is seen from
other containers that share the folder, which a process number is not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "bitwitness-"
_LOCK = "owner.lock"


class Scratch:
    """A new folder, locked as long as this object is open. Making one removes what dead owners have left."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / "lock"
        self._lock: int | None = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # under the name that is looked for it is never without its lock

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        # What belongs to somebody else, or goes away meanwhile, is none of our business.
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
