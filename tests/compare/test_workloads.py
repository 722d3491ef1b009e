"""The workloads that ship: the same weights and batches for every participant, answers, and options that are read or refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwitness.compare.users_code import WorkExited, no_exit, said, typed_apart
from bitwitness.compare.workload import Workload, check_parts, load
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


# What a user's file may do ----------------------------------------------------------------------------------------


EXITS = ["sys.exit(7)", "sys.exit(0)", "raise KeyboardInterrupt", "raise BaseException('odd')", "raise GeneratorExit"]


@pytest.mark.parametrize("line", EXITS, ids=["7", "0", "ctrl-c", "base", "generator"])
@pytest.mark.parametrize("where", ["import", "make"])
def test_code_that_would_end_the_process_is_an_error(tmp_path: Path, where: str, line: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        f"import sys\n{line}\n" if where == "import" else f"import sys\ndef make(device, seed):\n    {line}\n"
    )
    with typed_apart(), pytest.raises((ConfigurationError, WorkExited), match="which ends a process") as raised:
        load(f"{file}:make")(CPU, 0)
    assert f"own.py:{2 if where == 'import' else 3}" in said(raised.value)


def test_a_ctrl_c_that_was_typed_is_one() -> None:
    before = signal.getsignal(signal.SIGINT)

    def typed() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), typed_apart(), no_exit():
        typed()
    assert signal.getsignal(signal.SIGINT) == before


def _given(**parts: Any) -> Workload:
    model = torch.nn.Linear(2, 2)
    usual: dict[str, Any] = {"model": model, "optimizers": torch.optim.SGD(model.parameters(), lr=0.1)}
    return Workload(**(usual | {"loss_fn": lambda model, batch: batch, "batch": lambda step: step} | parts))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"model": None}, "its model is None: give a torch.nn.Module"),
        ({"model": torch.nn.Linear}, "its model is the class Linear"),
        ({"optimizers": None}, "its optimizers are None: give a torch.optim.Optimizer"),
        ({"optimizers": torch.optim.SGD}, "its optimizers are the class SGD"),
        ({"optimizers": []}, "it has no optimizers"),
        ({"optimizers": [3]}, "among its optimizers is an object of type int"),
        (
            {"optimizers": torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])},
            "LBFGS computes the loss several times",
        ),
        ({"loss_fn": 3}, r"its loss_fn is an object of type int: give a function loss_fn\(model, batch\)"),
        ({"batch": [1]}, r"its batch is an object of type list: give a function batch\(step\)"),
        ({"evaluate": 3}, r"its evaluate is an object of type int: give a function evaluate\(model\), or None"),
    ],
    ids=[
        "model",
        "class",
        "none",
        "class of optimizers",
        "no optimizers",
        "number",
        "lbfgs",
        "loss",
        "batch",
        "evaluate",
    ],
)
def test_a_part_that_is_something_else_is_named(parts: dict[str, Any], says: str) -> None:
    check_parts(_given())
    with pytest.raises(ConfigurationError, match=says):
        check_parts(_given(**parts), "own.py:make")


def test_what_is_there_and_no_function_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("notfun = 5\n")
    with pytest.raises(ConfigurationError, match=r"'notfun' in .* is an object of type int and no function"):
        load(f"{tmp_path / 'own.py'}:notfun")
    with pytest.raises(ConfigurationError, match="has no function 'other'"):
        load(f"{tmp_path / 'own.py'}:other")
