"""An incident as a page of text: what disagreed with what, who is named or why nobody, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bitwitness.cli.advice import next_steps
from bitwitness.cli.output import plain, styled
from bitwitness.comparisons import Comparison, about, compared, differences
from bitwitness.evidence import NONFINITE, Observation, Verdict
from bitwitness.runfiles import Incident
from bitwitness.topology import Topology

_DIGITS = 8
_MOST_ROWS = 16
_JUDGED = {
    "drill": "It was a drill: the fault was injected on purpose, and says nothing of any device",
    "false alarm": "A person has judged it a false alarm",
    "confirmed": "A person has confirmed it",
}
_STYLES = {"attributed": "bold red", "unattributed": "bold yellow", "clean": "bold green"}


def show(incident: Incident, console: Console, actions: Sequence[Mapping[str, Any]] = (), judgement: str = "") -> None:
    """Print all of it, what was done about it (`RunFiles.actions`), and what it is known to have been."""
    verdict = incident.verdict
    console.print(Text.assemble("Incident ", styled(incident.path.name, "bold")))
    console.print(styled(verdict.headline(), _STYLES[verdict.status]))
    if judgement:
        console.print(styled(_JUDGED.get(judgement, judgement), "bold"))
    console.print()
    console.print(_facts(incident))
    _heading(console, "Why" if verdict.status == "attributed" else "Why nobody is named")
    for reason in verdict.reason.split("; "):
        console.print(Padding(styled(reason), (0, 0, 0, 2), expand=False))
    _heading(console, "What disagreed with what")
    blocks = list(_blocks(incident)) or [[Text("No values were compared.")]]
    for number, block in enumerate(blocks):
        if number:
            console.print()
        for part in block:
            # A table in a padding of its own width comes out too narrow (rich 15).
            console.print(Padding(part, (0, 0, 0, 2), expand=isinstance(part, Table)))
    if actions:
        _heading(console, "What was done about it")
        console.print(_actions(actions))
    _heading(console, "What to do next")
    for number, advice in enumerate(next_steps(incident), 1):
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", width=3)
        grid.add_column(overflow="fold")
        grid.add_row(f"{number}.", styled(advice.text))
        console.print(grid)
        for command in advice.commands:
            # Not wrapped: a command line must survive being copied.
            console.print(Text(f"      {plain(command)}", style="cyan"), soft_wrap=True)


def summary(verdict: Verdict) -> str:
    """Who is named, in a few words."""
    if verdict.status != "attributed":
        return "nobody"
    named = [f"rank {', '.join(map(str, verdict.ranks[:8]))}", f"node {', '.join(verdict.nodes[:8])}"]
    return ", ".join(named)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _actions(actions: Sequence[Mapping[str, Any]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for one in actions:
        told = [(key, value) for key, value in one.items() if key not in ("schema", "time", "action")]
        about = "; ".join(
            f"{key.replace('_', ' ')}: {_said(value)}" for key, value in told if value not in ("", None, [])
        )
        grid.add_row(styled(f"  {one.get('time', '?')}"), styled(f"{one['action']}{f' ({about})' if about else ''}"))
    return grid


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _facts(incident: Incident) -> Table:
    verdict, record = incident.verdict, incident.record
    last, step = verdict.window
    since = (
        f"after step {last}, when this check last passed"
        if last >= 0
        else "the beginning: this check had not passed before"
    )
    named = f"{summary(verdict)}, device {', '.join(verdict.devices[:8])}" if verdict.devices else summary(verdict)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    rows: list[tuple[str, object]] = [
        ("status", verdict.status),
        ("named", named),
        ("kind", verdict.kind),
        ("persistence", verdict.persistence),
        ("check", verdict.check),
        ("suspect window", f"{since}, up to step {step}"),
        ("world", f"{incident.topology.world_size} ranks on {len(incident.topology.nodes)} nodes"),
        ("found", f"{record.get('time', 'at an unknown time')}, by bitwitness {record.get('bitwitness', '?')}"),
        ("where", incident.path),
    ]
    if verdict.candidates:
        involved = f"ranks {', '.join(map(str, verdict.candidates[:16]))}"
        rows.insert(2, ("involved, no blame", involved + (", ..." if len(verdict.candidates) > 16 else "")))
    pods = incident.topology.pods_of(rank for rank in verdict.ranks if 0 <= rank < incident.topology.world_size)
    if pods:
        rows.insert(2, ("pod", ", ".join(pods[:8])))
    rows += [("note", note) for note in record.get("notes") or ()]
    for name, value in rows:
        grid.add_row(f"  {name}", styled(value))
    return grid


# What was seen -------------------------------------------------------------------------------------------------------


Block = list[Table | Text]


def _blocks(incident: Incident) -> Iterator[Block]:
    named = set(incident.verdict.ranks)
    every = compared(incident.observations)
    for one in every:
        if one.owner is None:
            yield _place(one.check, one.place, one.seen, incident.topology, named)
    cases = [one for one in every if one.owner is not None]
    differ = [one for one in cases if not one.agrees]
    for one in differ[:_MOST_ROWS]:
        yield _case(one, incident.topology, named)
    hidden, agreed = len(differ[_MOST_ROWS:]), len(cases) - len(differ)
    if hidden:
        yield [Text(f"{hidden} further micro-batches on which runs differ: see incident.json.")]
    if agreed:
        yield [Text(f"On {agreed} further micro-batch{'es' * (agreed > 1)} all runs agreed bit for bit.")]


def _case(case: Comparison[Observation], topology: Topology, named: set[int]) -> Block:
    group = case.seen
    what = "input" if case.check == "input" else "result"
    which = "the micro-batches" if case.micro is None else f"micro-batch {case.micro}"
    usual = case.usual(lambda rank: _node(rank, topology))
    table = _table("role", "rank", "node", "first run", "repeats", "")
    for one in sorted(group, key=lambda one: _ORDER.index(_role(one, topology))):
        style = "red" if one.rank in named else ""
        differs = usual is not None and set(one.runs) != {usual}
        row = [
            _role(one, topology),
            one.rank,
            _node(one.rank, topology),
            _short(one.value) or "-",
            _repeats(one),
            one.error or ("differs" if differs else ""),
        ]
        table.add_row(*(styled(cell, style) for cell in row))
    title = _title(f"{what} of {which} of rank {case.owner}")
    return [title, table, *(styled(line, "dim") for line in differences(group))]


_ORDER = ("owner", "first witness", "second witness", "witness")


def _role(one: Observation, topology: Topology) -> str:
    if one.place == "original" or one.owner is None:
        return _ORDER[0]
    if not 0 <= one.owner < topology.world_size:
        return _ORDER[3]
    for offset in (1, 2):
        if topology.witness_of(one.owner, offset) == one.rank:
            return _ORDER[offset]
    return _ORDER[3]


def _repeats(one: Observation) -> str:
    if not one.repeats:
        return "none"
    if set(one.repeats) == {one.value}:
        return f"{len(one.repeats)} x the same"
    if len(set(one.repeats)) == 1:
        return f"{len(one.repeats)} x {_short(one.repeats[0]) or '-'}"
    return " ".join(_short(value) or "-" for value in one.repeats)


def _place(check: str, place: str, group: Sequence[Observation], topology: Topology, named: set[int]) -> Block:
    """What each rank held: a gradient before or after the all-reduce, or its weights."""
    title = {
        "local": "local gradient, before the all-reduce",
        "reduced": "reduced gradient, after the all-reduce",
        "state": "parameters and optimizer state",
    }.get(place, place)
    usual = Counter(one.value for one in group).most_common(1)[0][0]
    alike = [one for one in group if one.value == usual and one.rank not in named]
    hidden = alike[3:] if len(group) > _MOST_ROWS else []
    rest = [one for one in group if one not in hidden]
    table = _table("rank", "node", "value", "")
    for one in sorted(rest[: 4 * _MOST_ROWS], key=lambda one: one.rank):
        style = "red" if one.rank in named else ""
        said = one.error or about(one.detail)
        table.add_row(*(styled(cell, style) for cell in (one.rank, _node(one.rank, topology), _short(one.value), said)))
    block: Block = [_title(f"{title} ({check})"), table]
    if hidden:
        block.append(Text(f"and {len(hidden)} more ranks with the value {plain(_short(usual))}"))
    if len(rest) > 4 * _MOST_ROWS:
        block.append(Text(f"and {len(rest) - 4 * _MOST_ROWS} more ranks: see incident.json"))
    return block


def _node(rank: int, topology: Topology) -> str:
    return topology.node_of(rank) if 0 <= rank < topology.world_size else "?"


def _short(value: str) -> str:
    return value if value == NONFINITE else value[:_DIGITS]


def _title(text: str) -> Text:
    return styled(text, "italic")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold", no_wrap=column in ("value", "first run"))
    return table
