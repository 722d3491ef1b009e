"""A platform connector to test against: a real gRPC server on a Unix socket that takes events as NVSentinel's own does.

For tests of users and for ours. It takes what is said of its own node, refuses what is said of another one, and can be told to be
down, slow, or to answer with an error; what it has taken can be looked at.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwitness.errors import MissingExtra
from bitwitness.fleet.clusters.nvsentinel_wire import METHOD, classes, decode

try:
    import grpc
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("a platform connector needs gRPC: pip install 'bitwitness[nvsentinel]'") from error


@dataclass(frozen=True, slots=True)
class Taken:
    """One event that the connector has taken.

    Attributes:
        node: of which it was told.
        agent, check, component: who told it, and of what.
        healthy, fatal: what it says.
        message: one line.
        action, strategy: by their names in NVSentinel.
        errors: codes.
        entities: (type, value) of each.
        metadata: what else was said.
        time: when it was generated, in seconds since 1970.
        content: the bytes of the request in which it came.
    """

    node: str
    agent: str
    check: str
    component: str
    healthy: bool
    fatal: bool
    message: str
    action: str
    strategy: str
    errors: tuple[str, ...]
    entities: tuple[tuple[str, str], ...]
    metadata: dict[str, str] = field(compare=False)
    time: float = field(compare=False)
    content: bytes = field(compare=False, repr=False)


class FakePlatformConnector:
    """NVSentinel's platform connector of one node; a context manager that serves.

    Args:
        socket: where; its folder must exist.
        node: of which it takes events; an event that names none is taken as of it.
        pinned: False: takes what is said of any node, as with authentication switched off.
    """

    def __init__(self, socket: Path, node: str, *, pinned: bool = True) -> None:
        self.socket, self.node, self._pinned = socket, node, pinned
        self._lock = threading.Lock()
        self._taken: list[Taken] = []
        self._calls = 0
        self._answers: list[tuple[str, str]] = []
        self._slow = 0.0
        self._server: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, or serve again; what was taken before is kept."""
        server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="connector"))
        service, _, method = METHOD.strip("/").partition("/")
        handler = grpc.unary_unary_rpc_method_handler(self._called)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self.socket.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self.socket}")
        server.start()
        self._server = server

    def stop(self) -> None:
        """Be down: nobody answers at the socket, and it is gone."""
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def answer(self, code: str, details: str = "", times: int = 1) -> None:
        """Answer the next calls with an error, e.g. `RESOURCE_EXHAUSTED`, and take nothing of them."""
        with self._lock:
            self._answers += [(code, details)] * times

    def be_slow(self, seconds: float) -> None:
        """Wait so long before each answer; what is taken is taken at once."""
        with self._lock:
            self._slow = seconds

    @property
    def taken(self) -> list[Taken]:
        """The events so far, in order."""
        with self._lock:
            return list(self._taken)

    @property
    def calls(self) -> int:
        """How often it was called, refused calls included."""
        with self._lock:
            return self._calls

    def _called(self, content: bytes, context: Any) -> bytes:
        with self._lock:
            self._calls += 1
            code, details = self._answers.pop(0) if self._answers else ("", "")
            slow = self._slow
        if code:
            context.abort(getattr(grpc.StatusCode, code), details or "as it was told")
        try:
            batch = decode(content)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        foreign = [one.nodeName for one in batch.events if one.nodeName not in ("", self.node)]
        if foreign and self._pinned:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"caller may report {self.node} only, not {foreign[0]:.120}"
            )
        with self._lock:
            self._taken += [_taken(one, one.nodeName or self.node, content) for one in batch.events]
        if slow:
            time.sleep(slow)
        empty: bytes = classes()["Empty"]().SerializeToString()
        return empty


def _taken(event: Any, node: str, content: bytes) -> Taken:
    fields = event.DESCRIPTOR.fields_by_name

    def name_of(name: str) -> str:
        number = getattr(event, name)
        value = fields[name].enum_type.values_by_number.get(number)
        return str(number) if value is None else str(value.name)

    return Taken(
        node=node,
        agent=event.agent,
        check=event.checkName,
        component=event.componentClass,
        healthy=event.isHealthy,
        fatal=event.isFatal,
        message=event.message,
        action=name_of("recommendedAction"),
        strategy=name_of("processingStrategy"),
        errors=tuple(event.errorCode),
        entities=tuple((one.entityType, one.entityValue) for one in event.entitiesImpacted),
        metadata=dict(event.metadata),
        time=event.generatedTimestamp.seconds + event.generatedTimestamp.nanos / 1e9,
        content=content,
    )
