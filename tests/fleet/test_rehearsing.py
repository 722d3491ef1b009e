"""A rehearsal finds what would fail at night, changes nothing, and is stopped by nothing that hangs or breaks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters import FakeCluster
from bitwitness.fleet.clusters.base import Act, Call, Check, NodeState
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.identity import write_condemned
from bitwitness.fleet.kept import Book
from bitwitness.fleet.owning import STATE_LOCK, Lock
from bitwitness.fleet.policy import FleetPolicy, QuietHours
from bitwitness.fleet.rehearsing import Part, attempt
from bitwitness.fleet.rehearsing import Result as Rehearsal
from bitwitness.fleet.rehearsing_incident import NOBODY, STORIES, carry_through, judge
from bitwitness.fleet.rehearsing_walk import Asked, rehearse
from bitwitness.fleet.state import State
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Placement, Topology
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.rehearsal import HandClock
from tests.fleet.web import Sink

NODES = ("n0", "n1", "n2", "n3")
POLICY = FleetPolicy(
    act=True, owner="hw", cluster_share=0.5, cluster={"kind": "fake"}, may=frozenset({"drain", "reboot", "replace"})
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "rehearse.md"


class Place:
    """A fake cluster, a run and a state, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, HandClock()
        self.cluster = FakeCluster(NODES, folder / "cluster.json", clock=self.clock.now)
        self.run = folder / "run"
        self.state = folder / "state"
        with State(self.state, clock=self.clock):
            pass
        self.start(NODES)

    def start(self, names: tuple[str, ...]) -> None:
        """The run starts on these nodes."""
        files = RunFiles(self.run).create()
        where = Topology(tuple(Placement(rank, name, f"GPU-{rank}", 0) for rank, name in enumerate(names)))
        files.write_run({"placement": where.to_json()})

    def rehearse(self, policy: FleetPolicy = POLICY, **more: Any) -> Rehearsal:
        cluster = more.pop("cluster", self.cluster)
        return rehearse(Asked(policy, lambda: cluster, self.state, **{"limit": 20.0, **more}), self.clock)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def found(result: Rehearsal, part: str) -> dict[str, Check]:
    """The checks of a part, by what was tried."""
    return {check.what: check for one in result.parts if one.name == part for check in one.checks}


def bad(result: Rehearsal) -> list[str]:
    return [check.what for one in result.parts for check in one.checks if check.outcome == "bad"]


def digests(folder: Path) -> dict[str, str]:
    """Every file below, and what is in it; the fake cluster counts how often it is looked at."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "cluster.json" not in path.name]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def said(result: Rehearsal) -> str:
    return "\n".join(f"{one.outcome} {one.what}: {one.text}" for part in result.parts for one in part.checks)


# All is well ----------------------------------------------------------------------------------------------------------


def test_nothing_is_changed_and_all_calls_are_shown(place: Place) -> None:
    (place.folder / "logs").mkdir()
    (place.folder / "logs" / "n0.log").write_text("Nov 29 11:00:00 n0 kernel: hello\n")
    policy = replace(POLICY, logs=(f"{place.folder}/logs/{{node}}.log",))
    place.cluster.add_job("7", ["n0"])
    before, nodes = digests(place.folder), [place.cluster.look(node) for node in NODES]
    result = place.rehearse(policy, run=place.run, job="fake:7")
    assert digests(place.folder) == before
    assert place.cluster.calls() == []
    assert [place.cluster.look(node) for node in NODES] == nodes
    assert bad(result) == [], said(result)
    assert result.code == 0
    assert result.node == "n0"
    calls = {part.name: [call.words[1] for call in part.calls] for part in result.parts if part.calls}
    assert calls == {
        "act drain": ["drain", "clear"],
        "act reboot": ["reboot", "clear"],
        "act replace": ["replace", "clear"],
        "job": ["requeue", "release"],
    }
    assert all("INVENTED" in str(call) for part in result.parts for call in part.calls if call.words[1] in POLICY.may)
    decided = [one.text for one in found(result, "decision").values()]
    assert [text.rpartition(": ")[2] for text in decided[:3]] == ["drain n0", "reboot n0", "replace n0"]
    assert decided[3] == "nobody is touched, and a person is told"
    assert found(result, "signals")[f"log {place.folder}/logs/n0.log"].outcome == "good"


def test_an_act_of_several_calls_is_shown_whole(place: Place) -> None:
    place.cluster = FakeCluster((), place.folder / "cluster.json", steps=3)
    result = place.rehearse(acts=("replace",))
    (part,) = [one for one in result.parts if one.name == "act replace"]
    words = [call.words[1] for call in part.calls]
    assert words == ["drain", "mark", "mark", "replace", "unmark", "unmark", "clear"]
    assert place.cluster.calls() == []


def test_the_incident_says_that_it_is_invented(place: Place, tmp_path: Path) -> None:
    ending = carry_through(STORIES["drain"], "n2", place.cluster, POLICY, tmp_path / "scene", clock=place.clock)
    (record,) = (tmp_path / "scene").rglob("incident.json")
    content = json.loads(record.read_text())
    assert "INVENTED" in content["invented"]
    assert "INVENTED" in content["verdict"]["reason"]
    assert content["verdict"]["nodes"] == ["n2"]
    assert len(ending.calls) == 1
    assert "drain n2" in ending.calls[0]
    assert place.cluster.calls() == []


# What would fail ------------------------------------------------------------------------------------------------------


def test_names_of_pods_are_found_out(place: Place) -> None:
    place.start(("n0", "train-worker-0", "train-worker-1", "bad name"))
    result = place.rehearse(run=place.run)
    check = found(result, "names")["nodes of the run"]
    assert check.outcome == "bad"
    assert "train-worker-0, train-worker-1, bad name: 1 of 4 are known" in check.text
    assert "NODE_NAME" in check.remedy
    assert result.code == 1


def test_a_right_that_is_missing_is_found_out(place: Place) -> None:
    place.cluster.forbid("replace", "clear")
    result = place.rehearse()
    assert bad(result) == ["right to clear", "right to clear", "right to replace", "right to clear"]
    assert found(result, "act drain")["right to drain"].outcome == "good"
    assert result.summary.startswith("4 would fail")


@pytest.mark.parametrize(
    ("change", "outcome", "words"),
    [
        ({"quiet_hours": (QuietHours.parse("00:00-23:00"),)}, "good", "quiet hours until 2026-11-29 23:00 UTC"),
        ({"protect": ("n*",)}, "bad", "protected by 'n*'"),
        ({"cluster_share": 0.25}, "bad", "1 of 4 nodes are out of service, of 1 that may be"),
        ({"act": False}, "good", "drain n0"),
    ],
)
def test_what_would_be_held_now(place: Place, change: dict[str, Any], outcome: str, words: str) -> None:
    place.cluster.take_out("n3", "bad fan")
    result = place.rehearse(replace(POLICY, **change), node="n0", acts=("drain",))
    check = found(result, "decision")[STORIES["drain"].name]
    assert (check.outcome, words in check.text) == (outcome, True), check


def test_what_the_controller_has_done_within_the_hour_counts(place: Place) -> None:
    with State(place.state, clock=place.clock) as state:
        book = Book(state)
        where = topology(("n8",), per_node=1)
        write(place.folder / "other", 1, verdict(where, (0,)), where)
        ending = carry_through(STORIES["drain"], "n1", place.cluster, POLICY, place.folder / "scene", clock=place.clock)
        with state.change():
            book.add_proposal(ending.proposals[0].proposal, 0)
            kept = book.proposals()[0]
            act = Act("drain", "n1", kept.proposal.incident, "as a test says")
            key = book.add_intent(kept.key, act, NodeState("n1", "in"), [Call(("fake", "drain", "n1"))], "other")
            book.set_started(key, "other")
            book.set_outcome(key, "done", "as a test says")
    result = place.rehearse(replace(POLICY, nodes_per_hour=1), node="n0", acts=("drain",))
    check = found(result, "decision")[STORIES["drain"].name]
    assert "1 nodes were touched within the last hour, of 1" in check.text
    assert "until 2026-11-29T13:00:00" in check.text
    assert check.outcome == "good"


@pytest.mark.parametrize("busy", [(), ("acting",)])
def test_what_only_waits_in_the_state_is_not_carried_out(place: Place, busy: tuple[str, ...]) -> None:
    """A controller that observes has proposed so much that the hour would be used up before the invented incident's turn."""
    where = topology(("n1", "n2"), per_node=1)
    observing = replace(POLICY, act=False)
    with State(place.state, clock=place.clock) as state:
        for number, rank in enumerate((0, 1), 1):
            write(place.folder / "other", number, verdict(where, (rank,)), where)
        controller = Controller([place.folder / "other"], state, place.cluster, observing)
        controller.round()
        controller.close()
        book = Book(state)
        assert [one.status for one in book.proposals()] == ["observed", "observed"]
        with state.change():
            for kept in book.proposals() if busy else ():
                act = Act("drain", kept.proposal.node, kept.proposal.incident, "as a test says")
                key = book.add_intent(
                    kept.key, act, NodeState(act.node, "in"), [Call(("fake", "drain", act.node))], "o"
                )
                book.set_started(key, "o")
    before = digests(place.state)
    check = found(place.rehearse(replace(observing, nodes_per_hour=2), node="n3", acts=("drain",)), "decision")
    assert digests(place.state) == before
    text = check[STORIES["drain"].name].text
    if busy:
        assert "2 nodes were touched within the last hour, of 2" in text, "what was really begun counts"
    else:
        assert text.endswith(": drain n3")


def test_a_node_is_chosen_that_can_be_acted_upon(place: Place) -> None:
    place.cluster.take_out("n0", "bad fan")
    assert place.rehearse(replace(POLICY, protect=("n1",)), acts=("drain",)).node == "n2"
    given = place.rehearse(node="n0", acts=("drain",))
    assert found(given, "node")["look at n0"].outcome == "unknown"
    assert "taken out by admin (bad fan)" in found(given, "node")["look at n0"].text
    for node in NODES:
        place.cluster.take_out(node, "bad fan")
    none = place.rehearse(replace(POLICY, cluster_share=1.0))
    assert found(none, "node")["a node"].outcome == "unknown"
    assert "--node" in found(none, "node")["a node"].remedy
    assert found(none, "act drain")["act drain"].text == "not tried: there is no node to rehearse with"
    absent = place.rehearse(node="n9")
    assert found(absent, "node")["look at n9"].outcome == "bad"


def test_what_the_cluster_cannot_do_is_said(place: Place) -> None:
    place.cluster.acts = frozenset({"drain", "clear"})
    result = place.rehearse()
    assert bad(result) == ["reboot", "replace"]
    assert "would only be drained" in found(result, "act replace")["replace"].text
    assert "drain n0, and not replace" in found(result, "decision")[STORIES["replace"].name].text


def test_somebody_who_is_touched_without_being_named_would_be_seen(place: Place, tmp_path: Path) -> None:
    named = carry_through(STORIES["drain"], "n0", place.cluster, POLICY, tmp_path / "one", clock=place.clock)
    nobody = carry_through(NOBODY, "n0", place.cluster, POLICY, tmp_path / "two", clock=place.clock)
    assert judge(NOBODY, nobody, "n0", POLICY).outcome == "good"
    assert nobody.calls == ()
    assert judge(NOBODY, named, "n0", POLICY).outcome == "bad"
    assert judge(STORIES["drain"], named, "n1", POLICY).outcome == "bad"
    assert judge(STORIES["drain"], replace(named, proposals=()), "n0", POLICY).outcome == "bad"


def test_jobs(place: Place) -> None:
    place.cluster.add_job("7", ["n0"], requeueable=False)
    result = place.rehearse(acts=("drain",), job="fake:7")
    assert bad(result) == ["start it again", "go on without the node: 7"]
    assert bad(place.rehearse(acts=("drain",), job="slurm:7")) == ["job slurm:7"]
    assert bad(place.rehearse(acts=("drain",), job="fake:8")) == ["job fake:8"]


# What hangs and what breaks -------------------------------------------------------------------------------------------


class Hanging(FakeCluster):
    """Answers how large it is, and nothing more until it is let go."""

    def __init__(self, path: Path) -> None:
        super().__init__((), path)
        self.free = threading.Event()

    def look(self, node: str) -> NodeState:
        self.free.wait(30)
        raise ClusterError("let go")


def test_a_cluster_that_hangs_hides_nothing_else(place: Place) -> None:
    cluster = Hanging(place.folder / "cluster.json")
    try:
        result = place.rehearse(cluster=cluster, limit=0.3, node="n0")
    finally:
        cluster.free.set()
    assert "did not end within 0.3 s" in found(result, "node")["node"].text
    assert found(result, "decision")["decision"].text.startswith("not tried: the cluster has not answered in time")
    assert found(result, "cluster")["count the nodes"].outcome == "good"
    assert found(result, "state")["lock"].outcome == "good"
    assert "notify" in found(result, "notify")
    assert result.code == 1


def test_a_cluster_that_cannot_be_made_or_breaks_hides_nothing_else(place: Place) -> None:
    def no_cluster() -> FakeCluster:
        raise ClusterError("no such kubeconfig")

    result = rehearse(Asked(POLICY, no_cluster, place.state))
    assert bad(result) == ["cluster"]
    assert found(result, "cluster")["cluster"].text in ("no such kubeconfig", "not tried: there is no cluster to ask")
    assert found(result, "state")["lock"].outcome == "good"

    class Broken(FakeCluster):
        def plan(self, act: Act, state: NodeState) -> tuple[Call, ...]:
            raise KeyError("spec")

    result = place.rehearse(cluster=Broken((), place.folder / "cluster.json"), acts=("drain",))
    check = found(result, "act drain")["plan the drain"]
    assert (check.outcome, check.text) == ("bad", "KeyError: 'spec'")
    assert "mistake in bitwitness" in check.remedy
    assert found(result, "decision")[NOBODY.name].outcome == "good"


def test_a_cluster_that_cannot_be_reached(place: Place) -> None:
    place.cluster.unreachable()
    result = place.rehearse(node="n0")
    assert found(result, "cluster")["count the nodes"].outcome == "bad"
    assert "reaches the cluster" in found(result, "cluster")["count the nodes"].remedy
    assert found(result, "state")["lock"].outcome == "good"


def test_a_part_that_raises_is_a_finding() -> None:
    def breaks() -> Part:
        raise RuntimeError("as a test says\nin two lines")

    part, hung = attempt("x", breaks, 5)
    assert (part.checks[0].outcome, part.checks[0].text, hung) == (
        "bad",
        "RuntimeError: as a test says in two lines",
        False,
    )


# Signals --------------------------------------------------------------------------------------------------------------


def test_logs_that_are_absent_closed_or_empty(place: Place) -> None:
    folder = place.folder / "logs"
    folder.mkdir()
    (folder / "empty-n0").touch()
    (folder / "dir-n0").mkdir()
    os.mkfifo(folder / "dir-n0" / "fifo")
    logs = tuple(f"{folder}/{name}" for name in ("none-{node}", "empty-{node}", "dir-{node}"))
    checks = found(place.rehearse(replace(POLICY, logs=logs), node="n0", acts=("drain",)), "signals")
    assert [checks[f"log {one.replace('{node}', 'n0')}"].outcome for one in logs] == ["bad", "unknown", "bad"]
    assert "no regular file" in checks[f"log {folder}/dir-n0"].text


def test_no_signals_are_no_sign_of_health(place: Place) -> None:
    checks = found(place.rehearse(node="n0", acts=("drain",), run=place.run), "signals")
    assert {one.outcome for one in checks.values()} == {"unknown"}
    assert f"this host is {socket.gethostname()}" in checks["driver of n0"].text


def _prometheus(answer: str) -> Callable[[], Iterator[str]]:
    def running() -> Iterator[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - so named there
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    return running


def test_prometheus(place: Place) -> None:
    series = {
        "metric": {"__name__": "DCGM_FI_DEV_XID_ERRORS", "UUID": "GPU-a", "Hostname": "n0", "gpu": "0"},
        "values": [[NOW.timestamp(), "0"]],
    }
    data = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    empty = {"status": "success", "data": {"resultType": "matrix", "result": []}}
    for answer, outcome in ((json.dumps(data), "good"), (json.dumps(empty), "unknown"), ("<html>", "bad")):
        for address in _prometheus(answer)():
            checks = found(place.rehearse(replace(POLICY, metrics=address), node="n0", acts=("drain",)), "signals")
            assert checks[f"Prometheus {address}"].outcome == outcome, checks
    gone = "http://127.0.0.1:1"
    checks = found(place.rehearse(replace(POLICY, metrics=gone), node="n0", acts=("drain",)), "signals")
    assert checks[f"Prometheus {gone}"].outcome == "bad"


# People and files -----------------------------------------------------------------------------------------------------


def test_people_are_told_that_it_is_a_rehearsal(place: Place) -> None:
    with Sink().running() as sink:
        notify = ({"kind": "webhook", "name": "hook", "url": sink.address},)
        quiet = place.rehearse(replace(POLICY, notify=notify), acts=("drain",))
        assert found(quiet, "notify")["tell hook"].outcome == "unknown"
        assert sink.got == []
        loud = place.rehearse(replace(POLICY, notify=notify), acts=("drain",), tell=True)
        assert found(loud, "notify")["tell hook"].outcome == "good"
        ((_, content),) = sink.got
        assert json.loads(content)["subject"].startswith("REHEARSAL")
        sink.statuses = [500]
        refused = place.rehearse(replace(POLICY, notify=notify), acts=("drain",), tell=True)
        assert found(refused, "notify")["tell hook"].outcome == "bad"
    broken = ({"kind": "webhook", "name": "hook", "url": "http://127.0.0.1:1"}, {"kind": "pigeon"})
    result = place.rehearse(replace(POLICY, notify=broken), acts=("drain",), tell=True)
    assert bad(result) == ["[[notify]] number 2", "tell hook"]


def test_a_controller_that_runs_is_good(place: Place) -> None:
    lock = Lock(place.state / STATE_LOCK, "a test")
    try:
        before = digests(place.folder)
        check = found(place.rehearse(acts=("drain",)), "state")["lock"]
        assert digests(place.folder) == before
    finally:
        lock.release()
    assert (check.outcome, f"pid {os.getpid()}" in check.text) == ("good", True)
    assert found(place.rehearse(acts=("drain",)), "state")["lock"].text.startswith("free")


def test_the_state_of_a_controller_that_writes_is_left_alone(place: Place) -> None:
    with State(place.state, clock=place.clock) as state:
        with state.change():
            state.note("started", "a controller, as a test says")
        before = digests(place.folder)
        assert any(name.endswith("-wal") for name in before)
        result = place.rehearse(acts=("drain",))
        assert found(result, "state")["state.db"].outcome == "good"
        after = digests(place.folder)
        assert {name for name in before if before[name] != after[name]} <= {f"{place.state}/state.db-shm"}
        assert before.keys() == after.keys()
        with state.change():
            state.note("stopped", "and goes on")


def test_a_state_that_cannot_be_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.state / "state.db").write_bytes(b"no database")
    result = place.rehearse(acts=("drain",))
    assert found(result, "state")["state.db"].outcome == "bad"
    assert found(result, "decision")["decision"].outcome == "bad"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert found(place.rehearse(acts=("drain",)), "state")[f"folder {place.state}"].outcome == "bad"


def test_what_nodes_must_be_able_to_read(place: Place) -> None:
    shared = place.folder / "shared"
    shared.mkdir(mode=0o755)
    with State(place.state, clock=place.clock) as state, state.change():
        state.set_about(publish=str(shared))
    write_condemned(shared / "condemned.json", [], mode=0o644)
    (shared / "condemned.json").chmod(0o600)
    result = found(place.rehearse(acts=("drain",)), "state")
    assert result[f"published in {shared}"].outcome == "good"
    assert result["condemned devices"].outcome == "bad"
    (shared / "condemned.json").chmod(0o644)
    shared.chmod(0o700)
    result = found(place.rehearse(acts=("drain",)), "state")
    assert result[f"published in {shared}"].remedy == f"chmod 755 {shared}"
    assert result["condemned devices"].outcome == "good"
    other = found(place.rehearse(acts=("drain",), publish=place.folder / "none"), "state")
    assert other[f"published in {place.folder / 'none'}"].outcome == "bad"


# The command ----------------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, ["fleet", "rehearse", *words], catch_exceptions=False)


def policy_file(place: Place, text: str = "") -> Path:
    file = place.folder / "fleet.toml"
    cluster = f'[cluster]\nkind = "fake"\nfile = "{place.folder}/cluster.json"\n'
    file.write_text(f'act = true\nowner = "gpu-ops"\ncluster_share = 0.5\n{text}\n{cluster}')
    return file


def test_the_command_and_its_exit_codes(place: Place) -> None:
    file = policy_file(place)
    words = ("--policy", str(file), "--state", str(place.state))
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["bad"] == 0
    assert record["node"] == "n0"
    assert record["good"] + record["unknown"] == sum(len(part["checks"]) for part in record["parts"])
    place.cluster.forbid("drain")
    done = call(*words)
    assert done.exit_code == 1
    assert "bad right to drain" in re.sub(" +", " ", done.output)
    assert "1 would fail, " in done.output
    assert "-> have it allowed" in done.output
    assert place.cluster.calls() == []


@pytest.mark.parametrize(
    "words",
    [
        ("--node", "-n1"),
        ("--job", "7"),
        ("--run", "{folder}/none"),
        ("--act", "explode"),
        ("--policy", "{folder}/none.toml"),
    ],
)
def test_what_makes_no_sense_ends_with_2(place: Place, words: tuple[str, str]) -> None:
    option, value = words
    given = ["--policy", str(policy_file(place)), "--state", str(place.state)]
    done = call(*given, option, value.replace("{folder}", str(place.folder)))
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


# The documentation ----------------------------------------------------------------------------------------------------


def example(folder: Path) -> str:
    """What the example of the documentation prints: a run that goes by the names of pods, and a right that is missing."""
    text = DOCS.read_text(encoding="utf-8")
    (policy,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (line,) = re.findall(r"^\$ (bitwitness fleet rehearse --policy .*)$", text, re.MULTILINE)
    nodes = [f"gpu-{number:02}" for number in range(1, 9)]
    cluster = FakeCluster(nodes, folder / "cluster.json")
    cluster.add_job("4711", ["gpu-03"])
    cluster.take_out("gpu-01", "bad fan", "anna")
    cluster.forbid("replace")
    where = Topology((Placement(0, "gpu-03", "GPU-3", 0), Placement(1, "train-worker-1", "GPU-4", 0)))
    RunFiles(folder / "run-42").create().write_run({"placement": where.to_json()})
    (folder / "logs").mkdir()
    (folder / "logs" / "gpu-03.log").write_text("Nov 29 11:00:00 gpu-03 kernel: hello\n")
    stamp = datetime(2026, 11, 29, 11, tzinfo=UTC).timestamp()
    os.utime(folder / "logs" / "gpu-03.log", (stamp, stamp))
    (folder / "fleet.toml").write_text(policy, encoding="utf-8")
    with State(folder / "state"):
        pass
    with contextlib.chdir(folder):
        done = CliRunner().invoke(cli, line.split()[1:], catch_exceptions=False)
    assert done.exit_code == 1
    assert cluster.calls() == []
    shown = done.output.replace(f"this host is {socket.gethostname()}", "this host is head")
    shown = re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{6}", "20261129T120000Z-4be1d2", shown)
    shown = re.sub(r"within \d+\.\d s", "within 0.1 s", shown)
    return f"$ {line}\n" + "\n".join(text.rstrip() for text in shown.splitlines()) + "\n"


def test_the_example_is_what_it_prints(tmp_path: Path) -> None:
    shown = example(tmp_path)
    assert f"```console\n{shown}```" in DOCS.read_text(encoding="utf-8"), shown
