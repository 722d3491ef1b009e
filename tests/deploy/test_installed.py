"""The controller as its manifest starts it, an incident as the script of a job hands it in, and a node of an API server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from bitwitness.runfiles import RunFiles
from tests.deploy.manifests import EXAMPLES, documents, pods, rendered, the
from tests.fleet.incidents import record, topology, verdict
from tests.fleet.kubernetes.server import KubernetesServer

PROGRAM = str(Path(sys.executable).with_name("bitwitness"))


def started(folder: Path, server: KubernetesServer) -> list[str]:
    """The command of the manifest, with its files in a folder; what an installation would change is changed: it acts."""
    made = rendered("base")
    (container,) = next(pods(the(made, "Deployment", "bitwitness-fleet")))["containers"]
    text = the(made, "ConfigMap", "bitwitness-policy")["data"]["fleet.toml"].replace("act = false", "act = true")
    policy = folder / "fleet.toml"
    policy.write_text(
        f"{text}\nkubeconfig = {json.dumps(str(server.kubeconfig(folder / 'config')))}\n", encoding="utf-8"
    )
    (folder / "inbox").mkdir()
    (folder / "inbox" / "token").write_text("a" * 64, encoding="utf-8")
    (folder / "inbox" / "token").chmod(0o440)  # as Kubernetes makes it for a group
    here = {
        "/var/lib/bitwitness/fleet": str(folder / "state"),
        "/etc/bitwitness/policy/fleet.toml": str(policy),
        "/etc/bitwitness/inbox/token": str(folder / "inbox" / "token"),
        "0.0.0.0:9470": "127.0.0.1:0",
    }
    assert set(here) <= set(container["args"])
    return [PROGRAM, *(here.get(word, word) for word in container["args"])]


def hand_in(folder: Path, port: int) -> int:
    """A job that has found something on rank 1, which is on node n0, and ends with 160."""
    where, now = topology(), datetime.now(UTC)
    name = f"{now:%Y%m%dT%H%M%SZ}-4be1d2"
    files = RunFiles(folder / "runs" / "train").create()
    files.commit_incident(name, record(verdict(where, (1,)), where) | {"id": name, "time": now.isoformat()})
    (folder / "start.sh").write_text(documents(EXAMPLES / "start.yaml")[0]["data"]["start.sh"], encoding="utf-8")
    program = folder / "bin" / "bitwitness"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = run ] && exit 160\nexec {PROGRAM} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "RUN_DIR": str(files.path),
        "BITWITNESS_FLEET": f"http://127.0.0.1:{port}",
        "CREDENTIALS_DIRECTORY": str(folder / "inbox"),
        "POD_NAMESPACE": "research",
        "JOB_COMPLETION_INDEX": "0",
    }
    command = ["/bin/sh", str(folder / "start.sh"), "train.py"]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the script has started, and left


def test_from_a_job_to_a_cordoned_node(tmp_path: Path) -> None:
    with KubernetesServer() as server:
        for node in ("n0", "n1", "n2"):
            server.add_node(node)
        environment = {**os.environ, "CREDENTIALS_DIRECTORY": str(tmp_path / "inbox")}
        log = tmp_path / "log"
        with log.open("w", encoding="utf-8") as file:
            controller = subprocess.Popen(started(tmp_path, server), env=environment, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 60
            port = 0
            while not port:
                assert controller.poll() is None, log.read_text(encoding="utf-8")
                assert time.monotonic() < deadline
                found = re.search(r"listening on 127\.0\.0\.1:(\d+)", log.read_text(encoding="utf-8"))
                port = int(found[1]) if found else 0
            while _health(port) != 200:
                assert controller.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert hand_in(tmp_path, port) == 160
            while not server.node("n0")["spec"].get("unschedulable"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert [server.node(name)["spec"].get("unschedulable") for name in ("n1", "n2")] == [None, None]
            controller.terminate()
            assert controller.wait(timeout=30) == 0
        finally:
            controller.kill()
            controller.wait()


def _health(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return int(answer.status)
    except OSError:
        return 0
