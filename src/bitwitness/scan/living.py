"""Whether a scan that has no result still runs, for who looks at its files: without a result, only what demonstrably runs runs.

Apart from the coordinator, which cannot say that it is dead. No clock is compared with another: nodes that share storage disagree on
the time, and right after a death all files are new.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.supervise.processes import started

_GROWS = 5.0
"""Seconds in which some journal grows if ranks are at work: they write about every second."""
_TICK = 0.25


def this_process() -> dict[str, Any]:
    """Who coordinates, for `scan.json`: a process of this machine, or of a container on it, and when it started."""
    return {"where": _here(), "pid": os.getpid(), "started": started(os.getpid())}


def lives(files: AnswerFiles, coordinator: object, seconds: float = _GROWS) -> bool:
    """Whether a scan still runs: by its coordinator, where that is a process of this machine, else by whether its files grow.

    Args:
        files: of the scan.
        coordinator: what `this_process` said, as it is in scan.json.
        seconds: that files are watched.
    """
    if isinstance(coordinator, Mapping) and coordinator.get("where") == _here() and _here():
        pid = coordinator.get("pid")
        return isinstance(pid, int) and coordinator.get("started") == started(pid) is not None
    before = _sizes(files)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(_TICK)
        if _sizes(files) != before:
            return True
    return False


def _here() -> str:
    """This start of this machine, and which numbers of processes are meant; "" where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return ""


def _sizes(files: AnswerFiles) -> dict[int, int]:
    """Of the journals of answers."""
    sizes = {}
    for rank in files.ranks():
        try:
            sizes[rank] = files.answers(rank).stat().st_size
        except OSError:
            sizes[rank] = 0
    return sizes
