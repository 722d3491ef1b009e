"""Removing what nobody will ask for again: raw observations and the ledger's ranges of runs that ended long ago.

What a page shows at a glance stays: incidents, who was named, coverage, costs, the chart, what was done by whom. What is removed
can be imported again only as long as the run's own files are there, and then only into another database: this one knows that
it has read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from bitwitness.errors import ConfigurationError
from bitwitness.store.database import Database, changed, upsert
from bitwitness.store.importing_ledger import Sums
from bitwitness.store.importing_values import stamp
from bitwitness.store.tables import coverage, evidence, incidents, ledger, observations, rank_coverage, runs


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed: runs that lost raw records, how many of these, and incidents that lost what they were decided from."""

    runs: int
    observations: int
    ranges: int
    incidents: int


def prune(
    database: Database,
    *,
    keep: timedelta,
    evidence_keep: timedelta | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    dry_run: bool = False,
) -> Pruned:
    """Remove raw observations and the ledger's ranges of runs of which nothing was heard for longer than `keep`.

    A run that was silent for so long may go on: of the steps that it then makes again only as many count as are known to have passed
    before, so its coverage is never more than what is true (`importing_ledger.Sums`).

    Args:
        database: where.
        keep: for how long raw records stay after the end of their run.
        evidence_keep: for how long an incident that is settled (judged, or acted upon by a person) keeps the observations that it
            was decided from; None: forever. An open incident always keeps them.
        clock: the time.
        dry_run: remove nothing, and say what would be.

    Raises:
        ConfigurationError: a length of time is negative.
        StoreError: the database fails; every run is pruned wholly or not at all.
    """
    if keep < timedelta(0) or (evidence_keep or keep) < timedelta(0):
        raise ConfigurationError("raw records cannot be kept for less than no time")
    now = clock()
    total = Pruned(0, 0, 0, 0)
    for run in _old_runs(database, _before(now, keep)):
        seen, ranges = _prune_run(database, run, stamp(now), dry_run)
        total = Pruned(total.runs + 1, total.observations + seen, total.ranges + ranges, 0)
    settled = 0
    if evidence_keep is not None:
        settled = _prune_evidence(database, _before(now, evidence_keep), dry_run)
    return Pruned(total.runs, total.observations, total.ranges, settled)


def shrink(database: Database) -> None:
    """Give back to the disk what was removed: PostgreSQL does so by itself, SQLite writes its file anew and needs its size once more.

    Raises:
        StoreError: somebody else is writing, or there is no room.
    """
    if database.dialect == "sqlite":
        database.rewrite()


def _before(now: datetime, keep: timedelta) -> str:
    try:
        return stamp(now - keep)
    except OverflowError:
        return ""


def _old_runs(database: Database, before: str) -> list[int]:
    """Runs that were last heard of before, by their own files and by what importers saw, and that still have raw records."""
    over = sa.and_(runs.c.seen != "", runs.c.seen < before, runs.c.grew < before)
    has = sa.or_(sa.exists().where(observations.c.run_id == runs.c.id), sa.exists().where(ledger.c.run_id == runs.c.id))
    with database.read() as connection:
        return list(connection.execute(sa.select(runs.c.id).where(over, has).order_by(runs.c.id)).scalars())


def _prune_run(database: Database, run: int, now: str, dry_run: bool) -> tuple[int, int]:
    if dry_run:
        with database.read() as connection:
            counts = [
                connection.execute(sa.select(sa.func.count()).where(table.c.run_id == run)).scalar_one()
                for table in (observations, ledger)
            ]
        return counts[0], counts[1]

    def remove(connection: sa.Connection) -> tuple[int, int]:
        _keep_sums(connection, run)
        seen = connection.execute(sa.delete(observations).where(observations.c.run_id == run)).rowcount
        ranges = connection.execute(sa.delete(ledger).where(ledger.c.run_id == run)).rowcount
        connection.execute(sa.update(runs).where(runs.c.id == run).values(pruned=now))
        changed(connection)
        return seen, ranges

    return database.change(remove)


def _keep_sums(connection: sa.Connection, run: int) -> None:
    """Note of what steps the sums of each rank are: they may be made again."""
    world_size = connection.execute(sa.select(runs.c.world_size).where(runs.c.id == run)).scalar_one()
    here = ledger.c.run_id == run
    ends = sa.select(
        ledger.c.check, ledger.c.rank, sa.func.max(ledger.c.last).label("last"), sa.func.max(ledger.c.start)
    )
    by_rank = {
        (check, rank): (last, start)
        for check, rank, last, start in connection.execute(ends.where(here).group_by(ledger.c.check, ledger.c.rank))
    }
    common = sa.select(coverage.c.check, coverage.c.last).where(coverage.c.run_id == run)
    verified = {row._mapping["check"]: row.last for row in connection.execute(common)}
    rows = []
    for row in connection.execute(sa.select(rank_coverage).where(rank_coverage.c.run_id == run)).mappings():
        check = row["check"]
        last, start = by_rank.get((check, row["rank"]), (-1, 0))
        if last < 0:
            continue
        if row["pruned"]:
            last = max(last, Sums(*row["pruned"]).last)
        sums = (row["passed"], row["unverified"], row["failed"])
        common_step = verified.get(check, -1) if row["rank"] < world_size else -1
        kept = Sums(last, start, common_step if common_step <= last else -1, *sums)
        rows.append({**row, "pruned": kept.to_json()})
    upsert(connection, rank_coverage, rows)


def _prune_evidence(database: Database, before: str, dry_run: bool) -> int:
    settled = sa.or_(incidents.c.judgement != "", incidents.c.acted)
    old = sa.select(incidents.c.id).where(
        settled, ~incidents.c.pruned, incidents.c.time != "", incidents.c.time < before
    )

    def remove(connection: sa.Connection) -> int:
        keys = list(connection.execute(old).scalars())
        if keys and not dry_run:
            for at in range(0, len(keys), 500):
                some = keys[at : at + 500]
                connection.execute(sa.delete(evidence).where(evidence.c.incident_id.in_(some)))
                connection.execute(sa.update(incidents).where(incidents.c.id.in_(some)).values(pruned=True))
            changed(connection)
        return len(keys)

    return database.change(remove)
