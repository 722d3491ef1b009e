"""Where wrong transfers gather: at a rank, a pair of ranks, the path between two nodes, or a node. Numbers only, no words.

Apart from `linking`, which makes results of it, because the question is the same at each level and the answer must be given at the
right one: what is spread over several ranks of a node is nothing of one of them, and what is spread over several pairs of two nodes'
ranks is nothing of one pair. So a place is accused only where what is wrong gathers there beyond chance among *all* places of its
kind, at each of its ends, and within what it is a part of, of which it must have more than half as well, and what is left there
must not gather: a race need not strike all ranks of its node alike.

Everything is counted once and looked up, for a large world has some 100,000 pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from bitwitness.runfiles.answers import Device
from bitwitness.scan.chance import CHANCE, gathers, tail
from bitwitness.scan.received import Pair, Received

AHEAD = 5
"""So many times as often as the others of its node must a rank be wrong, or a pair of ranks as the others of its two nodes: what
strikes several of them unlike is something that they share."""

Nodes = tuple[str, str]
"""In order; twice the same for what its own ranks send each other."""


@dataclass(slots=True)
class Count:
    """Transfers looked at in one place, and how many of them were wrong."""

    looked_at: int = 0
    wrong: int = 0

    def add(self, looked_at: int, wrong: int) -> None:
        """So much more was in this place."""
        self.looked_at += looked_at
        self.wrong += wrong

    def __sub__(self, other: Count) -> Count:
        return Count(self.looked_at - other.looked_at, self.wrong - other.wrong)

    def gathers(self, among: Count, places: int) -> bool:
        """Whether so many wrong ones of all these lie here beyond chance."""
        return gathers(self.wrong, self.looked_at, among.wrong, among.looked_at, places)


class Gathering:
    """Over all pairs of one scan.

    Attributes:
        nodes: of each rank.
        pairs: in which anything was looked at.
        all: of them together.
        peers: of each rank, those it was looked at with.
        paths: by pair of nodes.
        pairs_of: likewise, those of their ranks that were looked at.
        bad_pairs: those with anything wrong, in order.
        failed: ranks whose device or network card fails, each with two peers that are right among themselves.
        bad_paths: between which nodes what fails is the path, each with a node that both are right with.
        candidates: nodes of which that can be said and no more, each with how many of its ranks were in anything wrong.
    """

    def __init__(self, devices: Sequence[Device], seen: Received) -> None:
        self.nodes: dict[int, str] = {device.rank: device.node for device in devices}
        self.pairs: dict[Pair, Count] = {}
        self.all = Count()
        self.peers: dict[int, dict[int, Count]] = defaultdict(dict)
        self.paths: dict[Nodes, Count] = defaultdict(Count)
        self.pairs_of: dict[Nodes, list[Pair]] = defaultdict(list)
        self._of_rank: dict[int, Count] = defaultdict(Count)
        self._outward: dict[int, Count] = defaultdict(Count)
        self._node: dict[str, Count] = defaultdict(Count)
        self._node_outward: dict[str, Count] = defaultdict(Count)
        self._neighbours: dict[str, set[str]] = defaultdict(set)
        self._ranks: dict[str, list[int]] = defaultdict(list)
        for pair, (looked_at, wrong) in seen.pairs().items():
            self._count(pair, looked_at, wrong)
        self._sum_up()
        self.bad_pairs = [pair for pair, count in self.pairs.items() if count.wrong]
        self._right: dict[int, set[int]] = {}
        self.failed = {rank: two for rank in sorted(self.peers) if (two := self._rank_fails(rank))}
        bad = {self.path_of(pair): None for pair in self.bad_pairs}
        self._bad_of: dict[str, list[Pair]] = defaultdict(list)
        for pair in self.bad_pairs:
            for node in {*self.path_of(pair)}:
                self._bad_of[node].append(pair)
        self._failed_pairs = {pair: who for pair in self.bad_pairs if (who := self._pair_fails(pair)) is not None}
        self.bad_paths = {nodes: who for nodes in bad if (who := self._path_fails(nodes)) is not None}
        self.candidates = {node: many for node in sorted(self._node) if (many := self._candidate(node))}

    def _count(self, pair: Pair, looked_at: int, wrong: int) -> None:
        """Only what `_sum_up` cannot sum up afterwards, for there may be a million pairs."""
        one, other = pair
        count = self.pairs[pair] = Count(looked_at, wrong)
        self.peers[one][other] = self.peers[other][one] = count
        nodes = self.path_of(pair)
        self.pairs_of[nodes].append(pair)
        self.paths[nodes].add(looked_at, wrong)
        for rank in pair:
            self._of_rank[rank].add(looked_at, wrong)
            if nodes[0] != nodes[1]:
                self._outward[rank].add(looked_at, wrong)

    def _sum_up(self) -> None:
        for nodes, path in self.paths.items():
            self.all.add(path.looked_at, path.wrong)
            for node in {*nodes}:
                self._node[node].add(path.looked_at, path.wrong)
            if nodes[0] != nodes[1]:
                for node, other in (nodes, nodes[::-1]):
                    self._node_outward[node].add(path.looked_at, path.wrong)
                    self._neighbours[node].add(other)
        for rank in sorted(self._outward):
            self._ranks[self.nodes[rank]].append(rank)

    def path_of(self, pair: Pair) -> Nodes:
        """The nodes of a pair."""
        one, other = self.nodes[pair[0]], self.nodes[pair[1]]
        return (one, other) if one <= other else (other, one)

    def neighbours(self, node: str) -> set[str]:
        """The other nodes that a node was looked at with."""
        return self._neighbours[node]

    def outward(self, rank: int) -> Count:
        """What a rank had with other nodes."""
        return self._outward[rank]

    def of_node(self, node: str) -> Count:
        """What the ranks of a node had with all others and with each other."""
        return self._node[node]

    def pair_fails(self, pair: Pair) -> str | None:
        """Who both its ends are right with, where the pair fails; None where it does not."""
        return self._failed_pairs.get(pair)

    # A rank ----------------------------------------------------------------------------------------------------------

    def _rank_fails(self, rank: int) -> Pair | None:
        """Two of its peers that are right among themselves, where its device or its network card fails."""
        own = self.nodes[rank]
        others = {peer: count for peer, count in self.peers[rank].items() if self.nodes[peer] != own}
        bad = sorted(peer for peer, count in others.items() if count.wrong)
        if len({self.nodes[peer] for peer in bad}) < 2 or 2 * len(bad) <= len(others):
            return None
        if not self._most_within_node(rank) or not self._gathers_without_worst(rank) or not self._alike(others):
            return None
        return self._right_among(rank, bad)

    def _most_within_node(self, rank: int) -> bool:
        """Whether it is this rank rather than its node: what the node has wrong with others is mostly its own, beyond chance."""
        own, mine = self.nodes[rank], self._outward[rank]
        others = self._node[own] - self._of_rank[rank], self.all - self._of_rank[rank]
        return self._mostly(mine, self._node_outward[own], len(self._ranks[own]), others, len(self._node))

    def _mostly(self, part: Count, whole: Count, parts: int, others: tuple[Count, Count], wholes: int) -> bool:
        """Whether what is wrong with a whole is of this part: beyond chance, far more often than in the rest of it, and the rest
        (the first of the others) is as right as all else is.
        """
        if parts < 2:
            return True
        rest = others[0]
        ahead = part.wrong * rest.looked_at >= AHEAD * rest.wrong * part.looked_at
        return (
            ahead
            and 2 * part.wrong > whole.wrong
            and part.gathers(whole, parts)
            and not rest.gathers(others[1], wholes)
        )

    def _gathers_without_worst(self, rank: int) -> bool:
        """Whether so many do not meet at this rank by chance, also without those with the node that it is worst with."""
        mine, ranks = self._of_rank[rank], len(self.nodes)
        if not mine.gathers(self.all, ranks):
            return False
        by_node: dict[str, Count] = defaultdict(Count)
        for peer, count in self.peers[rank].items():
            if self.nodes[peer] != self.nodes[rank]:
                by_node[self.nodes[peer]].add(count.looked_at, count.wrong)
        worst = max(by_node.values(), key=lambda count: count.wrong)
        return (mine - worst).gathers(self.all - worst, ranks)

    def _alike(self, others: Mapping[int, Count]) -> bool:
        """Whether none of these peers, and no node of theirs, is right too often for a rank that is wrong with all alike."""
        wrong, looked_at = (sum(one) for one in zip(*((c.wrong, c.looked_at) for c in others.values()), strict=True))
        by_node: dict[str, Count] = defaultdict(Count)
        for peer, count in others.items():
            by_node[self.nodes[peer]].add(count.looked_at, count.wrong)
        return all(
            len(places) * tail(wrong, wrong - one.wrong, 1 - one.looked_at / looked_at) > CHANCE
            for places in (list(others.values()), list(by_node.values()))
            for one in places
        )

    def _right_among(self, rank: int, bad: Sequence[int]) -> Pair | None:
        """Two of these peers on different nodes that are right with each other; where they did not meet, which is how it is in a
        large world, that are right with somebody while their nodes are with each other.
        """
        for a, b in combinations(bad, 2):
            nodes = self.path_of((a, b))
            if nodes[0] == nodes[1]:
                continue
            met = self.peers[a].get(b)
            if met is not None:
                if not met.wrong:
                    return a, b
            elif self._is_right(nodes) and all(self._right_with(end) - {rank} for end in (a, b)):
                return a, b
        return None

    def _is_right(self, nodes: Nodes) -> bool:
        path = self.paths.get(nodes)
        return path is not None and path.looked_at > 0 and not path.wrong

    def _right_with(self, rank: int) -> set[int]:
        found = self._right.get(rank)
        if found is None:
            found = self._right[rank] = {peer for peer, count in self.peers[rank].items() if not count.wrong}
        return found

    # A pair of ranks -------------------------------------------------------------------------------------------------

    def _pair_fails(self, pair: Pair) -> str | None:
        if self.failed.keys() & set(pair):
            return None
        count, path = self.pairs[pair], self.paths[self.path_of(pair)]
        if not count.gathers(self.all, len(self.pairs)):
            return None
        # Were it wrong with all peers of one end alike, so much would not have gathered on one.
        if not all(count.gathers(self._of_rank[end], len(self.peers[end])) for end in pair):
            return None
        others = path - count, self.all - count
        if not self._mostly(count, path, len(self.pairs_of[self.path_of(pair)]), others, len(self.paths)):
            return None
        return self.witness(pair) or None

    def witness(self, pair: Pair) -> str:
        """Who both ends are right with: a rank, or in a large world ranks of one node; "" for nobody."""
        one, other = (self._right_with(end) for end in pair)
        if same := one & other:
            return f"rank {min(same)}"
        both = {self.nodes[peer] for peer in one} & {self.nodes[peer] for peer in other}
        return f"ranks of {min(both)}" if both else ""

    # A path and a node -----------------------------------------------------------------------------------------------

    def _path_fails(self, nodes: Nodes) -> str | None:
        """A node that both are right with, where what fails is between these two and no pair of their ranks is worse."""
        path, pairs = self.paths[nodes], self.pairs_of[nodes]
        if nodes[0] == nodes[1] or len(pairs) < 2 or not path.gathers(self.all, len(self.paths)):
            return None
        if any(pair in self._failed_pairs or self.failed.keys() & set(pair) for pair in pairs):
            return None
        if not all(path.gathers(self._node_outward[node], len(self._neighbours[node])) for node in nodes):
            return None
        third = sorted(self._neighbours[nodes[0]] & self._neighbours[nodes[1]])
        right = (node for node in third if all(self._is_right((min(node, end), max(node, end))) for end in nodes))
        return next(right, None)

    def _candidate(self, node: str) -> int:
        """Over how many of its ranks what is wrong with this node is spread, where that is all that can be said; else 0."""
        if not self._node[node].gathers(self.all, len(self._node)) or any(
            self.nodes[rank] == node for rank in self.failed
        ):
            return 0
        bad = self._bad_of[node]
        paths = {self.path_of(pair) for pair in bad}
        inside = sum(self.path_of(pair) == (node, node) for pair in bad)
        if any(nodes in self.bad_paths for nodes in paths) or not self._others_right(node):
            return 0
        ranks = {rank for pair in bad for rank in pair if self.nodes[rank] == node}
        return len(ranks) if len(ranks) > 1 and (inside > 1 or len(paths - {(node, node)}) > 1) else 0

    def _others_right(self, node: str) -> bool:
        """Whether two other nodes are right with each other."""
        return any(node not in nodes and nodes[0] != nodes[1] and not path.wrong for nodes, path in self.paths.items())

    # What was not looked at ------------------------------------------------------------------------------------------

    def ranks_by_node(self) -> Mapping[str, Sequence[int]]:
        """All ranks that should have taken part."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(self.nodes):
            found[self.nodes[rank]].append(rank)
        return found
