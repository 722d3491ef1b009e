"""The ledger of one check as a map of ranks and steps, and the same in words for those who do not see it.

Everything that is not on record is a gap, and drawn as one: the ground of the map is hatched, and only what is known is put on top.
Neighbours of a row that say the same become one piece, so that a page of thousands of cells stays small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bitwitness.store.pages import Cell, LedgerMap
from bitwitness.web.drawing.chart import Piece
from bitwitness.web.drawing.fills import MEANINGS
from bitwitness.web.drawing.scales import Steps, grouped

_TALL, _LOW, _HIGH = 224, 4, 16
_LABEL = 13
"""Pixels that the name of a row needs."""
_LINES = 40
_GRAVEST: tuple[Cell, ...] = ("failed", "unverified", "gap", "partly", "passed")


@dataclass(frozen=True, slots=True)
class Row:
    """Ranks of one row: where it is (pixels), how high, what it is called, and its pieces. A gap is the ground, no piece."""

    y: float
    height: float
    name: str
    label: str
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
        shares: state -> share of the map's area, those that occur, the gravest first.
        lines: what has not passed, the gravest first.
        more: how many lines are not listed.
    """

    check: str
    height: float
    rows: tuple[Row, ...]
    shares: Mapping[Cell, float]
    lines: tuple[Line, ...]
    more: int


def ledger(one: LedgerMap, steps: Steps) -> Ledger:
    """The map of one check on the axis of its run."""
    count = max(len(one.rows), 1)
    height = min(max(_TALL // count, _LOW), _HIGH)
    rows, lines = [], []
    area: Counter[Cell] = Counter()
    stride = -(-_LABEL // height)
    for index, (first, last) in enumerate(one.rows):
        name = _range("rank", first, last)
        pieces = list(_pieces(one, index, steps))
        for piece in pieces:
            area[piece.cell] += (piece.last - piece.first + 1) * (last - first + 1)
            if piece.cell != "passed":
                why = piece.text.partition(" – ")[2]
                lines.append(Line(name, _range("step", piece.first, piece.last), piece.cell, why))
        drawn = tuple(piece for piece in pieces if piece.cell != "gap")
        label = grouped(first) if index % stride == 0 else ""
        rows.append(Row(index * height, height, name, label, drawn))
    whole = sum(area.values()) or 1
    shares = {cell: area[cell] / whole for cell in _GRAVEST if area[cell]}
    ordered = sorted(lines, key=lambda line: _GRAVEST.index(line.cell))
    return Ledger(
        one.check, count * height, tuple(rows), shares, tuple(ordered[:_LINES]), max(0, len(ordered) - _LINES)
    )


def _pieces(one: LedgerMap, row: int, steps: Steps) -> Iterator[Piece]:
    cells = one.cells[row] if row < len(one.cells) else ()
    held: tuple[Cell, str, int, int] | None = None
    for index, (first, last) in enumerate(one.columns):
        cell: Cell = cells[index] if index < len(cells) else "gap"
        why = one.reasons.get(f"{row},{index}", "")
        if held is not None and held[:2] == (cell, why) and held[3] + 1 == first:
            held = (cell, why, held[2], last)
            continue
        if held is not None:
            yield _piece(held, one, row, steps)
        held = (cell, why, first, last)
    if held is not None:
        yield _piece(held, one, row, steps)


def _piece(held: tuple[Cell, str, int, int], one: LedgerMap, row: int, steps: Steps) -> Piece:
    cell, why, first, last = held
    said = f"{_range('rank', *one.rows[row])}, {_range('step', first, last)}: {cell}, {MEANINGS.get(cell, cell)}"
    return Piece(cell, steps.at(first), steps.width(first, last), first, last, said + (f" – {why}" if why else ""))


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {grouped(first)}" if first == last else f"{noun}s {grouped(first)} to {grouped(last)}"
