"""A server that answers one byte at a time, and addresses that hold a password."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer

LINE = b"HTTP/1.1 200 OK\r\n"
BODY = LINE + b"Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n"


@contextmanager
def dripping(first: bytes, drop: bytes) -> Iterator[str]:
    """A server that sends this at once and then only drops; its address."""
    end = threading.Event()

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, suppress(OSError):
                    client.recv(65536)
                    client.sendall(first)
                    while not end.wait(0.05):
                        client.sendall(drop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        end.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def api(folder: Path, url: str, timeout: float = 0.4, **cluster: str) -> KubernetesApi:
    """A client of an address."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": url, **cluster}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    (folder / "drip").write_text(json.dumps(config))
    return KubernetesApi.load(str(folder / "drip"), timeout=timeout)


@pytest.mark.parametrize(("first", "drop"), [(BODY, b" "), (LINE, b"X"), (b"", b"H")], ids=["body", "header", "status"])
def test_a_request_is_bounded_as_a_whole(tmp_path: Path, first: bytes, drop: bytes) -> None:
    with dripping(first, drop) as url:
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"was not answered within 0\.4 s") as caught:
            api(tmp_path, url).ask("GET", "/api/v1/nodes/n1")
        assert time.monotonic() - began < 5
        assert not caught.value.refused


def test_a_connection_is_used_again_after_the_time_of_a_request(server: KubernetesServer, make: Make) -> None:
    """The end of one request's time is no matter of the next one on the same connection."""
    server.add_node("n1")
    cluster = make(timeout=2.0)
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert cluster.look("n1").service == "in"


@pytest.mark.parametrize(
    "url",
    [
        "http://admin:hunter2@127.0.0.1:1",
        "http://admin:hunter2@127.0.0.1:99999",
        "http://admin:hunter2@127.0.0.1:bad",
        "http://admin:hunter2@[::1",
    ],
)
def test_no_password_of_an_address_is_shown(tmp_path: Path, url: str) -> None:
    with pytest.raises(ClusterError) as caught:
        api(tmp_path, url).ask("GET", "/api/v1/nodes/n1")
    assert "hunter2" not in f"{caught.value} {caught.getrepr(style='native', chain=True)}".replace(url, "")
    assert caught.value.refused
