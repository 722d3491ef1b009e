"""The loop of a rank: compute, count, say so; judge nothing and wait for nobody.

What is wrong is not known here. A rank only knows what it answered before, and what the coordinator says that others answer
(`focus.json`); where an answer differs from that, it keeps the output, because a fault that comes once in a thousand calls may not
come back. Operands are made anew for each batch of calls: else one bit that was flipped in them would make every later answer wrong.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Device
from bitwitness.runfiles.files import read_json
from bitwitness.runfiles.journal import Journal
from bitwitness.scan import communication, devices, suites
from bitwitness.scan.items import Item
from bitwitness.scan.keeping import Keeper
from bitwitness.scan.launching import place_of_heartbeat
from bitwitness.scan.payloads import LinkStriker
from bitwitness.scan.settings import Settings
from bitwitness.scan.striking import Striker
from bitwitness.scan.work import Unsupported, digest, prepare, settled

_BATCH = 0.1
"""Seconds of calls on one set of operands; more where making them takes longer, so that at most half of the time goes there."""
_LONGEST_BATCH = 1.0
_RECORDED = 1.0
_MEASURED = 10.0
_COMMUNICATE_AT, _COMMUNICATE = 0.25, 0.25
"""When ranks meet to send each other things, and how long, as parts of the time: each is at it when the others are."""
_SHARES = {"train": 1.0, "ops": 2.0, "mix": 1.0}
"""Of the time, by suite: there are a hundred times as many operations as models."""
_LEAST_PATIENCE = 10.0
"""Seconds to wait for others to come, also where the scan is shorter: they may have begun later."""
_MOST_ERRORS = 3
"""Items one after the other that end in errors: the device, or its process, can no more."""


class Asked:
    """Whether a rank was asked to stop: by a signal, or by a file where the coordinator is on another node."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.by_signal = False

    def look(self) -> None:
        """Look at the file."""
        self.by_signal = self.by_signal or self._file.exists()

    def __bool__(self) -> bool:
        return self.by_signal


class Worker:
    """One rank at work.

    Args:
        files: of the scan.
        settings: what was asked.
        device: who this is.
        torch_device: on what it computes.
        journal: of its answers.
        asked: whether to stop.
    """

    def __init__(
        self,
        files: AnswerFiles,
        settings: Settings,
        device: Device,
        torch_device: torch.device,
        journal: Journal,
        asked: Asked,
    ) -> None:
        self._files, self._settings, self._device, self._torch_device = files, settings, device, torch_device
        self._journal, self._asked = journal, asked
        self._striker = Striker(settings.drills, device.rank, settings.seed)
        self._keeper = Keeper(files, settings, device)
        self._heartbeat = Heartbeat(files, device.rank)
        self._tally: dict[tuple[str, str], tuple[int, int, float]] = {}
        self._of_batch: Counter[str] = Counter()
        self._own: dict[str, Counter[str]] = defaultdict(Counter)
        self._focus: dict[str, str] = {}
        self._focus_seen = 0
        self._focus_since, self._focus_spent = 0.0, 0.0
        self._begun = self._recorded = time.monotonic()
        self._measured = 0.0
        self._errors = 0
        asked_for = suites.items(settings.suites, torch_device.type)
        self._items = {item.id: item for item in asked_for if item.suite != "comm"}
        self._first = deque(self._items)
        self._laps = {
            suite: deque(item.id for item in self._items.values() if item.suite == suite)
            for suite in settings.suites
            if any(item.suite == suite for item in self._items.values())
        }
        self._spent = dict.fromkeys(self._laps, 0.0)
        self._to_communicate = "comm" in settings.suites and settings.world > 1

    def run(self) -> None:
        """Work until the time is over or it is asked to stop; leaves an `end` record only where it came to that.

        Raises:
            RunFilesError: its answers cannot be written.
            RuntimeError: the device can no more.
        """
        self._begun = self._recorded = time.monotonic()
        self._journal.append("begin", {"items": len(self._items), "seconds": self._settings.seconds})
        with settled(self._torch_device):
            while not self._over():
                if self._to_communicate and (
                    not self._laps or self._elapsed() >= _COMMUNICATE_AT * self._settings.seconds
                ):
                    self._communicate()
                elif (item := self._next()) is not None:
                    self._timed(item)
                else:
                    break
        self._record()
        self._journal.append(
            "end", {"why": "done", "struck": self._striker.struck} if self._striker.struck else {"why": "done"}
        )

    @property
    def at(self) -> str:
        """The item that it is or was at."""
        return self._heartbeat.at

    # What comes next ------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    def _over(self) -> bool:
        return bool(self._asked) or self._elapsed() >= self._settings.seconds

    def _next(self) -> str | None:
        """The item to compute now: half of the time one that is in focus, else the next of the first lap, else of a later one."""
        focus = [item for item in self._focus if item in self._items]
        if focus and self._focus_spent <= (time.monotonic() - self._focus_since) / 2:
            return min(focus, key=lambda item: self._own[item].total())
        if self._first:
            return self._first[0]
        suite = min(
            (suite for suite, lap in self._laps.items() if lap),
            key=lambda suite: self._spent[suite] / _SHARES[suite],
            default=None,
        )
        if suite is None:
            return None
        self._laps[suite].rotate(-1)
        return self._laps[suite][-1]

    def _timed(self, name: str) -> None:
        """One batch of an item, on the account of its suite and, where it is in focus, of that."""
        item = self._items[name]
        first = bool(self._first) and self._first[0] == name
        before = time.monotonic()
        self._heartbeat.beat(name)
        try:
            self._batch(item, calls=2 if first else None)
            self._errors = 0
        except Unsupported as error:
            self._skip(item, "unsupported", error)
        except torch.AcceleratorError:
            raise  # nothing that follows on this device would mean anything
        except (RuntimeError, MemoryError, ValueError, TypeError, NotImplementedError) as error:
            self._skip(item, "memory" if _is_memory(error) else "error", error)
            self._errors += not _is_memory(error)
            if self._errors >= _MOST_ERRORS:
                raise
        if first and self._first:
            self._first.popleft()
        spent = time.monotonic() - before
        self._spent[item.suite] += spent
        if name in self._focus:
            self._focus_spent += spent
        if time.monotonic() - self._recorded >= _RECORDED:
            self._record()
            self._asked.look()
            self._look_at_focus()
            self._measure()

    def _skip(self, item: Item, what: str, error: BaseException) -> None:
        """Leave an item out from now on, and say so."""
        why = f"{type(error).__name__}: {error}"[:300]
        self._journal.append("skip", {"item": item.id, "what": what, "why": why})
        with suppress(ValueError):
            self._laps[item.suite].remove(item.id)
        self._items.pop(item.id, None)
        if what == "memory" and self._torch_device.type == "cuda":
            torch.cuda.empty_cache()

    # Computing ------------------------------------------------------------------------------------------------------

    def _batch(self, item: Item, calls: int | None) -> None:
        """Make operands and compute: so often, or as long as a batch lasts."""
        before = time.monotonic()
        compute = prepare(item, self._torch_device)
        begun = time.monotonic()
        lasts = min(_LONGEST_BATCH, max(_BATCH, begun - before))
        done = 0
        self._of_batch.clear()
        try:
            while done < calls if calls is not None else time.monotonic() - begun < lasts:
                outputs, answer = self._call(compute)
                done += 1
                self._look_closer(item, answer, outputs, compute)
                if self._over():
                    break
        finally:
            self._count_batch(item, time.monotonic() - begun)

    def _call(self, compute: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], str]:
        """Compute once, and count the answer."""
        outputs = self._striker.strike(compute())
        answer = digest(list(outputs))
        self._of_batch[answer] += 1
        return outputs, answer

    def _count_batch(self, item: Item, seconds: float) -> None:
        """What came of one set of operands: with those that gave the same, or by itself where several answers came of it."""
        if len(self._of_batch) > 1:
            answers = {"answers": dict(self._of_batch), "batches": 1, "seconds": round(seconds, 6)}
            self._journal.append("answer", {"item": item.id, **answers})
        for answer, count in self._of_batch.items() if len(self._of_batch) == 1 else ():
            calls, batches, spent = self._tally.get((item.id, answer), (0, 0, 0.0))
            self._tally[item.id, answer] = (calls + count, batches + 1, spent + seconds)

    def _look_closer(
        self, item: Item, answer: str, outputs: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]
    ) -> None:
        """Keep an output that is not the expected one, beside a right one of the same device if it gives one now."""
        own = self._own[item.id]
        own[answer] += 1
        by_others = self._focus.get(item.id)
        expected = by_others or next((known for known, count in own.most_common(1) if count > 1), None)
        if expected is None or answer == expected or not self._keeper.wants(item, by_others is not None):
            return
        kept = [output.detach().to("cpu", copy=True) for output in outputs]
        right = None
        for _ in range(3):
            again, other = self._call(compute)
            own[other] += 1
            if other == expected:
                right = [output.detach().to("cpu") for output in again]
                break
        celsius = devices.temperature(self._torch_device)
        self._keeper.keep(item, expected, by_others is not None, answer, own, kept, right, celsius)

    def _communicate(self) -> None:
        """Meet the others, for a part of the time that is the same for all."""
        self._to_communicate = False
        left = self._settings.seconds - self._elapsed()
        seconds = min(left, _COMMUNICATE * self._settings.seconds) if self._laps else left
        self._record()
        self._heartbeat.beat("comm")
        communication.run(
            self._device,
            self._torch_device,
            self._settings.world,
            self._journal,
            seconds=seconds,
            seed=self._settings.seed,
            meeting=None if self._settings.job else self._files.path / "meeting",
            strike=LinkStriker(self._settings.drills, self._device.rank, self._settings.seed),
            stop=self._was_asked,
            patience=min(communication.PATIENCE, max(_LEAST_PATIENCE, self._settings.seconds / 2)),
        )

    def _was_asked(self) -> bool:
        self._asked.look()
        return bool(self._asked)

    # Files ----------------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Write the answers since the last time."""
        for (item, answer), (count, batches, seconds) in self._tally.items():
            said = {"digest": answer, "count": count, "batches": batches, "seconds": round(seconds, 6)}
            self._journal.append("answer", {"item": item, **said})
        self._tally.clear()
        self._recorded = time.monotonic()

    def _look_at_focus(self) -> None:
        """The items to repeat, as far as they are about devices of this kind: others have other right answers."""
        try:
            changed = self._files.focus.stat().st_mtime_ns
        except OSError:
            return
        if changed == self._focus_seen:
            return
        try:
            found = read_json(self._files.focus).get("kinds", {}).get(self._device.kind_name, {})
        except (RunFilesError, AttributeError):
            return  # it is looked at again soon
        self._focus_seen = changed
        if not self._focus and found:
            self._focus_since = time.monotonic()
        self._focus = {str(item): str(answer) for item, answer in found.items()}

    def _measure(self) -> None:
        """How warm the device is, now and then."""
        if time.monotonic() - self._measured < _MEASURED:
            return
        self._measured = time.monotonic()
        celsius = devices.temperature(self._torch_device)
        if celsius is not None:
            self._journal.append("temperature", {"celsius": celsius})


class Heartbeat:
    """A small file that says which item a rank is at, written in place: if it dies, nothing else can say so."""

    _SIZE = 256

    def __init__(self, files: AnswerFiles, rank: int) -> None:
        self._file = os.open(place_of_heartbeat(files, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.at = ""

    def beat(self, item: str) -> None:
        """Say what it is at."""
        self.at = item
        os.pwrite(self._file, item.encode()[: self._SIZE - 1].ljust(self._SIZE - 1) + b"\n", 0)


def _is_memory(error: BaseException) -> bool:
    """Whether there was too little memory; on a processor torch says so in words only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
