"""SageMaker's HyperPod on loopback, for tests: real HTTP and a real botocore client in front of it, and nothing of AWS behind it.

It answers the calls that the adapter makes, and refuses what the service refuses and botocore lets through. Its machines live in
`hyperpod_fake_world`, where a test says what goes wrong. It listens on 127.0.0.1 only, asks for no signature and knows no secret.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from bitwitness.fleet.clusters.base import Census, NodeState
from bitwitness.fleet.clusters.fake import FakeCluster
from bitwitness.fleet.clusters.hyperpod_fake_world import Machine, Refusal, World

_XML = {
    "GetCallerIdentity": (
        '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
        "<Arn>{arn}</Arn><UserId>AROA:fake</UserId><Account>111122223333</Account></GetCallerIdentityResult>"
        "<ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></GetCallerIdentityResponse>"
    ),
    "SimulatePrincipalPolicy": (
        '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/"><SimulatePrincipalPolicyResult>'
        "<IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults></SimulatePrincipalPolicyResult>"
        "<ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></SimulatePrincipalPolicyResponse>"
    ),
}
CALLER = "arn:aws:sts::111122223333:assumed-role/bitwitness/fake"
"""Whoever asks the fake."""


class FakeSageMaker:
    """The API of a world of machines, at an address on loopback.

    Args:
        world: its machines and what goes wrong with them.

    Attributes:
        world: the same; another one may be put in its place.
        url: where it is.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """Variables with which a client asks it, and nothing else: invented credentials, and no question to the host's metadata."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "AKIAFAKEFAKEFAKEFAKE",
            "AWS_SECRET_ACCESS_KEY": "fake",
            "AWS_DEFAULT_REGION": "us-west-2",
            "AWS_REGION": "us-west-2",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FakeNodes(FakeCluster):
    """The scheduler of a world: a fake cluster whose nodes are its machines, and come and go with them.

    On EKS a node goes with its machine and another one comes; on Slurm the node stays, as it was taken out, with another machine.

    Args:
        world: whose machines.
        path, steps: as for `FakeCluster`.
    """

    def __init__(self, world: World, path: Path | None = None, *, steps: int = 1) -> None:
        self.world = world
        super().__init__([self.name_of(one) for one in world.now()], path, steps=steps)
        fresh = FakeCluster(["new"])
        with fresh._changing() as cluster:
            self._new: dict[str, Any] = cluster["nodes"]["new"]
        world.went, world.came, world.rebooted = self._went, self._came, self._booted

    def name_of(self, machine: Machine) -> str:
        """The node that a machine is."""
        return machine.eks if self.world.orchestrator == "eks" else machine.slurm

    def look(self, node: str) -> NodeState:
        """The node now."""
        self.world.now()  # what has happened until now
        return super().look(node)

    def census(self) -> Census:
        """How many nodes there are, and how many are out."""
        self.world.now()
        return super().census()

    def _went(self, machine: Machine) -> None:
        if self.world.orchestrator == "eks":
            with self._changing() as cluster:
                cluster["nodes"].pop(self.name_of(machine), None)

    def _came(self, machine: Machine) -> None:
        if self.world.orchestrator == "eks":
            with self._changing() as cluster:
                cluster["nodes"][self.name_of(machine)] = copy.deepcopy(self._new)
        else:
            self._booted(machine)

    def _booted(self, machine: Machine) -> None:
        with self._changing() as cluster:
            if (node := cluster["nodes"].get(self.name_of(machine))) is not None:
                node["booted"] += "+"


def _handler(fake: FakeSageMaker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body together: apart, the second waits for an acknowledgement

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            target = self.headers.get("X-Amz-Target") or ""
            if target.startswith("SageMaker."):
                self._json(target.removeprefix("SageMaker."), content)
            else:
                self._query(parse_qs(content.decode()))

        def _json(self, operation: str, content: bytes) -> None:
            world = fake.world
            kill = world.killing(operation)
            if kill is not None and kill[0] == "before":
                os.kill(kill[1], signal.SIGKILL)
                self.close_connection = True
                return
            if world.is_away:
                self.close_connection = True
                return
            try:
                status, answer = 200, world.answer(operation, json.loads(content or b"{}"))
            except Refusal as error:
                status, answer = error.status, {"__type": error.code, "message": str(error)}
            if kill is not None:
                os.kill(kill[1], signal.SIGKILL)
            self._send(status, (world.say or json.dumps(answer)).encode(), "application/x-amz-json-1.1")

        def _query(self, form: Mapping[str, list[str]]) -> None:
            world, action = fake.world, form.get("Action", [""])[0]
            service = "sts" if action == "GetCallerIdentity" else "iam"
            if action not in _XML or not world.note(action) or f"{service}:{action}" in world.denied:
                body = f"<ErrorResponse><Error><Code>AccessDenied</Code><Message>{action} is denied</Message></Error></ErrorResponse>"
                self._send(403, body.encode(), "text/xml")
                return
            names = [values[0] for key, values in form.items() if key.startswith("ActionNames.member.")]
            results = "".join(
                f"<member><EvalActionName>{name}</EvalActionName><EvalDecision>"
                f"{'implicitDeny' if name in world.denied else 'allowed'}</EvalDecision></member>"
                for name in names
            )
            self._send(200, _XML[action].format(arn=CALLER, results=results).encode(), "text/xml")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:  # whoever asked was killed
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            """Say nothing."""

    return Handler
