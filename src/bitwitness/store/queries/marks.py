"""What happened along the steps of a run: its incidents above all, then starts and failures, then checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from bitwitness.store.pages import IncidentRow, Mark
from bitwitness.store.tables import checkpoints, marks

_MOST = 200
_TOLD = ("start", "resume", "guard_failure", "restart")


def marks_of(connection: sa.Connection, run: int, found: Sequence[IncidentRow]) -> tuple[Mark, ...]:
    """The marks of a run in order of steps, with these of its incidents; where there are very many, the newest."""
    query = (
        sa.select(marks)
        .where(marks.c.run_id == run, marks.c.kind.in_(_TOLD), marks.c.step >= 0)
        .order_by(marks.c.id.desc())
        .limit(_MOST)
    )
    happened = [Mark(row.step, row.time, row.kind, row.text) for row in connection.execute(query)]
    saved = (
        sa.select(checkpoints.c.step, checkpoints.c.saved, checkpoints.c.doubt)
        .where(checkpoints.c.run_id == run)
        .order_by(checkpoints.c.step.desc())
        .limit(_MOST)
    )
    happened += [
        Mark(row.step, row.saved, "checkpoint", f"checkpoint {row.step}{f': {row.doubt}' if row.doubt else ''}")
        for row in connection.execute(saved)
    ]
    happened += [Mark(one.step, one.time, _kind(one), one.headline, one.id) for one in found]
    return tuple(sorted(happened, key=lambda one: (one.step, one.time)))


def _kind(one: IncidentRow) -> str:
    """What it turned out to be, else its status: *unattributed* is a kind of its own."""
    return one.judgement if one.judgement in ("drill", "false alarm") else one.status
