"""What several commands read from their command line in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from bitwitness.durations import seconds_of


class _Finite(click.types.FloatParamType):
    """A number: `nan` is in every range, because no comparison with it is true, and nobody asks for `inf`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no number that can be asked for", param, ctx)
        return number


FINITE = _Finite()


class FiniteRange(click.FloatRange):
    """A number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        return super().convert(FINITE.convert(value, param, ctx), param, ctx)


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
