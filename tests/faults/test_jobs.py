"""The jobs that ship: batches are pure functions, options are checked, and what they can be told changes what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.examples.jobs import Trained
from bitwitness.faults.job import KNOWN, CampaignJob, find_factory


def make(name: str, seed: int = 0, **options: Any) -> Trained:
    torch.manual_seed(seed)
    job = find_factory(name)(options, seed, 0, 1)
    assert isinstance(job, CampaignJob)
    assert isinstance(job, Trained)
    return job


def tensors(batch: Any) -> tuple[Tensor, ...]:
    return (batch,) if isinstance(batch, Tensor) else tuple(batch)


def train(job: Trained, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(job.micros):
            loss = job.loss_fn(job.model, job.batch(step, 0, micro))
            (loss if job.scaler is None else job.scaler.scale(loss)).backward()
            total += loss.item()
        losses.append(total)
        for optimizer in job.optimizers:
            if job.scaler is None:
                optimizer.step()
            else:
                job.scaler.step(optimizer)
            optimizer.zero_grad()
        if job.scaler is not None:
            job.scaler.update()
    return losses


@pytest.mark.parametrize("name", KNOWN)
def test_it_learns(name: str) -> None:
    job = make(name, lr=1e-2)
    before = job.evaluate()
    losses = train(job, 30)
    after = job.evaluate()
    assert losses[-1] < losses[0]
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]
    assert job.model.training


@pytest.mark.parametrize("name", KNOWN)
def test_a_batch_is_a_pure_function_and_belongs_to_its_reader(name: str) -> None:
    one, other = make(name, 3), make(name, 3)
    key = (5, 2, 1)
    first = tensors(one.batch(*key))
    kept = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.zero_()  # as a fault in the batch would
    again = tensors(other.batch(*key))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    for different in ((6, 2, 1), (5, 1, 1), (5, 2, 0)):
        assert not torch.equal(tensors(one.batch(*different))[0], kept[0])
    assert not torch.equal(tensors(make(name, 4).batch(*key))[0], kept[0])


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(name: str, precision: str) -> None:
    dtypes = set()
    job = make(name, precision=precision)
    job.model.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    losses = train(job, 2)
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(map(torch.tensor(losses).isfinite().tolist().__getitem__, range(2)))
    assert (job.scaler is not None) == (precision == "fp16")


def test_accumulated_micro_batches_are_averaged() -> None:
    whole, parts = make("mlp"), make("mlp", accumulate=2)
    assert parts.micros == 2
    halves = [parts.batch(0, 0, micro) for micro in range(2)]
    for half in halves:
        parts.loss_fn(parts.model, half).backward()
    whole.loss_fn(whole.model, [torch.cat(both) for both in zip(*halves, strict=True)]).backward()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_activation_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        job = make("language", blocks=1, width=16, checkpointing=checkpointing, dropout=0.1)
        torch.manual_seed(1)
        job.loss_fn(job.model, job.batch(0, 0, 0)).backward()
        gradients.append([parameter.grad for parameter in job.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_digits_with_and_without_batch_normalisation() -> None:
    def kinds(job: Trained) -> set[str]:
        return {type(module).__name__ for module in job.model.modules()}

    assert "BatchNorm2d" in kinds(make("digits"))
    assert "BatchNorm2d" not in kinds(make("digits", batch_norm=False))


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "SGD"), ("adam", "Adam"), ("adamw", "AdamW")])
def test_optimizers(optimizer: str, kind: str) -> None:
    assert type(make("mlp", optimizer=optimizer).optimizers[0]).__name__ == kind


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widht": 3}, "no option widht"),
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"optimizer": "sgdm"}, "adamw, adam, sgd"),
        ({"batch": "8"}, "a number"),
        ({"batch": 2.5}, "a number"),
        ({"batch": 0}, "positive"),
        ({"lr": -1.0}, "positive"),
        ({"compile": 1}, "true or false"),
        ({"width": 30}, "multiple"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make("language", **options)


def test_what_a_job_prepares_is_loaded_once() -> None:
    for name in ("language", "digits"):
        prepare: Callable[[], object] = getattr(find_factory(name), "prepare")  # noqa: B009  (no attribute of a function's type)
        assert prepare() is prepare()
