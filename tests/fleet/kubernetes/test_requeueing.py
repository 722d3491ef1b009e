"""What becomes of a job of Kubernetes whose node was taken out: it goes on by its own policy, or a person is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.clusters.kills import Scene
from tests.fleet.kubernetes.conftest import Make
from tests.fleet.kubernetes.server import KubernetesServer
from tests.fleet.kubernetes.test_jobs import condition, pods
from tests.fleet.kubernetes.test_leading import NODES, scene


@pytest.fixture
def play(server: KubernetesServer, make: Make, tmp_path: Path) -> Iterator[Scene]:
    """A controller on three nodes."""
    for node in NODES:
        server.add_node(node)
    with scene(make, tmp_path) as made:
        yield made


def end(play: Scene) -> tuple[str, str]:
    """How the job was left, and why; it is waited for no more."""
    (row,) = play.controller.book.requeues(waiting=False)
    return row.status, row.why


def status(server: KubernetesServer, plural: str, **more: Any) -> None:
    server.change(plural, "ml", "j", lambda found: found["status"].update(more))


@pytest.mark.parametrize("kind", ["job", "pytorchjob"])
@pytest.mark.parametrize("code", [160, 3])
def test_a_job_that_fails_for_good_is_not_told_as_started_again(
    server: KubernetesServer, play: Scene, kind: str, code: int
) -> None:
    server.add(f"{kind}s", "ml", "j", spec={}, status={"conditions": [condition("Running")], "failed": 1})
    pods(server, kind, "n0", "n1")
    play.incident("n1", scheduler_job=f"kubernetes:ml/{kind}/j")
    play.rounds(3)
    server.remove("pods", "ml", "j-1")
    server.add_pod("j-1", "n1", labels={}, phase="Failed", exit_code=code)
    play.rounds(3)  # the others are still shutting down
    assert play.controller.book.requeues(), "it is waited for"
    for name in ("j-0", "j-1"):
        server.remove("pods", "ml", name)
    labels = {"job": "batch.kubernetes.io/job-name", "pytorchjob": "training.kubeflow.org/job-name"}
    server.add_pod("j-1", "n1", labels={labels[kind]: "j"}, phase="Failed", exit_code=code)
    failed = condition("Failed", reason="BackoffLimitExceeded", message="too many")
    status(server, f"{kind}s", conditions=[failed], failed=5)
    play.rounds(3)
    how, why = end(play)
    assert how == "given up"
    assert ("BackoffLimitExceeded" if code == 160 else "a person must look") in why
    assert any("is NOT started again" in one.subject for one in play.listener.got)


def test_a_job_that_goes_on_by_itself_is_told_as_that(server: KubernetesServer, play: Scene) -> None:
    server.add("pytorchjobs", "ml", "j", spec={}, status={"conditions": [condition("Running")]})
    pods(server, "pytorchjob", "n0", "n1")
    play.incident("n1", scheduler_job="kubernetes:ml/pytorchjob/j")
    play.rounds(3)
    for name in ("j-0", "j-1"):
        server.remove("pods", "ml", name)
    pods(server, "pytorchjob", "n0", "n2")
    play.rounds(4)
    assert play.controller.book.requeues(), "not at once"
    play.rounds(8)
    how, why = end(play)
    assert how == "done"
    assert "runs on without n1" in why


def test_a_job_set_counts_its_restarts(server: KubernetesServer, play: Scene) -> None:
    server.add("jobsets", "ml", "j", spec={}, status={"conditions": [], "restarts": 1})
    pods(server, "jobset", "n0", "n1")
    play.incident("n1", scheduler_job="kubernetes:ml/jobset/j")
    play.rounds(2)
    status(server, "jobsets", restarts=2)
    play.rounds(2)
    assert end(play)[0] == "done"
