"""A console over real files, served on loopback: runs of every kind that a page must tell apart, and a fleet that waits for an answer.

One run is a real guarded job that was hit: the demo that `.ci/run` has just run, or a small one of three ranks. The others are
written as a guard writes them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.evidence import Observation, Verdict
from bitwitness.fleet.serving import Server
from bitwitness.policy import Policy
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.journal import Journal
from bitwitness.store import queries
from bitwitness.store.database import Database
from bitwitness.store.importing import Importer
from bitwitness.web import links
from bitwitness.web.app import create
from bitwitness.web.settings import Settings
from bitwitness.web.users import OneToken
from tests.cli.samples import BAD, GOOD, STEP, topology, write
from tests.fleet.rehearsal import Rehearsal

HOSTILE = "gpu-7<img src=x onerror=alert(1)>\"'><script>document.title='ran'</script>{{7*7}}\u202e"
"""Of a node, as a job could call it."""
CHECKS = ("numerics", "replay", "replicas")


class Training:
    """A run whose journals grow when a test says so, as those of a guard do once a second."""

    def __init__(self, run_dir: Path, ranks: int = 4) -> None:
        self.step, self._ranks = 0, ranks
        files = RunFiles(run_dir).create()
        where = topology(2)
        files.write_run(
            {
                "run": "live",
                "started": _now(),
                "world_size": ranks,
                "placement": where.to_json(),
                "policy": Policy().to_json(),
                "scheduler_job": "slurm:4711",
                "bitwitness": "0.1.0",
            }
        )
        self._journals: list[Journal] = [files.journal(rank) for rank in range(ranks)]
        for rank, journal in enumerate(self._journals):
            journal.append("start", {"world_size": ranks, "node": where.node_of(rank)})

    def train(self, steps: int) -> None:
        """So many steps more, all of them checked but the replays, every tenth."""
        first, last = self.step, self.step + steps - 1
        for at in range(first, last + 1, 10):
            loss = 2.0 + 3.0 * math.exp(-at / 80) + 0.1 * math.sin(at)
            self._journals[0].append(
                "steps",
                {
                    "first": at,
                    "last": min(at + 9, last),
                    "loss": loss,
                    "loss_low": loss - 0.1,
                    "loss_high": loss + 0.1,
                    "norm": 1.0 + 1 / (1 + at),
                    "norm_low": 0.9,
                    "norm_high": 2.2,
                    "nonfinite": 0,
                    "seconds": 0.25,
                    "cost": {"numerics": 0.002, "replay": 0.02, "replicas": 0.004, "guard": 0.001},
                    "clock": "host",
                },
            )
        for journal in self._journals:
            for check in CHECKS:
                found: dict[str, Any] = {"check": check, "first": first, "last": last, "outcome": "passed"}
                journal.append("ledger", found)
        self.step = last + 1

    def close(self) -> None:
        for journal in self._journals:
            journal.close()


@dataclass
class Site:
    """A console that is served.

    Attributes:
        address: of it, without a slash at the end.
        folder: in which the runs are.
        token: to sign in with.
        training: a run that grows.
        fleet: a controller with a proposal that waits for an answer.
    """

    address: str
    folder: Path
    token: str
    training: Training
    fleet: Rehearsal
    importer: Importer
    database: Database

    def look(self) -> None:
        """The console looks at the runs again, as it does every two seconds by itself."""
        self.importer.round()

    def run(self, name: str) -> str:
        """The address of a run."""
        (found,) = [one for one in queries.runs_page(self.database, size=100).runs if one.name == name]
        return links.run(found.key)

    def incident(self, of: str) -> str:
        """The address of the only incident of a run."""
        (found,) = [one for one in queries.runs_page(self.database).incidents if one.run_name == of]
        return links.incident(found.run, found.id)


def made(folder: Path, stack: ExitStack) -> Site:
    """Everything, until the stack is left."""
    runs = folder / "runs"
    runs.mkdir()
    _real(runs / "real", folder)
    hostile = topology(3, names=["node-0", HOSTILE, "node-2"])
    write(runs / "nobody", _two_opinions(), hostile)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    training = Training(runs / "live")
    stack.callback(training.close)
    training.train(100)
    (folder / "fleet").mkdir()
    fleet = Rehearsal(folder / "fleet")
    stack.callback(fleet.end)
    fleet.begin(approve=frozenset({"drain", "reboot", "replace"}))
    about = {"cluster": {"kind": "fake", "file": str(folder / "fleet" / "cluster.json")}}
    with fleet.state.change():  # as `fleet watch` leaves it
        fleet.state.set_about(sources=json.dumps(about))
    fleet.clock.wall = datetime.now(UTC)
    fleet.incident()
    fleet.rounds(2)
    database = stack.enter_context(Database(folder / "console.sqlite"))
    importer = Importer(database, [fleet.run_dir], parents=[runs], fleets=[fleet.state.folder])
    importer.round()
    training.train(40)  # it was seen before, so that it is seen to grow
    importer.round()
    users = OneToken()
    settings = Settings(
        allow_actions=True, users=users, fleets=(fleet.state.folder,), parents=(runs,), runs=(fleet.run_dir,)
    )
    app = create(database, settings)
    server = stack.enter_context(Server(app, "127.0.0.1", 0, downloads="/export/"))
    stack.callback(app.state.changes.stop)
    return Site(server.address, runs, users.token, training, fleet, importer, database)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _two_opinions() -> list[Observation]:
    """Replays that disagree, and no run of which repeats: nobody can be named."""
    return [
        Observation("replay", STEP, 2, "original", BAD, (BAD, GOOD, "d" * 24), owner=2, micro=1),
        Observation("replay", STEP, 4, "witness", GOOD, (GOOD, BAD, GOOD), owner=2, micro=1),
    ]


def _real(run_dir: Path, scratch: Path) -> None:
    """A guarded job in which rank 1 computes wrongly for good."""
    given = os.environ.get("BITWITNESS_TEST_DEMO")
    if given:
        shutil.copytree(Path(given) / "guarded", run_dir, ignore=shutil.ignore_patterns("*.pt"))
        return
    from tests.guard.faults import Fault
    from tests.guard.harness import Scenario, launch
    from tests.guard.training import Plan, run

    plan = Plan(steps=4).with_faults(Fault("matmul", 1, 2, persistent=True))
    done = launch([Scenario("hit", run, plan)], 3, scratch / "launch")
    verdict = Verdict.from_json(done.seen("hit")[0]["error"]["verdict"])
    assert verdict.ranks == (1,)
    shutil.copytree(done.folder("hit") / "run", run_dir)
