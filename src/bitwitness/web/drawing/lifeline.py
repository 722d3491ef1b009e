"""The life of a node or device on one axis of time: where it was, when it was named, when it was only involved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from bitwitness.store.pages import NodePage, StrikeRow
from bitwitness.web.drawing.scales import WIDE, Tick

_LANES = 12
_LEAST = 0.6
_SIZES = (1, 5, 15, 60, 360, 1440, 7 * 1440, 30 * 1440, 365 * 1440)


@dataclass(frozen=True, slots=True)
class Bar:
    """A stay, from where to where in percent."""

    x: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    """All stays of one device (of a node) or at one node (of a device)."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Something that happened; `kind`: `strike`, `cleared` or `involved`."""

    x: float
    kind: str
    text: str
    run: int
    incident: str


@dataclass(frozen=True, slots=True)
class Lifeline:
    """All of it; `more` lanes are not drawn."""

    lanes: tuple[Lane, ...]
    points: tuple[Point, ...]
    ticks: tuple[Tick, ...]
    more: int


def lifeline(page: NodePage) -> Lifeline | None:
    """The line of a node or device; None where no time is known."""
    stays = [(one, _time(one.first), _time(one.last)) for one in page.stays]
    events = [_strike(one) for one in page.strikes if one.run]  # whatever else is on record has no page, and no time
    events += [
        (_time(one.time), "involved", f"{one.headline}: involved, no blame", one.run, one.id) for one in page.involved
    ]
    times = [time for _, *both in stays for time in both if time] + [time for time, *_ in events if time]
    if not times:
        return None
    first, last = min(times), max(times)
    span = max((last - first).total_seconds(), 60.0)

    def at(time: datetime) -> float:
        return round(min(max((time - first).total_seconds() / span, 0.0), 1.0) * (WIDE - 2) + 1, 3)

    by_name: dict[str, list[Bar]] = {}
    for stay, *both in stays:
        seen = [time for time in both if time]
        if not seen:
            continue
        begin, end = min(seen), max(seen)
        name = stay.device if page.kind == "node" else stay.node
        text = f"{stay.device} on {stay.node}, rank {stay.rank} of {stay.run_name}, {_day(begin)} to {_day(end)}"
        by_name.setdefault(name, []).append(Bar(at(begin), max(round(at(end) - at(begin), 3), _LEAST), text))
    lanes = [Lane(name, tuple(bars)) for name, bars in by_name.items()]
    points = tuple(Point(at(time), kind, text, run, incident) for time, kind, text, run, incident in events if time)
    return Lifeline(
        tuple(lanes[:_LANES]), points, tuple(_ticks(first, span, at(first), at)), max(0, len(lanes) - _LANES)
    )


def _strike(one: StrikeRow) -> tuple[datetime | None, str, str, int, str]:
    kind = "strike" if one.counts and one.judgement not in ("drill", "false alarm") else "cleared"
    said = "a strike" if kind == "strike" else "does not count"
    return (
        _time(one.time),
        kind,
        f"{one.device} on {one.node} was named ({one.persistence}): {said}",
        one.run,
        one.incident,
    )


def _ticks(first: datetime, span: float, start: float, at: Callable[[datetime], float]) -> Iterable[Tick]:
    minutes = next((size for size in _SIZES if span / 60 / size <= 6), _SIZES[-1])
    found: list[Tick] = []
    size = timedelta(minutes=minutes)
    begin = datetime(first.year, first.month, first.day, tzinfo=UTC)
    count = int((first - begin) / size)
    while len(found) < 8:
        count += 1
        try:
            time = begin + count * size
        except OverflowError:  # no date is so late
            break
        if (time - first).total_seconds() > span:
            break
        found.append(Tick(at(time), f"{time:%H:%M}" if minutes < 1440 else f"{time:%d %b}"))
    return [Tick(start, f"{first:%Y-%m-%d}"), *[tick for tick in found if tick.at - start > 14]]


def _time(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None


def _day(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}"
