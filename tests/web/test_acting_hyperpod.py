"""Acting from the console on HyperPod: permissions by their names, and exactly one request to SageMaker, whoever clicks how often."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bitwitness.fleet.clusters.base import ActKind
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from bitwitness.fleet.clusters.hyperpod_words import HEALTH_LABEL
from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.state import State
from bitwitness.store.database import Database
from bitwitness.store.tables import controllers
from bitwitness.web import links
from bitwitness.web.settings import Settings
from bitwitness.web.users import UsersFile, add
from tests.fleet.incidents import NOW, topology, verdict, write
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.rehearsal import HandClock
from tests.web.client import Browser, console
from tests.web.test_acting import act, form_of, signed_in

ALL: frozenset[ActKind] = frozenset({"drain", "reboot", "replace"})
exhaustive = pytest.mark.skipif(
    not os.environ.get("BITWITNESS_EXHAUSTIVE"), reason="boto3's clients take long to make; BITWITNESS_EXHAUSTIVE=1"
)
REPLACE, CHECK = "BatchReplaceClusterNodes", "StartClusterHealthCheck"


class Eks:
    """HyperPod on EKS, a controller that asks, and an operator."""

    def __init__(self, stack: ExitStack, folder: Path, fake: FakeSageMaker, server: KubernetesServer) -> None:
        self.clock = HandClock()
        self.world = fake.world = World({"gpu": 4}, self.clock.now)
        server.clear()
        nodes = [one.eks for one in self.world.now()]
        for node in nodes:
            server.add_node(node, labels={HEALTH_LABEL: "Schedulable"})
        self.node, self.machine = nodes[1], self.world.now()[1].id
        settings: dict[str, Any] = {
            "kind": "hyperpod",
            "orchestrator": "eks",
            "cluster_name": "pod",
            "endpoint_url": fake.url,
            "kubernetes": {"kubeconfig": str(server.kubeconfig(folder / "kubeconfig"))},
        }
        self.policy = FleetPolicy(act=True, may=ALL, approve=ALL, cluster_share=1.0, cluster=settings)
        self.run, self.where = folder / "run", topology(nodes, per_node=1)
        self.run.mkdir()
        self.state = stack.enter_context(State(folder / "state", clock=self.clock))
        with self.state.change():
            self.state.set_about(sources=json.dumps({"cluster": settings}))
        self.signals: list[Signal] = []
        cluster = cluster_of(self.policy, [])
        self.controller = Controller([self.run], self.state, cluster, self.policy, read_signals=lambda _: self.signals)
        stack.callback(self.controller.close)
        database = stack.enter_context(Database(folder / "console.db"))
        with database.write() as connection:
            connection.execute(sa.insert(controllers).values(id=1, place="c", path=str(self.state.folder)))
        add(folder / "users.json", "kim", "operator")
        users = UsersFile(folder / "users.json")
        here = stack.enter_context(
            console(database, Settings(allow_actions=True, users=users, fleets=(self.state.folder,)))
        )
        stack.enter_context(here.stack)
        self.kim: Browser = signed_in(here, "kim")

    def incident(self, *signals: Signal) -> None:
        self.signals = list(signals)
        write(self.run, 1, verdict(self.where, (1,)), self.where)


@pytest.fixture
def eks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Eks]:
    with (
        ExitStack() as stack,
        FakeSageMaker(World({"gpu": 1}, lambda: NOW)) as fake,
        KubernetesServer() as server,
    ):
        for name in [one for one in os.environ if one.startswith("AWS_") or one.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield Eks(stack, tmp_path, fake, server)


@exhaustive
def test_a_replacement_is_approved_and_asked_for_once(eks: Eks) -> None:
    memory = Signal("kernel", "xid:95", f"GPU-{eks.node}-0", NOW.isoformat(), "memory", "strong", "bad", host=eks.node)
    eks.incident(memory)
    eks.controller.round()
    address = links.approve("1", 1)
    page = eks.kim.get(address)
    assert page.text.index("permission sagemaker:BatchReplaceClusterNodes") < page.text.index(
        "sagemaker BatchReplaceCluster"
    )
    form = {**form_of(page), "why": "uncorrectable errors"}
    assert [eks.kim.post(address, form).status_code for _ in range(2)] == [200, 200]
    assert eks.world.count(REPLACE) == 0
    for _ in range(3):
        eks.controller.round()
    assert eks.world.asked(REPLACE) == [{"ClusterName": "pod", "NodeIds": [eks.machine]}]


def test_a_health_check_is_asked_for_once(eks: Eks) -> None:
    eks.incident()
    eks.controller.round()
    assert act(eks.kim, links.approve("1", 1), "seen twice").status_code == 200
    for _ in range(2):
        eks.controller.round()
    address = links.health_check(eks.node)
    page = eks.kim.get(address)
    assert "permission sagemaker:StartClusterHealthCheck" in page.text
    form = {**form_of(page), "why": "for the vendor"}
    assert [eks.kim.post(address, form).status_code for _ in range(2)] == [200, 200]
    assert eks.world.count(CHECK) == 1


@exhaustive
def test_what_iam_says_is_shown_and_what_it_does_not_say_is_unknown(eks: Eks) -> None:
    eks.incident()
    eks.controller.round()
    assert act(eks.kim, links.approve("1", 1), "seen twice").status_code == 200
    for _ in range(2):
        eks.controller.round()
    address = links.health_check(eks.node)
    eks.world.denied = {"sagemaker:StartClusterHealthCheck"}
    assert "implicitDeny" in eks.kim.get(address).text
    eks.world.denied = {"iam:SimulatePrincipalPolicy"}
    unknown = eks.kim.get(address).text
    assert "IAM cannot be asked whether" in unknown
    assert ">unknown</b>" in unknown


@exhaustive
def test_a_return_asks_for_what_takes_it_back(eks: Eks) -> None:
    eks.incident()
    eks.controller.round()
    assert act(eks.kim, links.approve("1", 1), "seen twice").status_code == 200
    for _ in range(2):
        eks.controller.round()
    done = act(eks.kim, links.return_node(eks.node), "repaired")
    assert (done.status_code, "is in service again" in done.text) == (200, True)
