"""The result of a comparison for people: what was seen of the suspect, with which bound where nothing was, and what to do now.

It shows a record as `report.json` holds it, so that what is printed at the end and what is read years later are the same. Needs
nothing but the base install.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from bitwitness.cli.output import print_list, styled, this_command
from bitwitness.compare import report_words as words

Record = Mapping[str, Any]

_STYLES = {"differs": "bold red", "nothing seen": "green", "not characterised": "yellow"}
_MOST_ROWS, _MOST_SPREAD = 10, 4
"""Rows of a mode; of one in which errors spread, so that how many are reached says little."""
_MOST_FINDINGS = 12


def show(record: Record, screen: Console) -> None:
    """Show a record of `report.record` or `report.read`."""
    _headline(record, screen)
    screen.print()
    print_list(_glance(record), screen)
    _bounds(record, screen)
    for mode in record["modes"]:
        _mode(mode, record, screen)
    _findings(record, screen)
    _results(record, screen)
    screen.print()
    screen.print("What it does not show", style="bold")
    for said in words.does_not_show(record):
        screen.print(styled(f"  {said}", "dim"), soft_wrap=True)
    screen.print()
    screen.print("What to do now", style="bold")
    for step in words.next_steps(record, this_command()):
        screen.print(styled(f"  {step}"), soft_wrap=True)


def _headline(record: Record, screen: Console) -> None:
    style = "magenta" if record["drill"] else _STYLES.get(record["outcome"], "")
    screen.print(styled(f"{words.headline(record)}: {record['sentence']}", style), soft_wrap=True)
    if record["drill"]:
        screen.print(styled(words.drill(record), "magenta"), soft_wrap=True)
    if not record["finished"]:
        still = ", or still runs" if record["may_run"] else ""
        screen.print(
            styled(f"UNFINISHED: it was not brought to its end{still}; this is what its files say so far", "yellow"),
            soft_wrap=True,
        )
    for note in record["notes"]:
        screen.print(styled(f"note: {note}", "yellow"), soft_wrap=True)
    names = ", ".join(words.who(one) for one in record["references"])
    screen.print(styled(f"suspect {words.who(record['suspect'])}; references {names or 'none'}", "dim"), soft_wrap=True)
    asked = record["asked"]
    about = [str(asked[name]) for name in ("id", "workload") if asked.get(name)]
    screen.print(
        styled("; ".join([*about, f"seed {asked.get('seed', '-')}", f"made {record['made']}"]), "dim"), soft_wrap=True
    )


def _glance(record: Record) -> Table:
    table = _table("mode", "steps", "hit", "elements that differ", "share", "interval", "severity", "largest", "NSR")
    for mode in record["modes"]:
        total = mode["total"]
        steps = f"{words.count(mode['steps'])}/{words.count(mode['asked'])}"
        noise = words.figure(mode["noise"])
        if total is None:
            table.add_row(
                *(styled(cell) for cell in (mode["mode"], steps, "", "nothing could be judged", "", "", "", "", noise))
            )
            continue
        wrong = total["mismatches"]
        seen = bool(wrong["count"])
        cells = (
            mode["mode"],
            steps,
            words.count(total["steps_hit"]),
            f"{words.count(wrong['count'])} of {words.count(wrong['of'])}",
            words.rate(wrong["share"]) if seen else f"< {words.rate(total['bound'])}",
            f"{words.rate(wrong['low'])}..{words.rate(wrong['high'])}" if seen else "",
            words.figure(total["severity"]),
            words.figure(total["severity_largest"]),
            noise,
        )
        table.add_row(*(styled(cell) for cell in cells))
    return table


def _bounds(record: Record, screen: Console) -> None:
    for one in words.unseen(record):
        screen.print(
            styled(
                f"{one['mode']}: nothing seen; with {words.percent(record['confidence'])} confidence below {words.rate(one['bound'])} of "
                f"elements and {words.rate(one['step_bound'])} of steps"
            ),
            soft_wrap=True,
        )
    for mode in record["modes"]:
        again = words.again(mode, record["confidence"])
        if again:
            screen.print(styled(f"{mode['mode']}: {again}"), soft_wrap=True)


def _mode(mode: Record, record: Record, screen: Console) -> None:
    hit = [row for row in words.worst_first(mode["rows"]) if row["mismatches"]["count"]]
    if not hit and not mode["void"] and mode["ended"] == "done":
        return
    screen.print()
    drill = f" ({words.DRILL})" if record["drill"] else ""
    screen.print(styled(f"{mode['mode']}{drill}", "bold"))
    screen.print(
        styled(f"  {words.MODE_WORDS.get(mode['mode'], '')} {words.mode_line(mode, record)}", "dim"), soft_wrap=True
    )
    if not hit:
        return
    table = _table("module", "phase", "dtype", "steps hit", "differ", "share", "interval", "severity")
    most = _MOST_ROWS if mode["mode"] == "lock-step" else _MOST_SPREAD
    for row in hit[:most]:
        wrong = row["mismatches"]
        cells = (
            words.module(row),
            words.PHASES.get(row["phase"], row["phase"]),
            row["dtype"],
            f"{words.count(row['steps_hit'])}/{words.count(row['steps'])}",
            words.count(wrong["count"]),
            words.rate(wrong["share"]),
            f"{words.rate(wrong['low'])}..{words.rate(wrong['high'])}",
            words.figure(row["severity"]),
        )
        table.add_row(*(styled(cell) for cell in cells))
    print_list(table, screen)
    if len(hit) > most:
        screen.print(styled(f"and {len(hit) - most} more (--json has all)", "dim"))
    clean = len(mode["rows"]) - len(hit)
    if clean:
        screen.print(
            styled(f"{clean} combination(s) of module and phase without a mismatch (--json has their bounds)", "dim"),
            soft_wrap=True,
        )


def _findings(record: Record, screen: Console) -> None:
    found = list(words.findings(record))
    if not found:
        return
    screen.print()
    drill = f" ({words.DRILL})" if record["drill"] else ""
    screen.print(styled(f"What wrong elements have in common{drill}", "bold"))
    for dtype, finding in found[:_MOST_FINDINGS]:
        screen.print(styled(f"  {dtype}: {finding}"), soft_wrap=True)
    if len(found) > _MOST_FINDINGS:
        screen.print(styled(f"  and {len(found) - _MOST_FINDINGS} more (--json has all)", "dim"))


def _results(record: Record, screen: Console) -> None:
    for mode in record["modes"]:
        names = list(dict.fromkeys(name for given in mode["results"].values() for name in given))
        if not names:
            continue
        screen.print()
        screen.print(styled(f"What the task gave, {mode['mode']}", "bold"))
        table = _table("participant", *names)
        for who, given in mode["results"].items():
            table.add_row(styled(who), *(styled(words.figure(given.get(name))) for name in names))
        print_list(table, screen)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(styled(column), header_style="dim", overflow="fold")
    return table
