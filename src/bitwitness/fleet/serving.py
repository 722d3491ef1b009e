"""A web server in a thread that no client can keep busy: for how long, and for how many, is bounded here.

Uvicorn waits without end for the rest of a request and for a reader who does not read. A controller that repairs machines is
reached from machines that are broken, so each connection has a time within which a request must be over. Where there are too many,
those whose client still owes a request, or the rest of one, make room: first of the client that has most, and of these the oldest.
No client has all of them, so that one who opens as many as it can keeps nobody out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

from bitwitness.errors import ConfigurationError, MissingExtra
from bitwitness.fleet.clients import network

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    needed = str(missing.name).partition(".")[0]
    raise MissingExtra(f"the inbox needs {needed}: pip install 'bitwitness[fleet]'") from missing

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 40.0
"""From the connection, or the end of the answer before, to the end of an answer."""
HEADER_SECONDS = 5.0
"""Of these, until a request has come but for its body: a connection that says nothing keeps others out."""
DOWNLOAD_SECONDS = 900.0
"""To the end of an answer that is long on purpose, while its reader takes `DOWNLOAD_RATE` of it."""
DOWNLOAD_RATE = 32 << 10
"""Bytes a second, counted while it is the reader who is waited for, over `REQUEST_SECONDS`."""
_CONNECTIONS = 256
_SHARE = 0.75
"""Of all connections, one client may have this part. A proxy is one client for everybody behind it, so it is large."""
_HEADERS = 16 << 10
_SEND_BUFFER = 256 << 10
"""Of the system, for a download: what its reader takes is seen in parts of that size."""
BAD_REQUEST = (
    f"this is no request of HTTP/1.1, or its headers (cookies too) are larger than {_HEADERS >> 10} KiB; "
    "TLS is not spoken here, but by a proxy before it\n"
)
BUSY = "too many connections are busy at once: try again in some seconds, or find out which client holds so many\n"
_STARTING_SECONDS = 30.0


class Server:
    """A server that runs in a thread until it is stopped; usable in a `with`.

    Attributes:
        host, port: where it listens; the port that the system chose, if 0 was asked for.

    Args:
        app: what answers.
        host, port: where to listen.
        request_seconds, header_seconds, connections: the bounds.
        body_seconds: of `request_seconds`, until the body of a request has come.
        downloads: answers below this path are long on purpose, and bounded by `download_seconds`; "" for none.
        download_seconds, download_rate: see `DOWNLOAD_SECONDS` and `DOWNLOAD_RATE`.
        headers: of the answers that are made here and not by the app.
        option: which one the message names where it cannot listen.

    Raises:
        ConfigurationError: it cannot listen there, e.g. because another program does.
    """

    def __init__(
        self,
        app: Starlette,
        host: str,
        port: int,
        request_seconds: float = REQUEST_SECONDS,
        header_seconds: float = HEADER_SECONDS,
        connections: int = _CONNECTIONS,
        *,
        body_seconds: float = REQUEST_SECONDS,
        downloads: str = "",
        download_seconds: float = DOWNLOAD_SECONDS,
        download_rate: float = DOWNLOAD_RATE,
        headers: Mapping[str, str] | None = None,
        option: str = "--listen",
    ) -> None:
        self._socket = _listen(host, port, option)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        bounds = {
            "seconds": request_seconds,
            "header_seconds": min(header_seconds, request_seconds),
            "body_seconds": min(body_seconds, request_seconds),
            "most": connections,
            "downloads": downloads,
            "download_seconds": download_seconds,
            "download_rate": download_rate,
            "more_headers": dict(headers or {}),
        }
        protocol = type("Bounded", (_BoundedProtocol,), bounds)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            backlog=max(8, connections // 4),  # as many are accepted at once, before any of them can say what it wants
            log_config=None,
            log_level="error",  # nobody without a token shall be able to fill the log
            access_log=False,  # whoever asks /metrics every 15 s is no news
            proxy_headers=False,  # what a client says of itself is not believed
            server_header=False,
            timeout_keep_alive=20,  # more than the 15 s between two scrapes
            timeout_graceful_shutdown=3,
            h11_max_incomplete_event_size=_HEADERS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="bitwitness-inbox", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """As a browser takes it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Let requests that are under way end, for a few seconds, and stop listening. Harmless the second time."""
        self._server.should_exit = True
        self._thread.join(_STARTING_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException:
            logger.exception("the web server has ended; everything else goes on without it")


def serve(app: Starlette, host: str, port: int) -> Server:
    """Serve an app in a thread; it listens when this returns."""
    return Server(app, host, port)


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError(f"cannot listen on {host}:{port}: {why}; choose another {option}") from error
    return listening


class _BoundedProtocol(H11Protocol):
    """A connection that ends when a request takes too long, whoever is to blame."""

    seconds, header_seconds, body_seconds, most = REQUEST_SECONDS, HEADER_SECONDS, REQUEST_SECONDS, _CONNECTIONS
    downloads, download_seconds, download_rate = "", DOWNLOAD_SECONDS, float(DOWNLOAD_RATE)
    more_headers: Mapping[str, str] = {}
    _deadline: asyncio.TimerHandle | None = None
    _since = _latest = 0.0
    _from = ""
    _unfinished = False  # some of a request has come, and not all
    _surplus = _leaving = False
    _paused_at: float | None = None
    _paused, _taken, _left = 0.0, 0, 0

    # Room -------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count, and where there are too many, end one whose client is waited for."""
        super().connection_made(transport)
        self._since, self._from = self.loop.time(), network(self.client[0] if self.client else "")
        self._restart(self.header_seconds)
        others = [one for one in self.connections if isinstance(one, _BoundedProtocol) and not one._leaving]
        of = Counter(one._from for one in others)
        if of[self._from] > max(1, int(self.most * _SHARE)):
            others = [one for one in others if one._from == self._from]
        elif len(others) < self.most:
            return
        waited_for = [one for one in others if one is not self and one._owes]
        first = min(waited_for, key=lambda one: (-of[one._from], one._since), default=None)
        if first is None:
            self._surplus = True
        else:
            first._leaving = True
            first.transport.abort()

    @property
    def _owes(self) -> bool:
        """Whether the client is waited for: nothing is asked, or not all of it has come."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    async def _busy(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**self.more_headers, "Retry-After": "5", "Connection": "close"}
        await PlainTextResponse(BUSY, 503, headers)(scope, receive, send)

    # Time -------------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """A request whose headers are whole has the time for its body, and one that is whole that for its answer."""
        before, idle = self.cycle, self.cycle is not None and self.cycle.response_complete
        busy: Any = self._busy if self._surplus or len(self.tasks) >= 2 * self.most else self.config.loaded_app
        self.app = busy
        super().data_received(data)
        if self.cycle is not before:
            self._begin()
        elif idle and self.cycle.response_complete:
            if not self._unfinished:  # the first of the next request, which has to come as fast
                self._unfinished = True
                self._restart(self.header_seconds)
        elif self._unfinished and self.cycle is not None and not self.cycle.more_body:
            self._unfinished = False
            self._restart(self.seconds)

    def _begin(self) -> None:
        """A request has come, at least but for its body."""
        self._unfinished = self.cycle.more_body
        self._restart(self.body_seconds if self._unfinished else self.seconds)
        long = bool(self.downloads) and self.cycle.scope["path"].startswith(self.downloads)
        self._latest = self.loop.time() + self.download_seconds if long else 0.0
        self._paused, self._taken = 0.0, 0
        if long:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count no more."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Count anew for the next request; how long it may be waited for, uvicorn knows."""
        self._since, self._latest, self._unfinished = self.loop.time(), 0.0, False
        self._restart(self.seconds)
        before = self.cycle
        super().on_response_complete()
        if self.cycle is not before:  # it was there already
            self._begin()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, where nothing is answered already."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = BAD_REQUEST.encode()
        headers = {
            **self.more_headers,
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        for event in (
            h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # Long answers -----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """From now on it is the reader who is waited for."""
        self._paused_at, self._left = self.loop.time(), self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The reader of a long answer has taken most of what there was."""
        self._count()
        self._paused_at = None
        super().resume_writing()

    def _count(self) -> None:
        """What the reader has taken, and in which time."""
        if self._paused_at is not None:
            now, left = self.loop.time(), self.transport.get_write_buffer_size()
            self._paused += now - self._paused_at
            self._taken += self._left - left
            self._paused_at, self._left = now, left

    def _restart(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._count()
        fast = self._paused < self.seconds / 2 or self._taken >= self.download_rate * self._paused
        self._paused, self._taken = 0.0, 0
        if fast and self.loop.time() < self._latest:
            self._restart(self.seconds)
            return
        logger.debug("a connection was closed: its request was not over in time")
        self.transport.abort()
