"""The workloads that ship: the same weights and batches for every participant, answers, and options that are read or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bitwitness.compare.workload import Workload, load
from bitwitness.errors import ConfigurationError

CPU = torch.device("cpu")
SMALL = {"width": "8", "blocks": "1", "heads": "2"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(name: str, seed: int = 0, /, **options: str) -> Workload:
    return load(name, SMALL | options)(CPU, seed)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def train(workload: Workload, steps: int) -> float:
    loss = torch.zeros(())
    (optimizer,) = workload.all_optimizers
    for step in range(steps):
        loss = workload.loss_fn(workload.model, workload.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_the_same_weights_whatever_the_seed_and_other_batches(name: str) -> None:
    one, again, other = make(name), make(name), make(name, 1)
    assert torch.equal(flat(one.model), flat(other.model))
    mine, same, reseeded = (torch.utils._pytree.tree_leaves(workload.batch(3))[0] for workload in (one, again, other))
    assert torch.equal(mine, same)
    assert not torch.equal(mine, reseeded)


@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_the_global_generator_is_left_as_it_is(name: str) -> None:
    before = torch.get_rng_state()
    make(name)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_a_training_repeats_bit_for_bit(options: dict[str, str]) -> None:
    one, again = (load("gpt", SMALL | options)(CPU, 0) for _ in range(2))
    assert train(one, 3) == train(again, 3)
    assert torch.equal(flat(one.model), flat(again.model))


def test_bfloat16_is_what_modules_compute_in() -> None:
    workload, seen = make("gpt", dtype="bfloat16"), []
    workload.model.get_submodule("blocks.0.mlp").register_forward_hook(lambda *call: seen.append(call[2].dtype))
    workload.loss_fn(workload.model, workload.batch(0))
    assert seen == [torch.bfloat16]


def test_fine_tuning_begins_with_a_network_that_knows_digits_and_asks_those_that_it_never_saw() -> None:
    workload = load("digits", {})(CPU, 0)
    assert workload.evaluate is not None
    answers = workload.evaluate(workload.model)
    right = sum(a == b for a, b in zip(answers["digits"], answers["digits.right"], strict=True))
    assert len(answers["digits"]) == 297
    assert 0.6 < right / 297 < 0.95, "knows something, and has something to learn"
    assert workload.model.training


@pytest.mark.parametrize(("name", "question"), [("gpt", "next byte"), ("digits", "digits")])
def test_a_model_that_computes_nan_has_no_answer(name: str, question: str) -> None:
    workload = make(name)
    with torch.no_grad():
        next(iter(workload.model.parameters())).fill_(float("nan"))
    assert workload.evaluate is not None
    assert set(workload.evaluate(workload.model)[question]) == {-1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": "wide"}, r"option width of the workload gpt is 'wide': give a whole number"),
        ({"batch": "0"}, "option batch .* whole number from 1 on"),
        ({"dropout": "1"}, "option dropout .* up to but not including 1"),
        ({"lr": "nan"}, "option lr .* a number above 0"),
        ({"dtype": "fp8"}, "option dtype .* float32 or bfloat16"),
        ({"heads": "3"}, "not a multiple of 3 heads"),
    ],
    ids=["word", "zero", "dropout", "lr", "dtype", "heads"],
)
def test_an_impossible_option_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load("gpt", SMALL | options)(CPU, 0)
