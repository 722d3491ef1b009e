"""How the demo looks while it runs: a table that moves on a terminal, a few lines elsewhere."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bitwitness.cli.output import plain
from bitwitness.evidence import Verdict
from bitwitness.examples.demo import SUPERVISOR
from bitwitness.examples.plan import TRAININGS, Event, Settings

_PLAIN_LINES = 4
"""Lines about each training where the output is no terminal."""

_TOLD = ("started", "quarantine", "restart", "lost", "stuck")
"""What the supervisor says that is shown as it happens."""

_ALARMING = ("hit", "stopped", "quarantine", "lost")


class _Progress:
    """How far one training is, and what has happened in it."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.checks = 0
        self.story: list[str] = []
        self.state = "waiting"


class Live:
    """The progress of the demo."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._progress = {training.name: _Progress() for training in TRAININGS}
        self._started = time.monotonic()
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
        """Take note of what a rank reported, or the supervisor."""
        progress = self._progress[event["training"]]
        kind = event["event"]
        if kind == "step":
            progress.losses[event["step"]] = float(event["loss"])
            progress.checks += event["checks"]
        elif kind == "landed":
            self._happened(progress, f"step {event['step']}: rank {event['rank']} hit")
        elif rank == SUPERVISOR:
            if event["kind"] in _TOLD:
                progress.state = plain(event["text"])
        elif rank == 0:
            self._note(progress, event)
        if not self._console.is_terminal:
            self._print_line(rank, event)

    def _note(self, progress: _Progress, event: Event) -> None:
        match event["event"]:
            case "start":
                progress.state = "running"
            case "stopped":
                verdict = Verdict.from_json(event["verdict"])
                self._happened(progress, f"stopped at step {verdict.step} by {verdict.check}")
            case "resumed":
                self._happened(progress, f"resumed at step {event['step']}")
            case "end":
                progress.state = ", ".join([*progress.story, "finished"])

    def _happened(self, progress: _Progress, what: str) -> None:
        progress.story.append(what)
        progress.state = what

    def _print_line(self, rank: int, event: Event) -> None:
        title = self._settings.titles[event["training"]]
        progress = self._progress[event["training"]]
        kind = event["event"]
        if kind == "landed":
            line = f"step {event['step']}: rank {event['rank']}: {plain(event['where'])} is wrong"
        elif kind == "step" and (event["step"] + 1) % max(1, self._settings.steps // _PLAIN_LINES) == 0:
            checks = f", {progress.checks} checks" if progress.checks else ""
            line = f"{event['step'] + 1}/{self._settings.steps} steps, loss {loss_text(event['loss'])}{checks}"
        elif (kind in ("end", "stopped", "resumed") and rank == 0) or (rank == SUPERVISOR and event["kind"] in _TOLD):
            line = progress.state
        else:
            return
        self._console.print(f"{title}: {line}")

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, progress in self._progress.items():
            steps = max(progress.losses, default=-1) + 1
            table.add_row(
                self._settings.titles[name],
                ProgressBar(total=self._settings.steps, completed=steps, width=20),
                f"{steps}/{self._settings.steps}",
                f"loss {loss_text(progress.losses[steps - 1])}" if steps else "",
                f"{progress.checks} checks" if progress.checks else "",
            )
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._spinner, f"{time.monotonic() - self._started:.0f} s", self._now())
        return Group(table, grid)

    def _now(self) -> Text:
        """What the training that is under way does."""
        under_way = [one for one in self._progress.values() if one.state != "waiting"]
        if not under_way:
            return Text("the ranks are starting, importing torch", style="dim")
        state = under_way[-1].state
        return Text(state, style="red" if any(word in state for word in _ALARMING) else "dim")


def loss_text(value: float) -> str:
    """A loss, to three digits if it is a number."""
    return f"{value:.3f}" if math.isfinite(value) else str(value)
