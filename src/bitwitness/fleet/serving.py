"""A web server in a thread that no client can keep busy: for how long, and for how many, is bounded here.

Uvicorn waits without end for the rest of a request and for a reader who does not read. A controller that repairs machines is
reached from machines that are broken, so each connection has a time within which a request must be over, and where there are
too many, those that have asked for nothing make room.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Self

from bitwitness.errors import ConfigurationError, MissingExtra

try:
    import uvicorn
    from starlette.applications import Starlette
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
"""To the end of an answer that is long on purpose, if its reader takes some of it within each `REQUEST_SECONDS`."""
_CONNECTIONS = 256
_HEADERS = 16 << 10
_STARTING_SECONDS = 30.0


class Server:
    """A server that runs in a thread until it is stopped; usable in a `with`.

    Attributes:
        host, port: where it listens; the port that the system chose, if 0 was asked for.

    Args:
        app: what answers.
        host, port: where to listen.
        request_seconds, header_seconds, connections: the bounds.
        downloads: answers below this path are long on purpose, and bounded by `download_seconds`; "" for none.
        download_seconds: see `DOWNLOAD_SECONDS`.
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
        downloads: str = "",
        download_seconds: float = DOWNLOAD_SECONDS,
        option: str = "--listen",
    ) -> None:
        self._socket = _listen(host, port, option)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        bounds = {
            "seconds": request_seconds,
            "header_seconds": min(header_seconds, request_seconds),
            "most": connections,
            "downloads": downloads,
            "download_seconds": download_seconds,
        }
        protocol = type("Bounded", (_BoundedProtocol,), bounds)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # nobody without a token shall be able to fill the log
            access_log=False,  # whoever asks /metrics every 15 s is no news
            proxy_headers=False,  # what a client says of itself is not believed
            server_header=False,
            limit_concurrency=connections,
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

    seconds, header_seconds, most = REQUEST_SECONDS, HEADER_SECONDS, _CONNECTIONS
    downloads, download_seconds = "", DOWNLOAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None
    _latest = 0.0
    _taken, _left = False, 0
    _asked_nothing = True
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count, and where there are too many, end the one that has asked for nothing for the longest time."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._restart(self.header_seconds)
        if len(self.connections) >= self.most:
            others = [one for one in self.connections if isinstance(one, _BoundedProtocol) and one._asked_nothing]
            oldest = min((one for one in others if one is not self), key=lambda one: one._since, default=None)
            if oldest is not None:
                oldest._asked_nothing = False
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """A request whose headers are whole has the time for its body; another one on the connection must come as fast."""
        before, first = self.cycle, self._asked_nothing
        super().data_received(data)
        if self.cycle is not before:
            self._asked_nothing = False
            self._restart(self.seconds)
            long = bool(self.downloads) and self.cycle.scope["path"].startswith(self.downloads)
            self._latest = self.loop.time() + self.download_seconds if long else 0.0
            self._taken = long  # nothing can have been taken before the first answer
        elif first and before is not None:
            self._asked_nothing = False
            self._restart(self.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count no more."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Count anew for the next request; how long it may be waited for, uvicorn knows."""
        self._asked_nothing, self._since, self._latest = True, self.loop.time(), 0.0
        self._restart(self.seconds)
        super().on_response_complete()

    def resume_writing(self) -> None:
        """The reader of a long answer has taken some of it."""
        self._taken = True
        super().resume_writing()

    def _restart(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        left = self.transport.get_write_buffer_size()
        if self.loop.time() < self._latest and (self._taken or left == 0 or left < self._left):
            self._taken, self._left = False, left
            self._restart(self.seconds)
            return
        logger.debug("a connection was closed: its request was not over in time")
        self.transport.abort()
