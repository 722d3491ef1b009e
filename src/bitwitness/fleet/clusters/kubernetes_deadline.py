"""A bound of an HTTP request as a whole: urllib3 bounds the wait for each piece of an answer only, and a server may send one byte at a time.

A controller that waits for such a server would act on nothing any more. So at the end of its time the connection of a request is
shut by another thread, which ends whatever waits on it, in the headers as well.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_here = threading.local()


class Deadline:
    """Shuts the connections that this thread uses, when its time is over; a context manager.

    Args:
        seconds: until then.
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._connections: list[Any] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        _here.deadline = self
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._timer.cancel()
        _here.deadline = None
        with self._lock:
            self._connections.clear()  # from now on they may be another request's

    def use(self, connection: Any) -> None:
        """A request is about to be sent there.

        Raises:
            TimeoutError: it is too late for that, and nothing was sent.
        """
        with self._lock:
            if self.over:
                raise TimeoutError("not connected in time")
            self._connections.append(connection)

    def _end(self) -> None:
        with self._lock:
            self.over = True
            for one in self._connections:
                with suppress(OSError, TypeError, AttributeError):
                    # Not the method of a TLS socket, which takes away what another thread is reading with.
                    socket.socket.shutdown(one.sock, socket.SHUT_RDWR)


def bounded(manager: Any) -> None:
    """Have the connections of a pool manager of urllib3 kept by the deadline of whoever uses them."""
    manager.pool_classes_by_scheme = {scheme: _pool(kind) for scheme, kind in manager.pool_classes_by_scheme.items()}


def _pool(kind: Any) -> Any:
    class Connection(kind.ConnectionCls):  # type: ignore[misc]
        def send(self, data: Any) -> Any:
            if self.sock is None:
                self.connect()
            deadline = getattr(_here, "deadline", None)
            if deadline is not None:
                deadline.use(self)
            return super().send(data)

    Connection.__name__ = kind.ConnectionCls.__name__  # which stands in errors

    class Pool(kind):  # type: ignore[misc]
        ConnectionCls = Connection

    return Pool
