"""The web server beside slow clients: none of them keeps it, or a connection, from others."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def unfinished(server: Server, address: str) -> socket.socket:
    """A request of which two bytes of the body have come."""
    made = socket.create_connection((server.host, server.port), timeout=20, source_address=(address, 0))
    made.sendall(b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nab")
    return made


async def _whole(request: Request) -> Response:
    await request.body()
    return Response("whole")


def test_nobody_keeps_others_out_with_requests_that_do_not_end() -> None:
    made = Starlette(routes=[Route("/login", _whole, methods=["GET", "POST"])])
    with Server(made, "127.0.0.1", 0, connections=8) as server, ExitStack() as stack:
        for _ in range(3):
            for address in ("127.0.0.1", "127.0.0.2"):  # also of the address of those who are kept out
                for _ in range(12):
                    stack.enter_context(unfinished(server, address))
                assert httpx.get(f"{server.address}/login", trust_env=False).text == "whole"
                assert httpx.post(f"{server.address}/login", content=b"x" * 1000, trust_env=False).text == "whole"


@pytest.mark.parametrize("before", [b"", b"GET /login HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_body_has_less_time_than_an_answer_also_behind_another_request(before: bytes) -> None:
    made = Starlette(routes=[Route("/login", _whole, methods=["GET", "POST"])])
    with (
        Server(made, "127.0.0.1", 0, body_seconds=0.2) as server,
        socket.create_connection((server.host, server.port), timeout=20) as client,
    ):
        client.sendall(before + b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nab")
        came = b""
        with suppress(ConnectionResetError):
            while part := client.recv(65536):  # ends, long before the 40 s of an answer
                came += part
        assert came.count(b"200 OK") == bool(before)


def test_no_client_has_all_and_the_others_are_told_what_to_do() -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def wait(request: Request) -> Response:
        begun.release()
        gate.wait(20)
        return Response("waited")

    async def ready(request: Request) -> Response:
        return Response("ready")

    made = Starlette(routes=[Route("/wait", wait), Route("/", ready)])
    with (
        Server(made, "127.0.0.1", 0, connections=8, headers={"X-Frame-Options": "DENY"}) as server,
        ExitStack() as stack,
    ):
        held = []
        for number in range(7):
            one = socket.create_connection((server.host, server.port), timeout=20, source_address=("127.0.0.2", 0))
            held.append(stack.enter_context(one))
            one.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert number == 6 or begun.acquire(timeout=20)
        refused = held[6].recv(65536)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in refused.lower()
        assert b"\r\nx-frame-options: deny\r\n" in refused.lower()
        assert b"try again" in refused + held[6].recv(65536)
        assert httpx.get(server.address, trust_env=False).text == "ready"
        gate.set()
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("begin", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_request_is_told_what_it_may_be(begin: bytes) -> None:
    with (
        Server(Starlette(), "127.0.0.1", 0, headers={"X-Frame-Options": "DENY"}) as server,
        socket.create_connection((server.host, server.port), timeout=20) as client,
    ):
        client.sendall(begin)
        came = b""
        while part := client.recv(65536):
            came += part
    head, _, text = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"X-Frame-Options: DENY" in head
    assert b"TLS" in text


def test_nonsense_behind_an_answer_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Server(Starlette(), "127.0.0.1", 0) as server,
        socket.create_connection((server.host, server.port), timeout=20) as client,
    ):
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        with suppress(ConnectionError):
            client.sendall(b"nonsense\r\n\r\n")
            while client.recv(65536):
                pass
    assert caplog.text == ""


def test_headers_have_a_bound() -> None:
    with listening(None) as (server, _), socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"X-Long: " + b"x" * 50_000 + b"\r\n")
            raise AssertionError("headers without end are taken")
