"""`bitwitness fleet send` against a real inbox: idempotent, patient, and silent about the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.fleet.inbox import Limits
from bitwitness.runfiles import RunFiles, read_incident
from tests.fleet.web import ID, TOKEN, Sink, incident, listening


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is reached directly, whatever the machine's settings are."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    files = RunFiles(tmp_path / "job-1").create()
    for number in (1, 2):
        record = incident(number)
        files.commit_incident(record["id"], record)
    return files.path


def send(*words: object) -> Result:
    return CliRunner().invoke(cli, ["fleet", "send", *map(str, words)])


def test_a_run_is_sent_once_however_often(tmp_path: Path, run: Path, token: Path) -> None:
    inbox = tmp_path / "inbox"
    with listening(inbox) as (server, _):
        first = send(run, "--to", server.address, "--token-file", token)
        assert first.exit_code == 0, first.output
        assert first.output.count(": stored") == 2
        again = send(run, "--to", f"{server.address}/incidents", "--token-file", token, "--json")
        shown = json.loads(again.stdout)
    assert again.exit_code == 0
    assert (shown["run"], shown["sent"]) == ("job-1", 2)
    assert [one["outcome"] for one in shown["incidents"]] == ["known", "known"]
    assert TOKEN not in first.output + again.output
    stored = RunFiles(inbox / "job-1").incidents()
    assert [read_incident(path).record for path in stored] == [incident(1), incident(2)]


def test_one_incident_knows_its_run(tmp_path: Path, run: Path, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "incidents" / incident(1)["id"]
    with listening(tmp_path / "inbox") as (server, _):
        for given in (path, path / "incident.json"):
            assert send(given, "--to", server.address, "--token-file", token).exit_code == 0
        monkeypatch.chdir(path)
        assert send(".", "--to", server.address, "--token-file", token, "--run", "other").exit_code == 0
    assert [len(RunFiles(tmp_path / "inbox" / name).incidents()) for name in ("job-1", "other")] == [1, 1]


def test_what_is_refused_is_said_and_the_rest_goes_on(tmp_path: Path, run: Path, token: Path) -> None:
    with listening(tmp_path / "inbox") as (server, _):
        RunFiles(run).commit_incident(ID, incident() | {"scheduler_job": "no job"})
        (run / "incidents" / incident(1)["id"] / "incident.json").write_text("damaged")
        done = send(run, "--to", server.address, "--token-file", token, "--json")
        assert done.exit_code == 1
        outcomes = {one["incident"]: one for one in json.loads(done.stdout)["incidents"]}
        assert [outcomes[name]["outcome"] for name in (incident(1)["id"], incident(2)["id"], ID)] == [
            "not sent",
            "stored",
            "refused",
        ]
        assert "no job of a scheduler" in outcomes[ID]["why"]
        wrong = tmp_path / "wrong"
        wrong.write_text("another-token-of-some-length")
        wrong.chmod(0o600)
        denied = send(run, "--to", server.address, "--token-file", wrong)
    assert denied.exit_code == 1
    assert "401" in denied.output
    assert "another-token" not in denied.output


def test_it_tries_again_where_that_may_help(
    tmp_path: Path, run: Path, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with Sink([503, 429, 201]).running() as sink:
        done = send(run / "incidents" / incident(1)["id"], "--to", sink.address, "--token-file", token)
    assert done.exit_code == 0, done.output
    assert len(sink.got) == 3
    assert len({content for _, content in sink.got}) == 1
    assert len(pauses) == 2
    with Sink([507] * 9).running() as sink:
        done = send(run, "--to", sink.address, "--token-file", token, "--patience", 0)
    assert done.exit_code == 1
    assert len(sink.got) == 2
    assert "send it again later" in " ".join(done.output.split())


def test_the_inbox_says_when_to_come_again(tmp_path: Path, run: Path, token: Path) -> None:
    with listening(tmp_path / "inbox", limits=Limits(per_hour=1)) as (server, _):
        done = send(run, "--to", server.address, "--token-file", token, "--patience", 5, "--json")
    assert [one["outcome"] for one in json.loads(done.stdout)["incidents"]] == ["stored", "not sent"]
    assert "429" in json.loads(done.stdout)["incidents"][1]["why"]


def test_the_token_follows_no_redirection(run: Path, token: Path) -> None:
    with Sink([307] * 2).running() as sink:
        done = send(run, "--to", sink.address, "--token-file", token)
    assert done.exit_code == 1
    assert "redirects" in done.output
    assert len(sink.got) == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"--to": "example.org"}, "--to must be"),
        ({"--to": f"http://user:{TOKEN}@x/"}, "--to must be"),
        ({"--to": "ftp://x/"}, "--to must be"),
        ({"--run": "../up"}, "no name of a run"),
        ({"--run": "ä b"}, "no name of a run"),
        ({"--token-file": "/nowhere/token"}, "cannot be read"),
    ],
)
def test_wrong_input_sends_nothing(run: Path, token: Path, words: dict[str, str], why: str) -> None:
    given: dict[str, Any] = {"--to": "http://127.0.0.1:1", "--token-file": token} | words
    done = send(run, *(part for pair in given.items() for part in pair))
    assert done.exit_code == 2
    assert why in " ".join(done.output.split())
    assert TOKEN not in done.output


def test_no_run_and_no_incident_is_wrong_input(tmp_path: Path, token: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, RunFiles(tmp_path / "empty").create().path):
        done = send(path, "--to", "http://127.0.0.1:1", "--token-file", token)
        assert done.exit_code == 2, done.output
    token.chmod(0o644)
    done = send(tmp_path / "empty", "--to", "http://127.0.0.1:1", "--token-file", token)
    assert "chmod 600" in done.output
