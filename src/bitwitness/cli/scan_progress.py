"""How a scan stands, while it works: one line that is drawn anew on a terminal, and a line now and then where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bitwitness.cli.output import styled
from bitwitness.scan.coordinating import State

_LINES = 10
"""So many lines over the whole time where there is no terminal."""


class Progress:
    """Shows the states of a scan; from entering to leaving the context."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._state: State | None = None
        self._told = 0
        self._live = Live(console=screen, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen.is_terminal:
            self._live.stop()

    def tell(self, state: State) -> None:
        """Take note of how it stands now."""
        self._state = state
        for message in state.messages:
            self._screen.print(styled(message, "yellow"), soft_wrap=True)
        if self._screen.is_terminal:
            return
        tenth = int(min(1.0, state.elapsed / state.seconds) * _LINES)
        if tenth > self._told:
            self._told = tenth
            self._screen.print(styled(line(state)), soft_wrap=True)

    def _render(self) -> Table | Text:
        state = self._state
        if state is None or not (state.alive or state.ended):
            return Text("the ranks are starting, importing torch", style="dim")
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            ProgressBar(total=state.seconds, completed=min(state.elapsed, state.seconds), width=20), line(state)
        )
        return grid


def line(state: State) -> str:
    """One line for people."""
    left = max(0.0, state.seconds - state.elapsed)
    parts = [
        f"{_clock(state.elapsed)} of {_clock(state.seconds)}, {_clock(left)} left",
        f"{state.alive} of {state.world} devices at work" + (f", {state.ended} done" if state.ended else ""),
        f"{state.calls} calls ({state.rate:.0f}/s) of {state.items} items",
        f"{state.wrong} wrong answers so far" if state.wrong else "no wrong answer so far",
    ]
    return "; ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
