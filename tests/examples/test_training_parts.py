"""The model, the text and the faults of the examples, in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.examples.faults import Fault, FaultKind, Injection
from bitwitness.examples.gpt import GPT, GPTConfig, compute_loss
from bitwitness.examples.text import Corpus, standard_library_text
from bitwitness.mutate import Landed

CONFIG = GPTConfig(width=32, context=16)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.standard_library(200_000)


def test_the_text_is_the_standard_library() -> None:
    text = standard_library_text(100_000)
    assert len(text) == 100_000
    assert b"import " in text
    assert text == standard_library_text(200_000)[:100_000]


def test_files_come_in_one_order_and_foreign_ones_not_at_all(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "a/z.py", "a/test/t.py", "site-packages/p.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name.ljust(5_000))
    text = standard_library_text(15_000, tmp_path).decode()
    assert text.split() == ["a.py", "a/z.py", "b.py"]
    with pytest.raises(ConfigurationError, match="holds 5000 bytes of Python source"):
        standard_library_text(folder=tmp_path / "site-packages")


def test_a_batch_is_a_function_of_its_key(corpus: Corpus) -> None:
    state = torch.get_rng_state()
    batch = corpus.batch(0, 3, 1, 0, size=4, length=16)
    assert torch.equal(batch, corpus.batch(0, 3, 1, 0, size=4, length=16))
    assert torch.equal(torch.get_rng_state(), state)
    assert (batch.shape, batch.dtype) == ((4, 17), torch.int64)
    others = [(1, 3, 1, 0), (0, 4, 1, 0), (0, 3, 2, 0), (0, 3, 1, 1)]
    assert not any(torch.equal(batch, corpus.batch(*key, size=4, length=16)) for key in others)
    assert not torch.equal(batch, corpus.validation_batch(0, 3, 1, 0, size=4, length=16))


def test_training_and_validation_share_no_text() -> None:
    corpus = Corpus.of(bytes(range(100)))
    assert corpus.training.tolist() == list(range(90))
    assert corpus.validation.tolist() == list(range(90, 100))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_learns_and_looks_only_back(corpus: Corpus, tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, context=16, tied=tied))
    assert (model.head.weight is model.embedding.weight) is tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(15):
        loss = compute_loss(model, corpus.batch(0, step, 0, 0, size=8, length=16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < losses[0] - 1
    model.eval()
    tokens = corpus.batch(1, size=2, length=15)
    changed = tokens.clone()
    changed[:, 9] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        GPTConfig(width=30, heads=4)


def trained(fault: Fault | None, steps: int = 4) -> tuple[list[Tensor], list[tuple[int, str, Landed]]]:
    """Each parameter after a short training, and the strikes of the fault with their steps."""
    torch.manual_seed(0)
    corpus = Corpus.standard_library(50_000)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    strikes: list[tuple[int, str, Landed]] = []
    at = -1
    injection = Injection(
        fault, "node-0/cpu-0", model, optimizer, lambda where, landed: strikes.append((at, where, landed))
    )
    for step in range(steps):
        at = step
        injection.begin(step)
        compute_loss(model, corpus.batch(0, step, 0, 0, size=2, length=16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    injection.remove()
    compute_loss(model, corpus.batch(0, 99, 0, 0, size=2, length=16)).backward()
    return [parameter.detach() for parameter in model.parameters()], strikes


@pytest.mark.parametrize("kind", ["matmul", "gradient", "nan", "weight", "moment"])
@pytest.mark.parametrize("transient", [False, True])
def test_faults_strike_where_and_when_they_should(kind: FaultKind, transient: bool) -> None:
    healthy, none = trained(None)
    assert not none
    elsewhere, none = trained(Fault(kind, "node-0/cpu-1", 2, transient))
    assert not none
    assert all(map(torch.equal, healthy, elsewhere))
    hit, strikes = trained(Fault(kind, "node-0/cpu-0", 2, transient))
    once = transient or kind in ("weight", "moment", "nan")  # what is NaN after step 2 stays as it is
    assert [step for step, _, _ in strikes] == ([2] if once else [2, 3])
    assert not all(map(torch.equal, healthy, hit))
    _, where, landed = strikes[0]
    assert {"matmul": "head", "moment": "exp_avg_sq"}.get(kind, "blocks.1.mlp.up.weight") in where
    assert landed.changed >= 1
    assert ("nan" in landed.after) == (kind == "nan")


def test_an_unknown_fault() -> None:
    with pytest.raises(ValueError, match="no such fault"):
        Fault("other", "node-0/cpu-0", 0)  # type: ignore[arg-type]
