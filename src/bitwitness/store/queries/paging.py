"""What every list has in common: which part of it is shown, and how what was typed into a search is looked for.

Apart from the queries because all of it comes from outside: page numbers that do not exist, `%` in the name of a node, a text of
a megabyte. None of these may be an error, and none may mean anything but itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, or_

LARGEST = 500
"""Rows of a page at most, whatever was asked for."""
_LONGEST = 200
"""Characters of a search that are looked at; no name is longer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a list is shown.

    Attributes:
        page, pages: from 1, of how many; there is always one.
        offset, size: of the rows.
    """

    page: int
    pages: int
    offset: int
    size: int


def part(total: int, page: int, size: int) -> Part:
    """The part of a list of so many rows that was asked for, or the one nearest to it: the last, or the first."""
    size = min(max(1, size), LARGEST)
    pages = max(1, -(-total // size))
    page = min(max(1, page), pages)
    return Part(page, pages, (page - 1) * size, size)


def searched(text: str) -> str:
    """What is looked for: without the blanks around it, and without NUL, which no database takes."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_LONGEST].strip()


def exactly(name: str) -> str:
    """A name that is looked for as it is, blanks and all, but for what no database takes."""
    return name.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def contains(text: str, *columns: ColumnElement[str]) -> ColumnElement[bool]:
    r"""Whether one of the columns holds this text, in upper or lower case; `%`, `_` and `\\` mean themselves."""
    return or_(*(column.icontains(text, autoescape=True) for column in columns))
