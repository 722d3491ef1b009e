"""What a guard makes of pods: one machine has one name, and a pod that comes again is in the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitwitness
from bitwitness.errors import ConfigurationError
from bitwitness.guard import start
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.label import Label
from bitwitness.topology import Placement, Topology

MACHINE = "5f0a6b6e-8a5b-4f0c-9d0c-0c5d5d2b7a11"


def facts(*where: tuple[str, str]) -> list[dict[str, Any]]:
    """What ranks say of themselves: of each its node and its machine."""
    return [
        {
            "rank": rank,
            "node": node,
            "device": f"GPU-{rank}",
            "model": "H",
            "software": "2",
            "pod": f"lab/t-{rank}",
            "machine": machine,
        }
        for rank, (node, machine) in enumerate(where)
    ]


def test_two_names_of_one_machine_are_refused_with_the_remedy() -> None:
    other = MACHINE[::-1]
    with pytest.raises(ConfigurationError) as caught:
        start.place(facts(("pod_t-0", MACHINE), ("pod_t-1", other), ("pod_t-2", MACHINE)))
    said = str(caught.value)
    assert "ranks 0 and 2 are on one machine" in said
    assert "'pod_t-0' and 'pod_t-2'" in said
    assert "fieldPath: spec.nodeName" in said
    assert "BITWITNESS_NODE" in said


@pytest.mark.parametrize(
    "where",
    [
        [("a", MACHINE), ("a", MACHINE), ("b", MACHINE[::-1])],  # two pods of one node that know its name
        [("a", ""), ("b", ""), ("c", "")],  # nodes that are played on one machine have said who they are
        [("a", MACHINE), ("b", ""), ("b", MACHINE[::-1])],
    ],
)
def test_what_is_no_contradiction(where: list[tuple[str, str]]) -> None:
    topology = start.place(facts(*where))
    assert [place.node for place in topology.placements] == [node for node, _ in where]
    assert topology.pods_of(range(3)) == ("lab/t-0", "lab/t-1", "lab/t-2")


def test_facts_of_a_rank_in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BITWITNESS_NODE", "SLURMD_NODENAME", "NODE_NAME", "POD_NAME", "POD_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("HOSTNAME", "train-0")
    monkeypatch.setenv("POD_NAMESPACE", "lab")
    told = start.facts_of_rank(0, torch.device("cpu"))
    assert told["pod"] == "lab/train-0"
    assert told["node"].startswith("pod_")
    assert told["machine"]
    monkeypatch.setenv("BITWITNESS_NODE", "node-0")
    told = start.facts_of_rank(0, torch.device("cpu"))
    assert (told["node"], told["machine"]) == ("node-0", "")


def test_a_run_in_a_pod_says_that_its_node_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("BITWITNESS_NODE", "SLURMD_NODENAME", "NODE_NAME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    told = {"POD_NAME": "train-0-x7k", "POD_NAMESPACE": "lab", "BITWITNESS_JOB": "PyTorchJob/train"}
    for name, value in {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **told}.items():
        monkeypatch.setenv(name, value)
    model = torch.nn.Linear(2, 2)
    guard = bitwitness.Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda module, batch: module(batch).sum(),
        run_dir=tmp_path,
    )
    guard.close()
    record = RunFiles(tmp_path).read_run()
    (limit,) = [one for one in record["limits"] if "which node it runs on is not known" in one]
    assert "lab/train-0-x7k" in limit
    assert "fieldPath: spec.nodeName" in limit
    assert limit in [entry.getMessage() for entry in caplog.records], "it must be said at the start as well"
    assert record["scheduler_job"] == "kubernetes:lab/pytorchjob/train"
    assert record["placement"][0]["pod"] == "lab/train-0-x7k"


def label(placement: list[dict[str, Any]], supervision: str) -> Label:
    nothing: dict[str, Any] = {"passed": {}, "failed": {}, "tensors": {}, "files": {}, "software": {}}
    return Label(
        step=1,
        saved="",
        world_size=len(placement),
        placement=placement,
        incidents=(),
        seed=0,
        read_back="",
        supervision=supervision,
        **nothing,
    )


def test_a_pod_that_came_again_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITWITNESS_SUPERVISION", "s1")
    before = Topology(tuple(Placement(r, f"n{r}", f"GPU-{r}", 0, pod=f"lab/t-{r}-aaaaa") for r in range(3)))
    now = Topology(tuple(Placement(r, f"n{r}", f"GPU-{r}", 0, pod=f"lab/t-{r}-bbbbb") for r in range(3)))
    moved = Topology(tuple(Placement(r, f"n{r + 1}", f"GPU-{r}", 0, pod=f"lab/t-{r}-aaaaa") for r in range(3)))
    older = [{name: value for name, value in one.items() if name != "pod"} for one in before.to_json()]
    assert start.is_same_run(label(before.to_json(), "s1"), now)
    assert start.is_same_run(label(older, "s1"), now), "saved before pods were kept"
    assert not start.is_same_run(label(before.to_json(), "s1"), moved)
    assert not start.is_same_run(label(before.to_json(), "s2"), now)
