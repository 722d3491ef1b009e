"""Being asked to stop: a signal that only sets a flag, so that a job leaves its loop between two steps.

It stands at the bottom because three parts meet in it that must not know each other: `bitwitness run` installs it in every
worker, the guard asks at each step and agrees on the answer across ranks, and a loop without a guard may ask as well.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a job to stop: SIGTERM from Kubernetes, Slurm and torchrun, SIGUSR1 where `--signal=USR1@...` is the custom."""

_asked = threading.Event()


def install() -> bool:
    """From now on the signals set the flag and do nothing else.

    Returns:
        Whether it could: only the main thread may install handlers; from any other nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    return True


def requested() -> bool:
    """Whether this process has been asked to stop."""
    return _asked.is_set()


def request() -> None:
    """Ask this process to stop, as the signal would."""
    _asked.set()


def _on_signal(number: int, frame: FrameType | None) -> None:
    _asked.set()
