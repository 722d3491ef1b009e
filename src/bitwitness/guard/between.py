"""What runs between two steps of the job and is no part of the guard: slices of known work, where a command asks for them.

Whether anybody asks is looked for every ten seconds, by a thread that may hang with the file system while training goes on. What
computes is named and not imported: it stands above the guard, and a job that nobody asks must not pay for it. Whatever fails here
is told once, loudly, and is the end of the slices; no number of the job depends on any of it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bitwitness.guard.job import Job
from bitwitness.runfiles.ripple import LOOK_SECONDS, Request, RippleFiles

logger = logging.getLogger("bitwitness")

_COMPUTES = "bitwitness.scan.ripple"


class Slices(Protocol):
    """What is run after steps, for one request."""

    def step_ended(self, step: int) -> bool:
        """Run what is due after this step. False: there is no more to come."""

    def close(self, why: str) -> None:
        """Leave word of how it ended; a second call does nothing."""


Event = Callable[[str, Mapping[str, Any]], None]
"""Writes something that happened to the journal of this rank."""


class Between:
    """Looks for a request, and has it served after steps.

    Args:
        job: the guarded job.
        run_dir: where a request would be.
        event: told of the beginning, the end and a failure.
        clock: seconds that only grow.
    """

    def __init__(self, job: Job, run_dir: Path, event: Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._event, self._clock = job, event, clock
        self._files = RippleFiles(run_dir)
        self._stamp: tuple[int, ...] | None = None  # of what was last read to its end
        self._unreadable = False
        self._found: Request | None = None
        self._problem: Exception | None = None
        self._told = ""
        self._served: Request | None = None
        self._failed = ""
        self._slices: Slices | None = None
        self._looked = clock()
        # The run directory has just been written to, so that one look more can wait for it: a job that is started anew goes on
        # with the request that is in force from its first step.
        self._look()
        self._looking: threading.Thread | None = None

    def step_ended(self, step: int) -> None:
        """Between this step and the next one. Raises nothing."""
        try:
            self._look_again()
            if self._problem is not None:
                problem, self._problem = self._problem, None
                self._tell(step, problem)
            if self._unreadable:
                self._wait()
                return
            if self._found is not self._served:
                self._change()
            if self._slices is not None and not self._slices.step_ended(step):
                self._end("done")
        except Exception as error:  # noqa: BLE001  (no slice is worth a job)
            self._fail(step, error)

    def close(self) -> None:
        """The job is at its end."""
        with suppress(Exception):
            self._end("done")

    def _look_again(self) -> None:
        now = self._clock()
        if now - self._looked < LOOK_SECONDS or (self._looking is not None and self._looking.is_alive()):
            return
        self._looked = now
        self._looking = threading.Thread(target=self._look, name="bitwitness-ripple", daemon=True)
        self._looking.start()

    def _look(self) -> None:
        """Find the request in force, and load what serves it. The rest is for the thread that trains: settings are its own."""
        try:
            stamp = self._files.stamp()
            if stamp != self._stamp:
                self._read(stamp)
            self._unreadable = False
        except Exception as error:  # noqa: BLE001  (told between two steps)
            # Perhaps it was withdrawn: there are no slices until that is known. The stamp is still the one before: it is read again.
            self._unreadable = True
            if self._told != str(error):
                self._told, self._problem = str(error), error

    def _read(self, stamp: tuple[int, ...] | None) -> None:
        request = self._files.read() if stamp is not None else None
        if request is not None and request.until > time.time():
            importlib.import_module(_COMPUTES).load(request, self._job.device)
        if request != self._found:
            self._found = request
        self._stamp, self._told = stamp, ""

    def _wait(self) -> None:
        """No slice as long as nobody knows what is asked for; one that was asked for goes on when it is known again."""
        if self._slices is not None and self._served is not None and self._served.until <= time.time():
            self._end("done")

    def _tell(self, step: int, problem: Exception) -> None:
        logger.error(
            "at step %d the request for slices of a scan cannot be read, and there are none until it can; training goes on: %s: %s",
            step,
            type(problem).__name__,
            problem,
        )
        request = self._served.id if self._served is not None else ""
        with suppress(Exception):
            self._event("ripple", {"request": request, "state": "unreadable", "step": step, "why": str(problem)})

    def _change(self) -> None:
        request = self._found
        self._end("done")
        self._served = request
        if request is None or request.until <= time.time() or request.id == self._failed:
            return
        begin: Callable[[Job, RippleFiles, Request], Slices] = importlib.import_module(_COMPUTES).begin
        self._slices = begin(self._job, self._files, request)
        self._event("ripple", {"request": request.id, "state": "begun", "every": request.every})

    def _end(self, why: str) -> None:
        if self._slices is None:
            return
        slices, self._slices = self._slices, None
        slices.close(why)
        if self._served is not None:
            self._event("ripple", {"request": self._served.id, "state": "ended", "why": why})

    def _fail(self, step: int, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        logger.error(
            "after step %d a slice of a scan failed, and there will be no more of them; training goes on: %s", step, why
        )
        logger.debug("a slice of a scan failed", exc_info=error)
        with suppress(Exception):
            self._end(why)
        request = self._served.id if self._served is not None else ""
        self._slices, self._failed = None, request
        with suppress(Exception):
            self._event("ripple", {"request": request, "state": "failed", "step": step, "why": why})
