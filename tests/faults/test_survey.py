"""What is impossible in a job is found out by looking at the job, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitwitness import ConfigurationError
from bitwitness.faults import survey
from bitwitness.faults.cells import CellSpec
from bitwitness.faults.job import search_path

OPTIONS: dict[str, Any] = {"ranks": 3, "steps": 6, "precision": "bf16"}

IMPOSSIBLE = {
    "fwd_out:7 @ step=2 : n=1 -> zero": "no fwd_out matches '7'",
    "fwd_out:0 @ step=2 : n=1 -> bit=20": "bits 0 to 15",  # under autocast
    "param:0.weight @ step=2 : index=100000 -> sign": "index 100000",
    "momentum_buffer @ step=2 : n=1 -> sign": "keeps no momentum_buffer",
    "rank=3 loss @ step=2 : n=1 -> sign": "there is no rank 3",
    "loss @ step=6 : n=1 -> sign": "there is no step 6",
    "loss @ step=2 micro=1 : n=1 -> sign": "no micro-batch 1",
    "comm.pre @ step=2 : n=1 -> bit=40": "bits 0 to 31",
    "grad_in:0 @ step=2 : n=1 -> zero": "it draws 0, which has no grad_in",  # what the first layer is given needs no gradient
    "buffer @ step=2 : n=1 -> zero": "there is none here",
}
POSSIBLE = (
    "rank=1 fwd_out:* @ step=2 : n=1 -> bit=15",
    "exp_avg:0.weight @ step=2 : n=3 -> sign",
    "rank=2 comm.post @ step=2 : n=1 -> nan",
    "digest @ step=2 : n=1 -> bit=63",
    "input @ step=2 : n=1 -> bit=22",
)


def cells(*lines: str, factory: str = "mlp", **options: Any) -> list[CellSpec]:
    return [
        CellSpec(str(n), "job", factory, {**OPTIONS, **options}, {}, (line,), 0, "fault")
        for n, line in enumerate(lines)
    ]


JOB = "import os\nfrom bitwitness.examples.jobs import mlp as make\nassert 'RANK' not in os.environ\n"


def test_every_impossible_fault_is_named_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that lies in the current folder."""
    (tmp_path / "job_here.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    lines = (*IMPOSSIBLE, *POSSIBLE)
    found = survey.ask(cells(*lines, factory="job_here:make"))
    assert sorted(found, key=int) == [str(n) for n in range(len(IMPOSSIBLE))]
    for number, (line, words) in enumerate(IMPOSSIBLE.items()):
        assert words in found[str(number)], line


def test_a_job_lies_beside_the_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or in the current folder, as above."""
    monkeypatch.setenv("RANK", "7")  # of another job, which a forker does not pass on either
    (tmp_path / "job_beside.py").write_text(JOB)
    asked = cells("loss @ step=2 : all -> sign", factory="job_beside:make")
    with pytest.raises(ConfigurationError, match="job_beside"):  # here: a process of its own takes seconds to start
        survey.problems("job_beside:make", OPTIONS, [("0", asked[0].faults, 0)])
    assert survey.ask(asked, search_path(tmp_path)) == {}


def test_a_job_that_takes_for_ever_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="the job mlp made no step within 0 s"):
        survey.ask(cells(*POSSIBLE), timeout=0.01)


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        ("mlp", {"widht": 3}, "no option widht"),
        ("nosuchmodule:job", {}, "cannot be imported"),
        ("json:loads", {}, "cannot be run: TypeError"),
    ],
)
def test_a_job_that_cannot_be_made_is_an_error(factory: str, options: dict[str, Any], words: str) -> None:
    """Here, since what is told by the process that is asked comes back is shown above."""
    with torch.random.fork_rng(), pytest.raises(ConfigurationError, match=words):
        survey.problems(factory, OPTIONS | options, [("any", POSSIBLE, 0)])
