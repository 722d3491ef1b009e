"""What a route of the console is given: the database, the settings, and keys that are checked before anybody looks them up."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request

from bitwitness.store.database import Database
from bitwitness.web.settings import Settings


class _AnyName(PathConvertor):
    """A name in an address, whatever is in it: the usual `{name:path}` ends at the end of a line."""

    regex = "(?s:.*)"


register_url_convertor("path", _AnyName())

LARGEST_KEY = 2**31 - 1
"""PostgreSQL has no larger one in a column of this kind, and says so by an error."""


def database_of(request: Request) -> Database:
    """The database of this console."""
    found: Database = request.app.state.database
    return found


def settings_of(request: Request) -> Settings:
    """How this console was started."""
    found: Settings = request.app.state.settings
    return found


Data = Annotated[Database, Depends(database_of)]
Given = Annotated[Settings, Depends(settings_of)]
Key = Annotated[int, Path(ge=1, le=LARGEST_KEY, description="key of a run")]
