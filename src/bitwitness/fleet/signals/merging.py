"""Which signals are of one host, one device and one event, although they were told by several ways.

Names differ (`n17`, `N17.cluster.local`; a slot, a number, a UUID), and so do clocks. What is merged wrongly hides an error, and
what is not merged is counted twice: where it is not known, nothing is merged or renamed, and the reason says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

from bitwitness.fleet.signals.record import Signal

IDENTITY = "identity:pci"
"""The code of signals that tell which device is at which PCI address."""
LINES = ("kernel", "edac", "mce")
"""Sources of single lines, of which each is an event."""
PLACE = re.compile(r"\[\d{1,12}\.\d{1,9}\] ")
"""The place in the ring buffer, at the beginning of what was read."""
_COPY = timedelta(seconds=2)
"""How far two clocks by which one line was stamped may differ: dmesg counts its times from boot, and syslog from now."""
_AGAIN = timedelta(minutes=1)
_CONTAINED = "xid:94"


def place_of(signal: Signal) -> str:
    """Where an address is meant: the host, or the file where none is named, because two hosts have the same addresses."""
    return signal.host or f"\n{signal.origin}"


def said(signal: Signal) -> str:
    """What makes one event of a device another than the next, besides when it was."""
    text = signal.evidence or signal.reason
    place = PLACE.match(text)
    if signal.kind == "no-evidence":
        return f"{signal.origin}\n{signal.reason}\n{text}"
    if signal.code == "xid:79":  # said twice: with the Xid, and without
        second = text.partition(".")[0] if place and signal.time is None else ""
        return f"{second}fallen off the bus"
    return text[place.end() :] if place and signal.time is not None else text


def is_once(signal: Signal) -> bool:
    """Whether two that say the same without a time are one: they have their place, or are no single events."""
    several = signal.source in LINES and signal.kind != "no-evidence" and signal.code != "xid:79"
    return not several or PLACE.match(signal.evidence) is not None


def same_host(one: str, other: str) -> bool:
    """Whether two names are of one node: in capitals or not, one of them perhaps with its domain."""
    one, other = one.lower(), other.lower()
    return one == other or (("." in one) != ("." in other) and _short(one) == _short(other))


def _short(host: str) -> str:
    """A name without its domain; an address is no name."""
    label = host.lower().partition(".")[0]
    return host.lower() if label.isdigit() else label


def merged(signals: list[Signal]) -> list[Signal]:
    """Hosts by one spelling, devices by their UUIDs, and of every event one record."""
    return _repeated(_without_copies(_events(_named(_one_spelling(signals)))))


def times_of(group: Sequence[Signal]) -> int:
    """How often the events of one kind and device occurred. Counters are not summed: each reading has all before it."""
    newest = max((one.time or "" for one in group), default="")
    counters = [one for one in group if _is_counter(one)]
    events = sum(one.count for one in group if not _is_counter(one))
    return max([events, *(one.count for one in counters if one.time in (newest, None))])


def _is_counter(signal: Signal) -> bool:
    if signal.source == "edac":
        return not signal.evidence.startswith(("EDAC", "["))
    return signal.source not in (*LINES, "rasdaemon")


def _one_spelling(signals: list[Signal]) -> list[Signal]:
    """Every host by one name: logs write it in capitals, and with or without its domain."""
    names: dict[str, set[str]] = defaultdict(set)
    for one in signals:
        if one.host:
            names[_short(one.host)].add(one.host)
    spelt: dict[str, str] = {}
    for short, several in names.items():
        lower = {one.lower() for one in several}
        alone = short in lower and len(lower) < 3  # two domains may be two nodes
        if len(several) > 1:
            spelt |= {one: short if alone else one.lower() for one in several}
    return [replace(one, host=spelt[one.host]) if one.host in spelt else one for one in signals]


def _named(signals: list[Signal]) -> list[Signal]:
    """Slots, numbers and slices replaced by the UUIDs of their devices."""
    where: dict[tuple[str, str], list[Signal]] = defaultdict(list)
    for one in signals:
        for name in _names(one):
            where[place_of(one), name].append(one)
    return [_with_uuid(one, where.get((place_of(one), one.device))) for one in signals]


def _names(signal: Signal) -> Iterator[str]:
    """The names that a device has on its host besides its UUID."""
    for word in signal.evidence.split() if signal.code == IDENTITY else ():
        key, _, value = word.partition("=")
        if key == "pci":
            yield value
        elif key == "index":
            yield f"gpu:{value}"
        elif key == "mig":
            yield from value.split(",")


def _with_uuid(signal: Signal, known: list[Signal] | None) -> Signal:
    """The signal by the UUID of what is in the slot, and what speaks against that: devices are replaced, and change places."""
    if not known or signal.code == IDENTITY or signal.kind == "no-evidence":
        return signal
    slot, reason = signal.device, signal.reason
    if len({one.device for one in known}) > 1:
        return replace(
            signal, reason=f"{reason} (several devices are told to be {slot}: which one it was is not known)"
        )
    told = min((one.time for one in known if one.time), default=None)
    here = any(one.origin == signal.origin for one in known)
    when = "later" if told and signal.time else "at a time that is not known"
    sure = slot.startswith("MIG-") or (signal.time is None and here) or (told and signal.time and told <= signal.time)
    if not sure:
        reason += f" (it says {slot}; that this device is there was told {when}: before, it may have been another)"
    return replace(signal, device=known[0].device, reason=reason)


def _events(signals: list[Signal]) -> list[Signal]:
    """Without the records that say of an event no more than another does."""
    full = {(one.code, one.device, (one.time or "")[:19]) for one in signals if one.evidence}
    stamped = {(one.host, one.code, one.device, one.evidence) for one in signals if one.time and one.host}
    times: dict[tuple[str, ...], int] = defaultdict(int)
    seen: set[tuple[str | int, ...]] = set()
    kept = []
    for one in signals:
        if one.kind == "no-evidence":
            kept.append(one)
            continue
        what, second, number = (one.host, one.code, one.device), (one.time or "")[:19], 0
        if not one.evidence and (one.code, one.device, second) in full:
            continue
        if not second and PLACE.match(one.evidence) and (*what, one.evidence) in stamped:
            continue  # of the ring buffer, and also stamped
        if not second and not is_once(one):
            like = (one.via, one.origin, *what, said(one))
            times[like] += 1
            number = times[like]
        key = (*what, second, said(one), number)
        if key not in seen:  # else read by its address and by its UUID, or from two copies that name no host
            seen.add(key)
            kept.append(one)
    return kept


def _without_copies(signals: list[Signal]) -> list[Signal]:
    """Without lines that another source of the same host stamped a little earlier."""
    groups: dict[tuple[str, ...], list[Signal]] = defaultdict(list)
    for one in signals:
        if one.host and one.time and one.evidence and one.source in LINES and one.code != IDENTITY:
            groups[one.host, one.code, one.device, said(one)].append(one)
    copies: set[int] = set()
    for group in groups.values():
        last: Signal | None = None
        for one in sorted(group, key=lambda each: each.time or ""):
            if last is not None and one.origin != last.origin and _apart(last, one) <= _COPY:
                copies.add(id(one))
            else:
                last = one
    return [one for one in signals if id(one) not in copies]


def _apart(one: Signal, other: Signal) -> timedelta:
    first, second = one.moment, other.moment
    return abs(second - first) if first and second else timedelta.max


def _repeated(signals: list[Signal]) -> list[Signal]:
    """Contained memory errors that came again on the same device weigh more than the first of them."""
    first: dict[tuple[str, str], Signal] = {}
    for one in sorted(signals, key=lambda each: each.time or ""):
        if _is_contained(one):
            first.setdefault((place_of(one), one.device), one)
    return [_again(one, first[place_of(one), one.device]) if _is_contained(one) else one for one in signals]


def _is_contained(one: Signal) -> bool:
    return one.code == _CONTAINED and one.weight == "medium" and bool(one.device and one.time)


def _again(one: Signal, first: Signal) -> Signal:
    if _apart(first, one) < _AGAIN:  # one error ends several programs, each with a line
        return one
    return replace(one, weight="strong", reason=f"{one.reason} (it did: it was there at {first.time} already)")
