"""Which pairs of ranks nobody looked at: counted, not listed, for 10,000 ranks make some 6 million pairs even sampled by node.

Beside `tournament`, which says who should have met whom: in a small world each rank each other, in a large one each node each other
node and each rank those of its own node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwitness.scan.gathering import Gathering
from bitwitness.scan.received import Pair
from bitwitness.scan.tournament import EVERY_PAIR


@dataclass(frozen=True, slots=True)
class Missing:
    """What was not looked at.

    Attributes:
        first: a pair of it; None where everything was.
        what: how much it is, in words.
        count: of pairs, of ranks or of nodes.
        absent: ranks that were looked at with nobody.
        ranks: those with any of it.
        sampled: whether one pair of two nodes' ranks stands for all of them.
    """

    first: Pair | None
    what: str
    count: int
    absent: tuple[int, ...]
    ranks: frozenset[int]
    sampled: bool


def missing(found: Gathering) -> Missing:
    """What should have been looked at and was not."""
    everybody = sorted(found.nodes)
    if len(everybody) <= EVERY_PAIR:
        first, count, ranks = _within([everybody], found)
        return Missing(first, f"{count} pairs of ranks", count, _absent(found), frozenset(ranks), False)
    by_node = found.ranks_by_node()
    nodes = sorted(by_node)
    first, within, ranks = _within([by_node[node] for node in nodes], found)
    far = [node for node in nodes if len(found.neighbours(node)) < len(nodes) - 1]
    between = (len(nodes) * (len(nodes) - 1) - sum(len(found.neighbours(node)) for node in nodes)) // 2
    ranks |= {rank for node in far for rank in by_node[node]} | set(_absent(found))
    if far:
        other = next(node for node in nodes if node != far[0] and node not in found.neighbours(far[0]))
        first = first or _pair(by_node[far[0]][0], by_node[other][0])
    elif first is None and ranks:
        first = _pair(min(ranks), next(rank for rank in everybody if rank != min(ranks)))
    what = f"{between} pairs of nodes and {within} pairs of ranks within a node"
    return Missing(first, what, between + within, _absent(found), frozenset(ranks), True)


def _within(places: Sequence[Sequence[int]], found: Gathering) -> tuple[Pair | None, int, set[int]]:
    """Of places in which each should have met each: a pair that did not, of the rank that misses most; how many; and whose."""
    short: dict[int, int] = {}
    worst: tuple[int, Sequence[int]] | None = None
    for place in places:
        here = set(place)
        for rank in place:
            if gap := len(place) - 1 - sum(peer in here for peer in found.peers.get(rank, ())):
                short[rank] = gap
                if worst is None or gap > short[worst[0]]:
                    worst = rank, place
    if worst is None:
        return None, 0, set()
    rank, place = worst
    met = found.peers.get(rank, {})
    return _pair(rank, next(one for one in place if one != rank and one not in met)), sum(short.values()) // 2, {*short}


def _absent(found: Gathering) -> tuple[int, ...]:
    return tuple(rank for rank in sorted(found.nodes) if rank not in found.peers) if len(found.nodes) > 1 else ()


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)
