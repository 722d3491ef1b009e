"""What several commands read from their command line in the same way."""

from __future__ import annotations

from collections.abc import Callable

import click

from bitwitness.durations import seconds_of


def seconds_up_to(most: float, what: str) -> Callable[[click.Context, click.Parameter, str], float]:
    """A callback that reads a length of time in seconds, above 0 and at most `most`, which a message calls `what`."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> float:
        try:
            seconds = seconds_of(value)
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(str(error), ctx, param) from error
        if not 0 < seconds <= most:
            raise click.BadParameter(f"must be above 0 and at most {what}", ctx, param)
        return seconds

    return read
