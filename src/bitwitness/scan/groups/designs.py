"""Groups that are fixed before a test has ended: few rounds, where halving takes few tests.

*pairs*: the round-robin of a tournament, so each node meets another partner in each round; with all rounds every link is tried.
*grid*: the rows of a square, then its columns: a bad node is where a row and a column failed.
What they leave open, the planner searches as ever.
"""

from __future__ import annotations

import math
from typing import Literal

from bitwitness.scan.groups.model import mask

Design = Literal["halving", "pairs", "grid"]
DESIGNS: tuple[Design, ...] = ("halving", "pairs", "grid")

_ALL_PAIRS_UP_TO = 16
_PAIR_ROUNDS = 3


def first_rounds(design: Design, size: int) -> list[list[int]]:
    """The rounds that a design begins with, each a list of groups without a node in common."""
    if design == "pairs" and size > 2:
        return _pairs(size)
    if design == "grid" and size > 3:
        return _grid(size)
    return []


def _pairs(size: int) -> list[list[int]]:
    """The circle method: one place stands still, the others turn; of an odd number one rests in each round."""
    places = size + size % 2
    rounds = places - 1 if size <= _ALL_PAIRS_UP_TO else _PAIR_ROUNDS
    table = []
    for turn in range(rounds):
        circle = [places - 1, *((turn + i) % (places - 1) for i in range(places - 1))]
        pairs = [(circle[i], circle[places - 1 - i]) for i in range(places // 2)]
        table.append([mask(pair) for pair in pairs if max(pair) < size])
    return table


def _grid(size: int) -> list[list[int]]:
    side = math.ceil(math.sqrt(size))
    rows = [mask(range(start, min(size, start + side))) for start in range(0, size, side)]
    columns = [mask(range(column, size, side)) for column in range(side)]
    return [rows, columns]
