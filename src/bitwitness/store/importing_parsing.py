"""What the lines of a rank's journal say, as rows: no database and no files here.

A line that is not what its kind must be is counted and left out; one of a kind that is not known here is a newer writer's, and
no mistake. The rank is that of the file's name: a line that claims another is not believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from bitwitness.evidence import CheckName
from bitwitness.runfiles.drills import start_of
from bitwitness.runfiles.files import SCHEMA
from bitwitness.store.importing_ledger import OUTCOMES, Range, Undone
from bitwitness.store.importing_steps import Stretch
from bitwitness.store.importing_values import moment, name, plain, real, text, whole

_NO_DETAIL: dict[str, Any] = {}
_NONE, _RESUMED = -1, -2
_CHECKS = frozenset(get_args(CheckName))
_COSTS = _CHECKS | {"guard"}
_LINE = 1_000_000
"""Steps of one line at most; guards write a hundred."""
_FAR = 1_000_000_000
"""How far a line may be beyond all that is on record of its rank. No training makes as many steps."""
_SECONDS = (1e-9, 1e9)
"""Wall time that the steps of a line can have taken."""
_NUMBER = 1e100
"""Beyond it a loss is none, and sums of such are no numbers."""


@dataclass(slots=True)
class Batch:
    """What was read of one journal.

    Attributes:
        rank: whose journal it is.
        starts: how many guards had written to it, up to now.
        records, skipped: lines that were used, and that were not.
        first, last: the first and last step in it; -1 if none.
        seen: the newest time.
        start: what names the newest start of the job; "" unknown, or not in here.
        floor: the first step of the newest start, as far as it is on record; -1: none is, -2: a `resume` has said all.
        ledger: each check and what was said of it, in order; "" is every check.
        passed: by number of the start, the last step that any check passed in it, where this batch tells.
        observations: rows.
        marks: rows, without their run; `step` is -1 where it is not known yet.
        started_at: the step with which each start went on, by its number, where this batch tells.
        stretches: of the chart.
        costs: check -> seconds; timed, wall: steps and seconds over which these were measured.
        clock: on which.
    """

    rank: int
    starts: int = 0
    records: int = 0
    skipped: int = 0
    first: int = -1
    last: int = -1
    seen: str = ""
    start: str = ""
    floor: int = _NONE
    ledger: list[tuple[str, Range | Undone]] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)
    observations: list[dict[str, Any]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    started_at: dict[int, int] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
    timed: int = 0
    wall: float = 0.0
    clock: str = ""

    def at_step(self, first: int, last: int) -> None:
        """The rank was at these steps."""
        if self.floor == _NONE or first < self.floor:
            self.floor = first
            if self.starts > 1:  # it began here, without a word that it does: what was made before is made again
                self.ledger.append(("", Undone(first, self.starts)))
        self.first = first if self.first < 0 else min(self.first, first)
        self.last = max(self.last, last)
        if self.rank == 0:
            self.started_at.setdefault(self.starts, first)

    def mark(self, kind: str, step: int, time: str, said: str, origin: str, start: str = "") -> None:
        """Something happened."""
        if start:
            self.start = start
        row = {"kind": kind, "step": step, "time": time, "text": text(said, 500), "origin": origin}
        self.marks.append(row | {"start": start})


def parse(lines: Iterable[tuple[int, bytes]], rank: int, starts: int, *, floor: int = _NONE, last: int = -1) -> Batch:
    """What the lines of a rank's journal say.

    Args:
        lines: byte at which each begins, and what is in it.
        rank: whose journal it is.
        starts: how many guards had written to it before.
        floor: as `Batch.floor` was after what was read before.
        last: the last step that was read before.
    """
    batch = Batch(rank, starts, floor=floor, last=last)
    for at, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA or record.get("rank") != rank:
            batch.skipped += bool(line.strip())
            continue
        kind = record.get("kind")
        read = _KINDS.get(kind) if isinstance(kind, str) else _refused
        time = moment(record.get("time"))
        if read is not None and not read(batch, at, time, record):
            batch.skipped += 1
            continue
        batch.records += 1
        batch.seen = max(batch.seen, time)
    return batch


def _refused(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    return False


def _start(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    batch.starts += 1
    batch.floor = _NONE
    batch.start = name(start_of(record))
    if batch.rank == 0:
        size = whole(record.get("world_size"))
        said = "a guard was made" + (f" for {size} ranks" if size else "")
        batch.mark("start", -1, time, said, f"start:{batch.starts}", batch.start)
    return True


def _resume(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    step = whole(record.get("step"))
    if step is None or step > max(batch.last, 0) + _FAR:
        return False
    batch.floor = _RESUMED
    batch.ledger.append(("", Undone(step)))
    if batch.rank == 0:
        batch.started_at[batch.starts] = step
        refused = record.get("refused")
        more = f"; {len(refused)} newer were refused" if isinstance(refused, list | dict) and refused else ""
        batch.mark("resume", step, time, f"went on from a checkpoint at step {step}{more}", f"journal:{at}")
    return True


def _checkpoint(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    step = whole(record.get("step"))
    if step is None:
        return False
    if batch.rank == 0:
        batch.mark("checkpoint", step, time, f"a checkpoint was saved at step {step}", f"journal:{at}")
    return True


def _failure(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    step = whole(record.get("step"), -1)
    if step is None:
        return False
    # Every rank writes of the same failure: one mark a start and step.
    said = f"the guard failed: {text(record.get('error'), 400)}"
    batch.mark("guard_failure", step, time, said, f"failure:{batch.starts}:{step}")
    return True


def _action(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    step, action = whole(record.get("step")), text(record.get("action"), 100)
    if step is None or not action:
        return False
    if batch.rank == 0:
        said = f"step {step} was {action}" + (f": {text(record.get('outcome'), 200)}" if record.get("outcome") else "")
        batch.mark("action", step, time, said, f"journal:{at}")
    return True


def _ledger(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    check, outcome = _check(record), record.get("outcome")
    found = _stretch(batch, record)
    if not check or found is None or outcome not in OUTCOMES:
        return False
    first, last = found
    detail = record.get("detail", _NO_DETAIL)
    if not isinstance(detail, dict):
        return False
    if (
        outcome == "passed"
    ):  # who witnessed what of it changes from step to step, and nobody asks; how deep it went stays
        detail = {"level": detail["level"]} if isinstance(detail.get("level"), str) else {}
    batch.at_step(first, last)
    said = Range(first, last, outcome, text(record.get("reason")), plain(detail), batch.starts)
    batch.ledger.append((check, said))
    if outcome == "passed" and batch.rank == 0:
        batch.passed[batch.starts] = max(last, batch.passed.get(batch.starts, -1))
    return True


def _observation(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    check, step = _check(record), whole(record.get("step"))
    if not check or step is None or step > max(batch.last, 0) + _FAR:
        return False
    repeats, detail = record.get("repeats"), record.get("detail")
    batch.observations.append(
        {
            "rank": batch.rank,
            "at": at,
            "time": time,
            "check": check,
            "step": step,
            "place": text(record.get("place"), 100),
            "value": text(record.get("value"), 200),
            "repeats": plain(repeats) if isinstance(repeats, list) and repeats else None,
            "owner": whole(record.get("owner")),
            "micro": whole(record.get("micro")),
            "error": text(record.get("error")),
            "detail": plain(detail) if isinstance(detail, dict) and detail else None,
        }
    )
    batch.at_step(step, step)
    return True


def _steps(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    found, nonfinite, cost = _stretch(batch, record), whole(record.get("nonfinite", 0)), record.get("cost", {})
    if batch.rank != 0 or found is None or nonfinite is None or not isinstance(cost, dict):
        return False
    (first, last), wall = found, real(record.get("seconds")) or 0.0
    costs = {str(check): real(seconds) for check, seconds in cost.items() if check in _COSTS}
    if (wall and not _SECONDS[0] <= wall <= _SECONDS[1]) or any((one or 0.0) > _SECONDS[1] for one in costs.values()):
        return False
    count = last - first + 1
    names = ("loss", "loss_low", "loss_high", "norm", "norm_low", "norm_high")
    batch.stretches.append(
        Stretch(
            first,
            last,
            count,
            **{one: _number(record.get(one)) for one in names},
            nonfinite=min(nonfinite, count),
            seconds=wall / count if wall > 0 else None,
        )
    )
    taken = {check: seconds for check, seconds in costs.items() if seconds is not None and seconds >= 0}
    if taken and wall > 0:  # a device that tells no times says nothing of costs, and is none that costs nothing
        for check, seconds in taken.items():
            batch.costs[check] = batch.costs.get(check, 0.0) + seconds
        batch.timed += count
        batch.wall += wall
        batch.clock = text(record.get("clock"), 20)
    batch.at_step(first, last)
    return True


def _number(value: Any) -> float | None:
    found = real(value)
    return found if found is not None and abs(found) <= _NUMBER else None


def _check(record: dict[str, Any]) -> str:
    """The check of a line, "" if this version knows none of this name: anybody can write names, and each makes rows."""
    check = record.get("check")
    return check if isinstance(check, str) and check in _CHECKS else ""


def _stretch(batch: Batch, record: dict[str, Any]) -> tuple[int, int] | None:
    """First and last step of a line; None where no guard can have made them: one line must not spoil all sums."""
    first, last = whole(record.get("first")), whole(record.get("last"))
    if first is None or last is None or not 0 <= last - first < _LINE or last > max(batch.last, 0) + _FAR:
        return None
    return first, last


def _nothing(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    return True


_KINDS: dict[str, Callable[[Batch, int, str, dict[str, Any]], bool]] = {
    "start": _start,
    "resume": _resume,
    "checkpoint": _checkpoint,
    "guard_failure": _failure,
    "action": _action,
    "ledger": _ledger,
    "observation": _observation,
    "steps": _steps,
    "verdict": _nothing,  # its incident says more
}
