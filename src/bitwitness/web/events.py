"""The stream that tells an open page that something has changed, so that it asks again; what changed, the page finds out.

What is told is a counter that only goes up, and whoever asks says which one was seen last. So nothing is missed between two
streams: if the counter has moved since, the answer comes at once. A stream ends by itself after some seconds and the browser opens
another, and where there are too many, a stream ends at once and is to come back later: nobody keeps others out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bitwitness.errors import BitwitnessError
from bitwitness.web.manners import HEAD
from bitwitness.web.status import Status

logger = logging.getLogger(__name__)

STREAM_SECONDS = 25.0
_QUIET_SECONDS = 10.0
_EVERY = 1.0
_STREAMS, _STREAMS_OF_ONE = 64, 16
_AGAIN, _LATER = 2_000, 15_000
"""Milliseconds after which a browser comes back."""

router = APIRouter(include_in_schema=False)


class Changes:
    """The newest change counter; asked for once a second at most, however many look.

    It counts what the database says has changed and what the console has to say besides: both only go up, and so does their sum.

    Attributes:
        latest: what it was last.
        stopping: whether the server ends, so that streams do as well.
    """

    def __init__(
        self, ask: Callable[[], int], status: Status, seconds: float = STREAM_SECONDS, every: float = _EVERY
    ) -> None:
        self.latest, self.stopping, self.seconds = 0, False, seconds
        self._ask, self._status, self._every = ask, status, every
        self._counted, self._asked = 0, -every
        self._streams: dict[str, int] = {}

    def stop(self) -> None:
        """End all streams, within a second."""
        self.stopping = True

    def refresh(self) -> int:
        """Ask now. What cannot be asked is what it was: pages say that the database is away."""
        try:
            self._counted = self._ask()
        except BitwitnessError as error:
            logger.debug("the change counter cannot be read: %s", error)
        self.latest = self._counted + self._status.changes
        return self.latest

    async def newest(self) -> int:
        """What it is, not older than a second."""
        if time.monotonic() - self._asked >= self._every:
            self._asked = time.monotonic()
            await run_in_threadpool(self.refresh)
        return self.latest

    async def until(self, since: int, seconds: float) -> int | None:
        """The counter, as soon as it is another one than `since`; None where it is not, in this time."""
        end = time.monotonic() + seconds
        while not self.stopping:
            if (now := await self.newest()) != since:
                return now
            left = end - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(left, self._every))
        return None

    def enter(self, client: str) -> bool:
        """Begin a stream of a client; False where there are too many."""
        mine = self._streams.get(client, 0)
        if mine >= _STREAMS_OF_ONE or sum(self._streams.values()) >= _STREAMS:
            return False
        self._streams[client] = mine + 1
        return True

    def leave(self, client: str) -> None:
        """End it."""
        left = self._streams.pop(client, 1) - 1
        if left > 0:
            self._streams[client] = left


@router.get("/events")
async def events(request: Request, since: int = -1) -> Response:
    """Server-sent events `changed`, each with the counter as its data and id."""
    changes: Changes = request.app.state.changes
    client = request.client.host if request.client is not None else ""
    last = request.headers.get("last-event-id", "")
    if last.isascii() and last.isdecimal() and len(last) < 19:
        since = int(last)
    if since < 0:
        since = await changes.newest()
    if request.scope.get(HEAD):
        return Response(media_type="text/event-stream")
    return StreamingResponse(_stream(changes, since, client), media_type="text/event-stream")


async def _stream(changes: Changes, since: int, client: str) -> AsyncIterator[bytes]:
    if not changes.enter(client):
        latest = await changes.newest()
        yield b"retry: %d\n\n" % _LATER + (_changed(latest) if latest != since else b"")
        return
    try:
        yield b"retry: %d\n\n" % _AGAIN
        end = time.monotonic() + changes.seconds
        while (left := end - time.monotonic()) > 0 and not changes.stopping:
            newest = await changes.until(since, min(left, _QUIET_SECONDS))
            since = since if newest is None else newest
            yield _changed(newest) if newest is not None else b": nothing new\n\n"
    finally:
        changes.leave(client)


def _changed(counter: int) -> bytes:
    return b"id: %d\nevent: changed\ndata: %d\n\n" % (counter, counter)
