"""The inbox over real connections: who is let in, what is kept, and that nothing else happens, whatever is sent."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.fleet import received
from bitwitness.fleet.exposition import Figures, Recent, health
from bitwitness.fleet.inbox import Limits, app, read_token, serve
from bitwitness.fleet.received import LARGEST, Refused, Store, parse
from bitwitness.fleet.secret import read_secret
from bitwitness.runfiles import RunFiles, read_incident
from tests.fleet.web import ID, TOKEN, body, headers, incident, listening


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "inbox"


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    with listening(folder) as (_, client):
        yield client


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def post(client: httpx.Client, record: Any, run: str = "job-1", **more: str) -> httpx.Response:
    return client.post("/incidents", content=body(record), headers=headers(run) | more)


# What is kept ---------------------------------------------------------------------------------------------------------


def test_an_incident_is_stored_once_and_never_overwritten(folder: Path, client: httpx.Client) -> None:
    first = post(client, incident())
    assert (first.status_code, first.json()) == (201, {"status": "stored", "id": ID, "run": "job-1"})
    found = RunFiles(folder / "job-1").incidents()
    assert [path.name for path in found] == [ID]
    assert read_incident(found[0]).record == incident()
    again = client.post("/incidents", content=json.dumps(incident(), indent=3, sort_keys=True), headers=headers())
    assert (again.status_code, again.json()["status"]) == (200, "known")
    before = (found[0] / "incident.json").read_bytes()
    other = post(client, incident(reason="another one"))
    assert other.status_code == 409
    assert "other content" in other.json()["error"]
    assert (found[0] / "incident.json").read_bytes() == before
    assert post(client, incident(), "job-2").status_code == 201, "another run may have it as well"
    assert files_in(folder) == [f"job-{run}/incidents/{ID}/incident.json" for run in (1, 2)]


def test_who_stands_by_takes_nothing(folder: Path) -> None:
    leads = ["bitwitness-fleet-7d9f"]
    with listening(folder, leader=lambda: leads[0]) as (_, client):
        answer = post(client, incident())
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
        assert "bitwitness-fleet-7d9f leads" in answer.json()["error"]
        assert files_in(folder) == []
        leads[0] = ""
        assert post(client, incident()).status_code == 201


def test_many_at_once_store_it_once(folder: Path) -> None:
    with listening(folder) as (server, _), ThreadPoolExecutor(12) as pool:

        def one(number: int) -> int:
            with httpx.Client(base_url=server.address, trust_env=False, timeout=20) as client:
                return post(client, incident(number % 2)).status_code

        statuses = list(pool.map(one, range(24)))
    assert statuses.count(201) == 2
    assert set(statuses) <= {200, 201, 503}
    assert len(files_in(folder)) == 2


def test_a_body_without_a_length_is_taken(folder: Path, client: httpx.Client) -> None:
    content = body(incident())
    parts = (content[start : start + 100] for start in range(0, len(content), 100))
    assert client.post("/incidents", content=parts, headers=headers()).status_code == 201


def test_a_writer_that_was_killed_leaves_nothing_half(tmp_path: Path, seed: int) -> None:
    program = """
import json, sys
from pathlib import Path
from bitwitness.fleet.received import Limits, Store
store, record = Store(Path(sys.argv[1]), Limits(10**6, 10**6, 10**12)), json.loads(sys.argv[2])
print("ready", flush=True)
number = int(sys.argv[3])
while True:
    record["id"] = f"20261129T093015Z-{number:06x}"
    record["text"] = "x" * 300_000
    store.add("job", json.dumps(record).encode())
    number += 1
"""
    draw, start = random.Random(seed), 0
    for _ in range(6):
        command = [sys.executable, "-c", program, str(tmp_path), json.dumps(incident()), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            try:
                assert select.select([writer.stdout], [], [], 60)[0]
                assert writer.stdout.readline() == b"ready\n"
                time.sleep(draw.uniform(0, 0.05))  # the instant of the kill is what is drawn
            finally:
                writer.kill()
            assert writer.wait() == -signal.SIGKILL
        found = RunFiles(tmp_path / "job").incidents() if (tmp_path / "job").exists() else []
        assert len(found) >= start
        for path in found:
            assert len(read_incident(path).record["text"]) == 300_000
            assert files_in(path) == ["incident.json"]
        start = len(found)
    store = Store(tmp_path)
    assert not list(tmp_path.glob("*/incidents/.staging-*")), "what was half-done is removed at the next start"
    assert store.add("job", body(incident(start)))[0] in {"stored", "known"}


def test_a_staged_rest_of_a_killed_writer_is_not_published(folder: Path) -> None:
    store = Store(folder)
    staging = RunFiles(folder / "job-1").stage_incident(ID)
    (staging / ".incident.json.1.aa.tmp").write_text('{"schema": 1, "id"')
    assert store.add("job-1", body(incident())) == ("stored", ID)
    assert files_in(folder) == [f"job-1/incidents/{ID}/incident.json"]


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)])
def test_a_disk_that_refuses_loses_nothing(
    folder: Path, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    assert post(client, incident(1)).status_code == 201
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    refused = post(client, incident(2))
    assert refused.status_code == status
    assert "nothing was stored" in refused.json()["error"]
    assert refused.headers["retry-after"].isdecimal()
    assert str(folder) not in refused.text
    monkeypatch.setattr(os, "fsync", sync)
    assert [path.name[-1] for path in RunFiles(folder / "job-1").incidents()] == ["1"]
    assert len(files_in(folder)) == 1
    assert post(client, incident(2)).status_code == 201


# Who is let in --------------------------------------------------------------------------------------------------------


AUTHORIZATIONS = [
    None,
    b"",
    b"Bearer",
    TOKEN.encode(),
    b"Basic " + TOKEN.encode(),
    b"Bearer " + TOKEN.encode()[:-1],
    b"Bearer " + TOKEN.encode() + b"0",
    b"Bearer " + TOKEN.upper().encode(),
    "Bearer tökén-ß-日本".encode(),
    b"Bearer \xff\xfe\x80",
    b"Bearer " + b"x" * 5000,
]


def test_without_the_token_nothing_is_taken(
    folder: Path, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for authorization in AUTHORIZATIONS:
        sent: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), (b"x-bitwitness-run", b"job-1")]
        if authorization is not None:
            sent.append((b"authorization", authorization))
        answer = client.post("/incidents", content=body(incident()), headers=sent)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "xxxx" not in caplog.text + answer.text
    assert files_in(folder) == []
    assert caplog.text.count("without the right token") == 1, "a log is not filled from outside"


def test_two_authorizations_are_none(client: httpx.Client) -> None:
    twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other"), *headers().items()]
    assert client.post("/incidents", content=body(incident()), headers=twice).status_code == 401


def test_the_name_of_the_scheme_has_no_case(client: httpx.Client) -> None:
    assert post(client, incident(), Authorization=f"bEARER {TOKEN}").status_code == 201


def test_the_token_is_in_no_log_answer_or_metric(
    folder: Path, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = [
        post(client, incident()),
        post(client, "no incident"),
        post(client, incident(), Authorization=f"Bearer {TOKEN}x"),
        post(client, incident(), "../.."),
        *(client.get(path, headers=headers()) for path in ("/", "/metrics", "/healthz", "/nothing", "/incidents")),
    ]
    assert TOKEN not in "".join(f"{answer.text}{answer.headers}" for answer in answers)
    assert TOKEN not in caplog.text
    assert TOKEN not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


# Names and content ----------------------------------------------------------------------------------------------------


def test_names_of_runs_stay_in_the_folder(folder: Path, client: httpx.Client) -> None:
    for run in ["", ".", "..", "../up", "a/b", "a\\b", "/etc", ".hidden", "-x", "a b", "x" * 101, "a%2fb", "a\tb", "ä"]:
        sent = [(name.lower().encode(), value.encode()) for name, value in headers(run).items()]
        assert client.post("/incidents", content=body(incident()), headers=sent).status_code == 400
    assert files_in(folder.parent) == []


def test_a_request_without_a_run_or_with_two_is_refused(client: httpx.Client) -> None:
    without = {name: value for name, value in headers().items() if name != "X-Bitwitness-Run"}
    assert client.post("/incidents", content=body(incident()), headers=without).status_code == 400
    both = [*headers().items(), ("X-Bitwitness-Run", "job-2")]
    assert client.post("/incidents", content=body(incident()), headers=both).status_code == 400


def test_no_link_is_followed(folder: Path, client: httpx.Client, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "incidents").mkdir(parents=True)
    (folder / "job-1").symlink_to(outside)
    (folder / "job-2").mkdir()
    (folder / "job-2" / "incidents").symlink_to(outside)
    (folder / "job-3" / "incidents").mkdir(parents=True)
    (folder / "job-3" / "incidents" / ID).symlink_to(outside)
    (folder / "job-4").write_text("a file")
    for number in (1, 2, 3, 4):
        assert post(client, incident(), f"job-{number}").status_code == 409
    assert files_in(outside) == []


BAD: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no object", lambda record: [record]),
    ("no schema", lambda record: record | {"schema": None}),
    ("schema true", lambda record: record | {"schema": True}),
    ("another schema", lambda record: record | {"schema": 2}),
    ("id with a path", lambda record: record | {"id": "../../20261129T093015Z-4be1d2"}),
    ("id of other digits", lambda record: record | {"id": "2026112٩T093015Z-4be1d2"}),
    ("id with a line end", lambda record: record | {"id": f"{ID}\n"}),
    ("id no text", lambda record: record | {"id": 7}),
    ("id of no day", lambda record: record | {"id": "99999999T999999Z-4be1d2"}),
    ("the end of time", lambda record: record | {"time": "9999-12-31T23:59:59+00:00"}),
    ("before time", lambda record: record | {"time": "0001-01-01T00:00:00+14:00"}),
    ("step without end", lambda record: record | {"verdict": record["verdict"] | {"step": 10**400}}),
    ("too many values", lambda record: record | {"notes": [0] * 600_000}),
    ("device that steers", lambda record: record | {"verdict": record["verdict"] | {"devices": ["GPU-b\n"]}}),
    ("time without a zone", lambda record: record | {"time": "2026-11-29T09:30:15"}),
    ("time no text", lambda record: record | {"time": 7}),
    ("job with a space", lambda record: record | {"scheduler_job": "slurm:1 2"}),
    ("job with an option", lambda record: record | {"scheduler_job": "slurm:1;reboot"}),
    ("half a character", lambda record: record | {"notes": ["\ud800"]}),
    ("clean", lambda record: record | {"verdict": {"status": "clean", "step": 1}}),
    ("nodes no list", lambda record: record | {"verdict": record["verdict"] | {"nodes": "node-b"}}),
    ("a node that is not there", lambda record: record | {"verdict": record["verdict"] | {"nodes": ["node-z"]}}),
    ("another node", lambda record: record | {"verdict": record["verdict"] | {"nodes": ["node-a"]}}),
    ("one node more", lambda record: record | {"verdict": record["verdict"] | {"nodes": ["node-a", "node-b"]}}),
    ("another device", lambda record: record | {"verdict": record["verdict"] | {"devices": ["GPU-a"]}}),
    ("a rank too many", lambda record: record | {"verdict": record["verdict"] | {"ranks": [3]}}),
    ("rank true", lambda record: record | {"verdict": record["verdict"] | {"ranks": [True]}}),
    ("nobody, and a node", lambda record: record | {"verdict": record["verdict"] | {"status": "unattributed", "ranks": []}}),
    ("unknown kind", lambda record: record | {"verdict": record["verdict"] | {"kind": "magic"}}),
    ("reason no text", lambda record: record | {"verdict": record["verdict"] | {"reason": 5}}),
    ("no placement", lambda record: record | {"placement": []}),
    ("observation no object", lambda record: record | {"observations": [5]}),
    ("no observations", lambda record: {key: value for key, value in record.items() if key != "observations"}),
]  # fmt: skip


def test_what_is_no_incident_is_refused(folder: Path, client: httpx.Client) -> None:
    for what, damage in BAD:
        answer = post(client, damage(incident()))
        assert answer.status_code == 400, what
        assert answer.json()["error"], what
    assert files_in(folder) == []


def test_names_of_nodes_are_checked(folder: Path, client: httpx.Client) -> None:
    for node in ["", "-b", "n b", "n;reboot", "n[1-9]", "n,m", "../n", "$(id)", "n\nb", "n" * 254]:
        record = incident()
        record["placement"][1]["node"] = node
        record["verdict"]["nodes"] = [node]
        answer = post(client, record)
        assert answer.status_code == 400
        assert "no name" in answer.json()["error"]
    assert files_in(folder) == []


NOT_JSON = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"{",
    b"[" * 100_000,
    b"[" * 60 + b"]" * 60,
    b'{"a":' * 100_000,
    body(incident())[:-1] + b', "x": NaN}',
    body(incident())[:-1] + b', "x": Infinity}',
    body(incident())[:-1] + b', "x": 1e999}',
    body(incident())[:-1] + b', "x": ' + b"9" * 5000 + b"}",
    body(incident())[:-1] + b', "x": ' + b'{"a":' * 50 + b"1" + b"}" * 51,
    body(incident()) + b"x",
]


def test_what_is_not_json_is_refused(folder: Path, client: httpx.Client) -> None:
    for content in NOT_JSON:
        assert client.post("/incidents", content=content, headers=headers()).status_code == 400, content[:80]
    assert files_in(folder) == []


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150)
@given(data=st.data())
def test_damage_anywhere_is_refused_or_an_incident(data: st.DataObject) -> None:
    record = incident()
    part: Any = record
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [
            value for value in (part.values() if isinstance(part, dict) else part) if isinstance(value, dict | list)
        ]
        if not inner:
            break
        part = data.draw(st.sampled_from(inner))
    if part:
        key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
        part[key] = data.draw(_json)
    why = ""
    try:
        taken = parse(body(record), datetime.now(UTC))
    except Refused as refused:
        why = f"{refused.status} {refused.why}"
        taken = {}
    assert why.isprintable()
    assert why.startswith("400 ") or taken["verdict"]["status"] != "clean"


# How much -------------------------------------------------------------------------------------------------------------


def test_too_much_is_refused_with_and_without_a_length(folder: Path, client: httpx.Client) -> None:
    assert client.post("/incidents", content=b" " * (LARGEST + 1), headers=headers()).status_code == 413
    parts = (b" " * (1 << 20) for _ in range((LARGEST >> 20) + 1))
    assert client.post("/incidents", content=parts, headers=headers()).status_code == 413
    record = incident() | {"text": ""}
    record["text"] = "x" * (LARGEST - len(body(record)))
    assert post(client, record).status_code == 201


def test_so_many_within_an_hour_and_no_more(folder: Path) -> None:
    now = datetime.now(UTC)
    store = Store(folder, Limits(per_hour=2), lambda: now)
    for number in (1, 2):
        store.add("job-1", body(incident(number)))
    with pytest.raises(Refused) as refused:
        store.add("job-2", body(incident(3)))
    assert (refused.value.status, refused.value.retry_after) == (429, 3600)
    assert store.add("job-1", body(incident(1)))[0] == "known", "what is there already costs nothing"
    with pytest.raises(Refused):  # a restart forgets nothing
        Store(folder, Limits(per_hour=2), lambda: datetime.now(UTC)).add("job-2", body(incident(3)))
    now += timedelta(hours=1)
    assert store.add("job-2", body(incident(3)))[0] == "stored"


@pytest.mark.parametrize("limits", [Limits(incidents=2), Limits(bytes=10_000)])
def test_the_folder_has_a_bound(folder: Path, limits: Limits) -> None:
    now = datetime.now(UTC)
    store = Store(folder, limits, lambda: now)
    answers: list[str] = []
    for number in range(9):
        try:
            answers.append(store.add("job-1", body(incident(number)))[0])
        except Refused as refused:
            answers.append(f"{refused.status}")
    there = answers.count("stored")
    assert answers == ["stored"] * there + ["507"] * (9 - there)
    assert len(RunFiles(folder / "job-1").incidents()) == there > 0
    assert sum(path.stat().st_size for path in folder.rglob("incident.json")) <= limits.bytes + 4000
    for path in folder.glob("job-1/incidents/*/incident.json"):
        path.unlink()
        path.parent.rmdir()
    now += timedelta(minutes=1)
    assert store.add("job-1", body(incident(9)))[0] == "stored", "somebody has tidied up"


# The rest of the web --------------------------------------------------------------------------------------------------


def test_methods_paths_and_types(client: httpx.Client) -> None:
    assert client.get("/incidents").status_code == 405
    assert client.get("/incidents").headers["allow"] == "POST"
    assert client.put("/incidents", headers=headers()).status_code == 405
    assert client.post("/metrics").status_code == 405
    for path in ("/nothing", "/incidents/", "/incidents/x", "/../etc/passwd", "/%2e%2e/x", "/.git"):
        answer = client.get(path, follow_redirects=False)
        assert answer.status_code in {404, 405}, path
    for path in ("/", "/metrics", "/healthz"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["x-content-type-options"] == "nosniff"
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"):
        assert post(client, incident(), **{"Content-Type": kind}).status_code == 415
    assert post(client, incident(), **{"Content-Encoding": "gzip"}).status_code == 415
    assert post(client, incident(), **{"Content-Type": "application/json; charset=utf-8"}).status_code == 201
    assert "server" not in client.get("/").headers


def test_without_a_folder_nothing_comes_in(tmp_path: Path) -> None:
    with listening(None) as (_, client):
        assert post(client, incident()).status_code == 404
        assert client.get("/healthz").status_code == 200


def test_the_page_escapes_what_comes_from_elsewhere() -> None:
    evil = Recent("2026-11-29T09:30:15Z", ID, "<script>alert(1)</script>", "drain", "held", "\"'><img src=x>")
    figures = Figures(
        mode="act", cluster="<b>", recent=(evil,), returned=1, messages_pending=2, proposals={("<i>", "held"): 1}
    )
    with listening(None, figures) as (_, client):
        page = client.get("/")
    assert page.status_code == 200
    assert "&lt;script&gt;alert(1)" in page.text
    assert not any(tag in page.text for tag in ("<script", "<img", "<b>", "<i>"))
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "no pass has come to its end" in page.text


def test_a_port_that_is_taken_is_said_at_once() -> None:
    figures = Figures()
    made = app(None, "", metrics=lambda: figures, health=lambda: health(figures, datetime.now(UTC)))
    with listening(None) as (server, _), pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:\d+"):
        serve(made, "127.0.0.1", server.port)


def test_a_stopped_server_listens_no_more() -> None:
    with listening(None) as (server, client):
        assert client.get("/healthz").status_code == 200
        server.stop()
        assert not server.alive
        with pytest.raises(httpx.ConnectError):
            client.get("/healthz")
        server.stop()


def test_figures_that_cannot_be_read_are_no_figures(tmp_path: Path) -> None:
    def broken() -> Figures:
        raise RunFilesError(f"{tmp_path} {TOKEN}")

    made = app(tmp_path / "inbox", TOKEN, metrics=broken, health=lambda: health(broken(), datetime.now(UTC)))
    with serve(made, "127.0.0.1", 0) as server, httpx.Client(base_url=server.address, trust_env=False) as client:
        for path in ("/metrics", "/healthz", "/"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert TOKEN not in answer.text
        assert post(client, incident()).status_code == 201, "incidents come in nevertheless"


# Secrets --------------------------------------------------------------------------------------------------------------


def secret(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_token_is_one_line_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    assert read_token(secret(file, TOKEN.encode() + b"\n")) == TOKEN
    assert read_token(secret(file, TOKEN.encode(), 0o400)) == TOKEN
    wrong = (
        b"",
        b" \n",
        b"short",
        TOKEN.encode() + b"\nsecond-line-of-it",
        "tökentökentökentöken".encode(),
        b"x" * 5000,
    )
    for content in wrong:
        with pytest.raises(ConfigurationError, match=r"token of the inbox") as error:
            read_token(secret(file, content))
        assert not content.strip() or content.decode() not in str(error.value)
    for mode in (0o640, 0o604, 0o660, 0o602):
        with pytest.raises(ConfigurationError, match="chmod 600"):
            read_token(secret(file, TOKEN.encode(), mode))
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigurationError):
            read_token(path)
    secret(file, TOKEN.encode(), 0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_token(file) == TOKEN, "systemd lets a group read, in a folder that only the service enters"
    with pytest.raises(ConfigurationError):
        read_secret(secret(file, TOKEN.encode(), 0o444), "a credential")


def test_an_app_without_a_token_is_not_made(tmp_path: Path) -> None:
    figures = Figures()
    for token in ("", "short", "ä" * 20):
        with pytest.raises(ConfigurationError, match="token"):
            app(tmp_path / "inbox", token, metrics=lambda: figures, health=lambda: health(figures, datetime.now(UTC)))


def test_the_bound_is_the_one_that_is_said() -> None:
    assert received.LARGEST == 8 * 1024 * 1024
