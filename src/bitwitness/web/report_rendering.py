"""A report as a page and as Markdown: two templates over the same sentences, in which nothing from a run is anything but text.

The page is one file: its style is in it, its figures are drawn in it, nothing is fetched and nothing runs; its own policy forbids the
rest. Markdown is read by many programs, each with rules of its own, so every sign that any of them acts on is taken its meaning.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from bitwitness.web import report_nobody, report_words
from bitwitness.web.report_records import Report
from bitwitness.web.templating import environment, plain

MADE_BY = "Made by bitwitness report"
"""Stands in both forms: what has it may be overwritten."""

_ACTIVE = re.compile(r"[\\`*_\[\]{}|~]")
"""Signs that Markdown acts on in the middle of a line, which a backslash stops."""
_LINKING = re.compile(
    r"[@$]|[#!%^~&](?=\w)|:(?=//)|:(?=[\w+-]*[A-Za-z_][\w+-]*:)|(?<=\bwww)\.|(?<=\bGH)-(?=\d)", re.IGNORECASE
)
"""Signs that trackers act on wherever they stand in text (mentions, references, addresses, formulas), but not in code."""
_BEGINNING = re.compile(r"^((?:[-+#]+|\d+[.)])(?=\s|$)|[-=]+\s*$)")
"""What makes a list, a heading or a line of the beginning of a text."""


def html(report: Report) -> str:
    """One page that needs nothing else."""
    made = environment()
    style = made.get_template("report_style.css.jinja").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return made.get_template("report.html.jinja").render(
        **_context(report),
        style=Markup(style),  # noqa: S704 - a template without values
        style_digest=digest,
    )


def markdown(report: Report) -> str:
    """For a ticket."""
    text = _markdown().get_template("report.md.jinja").render(**_context(report))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _context(report: Report) -> dict[str, Any]:
    return {
        "report": report,
        "page": report.page,
        "one": report.page.incident,
        "words": report_words,
        "nobody": report_nobody,
        "standing": report_words.standing(report),
        "made_by": MADE_BY,
    }


@cache
def _markdown() -> Environment:
    made = environment().overlay(autoescape=False, finalize=_finalize)
    made.filters = {**made.filters, "code": code, "cell": cell}
    return made


def _finalize(value: Any) -> Any:
    if value is None:
        return ""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def escaped(text: str) -> str:
    """Text that stays text in Markdown."""
    parts = []
    done = 0
    shown = plain(text).strip()
    for found in _LINKING.finditer(shown):
        parts += [_quiet(shown[done : found.start()]), f"`{found[0]}`"]
        done = found.end()
    whole = "".join([*parts, _quiet(shown[done:])])
    return _BEGINNING.sub(lambda found: f"{found[1].rstrip()[:-1]}\\{found[1].rstrip()[-1]}", whole)


def _quiet(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ACTIVE.sub(lambda found: f"\\{found[0]}", text)


def code(value: object) -> Markup:
    """A name or a command as it is; on its own line, or between words, but not in a table."""
    text = plain(str(value))
    if not text.strip():
        return Markup("–")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    gap = " " if longest or text != text.strip() else ""
    return Markup(f"{fence}{gap}{text}{gap}{fence}")  # noqa: S704 - Markdown, which has no markup in code


def cell(value: object) -> Markup:
    """The same in a table, where a bar ends a cell even in code."""
    return Markup(code(value).replace("|", "\\|"))  # noqa: S704 - as `code`
