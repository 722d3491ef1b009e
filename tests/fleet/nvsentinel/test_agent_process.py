"""The agent as a process that is started, killed and told to end, against a real API server and a real gRPC server."""

from __future__ import annotations

import io
import json
import logging
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.fleet.agent_memory import MemoryFile
from bitwitness.fleet.clusters.nvsentinel_fake import FakePlatformConnector, Taken
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.test_agent import LOG, annotation

CONFIG = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "c", "user": {"token": "t"}}],
}


@contextmanager
def caught_log() -> Iterator[io.StringIO]:
    """What a command logs; pytest has the root logger already, so the command adds no handler."""
    text, logger = io.StringIO(), logging.getLogger("bitwitness.fleet.agent_rounds")
    handler, level = logging.StreamHandler(text), logger.level
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Bench:
    """An API server, a platform connector, and agents as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.server = folder, KubernetesServer().start()
        self.server.add_node("n1")
        self.connector = FakePlatformConnector(folder / "s", "n1")
        self.connector.start()
        self.config = self.server.kubeconfig(folder / "config")
        self.running: list[subprocess.Popen[str]] = []

    def end(self) -> None:
        for one in self.running:
            one.kill()
            one.communicate()
        self.connector.stop()
        self.server.stop()

    def command(self, *more: str) -> list[str]:
        script = str(Path(sysconfig.get_path("scripts")) / "bitwitness")
        options = ["--node", "n1", "--nvsentinel", str(self.folder / "s"), "--kubeconfig", str(self.config)]
        return [script, "fleet", "agent", *options, "--state", str(self.folder / "memory"), *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(self.command("--look", "0.02s", *more), stderr=subprocess.PIPE, text=True)
        self.running.append(made)
        return made

    def ask(self, *more: str) -> tuple[int, str]:
        """Exit code and output of a command that ends; in this process, which is faster."""
        with caught_log() as log:
            done = CliRunner().invoke(cli, self.command(*more)[1:])
        return done.exit_code, done.output + log.getvalue()

    def suspect(self, **more: Any) -> None:
        text = annotation(**more)
        self.server.change_node(
            "n1", lambda found: found["metadata"]["annotations"].update({"bitwitness.dev/suspect": text})
        )

    def clear(self) -> None:
        self.server.change_node("n1", lambda found: found["metadata"]["annotations"].pop("bitwitness.dev/suspect"))

    def until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.connector.taken
            time.sleep(0.005)

    def remembers(self, healthy: bool) -> bool:
        said = MemoryFile(self.folder / "memory", "n1").load().memory.said
        return said is not None and said.healthy == healthy

    def taken(self) -> list[Taken]:
        return self.connector.taken


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    yield made
    made.end()


def test_a_process_that_is_killed_at_any_instant_tells_each_transition(bench: Bench) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    agent = bench.start()
    for healthy in (False, True):
        bench.server.requests.clear()
        bench.until(lambda: bench.server.requests != [])
        bench.clear() if healthy else bench.suspect()
        time.sleep(chance.random() * 0.06)  # anywhere in a round
        agent.kill()
        agent.wait()
        agent = bench.start()
        bench.until(lambda healthy=healthy: bench.remembers(healthy))  # type: ignore[misc]
    told = [one.healthy for one in bench.taken()]
    assert told in ([False, True], [False, False, True], [False, True, True], [False, False, True, True]), (
        f"seed {seed}"
    )


def test_a_process_outlives_what_it_needs_and_ends_by_sigterm(bench: Bench) -> None:
    bench.connector.stop()
    bench.suspect()
    agent = bench.start("--signals", str(bench.folder / "absent"))
    assert agent.stderr is not None
    said = ""
    while "UNAVAILABLE" not in said or "absent/n1.json" not in said:
        line = agent.stderr.readline()
        assert line, said  # it has ended
        said += line
    bench.connector.start()
    bench.until(lambda: len(bench.taken()) == 1)
    bench.until(lambda: bench.remembers(healthy=False))
    assert bench.ask("--check")[0] == 0
    agent.send_signal(signal.SIGTERM)
    said += agent.communicate(timeout=20)[1]
    assert agent.returncode == 0, said
    assert said.count("UNAVAILABLE") <= 2  # when it begins, and when it is over
    assert "this is over" in said
    assert [one.healthy for one in bench.taken()] == [False]


def test_once_and_check(bench: Bench) -> None:
    assert "never seen" in bench.ask("--check")[1]
    bench.connector.stop()  # nobody would hear what there may be to tell
    code, said = bench.ask("--once")
    assert (code, "there is no socket" in said) == (1, True)
    assert "never reached" in bench.ask("--check")[1]
    bench.connector.start()
    bench.suspect(execute=True)
    code, said = bench.ask("--once", "--strategy", "EXECUTE_REMEDIATION", "--action", "REPLACE_VM")
    assert (code, "NVSentinel was told, to be acted upon" in said) == (0, True)
    (event,) = bench.taken()
    assert (event.strategy, event.action, event.entities) == (
        "EXECUTE_REMEDIATION",
        "REPLACE_VM",
        (("GPU_UUID", "GPU-1"),),
    )
    assert {(method, path) for method, path, _ in bench.server.requests} == {("GET", "/api/v1/nodes/n1")}
    assert bench.ask("--once")[0] == 1  # it may only have stored what NVSentinel is asked to act upon
    code, said = bench.ask("--check")
    assert (code, "Start the agent with --strategy" in said) == (1, True)
    assert bench.ask("--once", "--strategy", "EXECUTE_REMEDIATION")[0] == 0
    bench.server.forbid("get", "nodes")
    code, said = bench.ask("--once")
    assert (code, "what is missing is a rule (ClusterRole" in said) == (1, True)
    assert bench.ask("--check")[0] == 0  # it was seen a moment ago


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--nvsentinel SOCKET, --signals DIR, or both"),
        (["--nvsentinel", "s"], "absolute path"),
        (["--signals", "d", "--strategy", "EXECUTE_REMEDIATION"], "--strategy is for NVSentinel"),
        (["--nvsentinel", "/s", "--from", "f"], "--from is for the signals"),
        (["--nvsentinel", "/s", "--check"], "--check needs --state"),
        (["--signals", "d", "--node", "../x"], "no name of a node"),
        (["--signals", "d", "--every", "0"], "above 0"),
        (["--signals", "d", "--look", "soon"], "no time"),
        (["--nvsentinel", "/s", "--action", "NONE"], "NONE"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(json.dumps(CONFIG))
    done = CliRunner().invoke(cli, ["fleet", "agent", "--kubeconfig", str(config), *options])
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())


def test_signals_alone_need_no_extra(tmp_path: Path) -> None:
    log = tmp_path / "messages"
    log.write_text(LOG)
    words = ["fleet", "agent", "--node", "n1", "--signals", str(tmp_path), "--from", str(log), "--once"]
    program = (
        "import sys\n"
        "for name in ('grpc', 'google.protobuf', 'kubernetes', 'urllib3', 'httpx'): sys.modules[name] = None\n"
        "from bitwitness.cli.main import cli\n"
        f"cli({words!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [one["code"] for one in json.loads((tmp_path / "n1.json").read_text())] == ["xid:63"]
