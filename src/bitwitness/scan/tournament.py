"""Who sends to whom in which round: pure, because both the ranks that send and the judge that misses a pair must know it.

The circle method: of n players, one stays and the others turn, so that each meets each once in n - 1 rounds (n where n is odd:
somebody rests), and the pairs of a round are disjoint and run at the same time (Kirkman, 1847; any text on round-robin designs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import overload

EVERY_PAIR = 64
"""Up to so many ranks, each sends to each. Above, each node sends to each node, and each rank to each of its own node."""

Round = tuple[tuple[int, int], ...]
"""Disjoint pairs of ranks."""


def circle_round(players: Sequence[int], number: int) -> Round:
    """One of the rounds in which each player meets each other one once; there are `circle_length` of them."""
    odd = len(players) % 2
    size = len(players) + odd

    def at(place: int) -> int | None:
        if place == 0:
            return players[0]
        turned = (place - 1 - number) % (size - 1) + 1
        return players[turned] if turned < len(players) else None

    met = ((at(place), at(size - 1 - place)) for place in range(size // 2))
    return tuple((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None)


def circle_length(players: int) -> int:
    """How many rounds so many players need."""
    return players - 1 + players % 2 if players > 1 else 0


class Rounds(Sequence[Round]):
    """The rounds of ranks on these nodes, each made when it is asked for: of 10,000 ranks they are some 6 million pairs.

    Every pair of ranks, or in a large world every pair of nodes, each time by other ranks of theirs, and those within a node.
    """

    def __init__(self, nodes: Mapping[int, str]) -> None:
        """Over the ranks that take part, each with its node."""
        places: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(nodes):
            places[nodes[rank] if len(nodes) > EVERY_PAIR else ""].append(rank)
        self._groups = list(places.values())
        self._between = circle_length(len(self._groups))
        self._within = max((circle_length(len(group)) for group in self._groups), default=0)

    def __len__(self) -> int:
        return self._between + self._within

    @overload
    def __getitem__(self, number: int) -> Round: ...
    @overload
    def __getitem__(self, number: slice) -> list[Round]: ...
    def __getitem__(self, number: int | slice) -> Round | list[Round]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._far(number) if number < self._between else self._near(number - self._between)

    def _far(self, turn: int) -> Round:
        pairs: list[tuple[int, int]] = []
        for one, other in circle_round(range(len(self._groups)), turn):
            few, many = sorted((self._groups[one], self._groups[other]), key=len)
            met = ((rank, many[(at + turn) % len(many)]) for at, rank in enumerate(few))
            pairs += [(min(two), max(two)) for two in met]
        return tuple(pairs)

    def _near(self, number: int) -> Round:
        return tuple(
            pair for group in self._groups if number < circle_length(len(group)) for pair in circle_round(group, number)
        )


def rounds(nodes: Mapping[int, str]) -> Rounds:
    """The rounds of ranks on these nodes.

    Args:
        nodes: the node of each rank that takes part.
    """
    return Rounds(nodes)


def expected(nodes: Mapping[int, str]) -> list[tuple[int, int]]:
    """The pairs that a whole pass over these ranks looks at, in order."""
    return sorted({pair for one in rounds(nodes) for pair in one})
