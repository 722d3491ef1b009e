"""Many signals from many files into one list of bounded size, in which every event is one record.

The same event reaches a person by several ways: the ring buffer, two copies of the journal, a rotated log and the one that it
was copied from. It is one event, and a count that grew with the copies would read as a device that gets worse.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bitwitness.fleet.signals.merging import IDENTITY, PLACE, is_once, merged, place_of, said, same_host
from bitwitness.fleet.signals.record import WEIGHTS, Signal, no_evidence

__all__ = ["IDENTITY", "gather", "of_node"]

EVENTS_MAX = 1_000
"""Of one kind of event of one device that are listed; of more, the newest are."""
GROUPS_MAX = 10_000
TOTAL_MAX = 30_000
"""Events beyond which a kind keeps its newest `FEW` only: the two limits above together would allow ten million."""
FEW = 10


class _Kind(NamedTuple):
    """What is counted together."""

    host: str
    code: str
    device: str


class _Event(NamedTuple):
    """What makes two records the same event: when, to the second, and what was said."""

    second: str
    said: str
    number: int = 0
    """Which of several like it in one file, where no time tells them apart."""


@dataclass(slots=True)
class _Events:
    """The newest events of one kind."""

    kept: dict[_Event, Signal] = field(default_factory=dict)
    order: list[tuple[str, int, _Event]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By origin: a second copy of a file drops the same events once more."""
    undated: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    made: int = 0

    def add(self, signal: Signal, limit: int) -> int:
        """Take one in; how many more are kept than before."""
        event = self._event(signal)
        if event in self.kept:
            old = self.kept[event]
            if signal.count > old.count or (not old.host and signal.host):
                self.kept[event] = signal
            elif PLACE.match(signal.evidence) and not PLACE.match(old.evidence):
                self.kept[event] = replace(old, evidence=signal.evidence)
            return 0
        self.made += 1
        entry = (signal.time or "", self.made, event)
        if len(self.kept) < limit:
            self.kept[event] = signal
            heapq.heappush(self.order, entry)
            return 1
        _, _, oldest = heapq.heappushpop(self.order, entry)
        lost = signal if oldest is event else self.kept.pop(oldest)
        if oldest is not event:
            self.kept[event] = signal
        if lost.origin in self.dropped or len(self.dropped) < EVENTS_MAX:
            self.dropped[lost.origin] += lost.count
        return 0

    def _event(self, signal: Signal) -> _Event:
        if signal.time is not None:
            return _Event(signal.time[:19], said(signal))
        if is_once(signal):
            return _Event("", said(signal))
        key = (signal.via, signal.origin, said(signal))
        if len(self.undated) < EVENTS_MAX or key in self.undated:
            self.undated[key] += 1
        return _Event("", said(signal), self.undated.get(key, 1))

    def listed(self) -> list[Signal]:
        """The events, oldest first; the newest says that there were more."""
        found = sorted(self.kept.values(), key=lambda one: one.time or "")
        more = max(self.dropped.values(), default=0)
        if more and found:
            reason = f"{found[-1].reason} (more than {len(found)} of these: at least {more} older ones are not listed)"
            found[-1] = replace(found[-1], reason=reason)
        return found


def gather(signals: Iterable[Signal], *, identities: bool = False) -> list[Signal]:
    """Every event once, oldest first, and what gave no evidence after them.

    An event is the same where host, code, device, second and message are; host by any of its spellings. A PCI address, a number
    or a slice is replaced by the UUID of the device, where a signal of the same host tells both; the reason says so where that
    was told later. At most 1,000 events are listed of each (host, code, device), and 10,000 of those; of more, only that there
    were.

    Args:
        signals: in any order, from any number of sources; they are taken in one at a time.
        identities: keep the signals that only tell which device is where.
    """
    kinds: dict[_Kind, _Events] = {}
    total = beyond = 0
    for signal in signals:
        kind = _Kind(place_of(signal).lower(), signal.code, signal.device)
        events = kinds.get(kind)
        if events is None:
            if len(kinds) >= GROUPS_MAX:
                beyond += 1
                continue
            events = kinds[kind] = _Events()
        total += events.add(signal, EVENTS_MAX if total < TOTAL_MAX else min(FEW, EVENTS_MAX))
    found = merged([one for events in kinds.values() for one in events.listed()])
    if not identities:
        found = [one for one in found if one.code != IDENTITY]
    if beyond:
        why = f"{beyond} signals are not listed: they are of more than {GROUPS_MAX:,} kinds and devices. Ask for less at a time"
        found.append(no_evidence("kernel", "signals:too-many", why))
    return sorted(found, key=_order)


def of_node(signals: Iterable[Signal], node: str) -> Iterator[Signal]:
    """Those of one node, by its name with or without the domain; what names no node is taken to be of it."""
    for signal in signals:
        if signal.host in ("", node):
            yield signal
        elif same_host(signal.host, node):
            yield replace(signal, host=node)


def _order(signal: Signal) -> tuple[bool, bool, str, str, str, int, str]:
    late = signal.kind == "no-evidence"
    weight = WEIGHTS[signal.weight]
    return late, signal.time is None, signal.time or "", signal.host, signal.device, weight, signal.code
