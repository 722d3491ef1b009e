"""The demo: one training job, hit on purpose, without the guard and with it; and what came of it.

The first launch trains twice on ranks of its own: with nothing wrong, and with the fault and nobody who looks. Then
`bitwitness run` trains a third time, with the fault, on nodes that it plays, and has one to spare. The ranks
(`examples.train`) only report what happened; what follows from that is `examples.report`'s business. No torch: the command
answers at once, and the ranks have the memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bitwitness.errors import BitwitnessError
from bitwitness.examples.plan import TRAININGS, Event, Settings, events_file
from bitwitness.examples.ranks import Ranks
from bitwitness.examples.report import Report, conclude
from bitwitness.examples.report_page import write_page
from bitwitness.examples.supervised import Supervised

SUPERVISOR = -1
"""In the place of a rank, where the supervisor speaks."""

_SILENCE = 300.0
"""Seconds without any event after which the demo gives up."""

_POLL = 0.1
_TRAIN = "bitwitness.examples.train"


class Job(Protocol):
    """Something that is to be waited for."""

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""


def run(settings: Settings, run_dir: Path, on_event: Callable[[int, Event], None]) -> Report:
    """Run the demo in an empty directory.

    Args:
        settings: what to do.
        run_dir: an existing, empty directory.
        on_event: called with the rank and each event, as they happen; what the supervisor says is an event as well.

    Raises:
        BitwitnessError: a rank failed, or nothing happened for minutes; shows what it printed.
    """
    started = time.monotonic()
    run_dir = run_dir.absolute()
    logs = run_dir / "logs"
    for folder in (run_dir / "events", logs):
        folder.mkdir()
    settings.write(run_dir)
    news = _News(run_dir, settings.world_size)
    alone = [training.name for training in TRAININGS if not training.supervised]
    with Ranks(["-m", _TRAIN, str(run_dir), *alone], settings.nodes, settings.ranks_per_node, logs) as ranks:
        news.follow(ranks, on_event)
    with Supervised(run_arguments(settings, run_dir), logs / "run.log") as job:
        news.follow(job, on_event)
        exit_code = job.exit_code
    report = conclude(settings, run_dir, exit_code, time.monotonic() - started)
    write_page(report)
    return report


def run_arguments(settings: Settings, run_dir: Path) -> list[str]:
    """What follows `bitwitness run`: as many nodes as there are, and one to spare."""
    training = next(training for training in TRAININGS if training.supervised)
    options: dict[str, object] = {
        "--nodes": settings.nodes,
        "--nproc-per-node": settings.ranks_per_node,
        "--spares": 1,
        "--run-dir": run_dir / training.name,
        "--hang-timeout": _SILENCE,
    }
    words = [str(word) for option in options.items() for word in option]
    return [*words, "-m", _TRAIN, str(run_dir), training.name]


class _News:
    """What ranks and supervisor append to their files."""

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self._run_dir = run_dir
        self._ranks = [_Tail(events_file(run_dir, rank)) for rank in range(world_size)]
        supervised = next(training.name for training in TRAININGS if training.supervised)
        self._training = supervised
        self._supervisor = _Tail(run_dir / supervised / "supervise" / "log.jsonl")

    def follow(self, job: Job, on_event: Callable[[int, Event], None]) -> None:
        """Pass on what is new, as it happens, until a job has ended."""
        heard = time.monotonic()
        running = True
        while running:
            running = job.running  # before the files are read: what a rank wrote before it ended is then read too
            new = sorted(self._new(), key=lambda one: float(one[1]["time"]))
            heard = time.monotonic() if new else heard
            for rank, event in new:
                on_event(rank, event)
            if time.monotonic() - heard > _SILENCE:
                raise BitwitnessError(
                    f"nothing was heard of the ranks for {_SILENCE:.0f} s: look at {self._run_dir / 'logs'}"
                )
            if running:
                time.sleep(_POLL)

    def _new(self) -> Iterator[tuple[int, Event]]:
        for rank, tail in enumerate(self._ranks):
            for event in tail.new():
                yield rank, event
        for record in self._supervisor.new():
            at = datetime.fromisoformat(record["time"]).timestamp()
            yield SUPERVISOR, {**record, "event": "supervisor", "training": self._training, "time": at}


class _Tail:
    """Reads what is appended to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Sequence[dict[str, Any]]:
        """The whole lines that have come since; what a writer that was killed has left of a line is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return ()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        found = []
        for line in content[:whole].splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found
