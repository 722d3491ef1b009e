"""A Slurm that lives in memory and answers scontrol, sinfo and squeue as a real one does, or slurmrestd on loopback.

What it prints is in the form of the recorded outputs in `tests/fleet/slurm/fixtures`; `tests/fleet/slurm/test_real.py` holds
the adapter against real programs.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bitwitness.fleet.clusters.slurm_command import Answer

_BEGAN = datetime(2026, 11, 29, 9, tzinfo=UTC)
VERSION = "v0.0.42"


@dataclass
class Node:
    """One node."""

    flags: set[str] = field(default_factory=lambda: {"IDLE"})
    reason: str = ""
    by: str = ""
    boots: int = 0
    machine: int = 0


@dataclass
class ScriptedSlurm:
    """The cluster.

    Attributes:
        names: of all nodes.
        nodes: by name.
        jobs: by id.
        asked: how many commands and requests came.
        changed: what was done, in order.
        refuses, silent: whether changes are refused, and whether nobody answers.
        config: what `scontrol show config` says.
        level: what sacctmgr says of the user.
    """

    names: Sequence[str]
    nodes: dict[str, Node] = field(default_factory=dict)
    jobs: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: int = 0
    changed: list[tuple[str, str]] = field(default_factory=list)
    refuses: bool = False
    silent: bool = False
    config: dict[str, str] = field(default_factory=dict)
    level: Answer = field(default_factory=lambda: Answer(0, "Administrator\n"))

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """All as at the beginning."""
        self.nodes = {name: Node() for name in self.names}
        self.config = {"SlurmUser": "slurm(64030)", "RebootProgram": "/sbin/reboot", "MinJobAge": "300 sec"}
        self.jobs, self.changed, self.refuses, self.silent = {}, [], False, False

    def __call__(self, words: Sequence[str], timeout: float) -> Answer:
        """Run a command."""
        self.asked += 1
        if self.silent:
            return Answer(1, "", "slurm_load_node error: Unable to contact slurm controller (connect failure)")
        match list(words):
            case ["scontrol", "--all", "show", "node", name]:
                node = self.nodes.get(name)
                return Answer(1, f"Node {name} not found") if node is None else Answer(0, _shown(name, node))
            case ["sinfo", *_] if "--states=idle" in words:
                return Answer(0, "".join(f"{name}\n" for name, one in self.nodes.items() if one.flags == {"IDLE"}))
            case ["sinfo", *_]:
                return Answer(0, "".join(f"{name} {'+'.join(sorted(one.flags))}\n" for name, one in self.nodes.items()))
            case ["scontrol", "shutdown"]:
                self.changed.append(("shutdown", ""))
                return Answer(0, "")
            case ["scontrol", "ping"]:
                return Answer(0, "Slurmctld(primary) at head is UP\n")
            case ["scontrol", "show", "config"]:
                return Answer(0, "".join(f"{key:<24}= {value}\n" for key, value in self.config.items()))
            case ["sacctmgr", *_]:
                return self.level
            case ["squeue", *_]:
                return Answer(0, "")
            case ["scontrol", "--all", "show", "job", name]:
                job = self.jobs.get(name)
                gone = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
                return gone if job is None else Answer(0, _job(name, job))
            case ["scontrol", "update" | "reboot" | "requeuehold" | "release" as what, *rest]:
                return self._change(what, rest)
        return Answer(1, "", f"invalid keyword: {words}")

    def _change(self, what: str, rest: list[str]) -> Answer:
        if self.refuses:
            return Answer(1, "", "slurm_update error: Invalid user id")
        if what == "reboot":
            return self.reboot(rest[-1], rest[-2].removeprefix("reason="))
        pairs = {key.lower(): value for key, _, value in (one.partition("=") for one in rest)}
        name = pairs.get("nodename") or pairs.get("node", "")
        return self.update(name, pairs.get("state", "").upper(), pairs.get("reason", ""))

    def reboot(self, name: str, reason: str) -> Answer:
        """`scontrol reboot ASAP nextstate=DOWN`: it takes no jobs from now on, and is booted when it has none."""
        node = self.nodes[name]
        node.flags |= {"DRAIN", "REBOOT_REQUESTED"}
        node.reason, node.by = reason, "root"
        self.changed.append(("reboot", name))
        return Answer(0, "")

    def update(self, name: str, state: str, reason: str) -> Answer:
        """`scontrol update`, or the request for it."""
        node = self.nodes.get(name)
        if node is None:
            return Answer(1, "", "Invalid node name specified")
        if state in ("DRAIN", "FAIL"):
            node.flags.add(state)
            node.reason, node.by = reason, "root"
        elif state in ("UNDRAIN", "RESUME"):
            node.flags -= {"DRAIN", "FAIL"} | ({"DOWN"} if state == "RESUME" else set())
            node.flags |= {"IDLE"} if not node.flags else set()
            node.reason, node.by = "", ""
        else:
            return Answer(1, "", "Invalid node state specified")
        self.changed.append((reason if reason.startswith("Action:") else state, name))
        return Answer(0, "")

    def finish(self) -> None:
        """Nodes are booted, or exchanged by HyperPod, which takes its words away."""
        for node in self.nodes.values():
            if "REBOOT_REQUESTED" in node.flags:
                node.flags, node.boots = {"DOWN"}, node.boots + 1
            elif "FAIL" in node.flags and node.reason.startswith("Action:"):
                replaced = node.reason == "Action:Replace"
                node.flags, node.reason, node.by = {"IDLE"}, "", ""
                node.boots, node.machine = node.boots + 1, node.machine + replaced

    # slurmrestd -------------------------------------------------------------------------------------------------------

    @contextmanager
    def served(self) -> Iterator[str]:
        """slurmrestd on loopback; its address."""
        world = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                world.asked += 1
                length = int(self.headers.get("Content-Length") or 0)
                content = self.rfile.read(length)
                if world.silent:
                    self.close_connection = True
                    return
                status, record = world.answer(self.command, self.path, json.loads(content) if content else None)
                body = json.dumps(record).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - the name that http.server wants

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - so named there
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """What slurmrestd answers."""
        if path == "/openapi/v3":
            return 200, {"paths": {f"/slurm/{VERSION}/node/{{node_name}}": {}}}
        what, _, name = path.removeprefix(f"/slurm/{VERSION}/").partition("/")
        if what == "nodes":
            return 200, {"nodes": [_record(one, node) for one, node in self.nodes.items()]}
        if what == "job":
            job = self.jobs.get(name)
            return (200, {"jobs": [_job_record(name, job)]}) if job else _error(2017, "Invalid job id specified")
        if what == "node" and method == "GET":
            node = self.nodes.get(name)
            return (200, {"nodes": [_record(name, node)]}) if node else _error(2018, f"Failure to query node {name}")
        if what == "node" and not self.refuses:
            done = self.update(name, body["state"][0], body.get("reason", ""))
            return (200, {"errors": []}) if not done.code else _error(2018, done.err)
        return _error(2002, "Access/permission denied")


def _error(number: int, words: str) -> tuple[int, Any]:
    return 500, {"errors": [{"error_number": number, "error": words, "description": words}]}


def _booted(node: Node) -> datetime:
    return _BEGAN + timedelta(hours=node.boots)


def _shown(name: str, node: Node) -> str:
    lines = [
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1",
        f"   State={'+'.join(sorted(node.flags, key=('IDLE', 'DOWN', 'DRAIN', 'FAIL', 'REBOOT_REQUESTED').index))} Owner=N/A",
        f"   BootTime={_booted(node):%Y-%m-%dT%H:%M:%S} SlurmdStartTime=None InstanceId=i-{name}-{node.machine}",
    ]
    if node.reason:
        lines.append(f"   Reason={node.reason} [{node.by}@2026-11-29T10:00:00]")
    return "\n".join(lines) + "\n"


def _record(name: str, node: Node) -> dict[str, Any]:
    return {
        "name": name,
        "state": sorted(node.flags),
        "reason": node.reason,
        "reason_set_by_user": node.by,
        "boot_time": {"set": True, "infinite": False, "number": int(_booted(node).timestamp())},
        "instance_id": f"i-{name}-{node.machine}",
    }


def _job(name: str, job: dict[str, str]) -> str:
    return (
        f"JobId={name} JobName=train\n   JobState={job['state']} Reason=None Dependency=(null)\n"
        f"   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={job['exit']}\n   NodeList={job['nodes']}\n   ExcNodeList=(null)\n"
    )


def _job_record(name: str, job: dict[str, str]) -> dict[str, Any]:
    code = int(job["exit"].partition(":")[0])
    return {
        "job_id": int(name),
        "job_state": [job["state"]],
        "state_reason": "None",
        "nodes": job["nodes"],
        "excluded_nodes": "",
        "requeue": True,
        "restart_cnt": 0,
        "exit_code": {"return_code": {"set": True, "infinite": False, "number": code}},
    }
