"""Whether wrong answers gather on one device beyond chance: the question that tells a device from a race in software.

An event is a set of operands from which at least one wrong answer came: answers from the same operands are no independent evidence,
because one bit that was flipped in them makes all of them wrong. If software were at fault, each event of an item would fall on some
device that computed the item. How probable it is that as many fall on this one is a tail of the sum of binomials with its shares of the
items: at most the binomial of its largest share, and at most Chernoff's bound. All events of all devices count, in whatever item: were only the items counted that this device got wrong, a race that
strikes each item once would accuse everybody.

Two questions are asked, and both must say no: whether the events of all devices would gather so, and whether those of its own node
would, since a fault of a node's set-up is on all its devices alike. Each is multiplied by the number of devices it could have fallen on
(Bonferroni).

Another device counts for at most as many sets of operands as the one in question has, and so does each device of a golden file: how much
somebody else has computed must not make one wrong answer weigh like ten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from bitwitness.runfiles.answers import Device, Sheet
from bitwitness.scan.chance import chernoff, tail


class Learned(Protocol):
    """What counts of a golden answer: on how many devices, by how many calls, it was learned."""

    @property
    def devices(self) -> int:
        """On how many devices."""

    @property
    def calls(self) -> int:
        """By how many calls."""


class _Where:
    """Sets of operands of one item, by the devices of one place, in order, so that a share takes no walk over all of them."""

    def __init__(self, sets: Iterable[int]) -> None:
        self._sets = sorted(sets)
        self._sums = [0, *accumulate(self._sets)]

    def __len__(self) -> int:
        return len(self._sets)

    def share(self, own: int, beside: float = 0.0) -> float:
        """The share of a device, which is one of them, with so many sets."""
        smaller = bisect_left(self._sets, own)
        capped = self._sums[smaller] + own * (len(self._sets) - smaller)
        return own / (capped + beside)


class Events:
    """The events of the items that somebody got wrong.

    Args:
        sheets: of the devices that are compared.
        right: the right answers to these items.
        known: golden answers.
    """

    def __init__(self, sheets: Sequence[Sheet], right: Mapping[str, str], known: Mapping[str, Learned]) -> None:
        self._known = known
        self._devices = len(sheets)
        self._on_node: dict[str, list[int]] = defaultdict(list)
        self._node = {sheet.device.rank: sheet.device.node for sheet in sheets}
        self._sets: dict[str, dict[int, int]] = {item: {} for item in right}
        self._calls: dict[str, dict[int, int]] = {item: {} for item in right}
        self._events: dict[str, dict[int, int]] = {item: {} for item in right}
        self._backers: dict[str, list[tuple[str, str]]] = {item: [] for item in right}
        for sheet in sheets:
            who = sheet.device
            self._on_node[who.node].append(who.rank)
            for item, digest in right.items():
                answers = sheet.answers.get(item)
                if answers is None:
                    continue
                self._sets[item][who.rank] = sheet.sets(item)
                wrong = sheet.sets_with_other(item, digest)
                if wrong:
                    self._events[item][who.rank] = wrong
                    self._calls[item][who.rank] = sum(answers.values())
                elif sum(answers.values()) > 1:
                    self._backers[item].append((who.device, who.node))
        self._everywhere = {item: _Where(sets.values()) for item, sets in self._sets.items()}
        self._out: set[int] = set()
        self._excused: set[str] = set()

    def excuse(self, items: Iterable[str]) -> None:
        """Ask no more about these: they accuse nobody."""
        self._excused.update(items)

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Ask of the others as if these had not been there: that they are wrong is known."""
        self._out.update(ranks)
        for item, sets in self._sets.items():
            if not self._out.isdisjoint(self._events[item]):
                self._everywhere[item] = _Where(count for rank, count in sets.items() if rank not in self._out)

    def having(self, item: str) -> int:
        """How many devices computed an item."""
        return len(self._sets[item])

    def of(self, item: str, rank: int) -> int:
        """How many events of an item a device has."""
        return self._events[item].get(rank, 0)

    def backers(self, item: str) -> Sequence[tuple[str, str]]:
        """Device and node of those that gave the right answer each time, and more than once: none of them is in question."""
        return self._backers[item]

    def elsewhere_on_node(self, device: Device, items: Iterable[str]) -> int:
        """How many other devices of its node have events of these items."""
        found = {rank for item in items for rank in self._events[item] if self._node[rank] == device.node}
        return len(found - {device.rank})

    def chance(self, device: Device) -> float:
        """How probable it is that events gather on this device as they did, if they fall by chance."""
        everywhere = self._chance(device.rank, None)
        if len(self._on_node[device.node]) < 2 or len(self._on_node) < 2:
            return everywhere
        return max(everywhere, self._chance(device.rank, device.node))

    def _chance(self, rank: int, node: str | None) -> float:
        own, total, mean, largest, alone, items = 0, 0, 0.0, 0.0, 1.0, 0
        for item, by_rank in self._events.items():
            if item in self._excused:
                continue
            there = by_rank if node is None else self._on_node[node]
            events = sum(by_rank.get(other, 0) for other in there if other not in self._out)
            if not events:
                continue
            mine, share = by_rank.get(rank, 0), self._share(item, rank, node)
            own, total, mean, items = own + mine, total + events, mean + events * share, items + 1
            largest = max(largest, share)
            if mine:
                alone = min(alone, tail(events, mine, share))
        devices = self._devices if node is None else len(self._on_node[node])
        pooled = min(tail(total, own, largest), chernoff(own, mean))
        # Pooled or by one item alone, whichever says more: two looks, and in the second one as many as there are items.
        return min(1.0, 2 * devices * min(pooled, items * alone))

    def _share(self, item: str, rank: int, node: str | None) -> float:
        """The share that a device has of an item, in a place; none of what it did not compute."""
        mine = self._sets[item].get(rank, 0)
        if not mine:
            return 0.0
        if node is not None:
            there = (other for other in self._on_node[node] if other not in self._out)
            return _Where(self._sets[item][other] for other in there if other in self._sets[item]).share(mine)
        known, calls = self._known.get(item), self._calls[item].get(rank, 0)
        beside = 0.0
        if known is not None and calls:
            # A golden file counts calls: so many sets they would have been here.
            beside = known.devices * min(mine, known.calls / max(1, known.devices) * mine / calls)
        return self._everywhere[item].share(mine, beside)
