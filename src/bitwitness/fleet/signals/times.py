"""When a line of a log was written, and by which host, out of the many forms in which logs say so.

Half of these forms leave out the year, the zone or both, and the ring buffer of the kernel counts from boot. What is missing
is filled in by rules that are stated (`settle`), never by guessing in silence: where no rule applies, there is no time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
_FORWARDING = timedelta(seconds=5)
"""What forwarding a line takes; two stamps that differ by that and a zone tell the same moment."""
_WIDEST_ZONE = timedelta(hours=14)
_HALF_HOUR = timedelta(minutes=30)
_ZONES = {
    **dict.fromkeys(("Z", "UTC", "GMT", "WET"), 0),
    "EST": -5,
    "EDT": -4,
    "CDT": -5,
    "MST": -7,
    "MDT": -6,
    "PST": -8,
    "PDT": -7,
    "AKST": -9,
    "AKDT": -8,
    "HST": -10,
    "CET": 1,
    "CEST": 2,
    "MEZ": 1,
    "MESZ": 2,
    "WEST": 1,
    "EET": 2,
    "EEST": 3,
    "MSK": 3,
    "JST": 9,
    "KST": 9,
    "AEST": 10,
    "AEDT": 11,
    "NZST": 12,
    "NZDT": 13,
}
"""Hours ahead of UTC, of words for zones that mean one zone in the whole world."""
_UNCLEAR = ("IST", "CST", "BST", "AST", "ADT", "SST", "PKT", "SGT", "HKT", "WIB")
"""Words for zones that mean several, or that not everybody knows: they count where the zone that was given has that name."""


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
        sure: whether the time is said with year and zone.
        doubt: why it has no time although it says one; "" where it has, or says none.
        place: seconds since boot as the line has them, also where it says more than that.
        programs: who wrote it and who forwarded it, the outermost first.
        forwarded: whether the time is only that of a container's log, and the line itself counts from boot.
    """

    text: str
    time: datetime | None = None
    host: str = ""
    relative: str = ""
    known: bool = False
    sure: bool = False
    doubt: str = ""
    place: str = ""
    programs: tuple[str, ...] = ()
    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class _Prefix:
    """One stamp at the beginning of a line. `sure`: it says year and zone itself."""

    rest: str
    time: datetime | None = None
    host: str = ""
    sure: bool = False
    relative: str = ""
    doubt: str = ""
    program: str = ""
    container: bool = False


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

    Logs are forwarded into logs, so a line may have several. The innermost counts, because what forwards a line may do so
    days later; where it does not say its zone, and an outer one is the same moment in another zone, the outer one does.
    """
    rest, found = line.lstrip("\ufeff \t"), list[_Prefix]()
    while len(found) < _DEEPEST:
        prefix = next((made for form in _FORMS if (made := form(rest, clock)) is not None), None)
        if prefix is None:
            break
        found.append(prefix)
        rest = prefix.rest
    time, sure, doubt = None, False, ""
    for one in found:
        if one.time is not None:
            (time, sure), doubt = inner_of(time, sure, one.time, one.sure), ""
        elif one.doubt:
            time, sure, doubt = None, False, one.doubt
    host = next((one.host for one in reversed(found) if one.host), "")
    place = next((one.relative for one in reversed(found) if one.relative), "")
    if time is None and place and not doubt:
        time = _since_boot(place, clock)
        sure = time is not None
    programs = tuple(one.program for one in found if one.program)
    dated = [one for one in found if one.time is not None]
    forwarded = bool(place and dated and dated[-1].container and not programs)
    relative = place if time is None else ""
    return Stamped(rest, time, host, relative, bool(found), sure, doubt, place, programs, forwarded)


def inner_of(outer: datetime | None, outer_sure: bool, inner: datetime, sure: bool) -> tuple[datetime, bool]:
    """The time of a line that was forwarded, by its own stamp and by the one of whatever forwarded it; and whether it is sure."""
    if outer is None or sure:
        return inner, sure
    apart = abs(outer - inner)
    zones = round(apart / _HALF_HOUR)
    if zones and apart <= _WIDEST_ZONE + _FORWARDING and abs(apart - zones * _HALF_HOUR) <= _FORWARDING:
        return outer, outer_sure
    return inner, sure


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

_WORDS = "|".join(sorted([*_ZONES, *_UNCLEAR], key=len, reverse=True))
_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"
_ISO = re.compile(
    rf"\[?(\d{{4}})[-/](\d\d)[-/](\d\d)[T ]{_CLOCK} ?({_WORDS}|[+-]\d\d(?::?\d\d)?)?\]?(?=[\s\[\]\"]|$)\s*"
)
_DAY = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\s+)"
_SYSLOG = re.compile(
    rf"{_DAY}?([A-Z][a-z]{{2}})\s+(\d{{1,2}})\s+(?:(\d{{4}})\s+)?{_CLOCK}(?:\s+({_WORDS})(?=\s))?(?:\s+(?:(\d{{4}})\s+))?\s*"
)
_CTIME = re.compile(rf"\[{_DAY}([A-Z][a-z]{{2}})\s+(\d{{1,2}})\s+{_CLOCK}\s+(\d{{4}})\]\s*")
_FULL = re.compile(rf"{_DAY}(\d{{4}})-(\d\d)-(\d\d)\s+{_CLOCK}\s+([A-Z]{{2,5}}(?=\s)|[+-]\d\d(?::?\d\d)?)?\s*")
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
_LEVEL = "(?i:trace|debug|info|notice|warn|warning|err|error|crit|critical|alert|emerg|fatal|panic)"
_HOST = re.compile(
    rf"(?!{_LEVEL}\s)"
    r"([A-Za-z0-9_](?:[A-Za-z0-9_.:-]{0,252}[A-Za-z0-9_])?)\s+(?=[A-Za-z0-9_./()@-]{1,128}(?:\[\d+\])?:(?:\s|$))"
)
_TAG = re.compile(r"(?!NVRM:|mce:)([A-Za-z0-9_./()@-]{1,128})(?:\[\d+\])?:\s+")
_RFC5424 = re.compile(r"1 (?=\d{4}-)")
_AFTER_5424 = re.compile(r"(\S{1,255}) (\S{1,48}) (\S{1,128}) (\S{1,32}) (?:-|(?:\[[^\]]{0,4000}\])+)\s*(?:\ufeff)?")
_CRI = re.compile(r"(?:stdout|stderr) [FP](?::\S+)? ")


def _micro(digits: str | None) -> int:
    return int((digits or "")[:6].ljust(6, "0"))


def _settled(
    parts: tuple[int, int, int, int, int, int], micro: str | None, word: str | None, clock: Clock
) -> tuple[datetime | None, bool, str]:
    """The time, whether its zone is sure, and why there is no time although one is said.

    A zone that is not known leaves no time: to take another one in silence would move an error into an incident, or out of it.
    """
    if not word:
        return settle(parts, _micro(micro), clock), False, ""
    zone = _zone(word)
    if zone is None:
        there = settle(parts, _micro(micro), clock)
        if there is not None and there.astimezone(clock.zone).tzname() == word:
            return there, True, ""
        return None, False, f"its zone {word!r} is not known or means several: give it with --zone"
    return settle(parts, _micro(micro), Clock(clock.now, zone)), True, ""


def _zone(word: str) -> tzinfo | None:
    if word in _ZONES:
        return timezone(timedelta(hours=_ZONES[word])) if _ZONES[word] else UTC
    try:
        return parse_zone(word if len(word) > 3 else f"{word}00") if word[:1] in ("+", "-") else None
    except ConfigurationError:
        return None


def _iso(line: str, clock: Clock) -> _Prefix | None:
    head = _RFC5424.match(line)
    found = _ISO.match(line, head.end() if head else 0)
    if found is None:
        return None
    *parts, micro, word = found.groups()
    if parts[0] == "0000":
        time, sure, doubt = None, False, "its year 0000 is none"
    else:
        time, sure, doubt = _settled(_numbers(parts), micro, word, clock)
    rest = line[found.end() :]
    if time is None and not doubt:
        return None
    after = _AFTER_5424.match(rest) if head else None
    if after is not None:
        host, program = ("" if one == "-" else one for one in (after[1], after[2]))
        return _Prefix(rest[after.end() :], time, host, sure, doubt=doubt, program=program)
    return _with_host(rest, time, sure, doubt)


def _numbers(parts: Sequence[str]) -> tuple[int, int, int, int, int, int]:
    year, month, day, hour, minute, second = (int(one) for one in parts)
    return year, month, day, hour, minute, second


def _with_host(rest: str, time: datetime | None, sure: bool, doubt: str = "") -> _Prefix:
    """What follows a time in a line of syslog: host and program, or neither."""
    cri = _CRI.match(rest)
    if cri is not None:
        return _Prefix(rest[cri.end() :], time, "", sure, doubt=doubt, container=True)
    host = _HOST.match(rest)
    rest = rest[host.end() :] if host else rest
    tag, program = _TAG.match(rest), ""
    if tag is not None and (host is not None or tag[1] == "kernel"):
        rest, program = rest[tag.end() :], tag[1]
    return _Prefix(rest, time, host[1] if host else "", sure, doubt=doubt, program=program)


def _syslog(line: str, clock: Clock) -> _Prefix | None:
    found = _SYSLOG.match(line)
    if found is None or found[1] not in _MONTHS:
        return None
    name, day, year, hour, minute, second, micro, word, late = found.groups()
    parts = (int(year or late or 0), _MONTHS[name], int(day), int(hour), int(minute), int(second))
    time, _, doubt = _settled(parts, micro, word, clock)
    return None if time is None and not doubt else _with_host(line[found.end() :], time, False, doubt)


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
    *parts, micro, word = found.groups()
    time, sure, doubt = _settled(_numbers(parts), micro, word, clock)
    return None if time is None and not doubt else _with_host(line[found.end() :], time, sure, doubt)


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
    program = "kernel" if host else ""
    return _Prefix(line[(host or found).end() :], host=host[1] if host else "", relative=found[1], program=program)


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
