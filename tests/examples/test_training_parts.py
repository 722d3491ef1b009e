"""The model, the text and the faults of the examples, in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitwitness.errors import ConfigurationError
from bitwitness.examples.faults import DAMAGE, WIDTH, FaultKind, line
from bitwitness.examples.gpt import GPT, GPTConfig, compute_loss
from bitwitness.examples.plan import IN_MEMORY, Settings
from bitwitness.examples.text import Corpus, standard_library_text
from bitwitness.faults import grammar
from bitwitness.faults.injector import Injector
from bitwitness.faults.record import Strike
from bitwitness.faults.spec import MEMORY_TARGETS


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


def trained(fault: str, node: str, steps: int = 4) -> tuple[list[Tensor], list[Strike]]:
    """Each parameter after a short training of one rank on a node, and the strikes of the fault."""
    torch.manual_seed(0)
    corpus = Corpus.standard_library(50_000)
    model = GPT(GPTConfig(width=WIDTH, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Injector(fault, model, optimizer, node=node) as injector:
        for step in range(steps):
            compute_loss(model, corpus.batch(0, step, 0, 0, size=2, length=16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], injector.strikes


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("once", [False, True])
def test_faults_strike_where_and_when_they_should(kind: FaultKind, once: bool) -> None:
    fault = line(kind, 0, "node-0", 2, once or kind in IN_MEMORY)
    healthy, none = trained(fault, "node-1")
    assert not none
    hit, strikes = trained(fault, "node-0")
    assert not all(map(torch.equal, healthy, hit))
    gone = once or kind in (*IN_MEMORY, "nan")  # what is NaN after step 2 stays as it is
    assert [strike.site.step for strike in strikes] == ([2] if gone else [2, 3])
    assert strikes[0].site.name in DAMAGE[kind].words
    elements = {"matmul": 2 * 16, "gradient": 4 * WIDTH * WIDTH}.get(kind, 1)
    assert 0.9 * elements <= strikes[0].count <= elements  # a zero stays one
    assert ("nan" in strikes[0].example["after"]) == (kind == "nan")


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("transient", [False, True])
def test_what_the_demo_shows_is_the_grammar(kind: FaultKind, transient: bool) -> None:
    settings = Settings(fault=kind, transient=transient and kind not in IN_MEMORY)
    fault = grammar.parse(settings.fault_line)
    assert str(fault) == settings.fault_line
    assert (fault.where.rank, fault.where.node, fault.when.first) == (settings.rank, settings.node, settings.step)
    assert (fault.persist.kind == "once") is settings.strikes_once
    assert (fault.where.target in MEMORY_TARGETS) is (kind in IN_MEMORY)
    assert settings.fault_words


def test_nothing_wrong_is_no_line() -> None:
    settings = Settings(fault="none")
    assert settings.fault_line == settings.fault_words == ""
