"""`bitwitness fleet signals`: what the hardware says of itself, and what of that weighs beside an incident."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwitness.cli.output import console, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.durations import seconds_of
from bitwitness.errors import RunFilesError
from bitwitness.fleet.signals.merging import times_of
from bitwitness.fleet.signals.record import WEIGHTS, Signal
from bitwitness.runfiles import RunFiles, read_incident

_NO_SIGN = "That nothing was found is no sign of health: silent corruption is in no log."
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_SOURCE = type(GIVEN_PATH)(path_type=Path, readable=False)
"""A file that cannot be read is told as such, and hides no other."""
_OF_HOST = ("edac", "mce", "rasdaemon")
_MEANINGS = {
    "host": "evidence for a fault of the host's memory or processor, not of an accelerator",
    "memory": "evidence for a fault of this device",
    "link": "evidence for a fault of a link, and against blaming one end of it",
}
_STYLES = {"strong": "bold red", "medium": "red", "weak": "yellow", "none": ""}


@dataclass(slots=True)
class _Left:
    """What was read and is not listed, because it is of another node or time: so that silence is not taken for health."""

    asked: bool = False
    others: int = 0
    hosts: set[str] = field(default_factory=set)
    outside: int = 0

    def of_node(self, signals: Iterable[Signal], node: str) -> Iterator[Signal]:
        """The signals of a node."""
        from bitwitness.fleet.signals.gather import of_node

        for one in signals:
            kept = list(of_node((one,), node))
            if not kept and one.kind != "no-evidence":
                self.others += 1
                self.hosts |= {one.host} if len(self.hosts) < 1000 else set()
            yield from kept

    def of_time(self, signals: Iterable[Signal], first: datetime, last: datetime) -> Iterator[Signal]:
        """The signals of a window, those without a time, and which device is where."""
        from bitwitness.fleet.signals.gather import IDENTITY

        for one in signals:
            if one.moment is None or first <= one.moment <= last or one.code == IDENTITY:
                yield one
            else:
                self.outside += 1

    def lines(self) -> Iterator[str]:
        """In words; none where nothing was left out."""
        if self.others:
            some = ", ".join(sorted(self.hosts)[:3]) + (", …" if len(self.hosts) > 3 else "")
            yield f"Read and not listed: {self.others:,} of other nodes ({some})."
        if self.outside:
            yield f"Read and not listed: {self.outside:,} of other times."


def _length(ctx: click.Context, param: click.Parameter, value: str) -> timedelta:
    try:
        return timedelta(seconds=seconds_of(value))
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("more", type=_SOURCE, metavar="[FILE]...", nargs=-1)
@click.option(
    "--from",
    "given",
    type=_SOURCE,
    multiple=True,
    metavar="FILE...",
    help="Read these: logs (also packed), metrics, diagnostics; a directory is its files, - is standard input. Default: this machine.",
)
@click.option("--at", metavar="TIME", help="Only what lies around this time, e.g. 2026-11-29T09:30:15Z.")
@click.option(
    "--incident", type=GIVEN_PATH, metavar="DIR", help="Only what lies around this incident; of a run, the newest."
)
@click.option("--before", callback=_length, default="24h", metavar="TIME", show_default=True, help="How far before it.")
@click.option("--after", callback=_length, default="1h", metavar="TIME", show_default=True, help="How far after it.")
@click.option("--node", metavar="NAME", help="Only of this node; sources that name no node are taken to be of it.")
@click.option(
    "--zone",
    metavar="ZONE",
    help="Of times that do not say theirs: Europe/Berlin, +02:00, UTC, local. Default: UTC for files, this machine's for its own logs.",
)
@click.option(
    "--now",
    metavar="TIME",
    help="When the files were written: times without a year are put before it. Default: when each was last changed.",
)
@click.option(
    "--boot", metavar="TIME", help="When the machine of a ring buffer was started; without it, `[123.45]` is no time."
)
@click.option("--details", is_flag=True, help="Also hosts, counts, evidence, and where it was read.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def signals(
    more: Sequence[Path],
    given: Sequence[Path],
    at: str | None,
    incident: Path | None,
    before: timedelta,
    after: timedelta,
    node: str | None,
    zone: str | None,
    now: str | None,
    boot: str | None,
    details: bool,
    as_json: bool,
) -> None:
    """Show what logs, counters and diagnostics say of devices, and what weighs beside an incident.

    A source that is absent, cannot be read or skipped its test is listed as no evidence: it never counts as health. The same
    event read from several files is one. Times without a zone are meant in UTC unless --zone says otherwise; times without
    a year lie in the year before --now.
    """
    from bitwitness.fleet.signals.gather import gather
    from bitwitness.fleet.signals.times import parse_time, parse_zone

    if at is not None and incident is not None:
        raise click.UsageError("give --at or --incident, not both")
    if node is not None and not node.strip():
        raise click.BadParameter("is empty: is a variable unset?", param_hint="--node")
    known = parse_zone(zone) if zone is not None else None
    moment = parse_time(at, known or UTC) if at is not None else None
    if incident is not None:
        moment = _time_of(incident)
    started = parse_time(boot, known or UTC) if boot is not None else None
    left = _Left(asked=moment is not None)
    window = None if moment is None else (moment - min(before, moment - _FIRST), moment + min(after, _LAST - moment))
    found = _read(
        [*given, *more],
        now=parse_time(now, known or UTC) if now is not None else None,
        zone=known,
        boot=started,
        node=node,
        window=window,
    )
    found = found if node is None else left.of_node(found, node)
    listed = gather(found if window is None else left.of_time(found, *window), identities=details)
    if as_json:
        click.echo(json.dumps([one.to_json(details=details) for one in listed], indent=2, allow_nan=False))
        if all(one.kind == "no-evidence" for one in listed):
            click.echo(f"No signals. {_NO_SIGN}", file=sys.stderr)
        for line in left.lines():
            click.echo(line, file=sys.stderr)
    else:
        _show(listed, console(), details, left)


def _time_of(path: Path) -> datetime:
    """When an incident was; of a run, the newest."""
    if not path.exists():
        raise RunFilesError(f"{path} does not exist: give the directory of an incident or of a run")
    if path.name != "incident.json" and not (path / "incident.json").exists():
        incidents = RunFiles(path).incidents()
        if not incidents:
            raise RunFilesError(f"{path} is no incident (no incident.json), and no run that has one")
        path = incidents[-1]
    time = read_incident(path).record.get("time")
    try:
        moment = datetime.fromisoformat(str(time))
    except ValueError as error:
        raise RunFilesError(f"{path} is damaged: its time is {time!r:.60}") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read(
    paths: Sequence[Path],
    *,
    now: datetime | None,
    zone: tzinfo | None,
    boot: datetime | None,
    node: str | None,
    window: tuple[datetime, datetime] | None,
) -> Iterator[Signal]:
    """The signals of the files, or of this machine."""
    from bitwitness.fleet.signals import collect, detect

    if paths:
        return detect.read_all(paths, now=now, zone=zone or UTC, boot=boot, host=node or "", window=window)
    since = None if window is None else window[0]
    return collect.read(now=now, zone=zone, host=node or socket.gethostname(), since=since)


# For people -----------------------------------------------------------------------------------------------------------


def _show(listed: Sequence[Signal], screen: Console, details: bool, left: _Left) -> None:
    seen = [one for one in listed if one.kind != "no-evidence"]
    silent = [one for one in listed if one.kind == "no-evidence"]
    if seen:
        screen.print("Seen, what weighs most first", style="bold")
        print_list(_pieces(_grouped(seen), details) if screen.is_terminal else _events(_grouped(seen), details), screen)
    else:
        screen.print(styled("No signals."))
    if silent:
        screen.print("\nNo evidence, which is not health", style="bold")
        print_list(_silences(silent) if screen.is_terminal else _sources(silent), screen)
    screen.print()
    for line in (*_sum(seen, left.asked), *left.lines()):
        screen.print(styled(line), soft_wrap=not screen.is_terminal)


def _grouped(seen: Sequence[Signal]) -> list[list[Signal]]:
    """Events of one kind of one device together, what weighs most first."""
    groups: dict[tuple[str, str, str, str], list[Signal]] = {}
    for one in seen:
        groups.setdefault((one.host, one.device, one.code, one.source), []).append(one)
    return sorted(groups.values(), key=lambda group: (WEIGHTS[_top(group).weight], -len(group), group[-1].time or ""))


def _top(group: Sequence[Signal]) -> Signal:
    """The newest of those that weigh most: one that weighs nothing may come later, and hides none before it."""
    return min(reversed(group), key=lambda one: WEIGHTS[one.weight])


def _events(groups: Sequence[Sequence[Signal]], details: bool) -> Table:
    table = _table(
        "weight", "for", "node", "device", "code", "times", "last", "why", *(["evidence"] if details else [])
    )
    for group in groups:
        last, top = _latest(group), _top(group)
        row = (top.host, top.device, top.code, times_of(group), last or "unknown", top.reason)
        cells = [styled(top.weight, _STYLES[top.weight]), styled(top.kind), *(styled(cell) for cell in row)]
        table.add_row(*cells, *([styled(top.evidence)] if details else []))
    return table


def _sources(silent: Sequence[Signal]) -> Table:
    table = _table("source", "node", "device", "code", "why", "read from")
    for one in silent:
        table.add_row(*(styled(cell) for cell in (one.source, one.host, one.device, one.code, one.reason, one.origin)))
    return table


def _pieces(groups: Sequence[Sequence[Signal]], details: bool) -> Table:
    """The same for a terminal, where eight columns leave no room for the sentence that explains."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for group in groups:
        last, top = _latest(group), _top(group)
        count = times_of(group)
        often = "once" if count == 1 else f"{count:,} times, last"
        what = f"{top.code}  {_where(top.device, top.host)}  {often} {last or 'at an unknown time'}"
        lines = [styled(what, "bold"), styled(f"{top.kind}: {top.reason}")]
        lines += [styled(top.evidence, "dim")] if details and top.evidence else []
        table.add_row(styled(top.weight, _STYLES[top.weight]), Text("\n").join(lines))
    return table


def _latest(group: Sequence[Signal]) -> str:
    return max(one.time or "" for one in group)


def _silences(silent: Sequence[Signal]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for one in silent:
        place = ", ".join(part for part in (one.host, one.device, one.origin) if part)
        table.add_row(
            styled(one.code), Text("\n").join([styled(one.reason), *([styled(place, "dim")] if place else [])])
        )
    return table


def _where(device: str, host: str) -> str:
    return " on ".join(part for part in (device, host) if part) or "no device named"


def _sum(seen: Sequence[Signal], asked: bool) -> Iterator[str]:
    """What a person who looks only at the last lines needs to know; `asked`: about a time."""
    for weight in ("strong", "medium", "weak"):
        about: dict[tuple[str, str, str], list[Signal]] = {}
        for one in seen:
            if one.weight == weight:
                kind: str = "host" if one.kind == "memory" and one.source in _OF_HOST else one.kind
                about.setdefault((kind, one.host, one.device), []).append(one)
        for (about_what, host, device), several in list(about.items())[:10]:
            meaning = _MEANINGS.get(about_what, f"as {about_what}")
            names = ", ".join(dict.fromkeys(one.code for one in several))
            yield f"{weight.capitalize()} {meaning}: {names} ({_where(device, host)}){_unknown(several, asked)}."
        if len(about) > 10:
            yield f"{weight.capitalize()} for {len(about) - 10} more devices."
    loud = any(one.kind == "loud" for one in seen)
    if not any(one.weight != "none" for one in seen):
        yield f"Nothing here weighs beside an incident{', though a device failed loudly' if loud else ''}. {_NO_SIGN}"


def _unknown(several: Sequence[Signal], asked: bool) -> str:
    """What must be said of events that do not say when they were."""
    codes = dict.fromkeys(one.code for one in several)
    undated = [code for code in codes if all(one.time is None for one in several if one.code == code)]
    if not undated:
        return ""
    which = "" if len(codes) == len(undated) else f" of {', '.join(undated)}"
    return f"; the time{which} is not known{', and may be another than the one asked about' if asked else ''}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table
