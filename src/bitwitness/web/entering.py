"""Signing in and out."""

from __future__ import annotations

import secrets

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bitwitness.web import links
from bitwitness.web.context import Given
from bitwitness.web.rendering import as_json, render, wants_page
from bitwitness.web.security import BROWSER, COOKIE, NONCE, client_of, cookie, drop_cookie, field, set_cookie
from bitwitness.web.sessions import Sessions
from bitwitness.web.signing import Refused, Signing

_REMEMBERED = 30 * 86_400

router = APIRouter(include_in_schema=False)


@router.get("/login")
def login(request: Request, settings: Given, after: str = "") -> Response:
    """The form."""
    if settings.users is None:
        raise HTTPException(
            404, "nobody can sign in here: the console was started without --users and without --allow-actions"
        )
    return _form(request, links.own(after))


@router.post("/login")
async def enter(request: Request, settings: Given) -> Response:
    """Take a name and a secret."""
    body = await request.body()
    name, secret, after = (field(body, part) for part in ("name", "secret", "after"))
    signing: Signing = request.app.state.signing
    sessions: Sessions = request.app.state.sessions
    nonce = cookie(request, NONCE)
    if settings.users is None:
        raise HTTPException(404, "nobody can sign in here")
    if not request.headers.get("origin") and not request.headers.get("sec-fetch-site"):
        raise HTTPException(
            403, "the request does not say from which page it comes: programs send Authorization: Bearer TOKEN"
        )
    if not nonce or not signing.sealed(field(body, "csrf"), "form", nonce):
        return _form(
            request, links.own(after), 403, "the form is too old, or this browser takes no cookies: try again", name
        )
    try:
        user = await signing.sign_in(name.strip(), secret.strip(), client_of(request), cookie(request, BROWSER))
    except Refused as refused:
        headers = {"Retry-After": str(refused.wait)} if refused.wait else {}
        made = _form(request, links.own(after), refused.status, str(refused), name)
        made.headers.update(headers)
        return made
    sessions.end(cookie(request, COOKIE))
    answer = RedirectResponse(links.own(after), 303)
    set_cookie(request, answer, COOKIE, sessions.begin(user))
    set_cookie(request, answer, BROWSER, signing.remember(user.name), _REMEMBERED)
    drop_cookie(request, answer, NONCE)
    return answer


@router.post("/logout")
def leave(request: Request) -> Response:
    """End the session, here and in the browser."""
    sessions: Sessions = request.app.state.sessions
    sessions.end(cookie(request, COOKIE))
    answer = RedirectResponse("/", 303)
    drop_cookie(request, answer, COOKIE)
    return answer


def _form(request: Request, after: str, status: int = 200, text: str = "", name: str = "") -> Response:
    """The form, with a token that only this browser can send back."""
    if not wants_page(request) and status != 200:
        return as_json({"error": text}, status)
    signing: Signing = request.app.state.signing
    nonce = cookie(request, NONCE) or secrets.token_urlsafe(24)
    made = render(
        request,
        "login.html.jinja",
        status,
        again="",
        after=after,
        form=signing.seal("form", nonce),
        text=text,
        name=name,
    )
    set_cookie(request, made, NONCE, nonce)
    return made
