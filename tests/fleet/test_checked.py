"""What nobody acts upon, wherever it came from: an incident that contradicts itself, or that only looks like one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.fleet.checked import check_incident
from bitwitness.runfiles import RunFiles
from tests.fleet.incidents import NOW, incident_id, record, topology, verdict
from tests.fleet.rehearsal import Rehearsal

WHERE = topology()
HEALTHY = record(verdict(WHERE, (2,)), WHERE) | {"id": incident_id(1)}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The record with one part changed: `verdict.ranks` or `placement.2.node`."""
    made = record(verdict(WHERE, (2,)), WHERE) | {"id": incident_id(1)}
    *outer, last = path.split(".")
    part: Any = made
    for name in outer:
        part = part[int(name)] if name.isdecimal() else part[name]
    part[last] = value
    return made


def test_what_the_guard_writes_passes() -> None:
    check_incident(HEALTHY, NOW)
    check_incident(record(verdict(WHERE, ()), WHERE) | {"id": incident_id(1)}, NOW)


def test_jobs_and_pods_of_kubernetes_pass() -> None:
    jobs = [
        "kubernetes:a/job/train",
        "kubernetes:team-1/pytorchjob/x.y",
        "kubernetes:a/jobset/t",
        "kubernetes:a/trainjob/t",
    ]
    for job in [*jobs, "slurm:7_3", ""]:
        check_incident(changed("scheduler_job", job), NOW)
    for pod in ("research/train-2-x7k", "", f"{'n' * 63}/{'p' * 253}"):
        check_incident(changed("placement.2.pod", pod), NOW)


WRONG: list[tuple[str, Any, str]] = [
    ("verdict.nodes", ["n3"], "other nodes than those of its ranks"),
    ("verdict.devices", ["GPU-n3-0"], "other devices"),
    ("verdict.devices", [], "other devices"),
    ("verdict.ranks", [-1], "the placement does not have"),
    ("verdict.ranks", [99], "the placement does not have"),
    ("verdict.ranks", [True], "whole number"),
    ("verdict.ranks", [2, 2], "twice"),
    ("verdict.ranks", ["2"], "whole number"),
    ("verdict.ranks", "2", "no list"),
    ("verdict.persistences", ["persistent", "persistent"], "does not say of each"),
    ("verdict.persistence", "always", "none of"),
    ("verdict.kind", "bogus", "unknown kind"),
    ("verdict.status", "clean", "exactly if"),
    ("verdict.step", "x", "whole number"),
    ("verdict.reason", 5, "no text"),
    ("placement.2.node", None, "no name"),
    ("placement.2.node", ["n5"], "no name"),
    ("placement.2.node", 5, "no name"),
    ("placement.2.device", "\ud800", "no name"),
    ("placement.2.device", "GPU\n1", "no name"),
    ("placement.2.rank", "2", "whole number"),
    ("placement", {}, "no list"),
    ("time", "yesterday", "yesterday"),
    ("time", None, "argument must be str"),
    ("time", 12345, "argument must be str"),
    ("time", "2026-11-29T12:00:00", "no zone"),
    ("time", "9999-12-31T23:59:59Z", "more than a day from now"),
    ("time", (NOW + timedelta(days=3)).isoformat(), "more than a day from now"),
    ("time", "0001-01-01T00:00:00Z", "another age"),
    ("scheduler_job", "slurm:1; rm -rf", "no job of a scheduler"),
    ("scheduler_job", 7, "no job of a scheduler"),
    ("scheduler_job", "kubernetes:train", "no job of a scheduler"),
    ("scheduler_job", "kubernetes:a/deployment/train", "no job of a scheduler"),
    ("scheduler_job", "kubernetes:a/job/../../nodes/b", "no job of a scheduler"),
    ("scheduler_job", "kubernetes:a/job/t\n", "no job of a scheduler"),
    ("scheduler_job", "slurm:a/job/t", "no job of a scheduler"),
    ("placement.2.pod", 7, "no name"),
    ("placement.2.pod", "a/b\nc", "no name"),
    ("placement.2.pod", "p" * 400, "no name"),
    ("id", "../../etc", "no id"),
    ("observations", [{"check": "replay"}], "missing"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=lambda value: repr(value)[:40])
def test_what_nobody_acts_upon(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_incident(changed(path, value), NOW)
    assert said in str(caught.value)


def test_a_record_without_a_part() -> None:
    for name in HEALTHY.keys() - {"bitwitness", "policy", "notes", "schema", "scheduler_job"}:
        with pytest.raises(ConfigurationError):
            check_incident({key: value for key, value in HEALTHY.items() if key != name}, NOW)


def test_one_that_is_wrong_stops_no_other(tmp_path: Path) -> None:
    play = Rehearsal(tmp_path)
    written = 0
    for number, (path, value, _) in enumerate(WRONG):
        if path != "id":
            name = incident_id(100 + number)
            try:
                RunFiles(play.run_dir).create().commit_incident(name, changed(path, value) | {"id": name})
            except (RunFilesError, UnicodeError):
                continue  # our own writer refuses it
            written += 1
    play.incident(1, ranks=(1,))
    other = incident_id(7)  # a folder that was copied under another name
    RunFiles(play.run_dir).commit_incident(other, HEALTHY)
    play.rounds(3)
    assert play.cluster.calls() == [("drain", "n1")]
    troubles = play.trail("trouble")
    assert len(troubles) == written + 1
    play.end()
