"""`bitwitness serve` and `bitwitness console`, as processes: how they start, what they refuse, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.cli.serve import address_of
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.web.security import addressed_to_us
from bitwitness.web.settings import Settings, hosts_of, is_loopback
from tests.fleet.incidents import write

slow = pytest.mark.skipif(not os.environ.get("BITWITNESS_EXHAUSTIVE"), reason="starts one more process")
COMMAND = (sys.executable, "-m", "bitwitness", "serve")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has an incident."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "run-1")
    return folder


@contextmanager
def serving(*options: str, folder: Path) -> Iterator[tuple[dict[str, Any], httpx.Client, subprocess.Popen[str]]]:
    """A console as a process, and what it says of itself."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline() or "{}")
        assert said, process.communicate()[1]
        address = f"http://localhost:{said['port']}"
        with httpx.Client(base_url=address, trust_env=False, timeout=30, headers={"Accept": "text/html"}) as client:
            yield said, client, process
    finally:
        process.kill()
        process.communicate()


def imported(client: httpx.Client, count: int = 1) -> None:
    """Wait for the first import."""
    end = time.monotonic() + 60
    while client.get("/api/runs").json()["total"] < count:
        assert time.monotonic() < end
        time.sleep(0.05)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """All files below a folder, and when they were changed."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [folder, *folder.rglob("*")]}


def ended(process: subprocess.Popen[str], by: int) -> tuple[int, str]:
    """End it; its exit code and what it said on stderr."""
    begun = time.monotonic()
    process.send_signal(by)
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    return process.returncode, said


def test_it_shows_a_run_writes_nothing_to_it_and_ends_with_0(runs: Path, tmp_path: Path) -> None:
    before = tree(runs)
    with serving(str(runs), "--keep", "90d", folder=tmp_path) as (said, client, process):
        assert said == {
            "address": f"http://127.0.0.1:{said['port']}",
            "host": "127.0.0.1",
            "port": said["port"],
            "pid": process.pid,
            "public": [],
            "actions": False,
        }
        imported(client)
        assert "run-1" in client.get("/").text
        incident = client.get("/api/runs").json()["incidents"][0]["id"]
        assert client.get(f"/incidents/{incident}", follow_redirects=True).status_code == 200
        assert client.post("/runs/1/quarantine/clear").status_code == 403
        assert [path.name[:19] for path in tmp_path.iterdir()] == ["bitwitness-console-"]
        # An open stream, which must not keep it.
        with client.stream("GET", "/events") as stream:
            next(stream.iter_lines())
            assert ended(process, signal.SIGINT) == (0, "")
    assert list(tmp_path.iterdir()) == []  # its database was for this time only
    assert tree(runs) == before


@pytest.mark.parametrize(
    ("host", "public", "address"),
    [
        ("127.0.0.1", (), "http://127.0.0.1:8642"),
        ("::1", (), "http://[::1]:8642"),
        ("10.0.0.7", (), "http://10.0.0.7:8642"),
        ("0.0.0.0", (), f"http://{socket.gethostname()}:8642"),
        ("::", (), f"http://{socket.gethostname()}:8642"),
        ("", (), f"http://{socket.gethostname()}:8642"),
        ("0.0.0.0", ("https://Console.example/", "http://console:8642"), "https://console.example"),
        ("127.0.0.1", ("http://console:8642",), "http://console:8642"),
    ],
)
def test_the_address_that_is_told_can_be_opened(host: str, public: tuple[str, ...], address: str) -> None:
    assert address_of(host, 8642, public) == address
    machine = () if is_loopback(host) else (socket.gethostname(),)
    netloc = str(urlsplit(address).netloc)
    assert addressed_to_us(netloc, Settings(hosts=hosts_of(host, public, machine)))


@slow
def test_elsewhere_everybody_signs_in_with_a_token_that_is_printed_once(runs: Path, tmp_path: Path) -> None:
    options = (str(runs / "run-1"), "--host", "0.0.0.0", "--public", "http://console.example:1", "--allow-actions")
    with serving(*options, folder=tmp_path) as (said, client, process):
        assert said["public"] == ["http://console.example:1"]
        assert said["address"] == "http://console.example:1"
        assert client.get("/").status_code == 303
        assert client.get("/api/runs").status_code == 401
        token = {"Authorization": f"Bearer {said['token']}"}
        assert client.get("/api/runs", headers=token).status_code == 200
        assert client.get("/api/runs", headers={**token, "Host": "console.example:1"}).status_code == 200
        assert client.get("/api/runs", headers={**token, "Host": "evil.example"}).status_code == 421
        code, log = ended(process, signal.SIGTERM)
    assert (code, said["token"] in log) == (0, False)


@slow
def test_a_database_alone_is_only_shown_and_users_are_asked_for(runs: Path, tmp_path: Path) -> None:
    users, database = tmp_path / "users.json", tmp_path / "console.db"
    made = CliRunner().invoke(cli, ["console", "user", "add", str(users), "ada", "--role", "operator"])
    assert made.exit_code == 0
    with Database(database) as kept:
        Importer(kept, [runs / "run-1"]).round()
    with serving("--db", str(database), "--users", str(users), folder=tmp_path) as (said, client, process):
        assert "token" not in said
        assert client.get("/").headers["location"] == "/login?after=%2F"
        client.headers["Authorization"] = f"Bearer {made.stdout.strip()}"
        assert client.get("/api/runs").json()["total"] == 1
        assert client.get("/healthz").json()["imports"] is False
        assert ended(process, signal.SIGINT) == (0, "")


@slow
def test_what_a_person_reads(runs: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, str(runs / "run-1"), "--port", "0", "--host", "0.0.0.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        where = process.stdout.readline()
        assert re.fullmatch(rf"http://{re.escape(socket.gethostname())}:\d+/\n", where)
        assert httpx.get(where.strip(), trust_env=False).status_code == 401
        token = re.search(r"sign in with this token, .*: (bwt-\S+)", process.stderr.readline())
        assert token is not None
        assert "unencrypted" in process.stderr.readline()
        assert ended(process, signal.SIGINT)[0] == 0
    finally:
        process.kill()
        process.communicate()


# What is refused ------------------------------------------------------------------------------------------------------


def refused(*options: str) -> str:
    """What it says where it does not start."""
    done = CliRunner().invoke(cli, ["serve", *options])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


def test_what_cannot_be_served(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert "name a RUN_DIR" in refused()
    assert f"{tmp_path}/none does not exist" in refused(str(tmp_path / "none"))
    assert "is not a directory" in refused(str(tmp_path / "file"))
    assert f"For runs that come later: --parent {tmp_path}/empty" in refused(str(tmp_path / "empty"))
    assert "--parent" in refused("--parent", str(tmp_path / "none"))
    assert "--fleet" in refused("--fleet", str(tmp_path / "none"))
    assert "there is no database" in refused("--db", str(tmp_path / "none.db"))
    assert "is no kind of database" in refused("--db", "mysql://x/y", str(runs))
    assert "secret" not in refused("--db", "mysql://user:secret@host/y", str(runs))
    assert "cannot be read" in refused(str(runs), "--users", str(tmp_path / "none.json"))
    assert "is no address" in refused(str(runs), "--public", "console.example")
    assert "no path below one" in refused(str(runs), "--public", "https://example.org/console")
    assert "at least 1h" in refused(str(runs), "--keep", "1s")
    assert "no time" in refused(str(runs), "--keep", "long")
    assert "cannot listen on" in refused(str(runs), "--host", "192.0.2.1", "--port", "0")


def test_a_port_that_is_taken(runs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(str(runs), "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "choose another --port" in said


# Users ----------------------------------------------------------------------------------------------------------------


def test_users_are_added_listed_and_removed(tmp_path: Path) -> None:
    runner, file = CliRunner(), str(tmp_path / "users.json")
    made = runner.invoke(cli, ["console", "user", "add", file, "ada", "--role", "operator", "--json"])
    token = json.loads(made.stdout)["token"]
    assert token not in Path(file).read_text()
    with_password = ["console", "user", "add", file, "bob", "--password-stdin"]
    assert runner.invoke(cli, with_password, input="correct horse battery\n").exit_code == 0
    listed = json.loads(runner.invoke(cli, ["console", "user", "list", file, "--json"]).stdout)["users"]
    assert [(one["name"], one["role"], one["secret"]) for one in listed] == [
        ("ada", "operator", "token"),
        ("bob", "viewer", "password"),
    ]
    assert "scrypt" not in json.dumps(listed)
    table = runner.invoke(cli, ["console", "user", "list", file]).stdout
    assert "ada" in table
    assert runner.invoke(cli, ["console", "user", "remove", file, "ada"]).exit_code == 0
    assert runner.invoke(cli, ["console", "user", "remove", file, "ada"]).exit_code == 2
    for bad in ("short\n", " " * 20 + "\n", "", "x" * 2000 + "\n", token + "\n"):
        done = runner.invoke(cli, with_password, input=bad)
        assert done.exit_code == 2
        assert bad.strip() == "" or bad.strip() not in done.output
    assert runner.invoke(cli, ["console", "user", "add", file, "a b"]).exit_code == 2
    assert runner.invoke(cli, ["console", "user", "add", str(tmp_path / "no" / "where"), "ada"]).exit_code == 2


def test_options_are_read_alike_in_all_commands_of_the_console(tmp_path: Path) -> None:
    gone = str(tmp_path / "no" / "such" / "console.db")
    said = CliRunner().invoke(cli, ["serve", "--port", "0"], env={"BITWITNESS_DB": gone})
    assert (said.exit_code, "name a RUN_DIR" in said.output) == (2, False), said.output
    assert "console.db" in said.output
    for text, wrong in (("5s", "nothing to import"), ("0.5", "nothing to import"), ("soon", "is no time")):
        said = CliRunner().invoke(cli, ["store", "import", "--db", gone, "--every", text])
        assert said.exit_code == 2
        assert wrong in said.output, said.output
