"""What the tests of the inbox and of messages share: an incident, an app that listens on loopback, and a client."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from bitwitness.fleet.exposition import Figures, health
from bitwitness.fleet.inbox import Limits, Server, app, serve

TOKEN = "correct-horse-battery-staple-0123456789"
ID = "20261129T093015Z-4be1d2"

_RECORD: dict[str, Any] = {
    "schema": 1,
    "id": ID,
    "time": "2026-11-29T09:30:15.000Z",
    "bitwitness": "0.1",
    "verdict": {
        "status": "attributed",
        "step": 7,
        "ranks": [1],
        "nodes": ["node-b"],
        "devices": ["GPU-b"],
        "candidates": [0, 1],
        "kind": "compute",
        "persistence": "persistent",
        "persistences": ["persistent"],
        "reason": "rank 1 differs from both witnesses",
        "window": [5, 7],
        "check": "replay",
    },
    "observations": [
        {"check": "replay", "step": 7, "rank": 1, "place": "original", "value": "ab", "owner": 1, "micro": 0}
    ],
    "placement": [
        {"rank": rank, "node": f"node-{name}", "device": f"GPU-{name}", "slot": 0, "model": "m", "software": "s"}
        for rank, name in enumerate("abc")
    ],
    "policy": {"on_detection": "raise"},
    "scheduler_job": "slurm:1234",
    "notes": [],
}


def incident(number: int | None = None, **verdict: Any) -> dict[str, Any]:
    """The record of an incident; with a number, one of its own."""
    record = copy.deepcopy(_RECORD)
    record["verdict"] |= verdict
    if number is not None:
        record["id"] = f"20261129T093015Z-{number:06x}"
    return record


def body(record: Any) -> bytes:
    """As it is sent."""
    return json.dumps(record).encode()


def headers(run: str = "job-1", token: str = TOKEN) -> dict[str, str]:
    """Of a request that is in order."""
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "X-Bitwitness-Run": run}


@contextmanager
def listening(
    folder: Path | None,
    figures: Figures | None = None,
    limits: Limits | None = None,
    body_seconds: float = 20.0,
    leader: Callable[[], str] = lambda: "",
) -> Iterator[tuple[Server, httpx.Client]]:
    """An inbox on loopback, and a client of it."""
    shown = figures or Figures(last_round=datetime.now(UTC).timestamp())
    made = app(
        folder,
        TOKEN,
        metrics=lambda: shown,
        health=lambda: health(shown, datetime.now(UTC)),
        limits=limits,
        body_seconds=body_seconds,
        leader=leader,
    )
    with (
        serve(made, "127.0.0.1", 0) as server,
        httpx.Client(base_url=server.address, trust_env=False, timeout=20) as client,
    ):
        yield server, client


@dataclass
class Sink:
    """A web server that keeps what it is sent, and answers what it is told to."""

    statuses: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def running(self) -> Iterator[Sink]:
        """Listen on loopback."""
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                sink.got.append(({name.lower(): value for name, value in self.headers.items()}, content))
                self.send_response(sink.statuses.pop(0) if sink.statuses else 200)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - so named there
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            self.address = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()
