"""The journal of a rank into the database: observations as they are, everything else where it is counted from.

All of this is written in the transaction that moves the journal's offset, and belongs to that one rank, so that importers of
two ranks, or two importers, never wait for one another's sums: those over all ranks are made afterwards (`importing_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import sqlalchemy as sa

from bitwitness.runfiles.reading import Lines
from bitwitness.store import importing_ledger, importing_steps
from bitwitness.store.database import upsert
from bitwitness.store.importing_ledger import Range, Sums, Undone, after_pruning, tally
from bitwitness.store.importing_parsing import Batch, parse
from bitwitness.store.importing_sources import Source, Take, Taken
from bitwitness.store.importing_steps import Stretch
from bitwitness.store.tables import costs, ledger, marks, observations, rank_coverage, ranks, steps

_RANGE = tuple(ledger.c[one] for one in Range.__dataclass_fields__)
_STRETCH = tuple(steps.c[one] for one in Stretch.__dataclass_fields__)
_Part = TypeVar("_Part", Range, Stretch)


def taking(run: int, rank: int) -> Take:
    """What writes the lines of this rank's journal."""

    def take(connection: sa.Connection, source: Source, lines: Lines) -> Taken:
        known = connection.execute(sa.select(ranks).where(ranks.c.run_id == run, ranks.c.rank == rank)).one_or_none()
        floor, last = (known.floor, known.last) if known is not None else (-1, -1)
        batch = parse(lines.lines, rank, source.starts, floor=floor, last=last)
        _write_rank(connection, run, batch, known)
        _write(connection, run, batch)
        return Taken(batch.records, batch.skipped, batch.starts)

    return take


def _write(connection: sa.Connection, run: int, batch: Batch) -> None:
    if batch.observations:
        connection.execute(sa.insert(observations), [{"run_id": run, **row} for row in batch.observations])
    write_ledger(connection, run, batch.rank, batch.ledger)
    if batch.marks:
        rows = [{"run_id": run, **row} for row in batch.marks]
        upsert(connection, marks, rows, keys=("run_id", "origin"), update=())
    for start, step in batch.started_at.items():
        _set_start(connection, run, start, step)
    for start, step in batch.passed.items():
        mine = sa.and_(marks.c.run_id == run, marks.c.origin == f"start:{start}", marks.c.passed < step)
        connection.execute(sa.update(marks).where(mine).values(passed=step))
    if batch.stretches:
        _write_steps(connection, run, batch.stretches)
    if batch.costs:
        _write_costs(connection, run, batch)


def forget(connection: sa.Connection, run: int, rank: int) -> None:
    """Remove all that came of a rank's journal: it was replaced by another file."""
    for table in (observations, ledger, rank_coverage, ranks):
        connection.execute(sa.delete(table).where(table.c.run_id == run, table.c.rank == rank))
    if rank == 0:
        for table in (steps, costs):
            connection.execute(sa.delete(table).where(table.c.run_id == run))
        mine = marks.c.origin.startswith("journal:") | marks.c.origin.startswith("start:")
        connection.execute(sa.delete(marks).where(marks.c.run_id == run, mine))


def _write_rank(connection: sa.Connection, run: int, batch: Batch, row: Any) -> None:
    first, seen, known, start = (
        (row.first, row.seen, row.observations, row.start) if row is not None else (-1, "", 0, "")
    )
    values = {
        "run_id": run,
        "rank": batch.rank,
        "first": batch.first if first < 0 else first if batch.first < 0 else min(first, batch.first),
        "last": batch.last,
        "seen": max(seen, batch.seen),
        "observations": known + len(batch.observations),
        "start": batch.start or start,
        "floor": batch.floor,
    }
    upsert(connection, ranks, [values])


def write_ledger(connection: sa.Connection, run: int, rank: int, said: Sequence[tuple[str, Range | Undone]]) -> None:
    """Write what was said of a rank's steps, in order; "" says it of every check."""
    if not said:
        return
    here = sa.and_(rank_coverage.c.run_id == run, rank_coverage.c.rank == rank)
    known = {row["check"]: row for row in connection.execute(sa.select(rank_coverage).where(here)).mappings()}
    for check in sorted({*known, *(check for check, _ in said)} - {""}):
        new = [one for of, one in said if of in ("", check)]
        keys = {"run_id": run, "check": check, "rank": rank}
        _write_check(connection, keys, dict(known.get(check, {})), new)


_FIELDS = tuple(Range.__dataclass_fields__)


def _write_check(
    connection: sa.Connection,
    keys: Mapping[str, Any],
    known: Mapping[str, Any],
    said: Sequence[Range | Undone],
) -> None:
    here = sa.and_(*(ledger.c[name] == value for name, value in keys.items()))
    before = Sums(*known["pruned"]) if known.get("pruned") else None
    pruned, new = after_pruning(before, said)
    now, old = _lay(connection, here, keys, new) if new else ([], [])
    counts, gone = tally(now), tally(old)
    newest = sa.select(ledger.c.last).where(here, ledger.c.outcome == "passed")
    last = connection.execute(newest.order_by(ledger.c.first.desc()).limit(1)).scalar()
    if last is None:
        last = -1 if pruned is None else pruned.passed_up_to(pruned.last)
    sums = {
        each: known.get(each, 0)
        + counts.get(each, 0)
        - gone.get(each, 0)
        + (getattr(pruned, each) - getattr(before, each) if pruned is not None else 0)
        for each in importing_ledger.OUTCOMES
    }
    values = {**keys, **sums, "last": last, "pruned": None if pruned is None else pruned.to_json()}
    if any(known.get(each) != value for each, value in values.items()):
        upsert(connection, rank_coverage, [values])


def _lay(
    connection: sa.Connection, here: sa.ColumnElement[bool], keys: Mapping[str, Any], new: Sequence[Range | Undone]
) -> tuple[list[Range], list[Range]]:
    """The ranges that new words may touch, after and before these."""
    first = min(one.first for one in new)
    # Ranges do not overlap, so of those that begin before only the last can reach as far.
    before = connection.execute(sa.select(sa.func.max(ledger.c.first)).where(here, ledger.c.first < first)).scalar()
    within = ledger.c.first >= (first if before is None else before)
    if not any(isinstance(one, Undone) for one in new):
        within &= ledger.c.first <= max(one.last for one in new if isinstance(one, Range)) + 1
    old = [Range(*row) for row in connection.execute(sa.select(*_RANGE).where(here, within).order_by(ledger.c.first))]
    now = importing_ledger.laid(old, new)
    _write_difference(
        connection, ledger, here, old, now, lambda one: {**keys, **{each: getattr(one, each) for each in _FIELDS}}
    )
    return now, old


def _write_difference(
    connection: sa.Connection,
    table: sa.Table,
    here: sa.ColumnElement[bool],
    old: Sequence[_Part],
    now: Sequence[_Part],
    row: Callable[[_Part], Mapping[str, Any]],
) -> None:
    """Make the parts that lie `here` what they are now, each known by its first step; what has stayed is not touched."""
    whole = {one.first: one for one in old}
    gone = [{"at": first} for first in whole.keys() - {one.first for one in now}]
    if gone:
        connection.execute(sa.delete(table).where(here, table.c.first == sa.bindparam("at")), gone)
    upsert(connection, table, [dict(row(one)) for one in now if whole.get(one.first) != one])


def _set_start(connection: sa.Connection, run: int, start: int, step: int) -> None:
    """A start does not say with which step it went on; what comes after it does."""
    mine = sa.and_(marks.c.run_id == run, marks.c.origin == f"start:{start}", marks.c.step < 0)
    connection.execute(sa.update(marks).where(mine).values(step=step))


def _write_steps(connection: sa.Connection, run: int, new: Sequence[Stretch]) -> None:
    here = steps.c.run_id == run
    rows, end = connection.execute(sa.select(sa.func.count(), sa.func.max(steps.c.last)).where(here)).one()
    if (end is None or new[0].first > end) and _in_order(new) and rows + len(new) <= importing_steps.MOST:
        connection.execute(sa.insert(steps), [{"run_id": run, **_row(one)} for one in new])
        return
    old = [Stretch(*row) for row in connection.execute(sa.select(*_STRETCH).where(here).order_by(steps.c.first))]
    now = importing_steps.laid(old, new)
    _write_difference(connection, steps, here, old, now, lambda one: {"run_id": run, **_row(one)})


def _row(one: Stretch) -> dict[str, Any]:
    return {each: getattr(one, each) for each in Stretch.__dataclass_fields__}


def _in_order(new: Sequence[Stretch]) -> bool:
    return all(one.last < other.first for one, other in pairwise(new))


def _write_costs(connection: sa.Connection, run: int, batch: Batch) -> None:
    here = costs.c.run_id == run
    known = {row.check: row for row in connection.execute(sa.select(costs).where(here))}
    timed = max((row.steps for row in known.values()), default=0) + batch.timed
    wall = max((row.wall for row in known.values()), default=0.0) + batch.wall
    # All are measured over the same steps: a check that is seldom made is as cheap as it is over all of them.
    rows = [
        {
            "run_id": run,
            "check": check,
            "seconds": (known[check].seconds if check in known else 0.0) + batch.costs.get(check, 0.0),
            "steps": timed,
            "wall": wall,
            "clock": batch.clock,
        }
        for check in known.keys() | batch.costs.keys()
    ]
    upsert(connection, costs, rows)
