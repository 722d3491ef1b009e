"""The ledger of one check as a map of ranks and steps, and the same in words for those who do not see it.

Everything that is not on record is a gap, and drawn as one: the ground of the map is hatched, and only what is known is put on top.
Neighbours of a row that say the same become one piece, so that a page of thousands of cells stays small.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bitwitness.store.pages import Cell, LedgerMap
from bitwitness.web.drawing.chart import Piece
from bitwitness.web.drawing.fills import MEANINGS
from bitwitness.web.drawing.scales import Steps, Tick, grouped

_TALL, _LOW, _HIGH = 224, 4, 16
_LABEL = 13
"""Pixels that the name of a row needs."""
_LINES = 40
_GRAVEST: tuple[Cell, ...] = ("failed", "unverified", "gap", "partly", "passed")


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring ranks that say the same: where they are (pixels), how high, what they are called, their pieces. A gap is no piece."""

    y: float
    height: float
    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A stretch that has not passed, in words."""

    ranks: str
    steps: str
    cell: Cell
    why: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """A map.

    Attributes:
        check: the detector.
        height: of the map, in pixels.
        rows: from the first rank down.
        labels: numbers of ranks, and where they stand (pixels).
        shares: state -> share of the map's area, those that occur, the gravest first.
        lines: what has not passed, the gravest first.
        more: how many lines are not listed.
    """

    check: str
    height: float
    rows: tuple[Row, ...]
    labels: tuple[Tick, ...]
    shares: Mapping[Cell, float]
    lines: tuple[Line, ...]
    more: int


def ledger(one: LedgerMap, steps: Steps) -> Ledger:
    """The map of one check on the axis of its run."""
    count = max(len(one.rows), 1)
    height = min(max(_TALL // count, _LOW), _HIGH)
    rows, lines = [], []
    area: Counter[Cell] = Counter()
    for begin, end in _bands(one):
        first, last = one.rows[begin][0], one.rows[end][1]
        name = _range("rank", first, last)
        pieces = list(_pieces(one, begin, name, steps))
        for piece in pieces:
            area[piece.cell] += (piece.last - piece.first + 1) * (last - first + 1)
            if piece.cell != "passed":
                why = piece.text.partition(" – ")[2]
                lines.append(Line(name, _range("step", piece.first, piece.last), piece.cell, why))
        drawn = tuple(piece for piece in pieces if piece.cell != "gap")
        rows.append(Row(begin * height, (end - begin + 1) * height, name, drawn))
    stride = -(-_LABEL // height)
    numbers = [(index, one.rows[index][0]) for index in range(0, len(one.rows), stride)]
    labels = tuple(Tick(index * height + height / 2 + 4, grouped(rank)) for index, rank in numbers)
    whole = sum(area.values()) or 1
    shares = {cell: area[cell] / whole for cell in _GRAVEST if area[cell]}
    ordered = sorted(lines, key=lambda line: _GRAVEST.index(line.cell))
    return Ledger(
        one.check, count * height, tuple(rows), labels, shares, tuple(ordered[:_LINES]), max(0, len(ordered) - _LINES)
    )


def _bands(one: LedgerMap) -> Iterator[tuple[int, int]]:
    """Rows, first and last, that can be drawn as one: audits take all ranks at once, so that most maps are a few bands."""
    why: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for key, text in one.reasons.items():
        row, _, column = key.partition(",")
        if row.isdecimal():
            why[int(row)].append((column, text))

    def said(index: int) -> tuple[object, ...]:
        return one.cells[index] if index < len(one.cells) else (), sorted(why[index])

    begin = 0
    for index in range(1, len(one.rows) + 1):
        joined = index < len(one.rows) and one.rows[index][0] == one.rows[index - 1][1] + 1
        if not (joined and said(index) == said(begin)):
            yield begin, index - 1
            begin = index


def _pieces(one: LedgerMap, row: int, name: str, steps: Steps) -> Iterator[Piece]:
    cells = one.cells[row] if row < len(one.cells) else ()
    held: tuple[Cell, str, int, int] | None = None
    for index, (first, last) in enumerate(one.columns):
        cell: Cell = cells[index] if index < len(cells) else "gap"
        why = one.reasons.get(f"{row},{index}", "")
        if held is not None and held[:2] == (cell, why) and held[3] + 1 == first:
            held = (cell, why, held[2], last)
            continue
        if held is not None:
            yield _piece(held, name, steps)
        held = (cell, why, first, last)
    if held is not None:
        yield _piece(held, name, steps)


def _piece(held: tuple[Cell, str, int, int], name: str, steps: Steps) -> Piece:
    cell, why, first, last = held
    said = f"{name}, {_range('step', first, last)}: {cell}, {MEANINGS.get(cell, cell)}"
    return Piece(cell, steps.at(first), steps.width(first, last), first, last, said + (f" – {why}" if why else ""))


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {grouped(first)}" if first == last else f"{noun}s {grouped(first)} to {grouped(last)}"
