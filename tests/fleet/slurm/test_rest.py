"""slurmrestd as it answers: versions, errors, damage, slowness; and that the token is seen by it alone."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from bitwitness.errors import BitwitnessError, ClusterError, ConfigurationError
from bitwitness.fleet.clusters.base import Act, ActKind, Call, NodeState
from bitwitness.fleet.clusters.slurm_command import Answer
from bitwitness.fleet.clusters.slurm_rest import SlurmRest, newest

FIXTURES = Path(__file__).with_name("fixtures")
TOKEN = "eyJhbGciOiJIUzI1NiJ9.secret.token"
IDLE = NodeState("n2", "in", "IDLE")


def recorded(version: str, name: str) -> bytes:
    return (FIXTURES / version / f"{name}.json").read_bytes()


def openapi(*versions: str) -> bytes:
    return json.dumps({"paths": {f"/slurm/{version}/node/{{node_name}}": {} for version in versions}}).encode()


@dataclass
class Served:
    """A server that answers as it is told, and keeps what it was asked.

    Attributes:
        answers: by method and path: status and body.
        asked: method, path, headers and body of each request.
        stalls: until set, `/stall` is not answered.
    """

    answers: dict[str, tuple[int, bytes]]
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    where: str = ""
    stalls: Event = field(default_factory=Event)


@contextmanager
def serving(**answers: tuple[int, bytes]) -> Iterator[Served]:
    served = Served({key.replace("__", "/"): answer for key, answer in answers.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            served.asked.append((self.command, self.path, dict(self.headers), body))
            if self.path.endswith("stall"):
                served.stalls.wait(30)
                return
            status, content = served.answers.get(self.path, (404, b"Unable to find requested URL"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the name that http.server wants

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - likewise
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        served.where = f"http://127.0.0.1:{server.server_port}"
        try:
            yield served
        finally:
            served.stalls.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"SLURM_JWT={TOKEN}\n")
    return file


def act(kind: ActKind) -> Act:
    return Act(kind, "n2", "20261129T093015Z-4be1d2", "wrong numbers")


def test_the_version_is_found_out_once(served: Served, token: Path) -> None:
    served.answers |= {
        "/openapi/v3": (200, openapi("v0.0.40", "v0.0.42", "v0.0.41")),
        "/slurm/v0.0.42/node/n2": (200, recorded("24.11", "node_drain")),
        "/slurm/v0.0.42/job/1": (200, recorded("24.11", "job_failed")),
        "/slurm/v0.0.42/nodes/": (200, recorded("24.11", "nodes")),
    }
    cluster = SlurmRest(served.where, "slurm", token)
    assert cluster.look("n2").ours
    assert cluster.job("slurm:1").exit_code == 160
    assert cluster.census().total == 3
    assert [path for _, path, _, _ in served.asked].count("/openapi/v3") == 1
    for _, _, headers, _ in served.asked:
        assert (headers["X-SLURM-USER-NAME"], headers["X-SLURM-USER-TOKEN"]) == ("slurm", TOKEN)


def test_changes_are_requests_of_their_own_shape(served: Served) -> None:
    cluster = SlurmRest(served.where, version="v0.0.42", hyperpod=True)
    served.answers["/slurm/v0.0.42/node/n2"] = (200, b'{"errors": [], "warnings": []}')
    (drain,) = cluster.plan(act("drain"), IDLE)
    (replace,) = cluster.plan(act("replace"), IDLE)
    (clear,) = cluster.plan(act("clear"), NodeState("n2", "out", "IDLE+DRAIN", "bitwitness x"))
    assert drain.words == ("POST", f"{served.where}/slurm/v0.0.42/node/n2")
    assert drain.body == {"state": ["DRAIN"], "reason": "bitwitness 20261129T093015Z-4be1d2: wrong numbers"}
    assert replace.body == {"state": ["FAIL"], "reason": "Action:Replace"}
    assert clear.body == {"state": ["UNDRAIN"]}
    assert cluster.carry_out(drain) == "HTTP 200"
    assert served.asked[-1][3] == drain.body


def test_an_old_version_changes_by_command(served: Served) -> None:
    served.answers |= {
        "/slurm/v0.0.38/node/n2": (200, recorded("22.05", "node_drain")),
        "/slurm/v0.0.38/job/1": (200, recorded("22.05", "job_failed")),
        "/slurm/v0.0.38/nodes": (200, recorded("22.05", "nodes")),
        "/openapi/v3": (200, openapi("v0.0.38")),
    }
    asked: list[tuple[str, ...]] = []

    def run(words: Sequence[str], timeout: float) -> Answer:
        asked.append(tuple(words))
        return Answer(0, "")

    cluster = SlurmRest(served.where, runner=run)
    assert cluster.look("n2").ours
    assert cluster.census().total == 3
    (drain,) = cluster.plan(act("drain"), IDLE)
    assert drain.words[:4] == ("scontrol", "update", "NodeName=n2", "State=DRAIN")
    calls = (drain, *cluster.plan_requeue(cluster.job("1"), ["n2"]))
    for call in calls:
        cluster.carry_out(call)
    assert asked == [call.words for call in calls]


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_what_is_not_there_is_absent(served: Served, version: str) -> None:
    status = 500 if version == "22.05" else 200
    served.answers |= {
        "/slurm/v0.0.42/node/n9": (status, recorded(version, "node_none")),
        "/slurm/v0.0.42/job/99": (404, recorded(version, "job_none")),
    }
    cluster = SlurmRest(served.where, version="v0.0.42")
    assert cluster.look("n9").service == "absent"
    assert cluster.job("99").state == "absent"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"Authentication failure", "not allowed"),
        (404, b"Unable to find requested URL", "is the version right"),
        (500, b'{"errors": [{"error": "Access denied", "error_number": 2002}]}', "Access denied"),
        (200, b'{"errors": [{"description": "slurmctld is down", "error": "No error"}]}', "slurmctld is down"),
        (200, b'{"errors": ["text"]}', "text"),
        (200, b"<html>", "no JSON"),
        (200, b"[" * 100_000, "no JSON"),
        (200, b'{"nodes": [{"name": "n3", "state": ["IDLE"]}]}', "something else than n2"),
        (200, b'{"nodes": [{"name": "n2"}]}', "without a state"),
        (200, b'{"nodes": 5}', "without nodes"),
        (200, b"null", "no JSON"),
        (302, b"", "no reason given"),
    ],
)
def test_what_is_no_answer_is_an_error(served: Served, token: Path, status: int, body: bytes, said: str) -> None:
    served.answers["/slurm/v0.0.42/node/n2"] = (status, body)
    with pytest.raises(ClusterError, match=said):
        SlurmRest(served.where, "slurm", token, version="v0.0.42").look("n2")


def test_a_refused_change_is_an_error(served: Served) -> None:
    served.answers["/slurm/v0.0.42/node/n2"] = (
        200,
        b'{"errors": [{"error": "Invalid node state", "error_number": 2019}]}',
    )
    cluster = SlurmRest(served.where, version="v0.0.42")
    with pytest.raises(ClusterError, match="Invalid node state"):
        cluster.carry_out(cluster.plan(act("drain"), IDLE)[0])


@pytest.mark.parametrize(
    "words", [("POST", "http://elsewhere/slurm/v0.0.42/node/n2"), ("DELETE", "/slurm"), ("rm", "x"), ()]
)
def test_only_its_own_calls_are_carried_out(served: Served, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError):
        SlurmRest(served.where, version="v0.0.42").carry_out(Call(words, {}))
    assert not served.asked


def test_versions() -> None:
    def of(*versions: str) -> Any:
        return json.loads(openapi(*versions))

    assert newest(of("v0.0.38", "v0.0.39")) == "v0.0.39"
    assert newest(of("v0.0.41", "v0.0.42", "v0.0.99")) == "v0.0.42"
    assert newest(of("v0.0.99", "v0.0.100")) == "v0.0.99"
    nothing: tuple[Any, ...] = (of(), {}, [], None, {"paths": 5}, {"paths": ["/slurm/v1/node/{x}"]})
    for none in nothing:
        with pytest.raises(ClusterError):
            newest(none)


def test_a_slow_or_absent_server_is_an_error(served: Served, tmp_path: Path) -> None:
    served.answers["/slurm/v0.0.42/node/stall"] = (200, b"{}")
    with pytest.raises(ClusterError, match=r"not answered within 0\.2 s"):
        SlurmRest(served.where, version="v0.0.42", timeout=0.2).look("stall")
    with pytest.raises(ClusterError, match="unix:"):
        SlurmRest(f"unix:{tmp_path}/none.sock").look("n2")


SPOILED: list[Callable[[Path], object]] = [
    lambda file: file.write_text("two\nlines of secret.token"),
    lambda file: file.write_text(""),
    lambda file: file.write_bytes(b"secret.token\xff\x00"),
    lambda file: file.unlink(),
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_spoiled_token_is_not_sent_and_not_shown(
    served: Served, token: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(token)
    with pytest.raises(ClusterError) as caught:
        SlurmRest(served.where, "slurm", token, version="v0.0.42").look("n2")
    assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert not served.asked


def test_the_token_is_in_no_error_and_no_log(
    served: Served, token: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a proxy would see it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    served.answers["/slurm/v0.0.42/node/n1"] = (500, json.dumps({"errors": [{"error": f"bad token {TOKEN}"}]}).encode())
    cluster = SlurmRest(served.where, "slurm", token, version="v0.0.42")
    with caplog.at_level(logging.DEBUG):
        for node in ("n1", "n2"):
            with pytest.raises(BitwitnessError) as caught:
                cluster.look(node)
            assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert len(served.asked) == 2
    assert TOKEN not in caplog.text
