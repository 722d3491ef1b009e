"""The records of steps in rank 0's journal: true to what was trained, rare, and never in the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwitness import Policy
from bitwitness.guard.guard import Guard
from bitwitness.guard.job import Step
from bitwitness.guard.metrics import Metrics
from bitwitness.runfiles import RunFiles

Loss = Callable[[Any, Any], Tensor]


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


class Job:
    """A job of one process, and what its journal says of the steps."""

    def __init__(self, folder: Path, loss: Loss = squares, scaler: bool = False, **policy: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0) if scaler else None
        self.run_dir = folder
        self.guard = Guard(
            self.model, self.optimizer, loss, run_dir=folder, policy=Policy(**policy), scaler=self.scaler
        )

    def batches(self, count: int) -> list[Tensor]:
        return [torch.randn(2, 4) for _ in range(count)]

    def records(self) -> list[dict[str, Any]]:
        self.guard.close()
        return [one for one in RunFiles(self.run_dir).read_journal(0) if one["kind"] == "steps"]


def steps_of(records: list[dict[str, Any]]) -> list[int]:
    return [step for one in records for step in range(one["first"], one["last"] + 1)]


@pytest.mark.parametrize("unscaled", ["never", "by step()", "by the loop"])
def test_the_record_is_what_the_loop_sees(tmp_path: Path, unscaled: str) -> None:
    """Mean of the micro-batches' losses; the norm without the scale, whoever takes it out."""
    job = Job(tmp_path, scaler=unscaled != "never", audit="off")
    norms, losses = [], []
    for _ in range(5):
        batches = job.batches(2)
        seen = [
            float(job.guard.forward_backward(one, last=last)) for one, last in zip(batches, (False, True), strict=True)
        ]
        gradients = [parameter.grad.clone() for parameter in job.model.parameters() if parameter.grad is not None]
        scale = job.scaler.get_scale() if job.scaler is not None else 1.0
        norms.append(float(torch.nn.utils.get_total_norm(gradients)) / scale)
        losses.append(sum(seen) / 2)
        if unscaled == "by the loop":
            assert job.scaler is not None
            job.scaler.unscale_(job.optimizer)
            assert job.guard.verify_gradients()
            job.scaler.step(job.optimizer)
            job.scaler.update()
            job.optimizer.zero_grad()
            job.guard.verify_weights()
        else:
            job.guard.step(max_grad_norm=1.0)
    records = job.records()
    assert steps_of(records) == list(range(5))
    weights = [one["last"] - one["first"] + 1 for one in records]
    for name, expected in (("loss", losses), ("norm", norms)):
        mean = sum(one[name] * weight for one, weight in zip(records, weights, strict=True)) / 5
        assert mean == pytest.approx(sum(expected) / 5, rel=1e-6)
        assert min(one[f"{name}_low"] for one in records) == pytest.approx(min(expected), rel=1e-6)
        assert max(one[f"{name}_high"] for one in records) == pytest.approx(max(expected), rel=1e-6)
    assert {one["clock"] for one in records} == {"host"}
    assert {name for one in records for name in one["cost"]} == {"guard", "numerics", "replay", "replicas"}
    assert all(one["nonfinite"] == 0 for one in records)
    assert all(0 < sum(one["cost"].values()) <= one["seconds"] for one in records)


def test_what_is_not_finite_is_counted_and_in_no_mean(tmp_path: Path) -> None:
    factors = [1.0, math.nan, 1.0, math.inf]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squares(model, batch) * factors[0]

    job = Job(tmp_path, loss, on_detection="record", audit="off")
    while factors:
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        job.guard.forward_backward(job.batches(1)[0])
        job.guard.step()
        with torch.no_grad():
            for parameter, value in zip(job.model.parameters(), before, strict=True):
                parameter.copy_(value)
        factors.pop(0)
    records = job.records()
    assert steps_of(records) == list(range(4))
    assert sum(one["nonfinite"] for one in records) == 2
    assert all(one["loss"] is None or math.isfinite(one["loss"]) for one in records)
    assert any(one["loss"] is not None for one in records)


def test_about_one_a_second(tmp_path: Path) -> None:
    job = Job(tmp_path, audit="off", check_every=1000)
    batch = job.batches(1)[0]
    begin = time.monotonic()
    for _ in range(200):
        job.guard.forward_backward(batch)
        job.guard.step()
    seconds = time.monotonic() - begin
    records = job.records()
    assert steps_of(records) == list(range(200))
    assert len(records) <= seconds + 2
    assert sum(one["seconds"] for one in records) == pytest.approx(seconds, rel=0.2, abs=0.1)


def test_a_device_that_does_not_tell_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA its events cannot be made: that is what a broken clock looks like."""
    if torch.cuda.is_available():
        pytest.skip("this device tells")
    metrics = Metrics(torch.device("cuda"), reports=True)
    for index in range(3):
        metrics.took("guard", metrics.begins())
        metrics.took("numerics", metrics.mark())
        metrics.step_ended(Step(index, False, 0, loss=1.0, norm=2.0))
    record = metrics.take()
    assert record is not None
    assert (record["first"], record["last"], record["loss"], record["norm"]) == (0, 2, 1.0, 2.0)
    assert (record["cost"], record["clock"]) == ({}, "device")
    assert len([one for one in caplog.records if "the device's clock failed" in one.getMessage()]) == 1
    assert metrics.take() is None


def test_numbers_that_no_sum_could_hold() -> None:
    metrics = Metrics(torch.device("cpu"), reports=True)
    for index in range(4):
        metrics.step_ended(Step(index, False, 0, loss=1.7e308, norm=None))
    record = metrics.take()
    assert record is not None
    assert record["loss"] == pytest.approx(1.7e308)
    assert (record["norm"], record["nonfinite"], record["cost"]) == (None, 0, {})


def test_the_other_ranks_keep_nothing() -> None:
    metrics = Metrics(torch.device("cpu"), reports=False)
    metrics.took("guard", metrics.begins())
    assert not metrics.step_ended(Step(0, False, 0, loss=1.0, norm=1.0))
    assert metrics.take() is None
