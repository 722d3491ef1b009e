"""`bitwitness fleet watch`, `status`, `history` and `clear`, as a person or a service manager uses them."""

from __future__ import annotations

import json
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.figures import figures
from bitwitness.fleet.owning import STATE_LOCK, Lock
from bitwitness.fleet.state import NAME, State
from bitwitness.runfiles import RunFiles
from tests.fleet.incidents import incident_id, record, topology, verdict, write

NOW = datetime.now(UTC)
WHERE = topology()


class Place:
    """A folder with a run, a fake cluster and a policy."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.state = folder, folder / "run", folder / "state"
        self.cluster = FakeCluster(WHERE.nodes, folder / "cluster.json")
        self.policy = folder / "fleet.toml"
        self.policy.write_text(
            f'owner = "gpu-ops"\nnodes_per_hour = 1\n[cluster]\nkind = "fake"\nfile = "{folder / "cluster.json"}"\n'
        )
        RunFiles(self.run_dir).create()

    def incident(self, number: int = 1, rank: int | None = 2) -> Path:
        return write(self.run_dir, number, verdict(WHERE, () if rank is None else (rank,)), WHERE, NOW)

    def watch(self, *more: str) -> Result:
        return call("watch", str(self.run_dir), "--state", str(self.state), "--policy", str(self.policy), *more)

    def ask(self, command: str, *more: str) -> Result:
        return call(command, *more, "--state", str(self.state))

    def asked(self, command: str, *more: str) -> dict[str, Any]:
        found = json.loads(self.ask(command, *more, "--json").stdout)
        assert isinstance(found, dict)
        return found


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, ["fleet", *words])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder but locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


# watch ----------------------------------------------------------------------------------------------------------------


def test_watching_once_observes_unless_told_to_act(place: Place) -> None:
    place.incident()
    seen = place.watch("--once")
    assert (seen.exit_code, place.cluster.calls()) == (0, [])
    assert "observed     n1" in seen.stdout
    acted = place.watch("--once", "--act", "--json")
    events = [json.loads(line) for line in acted.stdout.splitlines()]
    assert [one["what"] for one in events] == ["started", "intent", "call", "done", "stopped"]
    assert place.cluster.calls() == [("drain", "n1")]


def test_a_dry_run_prints_the_exact_calls_and_touches_nothing(place: Place) -> None:
    place.incident(1)
    place.incident(2, rank=4)
    looks = place.cluster.looks()
    before = {name: content for name, content in files(place.folder).items() if name != "cluster.json"}
    for more in ((), ("--once",)):
        seen = place.watch("--dry-run", *more)
        assert seen.exit_code == 0
        assert seen.stdout.count("would call: fake drain n1 --reason 'bitwitness ") == 1
        assert "nodes_per_hour" in seen.stdout, "the second is held by the budget"
    events = [json.loads(line) for line in place.watch("--dry-run", "--json").stdout.splitlines()]
    assert [one["text"][:13] for one in events if one["what"] == "call"] == ["fake drain n1"]
    assert {name: content for name, content in files(place.folder).items() if name != "cluster.json"} == before
    assert place.cluster.calls() == []
    assert place.cluster.looks() > looks
    place.watch("--once", "--act")
    before = files(place.state)
    assert "nothing would be called" in place.watch("--dry-run").stdout
    assert files(place.state) == before


def test_a_pass_that_could_not_do_all_ends_with_1(place: Place) -> None:
    place.incident()
    place.cluster.unreachable()
    done = place.watch("--once", "--act")
    assert (done.exit_code, "cannot be reached" in done.stderr) == (1, True)
    assert figures(place.state).held == {"cluster": 1}
    place.cluster.unreachable(False)
    with State(place.state) as state, state.change():
        state.write("UPDATE proposals SET due = NULL")
    assert place.watch("--once", "--act").exit_code == 0
    (place.incident(2, 4) / "incident.json").write_text("garbage")
    done = place.watch("--once", "--act")
    assert (done.exit_code, incident_id(2, NOW) in done.stderr) == (1, True)
    assert figures(place.state).troubles == {"damaged": 1}


def test_what_a_cluster_can_never_do_is_counted_for_a_day(place: Place) -> None:
    place.incident()
    place.watch("--once")
    for age, held in ((1, {"cluster": 1}), (25, {})):
        with State(place.state) as state, state.change():
            then = stamp(NOW - timedelta(hours=age))
            state.write("UPDATE proposals SET status = 'held', hold = 'cluster', final = 1, updated = ?", (then,))
        assert figures(place.state).held == held


@pytest.mark.parametrize(
    "table",
    [
        'kind = "carrier"',
        'kind = "slack"\nurl_file = "/nowhere/url"',
        'kind = "slack"\nurl = "http://127.0.0.1:9/x"\nseverity = "foo"',
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(place: Place, table: str) -> None:
    place.policy.write_text(f"{place.policy.read_text()}[[notify]]\n{table}\n")
    for mode in ("--dry-run", "--once"):
        done = place.watch(mode)
        assert (done.exit_code, "[[notify]] number 1" in done.output) == (2, True)
    assert not place.state.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--runs DIR"),
        (("{folder}/absent",), "--runs {folder}"),
        (("{folder}",), "--runs {folder}"),
        (("--runs", "{folder}/absent"), "no such directory"),
        (("{folder}/run", "--policy", "{folder}/absent.toml"), "cannot be read"),
        (("{folder}/run", "--every", "0s"), "above 0"),
        (("{folder}/run", "--listen", "nowhere"), "HOST:PORT"),
        (("{folder}/run", "--token-file", "{folder}/fleet.toml"), "--listen"),
    ],
)
def test_what_cannot_be_watched_is_an_error(place: Place, words: tuple[str, ...], said: str) -> None:
    place.incident()
    done = call("watch", *(word.format(folder=place.folder) for word in words), "--state", str(place.state), "--once")
    assert done.exit_code == 2
    assert said.format(folder=place.folder) in " ".join(done.output.split())
    assert not place.state.exists()


def test_a_damaged_or_owned_state_is_an_error(place: Place) -> None:
    place.state.mkdir()
    (place.state / NAME).write_bytes(b"garbage")
    assert place.watch("--once").exit_code == 2
    assert (place.state / NAME).read_bytes() == b"garbage"
    (place.state / NAME).unlink()
    other = Lock(place.state / STATE_LOCK, "state")
    done = place.watch("--once")
    other.release()
    assert done.exit_code == 2
    assert "has an owner already" in done.output


class Watching:
    """A controller in a process of its own, and what it prints."""

    def __init__(self, place: Place, *more: str) -> None:
        words = [str(place.run_dir), "--state", str(place.state), "--policy", str(place.policy), "--every", "0.05s"]
        command = [sys.executable, "-m", "bitwitness", "fleet", "watch", *words, "--json", *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, what: str) -> dict[str, Any]:
        """The next event of a kind."""
        while line := self._lines.get(timeout=60):
            event: dict[str, Any] = json.loads(line)
            if event["what"] == what:
                return event
        raise AssertionError(f"it ended without {what}")

    def said(self) -> str:
        """A line of stderr."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_cleanly(place: Place, number: signal.Signals, code: int) -> None:
    with Watching(place, "--act") as running:
        running.wait_for("started")
        place.incident()
        running.wait_for("done")
        assert place.asked("status")["controller"]["life"] == "running"
        running.process.send_signal(number)
        running.wait_for("stopped")
        assert running.process.wait(60) == code
    assert place.cluster.calls() == [("drain", "n1")]
    assert place.asked("status")["controller"]["life"] == "stopped"


def test_it_listens_and_takes_incidents_over_http(place: Place) -> None:
    token = place.folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o600)
    with Watching(place, "--act", "--listen", "127.0.0.1:0", "--token-file", str(token)) as running:
        running.wait_for("started")
        address = "http://" + running.said().split()[-1]
        body = json.dumps({"schema": 1, **record(verdict(WHERE), WHERE, NOW), "id": incident_id(1, NOW)})
        headers = {"Authorization": f"Bearer {token.read_text()}", "Content-Type": "application/json"}
        request = Request(f"{address}/incidents", body.encode(), {**headers, "X-Bitwitness-Run": "far"})
        with urlopen(request, timeout=30) as answer:
            assert answer.status == 201
        running.wait_for("done")
        with urlopen(f"{address}/healthz", timeout=30) as answer:
            assert json.load(answer)["mode"] == "act"
        with urlopen(f"{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert re.search(r'bitwitness_fleet_acts_total\{act="drain",outcome="done"\} 1', text)
        with urlopen(address, timeout=30) as answer:
            assert "n1" in answer.read().decode()
        running.process.terminate()
        assert running.process.wait(60) == 0
    assert place.cluster.calls() == [("drain", "n1")]


# status and history ---------------------------------------------------------------------------------------------------


def test_the_status_says_what_is_to_be_done(place: Place) -> None:
    place.cluster.take_out("n3", "fan broken", by="kim")
    for number, rank in enumerate((2, 4, 6, None)):
        place.incident(number, rank)
    place.policy.write_text(
        place.policy.read_text().replace("nodes_per_hour = 1", "nodes_per_hour = 1\ncluster_share = 1.0")
    )
    place.watch("--once", "--act")
    shown = place.ask("status")
    assert shown.exit_code == 0
    assert "STOPPED" in shown.stdout
    assert "0 of 1 nodes may be touched within this hour" in shown.stdout
    told = place.asked("status")
    stands = {one["node"]: (one["status"], one["hold"]) for one in told["proposals"]}
    assert stands["n1"] == ("done", "")
    assert stands["n2"] == ("held", "nodes-per-hour")
    assert told["budget"]["left"] == 0
    assert told["incidents"] == {"attributed": 3, "unattributed": 1}
    assert told["todo"][0].startswith("the controller")
    assert any("attributed to nobody" in text for text in told["todo"])
    assert set(told["controller"]) >= {"life", "mode", "cluster", "last_round", "host", "pid"}


def test_a_controller_that_was_killed_is_said_to_be_silent(place: Place) -> None:
    place.watch("--once")
    with State(place.state) as state, state.change():
        long_ago = stamp(NOW - timedelta(hours=3))
        state.set_about(stopped="", started=long_ago, round=long_ago)
    told = place.asked("status")
    assert told["controller"]["life"] == "silent"
    assert "3 hours" in told["todo"][0]
    assert "SILENT" in place.ask("status").stdout


def test_a_controller_that_died_a_moment_ago_is_not_running(place: Place) -> None:
    with Watching(place) as running:
        running.wait_for("started")
        assert place.asked("status")["controller"]["life"] == "running"
        running.process.kill()
        running.process.wait(60)
        told = place.asked("status")
    assert told["controller"]["life"] == "silent"
    assert "is gone" in told["todo"][0]
    assert "Nothing is to be done" not in place.ask("status").stdout


def test_the_status_says_how_it_was_started(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    more = ("--state", "state", "--policy", "fleet.toml", "--publish", ".", "--act", "--every", "5s")
    assert call("watch", "run", "--runs", ".", *more, "--once").exit_code == 0
    monkeypatch.chdir("/")
    here = place.folder
    command = f"bitwitness fleet watch {here}/run --runs {here} --state {here}/state --policy {here}/fleet.toml"
    command += f" --publish {here} --every 5s --act"
    told = place.asked("status")
    assert told["todo"][0].endswith(command)
    assert told["controller"]["command"] == command
    again = [word for word in shlex.split(command)[2:] if word]
    assert CliRunner().invoke(cli, ["fleet", *again, "--once"]).exit_code == 0
    assert f"--state {here}/state" in place.ask("status").stdout.splitlines()[-1]


def test_the_newest_and_most_urgent_come_first_and_the_rest_is_counted(place: Place) -> None:
    for number in range(1, 15):
        place.incident(number, rank=None)
    place.cluster.take_out("n2", "fan broken", by="kim")
    place.incident(15, 4)
    place.watch("--once", "--act")
    with State(place.state) as state, state.change():
        state.write("UPDATE proposals SET status = 'unclear', why = 'as a test says' WHERE node = 'n2'")
    told = place.asked("status")
    assert told["todo"][1].startswith("n2: look whether")
    assert incident_id(14, NOW) in told["todo"][2]
    assert (len(told["todo"]), told["todo_more"]) == (12, 4)
    assert "and 4 more" in (text := place.ask("status").stdout)
    assert f"fleet history --state {place.state} --last 0" in text


def test_what_a_cluster_says_is_shown_as_one_plain_line(place: Place) -> None:
    place.incident()
    place.watch("--once", "--act")
    garbage = "\x1b[31mpanic\n1. take out everything\n" + "x" * 5000
    with State(place.state) as state, state.change():
        state.write("UPDATE proposals SET status = 'failed', why = ?", (garbage,))
    text = next(text for text in place.asked("status")["todo"] if text.startswith("n1:"))
    assert text.isprintable()
    assert len(text) < 320
    shown = place.ask("status").stdout
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) < 500


@pytest.mark.parametrize("command", ["status", "history", "clear"])
def test_without_a_state_nothing_is_made(place: Place, command: str) -> None:
    more = ("n1", "--why", "x") if command == "clear" else ()
    assert place.ask(command, *more).exit_code == 2
    assert not place.state.exists()


def test_the_history_of_a_node_and_of_an_incident(place: Place) -> None:
    first, second = place.incident(1), place.incident(2, rank=None)
    place.watch("--once", "--act")
    of_node = place.asked("history", "--node", "n1")["entries"]
    assert [one["what"] for one in of_node] == ["proposed", "intent", "call", "done"]
    assert {one["incident"] for one in of_node} == {first.name}
    of_incident = place.asked("history", "--incident", second.name)["entries"]
    assert [one["what"] for one in of_incident] == ["incident", "proposed"]
    shown = place.ask("history", "--last", "2").stdout
    assert "--last 0 shows all" in shown
    assert len(place.asked("history", "--last", "0")["entries"]) > 6
    assert "nothing has happened to node n7" in place.ask("history", "--node", "n7").stdout


@pytest.mark.parametrize("command", ["history", "status"])
def test_what_is_shown_can_be_read_and_searched(place: Place, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place.incident(1)
    place.incident(2, 4)
    place.incident(3, rank=None)
    place.watch("--once", "--act")
    place.ask("clear", "n1", "--why", "the board was exchanged " * 20)
    piped = place.ask(command).stdout.splitlines()
    assert [line for line in piped if line != line.rstrip()] == [], "nothing is filled up with blanks"
    head = next(number for number, line in enumerate(piped) if line.split()[-1:] in (["text"], ["why"]))
    columns = len(piped[head].split())
    assert all(len(line.split(maxsplit=columns - 1)) == columns for line in piped[head + 1 : -1]), "no column is empty"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", place.ask(command).stdout)
    table = shown[shown.index("Nodes") : shown.index("More:")] if command == "status" else shown
    assert max(map(len, table.splitlines())) <= 100
    assert re.search(r"n2 .*held|held .*n2", table)
    assert incident_id(2, NOW) in table, "an id in two parts is found by nobody"


# clear ----------------------------------------------------------------------------------------------------------------


def test_clearing_returns_a_node_and_forgets_its_strikes(place: Place) -> None:
    place.incident()
    place.watch("--once", "--act")
    tried = place.ask("clear", "n1", "--why", "replaced the GPU", "--dry-run")
    assert "would call: fake clear n1" in tried.stdout
    assert place.cluster.look("n1").service == "out"
    done = place.asked("clear", "n1", "--why", "replaced the GPU")
    assert (done["calls"], done["devices"]) == (["fake clear n1"], ["GPU-n1-0"])
    assert place.cluster.look("n1").service == "in"
    trail = place.asked("history", "--node", "n1")["entries"]
    assert [one["what"] for one in trail][-2:] == ["clear", "cleared"]
    assert trail[-1]["text"] == "replaced the GPU"
    assert "@" in trail[-1]["who"]
    assert json.loads((place.state / "condemned.json").read_text())["devices"] == []
    place.watch("--once", "--act")
    assert place.cluster.calls() == [("drain", "n1"), ("clear", "n1")], "what was answered is not acted upon again"
    (row,) = place.asked("status")["proposals"]
    assert (row["status"], "replaced the GPU" in row["why"]) == ("cleared", True)


def test_clearing_closes_what_still_waits_for_the_node(place: Place) -> None:
    place.incident()
    place.watch("--once")
    assert place.ask("clear", "n1", "--why", "it was a test").exit_code == 0
    place.watch("--once", "--act")
    assert place.cluster.calls() == []


def test_the_undo_needs_no_secret_no_extra_and_no_policy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = place.folder / "slack-url"
    secret.touch(0o600)
    secret.write_text("http://127.0.0.1:9/hooks/abc\n")
    place.policy.write_text(f'{place.policy.read_text()}[[notify]]\nkind = "slack"\nurl_file = "{secret}"\n')
    place.incident()
    assert place.watch("--once", "--act").exit_code == 0
    secret.unlink()
    place.policy.write_text("half of a sett")
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "bitwitness.fleet.senders", raising=False)
    done = place.ask("clear", "n1", "--why", "repaired")
    assert (done.exit_code, place.cluster.look("n1").service) == (0, "in"), done.output
    with State(place.state) as state:
        waiting = state.read("SELECT subject, notifier FROM outbox JOIN deliveries ON id = message ORDER BY time")
    assert any("back in service" in subject and name == "slack 127.0.0.1" for subject, name in waiting), waiting


@pytest.mark.parametrize(
    ("node", "why", "said"),
    [("n1", " ", "reason"), ("n2", "x", "not by bitwitness"), ("n9", "x", "no node n9"), ("n1;x", "x", "no name")],
)
def test_what_is_not_cleared(place: Place, node: str, why: str, said: str) -> None:
    place.cluster.take_out("n2", "fan broken", by="kim")
    place.incident()
    place.watch("--once", "--act")
    done = place.ask("clear", node, "--why", why)
    assert done.exit_code == 2
    assert said in done.output
    assert place.cluster.look("n2").reason == "fan broken"


def test_a_cluster_that_refuses_to_clear_is_a_failure_that_is_noted(place: Place) -> None:
    place.incident()
    place.watch("--once", "--act")
    place.cluster.refuse(1)
    done = place.ask("clear", "n1", "--why", "repaired")
    assert done.exit_code == 1
    assert "refuses" in done.output
    assert place.asked("history", "--node", "n1")["entries"][-1]["what"] == "clear failed"
    assert place.ask("clear", "n1", "--why", "repaired").exit_code == 0


def test_quarantines_are_cleared_when_asked_for(place: Place) -> None:
    place.incident()
    place.watch("--once", "--act")
    quarantine = RunFiles(place.run_dir).quarantine
    quarantine.deny_devices(["GPU-n1-0", "GPU-n2-0"], node="n1", reason="x")
    quarantine.deny_node("n3", reason="x")
    quarantine.strike("GPU-n1-1", incident="i", node="n1", persistence="transient")
    told = " ".join(place.ask("clear", "n1", "--why", "repaired").stdout.split())
    assert "--quarantine" in told
    assert f"bitwitness quarantine clear {place.run_dir} GPU-n1-0 GPU-n1-1 GPU-n2-0 --reason ..." in told
    assert len(quarantine.read().names()) == 4
    done = place.asked("clear", "n1", "--why", "repaired", "--quarantine")
    assert (len(done["quarantines"]), done["stays"]) == (3, [])
    assert quarantine.read().names() == ["n3"]
    assert "quarantine" not in place.ask("clear", "n1", "--why", "repaired").stdout
    quarantine.path.write_text("{")
    for more in ((), ("--quarantine",)):
        done = place.asked("clear", "n1", "--why", "repaired", *more)
        assert "quarantine.json" in done["stays"][0], "it is said, and the node is returned all the same"
