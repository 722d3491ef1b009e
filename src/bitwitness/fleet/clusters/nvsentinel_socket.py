"""NVSentinel's Unix socket on a node: the one place that speaks gRPC.

The platform connector takes what is said of its own node from whoever reaches the socket, and refuses what is said of another one;
so every node speaks for itself (NVIDIA/NVSentinel docs/configuration/authentication.md). Each call has a deadline and a channel of
its own, and is made once: whoever calls decides whether to call again.
"""

from __future__ import annotations

from pathlib import Path

from bitwitness.errors import ClusterError, ConfigurationError, MissingExtra
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.clusters.nvsentinel_events import HealthEvent
from bitwitness.fleet.clusters.nvsentinel_wire import METHOD, encode

try:
    import grpc
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("NVSentinel is told through gRPC: pip install 'bitwitness[nvsentinel]'") from error

_LONGEST_PATH = 107
"""Bytes of the path of a Unix socket on Linux."""
_OPTIONS = (
    ("grpc.enable_retries", 0),  # a repeat is the caller's decision
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # no back-off that another channel has earned
)
_REMEDIES = {
    "UNAVAILABLE": "does NVSentinel's platform connector run on this node, and is the folder of its socket mounted?",
    "DEADLINE_EXCEEDED": "the platform connector hangs, or the machine is overloaded",
    "PERMISSION_DENIED": "whoever has no token may speak of its own node only: is --node the name that Kubernetes has for it?",
    "UNAUTHENTICATED": "the platform connector wants a token from everybody; the socket of a node should not",
    "UNIMPLEMENTED": "this version of NVSentinel does not know HealthEventOccurredV1: is it older than its first release?",
    "INVALID_ARGUMENT": "this version of NVSentinel does not take our events",
    "RESOURCE_EXHAUSTED": "the platform connector has more events than it can take",
}


class Connector:
    """The platform connector of this node.

    Args:
        socket: path of its socket; with or without `unix:` or `unix://` before it.
        timeout: seconds for a call, connecting included.

    Raises:
        ConfigurationError: no such path or time can be.
    """

    def __init__(self, socket: str, timeout: float = 10.0) -> None:
        path = socket.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if (
            not path.startswith("/")
            or path.startswith("//")
            or path.endswith("/")
            or any(not one.isprintable() for one in path)
        ):
            raise ConfigurationError(f"NVSentinel's socket is an absolute path, not {socket!r:.200}")
        if len(path.encode()) > _LONGEST_PATH:
            raise ConfigurationError(
                f"{path:.200} is longer than the {_LONGEST_PATH} bytes that a Unix socket may have"
            )
        if not timeout > 0:
            raise ConfigurationError(f"a call needs more than {timeout:g} s")
        self.path, self._timeout = path, timeout

    def check(self) -> None:
        """Whether there is somebody to be told.

        Raises:
            ClusterError: there is no socket.
        """
        if not Path(self.path).is_socket():
            raise ClusterError(f"{self._what}: UNAVAILABLE: there is no socket: {_REMEDIES['UNAVAILABLE']}")

    @property
    def _what(self) -> str:
        return f"{METHOD.rpartition('/')[2]} at {self.path}"

    def tell(self, *events: HealthEvent) -> None:
        """Say these events, all or none.

        Raises:
            ClusterError: the platform connector has not taken them; or has, and could not say so in time.
        """
        self.check()
        with grpc.insecure_channel(f"unix:{self.path}", options=_OPTIONS) as channel:
            call = channel.unary_unary(METHOD, request_serializer=None, response_deserializer=None)
            try:
                call(encode(*events), timeout=self._timeout)
            except grpc.RpcError as error:
                code = error.code().name
                said = one_line(str(error.details() or ""), 300)
                remedy = _REMEDIES.get(code, "see the log of the platform connector")
                raise ClusterError(f"{self._what}: {code}: {said or 'no reason was given'}: {remedy}") from error
