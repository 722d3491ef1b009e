"""The records of what ranks received from each other -> counts: apart from `linking`, which asks of them who is wrong.

Records are read as what they are, lines that other machines wrote: one that is none counts for nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.runfiles.answers import Device
from bitwitness.scan.results import Unjudged

Pair = tuple[int, int]

MOST = 1 << 53
"""No count is larger, in any scan: what is has been damaged, and would overflow what is computed of it."""


@dataclass(slots=True)
class Call:
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
class Received:
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
    calls: dict[str, Call] = field(default_factory=dict)
    silent: dict[Pair, str] = field(default_factory=dict)

    @classmethod
    def of(cls, devices: Sequence[Device], records: Iterable[Mapping[str, Any]]) -> Received:
        """Count them.

        Args:
            devices: all that should have taken part; records of others count for nothing.
            records: of all their journals, of any kind.
        """
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
        if type(peer) is not int or peer not in self.names or peer == rank:
            return
        if not (_is_count(right) and _is_count(wrong)):
            return
        self.right[peer, rank] += right  # type: ignore[operator]  # both are: see above
        self.wrong[peer, rank] += wrong  # type: ignore[operator]
        example = record.get("example")
        if wrong and isinstance(example, Mapping):
            self.examples.setdefault((peer, rank), f"{example.get('what', '')} ({record.get('item', '')})")

    def _collective(self, rank: int, record: Mapping[str, Any]) -> None:
        wrong, ranks, call = record.get("wrong"), record.get("ranks"), record.get("call")
        if _is_count(wrong) and wrong and _is_count(ranks) and isinstance(call, str):
            one = self.calls.setdefault(call, Call(str(record.get("item", "")), ranks))  # type: ignore[arg-type]  # it is one
            one.digests[rank] = str(record.get("digest", ""))

    def pairs(self) -> dict[Pair, tuple[int, int]]:
        """Those in which anything was looked at, smaller rank first: how much, both ways together, and how much was wrong."""
        found: dict[Pair, tuple[int, int]] = {}
        for way in sorted({(min(pair), max(pair)) for pair in self.right}):
            wrong = self.wrong[way] + self.wrong[way[::-1]]
            if looked_at := self.right[way] + self.right[way[::-1]] + wrong:
                found[way] = looked_at, wrong
        return found

    def received(self, without: set[int]) -> dict[int, int]:
        """By rank, how many transfers it received right; those that received none, and these, are left out."""
        counts: Counter[int] = Counter()
        for (_, receiver), right in self.right.items():
            counts[receiver] += right
        return {rank: count for rank, count in sorted(counts.items()) if count and rank not in without}

    def of_collectives(self) -> tuple[Unjudged, ...]:
        """The collectives that gave somebody a wrong result, and what it looks like. They name nobody by themselves."""
        by_item: dict[str, list[str]] = defaultdict(list)
        for call in self.calls.values():
            by_item[call.item].append(call.said(self.names))
        return tuple(
            Unjudged(item, f"{len(said)} call(s) gave a wrong result; of one: {Counter(said).most_common(1)[0][0]}")
            for item, said in sorted(by_item.items())
        )

    def example(self, one: int, other: int) -> str:
        """In words, of what was wrong between them."""
        found = self.examples.get((one, other)) or self.examples.get((other, one))
        return f"for example {found}" if found else "no example was kept"

    def why_silent(self, one: int, other: int) -> str:
        """Why nothing is known of them, as far as anybody said."""
        for key in ((one, other), (other, one), (one, -1), (other, -1)):
            if self.silent.get(key):
                return f"rank {key[0]} says: {self.silent[key]}"
        return next((why for why in self.silent.values() if why), "the time was over before, or a rank had gone")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST
