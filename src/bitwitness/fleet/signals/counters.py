"""What the values of one field of one device say, over the time for which there are values.

A counter that stands at 3 may have stood there for years. One that was seen to rise from 2 to 3 has a time. So a time is
given to what was seen changing, and to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bitwitness.fleet.signals import catalogue
from bitwitness.fleet.signals.dcgm_fields import ACTIONS, Field, Reading, action_reason, throttled
from bitwitness.fleet.signals.reading import stamp
from bitwitness.fleet.signals.record import Signal, SignalClass, Weight, no_evidence

HOT: Mapping[int, float] = {140: 95.0, 150: 90.0}
"""Above which a temperature is worth a record, in degrees Celsius: data centre devices slow down from about there."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value.

    Attributes:
        time: in seconds since 1970; None where that is not known.
        value: from 0 on.
        told: what the series says of it in words.
    """

    time: float | None
    value: float
    told: str = ""


@dataclass(slots=True)
class Series:
    """The values of one field of one device; `blanks`: how often there was none."""

    points: list[Point] = field(default_factory=list)
    blanks: int = 0


def read_slices(known: Field, parts: Sequence[Series]) -> Iterator[Signal]:
    """The signals of one field of a device of which several slices tell.

    A slice is told the count of the whole device, so the counts are not added up: the one that tells most is taken.
    """
    if known.reading == "count":
        each = [found for series in parts if (found := list(read_series(known, series)))]
        yield from max(each, key=lambda found: (found[0].time is not None, found[0].count), default=[])
    else:
        yield from read_series(known, Series([point for series in parts for point in series.points]))


def read_series(known: Field, series: Series) -> Iterator[Signal]:
    """The signals of one series, which do not say yet which device and host it is of."""
    points = sorted(series.points, key=lambda point: (point.time is not None, point.time or 0.0, point.value))
    if points:
        yield from _READERS[known.reading](known, points)


def _signal(
    known: Field, time: float | None, kind: SignalClass, weight: Weight, why: str, value: float, count: int = 1
) -> Signal:
    evidence = f"{known.names[0]} (DCGM field {known.id}) is {value:.15g}"
    return Signal(
        "dcgm", f"dcgm:{known.id}", "", stamp(time), kind, weight, why, count=max(1, count), evidence=evidence
    )


def _count(known: Field, points: list[Point]) -> Iterator[Signal]:
    risen, at = 0, None
    before: float | None = None
    since: float | None = None
    for point in points:
        # A counter that falls was reset, as a rule with the driver: what it shows was counted since then.
        if point.time is not None and before is not None and since is not None and point.value != before:
            step = point.value - before if point.value > before else point.value
            risen, at = risen + int(step), point.time if step else at
        before, since = point.value, point.time
    most = max(points, key=lambda point: point.value).value
    if risen:
        why = f"rose by {risen} in the time that was looked at, last by then: {known.why}"
        yield _signal(known, at, known.kind, known.fresh or known.weight, why, most, risen)
    elif most:
        why = f"{most:.15g}, at a time that is not known, because it was not seen to rise: {known.why}"
        # Without the number, so that a count that was read again later is the same count, and not added to it.
        evidence = f"{known.names[0]} (DCGM field {known.id}), a count"
        yield replace(_signal(known, None, known.kind, known.weight, why, most, int(most)), evidence=evidence)


def _flag(known: Field, points: list[Point]) -> Iterator[Signal]:
    for time, value, _, seen in _changes(points):
        when = "set then" if seen else "set, since when is not known"
        yield _signal(known, time, known.kind, known.weight, f"{when}: {known.why}", value)


def _changes(points: list[Point]) -> Iterator[tuple[float | None, float, str, bool]]:
    """Time, value, words, and whether it was seen coming: of every value other than 0 that was not there before it.

    Series that carry the value in a label overlap for a while, so several values at one time are all taken.
    """
    by_time: dict[float | None, dict[float, str]] = {}
    for point in points:
        by_time.setdefault(point.time, {}).setdefault(point.value, point.told)
    before: set[float] | None = None
    for time, values in by_time.items():
        for value, told in values.items():
            if value and (before is None or value not in before):
                seen = before is not None and time is not None
                yield time if seen else None, value, told, seen
        before = set(values)


def _xid(known: Field, points: list[Point]) -> Iterator[Signal]:
    kind = "xid" if known.reading == "xid" else "sxid"
    for time, value, told, seen in _changes(points):
        number = int(value)
        entry = catalogue.entry(f"{kind}:{number}")
        when = (
            "The gauge changed to it then"
            if seen
            else "The gauge shows the last one and is never reset, so this was some time before"
        )
        evidence = f"{known.names[0]} (DCGM field {known.id}) is {number}" + (f": {told}" if told else "")
        why = f"{entry.reason}. {when}; repeats of the same number do not show in it"
        yield Signal("dcgm", f"{kind}:{number}", "", stamp(time), entry.kind, entry.weight, why, evidence=evidence)


def _bits(known: Field, points: list[Point]) -> Iterator[Signal]:
    bits = 0
    for point in points:
        bits |= int(point.value)
    faults, limits = throttled(bits)
    if faults or limits:
        last = next(point for point in reversed(points) if throttled(int(point.value)) != ([], []))
        why = f"{', '.join(faults + limits)}: {known.why}"
        yield _signal(known, last.time, "loud" if faults else "noise", "none", why, last.value)


def _celsius(known: Field, points: list[Point]) -> Iterator[Signal]:
    hottest = max(points, key=lambda point: point.value)
    if hottest.value > HOT[known.id]:
        yield _signal(
            known, hottest.time, known.kind, known.weight, f"{hottest.value:g} °C: {known.why}", hottest.value
        )


def _action(known: Field, points: list[Point]) -> Iterator[Signal]:
    for time, value, _, _ in _changes(points):
        _, kind, weight = ACTIONS.get(int(value), ("", "loud", "weak"))
        yield _signal(known, time, kind, weight, action_reason(int(value)), value)


def _mode(known: Field, points: list[Point]) -> Iterator[Signal]:
    if any(point.value == 0 for point in points):
        yield no_evidence("dcgm", f"dcgm:{known.id}", known.why)


def _raw(known: Field, points: list[Point]) -> Iterator[Signal]:
    yield from ()


_READERS: Mapping[Reading, Callable[[Field, list[Point]], Iterator[Signal]]] = {
    "count": _count,
    "flag": _flag,
    "xid": _xid,
    "sxid": _xid,
    "bits": _bits,
    "celsius": _celsius,
    "action": _action,
    "mode": _mode,
    "raw": _raw,
}
