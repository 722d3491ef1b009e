"""A console without a socket, and browsers and programs that ask it: every test starts from its own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from bitwitness.store.database import Database
from bitwitness.web.app import create
from bitwitness.web.settings import Settings
from bitwitness.web.status import Status

HOST = "localhost:8642"
PAGE = {"Accept": "text/html,application/xhtml+xml"}
CSRF = re.compile(r'name="csrf" value="([^"]+)"')


class _Body(httpx.AsyncByteStream):
    """A body that comes in parts."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


class _Transport(httpx.BaseTransport):
    """Requests go to the app in one event loop, as they would in a server."""

    def __init__(self, app: FastAPI, portal: BlockingPortal, address: str) -> None:
        self._transport, self._portal = (
            httpx.ASGITransport(app, raise_app_exceptions=True, client=(address, 50_000)),
            portal,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            asked = httpx.Request(request.method, request.url, headers=request.headers, stream=_Body(request.stream))
            answer = await self._transport.handle_async_request(asked)
            content = await answer.aread()
            return httpx.Response(answer.status_code, headers=answer.headers, content=content)

        return self._portal.call(ask)


@dataclass
class Console:
    """A console; `browser` and `program` ask it."""

    app: FastAPI
    database: Database
    portal: BlockingPortal
    stack: ExitStack = field(default_factory=ExitStack)

    def program(self, token: str = "", address: str = "127.0.0.1", host: str = HOST, **headers: str) -> httpx.Client:
        """Somebody who asks for JSON; with a token, each time."""
        given = {"Accept": "application/json", **headers} | ({"Authorization": f"Bearer {token}"} if token else {})
        client = httpx.Client(
            transport=_Transport(self.app, self.portal, address), base_url=f"http://{host}", headers=given
        )
        return self.stack.enter_context(client)

    def browser(self, address: str = "127.0.0.1", host: str = HOST) -> Browser:
        """Somebody who looks at pages."""
        return Browser(self.program("", address, host, **PAGE))


@dataclass
class Browser:
    """Keeps cookies, and says of each request from where it comes, as browsers do."""

    client: httpx.Client

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Go to a page of the site, from one of it."""
        return self.client.get(path, headers={"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate", **headers})

    def post(self, path: str, data: dict[str, str], **headers: str) -> httpx.Response:
        """Send a form of the site."""
        given = {"Origin": str(self.client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        return self.client.post(path, data=data, headers={**given, **headers})

    def sign_in(self, secret: str, name: str = "", after: str = "", **headers: str) -> httpx.Response:
        """Fill in the form of the sign-in."""
        form = self.get("/login")
        found = CSRF.findall(form.text)
        return self.post("/login", {"csrf": found[-1], "name": name, "secret": secret, "after": after}, **headers)


@contextmanager
def console(database: Database, settings: Settings | None = None, status: Status | None = None) -> Iterator[Console]:
    """A console over a database."""
    with start_blocking_portal() as portal, ExitStack() as stack:
        yield Console(create(database, settings, status), database, portal, stack)
