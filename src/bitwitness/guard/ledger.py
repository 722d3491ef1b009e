"""One rank's account of what was verified and what was not, written to its journal as ranges of steps.

A line per step would be more than the training log; a line per change of outcome says the same. What is not written is
not verified: a process that dies loses at most the open ranges, which then show as gaps, never as health.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.evidence import CheckName, LedgerEntry, Observation
from bitwitness.guard.job import Outcome
from bitwitness.guard.metrics import Metrics
from bitwitness.runfiles import Journal

logger = logging.getLogger("bitwitness")

_LONGEST = 100
"""Steps after which an open range is written even though nothing has changed."""


class Ledger:
    """Collects outcomes by check and writes them as ranges, and beside them what `metrics` has of the steps."""

    def __init__(self, journal: Journal, metrics: Metrics) -> None:
        self._journal = journal
        self._metrics = metrics
        self._refused = 0
        self._open: dict[CheckName, LedgerEntry] = {}
        # A loop that simply ends loses nothing: what is open is written when the interpreter exits.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    def note(self, step: int, outcome: Outcome) -> None:
        """Account for a check's outcome at a step, and journal what it observed."""
        entry = LedgerEntry(outcome.check, step, step, outcome.outcome, outcome.reason, outcome.detail)
        before = self._open.get(outcome.check)
        if before is not None and _continues(before, entry):
            entry = LedgerEntry(entry.check, before.first, step, entry.outcome, entry.reason, entry.detail)
        elif before is not None:
            self._write(before)
        self._open[outcome.check] = entry
        if entry.last - entry.first + 1 >= _LONGEST or entry.outcome != "passed":
            self._write(self._open.pop(outcome.check))

    def observations(self, seen: tuple[Observation, ...], rank: int) -> None:
        """Journal this rank's own observations; the incident holds everybody's."""
        for one in seen:
            if one.rank == rank:
                self._append("observation", one.to_json())

    def steps(self) -> None:
        """Journal loss, norm, time and costs of the steps since the last time, if any has ended."""
        record = self._metrics.take()
        if record is not None:
            self._append("steps", record)

    def event(self, kind: str, record: Mapping[str, Any]) -> None:
        """Journal something else: a start, a verdict, a failure of the guard. What is open is written first.

        After a verdict or a failure the process may end in any way, without a word to this object.
        """
        self._settle()
        self._append(kind, record)

    def close(self) -> None:
        """Write what is open and close the journal."""
        self._settle()
        with suppress(OSError):
            self._journal.close()
        atexit.unregister(self._at_exit)

    def _settle(self) -> None:
        for entry in self._open.values():
            self._write(entry)
        self._open = {}
        self.steps()

    def _write(self, entry: LedgerEntry) -> None:
        self._append("ledger", entry.to_json())

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        """A disk that refuses must not stop the job: what is not written is a gap, and never health."""
        try:
            self._journal.append(kind, record)
        except RunFilesError as error:
            if not self._refused:
                logger.error(  # noqa: TRY400  (the message says all, a traceback is for programmers)
                    "%s: what is verified from now on is not on record; training goes on", error
                )
            self._refused += 1


def _continues(before: LedgerEntry, entry: LedgerEntry) -> bool:
    same = (before.outcome, before.reason, before.detail) == (entry.outcome, entry.reason, entry.detail)
    return same and before.last + 1 == entry.first


def _close_if_alive(reference: weakref.ref[Ledger]) -> None:
    ledger = reference()
    if ledger is not None:
        ledger.close()
