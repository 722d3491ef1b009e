"""When a line of a log was written, and by which host, out of the many forms in which logs say so.

Half of these forms leave out the year, the zone or both, and the ring buffer of the kernel counts from boot. What is missing
is filled in by rules that are stated (`settle`), never by guessing in silence: where no rule applies, there is no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from bitwitness.errors import ConfigurationError

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
_AHEAD = timedelta(days=1)
"""How far after *now* a time without a year may lie: clocks and zones differ by less."""
_DEEPEST = 5


@dataclass(frozen=True, slots=True)
class Clock:
    """What is needed to settle an incomplete time.

    Attributes:
        now: when the log was read or last written; a time without year is put nearest before it.
        zone: of times that do not say theirs.
        boot: when the machine started, for times that count from then; None where nobody knows.
    """

    now: datetime
    zone: tzinfo = UTC
    boot: datetime | None = None


@dataclass(frozen=True, slots=True)
class Stamped:
    """A line without its stamps.

    Attributes:
        text: what was logged.
        time: in UTC, or None.
        host: who logged it, or "".
        relative: seconds since boot as the line has them, where that is all it says; else "".
        known: whether the line begins as lines of logs do.
    """

    text: str
    time: datetime | None = None
    host: str = ""
    relative: str = ""
    known: bool = False


@dataclass(frozen=True, slots=True)
class _Prefix:
    """One stamp at the beginning of a line. `sure`: it says year and zone itself."""

    rest: str
    time: datetime | None = None
    host: str = ""
    sure: bool = False
    relative: str = ""


def iso(moment: datetime) -> str:
    """A time as records have it: UTC, ISO 8601, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_zone(name: str) -> tzinfo:
    """A zone by name (`Europe/Berlin`, `UTC`, `+02:00`, `local`).

    Raises:
        ConfigurationError: there is no such zone.
    """
    if name == "local":
        here = datetime.now(UTC).astimezone().tzinfo
        return here or UTC
    offset = re.fullmatch(r"([+-])(\d\d):?(\d\d)", name)
    if offset is not None and int(offset[2]) < 24 and int(offset[3]) < 60:
        ahead = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        return timezone(ahead if offset[1] == "+" else -ahead)
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(f"no such zone: {name!r}; give one as Europe/Berlin, +02:00, UTC or local") from error


def parse_time(text: str, zone: tzinfo = UTC) -> datetime:
    """A time that a person gave, in UTC; without a zone it is meant in `zone`.

    Raises:
        ConfigurationError: it is not ISO 8601.
    """
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"no time: {text!r}; give one as 2026-11-29T09:30:15Z") from error


def split(line: str, clock: Clock) -> Stamped:
    """Take all stamps off the beginning of a line.

    Logs are forwarded into logs, so a line may have several. The innermost that says its year and zone counts; if none
    does, the outermost of the others.
    """
    rest, found = line.lstrip("\ufeff \t"), list[_Prefix]()
    while len(found) < _DEEPEST:
        prefix = next((made for form in _FORMS if (made := form(rest, clock)) is not None), None)
        if prefix is None:
            break
        found.append(prefix)
        rest = prefix.rest
    dated = [one for one in found if one.time is not None]
    best = next((one for one in reversed(dated) if one.sure), dated[0] if dated else None)
    host = next((one.host for one in reversed(found) if one.host), "")
    relative = next((one.relative for one in reversed(found) if one.relative), "")
    time = None if best is None else best.time
    if time is None and relative:
        time = _since_boot(relative, clock)
    return Stamped(rest, time, host, relative if time is None else "", bool(found))


def _since_boot(seconds: str, clock: Clock) -> datetime | None:
    if clock.boot is None:
        return None
    try:
        return clock.boot + timedelta(seconds=float(seconds))
    except (ValueError, OverflowError):
        return None


def settle(parts: tuple[int, int, int, int, int, int], micro: int, clock: Clock) -> datetime | None:
    """A time without year (0) or without zone, in UTC.

    Without a year it is put into the year that brings it nearest before *now*; up to a day after *now* is let pass, because
    clocks and zones differ. Without a zone it is meant in the clock's zone.
    """
    year, month, day, hour, minute, second = parts
    latest = clock.now.year + 1  # in some zones it is next year already
    for candidate in (year,) if year else range(latest, latest - 10, -1):
        try:
            made = datetime(candidate, month, day, hour, minute, second, micro, clock.zone).astimezone(UTC)
            if year or made <= clock.now + _AHEAD:
                return made
        except (ValueError, OverflowError):  # no such day in this year, or none at all
            continue
    return None


# The forms ------------------------------------------------------------------------------------------------------------

_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
_ISO = re.compile(rf"\[?(\d{{4}})[-/](\d\d)[-/](\d\d)[T ]{_CLOCK} ?(Z|UTC|[+-]\d\d:?\d\d)?\]?(?=[\s\[\]\"]|$)\s*")
_DAY = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\s+)"
_SYSLOG = re.compile(rf"{_DAY}?([A-Z][a-z]{{2}})\s+(\d{{1,2}})\s+(?:(\d{{4}})\s+)?{_CLOCK}(?:\s+(?:(\d{{4}})\s+))?\s*")
_CTIME = re.compile(rf"\[{_DAY}([A-Z][a-z]{{2}})\s+(\d{{1,2}})\s+{_CLOCK}\s+(\d{{4}})\]\s*")
_FULL = re.compile(rf"{_DAY}(\d{{4}})-(\d\d)-(\d\d)\s+{_CLOCK}\s+(UTC|GMT|[A-Z]{{2,5}}|[+-]\d\d:?\d\d)?\s*")
_KLOG = re.compile(rf"[IWEF](\d\d)(\d\d)\s+{_CLOCK}\s+\d+\s+[^\s\]]{{1,200}}:\d+\]\s*")
_RING = re.compile(r"\[\s*(\d{1,12}\.\d{1,9})(?:\]|\s*<\s*[+\d.]+>\])\s*(?:\[\s*[TC]\d+\]\s*)?")
_KMSG = re.compile(r"\d{1,4},\d{1,20},(\d{1,18}),[^;]{1,40};")
_PRIORITY = re.compile(r"<\d{1,3}>(?=\S)|data: (?=\{)")
_UNIX = re.compile(r"(\d{9,11})\.(\d{6})\s+")
_WITHOUT_TIME = re.compile(r"\[(?:[A-Z][a-z]{2}\s?\d{1,2} \d\d:\d\d|\s*\+\d+\.\d+|<\s*[\d.]+>)\]\s*")
"""What `dmesg` prints with `--reltime` or `--time-format=delta`: lengths of time between lines, which say when none was."""
_GREP = re.compile(r"[\w./+-]{1,250}:(?:\d+:)? ?(?=[A-Z][a-z]{2}\s+\d|\d{4}-\d\d-\d\d|<\d|\[\s*\d)|time=\"?(?=\d{4}-)")
"""What grep prints before a line: the name of the file."""
_SPREAD = re.compile(r"(?!kernel:)([A-Za-z0-9][\w.-]{0,252}): +(?=\[\s*\d+\.\d+\]|\[[A-Z][a-z]{2} [A-Z])")
"""What pdsh and its kind print before a line: the name of the node."""
_OF_KERNEL = re.compile(r"([A-Za-z0-9_][\w.:-]{0,252}) kernel:\s+")
_FACILITY = re.compile(r"(?:kern|user|daemon|syslog)\s*:(?:emerg|alert|crit|err|warn|notice|info|debug)\s*:\s*")
_HOST = re.compile(
    r"([A-Za-z0-9_](?:[A-Za-z0-9_.:-]{0,252}[A-Za-z0-9_])?)\s+(?=[A-Za-z0-9_./()@-]{1,128}(?:\[\d+\])?:(?:\s|$))"
)
_TAG = re.compile(r"[A-Za-z0-9_./()@-]{1,128}(?:\[\d+\])?:\s+")
_RFC5424 = re.compile(r"1 (?=\d{4}-)")
_AFTER_5424 = re.compile(r"(\S{1,255}) (\S{1,48}) (\S{1,128}) (\S{1,32}) (?:-|(?:\[[^\]]{0,4000}\])+)\s*(?:\ufeff)?")
_CRI = re.compile(r"(?:stdout|stderr) [FP](?::\S+)? ")


def _micro(digits: str | None) -> int:
    return int((digits or "")[:6].ljust(6, "0"))


def _offset(text: str) -> tzinfo | None:
    if text in ("Z", "UTC", "GMT"):
        return UTC
    try:
        return parse_zone(text) if text[:1] in ("+", "-") else None
    except ConfigurationError:
        return None


def _iso(line: str, clock: Clock) -> _Prefix | None:
    head = _RFC5424.match(line)
    found = _ISO.match(line, head.end() if head else 0)
    if found is None:
        return None
    *parts, micro, zone = found.groups()
    known = _offset(zone or "")
    used = Clock(clock.now, known or clock.zone)
    numbers = tuple(int(one) for one in parts)
    time = settle(numbers, _micro(micro), used)  # type: ignore[arg-type]
    rest = line[found.end() :]
    if time is None:
        return None
    after = _AFTER_5424.match(rest) if head else None
    if after is not None:
        host = "" if after[1] == "-" else after[1]
        return _Prefix(rest[after.end() :], time, host, known is not None)
    return _with_host(rest, time, known is not None)


def _with_host(rest: str, time: datetime | None, sure: bool) -> _Prefix:
    """What follows a time in a line of syslog: host and program, or neither."""
    cri = _CRI.match(rest)
    if cri is not None:
        return _Prefix(rest[cri.end() :], time, "", sure)
    host = _HOST.match(rest)
    rest = rest[host.end() :] if host else rest
    tag = _TAG.match(rest)
    if tag is not None and (host is not None or tag[0].startswith("kernel:")):
        rest = rest[tag.end() :]
    return _Prefix(rest, time, host[1] if host else "", sure)


def _syslog(line: str, clock: Clock) -> _Prefix | None:
    found = _SYSLOG.match(line)
    if found is None or found[1] not in _MONTHS:
        return None
    name, day, year, hour, minute, second, micro, late = found.groups()
    parts = (int(year or late or 0), _MONTHS[name], int(day), int(hour), int(minute), int(second))
    time = settle(parts, _micro(micro), clock)
    return None if time is None else _with_host(line[found.end() :], time, False)


def _ctime(line: str, clock: Clock) -> _Prefix | None:
    found = _CTIME.match(line)
    if found is None or found[1] not in _MONTHS:
        return None
    name, day, hour, minute, second, micro, year = found.groups()
    time = settle((int(year), _MONTHS[name], int(day), int(hour), int(minute), int(second)), _micro(micro), clock)
    return None if time is None else _Prefix(line[found.end() :], time)


def _full(line: str, clock: Clock) -> _Prefix | None:
    found = _FULL.match(line)
    if found is None:
        return None
    *parts, micro, zone = found.groups()
    known = _offset(zone or "")
    numbers = tuple(int(one) for one in parts)
    time = settle(numbers, _micro(micro), Clock(clock.now, known or clock.zone))  # type: ignore[arg-type]
    return None if time is None else _with_host(line[found.end() :], time, known is not None)


def _klog(line: str, clock: Clock) -> _Prefix | None:
    found = _KLOG.match(line)
    if found is None:
        return None
    month, day, hour, minute, second, micro = found.groups()
    time = settle((0, int(month), int(day), int(hour), int(minute), int(second)), _micro(micro), clock)
    return None if time is None else _Prefix(line[found.end() :], time)


def _ring(line: str, clock: Clock) -> _Prefix | None:
    found = _RING.match(line)
    if found is None:
        return None
    host = _OF_KERNEL.match(line, found.end())  # journalctl -o short-monotonic
    return _Prefix(line[(host or found).end() :], host=host[1] if host else "", relative=found[1])


def _kmsg(line: str, clock: Clock) -> _Prefix | None:
    found = _KMSG.match(line)
    return None if found is None else _Prefix(line[found.end() :], relative=f"{int(found[1]) / 1e6:.6f}")


def _unix(line: str, clock: Clock) -> _Prefix | None:
    found = _UNIX.match(line)
    if found is None:
        return None
    return _with_host(line[found.end() :], datetime.fromtimestamp(int(found[1]) + int(found[2]) / 1e6, UTC), True)


def _marks(line: str, clock: Clock) -> _Prefix | None:
    """What may stand before a stamp and says no time: a priority, facility and level, the name of a file or a node."""
    spread = _SPREAD.match(line)
    if spread is not None:
        return _Prefix(line[spread.end() :], host=spread[1])
    found = next((made for form in _MARKS if (made := form.match(line)) is not None), None)
    return None if found is None else _Prefix(line[found.end() :])


_MARKS = (_PRIORITY, _FACILITY, _WITHOUT_TIME, _GREP)
_FORMS: tuple[Callable[[str, Clock], _Prefix | None], ...] = (
    _ring,
    _iso,
    _syslog,
    _ctime,
    _full,
    _klog,
    _kmsg,
    _unix,
    _marks,
)
