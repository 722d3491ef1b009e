"""The web side of the controller: incidents of jobs that share no file system with it come in, and figures go out.

Only `POST /incidents` changes anything, and only for whoever holds the token, which is compared before anything else of a
request is looked at. `/metrics`, `/healthz` and the page need none and show no secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bitwitness.errors import BitwitnessError, ConfigurationError, MissingExtra
from bitwitness.fleet.exposition import CONTENT_TYPE, Exposition, Figures, Health
from bitwitness.fleet.received import LARGEST, Limits, Refused, Store, valid_run
from bitwitness.fleet.secret import SHORTEST, read_secret
from bitwitness.fleet.serving import Server, serve

try:
    from jinja2 import Environment, StrictUndefined, Template
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:
    needed = str(missing.name).partition(".")[0]
    raise MissingExtra(f"the inbox needs {needed}: pip install 'bitwitness[fleet]'") from missing

logger = logging.getLogger(__name__)

__all__ = ["Limits", "Server", "app", "read_token", "render", "serve"]

TEMPLATE = "page.html.jinja"
RUN_HEADER = "X-Bitwitness-Run"
BODY_SECONDS = 20.0
_BODIES = 4
"""Bodies that are received at once: they are held in memory."""
_MANNERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def read_token(path: Path) -> str:
    """The token of the inbox, from a file that only its owner can read.

    Raises:
        ConfigurationError: there is none, it is too short, or others can read it.
    """
    return read_secret(path, "the token of the inbox", SHORTEST)


def app(
    folder: Path | None,
    token: str,
    *,
    metrics: Callable[[], Figures],
    health: Callable[[], Health],
    limits: Limits | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    body_seconds: float = BODY_SECONDS,
    leader: Callable[[], str] = lambda: "",
) -> Starlette:
    """The app. `folder`: where incidents are stored, or None to take none; `metrics` and `health` are called in other threads.

    `leader`: which other controller leads, or "". Who stands by takes no incident: nobody would look at it until it leads.

    Raises:
        ConfigurationError: incidents are taken, and the token is too short to be one.
        RunFilesError: the folder cannot be used.
    """
    exposition = Exposition(metrics)
    routes = [
        Route("/metrics", _metrics(exposition)),
        Route("/healthz", _health(health)),
        Route("/", _page(metrics, health)),
    ]
    if folder is not None:
        if len(token) < SHORTEST or not token.isascii():
            raise ConfigurationError(f"the token of the inbox needs at least {SHORTEST} plain characters")
        inbox = _Inbox(Store(folder, limits, clock), token, exposition, body_seconds, leader)
        routes.append(Route("/incidents", inbox.post, methods=["POST"]))
    handlers: dict[Any, Any] = {HTTPException: _problem, BitwitnessError: _unreadable}
    made = Starlette(routes=routes, exception_handlers=handlers)
    made.router.redirect_slashes = False  # whoever follows a redirection sends the token again, and may send no body
    return made


class _Inbox:
    """`POST /incidents`."""

    def __init__(
        self, store: Store, token: str, exposition: Exposition, body_seconds: float, leader: Callable[[], str]
    ) -> None:
        self._store, self._exposition, self._seconds, self._leader = store, exposition, body_seconds, leader
        self._expected = hashlib.sha256(token.encode()).digest()
        self._bodies = asyncio.Semaphore(_BODIES)
        self._warned = -60.0

    async def post(self, request: Request) -> Response:
        """Take an incident: 201 where it is new, 200 where it was known; it is on the disk then."""
        try:
            run = self._admit(request)
            what, incident = await self._take(request, run)
        except Refused as refused:
            self._exposition.count_answer(refused.status)
            return _refusal(refused)
        status = 201 if what == "stored" else 200
        self._exposition.count_answer(status)
        return JSONResponse({"status": what, "id": incident, "run": run}, status, _MANNERS)

    def _admit(self, request: Request) -> str:
        """Look at everything but the body; the name of the run."""
        if not self._authorised(request):
            self._complain()
            raise Refused(401, "the token is wrong or absent: send it as Authorization: Bearer TOKEN")
        if leader := self._leader():
            raise Refused(503, f"this controller stands by, and {leader} leads: send it there, or again", 10)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, "the body must be JSON: Content-Type: application/json")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Refused(415, "the body must not be compressed")
        if int(request.headers.get("content-length", "0")) > LARGEST:
            raise Refused(413, f"the body is larger than {LARGEST >> 20} MiB")
        named = request.headers.getlist(RUN_HEADER)
        if len(named) != 1:
            raise Refused(400, f"the header {RUN_HEADER} must say once of which run the incident is")
        return valid_run(named[0])

    def _authorised(self, request: Request) -> bool:
        """Compare digests, so that the time tells neither where the difference is nor how long the token is."""
        given = [value for name, value in request.headers.raw if name == b"authorization"]
        scheme, _, secret = (given[0] if len(given) == 1 else b"").partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(secret.strip()).digest(), self._expected)
        return same and scheme.lower() == b"bearer"

    def _complain(self) -> None:
        """Log that somebody was refused, at most once a minute: a log must not be filled from outside."""
        now = time.monotonic()
        if now - self._warned >= 60:
            self._warned = now
            logger.warning("a request without the right token was refused; more within a minute are only counted")

    async def _take(self, request: Request, run: str) -> tuple[str, str]:
        if self._bodies.locked():
            raise Refused(503, "too many incidents come in at once; send it again", 2)
        async with self._bodies:
            try:
                async with asyncio.timeout(self._seconds):
                    body = await _body(request)
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {self._seconds:g} s") from None
            return await run_in_threadpool(self._store.add, run, body)


async def _body(request: Request) -> bytes:
    """The body, which may come without saying how long it is."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > LARGEST:
                raise Refused(413, f"the body is larger than {LARGEST >> 20} MiB")
            parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "the body ended before its end") from None
    return b"".join(parts)


def _metrics(exposition: Exposition) -> Callable[[Request], Response]:
    def metrics(request: Request) -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE, headers=_MANNERS)

    return metrics


def _health(health: Callable[[], Health]) -> Callable[[Request], Response]:
    def healthz(request: Request) -> Response:
        found = health()
        return JSONResponse(found.to_json(), 200 if found.ok else 503, _MANNERS)

    return healthz


def _page(metrics: Callable[[], Figures], health: Callable[[], Health]) -> Callable[[Request], Response]:
    def page(request: Request) -> Response:
        return Response(render(metrics(), health()), media_type="text/html", headers=_MANNERS)

    return page


def render(figures: Figures, health: Health) -> str:
    """The page; what comes from an incident is escaped by the template engine."""
    return _template().render(figures=figures, health=health)


@cache
def _template() -> Template:
    source = resources.files("bitwitness.fleet").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)


def _refusal(refused: Refused) -> Response:
    headers = dict(_MANNERS)
    if refused.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refused.retry_after is not None:
        headers["Retry-After"] = str(refused.retry_after)
    return JSONResponse({"error": refused.why}, refused.status, headers)


def _problem(request: Request, error: HTTPException) -> Response:
    """404, 405 and their kind, in the form of all other answers."""
    return JSONResponse({"error": error.detail}, error.status_code, {**_MANNERS, **(error.headers or {})})


def _unreadable(request: Request, error: BitwitnessError) -> Response:
    """Of figures that cannot be read: the reason is for the log, because it names files."""
    logger.error("%s cannot be answered: %s", request.url.path, error)
    return JSONResponse({"error": "the state of the controller cannot be read now: its log says why"}, 503, _MANNERS)
