"""How far the checks of a run got, over all ranks: what its pages call coverage, and the last step that is verified.

A step is verified only where every rank has passed it: that each of them has passed some step, however late, says nothing of any
one step. It is looked for from the last step backwards, in the ranges of those ranks alone that got further, so the cost of a round
grows with the number of ranks and not with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from bitwitness.store.database import upsert
from bitwitness.store.importing_journal import write_ledger
from bitwitness.store.importing_ledger import OUTCOMES, Sums, Undone
from bitwitness.store.tables import coverage, ledger, marks, rank_coverage, ranks

_LOOKS = 100
"""How often ranks may disagree where they last passed before it is given up: ranks that take turns would cost a look a step."""


def write_coverage(connection: sa.Connection, run: int, world_size: int) -> None:
    """Write the sums over all ranks, and up to where every one of them passed."""
    _undo_of_those_left_out(connection, run)
    made = sa.select(sa.func.coalesce(sa.func.sum(ranks.c.last - ranks.c.first + 1), 0))
    whole = int(connection.execute(made.where(ranks.c.run_id == run, ranks.c.first >= 0)).scalar_one())
    sums = sa.select(rank_coverage.c.check, *(sa.func.sum(rank_coverage.c[each]).label(each) for each in OUTCOMES))
    found = connection.execute(sums.where(rank_coverage.c.run_id == run).group_by(rank_coverage.c.check)).mappings()
    known = {
        row["check"]: row["last"]
        for row in connection.execute(sa.select(coverage).where(coverage.c.run_id == run)).mappings()
    }
    rows = [
        {
            "run_id": run,
            "check": row["check"],
            **{each: int(row[each]) for each in OUTCOMES},
            "all": whole,
            "last": verified(connection, run, row["check"], world_size, known.get(row["check"], -1)),
        }
        for row in found.all()
    ]
    gone = sa.delete(coverage).where(coverage.c.run_id == run, coverage.c.check.not_in([row["check"] for row in rows]))
    connection.execute(gone)
    upsert(connection, coverage, rows)


def verified(connection: sa.Connection, run: int, check: str, world_size: int, known: int = -1) -> int:
    """The last step that passed on every rank; -1 if none did. `known`: one that did, unless it was undone since."""
    here = sa.and_(rank_coverage.c.run_id == run, rank_coverage.c.check == check, rank_coverage.c.rank < world_size)
    least, many = connection.execute(sa.select(sa.func.min(rank_coverage.c.last), sa.func.count()).where(here)).one()
    if many < world_size or least is None:
        return -1  # a rank that never said that this check had passed has not passed it, whatever the others say
    step = int(least)
    for _ in range(_LOOKS):
        found = _passed_up_to(connection, here, step)
        if found == step:
            return step
        step = found
    # Better an older step that is right than none; and none rather than a wrong one.
    return known if -1 < known <= step and _passed_up_to(connection, here, known) == known else -1


def _passed_up_to(connection: sa.Connection, here: sa.ColumnElement[bool], step: int) -> int:
    """The least, over the ranks, of the last step that each passed not after this one; -1 if one passed none."""
    if step < 0:
        return -1
    newest = (
        sa.select(ledger.c.last)
        .where(
            ledger.c.run_id == rank_coverage.c.run_id,
            ledger.c.check == rank_coverage.c.check,
            ledger.c.rank == rank_coverage.c.rank,
            ledger.c.first <= step,
            ledger.c.outcome == "passed",
        )
        .order_by(ledger.c.first.desc())
        .limit(1)
        .scalar_subquery()
    )
    further = sa.select(newest.label("newest"), rank_coverage.c.pruned).where(here, rank_coverage.c.last > step)
    found = step
    for row in connection.execute(further):
        last = -1 if row.newest is None else min(row.newest, step)
        if row.newest is None and row.pruned:
            last = Sums(*row.pruned).passed_up_to(step)
        found = min(found, last)
        if found < 0:
            return -1
    return found


def _undo_of_those_left_out(connection: sa.Connection, run: int) -> None:
    """What ranks did that a restart has left out was thrown away like that of the others, though they write no word of it."""
    starts = _starts(connection, run)
    if len(starts) < 2 or not all(name for name, _ in starts):
        return
    settled = max((number for number, (_, step) in enumerate(starts) if step >= 0), default=-1)
    newest = [name for name, _ in starts[settled:]]
    chosen = sa.select(ranks.c.rank, ranks.c.start).where(ranks.c.run_id == run, ranks.c.start.not_in(newest))
    places = {name: number for number, (name, _) in enumerate(starts)}
    for rank, name in connection.execute(chosen).all():
        if name not in places:
            continue
        step = min(step for _, step in starts[places[name] + 1 : settled + 1] if step >= 0)
        write_ledger(connection, run, rank, [("", Undone(step))])
        mine = sa.and_(ranks.c.run_id == run, ranks.c.rank == rank)
        connection.execute(sa.update(ranks).where(mine).values(start=starts[settled][0]))


def _starts(connection: sa.Connection, run: int) -> Sequence[tuple[str, int]]:
    """The starts of the job by the journal of rank 0, in its order: their names, and with which step each went on."""
    chosen = sa.select(marks.c.origin, marks.c.start, marks.c.step).where(
        marks.c.run_id == run, marks.c.kind == "start"
    )
    found: list[Any] = sorted(connection.execute(chosen), key=lambda row: int(row.origin.partition(":")[2]))
    return [(row.start, row.step) for row in found]
