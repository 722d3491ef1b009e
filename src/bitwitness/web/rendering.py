"""From a record to an answer: a page for people, the same record as JSON for programs, and errors in the form that was asked for.

A page and its JSON never differ because neither is made from anything but the record.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import Response

from bitwitness.web import links
from bitwitness.web.sessions import Session
from bitwitness.web.settings import Settings

logger = logging.getLogger(__name__)

JSON = "application/json"
_API = ("/api", "/export/", "/events", "/metrics", "/healthz")


@cache
def _environment() -> Environment:
    from bitwitness.web.templating import environment  # noqa: PLC0415 - the templates are only needed for pages

    return environment()


def render(request: Request, template: str, status: int = 200, **context: Any) -> Response:
    """A page. Templates get `page` and whatever else is given, and what every page needs: see `common`."""
    text = _environment().get_template(template).render(**{"page": None, **common(request), **context})
    return Response(text.encode(errors="replace"), status, media_type="text/html")


def common(request: Request) -> dict[str, Any]:
    """What every page needs.

    `session`: who is signed in, or None; `csrf`: what a form must send back; `allow_actions`: whether anything can be done from here;
    `can_sign_in`; `links`: makes addresses; `now`: UTC; `here`: name of this page; `address`: of it; `twin`: of its JSON; `change`: the counter that
    `/events` tells; `notices`: what everybody should know now, e.g. that the import fails (`kind`, `text`).
    """
    state, settings = request.app.state, _settings(request)
    session: Session | None = getattr(request.state, "session", None)
    address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return {
        "session": session,
        "csrf": session.csrf if session is not None else "",
        "allow_actions": settings.allow_actions,
        "can_sign_in": settings.users is not None,
        "links": links,
        "now": datetime.now(UTC),
        "here": "",
        "address": address,
        "twin": "",
        "change": getattr(request.state, "change", state.changes.latest),
        "notices": state.status.notices() if settings.open or session is not None else (),
    }


def as_json(record: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A record as JSON; numbers that JSON has no word for are null, and halves of characters become question marks."""
    text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, dict(headers or {}), media_type=JSON)


def plain(value: Any) -> Any:
    """A record as what JSON knows, field by field."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value]


def problem(request: Request, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error, in a sentence: as a page where a browser asks for one, else as JSON."""
    if not wants_page(request):
        return as_json({"error": text}, status, headers)
    try:
        made = render(request, "error.html.jinja", status, code=status, text=text)
    except Exception:  # an error must be told whatever is wrong with the page that tells it
        logger.exception("the page of an error could not be made")
        return as_json({"error": text}, status, headers)
    made.headers.update(headers or {})
    return made


def wants_page(request: Request) -> bool:
    """Whether a person reads the answer."""
    path = request.url.path
    if path != links.api() and path.startswith(_API):
        return False
    return "text/html" in request.headers.get("accept", "") or request.headers.get("hx-request") == "true"


def _settings(request: Request) -> Settings:
    found: Settings = request.app.state.settings
    return found
