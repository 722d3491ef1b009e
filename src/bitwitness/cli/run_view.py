"""What `bitwitness run` says: one line an event, with the time, in words for whoever is called at night."""

from __future__ import annotations

import shlex
from contextlib import suppress

from rich.console import Console
from rich.text import Text

from bitwitness.cli.output import plain, styled
from bitwitness.errors import RunFilesError
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.supervision import Stop
from bitwitness.supervise.events import Event, Show

_STYLES = {
    "abort": "yellow",
    "lost": "red",
    "outcome": "bold",
    "quarantine": "bold red",
    "refused": "yellow",
    "restart": "cyan",
    "started": "green",
    "stopping": "yellow",
    "stuck": "red",
}
_ADVICE = {
    "unfinished": "let the script return or end by sys.exit(0) when it is done",
    "stopped": "run the same command again to go on from the newest verified checkpoint",
    "node_lost": "run the same command again; a spare node or --max-restarts would have gone on by itself",
    "hang": "read the stacks at the end of the named ranks' stderr logs",
    "guard_failure": "the guard failed, not the numbers: run the same command again; if it comes back, report it",
}


def printer(screen: Console) -> Show:
    """Show events on a console, a line each, and below it what goes with it."""

    def show(event: Event) -> None:
        if event.kind == "ended":
            return  # said at the end, by `conclude`
        with suppress(OSError):  # a reader such as `head` that has had enough ends no job
            line = Text.assemble((f"{event.time[11:19]}Z ", "dim"), styled(event.text, _STYLES.get(event.kind, "")))
            screen.print(line, soft_wrap=True)
            for detail in event.details:
                screen.print(styled(f"          {detail}"), soft_wrap=True)

    return show


def conclude(stop: Stop, screen: Console) -> None:
    """The last lines: how it ended, and what to do next."""
    style = "bold green" if stop.exit_code == 0 else "bold red"
    screen.print(styled(f"{stop.outcome.replace('_', ' ')}: {stop.reason}", style), soft_wrap=True)
    run_dir = plain(stop.summary.get("run_dir", ""))
    advice = _advice(stop) if stop.exit_code else ""
    if advice:
        screen.print(styled(f"next: {advice}"), soft_wrap=True)
    screen.print(
        styled(f"exit code {stop.exit_code}; what happened: {run_dir}/supervise/log.jsonl", "dim"), soft_wrap=True
    )


def _advice(stop: Stop) -> str:
    run_dir = str(stop.summary.get("run_dir", ""))
    place = shlex.quote(run_dir)
    if stop.outcome == "corruption":
        paths = stop.summary.get("incidents", ())
        look = " and ".join(f"bitwitness incident show {shlex.quote(path)}" for path in paths[:2])
        look = look or f"bitwitness incident show {place}"
        return f"look at it: {look}; who is in quarantine: bitwitness quarantine list {place}"
    if stop.outcome != "short" or not run_dir:
        return _ADVICE.get(stop.outcome, "")
    try:
        held = RunFiles(run_dir).quarantine.read()
    except RunFilesError:
        return "when that is done, run the same command again"
    denied = [name for name in held.denied_devices if f"device {name} " in stop.reason]
    denied += [name for name in held.denied_nodes if f"node {name} is in quarantine" in stop.reason]
    if not denied:
        return "start the nodes that are missing, and run the same command again"
    clear = f"bitwitness quarantine clear {place} {' '.join(map(shlex.quote, denied))} --reason TEXT"
    return f"give more nodes, or, once they are mended, clear them: {clear}; then run the same command again"
