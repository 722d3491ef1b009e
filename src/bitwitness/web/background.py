"""The work beside the pages: import rounds and retention, in a thread that no error ends.

A database that is away, a disk that is full or a run that nobody can read must be seen on the pages, which go on with what there
is. So whatever a round raises becomes a notice and a line of the log, and the next round is tried, later and later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol, Self

from bitwitness.errors import BitwitnessError
from bitwitness.web.status import Status

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
PRUNE_SECONDS = 3600.0
_TOLD_AFTER = 2.0
"""Seconds after which a round is told: most take none."""


class Imports(Protocol):
    """Whoever imports, e.g. `store.importing.Importer`."""

    def round(self, progress: Callable[[Any], None] | None = None) -> object:
        """Import what is new."""


class _Stopped(BaseException):
    """The console ends in the middle of a round, whose transaction is taken back."""


class Background:
    """Import rounds until it is stopped; usable in a `with`.

    Args:
        importer: makes whoever imports; called in the thread, and again where it fails.
        status: where it says how it is.
        every: seconds between two rounds.
        prune: removes what is too old, if anything is to be removed.
    """

    def __init__(
        self,
        importer: Callable[[], Imports],
        status: Status,
        *,
        every: float = 2.0,
        prune: Callable[[], object] | None = None,
    ) -> None:
        self._make, self._status, self._every, self._prune = importer, status, every, prune
        self._importer: Imports | None = None
        self._stop = threading.Event()
        self._worked = ""
        self._begun = 0.0
        status.imports = True
        status.tell("import", "progress", "the first import begins; pages show what is there so far")
        self._thread = threading.Thread(target=self._run, name="bitwitness-import", daemon=True)

    def start(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def stop(self, seconds: float = 3.0) -> None:
        """End, in the middle of a round if need be: what it had not written yet is imported by the next console."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        pause, pruned = self._every, -PRUNE_SECONDS
        try:
            while not self._stop.is_set():
                worked = self._try("import", "the import", self._round)
                pause = self._every if worked else min(2 * pause, LONGEST_PAUSE)
                if worked and self._prune is not None and time.monotonic() - pruned >= PRUNE_SECONDS:
                    pruned = time.monotonic()
                    self._try("retention", "removing what is too old", self._prune)
                self._stop.wait(pause)
        except _Stopped:
            return

    def _try(self, what: str, name: str, task: Callable[[], object]) -> bool:
        try:
            task()
        except BitwitnessError as error:
            self._failed(what, f"{name} fails: {error}", None)
            return False
        except Exception as error:  # noqa: BLE001 - told, and tried again
            self._failed(what, f"{name} fails ({type(error).__name__}): the log of the console says more", error)
            return False
        if self._status.clear(what):
            logger.info("%s works", name)
        return True

    def _failed(self, what: str, text: str, unforeseen: Exception | None) -> None:
        if self._stop.is_set():
            return  # the database was closed under it
        since = f". What is shown is of {self._worked}" if self._worked else ""
        if self._status.tell(what, "error", f"{text}{since}. It is tried again"):
            logger.error("%s", text, exc_info=unforeseen)

    def _round(self) -> None:
        self._begun = time.monotonic()
        if self._importer is None:
            self._importer = self._make()
        self._importer.round(progress=self._progress)
        self._worked = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def _progress(self, done: Any) -> None:
        """Say how far a round is that takes long, and end it where the console ends."""
        if self._stop.is_set():
            raise _Stopped
        if time.monotonic() - self._begun >= _TOLD_AFTER:
            first = "the first import" if not self._worked else "an import"
            self._status.tell("import", "progress", f"{first} is under way ({done}); pages show what is there so far")
