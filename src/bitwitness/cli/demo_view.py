"""How the demo looks: live while it runs, and a summary that says what was seen, in words and curves."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bitwitness.cli.output import plain, styled, this_command
from bitwitness.evidence import Verdict
from bitwitness.examples.demo import IN_MEMORY, TRAININGS, Event, Report, Settings
from bitwitness.examples.ranks import node_name

_TITLES = {
    "clean": "nothing wrong, guarded",
    "unguarded": "the fault, not guarded",
    "guarded": "the fault, guarded",
}
_TITLES_WITHOUT_FAULT = {
    **_TITLES,
    "unguarded": "nothing wrong, not guarded",
    "guarded": "nothing wrong, guarded again",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_LINES = 4
"""Lines about each training where the output is no terminal."""


class _Progress:
    """How far one training is."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.checks = 0
        self.state = "waiting"


class Live:
    """The progress of the demo: a table that moves on a terminal, a few lines elsewhere."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._progress = {training.name: _Progress() for training in TRAININGS}
        self._titles = _titles(settings)
        self._started = time.monotonic()
        self._ready = False
        self._spinner = Spinner("line")
        self._live = RichLive(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        settings = self._settings
        self._console.print(
            f"{settings.world_size} ranks on {settings.nodes} nodes, all on this machine; {settings.steps} steps each; "
            "every check at every step"
        )
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print("starting the ranks ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def event(self, rank: int, event: Event) -> None:
        """Take note of what a rank reported."""
        progress = self._progress[event["training"]]
        if event["event"] == "landed":
            progress.state = f"step {event['step']}: rank {event['rank']} hit"
        elif event["event"] == "step":
            progress.losses.append(float(event["loss"]))
            progress.checks += event["checks"]
        elif rank == 0:
            progress.state = "running" if event["event"] == "start" else _ending(event, progress.state)
            self._ready = True
        if not self._console.is_terminal:
            self._print_line(rank, event)

    def _print_line(self, rank: int, event: Event) -> None:
        title = self._titles[event["training"]]
        progress = self._progress[event["training"]]
        if event["event"] == "landed":
            self._console.print(
                f"{title}: step {event['step']}: rank {event['rank']}: {plain(event['where'])} is wrong"
            )
        elif event["event"] == "step" and (event["step"] + 1) % max(1, self._settings.steps // _PLAIN_LINES) == 0:
            done = f"{event['step'] + 1}/{self._settings.steps} steps"
            checks = f", {progress.checks} checks" if progress.checks else ""
            self._console.print(f"{title}: {done}, loss {_loss(event['loss'])}{checks}")
        elif event["event"] == "end" and rank == 0:
            self._console.print(f"{title}: {progress.state}")

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, progress in self._progress.items():
            steps = len(progress.losses)
            table.add_row(
                self._titles[name],
                ProgressBar(total=self._settings.steps, completed=steps, width=20),
                f"{steps}/{self._settings.steps}",
                f"loss {_loss(progress.losses[-1])}" if progress.losses else "",
                f"{progress.checks} checks" if progress.checks else "",
                Text(progress.state, style="red" if "hit" in progress.state or "stopped" in progress.state else "dim"),
            )
        seconds = f"{time.monotonic() - self._started:.0f} s"
        waiting = Table.grid(padding=(0, 1))
        waiting.add_row(
            self._spinner, seconds if self._ready else f"{seconds}: the ranks are starting, importing torch"
        )
        return Group(table, waiting)


def _titles(settings: Settings) -> dict[str, str]:
    return _TITLES_WITHOUT_FAULT if settings.fault == "none" else _TITLES


def _ending(event: Event, state: str) -> str:
    if event["outcome"] == "stopped":
        verdict = Verdict.from_json(event["verdict"])
        return f"stopped at step {verdict.step} by {verdict.check}"
    return "finished" + (f" ({state})" if "hit" in state else "")


# The summary ---------------------------------------------------------------------------------------------------------


def summarise(report: Report, console: Console) -> None:
    """Say what happened, all of it from the report."""
    console.print()
    for heading, lines in (
        ("What was done", _what_was_done(report)),
        ("What the guard saw", _what_was_seen(report)),
        ("Without the guard", _what_it_saves(report)),
    ):
        if lines:
            console.print(Text(heading, style="bold"))
            for line in lines:
                console.print(Padding(line if isinstance(line, Text) else styled(line), (0, 0, 0, 2), expand=False))
            console.print()
    console.print(Text("Training loss, mean over all ranks", style="bold"))
    console.print(Padding(_curves(report), (0, 0, 0, 2), expand=False))
    console.print()
    if report.incident is not None:
        console.print("The incident, and what to do next:")
        command = f"{this_command()} incident show {shlex.quote(str(report.incident))}"
        console.print(styled(f"  {command}", "cyan"), soft_wrap=True)
    console.print("Journals and logs:")
    console.print(styled(f"  {report.run_dir}", "cyan"), soft_wrap=True)
    console.print()
    for problem in report.problems:
        console.print(styled(f"Not as it should be: {problem}", "bold red"))
    if not report.problems:
        console.print(Text(f"As it should be. {report.seconds:.0f} s.", style="bold green"))


def _what_was_done(report: Report) -> list[str | Text]:
    settings, injected = report.settings, report.injected
    trained = f"A small GPT, {settings.world_size} ranks on {settings.nodes} nodes (processes of this machine)"
    lines: list[str | Text] = [f"{trained}, Policy.every_step(): every check at every step."]
    if injected is None:
        return [*lines, "No fault was injected."]
    node = node_name(injected["rank"] // settings.ranks_per_node)
    once = settings.transient or settings.fault in IN_MEMORY
    when = f"At step {injected['step']}, once," if once else f"From step {injected['step']} on, each time,"
    count = f"{injected['changed']} element{'s' * (injected['changed'] != 1)}"
    lines.append(f"{when} rank {injected['rank']} on {node} had this wrong: {injected['where']}.")
    lines.append(f"{count} changed; the first: {injected['before']} became {injected['after']}.")
    return lines


def _what_was_seen(report: Report) -> list[str | Text]:
    settings, verdict = report.settings, report.verdict
    passed = ", ".join(f"{name} {count}" for name, count in sorted(report.checks.items()))
    alarms = "no false alarm" if not report.false_alarms else f"{report.false_alarms} FALSE ALARMS"
    lines: list[str | Text] = []
    if verdict is not None:
        when = "before" if report.before_update else "after"
        lines.append(
            Text.assemble(
                ("Caught", "bold green"),
                f" at step {verdict.step} by {verdict.check}, {when} the update of that step, on every rank: "
                f"{verdict.kind} corruption, {verdict.persistence}.",
            )
        )
        lines.append(_who(report, verdict))
    elif settings.fault != "none":
        lines.append(Text("The fault was not caught.", style="bold red"))
    lines.append(f"With nothing wrong: {alarms} in {sum(report.checks.values())} checks that passed ({passed}).")
    same = "equal bit for bit" if report.changes_no_bit else "NOT EQUAL"
    until = "up to the fault" if report.injected is not None else "to the end, final weights included"
    lines.append(f"Guarded and unguarded training: {same} {until}.")
    return lines


def _who(report: Report, verdict: Verdict) -> Text:
    if verdict.status != "attributed":
        why = (
            "right: it takes three nodes to name anybody"
            if report.settings.nodes < 3
            else "it should have named the rank"
        )
        return Text(f"Named: nobody ({why}).", style="" if report.settings.nodes < 3 else "bold red")
    ranks, nodes = ", ".join(map(str, verdict.ranks)), plain(", ".join(verdict.nodes))
    how = Text("right", style="bold green") if report.right else Text("WRONG", style="bold red")
    return Text.assemble(f"Named: rank {ranks} on {nodes} (", how, ").")


def _what_it_saves(report: Report) -> list[str | Text]:
    """What the same fault did where nobody looked: measured, little as it may be."""
    if report.injected is None:
        return []
    clean, hit = report.validation["clean"], report.validation["unguarded"]
    at = report.injected["step"]
    before, after = report.losses["clean"][at], report.losses["unguarded"][at]
    first = "the same" if before == after else f"{_loss(after)} instead of {_loss(before)}"
    lines: list[str | Text] = [
        f"In the step that was hit the training log shows {first} loss; the job went on to its end."
    ]
    if math.isfinite(hit):
        lines.append(
            f"Its final weights: loss {_loss(hit)} on text that was held back, {_loss(clean)} without the fault."
        )
    else:
        lines.append(
            f"Its final weights are useless: loss {_loss(hit)} on text that was held back, {_loss(clean)} without the fault."
        )
    if report.replicas_parted:
        lines.append("Its ranks ended with different weights, which nothing reported.")
    return lines


def _curves(report: Report) -> Table:
    """One line a training, on a common scale."""
    finite = [loss for losses in report.losses.values() for loss in losses if math.isfinite(loss)]
    lowest, highest = min(finite, default=0.0), max(finite, default=1.0)
    table = Table.grid(padding=(0, 2))
    for name, losses in report.losses.items():
        curve = sparkline(losses, lowest, highest)
        if len(losses) < report.settings.steps:
            curve += " stopped"
        last = next((loss for loss in reversed(losses)), math.nan)
        table.add_row(
            _titles(report.settings)[name], curve, f"{_loss(losses[0] if losses else math.nan)} to {_loss(last)}"
        )
    return table


def sparkline(values: Sequence[float], lowest: float, highest: float, width: int = 48) -> str:
    """Values as block characters, `width` at most; `!` where one is not finite."""
    stride = max(1, math.ceil(len(values) / width))
    shown = [values[index] for index in range(0, len(values), stride)]
    span = (highest - lowest) or 1.0
    return "".join(
        _BLOCKS[round((value - lowest) / span * (len(_BLOCKS) - 1))] if math.isfinite(value) else "!" for value in shown
    )


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else str(value)
