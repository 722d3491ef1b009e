"""The console over real sockets: streams of events, slow readers, what no client of a library would send, and its end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from bitwitness.fleet.serving import Server
from bitwitness.store.database import Database, changed
from bitwitness.store.tables import runs
from bitwitness.web.app import create
from bitwitness.web.status import Status


@contextmanager
def served(app: FastAPI, **bounds: float) -> Iterator[tuple[Server, httpx.Client]]:
    with (
        Server(app, "127.0.0.1", 0, downloads="/export/", **bounds) as server,  # type: ignore[arg-type]
        httpx.Client(base_url=server.address, trust_env=False, timeout=20) as client,
    ):
        try:
            yield server, client
        finally:
            app.state.changes.stop()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with Database(tmp_path_factory.mktemp("database") / "console.db") as made:
        yield made


def change(database: Database) -> None:
    with database.write() as connection:
        changed(connection)


def event(lines: Iterator[str]) -> dict[str, str]:
    """The next event of a stream; {} where it has ended."""
    found: dict[str, str] = {}
    for line in lines:
        if not line and "event" in found:
            return found
        name, _, value = line.partition(": ")
        if name in ("id", "event", "data"):
            found[name] = value
    return {}


# Streams --------------------------------------------------------------------------------------------------------------


def test_a_change_is_told_and_none_is_missed_between_two_streams(database: Database) -> None:
    app = create(database)
    app.state.changes._every = 0.02
    with served(app) as (_, client):
        now = int(client.get("/").text.partition("/events?since=")[2].partition('"')[0])
        with client.stream("GET", f"/events?since={now}") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.headers["cache-control"] == "no-store"
            lines = stream.iter_lines()
            assert next(lines) == "retry: 2000"
            change(database)
            first = event(lines)
            assert first == {"id": str(now + 1), "event": "changed", "data": str(now + 1)}
        change(database)  # while nobody listens
        with client.stream("GET", "/events?since=0", headers={"Last-Event-ID": first["id"]}) as stream:
            assert event(stream.iter_lines())["id"] == str(now + 2)
        with client.stream("GET", f"/events?since={now}") as stream:  # a page that was open all the time
            assert event(stream.iter_lines())["id"] == str(now + 2)


def test_what_the_console_has_to_say_is_told_too_without_the_database(database: Database) -> None:
    status = Status()
    app = create(database, status=status)
    app.state.changes._every = 0.02
    with served(app) as (_, client):
        now = int(client.get("/").text.partition("/events?since=")[2].partition('"')[0])
        with client.stream("GET", f"/events?since={now}") as stream:
            status.tell("import", "error", "the import fails: <b>the disk is full</b>")
            assert event(stream.iter_lines())["id"] == str(now + 1)
        assert "the import fails: &lt;b&gt;the disk is full" in client.get("/fleet").text
        assert client.get("/healthz").json()["errors"] == ["the import fails: <b>the disk is full</b>"]


def test_streams_end_by_themselves_and_are_bounded(database: Database) -> None:
    app = create(database)
    changes = app.state.changes
    changes._every, changes.seconds = 0.02, 0.2
    with served(app) as (server, client):
        assert client.get("/events").text.startswith("retry: 2000\n\n")  # and it has ended
        assert changes._streams == {}
        changes.seconds = 20.0
        with ExitStack() as stack:
            held: list[Iterator[str]] = []
            for _ in range(16):
                one = stack.enter_context(httpx.Client(base_url=server.address, trust_env=False, timeout=20))
                held.append(stack.enter_context(one.stream("GET", "/events")).iter_lines())
                assert next(held[-1]) == "retry: 2000"
            # Where there are too many, one is told what there is, and when to come again.
            late = client.get("/events?since=7").text
            assert late.startswith("retry: 15000\n\nid: ")
        end = time.monotonic() + 20
        while changes._streams and time.monotonic() < end:
            time.sleep(0.02)
        assert changes._streams == {}  # who went away holds no place
        assert client.get("/api/runs").status_code == 200


def test_the_end_of_the_server_ends_streams(database: Database) -> None:
    app = create(database)
    with served(app) as (server, client), client.stream("GET", "/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        begun = time.monotonic()
        app.state.changes.stop()
        server.stop()
        assert time.monotonic() - begun < 10
        with contextlib.suppress(httpx.HTTPError):
            list(lines)


# What no library would send -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /static/../app.py HTTP/1.1\r\nHost: localhost\r\n", b"404"),
        (b"GET /static/..%2fapp.py HTTP/1.1\r\nHost: localhost\r\n", b"404"),
        (b"GET //static/console.css HTTP/1.1\r\nHost: localhost\r\n", b"404"),
        (b"GET /static/vendor/../console.css HTTP/1.1\r\nHost: localhost\r\n", b"404"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n", b"400"),
        (b"GET / HTTP/1.0\r\n", b"421"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n", b"421"),
        (b"GET /nodes/" + b"%41" * 4000 + b" HTTP/1.1\r\nHost: localhost\r\n", b"414"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n", b"413"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n", b"400"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n", b"400"),
        (b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: bitwitness=" + b"\xff" * 50 + b"\r\n", b"200"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n", b"401"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic Og==\r\n", b"401"),
    ],
)
def test_raw_requests(live: Server, request_line: bytes, status: bytes) -> None:
    with socket.create_connection((live.host, live.port), timeout=20) as client:
        client.sendall(request_line + b"Connection: close\r\n\r\n")
        came = client.recv(65_536)
    assert came.startswith(b"HTTP/1.1 " + status), came[:200]
    assert b"Traceback" not in came
    assert b"import annotations" not in came


@pytest.fixture(scope="module")
def live(database: Database) -> Iterator[Server]:
    with served(create(database)) as (server, _):
        yield server


# Slow readers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(database: Database) -> Database:
    """A table that is larger than what a connection holds by itself."""
    with database.write() as connection:
        row = {"path": "x" * 4_000, "current": True}
        connection.execute(sa.insert(runs), [{"name": f"run-{i}", "place": str(i), **row} for i in range(750)])
    return database


def test_a_download_whose_reader_takes_a_little_now_and_then_is_cut_off(many: Database) -> None:
    app = create(many)
    with (
        served(app, request_seconds=0.3, download_rate=1 << 20) as (server, _),
        socket.create_connection((server.host, server.port), timeout=20) as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        slow.sendall(b"GET /export/runs.csv HTTP/1.1\r\nHost: localhost\r\n\r\n")
        begun, size = time.monotonic(), 0
        with contextlib.suppress(ConnectionResetError):
            while (part := slow.recv(2_000)) and time.monotonic() - begun < 15:
                size += len(part)
                if len(app.state.exports):
                    time.sleep(0.01)  # 200 kB a second, which is something each time that one looks
        assert size < 2_500_000
        assert len(app.state.exports) == 0


def test_a_download_may_take_longer_than_other_answers_and_who_takes_nothing_is_cut_off(many: Database) -> None:
    app = create(many)
    with served(app, request_seconds=0.6) as (server, client):
        with socket.create_connection((server.host, server.port), timeout=20) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            slow.sendall(b"GET /export/runs.csv HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            begun, size = time.monotonic(), 0
            while part := slow.recv(64 << 10):
                size += len(part)
                if time.monotonic() - begun < 1.0:
                    time.sleep(0.01)  # a reader who is slow, and reads
            assert size > 3_000_000
            assert time.monotonic() - begun > 0.9  # which was longer than an answer may take
        with socket.create_connection((server.host, server.port), timeout=20) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
            lazy.sendall(b"GET /export/runs.csv HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for running in (1, 0):  # until it is served, and until it is cut off
                end = time.monotonic() + 20
                while len(app.state.exports) != running and time.monotonic() < end:
                    time.sleep(0.002)
            with contextlib.suppress(ConnectionResetError):
                size = 0
                while part := lazy.recv(1 << 20):
                    size += len(part)
            assert size < 3_000_000
        assert client.get("/export/audit.csv").status_code == 200
        assert len(app.state.exports) == 0
