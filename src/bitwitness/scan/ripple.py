"""Slices of known work between the steps of a job: what a rank computes, when, and what it writes of it.

After Ripple (Dixit et al., "Detecting silent data corruptions in the wild", arXiv 2203.08989), which does it for processors: tests
so short that they run beside production, on every machine and all the time. Which items a slice has is a function of the seed and
of its number, so that all ranks answer the same questions without a word between them. How much of the job's time that takes is
promised: what would exceed it is left out, and nothing is lost by that but an answer.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.guard.job import Job
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import read_json
from bitwitness.runfiles.journal import Journal
from bitwitness.runfiles.ripple import Request, RippleFiles
from bitwitness.scan import devices, suites, work
from bitwitness.scan.drill import parse
from bitwitness.scan.items import SUITE_VERSION, Item, Suite
from bitwitness.scan.striking import Striker
from bitwitness.scan.undisturbed import kind_of, left_out, settings_of, undisturbed

logger = logging.getLogger("bitwitness")

CALLS = 2
"""How often a slice computes an item: what was answered once is no answer to be judged by."""

_ATTEMPT = 10.0
"""An item that was not tried yet may be expected to take so many slices: what is expected of it is an upper bound."""

_LOOKED_AT = 64
"""Items that a slice looks at, to find some that fit: to look takes time as well."""

_LEAST_BETWEEN_WRITES, _MOST_BETWEEN_WRITES = 1.0, 60.0
"""Seconds; in between a hundredth of the time so far, so that a job of months has a file of a size that can be read."""


def load(request: Request, device: torch.device) -> None:
    """Read what takes long to read, for a thread beside the one that trains."""
    devices.libraries()
    suites.items(cast("tuple[Suite, ...]", request.suites), device.type)


def begin(job: Job, files: RippleFiles, request: Request) -> Slices:
    """Serve a request on this rank.

    Raises:
        ConfigurationError: it cannot be served here.
    """
    if request.suite_version != SUITE_VERSION:
        raise ConfigurationError(
            f"the request is for version {request.suite_version} of the suites, this process has {SUITE_VERSION}: use the bitwitness of "
            "the job to ask"
        )
    return Slices(job, files, request)


@dataclass(slots=True)
class _Same:
    """How often an item gave one answer, and from how many sets of operands."""

    count: int = 0
    batches: int = 0

    def add(self, count: int) -> None:
        """One set gave it so often."""
        self.count += count
        self.batches += 1


class Slices:
    """One request, on one rank.

    Args:
        job: the guarded job.
        files: where answers go.
        request: what is asked for.
        clock: seconds that only grow, for the budget.
        now: seconds since 1970, for the end.
    """

    def __init__(
        self,
        job: Job,
        files: RippleFiles,
        request: Request,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._request, self._clock, self._now = job, request, clock, now
        self._answers = files.answers(request.id, job.start_id)
        self._longest = request.slice_ms / 1000
        wanted = cast("tuple[Suite, ...]", request.suites)
        self._course = Course(suites.items(wanted, job.device.type), request.seed, self._longest)
        self._striker = Striker([parse(text) for text in request.drills], job.rank, request.seed)
        self._journal: Journal | None = None
        self._tally: dict[tuple[str, str], _Same] = defaultdict(_Same)
        self._different: list[tuple[str, Counter[str]]] = []
        self._began = self._written = clock()
        self._spent = self._told = self._writing = 0.0
        self._wrong: list[Item] = []
        self._kind = self._settings = ""

    @property
    def spent(self) -> float:
        """Seconds that all slices have taken so far, waiting for the device and writing included."""
        return self._spent

    def step_ended(self, step: int) -> bool:
        """Take the slice after this step, if there is one and the budget has it. False: the request has ended.

        Raises:
            RunFilesError: answers cannot be written.
            RuntimeError: the job has changed settings that change bits since slices began.
        """
        if self._now() >= self._request.until:
            return False
        number = self._request.slice_after(step)
        if number is None or self._left() < self._longest or self._is_capturing():
            return True
        began = self._clock()
        try:
            if self._journal is None:
                self._journal = self._introduce()
            elif self._open and began - self._written >= self._between_writes():
                # In a slice of its own. Where the budget does not have it yet, it is saved up for.
                if self._writing * self._open <= self._left():
                    self._write()
                    self._look_what_is_wrong()
            else:
                with undisturbed(self._job.device):
                    self._check_settings()
                    self._slice(number, began)
        finally:
            self._spent += self._clock() - began
        return True

    def close(self, why: str) -> None:
        """Write what is open, and how it ended.

        Raises:
            RunFilesError: it cannot be written.
        """
        journal, self._journal = self._journal, None
        if journal is None:
            return
        try:
            self._write(journal)
            journal.append("end", {"why": why})
        finally:
            journal.close()

    @property
    def _open(self) -> int:
        """How many records there are to write."""
        return len(self._tally) + len(self._different)

    # A slice ---------------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        """Seconds that the budget has left now."""
        return self._request.budget * (self._clock() - self._began) - self._spent

    def _is_capturing(self) -> bool:
        """Whether what is asked of the device now becomes a part of a graph that the job runs later."""
        return self._job.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _check_settings(self) -> None:
        """Another setting means other right answers: a job that changes one on some ranks only must have none of them accused."""
        now = settings_of(self._job.device)
        if now != self._settings:
            raise RuntimeError(
                f"the job has changed its settings since slices began, from {self._settings!r} to {now!r}"
            )

    def _slice(self, number: int, began: float) -> None:
        if self._job.device.type == "cuda":
            # What the job has asked of the device comes first; it counts, because the job might have gone on beside it.
            torch.cuda.synchronize(self._job.device)
        left = self._left()
        first = True
        for item in islice(self._items(number), _LOOKED_AT):
            expected = self._course.expected(item)
            if expected is None:
                continue
            if first and expected > left - (self._clock() - began) and not self._course.was_tried(item):
                return  # this slice's time is kept for it
            if expected > left - (self._clock() - began):
                continue
            if not first and self._clock() - began + expected > self._longest:
                continue
            self._compute(item)
            first = False
            if self._clock() - began >= self._longest:
                return

    def _items(self, number: int) -> Iterator[Item]:
        """In the order in which this slice takes them; every second one has what somebody got wrong, for more answers to it."""
        if self._wrong and number % 2:
            yield self._wrong[number // 2 % len(self._wrong)]
        else:
            yield from self._course.after(number)

    def _compute(self, item: Item) -> None:
        """Compute an item some times, of operands that are made once."""
        began = self._clock()
        try:
            if why := left_out(item, self._job.device):
                raise work.Unsupported(why)
            compute = work.prepare(item, self._job.device)
            answers = Counter(work.digest(list(self._striker.strike(compute()))) for _ in range(CALLS))
        except (work.Unsupported, ConfigurationError, torch.OutOfMemoryError, Warning) as error:
            # A warning is one where the job has made errors of them.
            logger.debug("%s is left out of the slices: %s", item.id, error)
            self._course.leave_out(item)
            return
        self._check_settings()  # another thread may have changed them meanwhile
        if len(answers) > 1:
            self._different.append((item.id, answers))
        else:
            self._tally[item.id, next(iter(answers))].add(CALLS)
        self._course.took(item, self._clock() - began)

    # What is written -------------------------------------------------------------------------------------------------

    def _introduce(self) -> Journal:
        """Say who this is: in a slice of its own, with the settings that slices run under."""
        job = self._job
        with undisturbed(job.device):
            kind = kind_of(job.device)
            self._settings = kind["settings"]
        self._answers.create()
        place = job.topology.placements[job.rank]
        device = Device(job.rank, place.node, place.device, kind, os.getpid())
        self._kind = device.kind_name
        return self._answers.introduce(device)

    def _between_writes(self) -> float:
        return min(max((self._clock() - self._began) / 100, _LEAST_BETWEEN_WRITES), _MOST_BETWEEN_WRITES)

    def _write(self, journal: Journal | None = None) -> None:
        """Write what was answered since the last time, and the seconds that it took."""
        journal = journal or self._journal
        if journal is None:
            return
        began = self._clock()
        seconds, self._told = self._spent - self._told, self._spent
        records: list[dict[str, Any]] = [
            {"item": item, "digest": digest, "count": same.count, "batches": same.batches}
            for (item, digest), same in self._tally.items()
        ]
        records += [{"item": item, "answers": dict(answers), "batches": 1} for item, answers in self._different]
        self._tally.clear()
        self._different.clear()
        for record in records:
            journal.append("answer", {**record, "seconds": round(seconds, 6)})
            seconds = 0.0
        self._written = self._clock()
        # By the record; one that took long is soon forgotten, else nothing would be written any more.
        self._writing = max((self._written - began) / max(1, len(records)), self._writing / 2)

    def _look_what_is_wrong(self) -> None:
        if not self._answers.focus.is_file():
            return
        try:
            items = read_json(self._answers.focus)["kinds"].get(self._kind, {})
            self._wrong = self._course.named(list(items))
        except (RunFilesError, KeyError, TypeError, AttributeError) as error:
            logger.debug("%s: %s", self._answers.focus, error)


class Course:
    """Which items slices take, in which order, and how long each is expected to take.

    Of the items of a kind the smallest is tried first, and the larger ones as long as the slices have room for them; one that has
    twice taken longer than a slice is left out, with all that are larger.

    Args:
        items: all of them.
        seed: of their order.
        longest: seconds of a slice.
    """

    def __init__(self, items: Sequence[Item], seed: int, longest: float) -> None:
        self._longest = longest
        self._order = list(items)
        random.Random(f"bitwitness ripple {seed}").shuffle(self._order)  # noqa: S311 - no secret is drawn
        self._by_id = {item.id: item for item in self._order}
        self._untried: dict[str, list[Item]] = defaultdict(list)
        for item in sorted(items, key=_size):
            self._untried[item.kind].append(item)
        self._tried: dict[str, list[float]] = {}
        self._largest: dict[str, Item] = {}
        self._without: set[str] = set()

    def after(self, number: int) -> Iterator[Item]:
        """All items, from where this slice begins; each slice begins one further."""
        count = len(self._order)
        for offset in range(count):
            yield self._order[(number + offset) % count]

    def named(self, ids: Sequence[str]) -> list[Item]:
        """Those of these that are known here."""
        return [self._by_id[one] for one in ids if one in self._by_id]

    def expected(self, item: Item) -> float | None:
        """Seconds that an item is expected to take; None where it is not to be taken."""
        if item.id in self._without:
            return None
        tried = self._tried.get(item.id)
        if tried is not None:
            # The first time a kernel is loaded as well.
            return tried[-1] if len(tried) > 1 else min(tried[0], self._longest)
        waiting = self._untried[item.kind]
        if not waiting or waiting[0] is not item:
            return None
        below = self._largest.get(item.kind)
        if below is None:
            return self._longest
        expected = min(self._tried[below.id]) * max(1.0, _size(item) / max(1, _size(below)))
        return expected if expected <= _ATTEMPT * self._longest else None

    def was_tried(self, item: Item) -> bool:
        """Whether what is expected of it was seen, and is not only an upper bound."""
        return item.id in self._tried

    def took(self, item: Item, seconds: float) -> None:
        """What it took."""
        tried = self._tried.get(item.id)
        if tried is None:
            self._tried[item.id] = [seconds]
            self._untried[item.kind].remove(item)
            self._largest[item.kind] = item
            return
        tried[:] = [min(tried), seconds]
        if min(tried) > self._longest:
            self._without.add(item.id)
            self._untried[item.kind].clear()

    def leave_out(self, item: Item) -> None:
        """It cannot be computed here."""
        self._without.add(item.id)
        waiting = self._untried[item.kind]
        if item in waiting:
            waiting.remove(item)


def _size(item: Item) -> int:
    size = 1
    for one in item.shape:
        size *= one
    return size
