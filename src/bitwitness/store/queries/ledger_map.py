"""The ledger as a map that can be drawn, thinned without ever rounding a gap away.

The database adds up the ranges by the cells in which they begin and end, so what comes back does not grow with the length of
the run. Ranges of one rank and check never overlap, so the sums are counts of rank-steps: a cell that lacks a single one of
those that were made is not `passed`.

A step that had failed and was made again after a restart stands in the ledger as it went the last time. On the map it stays
failed, by its incident: what was found is not hidden by what came after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from bitwitness.store.pages import Cell, LedgerMap
from bitwitness.store.queries.rows import in_order
from bitwitness.store.tables import incident_ranks, incidents, ledger

ROWS, COLUMNS = 64, 160
_REASONS = 2_000
"""Cells of a map that say why; failed ones first."""
_LONGEST = 300
_AT_ONCE = 2_000_000
"""Rank-steps that are added up by one statement, which sees at most as many ranges."""
_CHECKS = 32
"""Maps of a run at most: anybody can write the name of a check into a journal."""
_FOUND = 10_000
"""Ranks of incidents that are shown on a map; the newest."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Which cells there are.

    Attributes:
        ranks: how many, from 0.
        first, last: steps that were made; none if `last` is less.
        height, width: ranks of a row, steps of a column.
    """

    ranks: int
    first: int
    last: int
    height: int
    width: int

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """First and last rank of each row."""
        return _spans(0, self.ranks - 1, self.height)

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """First and last step of each column."""
        return _spans(self.first, self.last, self.width)


def grid(ranks: int, first: int, last: int) -> Grid:
    """The finest that can be drawn."""
    return Grid(ranks, first, last, max(1, -(-ranks // ROWS)), max(1, -(-(last - first + 1) // COLUMNS)))


def _spans(first: int, last: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + size - 1, last)) for start in range(first, last + 1, size))


@dataclass(slots=True)
class _Tally:
    """Rank-steps of the cells of one check, by row and column."""

    steps: dict[str, dict[tuple[int, int], int]] = field(
        default_factory=lambda: {outcome: defaultdict(int) for outcome in ("passed", "unverified", "failed")}
    )
    reasons: dict[tuple[int, int], tuple[bool, str]] = field(default_factory=dict)

    def explain(self, outcome: str, reason: str, at: tuple[int, int]) -> None:
        """Why a cell is not passed; that it failed comes before that nobody could tell."""
        kept = self.reasons.get(at)
        if kept is None or (outcome == "failed" and not kept[0]):
            self.reasons[at] = (outcome == "failed", reason)

    def found(self, at: tuple[int, int], one: Any) -> None:
        """An incident on a rank: what the ledger says of it now, it says of the same step made again."""
        again = not self.steps["failed"].get(at)
        self.steps["failed"][at] += 1
        if again or at not in self.reasons:
            made = ", and was made again since" if again else ""
            called = f", called a {one.judgement}" if one.judgement in ("drill", "false alarm") else ""
            self.reasons[at] = (True, f"incident {one.incident}{called}: {one.headline}{made}"[:_LONGEST])


def ledger_maps(connection: sa.Connection, run: int, cells: Grid, wanted: Sequence[str] = ()) -> tuple[LedgerMap, ...]:
    """The ledger of a run, a map a check; of checks that are `wanted` and have no record, one that is nothing but gaps."""
    if cells.ranks <= 0 or cells.last < cells.first:
        return ()
    tallies: dict[str, _Tally] = defaultdict(_Tally, {check: _Tally() for check in wanted})
    for check, row, start, stop, outcome, ranges, begins, ends, reason in _sums(connection, run, cells):
        tally = tallies[check]
        steps = tally.steps.get(outcome)
        if steps is None:
            continue
        for column, many in _by_column(start, stop, ranges, int(begins), int(ends), cells.width):
            steps[row, column] += many
            if reason and outcome != "passed":
                tally.explain(outcome, reason, (row, column))
    for one in connection.execute(_found(run, cells)):
        column = (one.step - cells.first) // cells.width
        tallies[one._mapping["check"]].found((one.rank // cells.height, column), one)
    return tuple(in_order({check: _map(check, tally, cells) for check, tally in tallies.items()}))


def _sums(connection: sa.Connection, run: int, cells: Grid) -> Iterator[Any]:
    """The ranges of a run, added up; of some ranks at a time, because a database sorts in memory what it adds up."""
    many = max(1, _AT_ONCE // (cells.last - cells.first + 1) // cells.height) * cells.height
    for check in _checks(connection, run):
        for low in range(0, cells.ranks, many):
            yield from connection.execute(_sum(run, check, cells, low, min(low + many, cells.ranks) - 1))


def _checks(connection: sa.Connection, run: int) -> Iterator[str]:
    """Checks in the ledger of a run, each found by one look into the index, however many ranges there are."""
    after = sa.select(sa.func.min(ledger.c.check)).where(ledger.c.run_id == run)
    check = connection.scalar(after)
    for _ in range(_CHECKS):
        if check is None:
            return
        yield check
        check = connection.scalar(after.where(ledger.c.check > check))


def _sum(run: int, check: str, cells: Grid, low: int, high: int) -> sa.Select[Any]:
    """By row, by the columns in which they begin and end, and by outcome."""
    begins, ends = ledger.c.first - cells.first, ledger.c.last - cells.first
    last = sa.case((ends > cells.last - cells.first, cells.last - cells.first), else_=ends)
    each = (
        sa.select(
            ledger.c.check,
            (ledger.c.rank // cells.height).label("row"),
            (begins // cells.width).label("start"),
            (last // cells.width).label("stop"),
            ledger.c.outcome,
            begins.label("begins"),
            last.label("ends"),
            sa.func.substr(ledger.c.reason, 1, _LONGEST).label("reason"),
        )
        .where(
            ledger.c.run_id == run,
            ledger.c.check == check,
            ledger.c.rank.between(low, high),
            ledger.c.last >= cells.first,
            ledger.c.first <= cells.last,
        )
        .subquery()
    )
    keys = (each.c.check, each.c.row, each.c.start, each.c.stop, each.c.outcome)
    return sa.select(
        *keys,
        sa.func.count().label("ranges"),
        sa.func.sum(each.c.begins).label("begins"),
        sa.func.sum(each.c.ends).label("ends"),
        sa.func.max(each.c.reason).label("reason"),
    ).group_by(*keys)


def _found(run: int, cells: Grid) -> sa.Select[Any]:
    """Whom incidents name, or involve where they name nobody: the ranks whose check had failed."""
    role = sa.case((incidents.c.status == "attributed", "named"), else_="candidate")
    return (
        sa.select(
            incidents.c.check,
            incidents.c.step,
            incidents.c.name.label("incident"),
            incidents.c.headline,
            incidents.c.judgement,
            incident_ranks.c.rank,
        )
        .join(incidents, incidents.c.id == incident_ranks.c.incident_id)
        .where(
            incidents.c.run_id == run,
            incidents.c.check != "",
            incidents.c.step.between(cells.first, cells.last),
            incident_ranks.c.role == role,
            incident_ranks.c.rank < cells.ranks,
        )
        .order_by(incidents.c.id.desc(), incident_ranks.c.rank)
        .limit(_FOUND)
    )


def _by_column(start: int, stop: int, ranges: int, begins: int, ends: int, width: int) -> Sequence[tuple[int, int]]:
    """How many rank-steps of a group of ranges are in each column: part of its first and last, all of those between.

    They begin and end in the columns `start` and `stop`; `begins` and `ends` are their first and last steps, added up.
    """
    if start == stop:
        return ((start, ends - begins + ranges),)
    between = [(column, ranges * width) for column in range(start + 1, stop)]
    head = (start, ranges * (start + 1) * width - begins)
    return [head, *between, (stop, ends - ranges * stop * width + ranges)]


def _map(check: str, tally: _Tally, cells: Grid) -> LedgerMap:
    rows, columns = cells.rows, cells.columns
    widths = [last - first + 1 for first, last in columns]
    drawn = tuple(_row(tally.steps, row, high - low + 1, widths) for row, (low, high) in enumerate(rows))
    said = sorted(tally.reasons.items(), key=lambda one: (not one[1][0], one[0]))[:_REASONS]
    return LedgerMap(check, rows, columns, drawn, {f"{row},{column}": text for (row, column), (_, text) in said})


def _row(
    steps: Mapping[str, Mapping[tuple[int, int], int]], row: int, height: int, widths: Sequence[int]
) -> tuple[Cell, ...]:
    """Cells are `passed` only if every rank-step that was made is; failed wins over everything."""
    passed, unverified, failed = steps["passed"].get, steps["unverified"].get, steps["failed"].get
    cells: list[Cell] = []
    for column, width in enumerate(widths):
        at = (row, column)
        many = passed(at, 0)
        if failed(at):
            cells.append("failed")
        elif many >= height * width:
            cells.append("passed")
        elif many:
            cells.append("partly")
        else:
            cells.append("unverified" if unverified(at) else "gap")
    return tuple(cells)
