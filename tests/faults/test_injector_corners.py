"""Where an injector could hit the wrong thing, leave damage behind, or silently do nothing: each was seen to happen once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bitwitness import ConfigurationError, RunFilesError
from bitwitness.faults import FaultDidNotLand, Injector


def small(*, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 1))


def batch(step: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    faults: Any,
    steps: int = 3,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    between: Callable[[int], object] = lambda step: None,
    **settings: Any,
) -> Injector:
    optimizer = make(model.parameters())
    with Injector(faults, model, optimizer, **settings) as injector:
        for step in range(steps):
            model(batch(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            between(step)
    return injector


def weights(model: nn.Module) -> list[bytes]:
    return [one.detach().numpy().tobytes() for one in model.parameters()]


# What must not be hit instead --------------------------------------------------------------------------------------------


def test_a_moment_that_does_not_exist_yet_is_not_its_parameter() -> None:
    model = small()
    with pytest.raises(FaultDidNotLand, match=r"kept no exp_avg of 0\.weight yet"):
        train(model, "during=update exp_avg:0.weight @ step=0 : index=3 -> set=100.0")
    hit = train(small(), "during=update exp_avg:0.weight @ step=1 : index=3 -> set=100.0")
    assert hit.strikes[0].example["after"].startswith("100.0")


def test_an_evaluation_is_not_training() -> None:
    model = small()

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(batch(9)[:2])
        model.train()

    injector = train(model, "fwd_out:0 @ step=1 : n=1 -> bit=26", between=evaluate)
    assert [tuple(one.shape) for one in injector.strikes] == [(6, 8)]
    assert [one.site.step for one in injector.strikes] == [1]


def test_training_with_frozen_statistics_is_training() -> None:
    assert train(small().eval(), "rng:torch @ step=1 : all -> random").struck == 1


class Stored(nn.Module):
    """Returns what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8, 4))
        self.cached = torch.ones(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:6]


class Kept(Stored):
    def forward(self, x: Tensor) -> Tensor:
        return self.cached


class Adds(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(x + self.part(x))
        return made


@pytest.mark.parametrize("part", [Stored, Kept])
def test_an_output_that_somebody_keeps_is_not_damaged_for_good(part: type[Stored]) -> None:
    model = Adds(part())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)
    with Injector("fwd_out:part @ step=0 : n=1 -> scale=9.0", model, optimizer) as injector:
        model(batch()).sum().backward()
        optimizer.step()
    assert injector.struck == 1
    inside: Any = model.part
    assert torch.equal(inside.table, torch.ones(8, 4))
    assert torch.equal(inside.cached, torch.ones(6, 4))


def test_overlapping_outputs_change_as_many_elements_as_are_said() -> None:
    class Windows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1.0).unfold(1, 2, 1)

    windows = Windows()
    model = nn.Sequential(nn.Linear(4, 4), windows)
    seen: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Injector("fwd_out:1 @ step=0 : index=1 -> set=50.0", model, optimizer) as injector:
        seen.append(model(batch()).detach())
    assert int((seen[0] == 50.0).sum()) == injector.strikes[0].count == 1


# What must be as it was ----------------------------------------------------------------------------------------------------


def test_two_wrong_operands_of_one_module() -> None:
    model = small()
    before = weights(model)
    faults = "fwd_w:0 @ step=0 : index=0 -> bit=24 & fwd_w:0 @ step=0 : index=1 -> bit=24"
    injector = train(model, faults, steps=1, make=lambda params: torch.optim.SGD(params, lr=0.0))
    assert injector.struck == 2
    assert weights(model) == before


class Again(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        made = x @ self.weight
        return self(made, depth + 1) if depth < 2 else made


def test_an_operand_of_a_module_that_calls_itself() -> None:
    model = nn.Sequential(Again())
    train(
        model, "fwd_w:0 @ step=0 : index=3 -> set=9.0 ; permanent", make=lambda params: torch.optim.SGD(params, lr=0.0)
    )
    (weight,) = model.parameters()
    assert torch.equal(weight, torch.ones(4, 4))


def test_an_operand_is_right_again_however_a_forward_is_left() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(Interrupted(4, 1))
    before = weights(model)
    with pytest.raises(KeyboardInterrupt), Injector("fwd_w:0 @ step=0 : n=1 -> bit=30", model):
        model(batch())
    assert weights(model) == before


def test_an_operand_is_right_again_where_the_record_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = small()
    before = weights(model)
    with pytest.raises(RunFilesError):
        train(model, "fwd_w:0 @ step=0 : n=1 -> bit=30", record=tmp_path / "file" / "record.jsonl")
    assert weights(model) == before


def test_an_operand_under_autocast_is_wrong_for_one_forward_only() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = model(batch())
        with Injector("fwd_w:0 @ step=0 micro=1 : all -> scale=4.0", model) as injector:
            outputs = [model(batch()) for _ in range(3)]
    assert injector.struck == 1
    assert [torch.equal(one, right) for one in outputs] == [True, False, True]


# What must not pass for nothing -------------------------------------------------------------------------------------------


def test_a_computed_weight_is_refused() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 1)))
    with pytest.raises(ConfigurationError, match="computed at each use"):
        train(model, "fwd_w:0 @ step=0 : n=1 -> bit=26")
    with pytest.raises(ConfigurationError, match="does not exist"):
        train(small(), "fwd_w:1 @ step=0 : n=1 -> bit=26 ; intermittent=1.0")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fwd_out:0 @ p=0.9 micro=5 : n=1 -> bit=3", "never reached"),
        ("fwd_out:0 @ every=1 micro=5 : n=1 -> bit=3 ; intermittent=0.9", "never reached"),
        ("fwd_out:0 @ p=0.9 : all -> bit=3 ; permanent if=1e30..1e31", "no element"),
        ("fwd_out:0 @ every=1 : all -> bit=3 ; intermittent=0.9 if=1e30..1e31", "no element"),
    ],
)
def test_chance_excuses_no_site_that_never_came(line: str, words: str) -> None:
    with pytest.raises(FaultDidNotLand, match=words):
        train(small(), line, steps=6)


def test_what_chance_did_not_take_is_no_error() -> None:
    assert not train(small(), "fwd_out:0 @ p=1e-12 : n=1 -> bit=3").struck
    assert not train(small(), "fwd_out:0 @ every=1 : n=1 -> bit=3 ; intermittent=1e-12").struck


@pytest.mark.parametrize(
    "line",
    [
        "each param:* @ step=1 : n=1 -> bit=3",
        "each grad_w:* @ step=1 : n=1 -> sign",
        "each fwd_out:[02] @ step=1 : n=1 -> bit=9",
    ],
)
def test_each_with_once_is_once_at_each(line: str) -> None:
    injector = train(small(), line)
    names = [one.site.name for one in injector.strikes]
    assert len(names) == len(set(names)) == (2 if "fwd_out" in line else 4)
    assert {one.site.step for one in injector.strikes} == {1}


# Jobs of other shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "grad_out:0 @ step=1 : n=1 -> scale=4.0",
        "grad_in:1 @ step=1 : all -> scale=4.0",
        "fwd_in:1 @ step=1 : all -> scale=4.0",
        "fwd_out:1 @ step=1 : all -> scale=4.0",
    ],
)
def test_activations_in_place(line: str) -> None:
    hit, clean = small(inplace=True), small(inplace=True)
    assert train(hit, line).struck == 1
    train(clean, ())
    assert weights(hit) != weights(clean)


def test_a_model_that_is_compiled_in_place() -> None:
    hit, clean = small(), small()
    for model in (hit, clean):
        model.compile(backend="eager")
    injector = train(hit, "during=train param:0.weight @ step=1 : largest -> sign & rng:torch @ step=2 : all -> random")
    assert injector.struck == 2
    train(clean, ())
    assert weights(hit) != weights(clean)
    assert hit._compiled_call_impl is not None


def test_several_optimizers_and_one_that_comes_later() -> None:
    model = small()
    first = torch.optim.AdamW(model[0].parameters())
    lines = "during=update param:0.bias @ step=1 : n=1 -> sign & exp_avg:2.weight @ step=2 : n=1 -> sign"
    with Injector(lines, model, first) as injector:
        later = torch.optim.AdamW(model[2].parameters())
        injector.watch(later)
        for step in range(4):
            model(batch(step)).square().sum().backward()
            first.step()
            if step % 2 == 0:
                later.step()
            first.zero_grad()
            later.zero_grad()
    assert [(one.site.step, one.site.target) for one in injector.strikes] == [(1, "param"), (2, "exp_avg")]


def test_recomputing_the_whole_model_is_no_second_micro_batch() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with Injector("fwd_out:0 @ every=1 : n=1 -> bit=9 ; permanent", model, optimizer) as injector:
        made: Any = checkpoint(model, batch(), use_reentrant=False)
        made.sum().backward()
    assert [(one.site.step, one.site.micro, one.site.call) for one in injector.strikes] == [(0, 0, 0), (0, 0, 1)]


def test_inputs_of_a_loop_that_hands_in_no_batch() -> None:
    injector = train(small(), "input @ step=1 : n=1 -> bit=22")
    assert [(one.site.step, one.site.name) for one in injector.strikes] == [(1, "0")]


def test_accumulation_counts_micro_batches() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with Injector("fwd_out:0 @ step=1 micro=1 : n=1 -> bit=9", model, optimizer) as injector:
        for step in range(3):
            for micro in range(2):
                model(batch(2 * step + micro)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(one.site.step, one.site.micro) for one in injector.strikes] == [(1, 1)]


def test_an_optimizer_that_comes_after_all() -> None:
    model = small()
    with Injector(
        "param:0.weight @ step=0 : largest -> sign & exp_avg @ step=1 : n=1 -> sign", model, None
    ) as injector:
        model(batch()).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        injector.watch(optimizer)
        optimizer.step()
        model(batch(1)).sum().backward()
        optimizer.step()
    assert [(one.site.step, one.site.target) for one in injector.strikes] == [(0, "param"), (1, "exp_avg")]
    with (
        pytest.raises(ConfigurationError, match="keeps no exp_avg"),
        Injector("exp_avg @ step=1 : n=1 -> sign", model, None) as injector,
    ):
        injector.watch(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="give the injector the optimizers"):
        train_nothing(model)


def train_nothing(model: nn.Module) -> None:
    with Injector("param @ step=1 : n=1 -> sign", model):
        pass


def test_once_at_each_name_is_once_in_a_run() -> None:
    line = "each param:* @ step=0 : n=1 -> bit=3"
    injector = train(small(), line, landed={0: ("0.weight", "0.bias")})
    assert sorted(one.site.name for one in injector.strikes) == ["2.bias", "2.weight"]


def test_moments_of_several_optimizers() -> None:
    model = small()
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[2].parameters())]
    lines = "exp_avg:2.weight @ step=0 : n=1 -> sign & each buffer @ step=1 : n=1 -> bit=20 ; permanent"
    model.register_buffer("seen", torch.ones(3))
    with Injector(lines, model, optimizers) as injector:
        for step in range(2):
            model(batch(step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [(one.site.step, one.site.name) for one in injector.strikes] == [(0, "2.weight"), (1, "seen")]


def test_a_part_that_is_evaluated_by_itself_is_not_training() -> None:
    model = nn.Sequential(small())

    def evaluate(step: int) -> None:
        with torch.no_grad():
            model[0](batch(9)[:2])

    injector = train(model, "fwd_out:0.0 @ step=1 : n=1 -> bit=26", between=evaluate)
    assert [tuple(one.shape) for one in injector.strikes] == [(6, 8)]


def test_each_name_has_its_own_chance() -> None:
    injector = train(small(), "each param:* @ every=1 : n=1 -> bit=3 ; intermittent=0.5", steps=12)
    together = [sum(one.site.step == step for one in injector.strikes) for step in range(12)]
    assert set(together) - {0, 4}


def test_work_that_fails_leaves_no_trace() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(ConfigurationError),
        Injector("fwd_out:0 @ step=0 : index=500 -> sign", model, optimizer) as injector,
    ):
        model(batch())
    assert injector.moment.work == "train"


def test_injectors_that_do_not_listen_may_be_beside_each_other() -> None:
    one, other = small(), small()
    with (
        Injector("fwd_out:0 @ step=0 : n=1 -> bit=any", one, listens=False) as first,
        Injector("fwd_out:2 @ step=0 : n=1 -> bit=any", other, listens=False) as second,
    ):
        one(batch())
        assert (first.struck, second.struck) == (1, 0)
        other(batch())
        assert (first.struck, second.struck) == (1, 1)


def test_an_injector_that_does_not_listen_refuses_what_is_no_models_own() -> None:
    with (
        pytest.raises(ConfigurationError, match="only what belongs to one model"),
        Injector("loss @ step=0 : n=1 -> bit=any", small(), listens=False),
    ):
        pass
