"""`bitwitness compare --study`: the published study on invented nodes, from the question to its tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from bitwitness.cli.compare_show import echo_study
from bitwitness.cli.compare_start import Asked, check_out, handled
from bitwitness.cli.output import console, styled
from bitwitness.compare import study as studies
from bitwitness.compare.users_code import Interrupted
from bitwitness.errors import ConfigurationError

_ITS_OWN = ("steps", "seed", "out", "as_json", "study")
_OF_NOBODY_ELSE = "--study plays its own nodes on this machine's processor, with its own workloads and modes: "
_EVERY = 20.0
"""Seconds between lines where there is no terminal."""


def study(ctx: click.Context, options: Mapping[str, Any]) -> int:
    """Run it, write it, show it; the exit code.

    Raises:
        BitwitnessError: nothing was started, or a part has failed.
    """
    strangers = [
        name
        for name in options
        if name not in _ITS_OWN and ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if strangers:
        named = next(one for one in ctx.command.params if one.name == strangers[0])
        raise ConfigurationError(f"{_OF_NOBODY_ELSE}leave out {named.opts[0]}")
    out = check_out(options["out"], "comparisons")
    screen = console(stderr=True)
    steps = options["steps"] or studies.STEPS
    screen.print(
        styled(f"the study: 15 invented nodes, {steps} steps, seed {options['seed']}; in {out}"), soft_wrap=True
    )
    asked = Asked(screen, at_once=True)
    told = _Told()
    try:
        with handled(asked), screen.status("") as status:

            def progress(part: str, done: int, of: int) -> None:
                line = told.line(part, done, of)
                if screen.is_terminal:
                    status.update(styled(line))
                elif told.due():
                    screen.print(styled(line), soft_wrap=True)

            made = studies.run(out, steps=steps, seed=options["seed"], progress=progress)
            studies.write(out, made)
    except Interrupted:
        screen.print(styled(f"interrupted: {out} has what was done so far, and no tables", "yellow"), soft_wrap=True)
        return 128 + asked.number
    echo_study(out, as_json=options["as_json"])
    return 0  # a statement that differs is a finding, and in the tables


class _Told:
    """What the parts of a study, which run beside each other, have said last."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int]] = {}
        self._last = time.monotonic()

    def line(self, part: str, done: int, of: int) -> str:
        """How they all stand."""
        self._parts[part] = done, of
        return "; ".join(f"{name} {done} of {of}" for name, (done, of) in self._parts.items())

    def due(self) -> bool:
        """Whether a line is to be said again."""
        if time.monotonic() - self._last < _EVERY:
            return False
        self._last = time.monotonic()
        return True
