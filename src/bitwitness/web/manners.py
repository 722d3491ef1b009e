"""What every answer has, errors and files too: headers that keep browsers from doing more than showing it, and no traceback ever."""

from __future__ import annotations

import logging
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitwitness.errors import BitwitnessError
from bitwitness.web.rendering import problem

logger = logging.getLogger(__name__)

HEAD = "bitwitness.head"
"""In a scope: the client wants no body, so that nobody needs to make one."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
MANNERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""`Referrer-Policy` is not `no-referrer`: browsers would then name no origin in a form that is sent, and it would be refused."""


class Manners:
    """Middleware: adds the headers, answers HEAD like GET without a body, and turns what nobody foresaw into an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head, over, started = scope["method"] == "HEAD", False, False
        if head:
            scope = {**scope, "method": "GET", HEAD: True}

        async def answer(message: Message) -> None:
            nonlocal over, started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in MANNERS.items():
                    headers.setdefault(name, value)
            elif head:
                if over:
                    return
                over, message = True, {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            if started:
                raise  # the connection ends, so that half an answer is not taken for a whole one
            if isinstance(error, BitwitnessError):
                logger.error("%s could not be answered: %s", scope["path"][:200], error)  # noqa: TRY400 - no bug
                made = problem(Request(scope, receive), 503, str(error), {"Retry-After": "5"})
            else:
                logger.exception("%s could not be answered", scope["path"][:200])
                made = problem(
                    Request(scope, receive), 500, "this could not be answered: the log of the console says why"
                )
            await made(scope, receive, answer)
