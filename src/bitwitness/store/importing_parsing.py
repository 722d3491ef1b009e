"""What the lines of a rank's journal say, as rows: no database and no files here.

A line that is not what its kind must be is counted and left out; one of a kind that is not known here is a newer writer's, and
no mistake. The rank is that of the file's name: a line that claims another is not believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bitwitness.runfiles.files import SCHEMA
from bitwitness.store.importing_ledger import OUTCOMES, Range
from bitwitness.store.importing_steps import Stretch
from bitwitness.store.importing_values import moment, name, plain, real, text, whole

_NO_DETAIL: dict[str, Any] = {}


@dataclass(slots=True)
class Batch:
    """What was read of one journal.

    Attributes:
        rank: whose journal it is.
        starts: how many guards had written to it, up to now.
        records, skipped: lines that were used, and that were not.
        first, last: the first and last step in it; -1 if none.
        seen: the newest time.
        ledger: check -> ranges, in order.
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
    ledger: dict[str, list[Range]] = field(default_factory=dict)
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
        self.first = first if self.first < 0 else min(self.first, first)
        self.last = max(self.last, last)
        if self.rank == 0:
            self.started_at.setdefault(self.starts, first)

    def mark(self, kind: str, step: int, time: str, said: str, origin: str, generation: int = 0) -> None:
        """Something happened."""
        row = {"kind": kind, "step": step, "time": time, "text": text(said, 500), "origin": origin}
        self.marks.append(row | {"generation": generation})


def parse(lines: Iterable[tuple[int, bytes]], rank: int, starts: int) -> Batch:
    """What the lines of a rank's journal say.

    Args:
        lines: byte at which each begins, and what is in it.
        rank: whose journal it is.
        starts: how many guards had written to it before.
    """
    batch = Batch(rank, starts)
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
    if batch.rank == 0:
        size, generation = whole(record.get("world_size")), whole(record.get("generation")) or 0
        said = "a guard was made" + (f" for {size} ranks" if size else "")
        batch.mark("start", -1, time, said, f"start:{batch.starts}", generation)
    return True


def _resume(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    step = whole(record.get("step"))
    if step is None:
        return False
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
    check, first, last = name(record.get("check")), whole(record.get("first")), whole(record.get("last"))
    outcome = record.get("outcome")
    if not check or first is None or last is None or last < first or outcome not in OUTCOMES:
        return False
    detail = record.get("detail", _NO_DETAIL)
    if not isinstance(detail, dict):
        return False
    if (
        outcome == "passed"
    ):  # who witnessed what of it changes from step to step, and nobody asks; how deep it went stays
        detail = {"level": detail["level"]} if isinstance(detail.get("level"), str) else {}
    found = Range(first, last, outcome, text(record.get("reason")), plain(detail), batch.starts)
    batch.ledger.setdefault(check, []).append(found)
    batch.at_step(first, last)
    return True


def _observation(batch: Batch, at: int, time: str, record: dict[str, Any]) -> bool:
    check, step = name(record.get("check")), whole(record.get("step"))
    if not check or step is None:
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
    first, last = whole(record.get("first")), whole(record.get("last"))
    nonfinite, cost = whole(record.get("nonfinite", 0)), record.get("cost", {})
    if (
        batch.rank != 0
        or first is None
        or last is None
        or last < first
        or nonfinite is None
        or not isinstance(cost, dict)
    ):
        return False
    count, wall = last - first + 1, real(record.get("seconds")) or 0.0
    names = ("loss", "loss_low", "loss_high", "norm", "norm_low", "norm_high")
    batch.stretches.append(
        Stretch(
            first,
            last,
            count,
            **{one: real(record.get(one)) for one in names},
            nonfinite=min(nonfinite, count),
            seconds=wall / count if wall > 0 else None,
        )
    )
    costs = {name(check): real(seconds) for check, seconds in list(cost.items())[:100]}
    taken = {check: seconds for check, seconds in costs.items() if check and seconds is not None and seconds >= 0}
    if taken and wall > 0:  # a device that tells no times says nothing of costs, and is none that costs nothing
        for check, seconds in taken.items():
            batch.costs[check] = batch.costs.get(check, 0.0) + seconds
        batch.timed += count
        batch.wall += wall
        batch.clock = text(record.get("clock"), 20)
    batch.at_step(first, last)
    return True


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
