"""Who sends to whom in which round: pure, because both the ranks that send and the judge that misses a pair must know it.

The circle method: of n players, one stays and the others turn, so that each meets each once in n - 1 rounds (n where n is odd:
somebody rests), and the pairs of a round are disjoint and run at the same time (Kirkman, 1847; any text on round-robin designs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

EVERY_PAIR = 64
"""Up to so many ranks, each sends to each. Above, each node sends to each node, and each rank to each of its own node."""

Round = tuple[tuple[int, int], ...]
"""Disjoint pairs of ranks."""


def circle(players: Sequence[int]) -> list[Round]:
    """Rounds in which each player meets each other one once."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    half = len(ring) // 2
    rounds: list[Round] = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append(tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds if len(players) > 1 else []


def rounds(nodes: Mapping[int, str]) -> list[Round]:
    """The rounds of ranks on these nodes: every pair, or in a large world every pair of nodes and those within a node.

    Args:
        nodes: the node of each rank that takes part.
    """
    if len(nodes) <= EVERY_PAIR:
        return circle(sorted(nodes))
    places: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(nodes):
        places[nodes[rank]].append(rank)
    groups = list(places.values())
    between: list[Round] = []
    for turn, meetings in enumerate(circle(range(len(groups)))):
        pairs: list[tuple[int, int]] = []
        for one, other in meetings:
            few, many = sorted((groups[one], groups[other]), key=len)
            pairs += [tuple(sorted((rank, many[(at + turn) % len(many)]))) for at, rank in enumerate(few)]  # type: ignore[misc]  # two of them
        between.append(tuple(pairs))
    within: list[list[tuple[int, int]]] = []
    for group in groups:
        for number, pairs_of_round in enumerate(circle(group)):
            if number == len(within):
                within.append([])
            within[number] += pairs_of_round
    return [*between, *(tuple(pairs) for pairs in within)]


def expected(nodes: Mapping[int, str]) -> list[tuple[int, int]]:
    """The pairs that a whole pass over these ranks looks at, in order."""
    return sorted({pair for one in rounds(nodes) for pair in one})
