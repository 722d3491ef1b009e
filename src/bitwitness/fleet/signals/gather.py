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

from bitwitness.fleet.signals.record import WEIGHTS, Signal, no_evidence

EVENTS_MAX = 1_000
"""Of one kind of event of one device that are listed; of more, the newest are."""
GROUPS_MAX = 10_000
TOTAL_MAX = 30_000
"""Events beyond which a kind keeps its newest `FEW` only: the two limits above together would allow ten million."""
FEW = 10
IDENTITY = "identity:pci"
"""The code of signals that tell which device is at which PCI address."""


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
    undated: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    made: int = 0

    def add(self, signal: Signal, limit: int) -> int:
        """Take one in; how many more are kept than before."""
        event = self._event(signal)
        if event in self.kept:
            old = self.kept[event]
            if signal.count > old.count or (not old.host and signal.host):
                self.kept[event] = signal
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
        said = signal.evidence or signal.reason
        if signal.kind == "no-evidence":
            said = f"{signal.origin}\n{signal.reason}\n{said}"
        elif signal.code == "xid:79":
            place = said.partition(".")[0] if said.startswith("[") else ""
            said = f"{place}fallen off the bus"  # said twice: with the Xid, and without
        if signal.time is not None:
            return _Event(signal.time[:19], said)
        if (
            said.startswith("[")
            or signal.code == "xid:79"
            or signal.kind == "no-evidence"
            or signal.source not in ("kernel", "edac", "mce")
        ):
            return _Event("", said)
        key = (signal.origin, said)
        if len(self.undated) < EVENTS_MAX or key in self.undated:
            self.undated[key] += 1
        return _Event("", said, self.undated.get(key, 1))

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

    An event is the same where host, code, device, second and message are. A PCI address is replaced by the UUID of the device
    that was there, where a signal of the same host tells both. At most 1,000 events are listed of each (host, code, device),
    and 10,000 of those; of more, only that there were.

    Args:
        signals: in any order, from any number of sources; they are taken in one at a time.
        identities: keep the signals that only tell which device is where.
    """
    kinds: dict[_Kind, _Events] = {}
    total = beyond = 0
    for signal in signals:
        kind = _Kind(signal.host, signal.code, signal.device)
        events = kinds.get(kind)
        if events is None:
            if len(kinds) >= GROUPS_MAX:
                beyond += 1
                continue
            events = kinds[kind] = _Events()
        total += events.add(signal, EVENTS_MAX if total < TOTAL_MAX else min(FEW, EVENTS_MAX))
    found = _named([one for events in kinds.values() for one in events.listed()])
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
        elif signal.host.partition(".")[0] == node.partition(".")[0] and not (
            "." in signal.host and "." in node
        ):  # one of them has the domain
            yield replace(signal, host=node)


def _order(signal: Signal) -> tuple[bool, bool, str, str, str, int, str]:
    late = signal.kind == "no-evidence"
    weight = WEIGHTS[signal.weight]
    return late, signal.time is None, signal.time or "", signal.host, signal.device, weight, signal.code


def _named(signals: list[Signal]) -> list[Signal]:
    """PCI addresses replaced by UUIDs, and records dropped that say less of an event than another does."""
    where: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for one in signals:
        address = _address(one)
        if address:
            where[_place(one), address].append((one.time or "", one.device))
    for known in where.values():
        known.sort()
    named = [_with_uuid(one, where.get((_place(one), one.device))) for one in signals]
    full = {(one.code, one.device, (one.time or "")[:19]) for one in named if one.evidence}
    seen: set[tuple[str, ...]] = set()
    kept = []
    for one in named:
        if one.kind != "no-evidence":
            second = (one.time or "")[:19]
            if not one.evidence and (one.code, one.device, second) in full:
                continue
            key = (one.host, one.code, one.device, second, one.evidence)
            if second and key in seen:  # read once by its address, and once by its UUID
                continue
            seen.add(key)
        kept.append(one)
    return kept


def _place(signal: Signal) -> str:
    """Where an address is meant: the host, or the file where none is named, because two hosts have the same addresses."""
    return signal.host or f"\n{signal.origin}"


def _address(signal: Signal) -> str:
    if signal.code != IDENTITY:
        return ""
    return next((word.removeprefix("pci=") for word in signal.evidence.split() if word.startswith("pci=")), "")


def _with_uuid(signal: Signal, known: list[tuple[str, str]] | None) -> Signal:
    """The signal by the UUID of whatever was in the slot at its time: devices are replaced."""
    if not known or signal.code == IDENTITY:
        return signal
    before = [uuid for time, uuid in known if time <= (signal.time or "~")]
    return replace(signal, device=before[-1] if before else known[0][1])
