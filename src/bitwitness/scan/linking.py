"""What ranks received from each other -> links and ranks that fail: pure, and apart from `judging`, which compares equals.

A transfer has one right content, which the receiver knows by itself; so a wrong one is a fact, and only the place is asked for. It
may be the link, the sender, the receiver, or software alike everywhere. What each would look like:

- one link: wrong between its two ends, while each end is right with the others. Neither end is named: the pair fails;
- one rank, its device or its network card: wrong with all others (of other nodes) alike, while those are right among themselves;
- software: anywhere.

A place is accused only where all that would otherwise have had to gather there by chance has a probability of at most
`judging.CHANCE` (binomial, by how many transfers each place had, times the number of places): for a link, against software and
against each of its ends being wrong with all alike; for a rank, against software, also when its worst peer is left out, and none
of its peers may be right too often for a rank that is wrong alike. One wrong transfer is a strike and no more. A wrong result of
a collective names nobody: where each rank got the same wrong bytes, their agreement says nothing about which were right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from bitwitness.runfiles.answers import Device
from bitwitness.scan.chance import tail
from bitwitness.scan.judging import CHANCE
from bitwitness.scan.results import LinkResult, Unjudged
from bitwitness.scan.tournament import expected

Pair = tuple[int, int]


def judge_links(
    devices: Sequence[Device], records: Iterable[Mapping[str, Any]]
) -> tuple[tuple[LinkResult, ...], dict[int, str]]:
    """Judge the links and the ranks by what was received.

    Args:
        devices: all that should have taken part.
        records: of all their journals; kinds other than `link`, `collective` and `no-link` are skipped.

    Returns:
        The pairs that are no plain pass, and by rank why its device or its network card fails.
    """
    seen = _Seen.of(devices, records)
    judge = _Judge(devices, seen)
    results = [judge.result(pair) for pair in sorted({*judge.expected, *seen.pairs()})]
    return tuple(result for result in results if result.standing != "pass"), judge.failed


def judge_collectives(devices: Sequence[Device], records: Iterable[Mapping[str, Any]]) -> tuple[Unjudged, ...]:
    """The collectives that gave somebody a wrong result, and what it looks like. They name nobody by themselves."""
    seen = _Seen.of(devices, records)
    by_item: dict[str, list[str]] = defaultdict(list)
    for call in seen.calls.values():
        by_item[call.item].append(call.said(seen.names))
    return tuple(
        Unjudged(item, f"{len(said)} call(s) gave a wrong result; of one: {Counter(said).most_common(1)[0][0]}")
        for item, said in sorted(by_item.items())
    )


def received_right(
    devices: Sequence[Device], records: Iterable[Mapping[str, Any]], links: Iterable[LinkResult]
) -> dict[int, int]:
    """By rank, how many transfers it received, if all were right and each of its pairs is a plain pass.

    Args:
        devices: as for `judge_links`.
        records: likewise.
        links: what that concluded.
    """
    seen = _Seen.of(devices, records)
    open_ends = {rank for link in links for rank in link.ranks}
    counts: Counter[int] = Counter()
    for (_, receiver), right in seen.right.items():
        counts[receiver] += right
    return {rank: count for rank, count in sorted(counts.items()) if count and rank not in open_ends}


# What was received ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """One call of a collective that gave somebody a wrong result: by rank, the digest of what it got."""

    item: str
    ranks: int
    digests: dict[int, str] = field(default_factory=dict)

    def said(self, names: Mapping[int, str]) -> str:
        """What it looks like."""
        wrong, different = len(self.digests), len(set(self.digests.values()))
        if wrong == 1:
            rank = next(iter(self.digests))
            return (
                f"rank {rank} ({names.get(rank, 'unknown')}) alone received otherwise than the other {self.ranks - 1}: "
                "its receiving side is a candidate"
            )
        if different == 1:
            alike = "all ranks" if wrong == self.ranks else f"{wrong} of {self.ranks} ranks"
            return (
                f"{alike} received the same wrong bytes: agreement is not correctness, and where they come from is open"
            )
        return f"{wrong} of {self.ranks} ranks received wrong bytes, {different} different ones"


@dataclass(slots=True)
class _Seen:
    """The counts of all records.

    Attributes:
        names: by rank, its node and device.
        right, wrong: transfers by (sender, receiver).
        examples: of what was wrong, likewise.
        calls: collectives with a wrong result.
        silent: why nothing came from a peer, by (receiver, peer); -1 for no peer in particular.
    """

    names: dict[int, str]
    right: Counter[Pair] = field(default_factory=Counter)
    wrong: Counter[Pair] = field(default_factory=Counter)
    examples: dict[Pair, str] = field(default_factory=dict)
    calls: dict[str, _Call] = field(default_factory=dict)
    silent: dict[Pair, str] = field(default_factory=dict)

    @classmethod
    def of(cls, devices: Sequence[Device], records: Iterable[Mapping[str, Any]]) -> _Seen:
        seen = cls({device.rank: f"{device.node}, {device.device}" for device in devices})
        for record in records:
            kind, rank = record.get("kind"), record.get("rank")
            if type(rank) is not int or rank not in seen.names:
                continue
            if kind == "link":
                seen._link(rank, record)
            elif kind == "collective":
                seen._collective(rank, record)
            elif kind == "no-link":
                peer = record.get("peer")
                seen.silent[rank, peer if type(peer) is int else -1] = str(record.get("why", ""))
        return seen

    def _link(self, rank: int, record: Mapping[str, Any]) -> None:
        peer, right, wrong = record.get("peer"), record.get("right"), record.get("wrong")
        counted = type(right) is int and type(wrong) is int and right >= 0 and wrong >= 0
        if not counted or type(peer) is not int or peer not in self.names or peer == rank:
            return
        self.right[peer, rank] += right  # type: ignore[operator]  # both are: see above
        self.wrong[peer, rank] += wrong  # type: ignore[operator]
        example = record.get("example")
        if wrong and isinstance(example, Mapping):
            self.examples.setdefault((peer, rank), f"{example.get('what', '')} ({record.get('item', '')})")

    def _collective(self, rank: int, record: Mapping[str, Any]) -> None:
        wrong, ranks, call = record.get("wrong"), record.get("ranks"), record.get("call")
        if type(wrong) is int and wrong > 0 and type(ranks) is int and isinstance(call, str):
            one = self.calls.setdefault(call, _Call(str(record.get("item", "")), ranks))
            one.digests[rank] = str(record.get("digest", ""))

    def pairs(self) -> set[Pair]:
        """Those of which anything is known, smaller rank first."""
        return {(min(pair), max(pair)) for pair in (*self.right, *self.wrong)}

    def transfers(self, one: int, other: int) -> int:
        """Looked at, both ways."""
        return self.right[one, other] + self.right[other, one] + self.bad(one, other)

    def bad(self, one: int, other: int) -> int:
        """Wrong ones, both ways."""
        return self.wrong[one, other] + self.wrong[other, one]


# Who is wrong --------------------------------------------------------------------------------------------------------


class _Judge:
    """Over all pairs of one scan."""

    def __init__(self, devices: Sequence[Device], seen: _Seen) -> None:
        self.seen = seen
        self.devices = {device.rank: device for device in devices}
        self.nodes = {device.rank: device.node for device in devices}
        self.expected = expected(self.nodes)
        self.peers: dict[int, list[int]] = defaultdict(list)
        for one, other in sorted(seen.pairs()):
            if seen.transfers(one, other):
                self.peers[one].append(other)
                self.peers[other].append(one)
        self.pairs = [pair for pair in sorted(seen.pairs()) if seen.transfers(*pair)]
        self.transfers = sum(seen.transfers(*pair) for pair in self.pairs)
        self.wrong = sum(seen.bad(*pair) for pair in self.pairs)
        self.right_nodes: dict[frozenset[str], bool] = {}
        for pair in self.pairs:
            ends = frozenset(self.nodes[rank] for rank in pair)
            self.right_nodes[ends] = self.right_nodes.get(ends, True) and not seen.bad(*pair)
        self.failed = {rank: why for rank in sorted(self.devices) if (why := self._rank_fails(rank))}
        self.doubted = {rank: call for call in seen.calls.values() for rank in call.digests}

    # A rank ----------------------------------------------------------------------------------------------------------

    def _rank_fails(self, rank: int) -> str:
        """Why its device or its network card fails; "" where that cannot be said."""
        seen, own = self.seen, self.nodes[rank]
        others = [peer for peer in self.peers[rank] if self.nodes[peer] != own]
        bad = [peer for peer in others if seen.bad(rank, peer)]
        if len({self.nodes[peer] for peer in bad}) < 2 or 2 * len(bad) <= len(others):
            return ""
        witness = self._right_among(rank, bad)
        if witness is None or not self._gathers(rank, bad) or not self._alike(rank, others):
            return ""
        wrong, looked_at = (sum(count(rank, peer) for peer in others) for count in (seen.bad, seen.transfers))
        said = (
            f"{wrong} of {looked_at} transfers with {len(bad)} of {len(others)} ranks of other nodes were wrong, while those are "
            f"right among themselves (ranks {witness[0]} and {witness[1]}): {self._which_part(rank, own)}"
        )
        return f"{said}; {self._example(rank, bad[0])}"

    def _right_among(self, rank: int, bad: Sequence[int]) -> Pair | None:
        """Two of these peers on different nodes that are right with each other; where they did not meet, which is how it is in a
        large world, that are right with somebody while their nodes are with each other.
        """
        seen = self.seen
        for a, b in combinations(bad, 2):
            ends = frozenset((self.nodes[a], self.nodes[b]))
            if len(ends) < 2:
                continue
            if seen.transfers(a, b):
                if not seen.bad(a, b):
                    return a, b
            elif self.right_nodes.get(ends) and all(
                any(peer != rank and not seen.bad(end, peer) for peer in self.peers[end]) for end in (a, b)
            ):
                return a, b
        return None

    def _gathers(self, rank: int, bad: Sequence[int]) -> bool:
        """Whether so many wrong ones do not meet at this rank by chance, also without those with its worst peer."""
        seen = self.seen
        worst = max(bad, key=lambda peer: seen.bad(rank, peer))
        for left_out in (None, worst):
            peers = [peer for peer in self.peers[rank] if peer != left_out]
            gone = (0, 0) if left_out is None else (seen.bad(rank, left_out), seen.transfers(rank, left_out))
            own = sum(seen.bad(rank, peer) for peer in peers)
            share = sum(seen.transfers(rank, peer) for peer in peers) / max(1, self.transfers - gone[1])
            if len(self.devices) * tail(self.wrong - gone[0], own, share) > CHANCE:
                return False
        return True

    def _alike(self, rank: int, others: Sequence[int]) -> bool:
        """Whether none of these peers is right too often for a rank that is wrong with all of them alike."""
        seen = self.seen
        wrong = sum(seen.bad(rank, peer) for peer in others)
        looked_at = sum(seen.transfers(rank, peer) for peer in others)
        return all(
            len(others) * tail(wrong, wrong - seen.bad(rank, peer), 1 - seen.transfers(rank, peer) / looked_at) > CHANCE
            for peer in others
        )

    def _which_part(self, rank: int, own: str) -> str:
        near = [peer for peer in self.peers[rank] if self.nodes[peer] == own]
        if not near:
            return "its device or its network card; no other rank of its node tells which"
        if any(self.seen.bad(rank, peer) for peer in near):
            return "its device, for transfers within its node are wrong as well"
        return "its network card, or what its node sends through: transfers within its node are right"

    # A link ----------------------------------------------------------------------------------------------------------

    def result(self, pair: Pair) -> LinkResult:
        """What is concluded about a pair."""
        seen = self.seen
        one, other = (self.devices[rank] for rank in pair)
        wrong, transfers = seen.bad(*pair), seen.transfers(*pair)
        standing, reason = self._said(pair)
        ends = (one.node, other.node), (one.device, other.device)
        return LinkResult(pair, *ends, standing, reason, transfers, wrong)  # type: ignore[arg-type]  # one of the three

    def _said(self, pair: Pair) -> tuple[str, str]:
        seen = self.seen
        one, other = pair
        if wrong := seen.bad(*pair):
            return self._said_of_wrong(pair, wrong, seen.transfers(*pair))
        missing = [way for way in (pair, (other, one)) if not seen.right[way]]
        if missing and not (set(pair) - self._reached() or self._sampled(pair)):
            return "pass", "its nodes were looked at by another pair"
        if len(missing) == 2:
            return "not judged", f"nothing was received between them: {self._why_silent(pair)}"
        if missing:
            way = f"{self._name(missing[0][0])} -> {self._name(missing[0][1])}"
            return "not judged", f"nothing was received {way}: {self._why_silent(pair)}"
        doubted = [rank for rank in pair if rank in self.doubted and rank not in self.failed]
        if doubted:
            call = self.doubted[doubted[0]]
            said = call.said(seen.names)
            return "not judged", f"its transfers are right, but in {call.item} {said}; scan it again, longer"
        return "pass", f"{seen.transfers(*pair)} transfers right"

    def _said_of_wrong(self, pair: Pair, wrong: int, transfers: int) -> tuple[str, str]:
        one, other = pair
        ways = " and ".join(
            f"{self._name(a)} -> {self._name(b)} ({self.seen.wrong[a, b]})"
            for a, b in (pair, (other, one))
            if self.seen.wrong[a, b]
        )
        said = f"{wrong} of {transfers} transfers were wrong, {ways}; {self._example(*pair)}"
        guilty = [rank for rank in pair if rank in self.failed]
        if guilty:
            return "not judged", f"{said}; rank {guilty[0]} fails, which explains it"
        witness = self._witness(pair)
        if witness and all(self._only_here(end, pair, wrong) for end in pair) and self._link_gathers(pair):
            return "fail", (
                f"{said}; both ends are right with others (both with {witness}), so it is the link or one end's part in it: "
                f"{self._name(one)} and {self._name(other)} are candidates"
            )
        if wrong == 1 or self.wrong < 3:
            return "not judged", f"{said}: too few to tell it from a rare fault of software; scan it again, longer"
        if not witness:
            return "not judged", f"{said}: no third rank is right with both ends, so the place is open"
        return (
            "not judged",
            f"{said}: too few, or too scattered over {self._bad_pairs()} pairs, to say where it happens",
        )

    def _witness(self, pair: Pair) -> str:
        """Who both ends are right with: a rank, or in a large world ranks of one node; "" for nobody."""
        seen = self.seen
        right = [{peer for peer in self.peers[end] if not seen.bad(end, peer)} - {*pair} for end in pair]
        if same := right[0] & right[1]:
            return f"rank {min(same)}"
        nodes = [{self.nodes[peer] for peer in found} for found in right]
        return f"ranks of {min(both)}" if (both := nodes[0] & nodes[1]) else ""

    def _only_here(self, end: int, pair: Pair, wrong: int) -> bool:
        """Whether what is wrong with this end would not gather on one peer by chance, were it wrong with all alike."""
        seen, peers = self.seen, self.peers[end]
        total = sum(seen.bad(end, peer) for peer in peers)
        share = seen.transfers(*pair) / sum(seen.transfers(end, peer) for peer in peers)
        return len(peers) * tail(total, wrong, share) <= CHANCE

    def _link_gathers(self, pair: Pair) -> bool:
        share = self.seen.transfers(*pair) / self.transfers
        return len(self.pairs) * tail(self.wrong, self.seen.bad(*pair), share) <= CHANCE

    # Words -----------------------------------------------------------------------------------------------------------

    def _reached(self) -> set[int]:
        return {rank for rank, peers in self.peers.items() if peers}

    def _sampled(self, pair: Pair) -> bool:
        """Whether this pair itself had to be looked at: always in a small world or a node, else where no pair of its nodes was."""
        ends = {self.nodes[rank] for rank in pair}
        if len(ends) == 1 or len(self.expected) == len(self.nodes) * (len(self.nodes) - 1) // 2:
            return True
        return not any({self.nodes[a], self.nodes[b]} == ends for a, b in self.pairs)

    def _bad_pairs(self) -> int:
        return sum(self.seen.bad(*pair) > 0 for pair in self.pairs)

    def _name(self, rank: int) -> str:
        return f"{self.nodes[rank]} (rank {rank})"

    def _example(self, one: int, other: int) -> str:
        found = self.seen.examples.get((one, other)) or self.seen.examples.get((other, one))
        return f"for example {found}" if found else "no example was kept"

    def _why_silent(self, pair: Pair) -> str:
        one, other = pair
        silent = self.seen.silent
        for key in ((one, other), (other, one), (one, -1), (other, -1)):
            if silent.get(key):
                return f"rank {key[0]} says: {silent[key]}"
        told = next((why for why in silent.values() if why), "")
        return f"{told}" if told else "the time was over before, or a rank had gone"
