"""The web server beside slow clients: none of them keeps it, or a connection, from others."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from bitwitness.fleet.exposition import Figures, health
from bitwitness.fleet.inbox import app
from bitwitness.fleet.serving import Server
from tests.fleet.web import TOKEN, body, headers, incident, listening


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "inbox"


def test_a_body_that_does_not_come_is_not_waited_for(folder: Path) -> None:
    with (
        listening(folder, body_seconds=0.1) as (server, _),
        socket.create_connection((server.host, server.port)) as client,
    ):
        lines = [*(f"{name}: {value}" for name, value in headers().items()), "Host: x", "Content-Length: 1000"]
        client.sendall(("POST /incidents HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n{").encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
def test_a_connection_that_stalls_is_closed(begin: bytes) -> None:
    figures = Figures()
    made = app(None, "", metrics=lambda: figures, health=lambda: health(figures, datetime.now(UTC)))
    with (
        Server(made, "127.0.0.1", 0, request_seconds=0.3) as server,
        socket.create_connection((server.host, server.port), timeout=20) as client,
    ):
        client.sendall(begin)
        came = b"begun"
        while came:
            try:
                came = client.recv(65536)
            except ConnectionResetError:
                break


def quiet(**bounds: Any) -> Server:
    """A server that takes no incident."""
    figures = Figures(last_round=datetime.now(UTC).timestamp())
    made = app(None, "", metrics=lambda: figures, health=lambda: health(figures, datetime.now(UTC)))
    return Server(made, "127.0.0.1", 0, **bounds)


def test_connections_that_ask_for_nothing_make_room() -> None:
    with quiet(connections=6) as server, ExitStack() as stack:
        where = (server.host, server.port)
        used = stack.enter_context(httpx.Client(base_url=server.address, trust_env=False, timeout=20))
        assert used.get("/healthz").status_code == 200
        for begin in [b"", b"GET / HT"] * 8:
            client = stack.enter_context(socket.create_connection(where, timeout=20))
            client.sendall(begin)
        for _ in range(3):
            assert httpx.get(f"{server.address}/healthz", trust_env=False).status_code == 200


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_headers_have_less_time_than_a_body(folder: Path, begin: bytes) -> None:
    figures = Figures()
    made = app(folder, TOKEN, metrics=lambda: figures, health=lambda: health(figures, datetime.now(UTC)))
    with (
        Server(made, "127.0.0.1", 0, header_seconds=0.1) as server,
        socket.create_connection((server.host, server.port), timeout=20) as slow,
        socket.create_connection((server.host, server.port), timeout=20) as silent,
    ):
        content = body(incident())
        lines = [*(f"{name}: {value}" for name, value in headers().items()), "Host: x"]
        head = "POST /incidents HTTP/1.1\r\n" + "\r\n".join([*lines, f"Content-Length: {len(content)}"]) + "\r\n\r\n"
        slow.sendall(head.encode())
        silent.sendall(begin)
        with suppress(ConnectionResetError):
            assert silent.recv(100) == b""
        slow.sendall(content)  # which had to wait for longer than headers may
        assert slow.recv(100).startswith(b"HTTP/1.1 201 ")


def test_headers_have_a_bound() -> None:
    with listening(None) as (server, _), socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"X-Long: " + b"x" * 50_000 + b"\r\n")
            raise AssertionError("headers without end are taken")
