"""How pages are filled in: one environment, in which nothing that comes from a run can become anything but text.

Names of hosts, jobs and tensors, and reasons, are hostile input. So escaping is on for every template whatever its name, a name
that is not there is an error, and what a browser or a reader would act on without showing it (control characters, marks that turn
the direction of writing) is spelled out wherever a value is put in, not where somebody remembered to.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from bitwitness.errors import MissingExtra
from bitwitness.evidence import NONFINITE
from bitwitness.web import drawing, reasons

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
    from jinja2.runtime import Context
    from markupsafe import Markup
except ImportError as missing:
    raise MissingExtra(f"the console needs {missing.name}: pip install 'bitwitness[web]'") from missing

logger = logging.getLogger(__name__)

_LONGEST = 8_000
"""Characters of one value that are shown; the JSON twin of the page has all of it."""
_THIN = "\u202f"
_DIGITS = 10


@cache
def environment() -> Environment:
    """The environment of all templates of the console and of its reports."""
    made = Environment(
        loader=PackageLoader("bitwitness.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        number=number,
        figure=figure,
        share=share,
        seconds=seconds,
        bytes=byte_count,
        moment=moment,
        path=path,
        clock=clock,
        ago=ago,
        digest=digest,
        brief=brief,
        plural=plural,
        listed=reasons.listed,
        some=some,
    )
    made.globals.update(drawing=drawing, reasons=reasons, drawn=drawn)
    return made


def plain(text: str) -> str:
    """Text of one line in which nothing acts without being seen, cut where nobody would read on."""
    cut = f" ... ({len(text) - _LONGEST} more characters)" if len(text) > _LONGEST else ""
    shown = text[:_LONGEST]
    if not shown.isprintable():
        shown = "".join(char if _shows(char) else char.encode("unicode_escape").decode() for char in shown)
    return shown + cut


def _shows(char: str) -> bool:
    return char.isprintable() or char == _THIN


def _finalize(value: Any) -> Any:
    if value is None:
        return ""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


# Numbers -------------------------------------------------------------------------------------------------------------


def number(value: float) -> Markup:
    """A whole number in groups of three: `12 345`."""
    return Markup(f"{value:,.0f}".replace(",", _THIN))  # noqa: S704 - digits only


def figure(value: float | None, digits: int = 4) -> str:
    """A measured number to some digits; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def share(value: float | None, digits: int = 1) -> Markup:
    """A share in percent, rounded down: whoever reads 100 % must be able to rely on it; and never 0 % where there is something."""
    if value is None or not math.isfinite(value):
        return Markup("–")
    scale = 10**digits
    percent = math.floor(value * 100 * scale + 1e-9) / scale
    if value > 0 and percent == 0:
        return Markup(f"&lt;{_THIN}{1 / scale:g}{_THIN}%")  # noqa: S704 - digits only
    return Markup(f"{percent:.{0 if percent in (0, 100) else digits}f}{_THIN}%")  # noqa: S704 - digits only


def seconds(value: float | None) -> Markup:
    """A length of time in its usual unit."""
    if value is None or not math.isfinite(value):
        return Markup("–")
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size:
            return Markup(f"{value / size:.3g}{_THIN}{unit}")  # noqa: S704 - digits and units only
    return Markup(f"0{_THIN}s")  # noqa: S704 - digits and units only


def byte_count(value: float) -> Markup:
    """A size in binary units."""
    size, units = float(value), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return Markup(f"{size:.3g}{_THIN}{units[0]}" if size < 1000 else f"{size:.0f}{_THIN}{units[0]}")  # noqa: S704 - digits


# Times ---------------------------------------------------------------------------------------------------------------


def moment(text: str) -> datetime | None:
    """A time of a file; None where it is none, whatever was written there."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None


def clock(time: datetime) -> str:
    """A time for people: UTC, to the second."""
    return f"{time:%Y-%m-%d %H:%M:%S}"


def ago(time: datetime, now: datetime) -> str:
    """How long ago that is, in the largest unit."""
    past = (now if now.tzinfo else now.replace(tzinfo=UTC)) - time
    ahead = past < timedelta(0)
    whole = int(abs(past).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            told = f"{whole // size} {unit}"
            return f"in {told}" if ahead else f"{told} ago"
    return "just now"


# Figures -------------------------------------------------------------------------------------------------------------


@pass_context
def drawn(context: Context, template: str, what: str, **more: Any) -> Markup:
    """A figure of a page; where it cannot be drawn, that in words: the page says the same in tables, and must stand whatever is on record.

    Args:
        context: of the page.
        template: of the figure.
        what: it is, for those who look at the page, and at the log.
        more: what it is made of besides.
    """
    environment = context.environment
    try:
        return Markup(environment.get_template(template).render({**context.get_all(), **more}))  # noqa: S704 - escaped there
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a mistake in the figure alone
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        place = "" if last is None else f" ({last.tb_frame.f_code.co_filename}, line {last.tb_lineno})"
        address = str(context.get("address", ""))[:200]
        told = f"{type(error).__name__}: {plain(str(error))[:300]}{place}"
        logger.error("the %s at %r could not be drawn: %s", what, address, told)  # noqa: TRY400 - a line, because every reader asks for it
        return Markup(environment.get_template("svg/failed.html.jinja").render(what=what))  # noqa: S704 - escaped there


def path(commands: str) -> Markup:
    """The commands of a path, which are as many as they are: no other text may be so long, or go past what makes it safe.

    Raises:
        ValueError: it is something else.
    """
    if not re.fullmatch(r"[MLQAZhl0-9eE .+-]*", commands):
        raise ValueError(f"these are no commands of a path: {commands[:80]!r}")
    return Markup(commands)  # noqa: S704 - checked just now


# Words ---------------------------------------------------------------------------------------------------------------


def digest(value: str) -> str:
    """As much of a digest as a person compares by eye."""
    return value if len(value) <= _DIGITS or value == NONFINITE else f"{value[:_DIGITS]}…"


def brief(text: str, most: int = 96) -> str:
    """A name, its middle left out where it is longer than anybody reads."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def plural(count: int, one: str, many: str = "") -> Markup:
    """`1 run`, `2 runs`; the nouns are the template's own."""
    return Markup("{}{}{}").format(number(count), " ", one if count == 1 else many or f"{one}s")


def some(items: Sequence[Any] | Mapping[Any, Any], most: int) -> list[Any]:
    """The first of them; how many are left out is for the template to say."""
    return list(items)[:most]
