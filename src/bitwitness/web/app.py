"""The console as one ASGI app: which parts it has, and in which order a request passes them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bitwitness._version import __version__
from bitwitness.errors import BitwitnessError, NotFound
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.web import acting, entering, events, exporting, files, links, listing, metrics, pages
from bitwitness.web.context import Data, Given
from bitwitness.web.events import Changes
from bitwitness.web.manners import Manners
from bitwitness.web.rendering import as_json, problem
from bitwitness.web.security import Guard, signed_in
from bitwitness.web.sessions import Sessions
from bitwitness.web.settings import Settings
from bitwitness.web.signing import Signing
from bitwitness.web.status import Status


def create(database: Database, settings: Settings | None = None, status: Status | None = None) -> FastAPI:
    """The app over a database.

    Args:
        database: what is shown.
        settings: how; for loopback, and only to look at, if absent.
        status: where an import beside it says how it is.
    """
    settings = settings or Settings()
    app = FastAPI(
        title="bitwitness console",
        version=__version__,
        description="What was checked, what was found, and who did what. Each address under /api is the JSON of a page.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.router.redirect_slashes = False
    sessions, signing = Sessions(settings.users), Signing(settings.users)
    status = status or Status()
    app.state.database, app.state.settings, app.state.status = database, settings, status
    app.state.sessions, app.state.signing = sessions, signing
    app.state.changes = Changes(lambda: queries.change(database), status)
    app.state.exports = exporting.Exports()
    links.set_versions({name: file.digest for name, file in files.files().items()})
    for part in (pages, acting, exporting, events, metrics, files, entering, listing):
        app.include_router(part.router)
    app.add_api_route("/healthz", _healthz, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(NotFound, pages.not_found)
    app.add_middleware(Guard, settings=settings, sessions=sessions, signing=signing)
    app.add_middleware(Manners)
    return app


def _healthz(request: Request, data: Data, settings: Given) -> Response:
    """Whether the pages can be made: the database answers. A failing import is told, and no reason to start anew.

    What is wrong names files and servers, so only those who may look are told.
    """
    told, found = dict(request.app.state.status.to_json()), ""
    try:
        queries.change(data)
    except BitwitnessError as error:
        found = str(error)
    about = {"database": found, **told} if settings.open or signed_in(request) is not None else {}
    return as_json({"ok": not found, **about}, 503 if found else 200)


def _refused(request: Request, error: Exception) -> Response:
    """404, 405 and their kind, and what a part of ours refuses."""
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing at this address", 405: "this address does not answer that method"}
    text = error.detail if error.detail not in ("Not Found", "Method Not Allowed") else said[error.status_code]
    return problem(request, error.status_code, text, error.headers)


def _invalid(request: Request, error: Exception) -> Response:
    """An address or a form with a value that cannot be: which one, and not what it was."""
    assert isinstance(error, RequestValidationError)
    found: list[Any] = list(error.errors())
    said = "; ".join(f"{'.'.join(str(part) for part in one['loc'][1:]) or 'body'}: {one['msg']}" for one in found[:5])
    return problem(request, 422, said[:1000])
