"""Whether wrong answers gather on one device beyond chance: the question that tells a device from a race in software.

An event is a set of operands from which at least one wrong answer came: answers from the same operands are no independent evidence,
because one bit that was flipped in them makes all of them wrong. If software were at fault, each event of an item would fall on some
device that computed the item. How probable it is that as many fall on this one is binomial, with its share of the item; pooled over
items it takes the largest of its shares, which only makes an accusation harder. Two questions are asked, and both must
say no: whether the events of all devices would gather so, and whether those of its own node would, since a fault of a node's set-up is
on all its devices alike. Each is multiplied by the number of devices it could have fallen on (Bonferroni).

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
from bitwitness.scan.chance import tail


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
        self._on_node: dict[str, int] = defaultdict(int)
        self._sets: dict[str, dict[int, int]] = {item: {} for item in right}
        self._events: dict[str, dict[int, int]] = {item: {} for item in right}
        self._backers: dict[str, list[tuple[str, str]]] = {item: [] for item in right}
        self._node = {sheet.device.rank: sheet.device.node for sheet in sheets}
        for sheet in sheets:
            who = sheet.device
            self._on_node[who.node] += 1
            for item, digest in right.items():
                answers = sheet.answers.get(item)
                if answers is None:
                    continue
                self._sets[item][who.rank] = sheet.sets(item)
                wrong = sheet.sets_with_other(item, digest)
                if wrong:
                    self._events[item][who.rank] = wrong
                elif sum(answers.values()) > 1:
                    self._backers[item].append((who.device, who.node))
        self._all = {item: _Where(sets.values()) for item, sets in self._sets.items()}
        self._out: set[int] = set()

    def leave_out(self, ranks: Iterable[int]) -> None:
        """Ask of the others as if these had not been there: that they are wrong is known."""
        self._out.update(ranks)
        for item, sets in self._sets.items():
            if not self._out.isdisjoint(self._events[item]):
                self._all[item] = _Where(count for rank, count in sets.items() if rank not in self._out)

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

    def chance(self, device: Device, items: Sequence[str]) -> float:
        """How probable it is that events of these items gather on this device as they did, if they fall by chance."""
        everywhere = self._chance(device.rank, items, None)
        if self._on_node[device.node] < 2 or len(self._on_node) < 2:
            return everywhere
        return max(everywhere, self._chance(device.rank, items, device.node))

    def _chance(self, rank: int, items: Sequence[str], node: str | None) -> float:
        own, total, largest, alone = 0, 0, 0.0, 1.0
        for item in items:
            events, share = self._seen(item, rank, node)
            mine = self._events[item].get(rank, 0)
            own, total, largest = own + mine, total + events, max(largest, share)
            alone = min(alone, tail(events, mine, share))
        devices = self._devices if node is None else self._on_node[node]
        # Pooled or by one item alone, whichever says more: two looks, and in the second one as many as there are items.
        return min(1.0, 2 * devices * min(tail(total, own, largest), len(items) * alone))

    def _seen(self, item: str, rank: int, node: str | None) -> tuple[int, float]:
        """The events of an item in a place, and the share that a device has of it there."""
        mine = self._sets[item][rank]
        if node is not None:
            there = [other for other in self._sets[item] if self._node[other] == node and other not in self._out]
            events = sum(self._events[item].get(other, 0) for other in there)
            return events, _Where(self._sets[item][other] for other in there).share(mine)
        known = self._known.get(item)
        beside = 0.0 if known is None else known.devices * min(mine, known.calls / max(1, known.devices))
        events = sum(count for other, count in self._events[item].items() if other not in self._out)
        return events, self._all[item].share(mine, beside)
