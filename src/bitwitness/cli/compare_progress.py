"""How a comparison stands, while it runs: one line that is drawn anew on a terminal, and a line now and then where there is none."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from bitwitness.cli.output import styled
from bitwitness.compare.records import Mode
from bitwitness.compare.settings import Settings

_LINES = 4
"""So many lines a mode where there is no terminal."""


class Progress:
    """Shows which step of which mode is done; from entering to leaving the context.

    Args:
        screen: where. settings: of the comparison. quiet: another process shows the same.
    """

    def __init__(self, screen: Console, settings: Settings, *, quiet: bool = False) -> None:
        self._screen, self._settings, self._quiet = screen, settings, quiet
        self._status: Status | None = None
        self._begun = time.monotonic()
        self._told: tuple[Mode | None, int] = (None, 0)

    def __enter__(self) -> Self:
        if self._screen.is_terminal and not self._quiet:
            self._status = self._screen.status(styled("the first step"))
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, mode: Mode, done: int) -> None:
        """Take note that so many steps of a mode are done."""
        if self._quiet:
            return
        if self._status is not None:
            self._status.update(styled(self._line(mode, done)))
            return
        part = done * _LINES // self._settings.steps
        if part and (mode, part) != self._told:
            self._told = (mode, part)
            self._screen.print(styled(self._line(mode, done)), soft_wrap=True)

    def _line(self, mode: Mode, done: int) -> str:
        modes, steps = self._settings.modes, self._settings.steps
        all_steps = steps * len(modes)
        at = modes.index(mode) * steps + done
        left = (time.monotonic() - self._begun) / at * (all_steps - at)
        return f"{mode}, step {done} of {steps} (mode {modes.index(mode) + 1} of {len(modes)}); about {left:.0f} s left"
