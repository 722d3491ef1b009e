"""The policy of a fleet: one TOML file that says when a node may be touched, by whom it is read, and how much at a time.

It is a file and not a set of options because the people who own the nodes must be able to read it, argue about it and keep it
under review. Every setting has a default that touches nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, time, timedelta, tzinfo
from pathlib import Path
from typing import Any, Literal, Self, cast
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from bitwitness.durations import seconds_of
from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import ActKind

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_QUIET = re.compile(r"(?:(?P<days>[A-Za-z,-]+)\s+)?(?P<first>\d{2}:\d{2})-(?P<last>\d{2}:\d{2})")
_BRACKET = re.compile(r"\[!?\]?[^\[\]]+\]|\[\[\]|\[!?\]\]")
_LIST = re.compile(r",|[0-9]{2,}-|-[0-9]{2,}")
"""What stands in the brackets of a list of nodes, and hardly ever in those of a pattern."""
_MAY: tuple[ActKind, ...] = ("drain", "reboot", "replace")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Hours in which nothing is done to a node by itself.

    Attributes:
        days: on which they begin, 0 for Monday.
        first, last: times of day; a `last` that is not after `first` is on the next day, and 24:00 is the end of the day.
        zone: in which the times are meant.
    """

    days: frozenset[int]
    first: time
    last: time | None
    zone: tzinfo = UTC

    @classmethod
    def parse(cls, text: str, zone: tzinfo = UTC) -> QuietHours:
        """Of `22:00-06:00`, `Sat,Sun 00:00-24:00` or `Mon-Fri 18:00-08:00`.

        Raises:
            ValueError: it is none of these.
        """
        match = _QUIET.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is none of the kind '22:00-06:00' or 'Sat,Sun 00:00-24:00'")
        days = _days_of(match["days"]) if match["days"] else frozenset(range(7))
        first, last = time.fromisoformat(match["first"]), None
        if match["last"] != "24:00":
            last = time.fromisoformat(match["last"])
        if first == last:
            raise ValueError(f"{text!r} begins and ends at the same time; a whole day is '00:00-24:00'")
        return cls(days, first, last, zone)

    def until(self, now: datetime) -> datetime | None:
        """When the quiet hours in which `now` lies end, in UTC; None where it lies in none."""
        local = now.astimezone(self.zone)
        for back in (1, 0):  # those that began yesterday first
            day = local.date() - timedelta(days=back)
            if day.weekday() not in self.days:
                continue
            begin = datetime.combine(day, self.first, self.zone)
            later = self.last is None or self.last <= self.first
            end = datetime.combine(day + timedelta(days=later), self.last or time(0), self.zone)
            if begin <= local < end:
                return end.astimezone(UTC)
        return None


def _days_of(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        ends = [day[:3] for day in part.split("-")]
        if not 1 <= len(ends) <= 2 or any(day not in _DAYS for day in ends):
            raise ValueError(f"{text!r} names no days: give e.g. Sat,Sun or Mon-Fri")
        first, last = _DAYS.index(ends[0]), _DAYS.index(ends[-1])
        found |= {(first + step) % 7 for step in range((last - first) % 7 + 1)}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """When a node may be touched, and how much at a time.

    Attributes:
        act: whether anything is done at all; without it everything is decided, said and kept, and no node is touched.
        owner: whom people are told to ask, e.g. a team or an address.
        may: what may be done to a node by itself; a reboot or replacement that is not among these becomes a drain.
        approve: acts that wait for a person's approval; what an act becomes counts.
        strikes, strike_window: so many incidents that name one device within this time count like a persistent fault.
        shadow: what follows from an incident of a job in shadow mode: `contact` a person, or `act` as on any other.
        drills: what follows from an incident that faults injected on purpose explain: `contact`, or `act`, to try the whole chain.
        nodes_per_hour: how many nodes are touched within any hour, at most.
        cluster_share: which share of all nodes may be out of service, whoever took them out; at least one node may.
        act_within: an act that had to wait for longer is left to a person.
        protect: nodes that are never touched, as patterns such as `login*`.
        quiet_hours: when nothing is done to a node by itself.
        requeue: whether a job that ended because of an incident is started again without the node.
        signals_before, signals_after: the window around an incident in which hardware signals count.
        logs: files with hardware signals, with `{node}` for the name of the node; of one without it, only lines that name a node count.
        metrics: address of a Prometheus that scrapes dcgm-exporter, or "".
        cluster: which cluster and how it is reached: `kind` and what that kind takes.
        notify: who is told and how: of each its `kind` and what that kind takes.

    Raises:
        ConfigurationError: a value is impossible; names the setting.
    """

    act: bool = False
    owner: str = ""
    may: frozenset[ActKind] = frozenset({"drain"})
    approve: frozenset[ActKind] = frozenset()
    strikes: int = 3
    strike_window: timedelta = timedelta(days=7)
    shadow: Literal["contact", "act"] = "contact"
    drills: Literal["contact", "act"] = "contact"
    nodes_per_hour: int = 2
    cluster_share: float = 0.05
    act_within: timedelta = timedelta(hours=24)
    protect: tuple[str, ...] = ()
    quiet_hours: tuple[QuietHours, ...] = ()
    requeue: bool = True
    signals_before: timedelta = timedelta(hours=24)
    signals_after: timedelta = timedelta(minutes=10)
    logs: tuple[str, ...] = ()
    metrics: str = ""
    cluster: Mapping[str, Any] = field(default_factory=lambda: {"kind": "local"})
    notify: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("strikes", "nodes_per_hour"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} = {value!r}: must be a whole number, at least 1")
        share = self.cluster_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(f"cluster_share = {share!r}: must be a share of the nodes, above 0 and at most 1")
        for name in ("strike_window", "act_within"):
            if getattr(self, name) <= timedelta(0):
                raise ConfigurationError(f"{name}: must be a time above 0, e.g. 24h")
        unknown = self.may - set(_MAY)
        if unknown or "drain" not in self.may:
            listed = ", ".join(f'"{one}"' for one in sorted(self.may))
            raise ConfigurationError(
                f'may = [{listed}]: must hold "drain", and besides it only "reboot" and "replace"; to touch nothing: act = false'
            )
        if strange := self.approve - set(_MAY):
            listed = ", ".join(f'"{one}"' for one in sorted(strange))
            raise ConfigurationError(f'approve has {listed}: must be a list of "drain", "reboot" and "replace"')
        for name in ("shadow", "drills"):
            if getattr(self, name) not in ("contact", "act"):
                raise ConfigurationError(f'{name} = {getattr(self, name)!r}: must be "contact" or "act"')

    @classmethod
    def load(cls, path: Path) -> Self:
        """A policy from a TOML file; what the file does not say is as the defaults.

        Raises:
            ConfigurationError: the file cannot be read, a setting is unknown, or a value impossible; names the file and the setting.
        """
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"policy file {path} cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"policy file {path} is not TOML: {error}") from error
        try:
            return cls(**_settings(content))
        except ConfigurationError as error:
            raise ConfigurationError(f"policy file {path}: {error}") from error

    def allowed_out(self, total: int) -> int:
        """How many nodes of a cluster of so many may be out of service."""
        return max(1, int(self.cluster_share * total))


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a policy, each turned into its type; the zone is needed before the hours can be read."""
    zone = _zone(content.get("time_zone", "UTC"))
    signals = content.get("signals", {})
    if not isinstance(signals, Mapping):
        raise ConfigurationError("[signals] must be a table")
    stray = set(signals) - set(_SIGNALS)
    flat = {name: value for name, value in content.items() if name not in ("signals", "time_zone")}
    known = {one.name for one in fields(FleetPolicy)} - set(_SIGNALS.values())
    unknown = sorted({*(set(flat) - known), *(f"signals.{name}" for name in stray)})
    if unknown:
        there = ", ".join([*sorted(known), "time_zone", *(f"signals.{name}" for name in _SIGNALS)])
        raise ConfigurationError(f"no such setting: {', '.join(unknown)}; settings are {there}")
    flat |= {_SIGNALS[name]: value for name, value in signals.items()}
    return {name: _READERS[name](name, value, zone) for name, value in flat.items()}


_SIGNALS = {"before": "signals_before", "after": "signals_after", "logs": "logs", "metrics": "metrics"}


def _zone(name: object) -> tzinfo:
    try:
        return ZoneInfo(str(name)) if name != "UTC" else UTC
    except (KeyError, OSError, ValueError) as error:
        raise ConfigurationError(f"time_zone = {name!r}: no such time zone on this machine") from error


def _is(kind: type | tuple[type, ...], what: str) -> Callable[[str, Any, tzinfo], Any]:
    def read(name: str, value: Any, zone: tzinfo) -> Any:
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ConfigurationError(f"{name} = {value!r:.80}: must be {what}")
        return value

    return read


def _duration(name: str, value: Any, zone: tzinfo) -> timedelta:
    try:
        return timedelta(seconds=seconds_of(str(value)))
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _texts(name: str, value: Any, zone: tzinfo) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one.strip() for one in value):
        raise ConfigurationError(f"{name} = {value!r:.80}: must be a list of texts")
    return tuple(value)


def _may(name: str, value: Any, zone: tzinfo) -> frozenset[ActKind]:
    return frozenset(cast("tuple[ActKind, ...]", _texts(name, value, zone)))


def _quiet(name: str, value: Any, zone: tzinfo) -> tuple[QuietHours, ...]:
    try:
        return tuple(QuietHours.parse(text, zone) for text in _texts(name, value, zone))
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from error


def _tables(name: str, value: Any, zone: tzinfo) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("kind"), str) for one in value
    ):
        raise ConfigurationError(f"[[{name}]] must be tables with a kind")
    return tuple(value)


def _table(name: str, value: Any, zone: tzinfo) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
        raise ConfigurationError(f"[{name}] must be a table with a kind")
    return value


def _address(name: str, value: Any, zone: tzinfo) -> str:
    """An address without a password: it is shown in reasons, messages and files that many can read."""
    text = cast("str", _is(str, "an address")(name, value, zone))
    if "@" in text:
        raise ConfigurationError(
            f"signals.{name}: no user or password may stand in the address, which is shown to people; let Prometheus take"
            " questions of this host, or put a proxy on loopback that adds them"
        )
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:
        good = False
    if text and not good:
        raise ConfigurationError(
            f"signals.{name} = {text!r:.120}: must be the address of a Prometheus, e.g. http://prometheus:9090"
        )
    return text


def _patterns(name: str, value: Any, zone: tzinfo) -> tuple[str, ...]:
    """Patterns of names of nodes: one that is not meant as it reads protects nobody, and nobody would see it."""
    for text in (found := _texts(name, value, zone)):
        if any(_LIST.search(inside) for inside in _brackets(name, text)):
            raise ConfigurationError(
                f"{name}: {text!r:.120} is a list as Slurm writes it. In a pattern [0-9] is one character: give several patterns"
            )
    return found


def _logs(name: str, value: Any, zone: tzinfo) -> tuple[str, ...]:
    for text in (found := _texts(name, value, zone)):
        rest = text.replace("{node}", "")
        if "{" in rest or "}" in rest:
            raise ConfigurationError(
                f"signals.{name}: {text!r:.120} may have {{node}} for the name of the node, and no other braces"
            )
        _brackets(f"signals.{name}", text)
    return found


def _brackets(name: str, text: str) -> list[str]:
    """What stands in the brackets of a pattern.

    Raises:
        ConfigurationError: one is not closed, or closed and not opened; it would be taken for a plain character.
    """
    rest = _BRACKET.sub("", text)
    if "[" in rest or "]" in rest:
        raise ConfigurationError(f"{name}: {text!r:.120} has a bracket that is not closed, or not opened")
    return _BRACKET.findall(text)


_READERS: dict[str, Callable[[str, Any, tzinfo], Any]] = {
    "act": _is(bool, "true or false"),
    "owner": _is(str, "a text"),
    "may": _may,
    "approve": _may,
    "strikes": _is(int, "a whole number"),
    "strike_window": _duration,
    "shadow": _is(str, 'a text: "contact" or "act"'),
    "drills": _is(str, 'a text: "contact" or "act"'),
    "nodes_per_hour": _is(int, "a whole number"),
    "cluster_share": _is((int, float), "a share of the nodes"),
    "act_within": _duration,
    "protect": _patterns,
    "quiet_hours": _quiet,
    "requeue": _is(bool, "true or false"),
    "signals_before": _duration,
    "signals_after": _duration,
    "logs": _logs,
    "metrics": _address,
    "cluster": _table,
    "notify": _tables,
}
