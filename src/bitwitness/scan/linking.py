"""What ranks received from each other -> links and ranks that fail: pure, and apart from `judging`, which compares equals.

A transfer has one right content, which the receiver knows by itself; so a wrong one is a fact, and only the place is asked for. It
may be the link, the sender, the receiver, or software alike everywhere. What each would look like:

- one link: wrong between its two ends, while each end is right with the others. Neither end is named: the pair fails;
- the path between two nodes: likewise, over several pairs of their ranks. The path fails, and names the nodes;
- one rank, its device or its network card: wrong with all others (of other nodes) alike, while those are right among themselves,
  and so are the other ranks of its node;
- a node: likewise, over several of its ranks. Hardware or software, which transfers cannot tell: it is a candidate, and nobody fails;
- software: anywhere.

A place is accused only where all that would otherwise have had to gather there by chance has a probability of at most
`chance.CHANCE` (binomial, by how many transfers each place had, times the number of places), with `chance.LEAST` wrong transfers at
least; `gathering` asks that at every level. A wrong result of a collective names nobody: where each rank got the same wrong bytes,
their agreement says nothing about which were right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.runfiles.answers import Device
from bitwitness.scan.gathering import Gathering, Nodes
from bitwitness.scan.missing import Missing, missing
from bitwitness.scan.received import Pair, Received
from bitwitness.scan.results import LinkResult, Standing, Unjudged

LISTED = 200
"""So many pairs that are not judged have results of their own; what is beyond is one result."""


@dataclass(frozen=True, slots=True)
class LinksJudged:
    """What the transfers of a scan say.

    Attributes:
        links: pairs that are no plain pass, those that fail first; all pairs that nobody looked at are one, as are those too many to list.
        failed: by rank, why its device or its network card fails.
        unjudged: nodes that are candidates, and collectives that gave somebody a wrong result.
        right: by rank, how many transfers it received, if all were right and each of its pairs is a plain pass.
    """

    links: tuple[LinkResult, ...]
    failed: Mapping[int, str]
    unjudged: tuple[Unjudged, ...]
    right: Mapping[int, int]


def judge_transfers(devices: Sequence[Device], records: Iterable[Mapping[str, Any]]) -> LinksJudged:
    """Judge the links and the ranks by what was received.

    Args:
        devices: all that should have taken part.
        records: of all their journals; kinds other than `link`, `collective` and `no-link` are skipped.
    """
    seen = Received.of(devices, records)
    return _Judge(devices, seen).all()


class _Judge:
    """Over all pairs of one scan: the words for what `Gathering` found."""

    def __init__(self, devices: Sequence[Device], seen: Received) -> None:
        self.seen = seen
        self.devices = {device.rank: device for device in devices}
        self.found = Gathering(devices, seen)
        self.missing = missing(self.found)
        self.failed = {rank: self._rank_said(rank, two) for rank, two in self.found.failed.items()}
        self.doubted = {rank: call for call in seen.calls.values() for rank in call.digests}
        self.whole = {
            self.found.path_of(pair)
            for pair in self.found.pairs
            if seen.right.get(pair) and seen.right.get((pair[1], pair[0]))
        }

    def all(self) -> LinksJudged:
        """The results, at most so many of them as can be read."""
        found = self.found
        failing = [pair for pair in found.bad_pairs if found.pair_fails(pair)]
        worst = {self._worst(nodes) for nodes in found.bad_paths}
        shown = {*failing, *worst}
        wrong = [pair for pair in found.bad_pairs if pair not in shown]
        open_pairs = [pair for pair in found.pairs if not found.pairs[pair].wrong and self._why_open(pair)]
        explained = [pair for rank in self.failed for pair in self._worst_of(rank)]
        wrong.sort(key=lambda pair: -found.pairs[pair].wrong)
        listed = sorted(dict.fromkeys([*explained, *wrong[:LISTED], *open_pairs[: max(0, LISTED - len(wrong))]]))
        results = [self._result(pair) for pair in sorted(failing)]
        results += [self._path(nodes) for nodes in sorted(found.bad_paths)]
        results += [self._result(pair) for pair in listed]
        if more := len(wrong) + len(open_pairs) - len(listed):
            results.append(self._more(min({*wrong, *open_pairs} - {*listed}), more))
        if self.missing.first:
            results.append(self._not_looked_at(self.missing, self.missing.first))
        ends = {rank for pair in (*found.bad_pairs, *open_pairs) for rank in pair} | self.missing.ranks
        candidates = (
            Unjudged(f"comm/node/{node}", self._node_said(node, many)) for node, many in found.candidates.items()
        )
        return LinksJudged(
            tuple(results), self.failed, (*candidates, *self.seen.of_collectives()), self.seen.received(ends)
        )

    # A rank and a node -----------------------------------------------------------------------------------------------

    def _rank_said(self, rank: int, witness: Pair) -> str:
        found, own = self.found, self.devices[rank].node
        others = [peer for peer in found.peers[rank] if found.nodes[peer] != own]
        bad = sorted(peer for peer in others if found.peers[rank][peer].wrong)
        count = found.outward(rank)
        said = (
            f"{count.wrong} of {count.looked_at} transfers with {len(bad)} of {len(others)} ranks of other nodes were wrong, while those "
            f"are right among themselves (ranks {witness[0]} and {witness[1]}): {self._which_part(rank, own)}"
        )
        return f"{said}; {self.seen.example(rank, bad[0])}"

    def _which_part(self, rank: int, own: str) -> str:
        near = [count for peer, count in self.found.peers[rank].items() if self.found.nodes[peer] == own]
        if not near:
            return "its device or its network card; no other rank of its node tells which"
        if any(count.wrong for count in near):
            return "its device, for transfers within its node are wrong as well"
        return "its network card, or what its node sends through for it alone: transfers within its node are right"

    def _node_said(self, node: str, many: int) -> str:
        count = self.found.of_node(node)
        return (
            f"{node} is a candidate: {count.wrong} of {count.looked_at} transfers from, to and within it were wrong, spread over {many} of "
            "its ranks: its network card, what it sends through, or software that runs there. No rank of it is named"
        )

    # Pairs -----------------------------------------------------------------------------------------------------------

    def _link(
        self, pair: Pair, standing: Standing, reason: str, counts: tuple[int, int], *, named: bool = True
    ) -> LinkResult:
        one, other = (self.devices[rank] for rank in pair)
        devices = (one.device, other.device) if named else ("", "")
        return LinkResult(pair, (one.node, other.node), devices, standing, reason, *counts)

    def _result(self, pair: Pair) -> LinkResult:
        count = self.found.pairs[pair]
        if count.wrong:
            standing, reason = self._said_of_wrong(pair)
        else:
            standing, reason = "not judged", self._why_open(pair)
        return self._link(pair, standing, reason, (count.looked_at, count.wrong))

    def _worst(self, nodes: Nodes) -> Pair:
        return max(self.found.pairs_of[nodes], key=lambda pair: (self.found.pairs[pair].wrong, -pair[0], -pair[1]))

    def _worst_of(self, rank: int) -> list[Pair]:
        """Of a rank that fails, the pairs that show it: they are listed, however many others there are."""
        peers = sorted(self.found.peers[rank].items(), key=lambda item: (-item[1].wrong, item[0]))
        return [(min(rank, peer), max(rank, peer)) for peer, count in peers[:3] if count.wrong]

    def _path(self, nodes: Nodes) -> LinkResult:
        """The path between two nodes fails: the ranks are those of the worst pair, and no device is named."""
        found, worst = self.found, self._worst(nodes)
        pairs, path = found.pairs_of[nodes], found.paths[nodes]
        bad = sum(found.pairs[pair].wrong > 0 for pair in pairs)
        ways = (
            "several pairs of their ranks"
            if bad > 1
            else "one pair of their ranks, too few to say that it is only that"
        )
        reason = (
            f"the path between {nodes[0]} and {nodes[1]}: {path.wrong} of {path.looked_at} transfers were wrong, on {bad} of the "
            f"{len(pairs)} pairs looked at ({ways}; most on ranks {worst[0]} and {worst[1]}, {found.pairs[worst].wrong}), while both nodes "
            f"are right with {found.bad_paths[nodes]}: what is between them, or one node's part in it; no rank is named; "
            f"{self.seen.example(*worst)}"
        )
        return self._link(worst, "fail", reason, (path.looked_at, path.wrong), named=False)

    def _why_open(self, pair: Pair) -> str:
        """Why a pair with nothing wrong is no plain pass; "" where it is one."""
        ways = [way for way in (pair, pair[::-1]) if not self.seen.right[way]]
        nodes = self.found.path_of(pair)
        if ways and not (self._sampled(nodes) and nodes in self.whole):
            way = f"{self._name(ways[0][0])} -> {self._name(ways[0][1])}"
            return f"nothing was received {way}: {self.seen.why_silent(*pair)}"
        doubted = [rank for rank in pair if rank in self.doubted and rank not in self.failed]
        if doubted:
            call = self.doubted[doubted[0]]
            return f"its transfers are right, but in {call.item} {call.said(self.seen.names)}; scan it again, longer"
        return ""

    def _sampled(self, nodes: Nodes) -> bool:
        """Whether another pair of these nodes does as well."""
        return self.missing.sampled and nodes[0] != nodes[1]

    def _said_of_wrong(self, pair: Pair) -> tuple[Standing, str]:
        one, other = pair
        found, count = self.found, self.found.pairs[pair]
        ways = " and ".join(
            f"{self._name(a)} -> {self._name(b)} ({self.seen.wrong[a, b]})"
            for a, b in (pair, (other, one))
            if self.seen.wrong[a, b]
        )
        said = f"{count.wrong} of {count.looked_at} transfers were wrong, {ways}; {self.seen.example(*pair)}"
        if guilty := [rank for rank in pair if rank in self.failed]:
            return "not judged", f"{said}; rank {guilty[0]} fails, which explains it"
        if witness := found.pair_fails(pair):
            return "fail", (
                f"{said}; both ends are right with others (both with {witness}), so it is the link or one end's part in it: "
                f"{self._name(one)} and {self._name(other)} are candidates"
            )
        nodes = found.path_of(pair)
        if nodes in found.bad_paths:
            return "not judged", f"{said}; the path between {nodes[0]} and {nodes[1]} fails, which explains it"
        if nodes[0] in found.candidates or nodes[1] in found.candidates:
            node = nodes[0] if nodes[0] in found.candidates else nodes[1]
            return "not judged", f"{said}; {node} is a candidate, for what is wrong with it is spread over its ranks"
        if count.wrong == 1 or found.all.wrong < 3:
            return "not judged", f"{said}: too few to tell it from a rare fault of software; scan it again, longer"
        if not found.witness(pair):
            return "not judged", f"{said}: no third rank is right with both ends, so the place is open"
        return (
            "not judged",
            f"{said}: too few, or too scattered over {len(found.bad_pairs)} pairs, to say where it happens",
        )

    # What is summed up -----------------------------------------------------------------------------------------------

    def _more(self, first: Pair, more: int) -> LinkResult:
        count = self.found.pairs[first]
        reason = f"this is one of {more} more pairs that are not judged and not listed"
        return self._link(first, "not judged", reason, (count.looked_at, count.wrong))

    def _not_looked_at(self, gaps: Missing, first: Pair) -> LinkResult:
        why = self.seen.why_silent(*first)
        if gaps.count == 1:
            return self._link(first, "not judged", f"nothing was received between them: {why}", (0, 0))
        whose = f"; nobody exchanged anything with {_ranks(gaps.absent)}" if gaps.absent else ""
        reason = f"nothing was received between {gaps.what} ({_ranks(sorted(gaps.ranks))}), of which this is one{whose}: {why}"
        return self._link(first, "not judged", reason, (0, 0))

    def _name(self, rank: int) -> str:
        return f"{self.devices[rank].node} (rank {rank})"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank(s) {', '.join(map(str, ranks[:8]))}{more}"
